"""A device and its queues, over a driver that fails on request."""

from __future__ import annotations

import random
import re
import struct
import threading
from pathlib import Path

import pytest

from gpu_kernels import batch, cases, driver
from gpu_kernels import device as device_module
from gpu_kernels.device import KERNELS, Device, GpuHangs, Memory, Queue
from gpu_kernels.driver import Driver, GpuError
from tests.fixtures.shim import LAUNCH_FAILED, NO_DEVICE, NOT_READY, OUT_OF_MEMORY, ShimDriver
from torpor.shared.values import MIB


def test_without_a_driver_the_reason_names_its_library(shim: ShimDriver, tmp_path: Path) -> None:
    with pytest.raises(GpuError, match=r"no CUDA driver \(libcuda-none\.so\.1: cannot open"):
        Device("libcuda-none.so.1", shim.built)
    with pytest.raises(GpuError, match=r"no CUDA driver \(.*undefined symbol: cuInit"):
        Device("libc.so.6", shim.built)


def test_without_kernels_the_driver_is_not_even_loaded(shim: ShimDriver, tmp_path: Path) -> None:
    with pytest.raises(GpuError, match="no CUDA kernels for planes are here"):
        Device(shim.library, tmp_path)
    assert shim.calls("cuInit") == 0


@pytest.mark.parametrize(
    ("function", "result", "words"),
    [
        ("cuInit", NO_DEVICE, "cuInit failed with 100: no CUDA-capable device is detected"),
        ("cuDeviceGetCount", 3, "cuDeviceGetCount failed with 3"),
        ("cuDeviceGet", 101, "cuDeviceGet failed with 101"),
        ("cuDeviceGetName", 101, "cuDeviceGetName failed with 101"),
        ("cuDevicePrimaryCtxRetain", OUT_OF_MEMORY, "Retain failed with 2: out of memory"),
        ("cuCtxSetCurrent", 201, "cuCtxSetCurrent failed with 201: invalid device context"),
        ("cuModuleLoadData", 209, "cuModuleLoadData failed with 209: an unknown error"),
        ("cuModuleGetFunction", 500, "cuModuleGetFunction failed with 500"),
    ],
)
def test_whatever_fails_while_it_is_opened_is_named_and_nothing_is_kept(
    shim: ShimDriver, function: str, result: int, words: str
) -> None:
    shim.fail(function, result)
    with pytest.raises(GpuError, match=re.escape(words)):
        shim.device()
    assert shim.held == 0
    shim.device().close()  # and the next one opens


def test_a_second_module_that_fails_takes_the_first_one_along(shim: ShimDriver) -> None:
    shim.fail("cuModuleLoadData", OUT_OF_MEMORY, nth=2)
    with pytest.raises(GpuError, match="out of memory"):
        shim.device()
    assert shim.calls("cuModuleUnload") == 1
    assert shim.held == 0


def test_no_gpu_of_that_number(shim: ShimDriver) -> None:
    with pytest.raises(GpuError, match="GPU 1 was asked for, the CUDA driver lists 1"):
        Device(shim.library, shim.built, index=1)


@pytest.mark.parametrize("function", ["cuStreamCreate", "cuMemAlloc_v2", "cuMemHostAlloc"])
def test_a_queue_that_cannot_be_had_keeps_nothing(
    device: Device, shim: ShimDriver, function: str
) -> None:
    before = shim.held
    shim.fail(function, OUT_OF_MEMORY)
    with pytest.raises(GpuError, match=f"{function} failed with 2: out of memory"):
        device.queue(MIB, MIB)
    assert shim.held == before


def test_memory_of_a_gpu_that_is_full(device: Device, shim: ShimDriver) -> None:
    shim.has_free(5 * MIB)
    assert device.free_bytes() == 5 * MIB
    with pytest.raises(GpuError, match="out of memory"):
        device.queue(6 * MIB, MIB)


def test_closing_gives_all_back_and_may_come_twice(shim: ShimDriver) -> None:
    device = shim.device()
    device.queue(MIB, MIB)
    assert shim.held > 4
    device.close()
    device.close()
    assert shim.held == 0
    assert shim.calls("cuDevicePrimaryCtxRelease_v2") == 1
    assert shim.calls("cuMemFree_v2") == shim.calls("cuMemFreeHost") == 1


def test_what_was_put_comes_back_and_waits_for_its_turn(queue: Queue) -> None:
    with queue.scope():
        first = queue.put(b"one", bytearray(b" and "), memoryview(b"two"))
        second = queue.put(b"x" * 5000)
        assert first.address % device_module.ALIGN == second.address % device_module.ALIGN == 0
        views = queue.fetch([second.part(10, 20), first, first.part(0, 0)])
        assert [bytes(view) for view in views] == [b"x" * 20, b"one and two", b""]


def test_fresh_memory_is_rubbish_and_a_scope_gives_its_memory_back(queue: Queue) -> None:
    with queue.scope():
        room = queue.room(1000)
        assert queue.get(room) == b"\xa5" * 1000
        with queue.scope():
            inner = queue.put(b"inner" * 100)
        again = queue.room(500)
    assert again.address == inner.address
    with queue.scope():
        assert queue.room(1).address == room.address


def test_a_scope_waits_for_copies_before_their_memory_is_used_again(queue: Queue) -> None:
    with queue.scope():
        planes = queue.room(2 * device_module.ALIGN)
        with queue.scope():
            plain = queue.put(b"ab" * 100)
            job = (plain.address, planes.address, 100, device_module.ALIGN, 2, 0)
            queue.launch("planes_split", (1, 1), 256, queue.put(struct.pack("<6Q", *job)))
        with queue.scope():  # the same pinned memory: too early, and it would spoil the copy above
            queue.put(b"xy" * 100)
        assert queue.get(planes.part(0, 100)) == b"b" * 100


def test_a_queue_is_bounded(device: Device) -> None:
    queue = device.queue(1 * MIB, 1 * MIB)
    with queue.scope():
        queue.room(MIB - 1)
        with pytest.raises(MemoryError, match="a queue of 1048576 bytes has no 1 bytes left"):
            queue.room(1)
    with (
        pytest.raises(MemoryError, match="stages 1048576 bytes, no 600000 are left"),
        queue.scope(),
    ):
        queue.get(queue.put(bytes(600_000)))
    with queue.scope():
        assert queue.get(queue.put(b"still of use")) == b"still of use"


def test_a_part_lies_within_its_memory() -> None:
    assert Memory(4096, 100).part(20, 80) == Memory(4116, 80)
    for offset, size in ((-1, 5), (20, 81), (101, 0), (5, -1)):
        with pytest.raises(ValueError, match="of 100"):
            Memory(4096, 100).part(offset, size)


def test_a_kernel_that_is_not_there_and_threads_that_it_cannot_have(queue: Queue) -> None:
    with queue.scope():
        jobs = queue.put(bytes(64))
        with pytest.raises(KeyError, match="nonsense"):
            queue.launch("nonsense", (1, 1), 32, jobs)
        with pytest.raises(GpuError, match="cuLaunchKernel failed with 1: invalid argument"):
            queue.launch("rans_check", (1, 1), 2048, jobs)


def test_a_fault_of_a_kernel_is_an_error_of_whoever_waits_and_of_all_that_follows(
    shim: ShimDriver,
) -> None:
    device = shim.device()
    queue, other = device.queue(MIB, MIB), device.queue(MIB, MIB)
    with (
        pytest.raises(GpuError, match="a queue failed with 719: unspecified launch failure"),
        queue.scope(),
    ):
        queue.launch("rans_check", (1, 1), 33, queue.put(bytes(64)))
        queue.wait()
    with pytest.raises(GpuError, match="719"), other.scope():
        other.put(b"x")
    device.close()
    assert shim.held == 0
    shim.device().close()


@pytest.mark.parametrize(
    "function",
    ["cuMemcpyHtoDAsync_v2", "cuLaunchKernel", "cuMemcpyDtoHAsync_v2", "cuStreamQuery"],
)
@pytest.mark.parametrize("nth", [1, 2])
def test_each_call_of_a_batch_may_fail(
    device: Device, queue: Queue, shim: ShimDriver, function: str, nth: int
) -> None:
    plain = cases.exponents(random.Random(1), 3000)
    shim.fail(function, LAUNCH_FAILED, nth=nth)
    with pytest.raises(GpuError, match="719"), queue.scope():
        (stream,) = batch.rans_encode(queue, [queue.put(plain)])
        assert stream is not None
        queue.get(stream)


def test_a_gpu_that_hangs_is_waited_for_so_long_and_no_longer(
    queue: Queue, shim: ShimDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_module, "PATIENCE_S", 0.02)
    shim.fail("cuStreamQuery", NOT_READY, times=1_000_000)
    with pytest.raises(GpuHangs, match=r"CPU shim has not answered for 0\.02 s"), queue.scope():
        queue.get(queue.put(b"x"))
    shim.fail("", 0, times=0)


def test_threads_have_queues_of_their_own(device: Device) -> None:
    plain = cases.exponents(random.Random(2), 40_000)
    streams: list[bytes] = []

    def encode() -> None:
        queue = device.queue(MIB, MIB)
        for _ in range(3):
            with queue.scope():
                (stream,) = batch.rans_encode(queue, [queue.put(plain)])
                assert stream is not None
                streams.append(queue.get(stream))

    threads = [threading.Thread(target=encode) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(streams) == 12
    assert len(set(streams)) == 1


def test_a_thread_that_does_not_enter_is_told_so(device: Device) -> None:
    """The driver keeps the current context for each thread: a scope must make it so."""
    queue = device.queue(MIB, MIB)
    said: list[str] = []

    def put() -> None:
        try:
            queue.put(b"x")
        except GpuError as error:
            said.append(str(error))
        with queue.scope():
            said.append(queue.get(queue.put(b"fine")).decode())

    thread = threading.Thread(target=put)
    thread.start()
    thread.join()
    assert said == ["cuMemcpyHtoDAsync_v2 failed with 201: invalid device context", "fine"]


def test_the_driver_that_is_asked_for_is_the_one_of_every_nvidia_machine() -> None:
    assert driver.LIBRARY == "libcuda.so.1"
    with pytest.raises(GpuError, match=r"no CUDA driver \(libcuda"):
        Driver("libcuda.so.none")
    assert {kernel.split("_")[0] for names in KERNELS.values() for kernel in names} == set(KERNELS)
