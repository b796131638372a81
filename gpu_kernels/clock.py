"""How long work on a queue takes the GPU, by the GPU's own clock."""

from __future__ import annotations

import ctypes

from gpu_kernels.device import Queue


class Clock:
    """Two events on a queue's stream. For the queue's thread; closed before its device is.

    What is put on the queue between ``start`` and ``stop`` is timed, to about a microsecond, and so
    is the time for which the stream has nothing to do because the host has put nothing there yet.
    GpuError where the driver fails.
    """

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._driver = queue.device.driver
        self._events: list[ctypes.c_void_p] = []
        queue.device.enter()
        try:
            for _ in range(2):
                event = ctypes.c_void_p()
                self._driver.call("cuEventCreate", ctypes.byref(event), 0)
                self._events.append(event)
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """The clock starts when all that was put before has ended."""
        self._driver.call("cuEventRecord", self._events[0], self._queue.stream)

    def stop(self) -> None:
        """It stops when all that was put since has ended."""
        self._driver.call("cuEventRecord", self._events[1], self._queue.stream)

    def seconds(self) -> float:
        """From the last start to the last stop; waits for all work on the queue."""
        self._queue.wait()
        elapsed_ms = ctypes.c_float()
        self._driver.call("cuEventElapsedTime", ctypes.byref(elapsed_ms), *self._events)
        return elapsed_ms.value / 1000

    def close(self) -> None:
        """Give the events back. Idempotent. What the driver refuses goes with the context."""
        while self._events:
            self._driver.ask("cuEventDestroy_v2", self._events.pop())
