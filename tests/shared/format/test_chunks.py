"""Chunks that a GPU encoded are opened where there is none, nor any library of ours."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

from tests.gpu_kernels import cases
from torpor.shared.codecs.layout import Element, Run
from torpor.shared.codecs.planes import RANS
from torpor.shared.format.keys import Seal, chunk_associated

_OPEN = """
import sys
from pathlib import Path
from gpu_kernels import twin
from torpor.shared.format.keys import Seal
from torpor.shared.format.manifest import Chunk
from torpor.shared.format.chunks import open_chunk
assert twin.path() == "Python", twin.path()
stored = Path(sys.argv[1]).read_bytes()
chunk = Chunk(bytes.fromhex(sys.argv[2]), int(sys.argv[3]), 4, 0, 0, len(stored))
plain = open_chunk(chunk, b"p" * 16, stored, Seal(bytes(range(32))))
assert "numpy" not in sys.modules and "libcuda" not in Path("/proc/self/maps").read_text()
Path(sys.argv[4]).write_bytes(plain)
"""


def test_encoding_4_opens_where_no_library_of_ours_loads(tmp_path: Path) -> None:
    dice = random.Random(11)
    turned = zip(cases.exponents(dice, 100_000), dice.randbytes(100_000), strict=True)
    plain = b"".join((e << 7 | m & 0x7F).to_bytes(2, "little") for e, m in turned)  # as of weights
    stream = RANS.encode(memoryview(plain), [Run(len(plain), Element.BF16)])
    assert stream is not None and b"tR\x01\x0f" in stream  # at least one plane in rANS
    seal = Seal(bytes(range(32)))
    name = seal.name(plain)
    associated = chunk_associated(name, b"p" * 16, RANS.code, len(plain))
    (tmp_path / "stored").write_bytes(seal.seal(stream, associated))
    argv = [sys.executable, "-c", _OPEN, str(tmp_path / "stored"), name.hex()]
    argv += [str(len(plain)), str(tmp_path / "plain")]
    environment = {**os.environ, "TORPOR_NO_NATIVE": "1"}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "plain").read_bytes() == plain
