"""The CUDA source without a GPU: compiled for the CPU, against the C twins, byte for byte."""

from __future__ import annotations

import ctypes
import json
import random
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpu_kernels import batch, build, cases, fuzz, native, suite, twin
from gpu_kernels import device as device_module
from gpu_kernels.device import Device, Memory, Queue
from gpu_kernels.rans.portable import RansStreamError
from tests.fixtures.shim import ShimDriver


def test_kernels_are_the_c_twins(device: Device, built_library: Path) -> None:
    assert suite.run(device, large=False, refusals=300)["failures"] == []


class WrongQueue(Queue):
    """A queue whose every tenth byte comes back off by one, to see that the suite can fail."""

    def get(self, memory: Memory) -> bytes:
        right = bytearray(super().get(memory))
        for at in range(9, len(right) if memory.bytes > 4000 else 0, 10):
            right[at] ^= 1
        return bytes(right)


def test_suite_reports_a_device_that_errs(
    device: Device, built_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_module, "Queue", WrongQueue)
    failures = suite.run(device, large=False, refusals=0)["failures"]
    assert isinstance(failures, list)
    assert any("split" in failure for failure in failures)
    assert any("encoding" in failure for failure in failures)
    assert any("decoding" in failure for failure in failures)


class GuardedQueue(Queue):
    """A queue whose memory lies between guards, to see that no kernel writes beside its own."""

    GUARD = b"\x3c" * 64

    def __init__(self, device: Device, device_bytes: int, pinned_bytes: int) -> None:
        super().__init__(device, device_bytes, pinned_bytes)
        self.guarded: list[Memory] = []
        self.touched = self.checked = 0

    def room(self, size: int) -> Memory:
        block = super().room(size + 2 * len(self.GUARD) + 15)
        memory = block.part(len(self.GUARD), size)
        for guard in self._guards(memory):
            host = self.staging(len(self.GUARD))
            ctypes.memmove(host.address, self.GUARD, len(self.GUARD))
            self.send(host, guard)
        self.guarded.append(memory)
        return memory

    @contextmanager
    def scope(self) -> Iterator[None]:
        with super().scope():
            held = len(self.guarded)
            try:
                yield
            finally:
                mine, self.guarded = self.guarded[held:], self.guarded[:held]
                guards = self.fetch([guard for memory in mine for guard in self._guards(memory)])
                self.checked += len(guards)
                self.touched += sum(guard != self.GUARD for guard in guards)

    def _guards(self, memory: Memory) -> tuple[Memory, Memory]:
        size = len(self.GUARD)
        return Memory(memory.address - size, size), Memory(memory.address + memory.bytes, size)


def test_no_kernel_writes_beside_its_memory(
    device: Device, built_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[GuardedQueue] = []

    def guarded(*args: Any) -> GuardedQueue:
        made.append(GuardedQueue(*args))
        return made[-1]

    monkeypatch.setattr(device_module, "Queue", guarded)
    assert suite.run(device, large=False, refusals=300)["failures"] == []
    assert all(queue.checked > 100 for queue in made)
    assert [queue.touched for queue in made] == [0, 0, 0]
    with made[0].scope():  # and it would be seen
        plain, planes = made[0].put(bytes(80)), made[0].room(100)
        job = (plain.address, planes.address, 40, 64, 2, 0)  # the second one ends at 104
        made[0].launch("planes_split", (1, 1), 256, made[0].put(struct.pack("<6Q", *job)))
    assert made[0].touched == 1


def test_batches_of_unequal_planes(queue: Queue, lib: native.Library) -> None:
    dice = random.Random(3)
    plains = [cases.exponents(dice, size) for size in (70_000, 1, 140_000, 5000)]
    with queue.scope():
        made = batch.rans_encode(queue, [queue.put(plain) for plain in plains])
        streams = [None if one is None else queue.get(one) for one in made]
    assert streams[1] is None  # one byte cannot shrink
    whole = [
        bytes(native.rans_encode(lib, p, native.rans_bound(lib, len(p))) or b"") for p in plains
    ]
    assert [s or w for s, w in zip(streams, whole, strict=True)] == whole
    with queue.scope():
        back = batch.rans_decode(queue, whole, [len(plain) for plain in plains])
        assert [queue.get(memory) for memory in back] == plains


def test_one_damaged_stream_of_a_batch_is_refused(queue: Queue, lib: native.Library) -> None:
    plain = cases.exponents(random.Random(4), 5000)
    stream = bytes(native.rans_encode(lib, plain, 5000) or b"")
    damaged = bytearray(stream)
    damaged[-1] ^= 1
    with pytest.raises(RansStreamError), queue.scope():
        batch.rans_decode(queue, [stream, bytes(damaged)], [5000, 5000])


def test_prepared_work_may_be_launched_again(queue: Queue, built_library: Path) -> None:
    """Over whatever the launch before has left, also where the plain bytes are others by then."""
    dice = random.Random(5)
    first, second = cases.exponents(dice, 9000), cases.exponents(dice, 9000)
    with queue.scope():
        plane, back = queue.put(first), queue.room(9000)
        encoding = batch.prepare_rans_encode(queue, [plane])
        for plain in (first, second, second):
            queue.copy(queue.put(plain), plane)
            encoding.work.launch()
            (stream,) = encoding.streams()
            assert stream is not None
            assert queue.get(stream) == bytes(twin.rans_encode(plain, 9000) or b"")
            decoding = batch.prepare_rans_decode(queue, [stream], [back])
            for _ in range(2):
                queue.copy(queue.room(9000), back)  # rubbish
                decoding.work.launch()
                decoding.check()
                assert queue.get(back) == plain


def test_planes_are_joined_into_memory_of_their_size(queue: Queue) -> None:
    with queue.scope():
        planes = batch.split(queue, [queue.put(bytes(80))], 2, False)
        for wrong in (78, 82):
            with pytest.raises(ValueError, match=f"40 elements of 2 do not make {wrong} bytes"):
                batch.prepare_join(queue, planes, [queue.room(wrong)], 2, False)


def test_without_a_gpu_the_suite_says_so_and_does_not_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shim: ShimDriver
) -> None:
    shim.has_devices(0)
    monkeypatch.setattr(suite, "Device", shim.device)
    assert suite.main() == suite.NO_GPU
    assert "no GPU suite was run: cuInit failed with 100" in capsys.readouterr().err


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


def test_the_fat_binaries_are_of_these_sources() -> None:
    kept = json.loads((build.BUILT / "kernels.json").read_text())
    assert kept == build.cuda_digests(), "run python -m gpu_kernels.build where nvcc is, and commit"


def test_a_missing_compiler_is_named() -> None:
    with pytest.raises(build.BuildError, match="no C compiler for sparc was found: install gcc"):
        build.build_library(machine="sparc")
    assert shutil.which("sparc-linux-gnu-gcc") is None
