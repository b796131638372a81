"""The record of a workspace's settings in its bucket: written by each flow that rents or stores,
and asked before a machine ends.

Two control sides may use one bucket: a host that moved, or the old one that still runs. Each knows
the blocks of its own server alone. Where the other one has written other settings of what is
stored, this one ends no machine of the workspace: what it would leave out is lost with it.
"""

from __future__ import annotations

import socket
from typing import Final

from tasks.guards import EndingMachine
from tasks.runner import runner
from tasks.workspace import OpenWorkspace
from torpor.control.store.block_records import BlockRecord, BlockRecords, Settings
from torpor.control.store.patience import StorePatience
from torpor.shared.errors import TorporError, UnsavedWork

KEEP_S: Final = 5.0
"""How long a store may hold up whoever keeps a record there; the next flow tries it again."""


def keep_settings(
    opened: OpenWorkspace, *, was: Settings | None = None, force: bool = False
) -> BlockRecord | None:
    """Write the workspace's settings into its bucket where the record has others: one request where
    it has these. ``was``, ``force``: as in BlockRecords.keep. What cannot be written is a warning;
    a record of another control side stays, and is returned."""
    name = opened.spec.name
    try:
        settings = opened.settings()
        if settings is None:
            return None
        store = StorePatience(KEEP_S).of(opened.store)
        records = BlockRecords(store, opened.store_key)
        host = socket.gethostname()
        other = records.keep(name, settings, opened.side, host, was=was, force=force)
    except TorporError as error:
        runner().log.warning(
            "the settings of workspace %s were not written into its bucket, where `torpor recover` "
            "finds them; the next wake, backup or hibernate tries it again: %s",
            name,
            error,
        )
        return None
    if other is not None and (why := _differs(name, settings, other)):
        runner().log.warning("%s", why)
    return other


def forget_settings(opened: OpenWorkspace, block: str) -> None:
    """Delete the record: the workspace is to be deleted, or goes to another store. StoreError where
    that fails."""
    BlockRecords(opened.store, opened.store_key).forget(opened.spec.name, block)


class SameSettings:
    """Keeps a machine while another control side's settings say that something else is stored. Its
    snapshot is made all the same: the end of a job is in it. ``repeated``: the hibernation is tried
    again and again, and makes no snapshot for it if nothing is new."""

    needs_machine = False

    def __init__(self, opened: OpenWorkspace, *, repeated: bool = False) -> None:
        self._opened = opened
        self._repeated = repeated
        self._settings = opened.settings()

    def check(self, ending: EndingMachine) -> None:
        """UnsavedWork; RecordRefused for a record that cannot be believed, which may say so."""
        settings = self._settings
        stored = ending.verified is not None or (self._repeated and ending.nothing_new)
        if settings is None or not stored:
            return
        name = self._opened.spec.name
        records = BlockRecords(self._opened.store, self._opened.store_key)
        found = records.read(name, settings.block)
        if found is None or found[0].side == self._opened.side:
            return
        if why := _differs(name, settings, found[0]):
            raise UnsavedWork(f"machine {ending.machine.id} was not destroyed: {why}")


def _differs(name: str, settings: Settings, other: BlockRecord) -> str:
    """In words; empty where the same is stored."""
    fields = settings.differs_from(other.settings)
    if not fields:
        return ""
    store = settings.blocks.get(f"workspace/{settings.block}", {}).get("store", "STORE")
    return (
        f"workspace {name} has other settings here than {other.words} has written into its bucket "
        f"({', '.join(fields)}), so that one of the two would leave files out. Choose: `torpor "
        f"recover {settings.block} --store {store} --take` takes the bucket's settings, and --keep "
        "writes these there"
    )
