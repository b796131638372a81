"""The steps of a benchmark as tasks."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from prefect.client.orchestration import get_client

from blocks import ObjectStore, Workspace
from blocks.reference import load
from tasks.retries import ONCE
from tasks.step import step
from tasks.workspace import OpenWorkspace
from torpor.control.measure import codecs, peers, scratch, storage
from torpor.control.measure.figures import MB, Figure
from torpor.control.measure.rounds import Rounds
from torpor.control.remote.measurement import line_of, make_content, remove_content
from torpor.control.remote.seam import Session
from torpor.control.store.s3 import S3Settings, S3Store
from torpor.control.store_prices import StorePrice
from torpor.shared.content import make_below
from torpor.shared.values import MIB, WorkspaceName

EVERY: Final = "*"
_MOST_STORES: Final = 200  # of one answer of Prefect's API


@dataclass(frozen=True)
class MeasuredStore:
    """One opened Object Store block, with its prices."""

    name: str
    store: S3Store
    settings: S3Settings
    price: StorePrice | None


@dataclass(frozen=True)
class Sizes:
    """The amounts and repetitions of a benchmark."""

    parts: tuple[int, ...]
    object_mib: tuple[int, ...]
    machines: tuple[int, ...]
    content_mib: int
    rounds: int

    @property
    def batch_mib(self) -> int:
        """Raw bytes of one sample of a store."""
        return min(64, self.content_mib)

    @property
    def codec_mib(self) -> int:
        """Bytes of each kind of content that is encoded."""
        return min(16, self.content_mib)


def open_stores(workspace: Workspace, names: Sequence[str]) -> list[MeasuredStore]:
    """The workspace's own store first, then the blocks of these names; ``*`` is every saved one."""
    wanted = [workspace.store.rpartition("/")[2]]
    for name in names:
        wanted += _saved() if name.strip() == EVERY else [name.strip().rpartition("/")[2]]
    return [_opened(name) for name in dict.fromkeys(wanted)]


@step("measure store", run_name="measure store {measured.name}", retries=ONCE)
def measure_store(
    measured: MeasuredStore,
    session: Session,
    name: WorkspaceName,
    sizes: Sizes,
    rounds: Rounds,
) -> list[Figure]:
    """Measure raw random bytes up and down, from the machine. First deletes what a killed run
    left.
    """
    measured.store.probe()
    scratch.clear(measured.store, name, below="storage/")
    return storage.measure_storage(
        measured.store,
        measured.name,
        scratch.storage_prefix(name),
        line_of(session, measured.store.authority),
        measured_from=storage.MACHINE,
        object_bytes=[size * MIB for size in sizes.object_mib],
        parts=sizes.parts,
        batch_bytes=sizes.batch_mib * MIB,
        rounds=rounds,
    )


@step("measure codecs", retries=ONCE)
def measure_codecs(limit: int, rounds: int) -> list[Figure]:
    """Every encoding of the format on the built-in content, on one core of this host."""
    return codecs.measure_codecs(limit, rounds, secrets.randbits(31))


@step("measure peer", run_name="measure {peer}", retries=ONCE)
def measure_peer(
    peer: str, measured: MeasuredStore, name: WorkspaceName, total_bytes: int, rounds: Rounds
) -> list[Figure]:
    """Measure another tool on the same kind of content: a first upload and a restore, from this
    host.
    """
    store_s, restore_s, stored = [], [], []
    for number in rounds:
        below = f"workspaces/{name}/peers/{number}"
        prefix = "/".join(part for part in (measured.settings.prefix.strip("/"), below) if part)
        with tempfile.TemporaryDirectory(prefix="torpor-peer-") as held:
            folder = Path(held)
            content, cache = folder / "content", folder / "cache"
            make_below(content, total_bytes, secrets.randbits(31))
            tool = peers.PEERS[peer](measured.settings, prefix, content, cache)
            store_s.append(tool.full().wall_s)
            found = measured.store.list(f"{below}/")
            stored.append(float(sum(one.bytes for one in found)))
            restore_s.append(tool.restore(folder / "restored").wall_s)
            shutil.rmtree(folder / "restored")
        scratch.clear(measured.store, name, below="peers/")
    return [
        Figure("peer", peer, "s", tuple(store_s), "up", measured_from=storage.HERE),
        Figure("peer", peer, "s", tuple(restore_s), "down", measured_from=storage.HERE),
        Figure("peer", peer, "bytes", tuple(stored), "up", measured_from=storage.HERE),
    ]


@step("make content")
def make_machine_content(
    session: Session, name: WorkspaceName, total_bytes: int, seed: int
) -> None:
    """Have the agent make new content on the machine."""
    make_content(session, name, total_bytes, seed)


@step("remove content")
def remove_machine_content(session: Session, name: WorkspaceName, place_too: bool) -> None:
    """Remove the content, so that the next round begins with nothing."""
    remove_content(session, name, place_too=place_too)


@step("clear")
def clear_scratch(opened: OpenWorkspace, below: str) -> int:
    """Delete what the benchmark stored."""
    return scratch.clear(opened.store, opened.spec.name, below=below)


def rate(stored_bytes: float, seconds: float) -> float:
    """Decimal MB a second."""
    return stored_bytes / MB / max(seconds, 1e-9)


def _opened(name: str) -> MeasuredStore:
    block = load(name, (ObjectStore,), of="the benchmark")
    return MeasuredStore(name, block.open(), block.settings(), block.price())


def _saved() -> list[str]:
    """The names of all saved Object Store blocks."""
    with get_client(sync_client=True) as client:
        documents = client.read_block_documents_by_type(
            ObjectStore.get_block_type_slug(), include_secrets=False
        )
    return sorted(document.name for document in documents[:_MOST_STORES] if document.name)
