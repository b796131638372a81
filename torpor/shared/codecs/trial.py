"""Whether a run's numbers go through the GPU: measured on the run's own first chunks."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

from gpu_kernels.driver import GpuError
from torpor.shared.codecs.codec import Buffer
from torpor.shared.codecs.gpu import GpuEncoder
from torpor.shared.codecs.layout import Run
from torpor.shared.codecs.planes import PLANES, RANS
from torpor.shared.values import MIB

CHUNKS: Final = 4
"""Measured, on one core and on the GPU, where as many threads take them at once."""
ROUNDS: Final = 3
CLOSE_S: Final = 15.0
"""A trial that takes longer to end hangs in the driver: it is left behind."""
_CHUNK_LEAST: Final = MIB  # of a small chunk the GPU's rate would be that of its launches
_GB: Final = 1e9


class _Sample(NamedTuple):
    plain: bytes
    runs: tuple[Run, ...]
    cpu_s: float  # of one core, for the same chunk in ``planes``


class GpuTrial:
    """Encodes a run's chunks of numbers, on the CPU until the GPU has proved faster. Thread-safe.

    The GPU is opened when a caller first wants it, and measured on a thread of its own while the
    CPU goes on encoding. It is used if it encodes faster than ``cores`` cores together, copies
    included. Any failure ends its use for the run: ``say`` is called once, and the CPU encodes the
    current chunk.

    ``open_gpu`` raises GpuError with the reason where there is no GPU to use.
    """

    def __init__(
        self, open_gpu: Callable[[], GpuEncoder], cores: int, say: Callable[[str], None]
    ) -> None:
        self._open_gpu = open_gpu
        self._cores = cores
        self._say = say
        self._lock = threading.Lock()
        self._samples: list[_Sample] = []
        self._thread: threading.Thread | None = None
        self._gpu: GpuEncoder | None = None
        self._closed = False
        self._seen = False
        self._words = "GPU not tried: cores were not what the run waited for"

    def encode(
        self, plain: memoryview, runs: Sequence[Run], *, wanted: bool
    ) -> tuple[int, Buffer | None]:
        """A chunk's encoding and its stream, None where nothing is gained. ``wanted``: a faster
        encoder would help the run."""
        gpu = self._gpu
        if gpu is not None and gpu.takes(len(plain)):
            try:
                return RANS.code, gpu.encode(plain, runs)
            except Exception as error:  # noqa: BLE001  whatever it was, the CPU does it as well
                self.give_up(error)
        started = time.thread_time()
        stream = PLANES.encode(plain, runs)
        cpu_s = time.thread_time() - started
        self._seen = True
        if wanted and self._thread is None and stream is not None and len(plain) >= _CHUNK_LEAST:
            self._collect(_Sample(bytes(plain), tuple(runs), cpu_s))
        return PLANES.code, stream

    def give_up(self, error: Exception) -> None:
        """Use the GPU no more in this run. Idempotent."""
        with self._lock:
            gpu, self._gpu = self._gpu, None
        if gpu is not None:  # the first of the threads that see it
            self._decide(f"GPU used until it failed: {_told(error)}")
            gpu.close()

    @property
    def words(self) -> str:
        """What was decided and why, for the report; empty where there were no numbers."""
        return self._words if self._seen else ""

    def close(self) -> None:
        """Give the GPU back. Chunks may still come, and are encoded on the CPU. Idempotent."""
        with self._lock:
            self._closed = True
            gpu, self._gpu = self._gpu, None
            thread = self._thread
        if gpu is not None:
            gpu.close()
        if thread is not None:
            thread.join(CLOSE_S)

    def settle(self, timeout_s: float) -> None:
        """Wait until a trial that has begun has decided."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def _collect(self, sample: _Sample) -> None:
        with self._lock:
            if self._closed or self._thread is not None:
                return
            self._samples.append(sample)
            self._words = f"GPU not tried: there were under {CHUNKS} chunks of numbers to measure"
            if len(self._samples) < CHUNKS:
                return
            self._words = "GPU not used: the run ended while it was measured"
            thread = threading.Thread(target=self._try, name="gpu-trial", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the system gives no more threads
                self._closed = True
                self._decide(f"GPU not used: {error}")
                return
            self._thread = thread

    def _try(self) -> None:
        samples, self._samples = self._samples, []
        gpu: GpuEncoder | None = None
        try:
            gpu = self._open_gpu()
            rate = self._measure(gpu, samples)
            of_cores = self._cores * _bytes(samples) / max(1e-9, sum(one.cpu_s for one in samples))
        except Exception as error:  # noqa: BLE001  the thread's border: all becomes words
            self._decide(f"GPU not used: {_told(error)}")
            if gpu is not None:
                gpu.close()
            return
        used = rate > of_cores
        cores = "1 core" if self._cores == 1 else f"{self._cores} cores"
        self._decide(
            f"GPU {'' if used else 'not '}used: {rate / _GB:.1f} GB/s end to end against "
            f"{of_cores / _GB:.1f} GB/s on {cores}"
        )
        with self._lock:
            if used and not self._closed:
                self._gpu, gpu = gpu, None
        if gpu is not None:
            gpu.close()

    def _measure(self, gpu: GpuEncoder, samples: Sequence[_Sample]) -> float:
        """Plain bytes per second of wall time, copies and all, after a round that warms up."""
        seconds: list[float] = []
        with ThreadPoolExecutor(len(samples)) as threads:
            for number in range(ROUNDS + 1):
                if self._closed:
                    raise GpuError("the run ended while it was measured")
                started = time.perf_counter()
                streams = list(threads.map(lambda one: gpu.encode(one.plain, one.runs), samples))
                if number:
                    seconds.append(time.perf_counter() - started)
                    continue
                for stream, sample in zip(streams, samples, strict=True):
                    size = len(sample.plain)
                    if stream is None or RANS.decode(memoryview(stream), size) != sample.plain:
                        raise GpuError("what it encodes does not come back")
        return _bytes(samples) / statistics.median(seconds)

    def _decide(self, words: str) -> None:
        self._words = words
        self._say(words)


def _bytes(samples: Sequence[_Sample]) -> int:
    return sum(len(sample.plain) for sample in samples)


def _told(error: Exception) -> str:
    """An error in one line; errors that are not ours with their type."""
    words = " ".join(str(error).split())
    return words if isinstance(error, GpuError) else f"{type(error).__name__}: {words}"
