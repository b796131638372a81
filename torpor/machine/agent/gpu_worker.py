"""The agent's side of the process that works on the GPU.

The agent never loads the driver. A worker that dies, takes too long or fails is killed, and the CPU
codes the chunks that it had.
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import gpu_kernels
from gpu_kernels.rans.portable import RansStreamError
from gpu_kernels.worker import CHUNK_MAX, MESSAGE_MAX, SLOT_BYTES, SLOTS
from torpor.shared.codecs.codec import Buffer
from torpor.shared.codecs.gpu import GpuError
from torpor.shared.codecs.layout import Element

START_S: Final = 60.0
"""Seconds to import CuPy, open the GPU and load the kernels: 2 s were measured."""
WORK_S: Final = 20.0
"""Seconds for one chunk, which takes milliseconds even on a busy GPU."""
_END_S: Final = 5.0  # seconds for the kernel to remove a killed process
_POLL_S: Final = 0.1

_KERNELS: Final = Path(gpu_kernels.__file__).parent
# The code that makes one package importable, and nothing else of the agent's, whose libraries are
# built for another Python. Its first argument is the package's folder.
_BOOT: Final = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("gpu_kernels", sys.argv[1] + "/__init__.py")
sys.modules["gpu_kernels"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["gpu_kernels"])
from gpu_kernels.worker import main
sys.exit(main(sys.argv[2:]))
"""


class NotHere(GpuError):
    """This Python cannot run the worker; another one may."""


class _Slot(NamedTuple):
    socket: socket.socket
    memory: memoryview


class GpuWorker:
    """A worker under the Python ``python``; implements ``torpor.shared.codecs.gpu.Gpu``.

    Takes SLOTS * SLOT_BYTES of memory, shared with the worker, until it is closed. The constructor
    raises NotHere or another GpuError with the reason, also when ``stopped`` says that nobody
    waits any more.
    """

    def __init__(
        self,
        python: str,
        stopped: Callable[[], bool] = lambda: False,
        path: str = "",
        start_s: float = START_S,
    ) -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(1 + SLOTS)]
        self._life = pairs[0][0]
        fd = os.memfd_create("torpor-gpu")
        try:
            os.ftruncate(fd, SLOTS * SLOT_BYTES)
            shared = memoryview(mmap.mmap(fd, SLOTS * SLOT_BYTES))
            fds = [pairs[0][1].fileno(), fd, *(theirs.fileno() for _, theirs in pairs[1:])]
            self._process = subprocess.Popen(
                [python, "-c", _BOOT, os.fspath(_KERNELS), *map(str, fds)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=_environment(path),
                pass_fds=fds,
                start_new_session=True,
            )
        except OSError as error:
            for ours, _ in pairs:
                ours.close()
            raise NotHere(f"{python} cannot be started ({error.strerror})") from None
        finally:
            os.close(fd)
            for _, theirs in pairs:
                theirs.close()
        self._slots: queue.SimpleQueue[_Slot | None] = queue.SimpleQueue()
        for number, (ours, _) in enumerate(pairs[1:]):
            ours.settimeout(WORK_S)
            part = shared[number * SLOT_BYTES : (number + 1) * SLOT_BYTES]
            self._slots.put(_Slot(ours, part))
        self.released: Callable[[], None] = lambda: None
        """Called once, after ``close``."""
        self._lock = threading.Lock()
        self._why = ""
        self._closed = False
        try:
            self.name = self._greeting(python, stopped, start_s)
        except BaseException:
            self.close()
            raise

    def encode(
        self, parts: Sequence[memoryview], element: Element, coded: Sequence[int]
    ) -> list[tuple[bool, bytes]]:
        with self._slot() as slot:
            size = _put(slot.memory, parts)
            told = self._ask(slot, op="encode", bytes=size, coded=coded, **_shape(element))
            made, at = [], CHUNK_MAX
            for is_stream, length in told["planes"]:
                made.append((bool(is_stream), bytes(slot.memory[at : at + length])))
                at += length
        if len(made) != element.width or any(
            len(stored) > size // element.width for _, stored in made
        ):
            raise self._failed("its answer makes no sense")
        return made

    def decode(
        self, planes: Sequence[tuple[bool, Buffer]], element: Element, parts: Sequence[memoryview]
    ) -> None:
        size = sum(map(len, parts))
        with self._slot() as slot:
            _put(slot.memory, [memoryview(stored) for _, stored in planes])
            lengths = [(is_stream, len(stored)) for is_stream, stored in planes]
            self._ask(slot, op="decode", bytes=size, planes=lengths, **_shape(element))
            at = CHUNK_MAX
            for part in parts:
                part[:] = slot.memory[at : at + len(part)]
                at += len(part)

    def close(self) -> None:
        """Kill the worker; requests at work on it fail at once. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._kill()
        for _ in range(SLOTS):
            slot = self._slots.get()  # each thread gives its slot back within WORK_S
            if slot is not None:
                slot.socket.close()
        self._slots.put(None)
        self._life.close()
        self.released()

    @contextmanager
    def _slot(self) -> Iterator[_Slot]:
        slot = self._slots.get()
        if slot is None:
            self._slots.put(None)
            raise GpuError("it was given back")
        try:
            yield slot
        finally:
            self._slots.put(slot)

    def _ask(self, slot: _Slot, **request: Any) -> dict[str, Any]:
        try:
            slot.socket.send(json.dumps(request).encode())
            answer = slot.socket.recv(MESSAGE_MAX)
        except TimeoutError:
            raise self._failed(f"its worker did not answer for {WORK_S:g} s") from None
        except OSError:
            answer = b""
        told = json.loads(answer) if answer else {"error": f"its worker {self._end()}"}
        if "refused" in told:
            raise RansStreamError("content")
        if "error" in told:
            raise self._failed(told["error"])
        return dict(told)

    def _greeting(self, python: str, stopped: Callable[[], bool], start_s: float) -> str:
        self._life.settimeout(_POLL_S)
        until = time.monotonic() + start_s
        while True:
            if stopped():
                raise GpuError("the run ended while it was measured")
            try:
                greeting = self._life.recv(MESSAGE_MAX)
                break
            except TimeoutError:
                if time.monotonic() > until:
                    raise NotHere(f"{python} did not open it within {start_s:g} s") from None
        if not greeting:
            raise NotHere(f"the worker of {python} {self._end()}")
        told = json.loads(greeting)
        if "refused" in told:
            raise (NotHere if told["elsewhere"] else GpuError)(f"{python}: {told['refused']}")
        return str(told["gpu"])

    def _failed(self, why: str) -> GpuError:
        with self._lock:  # threads that fail after this have failed because the worker was killed
            self._why = self._why or why
        self._kill()
        return GpuError(self._why)

    def _end(self) -> str:
        """How the process ended, once it has let its sockets go."""
        try:
            status = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return "went silent"
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        return f"ended with status {status}"

    def _kill(self) -> None:
        self._process.kill()
        # the process hangs in the kernel: do not wait for it
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)


def _put(memory: memoryview, parts: Sequence[memoryview]) -> int:
    at = 0
    if sum(map(len, parts)) > CHUNK_MAX:
        raise ValueError(f"more than {CHUNK_MAX} bytes for one slot")
    for part in parts:
        memory[at : at + len(part)] = part
        at += len(part)
    return at


def _shape(element: Element) -> dict[str, object]:
    return {"width": element.width, "turned": element.turned}


def _environment(path: str) -> dict[str, str]:
    """The agent's environment, without variables that would change which modules a Python finds."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    here = {"PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1", "CUDA_CACHE_DISABLE": "1"}
    return kept | here | ({"PYTHONPATH": path} if path else {})
