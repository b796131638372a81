"""The record of a workspace's settings in its bucket: written by each flow that rents or stores,
once a day by `watch`, and compared with those of other control sides before a machine ends.

Two control sides may use one bucket: a host that moved, or the old one that still runs. Each knows
the blocks of its own server alone. Where another one has recorded other settings of what is stored,
this one ends no machine of the workspace: what it would leave out is lost with it. Nothing else
about these records keeps a machine or stops a flow: it is a warning.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Collection, Mapping
from typing import Final

from blocks.control_side import own_side
from tasks.guards import EndingMachine
from tasks.runner import runner
from tasks.workspace import OpenWorkspace
from torpor.control.store.block_records import (
    DAY_S,
    NEVER_BELIEVED,
    OF_TUNING,
    STORED,
    BlockRecord,
    BlockRecords,
    Settings,
    record_key,
    record_name,
)
from torpor.control.store.patience import StorePatience
from torpor.control.store.records import Unread, named
from torpor.shared.errors import TorporError, UnsavedWork
from torpor.shared.transfer.retries import hurried
from torpor.shared.values import StoredObject

KEEP_S: Final = 5.0
"""How long a store may hold up whoever keeps or compares records there."""


def keep_settings(opened: OpenWorkspace) -> None:
    """Write the workspace's settings into its bucket where this side's record has others, or is a
    day old: one request where it is not. What cannot be written is a warning."""
    _keep(opened, StorePatience(KEEP_S))


def keep_daily(opened: Mapping[str, OpenWorkspace], every: Collection[str] | None) -> None:
    """Keep the settings of each Workspace block whose record is a day old: one listing of each
    store where none is. ``every``: the names of all Workspace blocks of this side; None if not all
    were looked at. A record of the side that is a day old and whose block is none of them, or has
    another workspace or store by now, is withdrawn: its user has changed that on the page Blocks.
    A day, because a server whose database was put back lacks what is younger than its copy."""
    patience = StorePatience(KEEP_S)
    stores = {one.store.address: (one.store, one.store_key) for one in opened.values()}
    side = next((one.side for one in opened.values()), "")
    try:
        more = [] if every is None else runner().stores()
    except Exception as error:  # noqa: BLE001 - the Prefect server's client raises any
        runner().log.warning("stores that no workspace uses were not looked at: %s", error)
    else:
        side = side or (own_side() if more else "")
        stores = {store.address: (store, key) for store, key in more} | stores
    for address, (store, store_key) in stores.items() if side else ():
        there = {block: one for block, one in opened.items() if one.store.address == address}
        own = {record_key(one.spec.name, side, block): one for block, one in there.items()}
        patient = patience.of(store)
        records = BlockRecords(patient, store_key)
        try:
            since_unix = time.time() + patient.clock_ahead_s() - DAY_S
            listed = records.listed()
            young = {stored.key for stored in listed if stored.modified_unix >= since_unix}
            old = [stored.key for stored in listed if stored.key not in young | own.keys()]
            gone = [
                key
                for key in old
                if every is not None
                and (name := record_name(key))
                and name.side == side
                and (name.block in opened or name.block not in every)
            ]
            if gone:
                records.withdraw(gone)
        except TorporError as error:
            runner().log.warning(
                "settings in %s that are a day old were not written again: %s", address, error
            )
            continue
        for key, one in own.items():
            if key not in young:
                _keep(one, patience)


def _keep(opened: OpenWorkspace, patience: StorePatience) -> None:
    name, side = opened.spec.name, opened.side
    if not side:
        return
    try:
        settings = opened.settings()
        if settings is not None:
            records = BlockRecords(patience.of(opened.store), opened.store_key)
            records.keep(name, settings, side, socket.gethostname())
    except Exception as error:  # noqa: BLE001 - the Prefect server's client raises any
        runner().log.warning(
            "the settings of workspace %s were not written into its bucket, where `torpor recover` "
            "finds them; the next wake, backup or hibernate tries it again: %s",
            name,
            error,
        )


def withdraw_settings(opened: OpenWorkspace, block: str, store: str) -> None:
    """Delete this side's record of a block that is gone, or is kept in another store. Nothing
    happens to the records of other control sides. What fails is a warning. ``store``: the Object
    Store block, as a Workspace block names it."""
    name, side, store = opened.spec.name, opened.side, store.rpartition("/")[2]
    if not side:
        return
    records = BlockRecords(StorePatience(KEEP_S).of(opened.store), opened.store_key)
    try:
        records.withdraw([record_key(name, side, block)])
    except TorporError as error:
        runner().log.warning(
            "the settings of block %s stay in the bucket of store %s, and `torpor recover` brings "
            "them back until watch withdraws them, a day later at the soonest, or `torpor recover "
            "%s --store %s --retire %s` does: %s",
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
        name, others = opened.spec.name, list[StoredObject]()
        try:
            records = BlockRecords(StorePatience(KEEP_S).of(opened.store), opened.store_key)
            others = [one for one in records.listed(name) if not self._is_own(one)]
        except TorporError as error:
            self._warn(error)
        new = [stored for stored in others if stored not in self._seen]
        with hurried():  # however many somebody has put there: each may be the true one
            read = BlockRecords(opened.store, opened.store_key).read_all(new, unread)
        for stored in new:
            if stored.key in read:
                self._seen[stored] = _differs(name, settings, read[stored.key])
            elif isinstance(unread.get(stored.key), NEVER_BELIEVED):
                self._seen[stored] = ""
        if unread:
            self._warn(named(unread))
        return [words for one in others if (words := self._seen.get(one))]

    def _is_own(self, stored: StoredObject) -> bool:
        name = record_name(stored.key)
        return name is not None and name.side == self._opened.side

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
