"""Whether a run's numbers go through the GPU: measured on the run's own first chunks."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

from gpu_kernels.worker import CHUNK_MAX
from torpor.shared.codecs import gpu as on_gpu
from torpor.shared.codecs.codec import Buffer
from torpor.shared.codecs.gpu import Gpu, GpuError
from torpor.shared.codecs.layout import Run
from torpor.shared.codecs.planes import PLANES, RANS
from torpor.shared.errors import SnapshotDamaged
from torpor.shared.values import MIB

CHUNKS: Final = 4
"""How many chunks a trial measures, on one core and on the GPU, where as many threads send one at
once."""
ROUNDS: Final = 3
_CHUNK_LEAST: Final = MIB  # the rate of smaller chunks on a GPU would be the rate of its launches
_GB: Final = 1e9

Stopped = Callable[[], bool]


class _Sample(NamedTuple):
    plain_bytes: int
    cpu_s: float  # seconds of one core
    work: Callable[[Gpu], Buffer | None]
    is_right: Callable[[Buffer | None], bool]


class GpuTrial:
    """Codes a run's chunks of numbers, on the CPU until the GPU has proved faster. Thread-safe.

    The GPU is opened when a caller first wants it, and measured on a thread of its own while the
    CPU goes on. It is used if it is faster than ``cores`` cores together, copies included. Any
    failure ends its use for the run: ``say`` is called once, and the CPU codes the current chunk.

    ``open_gpu`` raises GpuError with the reason where there is no GPU to use, and soon after its
    argument says that the run has ended.
    """

    def __init__(
        self, open_gpu: Callable[[Stopped], Gpu], cores: int, say: Callable[[str], None]
    ) -> None:
        self._open_gpu = open_gpu
        self._cores = cores
        self._say = say
        self._lock = threading.Lock()
        self._samples: list[_Sample] = []
        self._thread: threading.Thread | None = None
        self._gpu: Gpu | None = None
        self._closed = False
        self._seen = False
        self._words = "GPU not tried: cores were not what the run waited for"

    def encode(
        self, plain: memoryview, runs: Sequence[Run], *, wanted: bool
    ) -> tuple[int, Buffer | None]:
        """A chunk's encoding and its stream, None where nothing is gained. ``wanted``: a faster
        encoder would help the run."""
        gpu = self._gpu_for(len(plain))
        if gpu is not None:
            try:
                return RANS.code, on_gpu.encode_chunk(gpu, plain, runs)
            except Exception as error:  # noqa: BLE001  whatever it was, the CPU does it as well
                self.give_up(error)
        started = time.thread_time()
        stream = PLANES.encode(plain, runs)
        cpu_s = time.thread_time() - started
        self._seen = True
        if wanted and stream is not None and self._samples_wanted(len(plain)):
            kept, layout = bytes(plain), tuple(runs)
            self._collect(
                _Sample(
                    len(kept),
                    cpu_s,
                    lambda gpu: on_gpu.encode_chunk(gpu, kept, layout),
                    lambda made: made is not None and RANS.decode(made, len(kept)) == kept,
                )
            )
        return PLANES.code, stream

    def decode(
        self, stored: Buffer, plain_bytes: int, is_right: Callable[[Buffer], bool]
    ) -> Buffer:
        """The plain bytes of a chunk in ``rans``; ``is_right`` checks them. A chunk that the GPU
        decodes wrongly is decoded again by the CPU; SnapshotDamaged if that is wrong, too."""
        gpu, made_wrong = self._gpu_for(plain_bytes), False
        if gpu is not None:
            try:
                plain = on_gpu.decode_chunk(gpu, stored, plain_bytes)
                if is_right(plain):
                    return plain
                made_wrong = True
            except SnapshotDamaged:
                made_wrong = True  # the CPU clears this where its result is damaged, too
            except Exception as error:  # noqa: BLE001  as above
                self.give_up(error)
        started = time.thread_time()
        plain = RANS.decode(stored, plain_bytes)
        cpu_s = time.thread_time() - started
        self._seen = True
        if not is_right(plain):
            raise SnapshotDamaged("its content does not match its hash")
        if made_wrong:
            self.give_up(GpuError("what it decoded was wrong"))
        if self._samples_wanted(plain_bytes):
            kept = bytes(stored)
            self._collect(
                _Sample(
                    plain_bytes,
                    cpu_s,
                    lambda gpu: on_gpu.decode_chunk(gpu, kept, plain_bytes),
                    lambda made: made == plain,
                )
            )
        return plain

    def give_up(self, error: Exception) -> None:
        """Stop using the GPU in this run. Idempotent."""
        with self._lock:
            gpu, self._gpu = self._gpu, None
        if gpu is not None:  # the first of the threads that see it
            self._decide(f"GPU used until it failed: {_in_a_line(error)}")
            gpu.close()

    @property
    def words(self) -> str:
        """What was decided and why, for the report; empty if no chunk held numbers."""
        return self._words if self._seen else ""

    def close(self) -> None:
        """Give the GPU back. Chunks may still come, and are coded on the CPU. Idempotent."""
        with self._lock:
            self._closed = True
            gpu, self._gpu = self._gpu, None
            thread = self._thread
        if gpu is not None:
            gpu.close()
        if thread is not None:
            thread.join()

    def settle(self, timeout_s: float) -> None:
        """Wait until a trial that has begun has decided."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def _gpu_for(self, plain_bytes: int) -> Gpu | None:
        return self._gpu if plain_bytes <= CHUNK_MAX else None

    def _samples_wanted(self, plain_bytes: int) -> bool:
        return self._thread is None and _CHUNK_LEAST <= plain_bytes <= CHUNK_MAX

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
        gpu: Gpu | None = None
        try:
            gpu = self._open_gpu(lambda: self._closed)
            rate = self._measure(gpu, samples)
            of_cores = (
                self._cores * _bytes(samples) / max(1e-9, sum(sample.cpu_s for sample in samples))
            )
        except Exception as error:  # noqa: BLE001  the thread's border: all becomes words
            self._decide(f"GPU not used: {_in_a_line(error)}")
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

    def _measure(self, gpu: Gpu, samples: Sequence[_Sample]) -> float:
        """Plain bytes per second of wall time, copies and all, after a round that warms up."""
        seconds: list[float] = []
        with ThreadPoolExecutor(len(samples)) as threads:
            for _ in range(ROUNDS + 1):
                if self._closed:
                    raise GpuError("the run ended while it was measured")
                started = time.perf_counter()
                try:
                    made = list(threads.map(lambda sample: sample.work(gpu), samples))
                    seconds.append(time.perf_counter() - started)
                    right = all(sample.is_right(m) for sample, m in zip(samples, made, strict=True))
                except SnapshotDamaged:
                    right = False
                if not right:
                    raise GpuError("what it makes is wrong")
        return _bytes(samples) / statistics.median(seconds[1:])

    def _decide(self, words: str) -> None:
        self._words = words
        self._say(words)


def _bytes(samples: Sequence[_Sample]) -> int:
    return sum(sample.plain_bytes for sample in samples)


def _in_a_line(error: Exception) -> str:
    """An error as text on one line; the type is named if the error is not torpor's."""
    words = " ".join(str(error).split())
    return words if isinstance(error, GpuError) else f"{type(error).__name__}: {words}"
