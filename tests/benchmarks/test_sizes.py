"""The table of sizes is what the kept results say."""

from __future__ import annotations

import re

from benchmarks import sizes


def test_the_page_has_the_tables_that_the_results_make() -> None:
    text = sizes.PAGE.read_text()
    assert text == sizes.page(text), "run `python -m benchmarks.sizes --write`"
    cells = re.findall(r"\| \d+ GB \| .*", text)
    assert len(cells) == 9 and all(row.count("(c)") == 3 for row in cells)
    rates = sizes.measured_rates()
    quoted = (f"{rates.ratio:.2f} of a mix", f"{rates.share:.2f} |", f"{rates.scan_s:.2f} s; only")
    assert [words for words in quoted if words not in text] == []


def test_the_formula_is_near_what_was_measured_over_a_line() -> None:
    rows = re.findall(r"\| ([\d.]+) s \(m\) \| ([\d.]+) s \(c\)", sizes.tables())
    assert len(rows) == 2
    assert [row for row in rows if not 0.5 < float(row[1]) / float(row[0]) < 1.5] == []


def test_the_slowest_part_counts() -> None:
    rates = sizes.Rates(0.5, 1.0, 100.0, 50.0, 1.0, 3.0, 1.0, 2.0)
    assert rates.hibernate(1000, 10) == 1 + 1000 * 0.5 / 10  # the line
    assert rates.hibernate(1000, 1e9) == 1 + 1000 / 100  # the cores
    assert rates.wake(1000, 1e9) == 2 + 1000 / 50
    assert rates.increment(1000, 10) == 1 + 3 + 10 / 10
    assert [sizes.shown(seconds) for seconds in (2.06, 46, 222, 11_160)] == [
        "2.1 s", "46 s", "3.7 min", "3.1 h",
    ]  # fmt: skip
