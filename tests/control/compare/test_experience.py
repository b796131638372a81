"""What our own rentals say of a market."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.fixtures.market import H100
from torpor.control.compare.experience import LEAST_BYTES, RentalHistory
from torpor.control.rental.records import Rental
from torpor.shared.values import Label, WorkspaceName

HERE = str(H100.provider)
ELSEWHERE = msgspec.structs.replace(H100, provider="runpod://2")
A100 = msgspec.structs.replace(H100, gpu=None, gpu_count=0)


def rental(**changes: Any) -> Rental:
    known: dict[str, Any] = {
        "label": Label("me", WorkspaceName("demo"), "r"),
        "provider": HERE,
        "state": "ended",
        "created_unix": 1000.0,
        "gpu": "H100 SXM",
        "gpu_count": 2,
    }
    return Rental(**{**known, **changes})


def test_start_times_are_ranks_of_what_was_measured() -> None:
    answers = [1000.0 + seconds for seconds in (10, 50, 20, 40, 30, 60, 70, 80, 90, 100)]
    (found, _) = RentalHistory([rental(answered_unix=unix) for unix in answers]).of(H100)
    assert (found.start_s(0.5), found.start_s(0.9), found.attempts) == (50, 90, 10)
    (found, _) = RentalHistory([rental(answered_unix=1010.0)]).of(H100)
    assert (found.start_s(0.5), found.start_s(0.9)) == (10, 10)
    queued = rental(queued_unix=4000.0, answered_unix=4030.0)  # it begins where the queue ends
    assert RentalHistory([queued]).of(H100)[0].start_s(0.5) == 30


def test_only_attempts_whose_outcome_is_known_count() -> None:
    """Records of older versions do not say whether SSH ever answered."""
    (found, _) = RentalHistory([rental(), rental(failed=True), rental(answered_unix=1001.0)]).of(
        H100
    )
    assert (found.failed, found.attempts) == (1, 2)
    (none, _) = RentalHistory([rental()]).of(H100)
    assert (none.attempts, none.start_s(0.5), none.link_mb_s) == (0, None, None)


def test_a_link_is_the_median_of_restores_that_are_big_enough() -> None:
    fetched = [(10, 1.0), (20, 1.0), (90, 1.0)]
    rentals = [rental(fetched_bytes=mb * 10**6, fetched_s=s) for mb, s in fetched]
    rentals += [rental(fetched_bytes=LEAST_BYTES - 1, fetched_s=0.001), rental(fetched_s=0.0)]
    (found, _) = RentalHistory(rentals).of(H100)
    assert found.link_mb_s == pytest.approx(20)
    assert len(found.links_mb_s) == 3


def test_the_closest_experience_comes_first_and_old_rentals_do_not_count() -> None:
    past = RentalHistory([rental(answered_unix=1030.0), rental(gpu="A10", failed=True)], 900.0)
    assert [(known.attempts, known.of) for known in past.of(H100)] == [
        (1, "with this GPU here"),
        (2, "at this provider"),
    ]
    assert [known.attempts for known in past.of(A100)] == [2]
    assert past.of(ELSEWHERE) == []
    assert RentalHistory([rental(answered_unix=1030.0)], 1000.5).of(H100) == []
