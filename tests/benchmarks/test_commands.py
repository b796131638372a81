"""What a command costs is measured by the clock and by the CPU, of its own processes alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.commands import Command, figures

PYTHON = (sys.executable, "-I", "-S", "-c")


def test_each_command_is_run_once_more_than_it_counts_each_time_after_what_is_before_it(
    tmp_path: Path,
) -> None:
    busy, began = "for _ in range(2_000_000): pass", tmp_path / "began"
    noted = f"open({str(began)!r}, 'a').write('x')"
    command = Command([*PYTHON, busy], before=[*PYTHON, noted])
    found = figures({"busy": command}, os.environ, runs=2)["busy"]
    assert found["wall_s"]["n"] == found["cpu_s"]["n"] == 2
    assert 0 < found["cpu_s"]["min"] <= found["cpu_s"]["p95"] == found["cpu_s"]["max"]
    assert began.read_text() == "xxx"


def test_a_command_that_fails_is_no_figure() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        figures({"fails": Command([*PYTHON, "raise SystemExit(1)"])}, os.environ, runs=1)
