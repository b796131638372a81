"""One row for each offer: arithmetic that a person can repeat."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.fixtures.market import H100, Market
from torpor.control.compare.choices import (
    COLUMNS,
    OfferChoice,
    OfferComparison,
    Terms,
    compared,
    frame,
)
from torpor.control.compare.experience import RentalHistory
from torpor.control.providers.lambda_cloud import LambdaProvider
from torpor.control.providers.offers import Offer
from torpor.control.providers.provider import Abilities
from torpor.control.providers.vast import VastProvider
from torpor.control.rental.records import Rental
from torpor.control.store_prices import StorePrice
from torpor.shared.values import GIB, Label, Want, WorkspaceName

VAST: Abilities = VastProvider.abilities
LAMBDA: Abilities = LambdaProvider.abilities
STORED = 10 * 10**9
TERMS = Terms(
    want=Want(spot="allowed", disk_gib=100),
    hours=8.0,
    now_unix=1_000_060.0,
    snapshot="20261120T234913Z-1f0c9ab2",
    stored_bytes=STORED,
    store_price=StorePrice(0.02, 0.05, "2026-08-03", "https://x"),
)


def offer(id: str, usd_h: float, **changes: Any) -> Offer:
    known: dict[str, Any] = {
        "reliability": None, "price_usd_h": usd_h, "id": id, "priced_unix": 1_000_000.0,
    }  # fmt: skip
    return msgspec.structs.replace(H100, **{**known, **changes})


def sold(
    offers: list[Offer], able: Abilities = VAST, rentals: list[Rental] | None = None, **terms: Any
) -> OfferComparison:
    market = Market("vast:1")
    market.abilities = able
    terms_now = msgspec.structs.replace(TERMS, **terms)
    return compared([(market, offers)], [], RentalHistory(rentals or []), terms_now)


def choice(
    able: Abilities = VAST, rentals: list[Rental] | None = None, **known: Any
) -> OfferChoice:
    """Of one offer for 2 $ an hour. ``known``: of it, or of the terms."""
    terms = {name: known.pop(name) for name in Terms.__struct_fields__ if name in known}
    (found,) = sold([offer("a", known.pop("usd_h", 2.0), **known)], able, rentals, **terms).fitting
    return found


def test_a_session_is_what_is_billed_with_the_traffic_of_a_restore() -> None:
    traffic = 0.01 * STORED / GIB + 0.05 * 10  # the market's and the store's
    assert choice(traffic_usd_gib=0.01).session_usd == pytest.approx(8 * 2.0 + traffic)
    hourly = msgspec.structs.replace(VAST, billing_s=3600.0)
    slow = msgspec.structs.replace(hourly, ending_s=43_200.0)
    for able, hours, usd_h, usd in (
        (hourly, 7.1, 2.0, 8 * 2.0),
        (slow, 7.1, 2.0, 20 * 2.0),
        (LAMBDA, 0.021, 60.0, 2.0),  # 75.6 s are two minutes
    ):
        found = choice(able, hours=hours, usd_h=usd_h, stored_bytes=0)
        assert found.session_usd == pytest.approx(usd)


def test_an_offer_without_a_price_comes_last() -> None:
    found = sold([offer("free", 0.0), offer("dear", 99.0)]).fitting
    assert [ranked.offer.id for ranked in found] == ["dear", "free"]
    assert (found[1].session_usd, found[1].expected_usd) == (None, None)


def test_hibernating_and_stopping_cost_a_month() -> None:
    assert choice().hibernated_usd_month == pytest.approx(0.20)
    assert (VAST.stop_keeps, choice().stopped_usd_month) == ("disk", None)  # each host its own
    disk = msgspec.structs.replace(VAST, stopped_usd_gib_month=0.1)
    assert choice(disk).stopped_usd_month == pytest.approx(10.0)
    assert choice(disk, image_gib=50).stopped_usd_month == pytest.approx(15.0)
    found = choice(msgspec.structs.replace(disk, stop_keeps="nothing"), store_price=None)
    assert (found.stopped_usd_month, found.hibernated_usd_month) == (None, None)


def test_times_are_measured_or_stated_or_assumed() -> None:
    rental = Rental(
        label=Label("me", WorkspaceName("demo"), "r"), provider=H100.provider, state="ended",
        created_unix=100.0, gpu="H100 SXM", gpu_count=2, answered_unix=142.0,
        fetched_bytes=STORED, fetched_s=50.0,
    )  # fmt: skip
    found = choice(rentals=[rental], link_mbit_s=800.0)
    assert (found.start_p50_s, found.start_p90_s, found.starts) == (42.0, 42.0, 1)
    assert (found.restore_s, found.work_s) == (50.0, 92.0)
    assert found.link_from == "measured, n = 1, with this GPU here"
    found = choice(link_mbit_s=800.0)
    assert (found.start_p50_s, found.starts, found.restore_s) == (VAST.ready_s, 0, 100.0)
    assert found.link_from == "stated by the market"
    found = choice()
    assert (found.restore_s, found.work_s, found.link_from) == (None, None, "not known")
    found = choice(stored_bytes=0)
    assert (found.restore_s, found.work_s) == (0.0, VAST.ready_s)
    assert found.price_age_s == 60.0
    found = choice(msgspec.structs.replace(VAST, queue_s=3600.0))
    assert (found.start_p50_s, found.start_p90_s) == (3600.0 + VAST.ready_s,) * 2


def test_the_ranking_of_ten_offers() -> None:
    """By cost over reliability; of equal ones by the time until work can begin."""
    offers = [
        offer("a", 0.40, reliability=0.99),  # 3.20 / 0.99 = 3.232
        offer("b", 0.31, reliability=0.71),  # 2.48 / 0.71 = 3.493
        offer("c", 0.34),  # 2.72
        offer("d", 0.20, spot=True, reliability=0.95),  # 1.60 / 0.95 = 1.684
        offer("e", 2.10, traffic_usd_gib=0.01),  # 16.80 + 0.093 = 16.893
        offer("f", 1.99),  # 15.92
        offer("g", 2.49, link_mbit_s=800.0),  # 19.92, work after 100 s of restore
        offer("h", 2.49, link_mbit_s=8000.0),  # 19.92, work after 10 s of restore
        offer("i", 2.49),  # 19.92, nobody knows when
        offer("j", 0.33, reliability=0.97),  # 2.64 / 0.97 = 2.722
    ]
    found = sold(offers, store_price=None).fitting
    assert "".join(ranked.offer.id for ranked in found) == "dcjabfehgi"
    assert [ranked.expected_usd for ranked in found] == pytest.approx(
        [1.684, 2.72, 2.722, 3.232, 3.493, 15.92, 16.893, 19.92, 19.92, 19.92], abs=0.0006
    )


def test_what_does_not_fit_is_there_with_the_reason() -> None:
    wanted = Want(gpu="A10", spot="allowed")
    found = sold([offer("a", 2.0), offer("b", 1.0)], want=wanted)
    assert found.fitting == []
    why = "its GPU is H100 SXM, A10 is wanted"
    assert [(no.offer.id, no.rejected) for no in found.rejected] == [("b", why), ("a", why)]


def test_the_table_has_a_row_for_each_offer() -> None:
    offers = [offer("a", 2.0, cores=8.0, ram_gib=64.0), offer("b", 9.0)]
    table = frame(sold(offers, want=Want(max_price_usd_h=5)))
    assert list(table.columns) == list(COLUMNS)
    assert list(table.offer) == ["a", "b"]
    assert (table.cores[0], table.ram_gib[0]) == (8.0, 64.0)
    assert table[["cores", "ram_gib"]].isna().to_numpy()[1].all()
    assert list(table.rejected) == ["", "it costs 9 $/h, the limit is 5 $/h"]
    assert list(frame(sold([])).columns) == list(COLUMNS)


@pytest.mark.parametrize(
    ("kind", "privileged", "said"),
    [("vm", True, "claimed"), ("pod", True, "claimed"), ("vm", False, "unknown"),
     ("container", False, "no"), ("folder", False, "unknown")],
)  # fmt: skip
def test_a_checkpoint_needs_root_that_may_dump_processes(
    kind: str, privileged: bool, said: str
) -> None:
    able = msgspec.structs.replace(VAST, kind=kind, privileged=privileged)
    assert able.checkpoint == said
