"""What records of rentals say about reservations."""

from __future__ import annotations

from typing import Any

import pytest

from torpor.control.money.advice import WINDOW_H, steady
from torpor.control.rental.records import Rental
from torpor.shared.values import Label, WorkspaceName

_NOW = 1_780_000_000.0


def _rental(began_h: float, ended_h: float, usd_h: float = 2.0, **changes: Any) -> Rental:
    """From and until so many hours ago."""
    ended = _NOW - ended_h * 3600
    fields: dict[str, Any] = {"gpu": "H100 SXM", "gpu_count": 1, "machine": "m", "state": "ended"}
    fields |= {"seen_unix": ended, "ended_unix": ended} | changes
    return Rental(
        label=Label("me", WorkspaceName("demo"), "0" * 16),
        provider="vast:1",
        created_unix=_NOW - began_h * 3600,
        price_usd_h=usd_h,
        **fields,
    )


def test_use_one_after_the_other_is_one_machine_and_use_at_once_are_several() -> None:
    whole = [_rental(720, 360, 3.0), _rental(360, 0, 1.0)]
    beside = _rental(600, 0)
    first, second = steady([*whole, beside], _NOW)
    assert (first.number, first.us / 3.6e9) == (1, 720.0)
    assert first.usd == (360 * 3 + 360 * 2) * 1_000_000  # the dearest at each moment
    assert (second.number, second.us / 3.6e9) == (2, 600.0)
    assert second.usd == (240 * 2 + 360 * 1) * 1_000_000
    assert first.below_usd_h == pytest.approx(1800 / 720)


def test_only_the_window_counts_and_only_what_is_certain() -> None:
    (found,) = steady([_rental(5000, 0, state="handed over", ended_unix=None)], _NOW)
    assert found.us / 3.6e9 == WINDOW_H
    assert found.below_usd_h == 2.0
    unseen = _rental(5000, 500, state="handed over", ended_unix=None)
    assert steady([unseen], _NOW) == []


@pytest.mark.parametrize(
    "rental",
    [_rental(200, 0), _rental(720, 0, 0.0), _rental(720, 0, gpu=""), _rental(720, 0, machine=None)],
    ids=["seldom", "price unknown", "no GPU", "never made"],
)
def test_what_no_reservation_would_replace_is_left_out(rental: Rental) -> None:
    assert steady([rental], _NOW) == []


def test_kinds_are_apart() -> None:
    kinds = [_rental(720, 360), _rental(360, 0, gpu="A100 PCIE")]
    assert [one.gpu for one in steady(kinds, _NOW)] == ["1 x A100 PCIE", "1 x H100 SXM"]
