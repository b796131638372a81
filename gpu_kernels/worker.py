"""Codes planes on the GPU for an agent, in a process of its own, which may crash or hang alone.

The agent starts it under a Python that can import CuPy. They share SLOTS slots of memory and a
socket for each: a request says what lies in the slot's first half, the answer what was put into its
second. Messages are JSON. A first socket carries the greeting; when the agent closes it, or dies,
this process ends at once, whatever its threads wait for.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from gpu_kernels import batch
from gpu_kernels.rans.portable import RansStreamError

if TYPE_CHECKING:
    from gpu_kernels.cuda import Gpu

SLOTS: Final = 8
"""Chunks that are coded at once."""
CHUNK_MAX: Final = 4 << 20
"""The most plain bytes of a request."""
SLOT_BYTES: Final = 2 * CHUNK_MAX
MESSAGE_MAX: Final = 4096
FREE_LEAST: Final = 2 << 30
"""A GPU with less memory free is left to the work that it is rented for."""
POOL_BYTES: Final = 512 << 20
"""Bytes of the GPU's memory that the worker takes, besides what the driver takes for itself."""


def main(argv: Sequence[str]) -> int:
    """``argv``: the descriptors of the greeting's socket, the memory, and each slot's socket."""
    life, memory, *slots = map(int, argv)
    agent = socket.socket(fileno=life)
    try:
        gpu = _open(shared := memoryview(mmap.mmap(memory, len(slots) * SLOT_BYTES)))
    except _Refused as why:
        _send(agent, why.answer)
        return 1
    for number, slot in enumerate(slots):
        part = shared[number * SLOT_BYTES : (number + 1) * SLOT_BYTES]
        serve = threading.Thread(
            target=_serve, args=(gpu, socket.socket(fileno=slot), part), daemon=True
        )
        serve.start()
    _send(agent, {"gpu": gpu.name})
    with suppress(ConnectionResetError):
        agent.recv(1)  # nothing is ever sent: recv returns when the agent has closed the socket
    os._exit(0)


class _Refused(Exception):
    """The worker cannot serve. ``elsewhere``: another Python of this machine may do better."""

    def __init__(self, why: object, *, elsewhere: bool = False) -> None:
        self.answer = {"refused": _line(why), "elsewhere": elsewhere}


def _open(shared: memoryview) -> Gpu:
    try:
        from gpu_kernels import cuda
    except Exception as error:  # CuPy raises various errors where it does not fit its libraries
        raise _Refused(f"CuPy cannot be imported ({_line(error)})", elsewhere=True) from error
    try:
        gpu = cuda.Gpu()
        free = gpu.free_bytes()
        cuda.limit_pool(POOL_BYTES)
        cuda.pin(shared)
    except (cuda.GpuUnusable, *cuda.FAULTS) as error:
        raise _Refused(error) from error
    if free < FREE_LEAST:
        raise _Refused(
            f"{gpu.name} has {free >> 20} MiB free; with less than {FREE_LEAST >> 20} MiB it is "
            "left to the work there"
        )
    return gpu


def _serve(gpu: Gpu, agent: socket.socket, slot: memoryview) -> None:
    given, made = slot[:CHUNK_MAX], slot[CHUNK_MAX:]
    while request := agent.recv(MESSAGE_MAX):
        try:
            asked = json.loads(request)
            answer = (_encode if asked["op"] == "encode" else _decode)(gpu, asked, given, made)
        except RansStreamError:
            answer = {"refused": "a stream"}
        except Exception as error:  # noqa: BLE001  the process's border: the agent decides
            answer = {"error": f"{type(error).__name__}: {_line(error)}"}
        _send(agent, answer)


def _encode(gpu: Gpu, asked: Any, given: memoryview, made: memoryview) -> dict[str, Any]:
    """Cut ``bytes`` plain bytes into planes, and put the planes ``coded`` through rANS. Answers
    with (whether it is a rANS stream, bytes) of each plane."""
    planes = [gpu.put(given[: asked["bytes"]])]
    if asked["width"] > 1:
        work, (cut,) = batch.split(gpu, planes, asked["width"], asked["turned"])
        work.launch()
        planes = [cut.plane(number) for number in range(asked["width"])]
    encoding = batch.rans_encode(gpu, [planes[number] for number in asked["coded"]])
    encoding.work.launch()
    streams = dict(zip(asked["coded"], encoding.streams(), strict=True))
    stored, at = [], 0
    for number, plane in enumerate(planes):
        stream = streams.get(number)
        coded = plane if stream is None else stream
        gpu.fetch(coded, made[at : at + coded.nbytes])
        stored.append((stream is not None, coded.nbytes))
        at += coded.nbytes
    gpu.wait()
    return {"planes": stored}


def _decode(gpu: Gpu, asked: Any, given: memoryview, made: memoryview) -> dict[str, Any]:
    """Put ``bytes`` plain bytes together from stored planes, each (whether it is a rANS stream,
    bytes)."""
    size, width, at = asked["bytes"], asked["width"], 0
    planes = batch.empty_planes(gpu, size // width, width)
    decodings = []
    for number, (coded, length) in enumerate(asked["planes"]):
        stored, end = given[at : at + length], planes.plane(number)
        at += length
        if not coded:
            gpu.send(stored, end)
            continue
        decodings.append(
            batch.rans_decode(gpu, [gpu.put(stored)], [end], batch.segment_log2_of(stored))
        )
        decodings[-1].work.launch()
    plain = planes.plane(0)
    if width > 1:
        plain = gpu.room(size)
        batch.join(gpu, [planes], [plain], width, asked["turned"]).launch()
    gpu.fetch(plain, made[:size])
    for decoding in decodings:
        decoding.check()
    gpu.wait()
    return {}


def _send(agent: socket.socket, answer: dict[str, Any]) -> None:
    try:
        agent.send(json.dumps(answer).encode())
    except BrokenPipeError:  # the agent has given this worker up
        os._exit(0)


def _line(words: object) -> str:
    return " ".join(str(words).split())[:300]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
