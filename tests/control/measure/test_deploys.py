"""The advice of a benchmark of deploys."""

from __future__ import annotations

from collections.abc import Sequence

from torpor.control.measure.deploys import advise_deploys, deploys_page
from torpor.control.measure.figures import Figure


def _way(data: str, values: Sequence[float], usd: float, stack: str = "vllm") -> list[Figure]:
    def one(unit: str, phase: str, figures: Sequence[float]) -> Figure:
        return Figure(
            "deploy", stack, "$" if unit == "$" else "s", tuple(figures),
            phase=phase, data=data, measured_from="vast:1",
        )  # fmt: skip

    return [
        one("s", "from rental", values),
        one("s", "from SSH", [value / 2 for value in values]),
        one("s", "health", [1.0] * len(values)),
        one("$", "from rental", [usd] * len(values)),
    ]


def test_the_soonest_strategy_is_advised_and_the_cheaper_of_two_within_the_spread() -> None:
    figures = _way("official", (50, 52, 70), 0.02) + _way("stored, warm", (55, 56, 60), 0.01)
    (said,) = advise_deploys(figures + _way("own", (90, 91, 95), 0.001))
    assert (said.about, said.choice) == ("vllm at vast:1", "stored, warm")
    assert "official is within the spread" in said.because and "0.0100 $" in said.because
    figures = _way("official", (50, 52, 54), 0.02) + _way("stored, warm", (55, 56, 60), 0.01)
    assert advise_deploys(figures)[0].choice == "official"


def test_a_cold_start_is_no_choice_and_few_starts_are_named() -> None:
    figures = _way("stored, cold", (10.0,), 0.01) + _way("stored, warm", (20.0,), 0.01)
    (said,) = advise_deploys(figures)
    assert said.choice == "stored, warm" and "measure more rounds" in said.because
    assert advise_deploys(_way("stored, cold", (10.0,), 0.01)) == []


def test_the_page_has_p95_cost_and_phases() -> None:
    samples = [float(n) for n in range(1, 21)]
    figures = _way("official", samples, 0.02)
    page = deploys_page(figures, advise_deploys(figures), {"host": "this"}, ["a note"])
    assert "| vllm | official | vast:1 | 20 | 10.5 s | 19.0 s | 5.2 s | 9.5 s | 0.0200 $ |" in page
    assert "| health | 1.00 |" in page and "* a note" in page
