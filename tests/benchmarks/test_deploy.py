"""The benchmark of deploys, small: a real llama.cpp server answers, cold and warm."""

from __future__ import annotations

from pathlib import Path

from benchmarks.deploy import TOOLS, measure


def test_a_real_server_answers_with_a_made_and_with_a_restored_environment(
    machines_folder: Path,
) -> None:
    assert (TOOLS / "ready").exists(), (
        "make test installs it: python -m benchmarks.deploy --prepare"
    )
    result = measure(machines_folder, gib=0.004, lines=[1000.0], rounds=1)
    (line,) = result["lines"]
    assert {"environment: setup", "store environment", "completion"} <= set(line["cold"])
    assert "environment: setup" not in line["warm"]
    assert {"environment: restore", "workspace: restore", "health"} <= set(line["warm"])
    for kind in ("cold", "warm"):
        assert 0 < line[kind]["from ssh"]["median"] < line[kind]["from rental"]["median"]


def test_a_real_server_answers_with_the_model_first(machines_folder: Path) -> None:
    result = measure(
        machines_folder, gib=0.004, lines=[1000.0], rounds=1, weights="F16", rest_gib=0.02
    )
    (line,) = result["lines"]
    assert result["workspace_bytes"] > 4 * result["model_bytes"]
    used = result["used_bytes"]
    assert used["before ready"] == result["model_bytes"]
    assert used["never"] > 3 * result["model_bytes"]
    for kind in ("usual", "first", "learned"):
        assert {"environment: restore", "workspace: restore", "completion"} <= set(line[kind])
    assert all(line[ratio] > 0 for ratio in ("ratio", "learned ratio"))
