"""The CUDA source without a GPU: compiled for the CPU, against the C twins, byte for byte."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from gpu_kernels import build, cases, device, fuzz, native, probe, suite
from gpu_kernels.launch import Memory, Shim
from gpu_kernels.rans.portable import RansStreamError


def test_kernels_are_the_c_twins(shim: Shim, built_library: Path) -> None:
    assert suite.run(shim, large=False, refusals=300)["failures"] == []


class WrongShim(Shim):
    """A device whose every tenth byte is off by one, to see that the suite can fail."""

    def get(self, memory: Memory, offset: int, size: int) -> bytes:
        right = bytearray(super().get(memory, offset, size))
        for at in range(9, len(right) if size > 4000 else 0, 10):
            right[at] ^= 1
        return bytes(right)


def test_suite_reports_a_device_that_errs(shim: Shim, built_library: Path, tmp_path: Path) -> None:
    wrong = WrongShim(build.build_shim(tmp_path / "shim.so"))
    failures = suite.run(wrong, large=False, refusals=0)["failures"]
    assert isinstance(failures, list)
    assert any("split" in failure for failure in failures)
    assert any("encoding" in failure for failure in failures)
    assert any("decoding" in failure for failure in failures)


def test_batches_of_unequal_planes(shim: Shim, lib: native.Library) -> None:
    dice = random.Random(3)
    plains = [cases.exponents(dice, size) for size in (70_000, 1, 140_000, 5000)]
    streams = device.rans_encode(shim, [shim.put(plain) for plain in plains])
    assert streams[1] is None  # one byte cannot shrink
    whole = [
        bytes(native.rans_encode(lib, p, native.rans_bound(lib, len(p))) or b"") for p in plains
    ]
    assert [s or w for s, w in zip(streams, whole, strict=True)] == whole
    back = device.rans_decode(shim, whole, [len(plain) for plain in plains])
    assert [shim.get(m, 0, len(p)) for m, p in zip(back, plains, strict=True)] == plains


def test_one_damaged_stream_of_a_batch_is_refused(shim: Shim, lib: native.Library) -> None:
    plain = cases.exponents(random.Random(4), 5000)
    stream = bytes(native.rans_encode(lib, plain, 5000) or b"")
    damaged = bytearray(stream)
    damaged[-1] ^= 1
    with pytest.raises(RansStreamError):
        device.rans_decode(shim, [stream, bytes(damaged)], [5000, 5000])


def test_shim_refuses_what_is_not_there(shim: Shim) -> None:
    with pytest.raises(ValueError, match="no kernel 'nonsense'"):
        shim.launch("nonsense", (1, 1), 32, shim.put(bytes(64)))
    with pytest.raises(ValueError, match="33 threads"):
        shim.launch("rans_check", (1, 1), 33, shim.put(bytes(64)))


def test_without_a_gpu_the_suite_says_so_and_does_not_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(probe, "BUILT", tmp_path)
    assert suite.main() == suite.NO_GPU
    assert "no GPU suite was run: no CUDA kernels for planes, rans" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="nvcc was missing"):
        probe.open_gpu()


def test_mutated_streams_under_sanitizers() -> None:
    figures = fuzz.fuzz(streams=5000, seed=20_261_120)
    assert figures["streams"] == 5000
    assert sum(figures["refused"].values()) > 2000
    assert all(count > 0 for count in figures["refused"].values())


def test_library_needs_nothing_but_an_old_c_library(built_library: Path) -> None:
    listed = subprocess.run(
        ["readelf", "--version-info", "--dynamic", str(built_library)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    needed = [line.split("[")[1].split("]")[0] for line in listed.splitlines() if "NEEDED" in line]
    assert set(needed) <= {"libc.so.6"}
    versions = {part for part in listed.split() if part.startswith("GLIBC_")}
    assert versions <= {"GLIBC_2.2.5", "GLIBC_2.14", "GLIBC_2.17"}


def test_a_missing_compiler_is_named() -> None:
    with pytest.raises(build.BuildError, match="no C compiler for sparc was found: install gcc"):
        build.build_library(machine="sparc")
    assert shutil.which("sparc-linux-gnu-gcc") is None
