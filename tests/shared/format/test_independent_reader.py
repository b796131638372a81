"""A reader that was written from the documents alone restores what the engine stores."""

from __future__ import annotations

import ast
import itertools
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import independent_reader as reader
from tests.fixtures.engine import WORKSPACE, Engine
from tests.fixtures.manifests import LIES, MISNAMED, PLAIN, Lie, honest
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.snapshots import manifest_of
from tests.fixtures.trees import content, differences, facts, kept, let_settle, plant_every_kind
from tests.fixtures.waiting import PATIENCE_S
from tests.shared.format.test_refusals import (
    CHUNKS,
    OBJECTS,
    OTHER,
    PACK,
    PLAINTEXT,
    SEALED,
    BadChunk,
    BadObject,
)
from torpor.shared.codecs.choose import Encoder
from torpor.shared.codecs.codec import Buffer
from torpor.shared.codecs.encodings import ENCODINGS
from torpor.shared.codecs.layout import Element, Run
from torpor.shared.format.keys import Seal
from torpor.shared.format.manifest import encode_manifest
from torpor.shared.values import MIB

KEY = bytes(range(32))


def test_it_shares_no_code_with_torpor() -> None:
    text = Path(reader.__file__).read_text()
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else alias.name) or ""
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    stock = {"lz4", "msgspec", "numpy", "zstandard", "blake3", "cryptography"}
    assert {name.split(".")[0] for name in imported} <= stock | sys.stdlib_module_names


# -- trees


def _every_encoding_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk gets the next encoding that gains something, numbers of a kind or not."""
    numbers = itertools.count()
    kinds = list(Element)

    def encode(_: Encoder, plain: Buffer, runs: Sequence[Run] = ()) -> tuple[int, Buffer]:
        number = next(numbers)
        code = number % len(ENCODINGS)
        cut = [
            Run(len(plain) // 3, kinds[number % len(kinds)]),
            Run(len(plain) - len(plain) // 3, kinds[number // 2 % len(kinds)]),
        ]
        stored = ENCODINGS[code].codec.encode(plain, cut)
        return (code, stored) if stored is not None and len(stored) < len(plain) else (0, plain)

    monkeypatch.setattr(Encoder, "encode", encode)


def _plant(root: Path, other: Path) -> None:
    """Every kind of entry, in two roots, and numbers that shrink in every encoding."""
    plant_every_kind(root)
    for path in (root / "borders").iterdir():
        if path.stat().st_size > 5 * MIB:
            path.unlink()
    weights = [1000 // (n + 1) for n in range(40)]
    skewed = bytes(random.Random(5).choices(range(40), weights=weights, k=MIB))
    other.mkdir()
    for number in range(20):
        (other / f"skewed-{number}").write_bytes(skewed[number:] + skewed[:number])
    (other / "names").write_bytes(content(1, 100))  # a name that the first root has too
    os.link(other / "names", other / "the-same")


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "sealed"])
def test_the_trees_come_back(
    memory_store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: bytes | None
) -> None:
    _every_encoding_in_turn(monkeypatch)
    roots, backs = [[tmp_path / side / name for name in "ab"] for side in ("was", "back")]
    roots[0].parent.mkdir()
    _plant(*roots)
    before = [kept(root) for root in roots]
    let_settle()
    engine = Engine(memory_store, tmp_path / "home", key)
    snapshot = engine.snapshot(roots)
    used = {chunk.encoding for chunk in manifest_of(engine, snapshot).chunks}
    assert used == set(ENCODINGS)

    objects = tmp_path / "objects"
    for found in memory_store.list(""):
        path = objects / found.key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(memory_store.get(found.key, max_bytes=1 << 30))
    engine.runs.close()
    argv = [sys.executable, reader.__file__, objects, WORKSPACE, snapshot, *backs]
    done = subprocess.run(
        argv, input=key or b"", capture_output=True, check=False, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stderr) == (0, b"")
    for was, back in zip(before, backs, strict=True):
        assert differences(was, facts(back)) == []


# -- what it refuses


class _Keys(reader.Keys):
    """Those of a seal of the fixtures."""

    def __init__(self, seal: Seal) -> None:
        super().__init__(None, "")
        workspace = {SEALED.key_id: KEY, OTHER.key_id: b"k" * 32}.get(seal.key_id)
        if workspace is not None:
            self.names, self.sealing, self.id = (
                reader.derived(use, workspace) for use in ("names", "sealing", "key id")
            )
            self.id = self.id[:8]


@pytest.mark.parametrize("lie", [*MISNAMED, *LIES], ids=lambda lie: f"{lie.rule}-{lie.name}")
def test_it_refuses_every_lie(lie: Lie) -> None:
    manifest = lie.make()
    blob, _ = encode_manifest(manifest, PLAIN)
    with pytest.raises(reader.RefusedError, match=f"^{lie.rule}:"):
        reader.read_manifest(blob, _Keys(PLAIN), manifest.workspace, manifest.snapshot)


@pytest.mark.parametrize("bad", OBJECTS, ids=lambda bad: f"{bad.rule}-{bad.says}")
def test_it_refuses_every_bad_object(bad: BadObject) -> None:
    with pytest.raises(reader.RefusedError, match=f"^{bad.rule}:"):
        reader.read_manifest(bad.blob(), _Keys(bad.seal), "demo", honest().snapshot)


@pytest.mark.parametrize(
    ("workspace", "snapshot"), [("other", honest().snapshot), ("demo", "20261120T234913Z-00000000")]
)
def test_it_refuses_another_name(workspace: str, snapshot: str) -> None:
    blob, _ = encode_manifest(honest(), PLAIN)
    with pytest.raises(reader.RefusedError, match=r"^O14:"):
        reader.read_manifest(blob, _Keys(PLAIN), workspace, snapshot)


@pytest.mark.parametrize("bad", CHUNKS, ids=lambda bad: f"{bad.rule}-{bad.encoding}-{bad.says}")
def test_it_refuses_every_bad_chunk(bad: BadChunk) -> None:
    name = bad.seal.name(PLAINTEXT)
    chunk = reader.Chunk(name, len(PLAINTEXT), bad.encoding, 0, 0, len(bad.stored))
    with pytest.raises(reader.RefusedError, match=f"^{bad.rule}:"):
        reader.read_chunk(chunk, PACK, bad.stored, _Keys(bad.seal))
