"""The record of a workspace's settings in its bucket: written by each flow that rents or stores,
once a day by `watch`, and compared with those of other control sides before a machine ends.

Two control sides may use one bucket: a host that moved, or the old one that still runs. Each knows
the blocks of its own server alone. Where another one has recorded other settings of what is stored,
this one ends no machine of the workspace: what it would leave out is lost with it. Nothing else
about these records keeps a machine or stops a flow: it is a warning.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Final

from tasks.guards import EndingMachine
from tasks.runner import runner
from tasks.workspace import OpenWorkspace
from torpor.control.store.block_records import (
    NEVER_BELIEVED,
    OF_TUNING,
    STORED,
    BlockRecord,
    BlockRecords,
    Settings,
    side_and_block,
)
from torpor.control.store.patience import StorePatience
from torpor.control.store.records import Unread, named
from torpor.shared.errors import TorporError, UnsavedWork
from torpor.shared.values import StoredObject

KEEP_S: Final = 5.0
"""How long a store may hold up whoever keeps or compares records there."""


def keep_settings(opened: OpenWorkspace) -> None:
    """Write the workspace's settings into its bucket where this side's record has others, or is a
    day old: one request where it is not. What cannot be written is a warning."""
    _keep(opened, StorePatience(KEEP_S))


def keep_daily(opened: Mapping[str, OpenWorkspace]) -> None:
    """Keep the settings of each Workspace block whose record is a day old, or cannot be read."""
    patience = StorePatience(KEEP_S)
    for block, one in opened.items():
        _keep(one, patience, daily=block)


def _keep(opened: OpenWorkspace, patience: StorePatience, *, daily: str = "") -> None:
    """``daily``: the name of its block, where a record of today is not compared."""
    name, side = opened.spec.name, opened.side
    if not side:
        return
    records = BlockRecords(patience.of(opened.store), opened.store_key)
    try:
        if daily and records.is_fresh(name, side, daily):
            return
        settings = opened.settings()
        if settings is not None:
            records.keep(name, settings, side, socket.gethostname())
    except Exception as error:  # noqa: BLE001 - the Prefect server's client raises any
        runner().log.warning(
            "the settings of workspace %s were not written into its bucket, where `torpor recover` "
            "finds them; the next wake, backup or hibernate tries it again: %s",
            name,
            error,
        )


def withdraw_settings(opened: OpenWorkspace, block: str, store: str) -> None:
    """Say in the bucket that this side's block is gone, or is kept in another store. Nothing
    happens to the records of other control sides. What fails is a warning. ``store``: the Object
    Store block, as a Workspace block names it."""
    name, side, store = opened.spec.name, opened.side, store.rpartition("/")[2]
    if not side:
        return
    records = BlockRecords(StorePatience(KEEP_S).of(opened.store), opened.store_key)
    try:
        records.withdraw(name, side, block)
    except TorporError as error:
        runner().log.warning(
            "the settings of block %s stay in the bucket of store %s, and `torpor recover` brings "
            "them back; `torpor recover %s --store %s --retire %s` withdraws them: %s",
            block,
            store,
            name,
            store,
            side,
            error,
        )


def other_settings(opened: OpenWorkspace) -> list[str]:
    """In what other control sides have recorded other settings of what is stored, so that no
    machine of the workspace ends; in words."""
    return SameSettings(opened).differences()


class SameSettings:
    """Keeps a machine while another control side's settings say that something else is stored. Its
    snapshot is made all the same: the end of a job is in it. ``repeated``: the hibernation is tried
    again and again, and makes no snapshot for it if nothing is new."""

    needs_machine = False

    def __init__(self, opened: OpenWorkspace, *, repeated: bool = False) -> None:
        self._opened = opened
        self._repeated = repeated
        self._settings: Settings | None = None
        self._seen: dict[StoredObject, str] = {}
        self._warned: set[str] = set()
        try:
            self._settings = opened.settings() if opened.side else None
        except Exception as error:  # noqa: BLE001 - the Prefect server's client raises any
            self._warn(error)

    def check(self, ending: EndingMachine) -> None:
        """UnsavedWork where another side has recorded other settings."""
        if ending.verified is not None or (self._repeated and ending.nothing_new):
            for words in self.differences():
                raise UnsavedWork(f"machine {ending.machine.id} was not destroyed: {words}")

    def differences(self) -> list[str]:
        """In what they differ, in words. A record that was read before is not read again."""
        settings, opened, unread = self._settings, self._opened, Unread()
        if settings is None:
            return []
        found: list[str] = []
        store = StorePatience(KEEP_S).of(opened.store)
        records = BlockRecords(store, opened.store_key)
        try:
            for stored in records.listed(opened.spec.name):
                if (side_and_block(stored.key) or ("",))[0] == opened.side:
                    continue
                if stored not in self._seen:
                    self._seen[stored] = self._read(records, settings, stored, unread)
                found += [self._seen[stored]] if self._seen[stored] else []
        except TorporError as error:
            self._warn(error)
        if unread:
            self._warn(named(unread))
        return found

    def _read(
        self, records: BlockRecords, settings: Settings, stored: StoredObject, unread: Unread
    ) -> str:
        """In what this record differs; empty for one that cannot be believed."""
        try:
            other = records.read(stored)
        except NEVER_BELIEVED as error:
            unread[stored.key] = error
            return ""
        if other is None or other.withdrawn:
            return ""
        return _differs(self._opened.spec.name, settings, other)

    def _warn(self, why: object) -> None:
        """Once in the same words."""
        if str(why) not in self._warned:
            self._warned.add(str(why))
            runner().log.warning(
                "workspace %s: its settings were not compared with all that other control sides "
                "have recorded, which keeps no machine: %s",
                self._opened.spec.name,
                why,
            )


def _differs(name: str, settings: Settings, other: BlockRecord) -> str:
    """In words; empty where the same is stored."""
    fields = settings.differs_from(other.settings)
    if not fields:
        return ""
    does = [f"with `torpor edit {settings.block}`"] if {*fields} - {*OF_TUNING} else []
    does += ["in its Tuning block on the UI's page Blocks"] if {*fields} & {*OF_TUNING} else []
    return (
        f"workspace {name} has other settings here than {other.words} has written into its bucket "
        f"({', '.join(STORED[one] for one in fields)}), so that one of the two would leave files "
        f"out. Make them alike {' and '.join(does)}; or, where that host is gone, `torpor recover "
        f"{name} --store {settings.store or 'STORE'} --retire {other.side}` withdraws "
        "its settings"
    )
