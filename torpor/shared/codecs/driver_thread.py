"""A thread that waits for the GPU's driver, so that its caller can stop waiting after a time
limit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from queue import SimpleQueue
from typing import TypeVar

from gpu_kernels.device import GpuHangs, Queue

_T = TypeVar("_T")


class DriverThread:
    """Does one piece of work at a time, for one thread at a time. RuntimeError where the system
    gives no more threads.

    A call of the driver for a GPU that is lost may never return, and no signal ends it. Then the
    thread is abandoned: it blocks neither the caller nor the end of the process.
    """

    def __init__(self, name: str) -> None:
        self.queue: Queue | None = None
        """For the work to set and to use."""
        self._asked: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def run(self, work: Callable[[], _T], patience_s: float) -> _T:
        """Return or raise what ``work`` does; GpuHangs after ``patience_s``, and on every later
        call.
        """
        outcome: futures.Future[_T] = futures.Future()

        def do() -> None:
            try:
                outcome.set_result(work())
            except BaseException as error:  # noqa: BLE001  the thread's border: run raises it
                outcome.set_exception(error)

        self._asked.put(do)
        if not futures.wait([outcome], patience_s).done:
            raise GpuHangs(f"the GPU's driver has not come back for {patience_s:g} s")
        return outcome.result()

    def end(self) -> None:
        """Let the thread go, behind the work that it has."""
        self._asked.put(None)

    def _serve(self) -> None:
        while (do := self._asked.get()) is not None:
            do()
            del do  # it holds a chunk and its stream: not until the next one comes
