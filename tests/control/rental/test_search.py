"""Offers of several markets: asked at once, filtered, ranked, refused with a reason."""

from __future__ import annotations

import threading
import time
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.fixtures.market import H100, Market
from tests.fixtures.waiting import PATIENCE_S
from torpor.control.rental import markets
from torpor.control.rental.canaries import Canary, CanaryResults
from torpor.control.rental.markets import Markets, ask_all
from torpor.control.rental.search import billed_s, find_offers, fit
from torpor.shared.errors import (
    InvalidInput,
    NoOffer,
    ProviderDenied,
    ProviderUnavailable,
    Unforeseen,
)
from torpor.shared.values import GIB, FrozenPrograms, Want

replace = msgspec.structs.replace


def _market(identity: str, *prices: float, **changes: Any) -> Market:
    market = Market(identity)
    market.on_sale = [
        replace(H100, id=f"{identity}-{price:g}", provider=identity, price_usd_h=price, **changes)
        for price in prices
    ]
    return market


def _canary(**changes: Any) -> Canary:
    known = {"gpu": "H100 SXM", "gpu_count": 2, "region": "US", "flown_unix": time.time()}
    return Canary(**known | changes)


def test_the_cheapest_of_all_markets_comes_first_or_the_first_of_the_user_s_order() -> None:
    markets = [_market("a", 3, 1), _market("b", 2)]
    for rank, ids in (("price", ["a-1", "b-2", "a-3"]), ("order", ["a-1", "a-3", "b-2"])):
        found = find_offers(markets, Want(rank=rank))
        assert [offer.id for offer in found.fitting] == ids


def test_what_may_fail_and_what_its_traffic_costs_count() -> None:
    frail = _market("frail", 1.0, reliability=0.5)
    sound = _market("sound", 1.2, reliability=0.99)
    assert find_offers([frail, sound], Want()).fitting[0].provider == "sound"
    dear = _market("dear", 1.0, traffic_usd_gib=0.1)
    found = find_offers([dear, sound], Want(), restored_bytes=100 * GIB)
    assert found.fitting[0].provider == "sound"
    assert find_offers([dear, sound], Want(), restored_bytes=0).fitting[0].provider == "dear"


def test_a_host_of_many_owners_that_states_nothing_counts_as_one_that_may_fail() -> None:
    private = _market("private", 1.0, reliability=None, many_owners=True)
    centre = _market("centre", 1.05, reliability=None)
    assert find_offers([private, centre], Want()).fitting[0].provider == "centre"
    never = _market("never", 0.9, reliability=0.0)
    assert find_offers([never, private], Want()).fitting[0].provider == "private"


def test_what_is_billed_after_a_machine_s_end_counts() -> None:
    slow, quick = _market("slow", 1.0), _market("quick", 2.0)
    slow.abilities = replace(slow.abilities, billing_s=3600.0, ending_s=43_200.0)
    assert find_offers([slow, quick], Want()).fitting[0].provider == "quick"  # 20 $, 16 $
    assert billed_s(7.1, slow.abilities) == 20 * 3600
    assert billed_s(7.5, replace(slow.abilities, ending_s=0.0)) == 8 * 3600


def test_a_market_that_fails_is_named_and_costs_none_of_the_others() -> None:
    down = _market("down", 1)
    down.away = ProviderDenied("the balance is 0 $")
    found = find_offers([down, _market("up", 2)], Want())
    assert [offer.provider for offer in found.fitting] == ["up"]
    (refused,) = found.refused
    assert (refused.provider, refused.outcome) == ("down", "the balance is 0 $")


def test_what_does_not_fit_is_refused_with_the_reason() -> None:
    found = find_offers([_market("a", 1, 9)], Want(max_price_usd_h=5))
    assert [offer.id for offer in found.fitting] == ["a-1"]
    (refused,) = found.refused
    assert list(refused.row().items()) == [
        ("market", "a"),
        ("GPU", "2 x H100 SXM"),
        ("$/h", "9.000"),
        ("outcome", "it costs 9 $/h, the limit is 5 $/h"),
        ("region", "US"),
        ("offer", "a-9"),
        ("provider", "a"),
    ]


def test_where_processes_have_to_be_frozen_nothing_is_rented_that_surely_cannot() -> None:
    container, machine = _market("container", 1), _market("machine", 2)
    container.abilities = replace(container.abilities, kind="container", privileged=False)
    machine.abilities = replace(machine.abilities, kind="vm")
    tried = _market("tried", 1)
    canaries = CanaryResults({"tried": [_canary(why_not="no SYS_TIME")]})
    found = find_offers([container, machine, tried], Want(process="require"), canaries=canaries)
    assert [offer.provider for offer in found.fitting] == ["machine"]
    assert "no processes can be frozen in its containers" in found.refused[0].outcome
    assert "no SYS_TIME, and `process` requires it" in found.refused[1].outcome


def test_what_is_frozen_goes_where_it_can_go_on_for_a_stated_part_of_the_price() -> None:
    """A proof is worth a quarter more than a claim, and a machine on which they can go on twice
    one on which they cannot."""
    container, claimed, proven = (
        _market("container", 1.0),
        _market("claimed", 1.9),
        _market("proven"),
    )
    container.abilities = replace(container.abilities, kind="container", privileged=False)
    canaries = CanaryResults({"proven": [_canary(flown_unix=time.time())]})
    want = Want(process="try", frozen=FrozenPrograms())
    day = time.strftime("%Y-%m-%d", time.gmtime())
    for usd_h, first in ((1.6, ["proven", "container", "claimed"]), (1.9, ["proven", "container"]),
                         (2.1, ["container", "proven"])):  # fmt: skip
        proven.on_sale = _market("proven", usd_h).on_sale
        found = find_offers([container, claimed, proven], want, canaries=canaries)
        assert [offer.provider for offer in found.fitting][: len(first)] == first
    found = find_offers([container, proven], replace(want, max_price_usd_h=2.0))
    assert [offer.provider for offer in found.fitting] == ["container"]  # the user's limit holds
    proven.on_sale = _market("proven", 1.9).on_sale
    found = find_offers([container, proven], want, canaries=canaries)
    assert found.chosen("proven", "proven-1.9") == (
        f"processes went on there on {day}; the cheapest is container-1 at container, 1.000 $/h: "
        "processes cannot go on there: no processes can be frozen in its containers"
    )
    free = _market("free", 0.0)
    found = find_offers([free, proven], want, canaries=canaries)
    assert found.chosen("free", "free-0") == "processes may go on there: none was tried"
    for unmoved in (Want(), Want(process="try"), Want(rank="order", frozen=FrozenPrograms())):
        found = find_offers([container, proven], unmoved, canaries=canaries)
        assert [offer.provider for offer in found.fitting] == ["container", "proven"]


def test_nothing_that_fits_names_the_wish_and_the_reasons() -> None:
    with pytest.raises(NoOffer, match=r"rank price \(a a-1: its GPU is H100 SXM, L4 is wanted"):
        find_offers([_market("a", 1), _market("b")], Want(gpu="L4"))


def test_the_only_market_s_own_error_is_the_error() -> None:
    down = _market("down", 1)
    down.away = ProviderDenied("the balance is 0 $")
    with pytest.raises(ProviderDenied, match="balance"):
        find_offers([down], Want())


@pytest.mark.rule(3)
def test_a_market_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    free = threading.Event()
    hangs = _market("hangs", 1)
    hangs.check = lambda image="": free.wait(PATIENCE_S)  # type: ignore[method-assign, assignment, return-value]
    begins_and_first_answer, over = [0.0, 0.0], PATIENCE_S
    clock = chain(begins_and_first_answer, repeat(over))
    monkeypatch.setattr(markets, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    try:
        answers = ask_all([hangs, _market("b", 1)], lambda market: market.check(), timeout_s=over)
    finally:
        free.set()
    assert isinstance(answers[0], ProviderUnavailable)
    assert "hangs did not answer within 900 s" in str(answers[0])
    assert not isinstance(answers[1], Exception)


def test_a_bug_in_an_adapter_is_named_and_the_other_markets_are_asked() -> None:
    first, second = _market("a", 1), _market("b", 1)

    def bug(provider: object) -> str:
        if provider is first:
            raise KeyError("instances")
        return "it answers"

    told, answer = ask_all([first, second], bug)
    assert isinstance(told, Unforeseen) and str(told) == "KeyError: 'instances'"
    assert isinstance(told.__cause__, KeyError)
    assert answer == "it answers"


def test_a_snapshot_asks_for_its_architecture_its_cuda_and_room() -> None:
    environment = {"architecture": "aarch64", "cuda": "12.4.1", "gpus": ["NVIDIA H200"]}
    want = fit(Want(gpu="H200", disk_gib=5), environment, 100 * GIB)
    assert (want.architecture, want.cuda, want.gpu) == ("aarch64", (12, 4), "H200")
    assert 105 < want.disk_gib < 120
    assert fit(Want(disk_gib=500), {}, GIB) == Want(disk_gib=500)


def test_other_blocks_are_opened_only_where_a_rental_needs_one() -> None:
    def boom() -> list[Market]:
        raise AssertionError("nothing needs them")

    named = _market("a", 1)
    assert Markets([named], boom).concerned([]) == [named]
    assert Markets([named], boom).of("a") is named
    with pytest.raises(InvalidInput, match="no provider block is for b"):
        Markets([named]).of("b")
