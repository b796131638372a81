"""The demo's workspace: files as on a real GPU machine, made or copied on this host."""

from __future__ import annotations

import errno
import json
import os
import random
import struct
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any, Final, NamedTuple

import numpy
from numpy.typing import NDArray

from torpor.shared.errors import InvalidInput
from torpor.shared.values import MIB

PACKAGES: Final = ("numpy", "numpy.libs", "pandas", "dateutil", "pydantic")
"""About 110 MB of this environment's own packages: libraries and thousands of small files."""
LAYERS: Final = 18
WIDTH: Final = 2048
"""The width of the model: 18 layers of 2048 x 2048 BF16 weights are 151 MB."""
TEXT_LINES: Final = 60_000
SPARSE_BYTES: Final = 8 * MIB
_SEED: Final = 20261120
_OLD_NS: Final = 946_684_799_123_456_789
"""The last second of 1999, with nanoseconds that a careless copy loses."""


class Item(NamedTuple):
    """One line of the list of what was made."""

    what: str
    where: str


def make_example(folder: Path) -> list[Item]:
    """Fill the empty ``folder``; returns what was made."""
    made = [
        Item("installed packages, symlinks", _packages(folder / "env")),
        Item("BF16 model, Hugging Face cache", _model(folder / "cache/huggingface/hub")),
        Item("JSON lines", _text(folder / "data")),
        Item("sparse file, hard links", _linked(folder / "checkpoints")),
        Item("odd names, modes, empty folders", _odd(folder / "odd")),
    ]
    xattrs = _attributes(folder)
    if xattrs:
        made.append(Item("extended attributes", xattrs))
    return made


def _packages(env: Path) -> str:
    site = Path(sysconfig.get_paths()["purelib"])
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    into = env / "lib" / version / "site-packages"
    for name in PACKAGES:
        if not (site / name).is_dir():
            raise InvalidInput(f"the demo copies {site / name}, which is missing: run `make setup`")
        copytree(site / name, into / name, symlinks=True, ignore=ignore_patterns("__pycache__"))
    (env / "lib64").symlink_to("lib")
    (env / "bin").mkdir()
    (env / "bin" / version).symlink_to(f"/usr/bin/{version}")
    (env / "bin" / "python3").symlink_to(version)
    (env / "bin" / "python").symlink_to("python3")
    return "env/"


def _model(hub: Path) -> str:
    """A model as huggingface_hub keeps it: content in blobs/, names as symlinks in snapshots/."""
    home = hub / "models--torpor--demo"
    revision = "0c5bd6f2b1f04ab0a5fd0a6f0d8a0d4e7d9f3b21"
    for name in ("blobs", "refs", f"snapshots/{revision}"):
        (home / name).mkdir(parents=True)
    (home / "refs" / "main").write_text(revision)
    blobs: dict[str, Callable[[Path], None]] = {
        "model.safetensors": _safetensors,
        "config.json": _config,
    }
    for number, (name, write) in enumerate(blobs.items()):
        blob = f"{number:02x}{_SEED:062x}"
        write(home / "blobs" / blob)
        (home / "snapshots" / revision / name).symlink_to(f"../../blobs/{blob}")
    return "cache/huggingface/"


def _safetensors(path: Path) -> None:
    """The safetensors format: length of the header, JSON header, the tensors end to end."""
    shape = [WIDTH, WIDTH]
    tensor_bytes = 2 * WIDTH * WIDTH
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for layer in range(LAYERS):
        begin = layer * tensor_bytes
        header[f"model.layers.{layer}.weight"] = {
            "dtype": "BF16",
            "shape": shape,
            "data_offsets": [begin, begin + tensor_bytes],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    numbers = numpy.random.default_rng(_SEED)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _ in range(LAYERS):
            weights = numbers.standard_normal(WIDTH * WIDTH, dtype=numpy.float32)
            weights *= numpy.float32(0.02)
            file.write(as_bf16(weights).tobytes())


def as_bf16(values: NDArray[numpy.float32]) -> NDArray[numpy.uint16]:
    """The upper half of each finite float32, rounded to the nearest, ties to even, as CPUs do."""
    bits = values.view(numpy.uint32)
    rounding = ((bits >> numpy.uint32(16)) & numpy.uint32(1)) + numpy.uint32(0x7FFF)
    return ((bits + rounding) >> numpy.uint32(16)).astype("<u2")


def _config(path: Path) -> None:
    config = {"model_type": "demo", "hidden_size": WIDTH, "num_hidden_layers": LAYERS}
    path.write_text(json.dumps({**config, "torch_dtype": "bfloat16"}, indent=2))


def _text(folder: Path) -> str:
    """Words with the frequencies of real text (a few common, many rare), so that it compresses."""
    folder.mkdir()
    chance = random.Random(_SEED)  # noqa: S311 - content of a demo
    letters = "etaoinshrdlu"
    words = ["".join(chance.choices(letters, k=chance.randint(2, 9))) for _ in range(20_000)]
    cumulative, total = [], 0.0
    for rank in range(len(words)):
        total += 1 / (rank + 1)
        cumulative.append(total)
    with (folder / "train.jsonl").open("w") as file:
        for number in range(TEXT_LINES):
            text = " ".join(chance.choices(words, cum_weights=cumulative, k=50))
            file.write(json.dumps({"id": number, "text": text}) + "\n")
    return "data/train.jsonl"


def _linked(folder: Path) -> str:
    folder.mkdir()
    with (folder / "sparse.bin").open("wb") as file:
        file.write(b"begin")
        file.seek(SPARSE_BYTES // 2)
        file.write(os.urandom(MIB))
        file.truncate(SPARSE_BYTES)
    (folder / "step-1000.bin").write_bytes(os.urandom(3 * MIB))
    for name in ("latest.bin", "best.bin"):
        os.link(folder / "step-1000.bin", folder / name)
    return "checkpoints/"


def _odd(folder: Path) -> str:
    folder.mkdir()
    (folder / "empty" / "and" / "deeper").mkdir(parents=True)
    (folder / "empty file").touch()
    names = (
        b"a\nnewline",
        b"not utf-8 \xff\xfe",
        b"n" * 255,
        "ünï-日本語".encode(),
        b"-rf",
        b"$(x)",
    )
    for name in names:
        with open(os.path.join(os.fsencode(folder), name), "wb") as file:
            file.write(name)
    (folder / "dangling").symlink_to("../nothing/here")
    for mode in (0o400, 0o640, 0o755, 0o4711):
        (folder / f"mode {mode:o}").write_text("mode")
        (folder / f"mode {mode:o}").chmod(mode)
    (folder / "old").write_text("old")
    os.utime(folder / "old", ns=(_OLD_NS, _OLD_NS))
    (folder / "closed").mkdir()
    (folder / "closed" / "inside").write_text("inside")
    (folder / "closed").chmod(0o500)
    return "odd/"


def _attributes(folder: Path) -> str:
    """Set extended attributes, if the file system has them."""
    marked = folder / "data" / "train.jsonl"
    try:
        os.setxattr(marked, "user.licence", b"CC0-1.0")
        os.setxattr(marked, "user.bytes", bytes(range(256)))
        os.setxattr(folder / "data", "user.kind", b"training data")
    except OSError as cause:
        if cause.errno == errno.ENOTSUP:
            return ""
        raise
    return "data/"
