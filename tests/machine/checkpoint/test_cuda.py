"""The driver's calls for a checkpoint, by a stand-in: their order, and what a failure undoes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fixtures.waiting import PATIENCE_S

Calls = Callable[..., tuple[list[str], str]]
_STAND_IN = Path(__file__).parents[2] / "fixtures" / "cuda_stand_in.c"
_HERE = "10" * 16
"""The UUID of the stand-in's first GPU."""
_CODE = """
import json, sys
from torpor.machine.checkpoint.criu import CheckpointFailed
from torpor.machine.checkpoint.cuda import Cuda
name, *given = json.loads(sys.argv[1])
try:
    getattr(Cuda(), name)(*given)
except CheckpointFailed as error:
    print(error)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cuda")
    argv = ["gcc", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-O1", str(_STAND_IN)]
    subprocess.run([*argv, "-o", str(folder / "libcuda.so.1")], check=True, timeout=PATIENCE_S)
    return folder


@pytest.fixture
def calls(library: Path, tmp_path: Path) -> Calls:
    """Ask the stand-in; returns its calls, and the error."""

    def ask(*what: object, **settings: str) -> tuple[list[str], str]:
        log = tmp_path / "calls"
        environment = {
            **os.environ,
            "LD_LIBRARY_PATH": str(library),
            "CUDA_STAND_IN": str(log),
            "CUDA_GPUS": "1",
            **settings,
        }
        argv = [sys.executable, "-c", _CODE, json.dumps(what)]
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True)
        return log.read_text().splitlines() if log.exists() else [], done.stdout.strip()

    return ask


def test_all_processes_are_locked_before_one_is_moved(calls: Calls) -> None:
    assert calls("suspend", [12, 13]) == (
        ["Lock 12 in time", "Lock 13 in time", "Checkpoint 12", "Checkpoint 13"],
        "",
    )


@pytest.mark.parametrize(
    ("fails", "error", "undone"),
    [
        ("cuCheckpointProcessLock 13 600", "CUDA_ERROR_NOT_READY (600)", ["Unlock 12"]),
        (
            "cuCheckpointProcessCheckpoint 13 401",
            "CUDA_ERROR_ILLEGAL_STATE (401)",
            ["Restore 12", "Unlock 12", "Unlock 13"],
        ),
    ],
)
def test_what_cannot_be_moved_runs_on(
    calls: Calls, fails: str, error: str, undone: list[str]
) -> None:
    made, said = calls("suspend", [12, 13], CUDA_FAILS=fails)
    assert said == f"{fails.split()[0]}: {error}"
    assert made[-len(undone) :] == undone


def test_it_comes_back_to_the_same_gpus_or_to_others(calls: Calls) -> None:
    frozen = {"CUDA_STATE": "2"}
    assert calls("resume", [12], [_HERE], **frozen) == (["Restore 12", "Unlock 12"], "")
    made, said = calls("resume", [13], ["77" * 16], **frozen)
    assert (made[2:], said) == (["Restore 13 77 to 10 of 1", "Unlock 13"], "")


@pytest.mark.parametrize(
    ("state", "made"),
    [("0", []), ("1", ["Unlock 12"]), ("2", ["Restore 12", "Unlock 12"])],
    ids=["running", "locked", "moved"],
)
def test_whatever_became_of_a_move_is_undone(calls: Calls, state: str, made: list[str]) -> None:
    assert calls("release", [12, 100], CUDA_STATE=state) == (made, "")


def test_one_that_cannot_be_released_keeps_none_of_the_others(calls: Calls) -> None:
    fails = "cuCheckpointProcessRestore 12 401"
    made, said = calls("release", [12, 13], CUDA_STATE="2", CUDA_FAILS=fails)
    assert said == "process 12: cuCheckpointProcessRestore: CUDA_ERROR_ILLEGAL_STATE (401)"
    assert made == ["Restore 12", "Restore 13", "Unlock 13"]


def test_fewer_gpus_than_before_are_named(calls: Calls) -> None:
    assert calls("resume", [12], [_HERE, "11" * 16]) == (
        [],
        "it ran beside 2 GPUs; here are 1",
    )


def test_a_driver_without_these_calls_is_named(calls: Calls, tmp_path: Path) -> None:
    source = tmp_path / "old.c"
    source.write_text("int cuInit(unsigned int flags) { return (int)flags; }")
    argv = ["gcc", "-shared", "-fPIC", str(source), "-o", str(tmp_path / "libcuda.so.1")]
    subprocess.run(argv, check=True, timeout=PATIENCE_S)
    _, said = calls("suspend", [12], LD_LIBRARY_PATH=str(tmp_path))
    assert "has no cuCheckpointProcessLock: processes with GPU memory need 570" in said
