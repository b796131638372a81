"""What samples add to the record of an attempt."""

from __future__ import annotations

import msgspec
import pytest

from tests.fixtures.activity import BOOT, NOW_S, activity, quiet, sample
from torpor.control.jobs.gpu_use import with_samples
from torpor.control.jobs.records import Attempt
from torpor.shared.values import MachineId
from torpor.shared.wire.activity import UNKNOWN

_ATTEMPT = Attempt(
    number=1, machine=MachineId("m"), provider="vast:1", rental="r", spot=False, price_usd_h=1.0,
    began_unix=0.0, seen_unix=0.0,
)  # fmt: skip


def test_each_second_counts_once_over_many_looks() -> None:
    samples = [*quiet(120, gpu=10, gpu_mib=900)[:60], *quiet(60, gpu=70, gpu_mib=500)]
    first = activity(samples[:60], now_s=NOW_S - 60)
    found = with_samples(with_samples(_ATTEMPT, first, 60), activity(samples), 60)
    assert (found.gpu_s, found.gpu_percent, found.gpu_mib) == (120, pytest.approx(40), 900)


def test_what_says_nothing_of_the_attempt_is_left_out() -> None:
    n = int(NOW_S)
    samples = [
        sample(n - 90, gpu=99),  # the sampler died: its newest sample comes whatever its age
        sample(n - 2, gpu=99, boot=BOOT[::-1].replace("b", "c")),
        sample(n - 1, gpu=UNKNOWN),
    ]
    assert with_samples(_ATTEMPT, activity(samples), 60) == _ATTEMPT


def test_a_record_of_an_older_version_was_not_measured() -> None:
    known = msgspec.to_builtins(_ATTEMPT)
    older = {name: known[name] for name in known if not name.startswith("gpu_")}
    assert msgspec.convert(older, Attempt) == _ATTEMPT and _ATTEMPT.gpu_mib == UNKNOWN
