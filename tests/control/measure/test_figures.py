from __future__ import annotations

from pathlib import Path

import pandas
import pytest

from torpor.control.measure import advice, page, plots, results
from torpor.control.measure.codecs import coders
from torpor.control.measure.figures import Figure
from torpor.control.measure.results import left_out, write_results
from torpor.control.measure.rounds import Rounds
from torpor.control.measure.storage import above_line
from torpor.control.store_prices import LIST_PRICES, price_of
from torpor.shared.codecs.layout import Element


def _line(name: str, down: tuple[float, ...]) -> list[Figure]:
    return [
        Figure("line", name, "MB/s", (50.0, 60.0, 55.0), "up"),
        Figure("line", name, "MB/s", down, "down"),
    ]


def _flow(what: str, parts: int, seconds: tuple[float, ...]) -> Figure:
    return Figure(what, "torpor", "s", seconds, parts=parts, machines=1)  # type: ignore[arg-type]


def _codec(name: str, share: float, rate: float) -> list[Figure]:
    return [
        Figure("codec", name, "ratio", (share,), phase="stored", data="weights"),
        Figure("codec", name, "MB/s", (rate, rate), "up", data="weights"),
    ]


FIGURES = [
    *_line("near", (500.0, 520.0, 510.0)),
    *_line("far", (90.0, 95.0, 92.0)),
    Figure("storage", "near", "MB/s", (40.0, 45.0), "up", parts=4, object_bytes=1 << 20),
    Figure("storage", "near", "MB/s", (600.0, 610.0), "down", parts=4, object_bytes=1 << 20,
           cached=True),
    *_codec("zstd", 0.7, 400.0),
    *_codec("slow", 0.5, 10.0),
    *[_flow("hibernate", parts, s) for parts, s in ((1, (9.0, 9.1)), (4, (5.0, 5.4)),
                                                    (8, (4.9, 5.3)), (64, (7.0, 7.2)))],
    *[_flow("wake", parts, s) for parts, s in ((1, (8.0, 8.1)), (4, (4.0, 4.4)),
                                               (8, (4.1, 4.3)), (64, (6.0, 6.2)))],
    Figure("wake", "torpor", "s", (1.5,), phase="restore", parts=4, machines=1),
]  # fmt: skip


def test_a_figure_sums_its_samples_up() -> None:
    figure = Figure("line", "s", "MB/s", (10.0, 30.0, 20.0), "up")
    assert (figure.n, figure.median, figure.low, figure.high) == (3, 20.0, 10.0, 30.0)
    assert figure.spread == 1.0
    assert advice.shown(figure) == "20.00 MB/s (10.00 to 30.00, n = 3)"
    assert "one sample" in advice.shown(Figure("line", "s", "s", (1.0,)))


def test_the_advice_stands_on_measurements_and_their_spread() -> None:
    said = {item.about: item for item in advice.advise(FIGURES, {"near": None, "far": None})}
    assert said["store"].choice == "near"
    assert "510 MB/s (500 to 520, n = 3)" in said["store"].because
    # 4 parts are within the spread of the fastest of both, 1 and 64 are not.
    assert said["parts"].choice == "4"
    # fewer bytes, but one core of it does not keep up with the line's 55 MB/s
    assert said["encoding of weights"].choice == "zstd"


def test_of_stores_within_each_other_s_spread_the_cheaper_one_is_advised() -> None:
    figures = [*_line("dear", (100.0, 120.0)), *_line("cheap", (95.0, 105.0))]
    prices = {"dear": LIST_PRICES["aws-s3"], "cheap": LIST_PRICES["backblaze-b2"]}
    (store,) = advice.advise(figures, prices)
    assert store.choice == "cheap"
    assert "6.00 $ for a TB and month" in store.because
    assert LIST_PRICES["backblaze-b2"].as_of in store.because
    assert "within the spread of dear" in store.because


def test_advice_from_one_sample_says_so() -> None:
    figures = [_flow("hibernate", 1, (2.0,)), _flow("wake", 1, (1.0,))]
    (parts,) = advice.advise(figures, {})
    assert "One sample has no spread" in parts.because
    assert all("no spread" not in said.because for said in advice.advise(FIGURES, {}))
    assert advice.advise([], {}) == []


def test_rates_all_above_the_line_are_cached_and_noise_is_not() -> None:
    line = Figure("line", "s", "MB/s", (100.0, 110.0), "down")
    assert above_line((130.0, 125.0), line)
    assert not above_line((130.0, 118.0), line)
    assert not above_line((900.0,), None)


def test_the_table_is_written_and_read_again(tmp_path: Path) -> None:
    said = advice.advise(FIGURES, {})
    write_results(tmp_path / "r", FIGURES, said, plots.pictures(FIGURES, "near"), {"notes": []})
    table = pandas.read_parquet(tmp_path / "r" / "figures.parquet")
    assert set(table[table.unit == "MB/s"].direction) == {"up", "down"}  # no sum of both
    assert len(table) == len(FIGURES)
    assert table.parts.dtype == "Int64"
    assert table[table.cached].object_bytes.tolist() == [1 << 20]
    assert list(table[(table.what == "wake") & (table.phase == "")]["max"]) == [8.1, 4.4, 4.3, 6.2]
    assert {path.suffix for path in (tmp_path / "r").iterdir()} == {
        ".parquet", ".csv", ".json", ".svg",
    }  # fmt: skip


def test_without_the_extra_packages_the_table_is_csv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "find_spec", lambda package: None)
    assert left_out() == {"matplotlib": "pictures", "pyarrow": "the table as Parquet"}
    write_results(tmp_path / "r", FIGURES, advice.advise(FIGURES, {}), {}, {"notes": []})
    assert {path.name for path in (tmp_path / "r").iterdir()} == {"figures.csv", "benchmark.json"}
    assert len(pandas.read_csv(tmp_path / "r" / "figures.csv")) == len(FIGURES)


def test_the_page_shows_pictures_flags_and_dated_prices() -> None:
    prices = {"near": LIST_PRICES["wasabi"], "far": None}
    pictures = plots.pictures(FIGURES, "near")
    assert plots.pictures(FIGURES, "near") == pictures
    assert all(svg.startswith(b"<?xml") and b"</svg>" in svg for svg in pictures.values())
    said = advice.advise(FIGURES, prices)
    text = page.page(FIGURES, said, pictures, prices, {"cpu": "x"}, ["64 parts were not"])
    assert text.count("](data:image/svg+xml;base64,") == 3
    assert LIST_PRICES["wasabi"].as_of in text
    assert "64 parts were not" in text
    assert len(text) < page.MOST_BYTES
    huge = page.page(FIGURES, said, {"rates": b"x" * page.MOST_BYTES}, prices, {}, [])
    assert "data:image" not in huge
    assert "too big for this page" in huge


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


def test_only_what_a_cpu_writes_is_measured_and_so_advised() -> None:
    """A snapshot may hold `rans` too, but only a GPU writes it."""
    assert {coder.name for coder in coders(Element.BF16)} == {"raw", "lz4", "zstd", "planes"}
    assert {coder.name for coder in coders(Element.BYTES)} == {"raw", "lz4", "zstd"}
