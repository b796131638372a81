"""The CUDA source without a GPU: compiled for the CPU, against the C twins, byte for byte."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpu_kernels import batch, native
from gpu_kernels.rans.portable import RansStreamError
from tests.fixtures.manifests import plain_entries
from tests.gpu_kernels import cases, fuzz, suite
from torpor.shared.format.manifest import Entries


def test_kernels_are_the_c_twins_and_write_only_their_memory(
    cupy: Any, gpu: Any, built_library: Path
) -> None:
    cupy.kept = []
    assert suite.run(gpu, large=False, refusals=300)["failures"] == []
    assert len(cupy.kept) > 1000
    assert guards_touched(cupy) == 0
    plain, planes = gpu.put(bytes(80)), gpu.room(100)
    wrong = [batch.Planes(planes, 40, 64)]  # the second plane ends at 104
    batch._planes_work(gpu, "planes_split", [plain], wrong, 2, False).launch()
    assert guards_touched(cupy) == 1


def guards_touched(cupy: Any) -> int:
    guards = [g for one in cupy.kept for g in (one[: cupy.GUARD], one[-cupy.GUARD :])]
    return sum(bytes(guard) != b"\x3c" * cupy.GUARD for guard in guards)


def test_suite_reports_a_gpu_that_errs(cupy: Any, gpu: Any, built_library: Path) -> None:
    cupy.PLAN |= {"at": 0, "do": "lie"}
    failures = suite.run(gpu, large=False, refusals=0)["failures"]
    assert isinstance(failures, list)
    for what in ("split", "join", "encoding", "decoding"):
        assert any(what in failure for failure in failures)


def test_one_damaged_stream_of_a_batch_is_refused(gpu: Any, lib: native.Library) -> None:
    plain = cases.exponents(random.Random(4), 5000)
    stream = bytes(native.rans_encode(lib, plain, 5000) or b"")
    damaged = stream[:-1] + bytes([stream[-1] ^ 1])
    decoding = batch.rans_decode(
        gpu, [gpu.put(stream), gpu.put(damaged)], [gpu.room(5000), gpu.room(5000)]
    )
    decoding.work.launch()
    with pytest.raises(RansStreamError):
        decoding.check()


def test_sizes_that_do_not_fit_are_refused(gpu: Any) -> None:
    plain = gpu.put(bytes(80))
    _, planes = batch.split(gpu, [plain], 2, False)
    for wrong in (78, 82):
        with pytest.raises(ValueError, match=f"40 elements of 2 do not make {wrong} bytes"):
            batch.join(gpu, planes, [gpu.room(wrong)], 2, False)
    with pytest.raises(ValueError, match="do not hold 8 planes"):
        batch.join(gpu, planes, [gpu.room(320)], 8, False)
    with pytest.raises(ValueError, match="are not elements of 3"):
        batch.split(gpu, [plain], 3, False)
    with pytest.raises(ValueError, match="a plane must hold 1 to"):
        batch.rans_encode(gpu, [gpu.room(0)])
    with pytest.raises(ValueError, match="a batch of 0"):
        batch._put_jobs(gpu, [])
    for copy in (gpu.copy, lambda a, b: gpu.fetch(a, bytearray(81))):
        with pytest.raises(ValueError, match="80 bytes cannot be copied to 81"):
            copy(plain, gpu.room(81))
    for header in (b"", b"tR\x01\x0b" + bytes(12)):
        with pytest.raises(RansStreamError):
            batch.segment_log2_of(header)


@pytest.mark.parametrize("plan", [{"devices": 0}, {"load": "no binary for this GPU"}])
def test_without_a_gpu_that_fits_the_suite_says_so_and_does_not_pass(
    cupy: Any, capsys: pytest.CaptureFixture[str], plan: dict[str, object]
) -> None:
    cupy.PLAN |= plan
    assert suite.main() == suite.NO_GPU == 3
    said = capsys.readouterr().err
    if "load" in plan:
        assert "the kernels do not load on CPU stand-in" in said
        assert "compute capability 7.0 or later, and NVIDIA's driver 525 or newer" in said
    else:
        assert "no NVIDIA GPU can be used" in said


def test_without_cupy_the_suite_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.delitem(sys.modules, "gpu_kernels.cuda", raising=False)
    assert suite.main() == suite.NO_GPU
    assert "install torpor[gpu]" in capsys.readouterr().err


def test_mutated_streams_under_sanitizers() -> None:
    figures = fuzz.fuzz(streams=5000, seed=20_261_120)
    assert figures["streams"] == 5000
    assert sum(figures["refused"].values()) > 2000
    assert all(count > 0 for count in figures["refused"].values())


def test_mutated_entries_under_sanitizers() -> None:
    rounds = 5000
    figures = fuzz.fuzz_entries(Entries(plain_entries()), rounds, seed=20_261_127)
    assert figures["rows"] > 10 * rounds
    assert figures["filled"] > 10 * rounds


def test_library_needs_nothing_but_an_old_c_library(built_library: Path) -> None:
    listed = subprocess.run(
        ["readelf", "--version-info", "--dynamic", str(built_library)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    needed = [line.split("[")[1].split("]")[0] for line in listed.splitlines() if "NEEDED" in line]
    assert set(needed) <= {"libc.so.6"}
    versions = {part[6:] for part in listed.split() if part.startswith("GLIBC_")}
    assert max(tuple(map(int, version.split("."))) for version in versions) <= (2, 17)
