"""Timing on a queue, by events of a driver whose clock only work moves on."""

from __future__ import annotations

import ctypes
import re
import struct
from contextlib import closing

import pytest

from gpu_kernels.clock import Clock
from gpu_kernels.device import Device, Memory, Queue
from gpu_kernels.driver import GpuError
from tests.fixtures.shim import LAUNCH_FAILED, OUT_OF_MEMORY, ShimDriver
from torpor.shared.values import MIB

TICK_S = 1e-9
"""What an event takes of the shim's clock; a byte copied and a thread started take as much."""


def test_what_lies_between_start_and_stop_is_timed_and_nothing_else(queue: Queue) -> None:
    with queue.scope(), closing(Clock(queue)) as clock:
        source, target = queue.put(b"a" * 4000), queue.room(4000)
        for rounds in (1, 3):
            queue.copy(source, target)
            clock.start()
            for _ in range(rounds):
                queue.copy(source, target)
            clock.stop()
            queue.copy(source, target)
            assert clock.seconds() == pytest.approx(rounds * 4000e-9 + TICK_S)
        assert queue.get(target) == b"a" * 4000


def test_kernels_and_copies_of_the_host_are_timed_too(queue: Queue) -> None:
    with queue.scope(), closing(Clock(queue)) as clock:
        host, there = queue.staging(1000), queue.room(1000)
        ctypes.memset(host.address, 7, host.bytes)
        clock.start()
        queue.send(host, there)
        clock.stop()
        assert clock.seconds() == pytest.approx(1000e-9 + TICK_S)
        ctypes.memset(host.address, 0, host.bytes)
        clock.start()
        queue.bring(there, host)
        clock.stop()
        assert clock.seconds() == pytest.approx(1000e-9 + TICK_S)
        assert ctypes.string_at(host.address, host.bytes) == b"\7" * 1000
        job = struct.pack("<6Q", there.address, queue.room(512).address, 100, 256, 2, 0)
        held = queue.put(job)
        clock.start()
        queue.launch("planes_split", (1, 1), 256, held)
        clock.stop()
        assert clock.seconds() == pytest.approx(256e-9 + TICK_S)


def test_a_clock_that_was_never_started_has_no_time(queue: Queue) -> None:
    with queue.scope(), closing(Clock(queue)) as clock:
        clock.stop()
        with pytest.raises(GpuError, match="cuEventElapsedTime failed with 400"):
            clock.seconds()


def test_the_driver_of_the_tests_waits_for_an_event(queue: Queue) -> None:
    """As a real one: before the stream has come there, an event has no time."""
    with queue.scope(), closing(Clock(queue)) as clock:
        clock.start()
        clock.stop()
        elapsed_ms = ctypes.c_float()
        with pytest.raises(GpuError, match="cuEventElapsedTime failed with 600"):
            queue.device.driver.call("cuEventElapsedTime", ctypes.byref(elapsed_ms), *clock._events)


@pytest.mark.parametrize("nth", [1, 2])
def test_a_clock_that_cannot_be_had_keeps_nothing(queue: Queue, shim: ShimDriver, nth: int) -> None:
    before = shim.held
    shim.fail("cuEventCreate", OUT_OF_MEMORY, nth=nth)
    with pytest.raises(GpuError, match="cuEventCreate failed with 2: out of memory"):
        Clock(queue)
    assert shim.held == before


@pytest.mark.parametrize("function", ["cuEventRecord", "cuEventElapsedTime", "cuStreamQuery"])
def test_after_a_fault_all_goes_with_the_device(shim: ShimDriver, function: str) -> None:
    device = shim.device()
    queue = device.queue(MIB, MIB)
    shim.fail(function, LAUNCH_FAILED)
    with pytest.raises(GpuError, match="719"), queue.scope(), closing(Clock(queue)) as clock:
        clock.start()
        clock.stop()
        clock.seconds()
    device.close()
    assert shim.held == 0


def test_a_clock_gives_its_events_back_with_work_ahead_of_them(
    device: Device, shim: ShimDriver
) -> None:
    queue = device.queue(MIB, MIB)
    before = shim.held
    with queue.scope():
        with closing(Clock(queue)) as clock:
            clock.start()
            queue.put(b"x")
            clock.stop()
        assert shim.held == before
        clock.close()
    assert shim.calls("cuEventDestroy_v2") == 2


def test_copies_of_unlike_sizes_are_refused(queue: Queue) -> None:
    with queue.scope():
        a, b = queue.room(10), queue.room(11)
        for copy in (queue.copy, queue.bring, queue.send):
            with pytest.raises(ValueError, match=re.escape("10 bytes are not to be copied to 11")):
                copy(a, b)
        with pytest.raises(GpuError, match="cuMemcpyDtoDAsync_v2 failed with 1"):
            queue.copy(a, Memory(4096, 10))
