"""The stock encodings: exact, bounded, and damage never gives other bytes than it says."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.waiting import PATIENCE_S
from torpor.shared.codecs.codec import Codec
from torpor.shared.codecs.stock import LZ4, RAW, ZSTD
from torpor.shared.errors import SnapshotDamaged
from torpor.shared.values import GIB, MIB

codecs = pytest.mark.parametrize("codec", [RAW, LZ4, ZSTD], ids=lambda codec: codec.name)
PLAIN = b"some plain bytes, " * 500


@codecs
@settings(max_examples=60)
@given(plain=st.one_of(st.binary(min_size=1, max_size=3000), st.just(PLAIN)))
def test_what_goes_in_comes_out(codec: Codec, plain: bytes) -> None:
    for given_as in (plain, bytearray(plain), memoryview(plain)):
        stored = codec.encode(given_as)
        assert codec.decode(memoryview(bytes(stored)), len(plain)) == plain


@codecs
def test_another_length_and_every_cut_is_damage(codec: Codec) -> None:
    stored = bytes(codec.encode(PLAIN[:600]))
    cuts = [(stored[:length], 600) for length in range(len(stored))]
    for damaged, length in [*cuts, *((stored, 600 + more) for more in (-1, 1, 1000))]:
        with pytest.raises(SnapshotDamaged):
            codec.decode(damaged, length)


@pytest.mark.parametrize("codec", [LZ4, ZSTD], ids=lambda codec: codec.name)
@settings(max_examples=200)
@given(data=st.data())
def test_damage_gives_the_right_length_or_an_error(codec: Codec, data: st.DataObject) -> None:
    stored = bytearray(codec.encode(PLAIN))
    for _ in range(data.draw(st.integers(1, 3))):
        bit = data.draw(st.integers(0, 8 * len(stored) - 1))
        stored[bit // 8] ^= 1 << bit % 8
    try:
        plain = codec.decode(bytes(stored), len(PLAIN))
    except SnapshotDamaged:
        return
    assert len(plain) == len(PLAIN)  # its hash is compared afterwards


def _zstd_bomb(*, says: bool) -> bytes:
    compressor = zstandard.ZstdCompressor(level=1, write_content_size=says)
    frame = compressor.compressobj(size=GIB) if says else compressor.compressobj()
    return b"".join(frame.compress(bytes(MIB)) for _ in range(1024)) + frame.flush()


def _lz4_bomb() -> bytes:
    """One zero, then a match of a gigabyte: 255 bytes for each byte of length."""
    return b"\x1f\0\x01\0" + b"\xff" * (GIB // 255) + b"\0\x50" + bytes(5)


_IN_LITTLE_ROOM = """
import resource, sys
from torpor.shared.codecs.stock import LZ4, ZSTD
from torpor.shared.errors import SnapshotDamaged
bomb = sys.stdin.buffer.read()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for promised in (1, 1000, 1 << 24):
    try:
        {"lz4": LZ4, "zstd": ZSTD}[sys.argv[1]].decode(bomb, promised)
    except SnapshotDamaged:
        continue
    sys.exit("it was taken")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize(
    ("codec", "bomb"),
    [
        ("zstd", partial(_zstd_bomb, says=True)),
        ("zstd", partial(_zstd_bomb, says=False)),
        ("lz4", _lz4_bomb),
    ],
    ids=["claims", "hides", "matches"],
)
def test_a_bomb_is_refused_in_the_room_that_was_promised(
    codec: str, bomb: Callable[[], bytes]
) -> None:
    argv = [sys.executable, "-c", _IN_LITTLE_ROOM, codec]
    done = subprocess.run(argv, input=bomb(), capture_output=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 40 * 1024  # KiB; the largest promise was 16 MiB


@pytest.mark.parametrize("codec", [LZ4, ZSTD], ids=lambda codec: codec.name)
def test_many_threads_share_a_codec(codec: Codec) -> None:
    plains = [random.Random(n).randbytes(50) * 2000 for n in range(24)]

    def there_and_back(plain: bytes) -> bool:
        return all(codec.decode(codec.encode(plain), len(plain)) == plain for _ in range(5))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(there_and_back, plains))
