from __future__ import annotations

from pathlib import Path

import pandas

from torpor.control.measure import advice, page
from torpor.control.measure.encodings import fastest_by_line
from torpor.control.measure.figures import Figure
from torpor.control.measure.results import write_results
from torpor.control.measure.rounds import Rounds
from torpor.control.store_prices import LIST_PRICES, price_of
from torpor.shared.values import Coded
from torpor.shared.wire.machine import Encodings


def _line(name: str, down: tuple[float, ...]) -> list[Figure]:
    return [
        Figure("line", name, "MB/s", (50.0, 60.0, 55.0), "up"),
        Figure("line", name, "MB/s", down, "down"),
    ]


def _codec(name: str, share: float, rate: float) -> list[Figure]:
    return [
        Figure("codec", name, "ratio", (share,), phase="stored", data="weights"),
        Figure("codec", name, "MB/s", (rate, rate), "up", data="weights"),
    ]


FIGURES = [
    *_line("near", (500.0, 520.0, 510.0)),
    *_line("far", (90.0, 95.0, 92.0)),
    *_codec("zstd", 0.7, 400.0),
    *_codec("slow", 0.5, 10.0),
]


def test_a_figure_sums_its_samples_up() -> None:
    figure = Figure("line", "s", "MB/s", (10.0, 30.0, 20.0), "up")
    assert (figure.n, figure.median, figure.low, figure.high) == (3, 20.0, 10.0, 30.0)
    assert advice.shown(figure) == "20.00 MB/s (10.00 to 30.00, n = 3)"
    assert "one sample" in advice.shown(Figure("line", "s", "s", (1.0,)))


def test_the_advice_stands_on_measurements_and_their_spread() -> None:
    said = {item.about: item for item in advice.advise(FIGURES, {"near": None, "far": None})}
    assert said["store"].choice == "near"
    assert "510 MB/s (500 to 520, n = 3)" in said["store"].because
    # fewer bytes, but one core of it does not keep up with the line's 55 MB/s
    assert said["encoding of weights"].choice == "zstd"


def test_more_cores_keep_up_with_smaller_encodings() -> None:
    advised = advice.advise(FIGURES, {"near": None, "far": None}, cores=6)
    assert {item.about: item.choice for item in advised}["encoding of weights"] == "slow"


def test_the_fastest_encoding_follows_the_line_the_cores_and_the_gpu() -> None:
    """Of weights, as two cores were measured: MD5 at 1.35 s/GB, planes at 0.7 and 0.6 s/GB."""
    planes = Coded("weights", "planes", 1000, 663, (0.7e-6,), (0.6e-6,))
    raw = Coded("weights", "raw", 1000, 1000, (0.0,), (0.0,))
    on_gpu = Coded("weights", "rans", 1000, 662, (0.1e-6,), (0.1e-6,), by="GPU")

    def best(*coded: Coded, cores: int) -> list[str]:
        (row,) = fastest_by_line(Encodings([raw, *coded], cores, 1.35e-9, ""))
        return [words.partition(",")[0] for words in [*row.values()][1:]]

    assert best(planes, cores=2) == ["planes"] * 3 + ["raw"] * 2
    assert best(planes, cores=16) == ["planes"] * 5
    assert best(planes, on_gpu, cores=2) == ["rans on the GPU"] * 5
    (row,) = fastest_by_line(Encodings([raw, planes], 2, 1.35e-9, ""))
    assert row["0.2 Gbit/s"] == f"planes, {0.663e9 * 8 / 200e6:.2f} s"  # the line's time
    assert row["25 Gbit/s"] == "raw, 0.68 s"  # half of what a core takes to hash 1 GB


def test_of_stores_within_each_other_s_spread_the_cheaper_one_is_advised() -> None:
    figures = [*_line("dear", (100.0, 120.0)), *_line("cheap", (95.0, 105.0))]
    prices = {"dear": LIST_PRICES["aws-s3"], "cheap": LIST_PRICES["backblaze-b2"]}
    (store,) = advice.advise(figures, prices)
    assert store.choice == "cheap"
    assert "6.00 $ for a TB and month" in store.because
    assert LIST_PRICES["backblaze-b2"].as_of in store.because
    assert "within the spread of dear" in store.because


def test_nothing_is_advised_from_no_figures() -> None:
    assert advice.advise([], {}) == []


def test_the_table_is_written_and_read_again(tmp_path: Path) -> None:
    write_results(tmp_path / "r", FIGURES, advice.advise(FIGURES, {}), {"notes": []})
    assert {path.name for path in (tmp_path / "r").iterdir()} == {"figures.csv", "benchmark.json"}
    table = pandas.read_csv(tmp_path / "r" / "figures.csv")
    assert set(table[table.unit == "MB/s"].direction) == {"up", "down"}  # no sum of both
    assert len(table) == len(FIGURES)
    assert list(table[(table.what == "line") & (table.direction == "down")]["max"]) == [520.0, 95.0]


def test_the_page_shows_advice_dated_prices_and_notes() -> None:
    prices = {"near": LIST_PRICES["wasabi"], "far": None}
    said = advice.advise(FIGURES, prices)
    text = page.page(FIGURES, said, prices, [], {"cpu": "x"}, ["store other was not measured"])
    assert "* **store: near.** Raw random bytes come back at 510 MB/s" in text
    assert LIST_PRICES["wasabi"].as_of in text
    assert "* store other was not measured" in text


def test_a_price_of_the_user_s_own_counts_instead() -> None:
    assert price_of("seaweedfs", None, None) is None
    own = price_of("wasabi", 0.004, None)
    assert (own.gb_month_usd, own.source) == (0.004, "the store block")
    assert price_of("aws-s3", None, None).egress_gb_usd == 0.09
    assert all(price.as_of and price.source for price in LIST_PRICES.values())


def test_rounds_end_with_the_time_but_the_first_one_runs() -> None:
    now = [0.0]
    ran = []
    rounds = Rounds(5, until=10.0, clock=lambda: now[0])
    for number in rounds:
        ran.append(number)
        now[0] += 4.0
    assert (ran, rounds.done) == ([0, 1], 2)  # a third would end at 12
    late = Rounds(5, until=-1.0, clock=lambda: now[0])
    assert (list(late), late.done) == ([0], 1)
