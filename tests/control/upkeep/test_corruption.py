"""Objects of a store are broken; a full verify finds each and blames the right files.

What is expected is worked out from the manifests as they were written and from the bytes before
and after: no code of the verify is used for it.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.fixtures.clocked_agent import ClockedStore, NearAgent
from tests.fixtures.engine import WORKSPACE
from tests.fixtures.stores import Server
from torpor.control.store.manifests import open_manifest
from torpor.control.store.s3 import S3Store
from torpor.control.upkeep.verification import SHOWN, SnapshotVerdict, quick_look
from torpor.shared.format.manifest import FILE, HARDLINK, Manifest
from torpor.shared.format.names import manifest_key, pack_key
from torpor.shared.values import KIB, ObjectKey, SnapshotId, StoredObject

ROUNDS: Final = 24
KINDS: Final = ("deleted", "truncated", "flipped", "swapped")
SNAPSHOTS: Final = 6


class _BlindStore(ClockedStore):
    """Its listing says what it said before anything was broken, as a store whose disk rots does:
    only reading finds anything."""

    def __init__(self, store: S3Store) -> None:
        super().__init__(store)
        self._listed = list(store.list(""))

    def list(self, prefix: str) -> Iterator[StoredObject]:
        return (found for found in self._listed if found.key.startswith(prefix))


@dataclass
class _Corruption:
    """A workspace with some snapshots, whole. ``round`` breaks it, verifies, and mends it."""

    store: S3Store
    folder: Path
    rng: random.Random
    store_key: bytes | None = None

    def __post_init__(self) -> None:
        self._agent = NearAgent(
            ClockedStore(self.store), self.folder / "home", self.folder / "work", self.store_key
        )
        self._agent.root.mkdir(parents=True)
        names = [self._grown(number) for number in range(SNAPSHOTS)]
        self._manifests = {
            name: open_manifest(self.store, WORKSPACE, name, self._agent.seal)[0] for name in names
        }
        self._whole = {
            found.key: self.store.get(found.key, max_bytes=1 << 30)
            for found in self.store.list(f"workspaces/{WORKSPACE}/")
        }
        self._blind = _BlindStore(self.store)

    def close(self) -> None:
        self._agent.runs.close()

    def round(self, kind: str) -> list[str]:
        """One corruption of that kind, of objects that chance chooses; what was wrong with the
        verify of it."""
        blind = self.rng.random() < 0.7
        broken = self._broken(kind)
        try:
            for key, blob in broken.items():
                if blob is None:
                    self.store.delete([key])
                else:
                    self.store.put(key, blob)
            wrong = self._judge(broken, blind)
        finally:
            for key in broken:
                self.store.put(key, self._whole[key])
        return [f"{kind} {sorted(broken)}, blind {blind}: {line}" for line in wrong]

    def _grown(self, number: int) -> SnapshotId:
        """Another snapshot: new files, big and small, some gone, some the same as before."""
        root = self._agent.root
        for name in range(3):
            big = self.rng.randbytes(self.rng.randint(1100, 1500) * KIB)
            (root / f"big-{number}-{name}").write_bytes(big)
        for name in range(20):
            (root / f"small-{name % 10}-{number % 2}-{name}").write_bytes(
                self.rng.randbytes(self.rng.randint(1, 30_000))
            )
        if number:
            (root / f"big-{number - 1}-0").unlink()
        else:
            (root / "linked").hardlink_to(root / "big-0-1")
            (root / "empty").touch()
        return self._agent.hibernated()

    def _broken(self, kind: str) -> dict[ObjectKey, bytes | None]:
        keys = sorted(self._whole)
        key = self.rng.choice(keys)
        blob = self._whole[key]
        if kind == "deleted":
            return {key: None}
        if kind == "truncated":
            return {key: blob[: self.rng.randrange(len(blob))]}
        if kind == "flipped":
            at = self.rng.randrange(len(blob))
            return {
                key: blob[:at] + bytes([blob[at] ^ 1 << self.rng.randrange(8)]) + blob[at + 1 :]
            }
        other = self.rng.choice([k for k in keys if k != key])
        return {key: self._whole[other], other: blob}

    def _judge(self, broken: dict[ObjectKey, bytes | None], blind: bool) -> list[str]:
        store = self._blind if blind else self._agent.store
        found = quick_look(store, WORKSPACE, self._agent.seal, list(self._manifests))
        self._agent.examine(found)
        verdicts = {verdict.snapshot: verdict for verdict in found.verdicts()}
        wrong = []
        for snapshot, manifest in self._manifests.items():
            wrong += self._compare(verdicts[snapshot], manifest, broken)
        return wrong

    def _compare(
        self, verdict: SnapshotVerdict, manifest: Manifest, broken: dict[ObjectKey, bytes | None]
    ) -> list[str]:
        snapshot = verdict.snapshot
        key = manifest_key(WORKSPACE, snapshot)
        if key in broken:
            right = verdict.fault and verdict.objects == [key]
            return [] if right else [f"{snapshot}: the manifest is broken, and was not blamed"]
        objects = {pack_key(WORKSPACE, pack.id) for pack in manifest.packs} & broken.keys()
        files = self._damaged_files(manifest, broken)
        wrong = []
        if verdict.fault:
            wrong.append(f"{snapshot}: blamed for nothing: {verdict.fault}")
        if set(verdict.objects) != objects or verdict.damaged_objects != len(objects):
            wrong.append(f"{snapshot}: blames {verdict.objects}, broken are {sorted(objects)}")
        if verdict.damaged_files != len(files) or verdict.paths != files[:SHOWN]:
            wrong.append(f"{snapshot}: names {verdict.damaged_files} files, {len(files)} are lost")
        return wrong

    def _damaged_files(
        self, manifest: Manifest, broken: dict[ObjectKey, bytes | None]
    ) -> list[str]:
        """Every name whose bytes in the store are others than they were."""
        lost = set()
        for number, chunk in enumerate(manifest.chunks):
            key = pack_key(WORKSPACE, manifest.packs[chunk.pack].id)
            if key in broken:
                where = slice(chunk.offset, chunk.offset + chunk.stored)
                if (broken[key] or b"")[where] != self._whole[key][where]:
                    lost.add(number)
        files = {
            entry.path
            for entry in manifest.entries
            if entry.kind == FILE and any(extent.chunk in lost for extent in entry.extents)
        }
        return [
            f"{manifest.roots[0]}/{entry.path.decode()}"
            for entry in manifest.entries
            if entry.path in files or (entry.kind == HARDLINK and entry.target in files)
        ]


@pytest.mark.rule(14)
@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "sealed"])
def test_every_corruption_is_found_and_the_right_files_are_blamed(
    sealed: bool, seaweed: Server, tmp_path: Path
) -> None:
    seed = secrets.randbelow(1 << 32)
    rng = random.Random(seed)
    broken = _Corruption(seaweed.store(), tmp_path, rng, rng.randbytes(32) if sealed else None)
    try:
        wrong = [line for n in range(ROUNDS) for line in broken.round(KINDS[n % len(KINDS)])]
    finally:
        broken.close()
    assert wrong == [], f"seed {seed}"
