"""What a command costs is measured by the clock and by the CPU, of its own processes alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.commands import commands, measure


def test_each_command_is_run_once_more_than_it_counts() -> None:
    busy = "for _ in range(2_000_000): pass"
    result = measure({"busy": [sys.executable, "-I", "-S", "-c", busy]}, runs=2)
    figures = result["commands"]["busy"]
    assert figures["wall_s"]["n"] == figures["cpu_s"]["n"] == 2
    assert 0 < figures["cpu_s"]["min"] <= figures["cpu_s"]["max"]
    assert result["host"]


def test_a_command_that_fails_is_no_figure() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        measure({"fails": [sys.executable, "-I", "-S", "-c", "raise SystemExit(1)"]}, runs=1)


def test_the_login_of_the_named_workspace_is_measured() -> None:
    assert commands("mywork")["ssh"] == ["ssh", "mywork", "true"]
    assert commands("mywork", "config")["ssh"] == ["ssh", "-F", "config", "mywork", "true"]
