"""The recommendation for each use, and the page."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from tests.fixtures.market import H100, Market
from torpor.control.compare.choices import Compared, Terms, compared
from torpor.control.compare.experience import Past
from torpor.control.compare.page import MOST_REASONS, MOST_ROWS, page, rows
from torpor.control.compare.uses import USES, advise
from torpor.control.providers.ec2.provider import Ec2Provider
from torpor.control.providers.lambda_cloud import LambdaProvider
from torpor.control.providers.local.provider import LocalProvider
from torpor.control.providers.seam import Abilities
from torpor.control.providers.vast import VastProvider
from torpor.control.rental.records import Rental
from torpor.control.rental.search import Tried
from torpor.shared.values import Label, Want, WorkspaceName

TERMS = Terms(want=Want(spot="allowed"), hours=10.0, now_unix=60.0)
ABLE: dict[str, Abilities] = {
    "vast": VastProvider.abilities,
    "lambda": LambdaProvider.abilities,
    "ec2": Ec2Provider.abilities,
    "local": LocalProvider.abilities,
}


def comparison(*given: tuple[str, float, dict[str, Any]], failed: str = "") -> Compared:
    """Offers as market, price and what else is known of them."""
    sold = []
    for number, (market, usd_h, more) in enumerate(given):
        at = Market(f"{market}://1")
        at.abilities = ABLE[market]
        known: dict[str, Any] = {
            "id": f"{market}-{number}", "provider": at.identity, "price_usd_h": usd_h,
            "reliability": None,
        }  # fmt: skip
        sold.append((at, [msgspec.structs.replace(H100, **{**known, **more})]))
    label = Label("me", WorkspaceName("demo"), "r")
    past = [Rental(label=label, provider=f"{failed}://1", state="ended", created_unix=1.0,
                   failed=True)]  # fmt: skip
    return compared(sold, [Tried("runpod-provider/x", "", "its key | is wrong")], Past(past), TERMS)


def chosen(found: Compared) -> dict[str, str]:
    """The offer for each use."""
    return {said.about: re.findall(r"\(offer (.*?)\)", said.choice)[0] for said in advise(found)}


def test_each_use_has_the_cheapest_offer_that_suits_it() -> None:
    found = comparison(
        ("vast", 1.0, {"spot": True}),
        ("vast", 1.5, {"reliability": 0.9}),
        ("vast", 2.0, {"reliability": 0.99}),
        ("ec2", 2.5, {"spot": True}),
        ("lambda", 3.0, {}),
        ("ec2", 4.0, {}),
        ("local", 0.1, {}),
    )
    assert chosen(found) == {
        "development": "vast-1",
        "production without checkpoint": "vast-2",
        "production with checkpoint": "ec2-3",  # two minutes of notice
        "compliance": "lambda-4",
        "smallest budget": "vast-0",
    }
    said = {advice.about: advice.because for advice in advise(found)}
    assert said["smallest budget"].startswith("10.00 $ for 10 h at 1.000 $/h: ")
    assert "without a warning" in said["smallest budget"]
    assert said["development"].endswith(
        "(assumed, the most it may take), and there is nothing to restore"
    )
    assert "a warning of 120 s" in said["production with checkpoint"]
    assert "no encryption key" in said["compliance"]


def test_of_nearly_equal_costs_development_takes_the_faster_start() -> None:
    found = comparison(("lambda", 1.0, {}), ("vast", 1.04, {}), ("vast", 1.06, {}))
    assert chosen(found)["development"] == "vast-1"  # 900 s instead of 1200 s
    assert chosen(found)["smallest budget"] == "lambda-0"


def test_our_own_failures_keep_a_market_out_of_production() -> None:
    given = (("vast", 1.0, {}), ("lambda", 3.0, {}))
    assert chosen(comparison(*given))["production without checkpoint"] == "vast-0"
    failed = comparison(*given, failed="vast")
    assert chosen(failed)["production without checkpoint"] == "lambda-1"


def test_a_host_of_many_owners_that_states_nothing_is_not_reliable() -> None:
    given = (("vast", 1.0, {"many_owners": True}), ("lambda", 3.0, {}))
    found = comparison(*given)
    assert chosen(found)["production without checkpoint"] == "lambda-1"
    assert chosen(found)["development"] == "vast-0"
    stated = (("vast", 1.0, {"many_owners": True, "reliability": 0.99}), given[1])
    assert chosen(comparison(*stated))["production without checkpoint"] == "vast-0"


@pytest.mark.parametrize("given", [[], [("local", 1.0, {})], [("vast", 0.0, {})]])
def test_where_nothing_suits_it_says_why(given: list[Any]) -> None:
    """Nor is this host recommended, nor what has no price."""
    said = advise(comparison(*given))
    assert [(advice.about, advice.choice) for advice in said] == [(u.name, "none") for u in USES]
    assert all(advice.because for advice in said)


def test_the_page_says_what_was_rejected_and_who_did_not_answer() -> None:
    found = comparison(("vast", 1.0, {}), ("lambda", 2.0, {"region": "a|b <img src=x>"}),
                       ("vast", 3.0, {"available": False}))  # fmt: skip
    text = page(found, advise(found))
    assert "2 offers fit, 1 do not. A session of 10 h with no snapshot to restore." in text
    for words in ("| vast | 1 | it is sold out | 3.000 |",
                  "| runpod-provider/x | its key \\| is wrong |",
                  "| lambda | nothing |", "| vast | disk, price not stated |"):  # fmt: skip
        assert words in text, words
    assert not re.search(r"(?<!\\)[<]img", text)  # what markets write is text
    shown = rows(found)
    assert [row["market"] for row in shown] == ["vast", "lambda"]
    assert shown[0]["$ for 10 h"] == "10.00"
    assert shown[0]["start p50 / p90"] == "900 / 900 s, assumed"
    assert (shown[0]["checkpoint"], shown[1]["checkpoint"]) == ("no", "claimed")
    assert shown[1]["our failures"] == "0 of 0"


def test_long_tables_are_cut_and_say_so() -> None:
    many = [("vast", 1.0 + n, {}) for n in range(MOST_ROWS + 3)]
    shown = rows(comparison(*many))
    assert len(shown) == MOST_ROWS + 1
    assert shown[-1]["market"] == "and 3 more: in Python, compare returns them all"
    dear = [("vast", 1.0 + n, {"disk_gib": -float(n + 1)}) for n in range(MOST_REASONS + 2)]
    text = page(comparison(*dear), [])
    assert "and 2 reasons more" in text
    assert rows(comparison(*dear)) == [{"result": "no offer fits"}]


def test_where_only_this_host_has_offers_each_use_says_why_none_is_recommended() -> None:
    for advice in advise(comparison(("local", 0.5, {}))):
        assert advice.choice == "none"
        assert advice.because.startswith("only machines of this host fit")
    said = {advice.about: advice.because for advice in advise(comparison(("vast", 0.0, {})))}
    assert said["smallest budget"] == "no offer has a price"
