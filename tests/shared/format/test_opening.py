"""Chunks that a GPU encoded are opened where there is none."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_kernels import native
from tests.gpu_kernels import cases
from torpor.shared.codecs.layout import Element, Run
from torpor.shared.codecs.planes import RANS
from torpor.shared.errors import SnapshotDamaged
from torpor.shared.format.keys import Seal, chunk_associated
from torpor.shared.format.manifest import Chunk
from torpor.shared.format.opening import open_chunk

PACK = b"p" * 16
KEY = bytes(range(32))

_OPEN = """
import sys
from pathlib import Path
from gpu_kernels import twin
from torpor.shared.format.keys import Seal
from torpor.shared.format.manifest import Chunk
from torpor.shared.format.opening import open_chunk
assert twin.path() == "Python", twin.path()
stored = Path(sys.argv[1]).read_bytes()
chunk = Chunk(bytes.fromhex(sys.argv[2]), int(sys.argv[3]), 4, 0, 0, len(stored))
plain = open_chunk(chunk, b"p" * 16, stored, Seal(bytes(range(32))))
assert "numpy" not in sys.modules and "libcuda" not in Path("/proc/self/maps").read_text()
Path(sys.argv[4]).write_bytes(plain)
"""


def bf16(elements: int) -> bytes:
    """Exponents as weights have them, in the top byte behind a sign of 0, and noise below."""
    dice = random.Random(11)
    turned = zip(cases.exponents(dice, elements), dice.randbytes(elements), strict=True)
    return b"".join((e << 7 | m & 0x7F).to_bytes(2, "little") for e, m in turned)


def stored_by_a_gpu(plain: bytes, seal: Seal) -> tuple[Chunk, bytes]:
    """The chunk and its stored bytes in encoding 4, with at least one plane in rANS."""
    stream = RANS.encode(memoryview(plain), [Run(len(plain), Element.BF16)])
    assert stream is not None and b"tR\x01\x0f" in stream
    name = seal.name(plain)
    stored = bytes(seal.seal(stream, chunk_associated(name, PACK, RANS.code, len(plain))))
    return Chunk(name, len(plain), RANS.code, 0, 0, len(stored)), stored


@pytest.mark.parametrize("seal", [Seal(None), Seal(KEY)], ids=["plain", "sealed"])
def test_encoding_4_opens_without_a_gpu(seal: Seal) -> None:
    assert native.library() is not None
    plain = bf16(1 << 20)
    chunk, stored = stored_by_a_gpu(plain, seal)
    assert len(stored) < 0.75 * len(plain)
    assert open_chunk(chunk, PACK, stored, seal) == plain


def test_encoding_4_opens_where_no_library_of_ours_loads_either(tmp_path: Path) -> None:
    plain = bf16(100_000)
    chunk, stored = stored_by_a_gpu(plain, Seal(KEY))
    (tmp_path / "stored").write_bytes(stored)
    argv = [sys.executable, "-c", _OPEN, str(tmp_path / "stored"), chunk.name.hex()]
    argv += [str(len(plain)), str(tmp_path / "plain")]
    environment = {**os.environ, "TORPOR_NO_NATIVE": "1"}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "plain").read_bytes() == plain


def test_encoding_4_of_other_content_is_refused() -> None:
    plain = bf16(50_000)
    chunk, stored = stored_by_a_gpu(plain, Seal(None))
    other, _ = stored_by_a_gpu(plain[::-1], Seal(None))
    with pytest.raises(SnapshotDamaged, match="does not match its hash"):
        open_chunk(other, PACK, stored, Seal(None))
    with pytest.raises(SnapshotDamaged, match="codec 'rans' cannot be decoded"):
        open_chunk(chunk, PACK, stored[:-1], Seal(None))
