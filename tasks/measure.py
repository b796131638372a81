"""The steps of a benchmark as tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from prefect.client.orchestration import get_client

from blocks import ObjectStore, Workspace
from blocks.reference import load
from tasks.retries import ONCE
from tasks.step import step
from tasks.workspace import OpenWorkspace
from torpor.control.measure import scratch, storage
from torpor.control.measure.figures import Figure
from torpor.control.measure.rounds import Rounds
from torpor.control.remote.agent import Session
from torpor.control.remote.measurement import encodings_of, line_of
from torpor.control.store.s3 import S3Store
from torpor.control.store_prices import StorePrice
from torpor.shared.values import MIB, GpuUse, WorkspaceName
from torpor.shared.wire.machine import Encodings

EVERY: Final = "*"
CODEC_BYTES: Final = 16 * MIB
"""Bytes of each kind of content that is encoded."""
_MOST_STORES: Final = 200  # the most stores in one answer of Prefect's API


@dataclass(frozen=True)
class MeasuredStore:
    """One opened Object Store block, with its prices."""

    name: str
    store: S3Store
    price: StorePrice | None


def open_stores(workspace: Workspace | str, names: Sequence[str]) -> list[MeasuredStore]:
    """The workspace's own store first, then the blocks of these names; ``*`` is every saved one."""
    wanted = [Workspace.of(workspace).store.rpartition("/")[2]]
    for name in names:
        wanted += _saved() if name.strip() == EVERY else [name.strip().rpartition("/")[2]]
    return [_opened(name) for name in dict.fromkeys(wanted)]


@step("measure store", run_name="measure store {measured.name}", retries=ONCE)
def measure_store(
    measured: MeasuredStore, session: Session, name: WorkspaceName, rounds: Rounds
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
        rounds,
    )


@step("measure encodings", retries=ONCE)
def measure_encodings(session: Session, rounds: int, gpu: GpuUse) -> Encodings:
    """Every encoding of the format on the built-in content, on the machine."""
    return encodings_of(session, CODEC_BYTES, rounds, gpu)


@step("clear")
def clear_scratch(opened: OpenWorkspace) -> int:
    """Delete what the benchmark stored."""
    return scratch.clear(opened.store, opened.spec.name)


def _opened(name: str) -> MeasuredStore:
    block = load(name, (ObjectStore,), of="the benchmark")
    return MeasuredStore(name, block.open(), block.price())


def _saved() -> list[str]:
    """The names of all saved Object Store blocks."""
    with get_client(sync_client=True) as client:
        documents = client.read_block_documents_by_type(
            ObjectStore.get_block_type_slug(), include_secrets=False
        )
    return sorted(document.name for document in documents[:_MOST_STORES] if document.name)
