from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import codecs


def test_the_benchmark_runs_small_and_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "codecs.json"
    monkeypatch.setattr("sys.argv", ["codecs", "--mib", "1", "--rounds", "1", "--out", str(out)])
    assert codecs.main() == 0
    report = json.loads(out.read_text())
    assert report["host"]["twin"].startswith("C")
    rows = {(row["data"], row["codec"]): row for row in report["rows"]}
    assert rows["weights BF16", "planes"]["ratio"] > 1.4
    assert rows["random bytes", "planes"]["decode_gb_s"] is None
    assert rows["random bytes", "planes"]["ratio"] == 1
    assert all(row["encode_gb_s"]["n"] == 1 for row in rows.values())
    picture = out.with_suffix(".svg").read_text()
    assert picture.count("</svg>") == 1
    assert picture.count("</use>") + picture.count("<use ") > 2 * len(rows) - 10
    assert "| weights BF16 | planes |" in capsys.readouterr().out
