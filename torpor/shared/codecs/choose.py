"""Which encoding a chunk gets: decided from its bytes, never from a file's name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torpor.shared.codecs.codec import Buffer, Codec
from torpor.shared.codecs.effort import Effort
from torpor.shared.codecs.gpu import GpuError
from torpor.shared.codecs.layout import Element, Run
from torpor.shared.codecs.planes import PLANES
from torpor.shared.codecs.stock import LZ4, RAW, ZSTD
from torpor.shared.codecs.trial import GpuTrial
from torpor.shared.values import KIB

SAMPLE_BYTES: Final = 64 * KIB
_GAIN: Final = 0.97
"""A chunk that an encoding shrinks by less than 3 % is stored raw: decoding it would cost more time
than its bytes save."""
_LZ4_IS_ENOUGH: Final = 1.02
"""LZ4 is taken where zstd would save less than 2 % more bytes than LZ4: LZ4 decodes four times as
fast."""


class Encoder:
    """Encodes the chunks of one run, text as hard as ``effort`` says, numbers where ``gpu`` says.
    Thread-safe."""

    def __init__(self, effort: Effort, gpu: GpuTrial | None = None) -> None:
        self.effort = effort
        self._gpu = gpu

    def encode(self, plain: Buffer, runs: Sequence[Run] = ()) -> tuple[int, Buffer]:
        """Encode one chunk; returns the encoding's code and the stored bytes, never longer.

        ``runs`` say which numbers the chunk is made of, where that is known; they cover it exactly.
        """
        step = self.effort.step
        if step.text is RAW:
            return RAW.code, plain
        if any(run.element is not Element.BYTES for run in runs):
            code, planes = self._encode_numbers(memoryview(plain), runs)
            if planes is not None and len(planes) < _GAIN * len(plain):
                return code, planes
        codec = choose(plain)
        codec = step.text if codec is ZSTD else codec
        stored = codec.encode(plain)
        if stored is None or len(stored) >= len(plain):
            return RAW.code, plain
        return codec.code, stored

    def distrust_gpu(self) -> None:
        """Encode nothing on the GPU any more: a chunk that the GPU encoded did not decode to the
        same bytes."""
        if self._gpu is not None:
            self._gpu.give_up(GpuError("what it encoded did not come back"))

    @property
    def words(self) -> str:
        """How chunks were encoded and why, in words for the run's report."""
        gpu = self._gpu.words if self._gpu is not None else ""
        return f"{self.effort.words}; {gpu}" if gpu else self.effort.words

    def _encode_numbers(self, plain: memoryview, runs: Sequence[Run]) -> tuple[int, Buffer | None]:
        if self._gpu is None:
            return PLANES.code, PLANES.encode(plain, runs)
        return self._gpu.encode(plain, runs, wanted=self.effort.cores_limit)


def choose(plain: Buffer) -> Codec:
    """The kind of encoding for a chunk, from a 64 KiB sample of its middle."""
    view = memoryview(plain)
    start = max(0, (len(view) - SAMPLE_BYTES) // 2)
    sample = view[start : start + SAMPLE_BYTES]
    by_zstd = len(ZSTD.encode(sample))
    if by_zstd > _GAIN * len(sample):
        return RAW
    by_lz4 = len(LZ4.encode(sample))
    return LZ4 if by_lz4 <= _LZ4_IS_ENOUGH * by_zstd else ZSTD
