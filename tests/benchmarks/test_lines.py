"""Encodings and choices over a line, measured small."""

from __future__ import annotations

from pathlib import Path

from benchmarks.lines import Cost, Row, losses, measure, table
from torpor.shared.values import MIB


def test_each_encoding_stores_the_same_content_over_a_line(tmp_path: Path) -> None:
    rows = measure(tmp_path, 8 * MIB, 1, ["25 Gbit/s"], ["raw", "lz4", "zstd 9", "balanced"])
    by_raw, by_lz4, by_zstd, balanced = [row.costs[0] for row in rows]
    assert by_raw.stored_bytes == rows[0].plain_bytes
    assert by_zstd.stored_bytes < by_lz4.stored_bytes < by_raw.stored_bytes
    assert balanced.stored_bytes < by_lz4.stored_bytes
    assert "zstd 3" in balanced.words
    assert all(row.wall_s > 0 and row.costs[0].cpu_s > 0 for row in rows)


def test_a_choice_is_set_beside_the_best_of_what_it_may_choose() -> None:
    walls = {"raw": 4.0, "zstd 1": 5.0, "zstd 3": 6.0, "balanced": 5.5, "fastest": 4.0}
    rows = [
        Row("a line", name, 100, [Cost(wall, 1.0, 50, f"{name}: words")])
        for name, wall in walls.items()
    ]
    assert [*losses(rows)] == [
        "a line: balanced took +10.0% beside zstd 1, its fastest",
        "a line: fastest took +0.0% beside raw, its fastest",
    ]
    assert table(rows).endswith("| a line | fastest | 4.00 | 1.00 | 0.500 | fastest: words |")
