"""A short kill campaign; the long one is ``make campaign``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.campaign.__main__ import COMMAND, share_out


@pytest.mark.usefixtures("needs_server")
def test_a_short_campaign_finds_no_violation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    code = COMMAND.main(
        ["--runs", "12", "--flows", "none", "--jobs", "3", "--go-on", "--report", str(report)]
    )
    printed = capsys.readouterr().out
    assert code == 0, printed
    runs = json.loads(report.read_text())[0]["report"]
    assert sorted(run["number"] for run in runs) == [*range(12)]
    assert all(run["victim"] and run["phase"] and run["next_run"] for run in runs)
    assert "12 runs (0 by Prefect)" in printed


def test_every_run_has_one_world() -> None:
    for flows in ("none", "some", "all"):
        shares = share_out(3, 37, 4, flows)
        assert sorted(n for share in shares for n in share.numbers) == [*range(3, 40)]
    some = share_out(0, 200, 4, "some")
    assert [(len(s.numbers), s.by_prefect) for s in some] == [
        (50, True), (50, False), (50, False), (50, False),
    ]  # fmt: skip
