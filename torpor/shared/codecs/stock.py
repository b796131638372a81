"""The encodings of stock libraries: raw, LZ4 block, zstd frame."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from typing import Final

import lz4.block
import zstandard

from torpor.shared.codecs.codec import Buffer
from torpor.shared.codecs.layout import Run
from torpor.shared.codecs.memory import Memory
from torpor.shared.errors import SnapshotDamaged


class _Raw:
    name: Final = "raw"
    code: Final = 0

    def encode(self, plain: Buffer, _runs: Sequence[Run] = ()) -> Buffer:
        return plain

    def decode(self, stored: Buffer, plain_bytes: int, _into: Memory | None = None) -> Buffer:
        if len(stored) != plain_bytes:
            raise SnapshotDamaged(f"a raw chunk of {plain_bytes} bytes is stored as {len(stored)}")
        return stored


class _Lz4:
    name: Final = "lz4"
    code: Final = 1

    def encode(self, plain: Buffer, _runs: Sequence[Run] = ()) -> Buffer:
        encoded: bytes = lz4.block.compress(plain, store_size=False)
        return encoded

    def decode(self, stored: Buffer, plain_bytes: int, _into: Memory | None = None) -> Buffer:
        try:
            plain: bytes = lz4.block.decompress(stored, uncompressed_size=plain_bytes)
        except lz4.block.LZ4BlockError as exc:
            raise SnapshotDamaged(f"an lz4 chunk does not decode: {exc}") from None
        return _exactly(plain, plain_bytes, self.name)


class _Zstd:
    name: Final = "zstd"
    code: Final = 2

    def __init__(self, level: int) -> None:
        self._level = level
        self._threads = threading.local()  # a context serves one thread at a time

    def encode(self, plain: Buffer, _runs: Sequence[Run] = ()) -> Buffer:
        compressor = getattr(self._threads, "compressor", None)
        if compressor is None:
            compressor = zstandard.ZstdCompressor(level=self._level)
            self._threads.compressor = compressor
        encoded: bytes = compressor.compress(plain)
        return encoded

    def decode(self, stored: Buffer, plain_bytes: int, _into: Memory | None = None) -> Buffer:
        decompressor = getattr(self._threads, "decompressor", None)
        if decompressor is None:
            decompressor = zstandard.ZstdDecompressor()
            self._threads.decompressor = decompressor
        try:
            # the size in the frame's header is compared before memory is allocated for it
            if zstandard.frame_content_size(bytes(memoryview(stored)[:18])) != plain_bytes:
                raise SnapshotDamaged("a zstd chunk claims another length than the manifest")
            plain: bytes = decompressor.decompress(
                stored, max_output_size=plain_bytes, allow_extra_data=False
            )
        except zstandard.ZstdError as exc:
            raise SnapshotDamaged(f"a zstd chunk does not decode: {exc}") from None
        return _exactly(plain, plain_bytes, self.name)


def _exactly(plain: bytes, plain_bytes: int, name: str) -> bytes:
    if len(plain) != plain_bytes:
        raise SnapshotDamaged(f"a {name} chunk of {plain_bytes} bytes decodes to {len(plain)}")
    return plain


RAW: Final = _Raw()
LZ4: Final = _Lz4()
ZSTD: Final = _Zstd(1)


@cache
def zstd_at(level: int) -> _Zstd:
    """The zstd encoding at that level; every level decodes the same way."""
    return _Zstd(level)
