"""The machine's GPU in the agent: which Python works on it, and whole snapshots and restores."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.fixtures.engine import Engine
from tests.fixtures.gpu import STAND_IN, MakePython
from tests.fixtures.snapshots import manifest_of
from tests.fixtures.trees import let_settle
from torpor.machine.agent import gpu as gpu_module
from torpor.machine.agent import runs
from torpor.machine.agent.call import Call
from torpor.machine.agent.encodings import measure_encodings
from torpor.machine.agent.gpu import MachineGpu
from torpor.machine.agent.log import LOG_FILE
from torpor.machine.agent.workers import WORKERS
from torpor.shared.codecs import trial as trial_module
from torpor.shared.codecs.effort import Effort
from torpor.shared.codecs.gpu import GpuError
from torpor.shared.codecs.planes import PLANES, RANS
from torpor.shared.codecs.trial import GpuTrial
from torpor.shared.format.manifest import FILE
from torpor.shared.values import MIB, Compression, GpuUse, SnapshotId
from torpor.shared.wire.machine import Encodings, MeasureEncodings

FILES = 4
"""Files of one chunk each: the first is measured, the others are coded by what was decided."""
LAUNCHES = 5
"""Of a chunk that is encoded: one cuts it, four make the stream of its exponents."""


@pytest.fixture(autouse=True)
def a_gpu_s_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_module, "DEVICES", (os.devnull,))


# -- which Python


def no_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_module, "_PLACES", ())
    monkeypatch.setenv("PATH", "")


def opened(home: Path, use: GpuUse, *roots: Path) -> str:
    """The GPU's name as its worker says it."""
    worker = MachineGpu(home, use, [os.fsencode(root) for root in roots]).open(lambda: False)
    worker.close()
    return worker.name


def test_the_python_that_the_block_names_is_the_only_one(
    tmp_path: Path, make_python: MakePython
) -> None:
    assert opened(tmp_path, GpuUse(python=make_python())).startswith("CPU stand-in")
    with pytest.raises(GpuError, match="/none/python cannot be started"):
        opened(tmp_path, GpuUse(python="/none/python"))


def test_an_environment_of_the_workspace_is_found(
    tmp_path: Path, make_python: MakePython, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_python(monkeypatch)
    for name, python in (("a", make_python(missing="no CuPy")), ("b", make_python())):
        folder = tmp_path / name / ".venv" / "bin"
        folder.mkdir(parents=True)
        (folder / "python").symlink_to(python)
    assert opened(tmp_path, GpuUse(), tmp_path).startswith("CPU stand-in")
    monkeypatch.setattr(gpu_module, "PYTHONS_MAX", 1)
    with pytest.raises(GpuError, match=r"none of 1 Python environments .*a/\.venv/bin/python"):
        opened(tmp_path, GpuUse(), tmp_path)


def test_without_any_cupy_the_words_say_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_python(monkeypatch)
    with pytest.raises(GpuError, match=r"none was found.*name one in the Tuning block .*or allow"):
        opened(tmp_path, GpuUse(), tmp_path)


@pytest.fixture
def installer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Put a program in uv's place, with ``script`` as its body; the agent's folder."""
    no_python(monkeypatch)

    def put(script: str) -> Path:
        program = tmp_path / "bin" / "uv"
        program.parent.mkdir()
        program.write_text(f"#!{sys.executable}\nimport shutil, sys\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", os.fspath(program.parent))
        home = tmp_path / "home"
        home.mkdir()
        return home

    return put


def test_an_install_that_the_block_allows_goes_into_the_agent_s_folder(
    installer: Callable[[str], Path], shim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = installer(
        "assert sys.argv[-2:] == ['cupy-cuda12x==14.2.0', 'numpy>=2,<3'], sys.argv\n"
        f"shutil.copytree({os.fspath(STAND_IN)!r}, sys.argv[sys.argv.index('--target') + 1])"
    )
    monkeypatch.setenv("STAND_IN", f'{{"library": "{shim}"}}')
    assert opened(home, GpuUse(install=True)).startswith("CPU stand-in")
    (home.parent / "bin" / "uv").unlink()
    assert opened(home, GpuUse(install=True)).startswith("CPU stand-in")  # it is there now


def test_an_install_that_fails_or_takes_too_long_is_said(
    installer: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = installer("if sys.argv[1] == 'pip': sys.exit('no such package')")
    with pytest.raises(GpuError, match="CuPy cannot be installed: no such package"):
        opened(home, GpuUse(install=True))
    (home.parent / "bin" / "uv").write_text("#!/bin/sh\nexec /bin/sleep 600\n")
    with pytest.raises(GpuError, match="the run ended while CuPy was installed"):
        MachineGpu(home, GpuUse(install=True), []).open(lambda: True)
    monkeypatch.setattr(gpu_module, "INSTALL_S", 0.1)
    with pytest.raises(GpuError, match=r"CuPy was not installed within 0\.1 s"):
        opened(home, GpuUse(install=True))


def test_only_one_run_has_the_gpu(tmp_path: Path, make_python: MakePython) -> None:
    machine = MachineGpu(tmp_path, GpuUse(python=make_python()), [])
    first = machine.open(lambda: False)
    with pytest.raises(GpuError, match="another run of this agent has it"):
        machine.open(lambda: False)
    first.close()
    machine.open(lambda: False).close()


# -- the benchmark


def test_a_benchmark_measures_the_cores_and_the_gpu_of_its_machine(
    tmp_path: Path, make_python: MakePython
) -> None:
    def measured(use: GpuUse) -> Encodings:
        request = MeasureEncodings(content_bytes=MIB, rounds=1, seed=1, gpu=use)
        return measure_encodings(request, Call("r", tmp_path, lambda event: None))

    found = measured(GpuUse(python=make_python()))
    assert found.gpu.startswith("CPU stand-in") and found.digest_s > 0
    rows = {(coded.data, coded.codec): coded for coded in found.coded}
    on_gpu, planes = rows["BF16 weights", "rans"], rows["BF16 weights", "planes"]
    assert (on_gpu.by, planes.by) == ("GPU", "core")
    assert on_gpu.stored_bytes == pytest.approx(planes.stored_bytes, rel=0.01)
    assert min(on_gpu.encode_s + on_gpu.decode_s) > 0
    for broken in (make_python(at=0, do="lie"), "/none/python"):
        without = measured(GpuUse(python=broken))
        assert without.gpu.startswith("not measured: ")
        assert {coded.by for coded in without.coded} == {"core"}
        assert len(without.coded) == len(found.coded) - 1


# -- whole snapshots and restores


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial decides by one chunk in one round, before the next one comes; cores are so slow that
    any GPU is faster; and parts come one after the other."""
    monkeypatch.setattr(Effort, "cores_limit", property(lambda effort: True))
    monkeypatch.setattr(runs, "coding_cores", lambda: 0)
    monkeypatch.setattr(trial_module, "CHUNKS", 1)
    monkeypatch.setattr(trial_module, "ROUNDS", 1)
    collect = GpuTrial._collect

    def settled(trial: GpuTrial, sample: trial_module._Sample) -> None:
        collect(trial, sample)
        trial.settle(60)

    monkeypatch.setattr(GpuTrial, "_collect", settled)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    root = tmp_path / "was"
    root.mkdir()
    floats = np.random.default_rng(1).normal(0, 0.02, FILES * MIB // 2).astype(np.float32)
    bf16 = (floats.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    for number in range(FILES):
        (root / f"{number}.bin").write_bytes(bf16[number * MIB : (number + 1) * MIB])
    let_settle()
    return root


def using(engine: Engine, python: str = "") -> Engine:
    """Let the engine's agent use the GPU."""
    engine.compression = Compression(gpu=GpuUse(python))
    return engine


def encodings(engine: Engine, root: Path) -> tuple[SnapshotId, list[int], str]:
    """A snapshot that the CPU restores byte for byte; how each chunk was encoded, in order; what
    the report says about it."""
    report = engine.hibernate([root])
    check_restore(Engine(engine.store, engine.home.parent / "other"), report.snapshot, root)
    manifest = manifest_of(engine, report.snapshot)
    models = [e for e in manifest.entries if e.kind == FILE]
    made = [manifest.chunks[e.extents[0].chunk].encoding for e in models]
    return report.snapshot, made, report.encoding


def check_restore(engine: Engine, snapshot: SnapshotId, root: Path) -> str:
    """What the agent says of its decoding."""
    back = engine.home / "back"
    finished = engine.restore(snapshot, [back])
    for number in range(FILES):
        name = f"{number}.bin"
        assert (back / name).read_bytes() == (root / name).read_bytes()
    return finished.decoding


def test_a_snapshot_that_a_gpu_encoded_wakes_with_a_gpu_and_without(
    engine: Engine, weights: Path, make_python: MakePython, at_once: None
) -> None:
    snapshot, made, words = encodings(using(engine, make_python()), weights)
    assert made == [PLANES.code] + [RANS.code] * (FILES - 1)
    assert "; GPU used: " in words
    assert "GPU used: " in (engine.home / LOG_FILE).read_text()
    other = using(Engine(engine.store, engine.home.parent / "third"), make_python())
    assert check_restore(other, snapshot, weights).startswith("GPU used: ")
    assert not gpu_module._lent.locked()  # both gave it back


def test_a_worker_that_lies_amid_a_snapshot_costs_nothing_but_its_help(
    engine: Engine, weights: Path, make_python: MakePython, at_once: None
) -> None:
    """Other faults of a worker: test_gpu_worker.py and tests/shared/codecs/test_trial.py."""
    measured = 2 * LAUNCHES  # a round to warm up, and one
    python = make_python(at=measured + LAUNCHES + 1, do="lie")
    _, made, words = encodings(using(engine, python), weights)
    assert made == [PLANES.code, RANS.code] + [PLANES.code] * (FILES - 2)
    assert "; GPU used until it failed: what it encoded did not come back" in words
    assert (engine.home / LOG_FILE).read_text().count("GPU used until it failed") == 1


def test_a_machine_without_a_gpu_says_so_in_one_line(
    engine: Engine, weights: Path, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_module, "DEVICES", ("/dev/none",))
    _, made, words = encodings(using(engine), weights)
    assert set(made) == {PLANES.code}
    said = "; GPU not used: this machine has no NVIDIA GPU, or no driver for one"
    assert words.endswith(said)


def test_a_workspace_that_does_not_ask_for_it_starts_no_worker(
    engine: Engine, weights: Path, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MachineGpu, "__init__", None)
    _, made, words = encodings(engine, weights)
    assert set(made) == {PLANES.code}
    assert "GPU" not in words


def test_a_run_that_is_given_up_gives_the_gpu_back(
    engine: Engine, weights: Path, make_python: MakePython, at_once: None
) -> None:
    run = using(engine, make_python()).begin([weights])
    run.store(1)
    assert gpu_module._lent.locked()
    before = threading.active_count()
    engine.restart()
    assert not gpu_module._lent.locked()
    assert threading.active_count() <= before


def test_coding_cores_are_those_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    for allowed, cores in ((3, 3), (64, WORKERS)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, n=allowed: set(range(n)))
        assert runs.coding_cores() == cores
