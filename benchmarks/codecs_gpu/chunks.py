"""Chunks in a GPU's memory, where the benchmark times what is done to them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final

from benchmarks.codecs_gpu.coders import DeviceCoder
from gpu_kernels.clock import Clock
from gpu_kernels.device import ALIGN, Device, Queue
from gpu_kernels.driver import GpuError
from torpor.shared.values import KIB, MIB

STAGED_MAX: Final = 64 * MIB
"""Of each copy between the host and the GPU whose rate is measured."""

_LEAD: Final = 4
"""Copies of all chunks that a stream does before what is timed: meanwhile the host puts all of it
there, so that the GPU waits for nothing of it. Some 2 ms for a GiB on a large GPU."""
_FOLD: Final = 8
"""Of the chunks' bytes: they, rubbish, and where they are decoded; a codec's planes, streams, and
words on their way, which take twice that."""
_SLACK: Final = 640 * KIB  # for each chunk: its planes' words come in segments of 64 KiB
_JOBS: Final = 4 * KIB  # for each chunk: up to 8 planes in four kernels' jobs
_SHARE: Final = 2  # a codec of nvCOMP takes memory of its own, from the other half


class CameBackWrong(Exception):
    """What was decoded is not what was encoded: no figure of the run is of use."""


def chunks_that_fit(device: Device, wanted_bytes: int, chunk_bytes: int) -> int:
    """How many chunks are measured: about ``wanted_bytes``, or what the GPU has room for."""
    each = _FOLD * chunk_bytes + _SLACK
    free = device.free_bytes()
    if free // _SHARE < each:
        raise GpuError(
            f"only {free // MIB} MiB of {device.name} are free, and a chunk of "
            f"{chunk_bytes // KIB} KiB needs {_SHARE * each // MIB} MiB: end other work there"
        )
    return max(1, min(wanted_bytes // chunk_bytes, free // _SHARE // each))


def queue_for(device: Device, count: int, chunk_bytes: int) -> Queue:
    """A queue with room for so many chunks, and one codec at a time."""
    staged = min(STAGED_MAX, count * chunk_bytes)
    pinned_bytes = staged + chunk_bytes + count * _JOBS + MIB
    return device.queue(count * (_FOLD * chunk_bytes + _SLACK) + MIB, pinned_bytes)


class DeviceChunks:
    """``chunks``, of one size, over and over until there are ``count``, on the GPU. In an open
    scope of the queue. GpuError where the GPU fails."""

    def __init__(self, queue: Queue, clock: Clock, chunks: Sequence[bytes], count: int) -> None:
        self.queue = queue
        self._clock = clock
        self._chunks = chunks
        size = len(chunks[0])
        stride = -(-size // ALIGN) * ALIGN
        self.plain_bytes = count * size
        self._plain, self._spare, self._target = (queue.room(count * stride) for _ in range(3))
        places = [(number * stride, size) for number in range(count)]
        self.plains = [self._plain.part(*place) for place in places]
        self.targets = [self._target.part(*place) for place in places]
        for number, plain in enumerate(self.plains):
            if number < len(chunks):
                with queue.scope():
                    queue.copy(queue.put(chunks[number]), plain)
            else:
                queue.copy(self.plains[number % len(chunks)], plain)
        with queue.scope():
            rubbish = queue.put(random.Random(size).randbytes(stride))
            for place in range(0, count * stride, stride):
                queue.copy(rubbish, self._spare.part(place, stride))

    def seconds(self, work: Callable[[], None], rounds: int) -> list[float]:
        """How long the GPU takes for what ``work`` puts on the queue, in rounds behind one that
        warms up."""
        return [self._once(work) for _ in range(rounds + 1)][1:]

    def copy_seconds(self, rounds: int) -> list[float]:
        """Of a copy of all chunks on the GPU: ``moved_by_copy`` bytes are read or written."""
        return self.seconds(lambda: self.queue.copy(self._spare, self._target), rounds)

    @property
    def moved_by_copy(self) -> int:
        return 2 * self._plain.bytes

    def run_coder(self, coder: DeviceCoder, rounds: int) -> tuple[list[float], int, list[float]]:
        """Seconds of encoding, stored bytes, seconds of decoding. CameBackWrong where the last
        round did not give all chunks back."""
        encode_s = []
        for _ in range(rounds + 1):
            coder.ready_to_encode()
            encode_s.append(self._once(coder.encode))
        stored_bytes = coder.settle()
        decode_s = []
        for _ in range(rounds + 1):
            coder.ready_to_decode(self._spare)
            decode_s.append(self._once(coder.decode))
        coder.check()
        self._compare(coder.name)
        return encode_s[1:], stored_bytes, decode_s[1:]

    def _once(self, work: Callable[[], None]) -> float:
        for _ in range(_LEAD):
            self.queue.copy(self._spare, self._target)  # so no chunk lies there before it is due
        self._clock.start()
        work()
        self._clock.stop()
        return self._clock.seconds()

    def _compare(self, name: str) -> None:
        for number, target in enumerate(self.targets):
            with self.queue.scope():
                if self.queue.get(target) != self._chunks[number % len(self._chunks)]:
                    raise CameBackWrong(f"{name} does not give chunk {number} back")
