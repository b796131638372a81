"""The machine's GPU in the agent: its marker, one run at a time, whole snapshots."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from gpu_kernels import device as device_module
from gpu_kernels.driver import GpuError
from tests.fixtures.engine import Engine
from tests.fixtures.shim import LAUNCH_FAILED, NOT_READY, OUT_OF_MEMORY, ShimDriver
from tests.fixtures.snapshots import comes_back, manifest_of
from tests.fixtures.trees import let_settle
from torpor.machine.agent import gpu as gpu_module
from torpor.machine.agent import runs as runs_module
from torpor.machine.agent import snapshot as snapshot_module
from torpor.machine.agent.gpu import MARKER, open_gpu
from torpor.machine.agent.log import LOG_FILE
from torpor.shared.codecs import trial as trial_module
from torpor.shared.codecs.effort import Effort
from torpor.shared.codecs.gpu import FREE_LEAST, GpuEncoder
from torpor.shared.codecs.layout import Element, Run
from torpor.shared.codecs.planes import PLANES, RANS
from torpor.shared.codecs.trial import GpuTrial
from torpor.shared.format.manifest import FILE
from torpor.shared.values import MIB, Compression

RUNS = [Run(MIB, Element.BF16)]
MEASURED = 1
FILE_CHUNKS = MEASURED + 2
"""The first ones are measured, the others are then encoded by what was decided."""

_DIE = """
import sys
from pathlib import Path
from tests.fixtures.shim import ABORT, ShimDriver
from torpor.machine.agent import gpu
shim = ShimDriver(Path(sys.argv[1]), Path(sys.argv[2]))
shim.reset()
shim.fail(sys.argv[4], ABORT)
gpu.LIBRARY, gpu.BUILT = shim.library, shim.built
gpu.open_gpu(Path(sys.argv[3])).encode(bytes(1 << 20), [])
"""


@pytest.fixture
def on_shim(shim: ShimDriver, monkeypatch: pytest.MonkeyPatch) -> ShimDriver:
    """The agent of this process finds the tests' driver where the machine's would be."""
    monkeypatch.setattr(gpu_module, "LIBRARY", shim.library)
    monkeypatch.setattr(gpu_module, "BUILT", shim.built)
    return shim


def bf16(size: int, seed: int = 1) -> bytes:
    floats = np.random.default_rng(seed).normal(0, 0.02, size // 2).astype(np.float32)
    return (floats.view(np.uint32) >> 16).astype(np.uint16).tobytes()


@pytest.fixture
def willing(engine: Engine) -> Engine:
    """A workspace whose block lets the GPU encode."""
    engine.compression = Compression(gpu=True)
    return engine


# -- the marker


def test_the_marker_is_there_as_long_as_the_gpu_is_open(
    on_shim: ShimDriver, tmp_path: Path
) -> None:
    encoder = open_gpu(tmp_path)
    assert (tmp_path / MARKER).read_text() == f"{os.getpid()}\n"
    plain = bf16(MIB)
    assert encoder.encode(plain, RUNS) == RANS.encode(memoryview(plain), RUNS)
    encoder.close()
    assert list(tmp_path.iterdir()) == []
    assert on_shim.held == 0
    open_gpu(tmp_path).close()


def test_the_marker_is_written_before_the_driver_is_loaded(
    shim: ShimDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    class Watched(device_module.Device):
        def __init__(self, library: str, built: Path) -> None:
            seen.append((tmp_path / MARKER).exists())
            super().__init__(shim.library, shim.built)

    monkeypatch.setattr(gpu_module, "Device", Watched)
    open_gpu(tmp_path).close()
    assert seen == [True]


@pytest.mark.parametrize("function", ["cuInit", "cuModuleLoadData"])
def test_a_driver_that_took_an_agent_down_is_not_loaded_again(
    on_shim: ShimDriver, tmp_path: Path, function: str
) -> None:
    argv = [sys.executable, "-c", _DIE, on_shim.library, str(on_shim.built), str(tmp_path)]
    died = subprocess.run([*argv, function], capture_output=True, check=False)
    assert died.returncode == -signal.SIGABRT, died.stderr
    with pytest.raises(GpuError, match=r"an agent died while it had it open; remove .*gpu\.open"):
        open_gpu(tmp_path)
    assert on_shim.calls("cuInit") == 0
    (tmp_path / MARKER).unlink()
    open_gpu(tmp_path).close()


@pytest.mark.parametrize(
    ("function", "result"), [("cuInit", 100), ("cuModuleLoadData", OUT_OF_MEMORY)]
)
def test_a_gpu_that_does_not_open_leaves_no_marker(
    on_shim: ShimDriver, tmp_path: Path, function: str, result: int
) -> None:
    on_shim.fail(function, result)
    with pytest.raises(GpuError, match=f"{function} failed with {result}"):
        open_gpu(tmp_path)
    assert list(tmp_path.iterdir()) == []
    open_gpu(tmp_path).close()


def test_a_gpu_with_little_memory_free_is_given_back(on_shim: ShimDriver, tmp_path: Path) -> None:
    on_shim.has_free(FREE_LEAST - 1)
    with pytest.raises(GpuError, match="it is left to the work there"):
        open_gpu(tmp_path)
    assert (list(tmp_path.iterdir()), on_shim.held) == ([], 0)


def test_a_marker_that_is_gone_already_fails_nothing(on_shim: ShimDriver, tmp_path: Path) -> None:
    encoder = open_gpu(tmp_path)
    (tmp_path / MARKER).unlink()
    encoder.close()
    open_gpu(tmp_path).close()


def test_only_one_run_has_the_gpu(on_shim: ShimDriver, tmp_path: Path) -> None:
    first = open_gpu(tmp_path)
    with pytest.raises(GpuError, match="another run of this agent has it"):
        open_gpu(tmp_path)
    first.close()
    open_gpu(tmp_path).close()


def test_without_a_place_for_the_marker_nothing_is_loaded(
    on_shim: ShimDriver, tmp_path: Path
) -> None:
    with pytest.raises(GpuError, match=r"gpu\.open cannot be written \(No such file"):
        open_gpu(tmp_path / "missing")
    assert on_shim.calls("cuInit") == 0


def test_a_gpu_that_hangs_is_never_opened_again(
    on_shim: ShimDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_module, "PATIENCE_S", 0.02)
    monkeypatch.setattr(gpu_module, "_lent", threading.Lock())
    encoder = open_gpu(tmp_path)
    on_shim.fail("cuStreamQuery", NOT_READY, times=1_000_000)
    with pytest.raises(GpuError, match="has not answered"):
        encoder.encode(bf16(MIB), RUNS)
    encoder.close()
    assert (tmp_path / MARKER).exists()
    with pytest.raises(GpuError, match="another run of this agent has it"):
        open_gpu(tmp_path)


def test_a_machine_without_a_driver_says_so(
    shim: ShimDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_module, "BUILT", shim.built)
    monkeypatch.setattr(gpu_module, "LIBRARY", "libcuda-of-nobody.so.1")
    with pytest.raises(GpuError, match=r"no CUDA driver \(libcuda-of-nobody"):
        open_gpu(tmp_path)
    monkeypatch.setattr(gpu_module, "BUILT", tmp_path)
    with pytest.raises(GpuError, match="no CUDA kernels for planes are here"):
        open_gpu(tmp_path)


# -- whole snapshots


@pytest.fixture
def cores_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run waits for its encoders, of which there are none."""
    monkeypatch.setattr(Effort, "cores_limit", property(lambda effort: True))
    monkeypatch.setattr(snapshot_module, "encoding_cores", lambda: 0)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    root = tmp_path / "was"
    root.mkdir()
    (root / "model.bin").write_bytes(bf16(4 * MIB * FILE_CHUNKS))
    (root / "notes.txt").write_text("words " * 100)
    let_settle()
    return root


def encodings(engine: Engine, root: Path) -> tuple[list[int], str]:
    """A snapshot in which the trial has decided before the fifth chunk: how each chunk was encoded,
    and what the report says about it."""
    report = engine.hibernate([root])
    comes_back(engine, report.snapshot, root)
    manifest = manifest_of(engine, report.snapshot)
    (model,) = (e for e in manifest.entries if e.kind == FILE and e.path == b"model.bin")
    return [manifest.chunks[extent.chunk].encoding for extent in model.extents], report.encoding


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial decides by one chunk in one round, before the next one comes."""
    monkeypatch.setattr(trial_module, "CHUNKS", MEASURED)
    monkeypatch.setattr(trial_module, "ROUNDS", 1)
    encode = GpuTrial.encode

    def settled(trial: GpuTrial, *args: object, **named: object) -> object:
        made = encode(trial, *args, **named)  # type: ignore[arg-type]
        trial.settle(60)
        return made

    monkeypatch.setattr(GpuTrial, "encode", settled)


def test_a_snapshot_that_a_gpu_encoded_wakes_on_a_machine_without_one(
    willing: Engine, weights: Path, on_shim: ShimDriver, cores_limit: None, at_once: None
) -> None:
    made, words = encodings(willing, weights)
    assert made == [PLANES.code] * MEASURED + [RANS.code] * (FILE_CHUNKS - MEASURED)
    assert "; GPU used: " in words
    assert "GPU used: " in (willing.home / LOG_FILE).read_text()
    assert on_shim.held == 0
    assert not (willing.home / MARKER).exists()


def test_a_gpu_that_fails_costs_a_snapshot_nothing_but_its_help(
    willing: Engine, weights: Path, on_shim: ShimDriver, cores_limit: None, at_once: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    measured = 2 * MEASURED  # to warm up, and in one round; 5 launches each
    on_shim.fail("cuLaunchKernel", LAUNCH_FAILED, nth=5 * measured + 7)
    made, words = encodings(willing, weights)
    assert made[MEASURED] == RANS.code
    assert set(made[MEASURED + 1 :]) == {PLANES.code}
    assert "; GPU used until it failed: " in words
    assert (willing.home / LOG_FILE).read_text().count("GPU used until it failed") == 1
    assert on_shim.held == 0


@pytest.mark.parametrize("at", [0, -1], ids=["no stream", "other content"])
def test_a_gpu_that_encodes_wrongly_is_found_before_anything_is_sent(
    willing: Engine, weights: Path, on_shim: ShimDriver, cores_limit: None, at_once: None,
    monkeypatch: pytest.MonkeyPatch, at: int,
) -> None:  # fmt: skip
    real, done = GpuEncoder.encode, itertools.count()

    def wrong(encoder: GpuEncoder, plain: bytes, runs: Sequence[Run]) -> bytes | None:
        stream = bytearray(real(encoder, plain, runs) or b"")
        stream[at] ^= next(done) > 2 * MEASURED  # right while it is measured, and once more
        return bytes(stream)

    monkeypatch.setattr(GpuEncoder, "encode", wrong)
    made, words = encodings(willing, weights)
    assert made == [PLANES.code] * MEASURED + [RANS.code] + [PLANES.code] * (
        FILE_CHUNKS - MEASURED - 1
    )
    said = "; GPU used until it failed: what it encoded did not come back"
    assert words.endswith(said)
    assert on_shim.held == 0


def test_without_a_driver_a_snapshot_says_so(
    willing: Engine, weights: Path, cores_limit: None, at_once: None,
    shim: ShimDriver, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(gpu_module, "BUILT", shim.built)
    monkeypatch.setattr(gpu_module, "LIBRARY", "libcuda-of-nobody.so.1")
    made, words = encodings(willing, weights)
    assert set(made) == {PLANES.code}
    assert "; GPU not used: no CUDA driver (libcuda-of-nobody" in words


def test_a_workspace_that_does_not_ask_for_it_never_touches_the_gpu(
    engine: Engine, weights: Path, on_shim: ShimDriver, cores_limit: None, at_once: None
) -> None:
    made, words = encodings(engine, weights)
    assert set(made) == {PLANES.code}
    assert on_shim.calls("cuInit") == 0
    assert "GPU" not in words


def test_a_run_that_is_given_up_gives_the_gpu_back(
    willing: Engine, weights: Path, on_shim: ShimDriver, cores_limit: None, at_once: None
) -> None:
    run = willing.begin([weights])
    (part,) = run.scan(1).parts
    run.store_part(1, part)
    assert (willing.home / MARKER).exists()
    willing.restart()
    assert on_shim.held == 0
    assert not (willing.home / MARKER).exists()


def test_encoding_cores_are_those_that_this_process_may_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    assert snapshot_module.encoding_cores() == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert snapshot_module.encoding_cores() == runs_module.WORKERS
