"""The record of a workspace's settings in its bucket: written by each flow that rents or stores,
once a day by `watch`, and asked before a machine ends.

Two control sides may use one bucket: a host that moved, or the old one that still runs. Each knows
the blocks of its own server alone. Where another one has recorded other settings of what is stored,
this one ends no machine of the workspace: what it would leave out is lost with it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Collection, Mapping
from typing import Final

from blocks import ObjectStore
from blocks.reference import load, saved_names
from tasks.guards import EndingMachine
from tasks.runner import runner
from tasks.workspace import OpenWorkspace
from torpor.control.store.block_records import (
    BlockRecord,
    BlockRecords,
    Settings,
    record_key,
    side_and_block,
)
from torpor.control.store.patience import StorePatience
from torpor.control.store.records import Unread
from torpor.control.store.settings_memory import Remembered, SettingsMemory, highest
from torpor.shared.errors import TorporError, UnsavedWork
from torpor.shared.values import ObjectKey

KEEP_S: Final = 5.0
"""How long a store may hold up whoever keeps a record there; the next flow tries it again."""
DAY_S: Final = 24 * 3600.0


def keep_settings(opened: OpenWorkspace) -> None:
    """Write the workspace's settings into its bucket where this side's record has others: one
    request where it has these. What cannot be written is a warning."""
    name = opened.spec.name
    try:
        settings = opened.settings()
        if settings is not None:
            _keep(opened, settings)
    except TorporError as error:
        runner().log.warning(
            "the settings of workspace %s were not written into its bucket, where `torpor recover` "
            "finds them; the next wake, backup or hibernate tries it again: %s",
            name,
            error,
        )


def other_settings(opened: OpenWorkspace) -> list[str]:
    """In what other control sides have recorded other settings of what is stored, so that no
    machine of the workspace ends; in words."""
    settings, name = opened.settings(), opened.spec.name
    if settings is None:
        return []
    store = StorePatience(KEEP_S).of(opened.store)
    found = BlockRecords(store, opened.store_key).all_of(name).values()
    others = [one for one in found if one.side != opened.side and not one.withdrawn]
    return [words for one in others if (words := _differs(name, settings, one))]


def keep_daily(
    opened: Mapping[str, OpenWorkspace], saved: Collection[str], faults: list[Exception]
) -> None:
    """Keep the settings of each block that was not compared with its record for a day, and withdraw
    those of blocks that are gone. ``saved``: every Workspace block of the installation."""
    memory = runner().memory
    remembered = memory.remembered()
    for block, one in opened.items():
        kept_unix = max((of.kept_unix for of in remembered if of.block == block), default=0.0)
        if time.time() - kept_unix > DAY_S:
            keep_settings(one)
    for block in {one.block for one in remembered} - set(saved):
        try:
            withdraw_settings(block)
        except TorporError as error:
            runner().log.error("the settings of block %s stay in its bucket: %s", block, error)
            faults.append(error)


def withdraw_settings(block: str) -> None:
    """Say in the bucket that this Workspace block is gone here. Nothing happens to the records of
    other control sides."""
    for one in runner().memory.remembered():
        if one.block == block:
            _withdraw(one)


def retire_side(opened: OpenWorkspace, side: str) -> list[str]:
    """Say in the bucket, in the name of a control side whose host is gone, that its settings of
    this workspace count no more. Returns the names of its blocks."""
    memory, name, settings = runner().memory, opened.spec.name, opened.settings()
    records = BlockRecords(opened.store, opened.store_key)
    remembered = _of(memory, opened, settings.store if settings is not None else "")
    seen = highest(remembered)
    listed = [one.key for one in opened.store.list(record_key(name, side, ""))]
    keys = {*listed, *(key for key in seen if side_and_block(key)[0] == side)}
    numbers = {
        key: records.withdraw(name, side, side_and_block(key)[1], known=seen.get(key, 0))
        for key in sorted(keys)
    }
    for one in remembered:
        _remember(memory, one.seeing(numbers))
    return sorted(side_and_block(key)[1] for key in keys)


def _of(memory: SettingsMemory, opened: OpenWorkspace, store: str) -> list[Remembered]:
    """What is remembered for the blocks of the workspace in this store."""
    place = (opened.spec.name, store)
    return [one for one in memory.remembered() if (one.workspace, one.store) == place]


def _keep(opened: OpenWorkspace, settings: Settings, *, again: bool = False) -> None:
    """Write the record of this side, and remember its number. Where the block was recorded for
    another workspace or store, that record is withdrawn. One under an earlier name of this
    side stays: a host of that name may live, whose copy this one is."""
    memory, name, block = runner().memory, opened.spec.name, settings.block
    numbers: dict[ObjectKey, int] = {}
    for one in [one for one in memory.remembered() if one.block == block]:
        if one.place == (block, name, settings.store):
            numbers = one.numbers
            continue
        try:
            _withdraw(one)
        except TorporError as error:  # the next run tries it again
            said = "the settings of block %s stay in store %s, where it was before: %s"
            runner().log.warning(said, block, one.store, error)
    key = record_key(name, opened.side, block)
    store = StorePatience(KEEP_S).of(opened.store)
    records = BlockRecords(store, opened.store_key)

    def remember(number: int, kept_unix: float = 0.0) -> None:
        seen = Remembered(
            block=block,
            side=opened.side,
            workspace=name,
            store=settings.store,
            kept_unix=kept_unix,
            numbers=numbers | {key: number},
        )
        _remember(memory, seen)

    number = records.keep(
        name,
        settings,
        opened.side,
        socket.gethostname(),
        known=numbers.get(key, 0),
        intend=remember,
        again=again,
    )
    remember(number, time.time())


def _remember(memory: SettingsMemory, one: Remembered) -> None:
    """On top of what another run has remembered meanwhile."""
    for now in memory.remembered():
        if now.place == one.place:
            one = one.seeing(now.numbers)
    memory.remember(one)


def _withdraw(one: Remembered) -> None:
    """Withdraw the record of this side for what is remembered, and forget it."""
    if one.store.rpartition("/")[2] not in saved_names(ObjectStore):
        runner().log.warning(
            "the settings of block %s stay in the bucket of store %s, whose block is gone here",
            one.block,
            one.store,
        )
        runner().memory.forget(one)
        return
    block = load(one.store, (ObjectStore,), of=f"the settings of workspace {one.workspace}")
    records = BlockRecords(StorePatience(KEEP_S).of(block.open()), block.key())
    key = record_key(one.workspace, one.side, one.block)
    records.withdraw(one.workspace, one.side, one.block, known=one.numbers.get(key, 0))
    runner().memory.forget(one)


class SameSettings:
    """Keeps a machine while another control side's settings say that something else is stored, or
    may say so. Its snapshot is made all the same: the end of a job is in it. ``repeated``: the
    hibernation is tried again and again, and makes no snapshot for it if nothing is new."""

    needs_machine = False

    def __init__(self, opened: OpenWorkspace, *, repeated: bool = False) -> None:
        self._opened = opened
        self._repeated = repeated
        self._settings = opened.settings()
        self._memory = runner().memory
        self._kept = False

    def check(self, ending: EndingMachine) -> None:
        """UnsavedWork; RecordRefused for a record that cannot be believed, which may say so."""
        stored = ending.verified is not None or (self._repeated and ending.nothing_new)
        if self._settings is None or not stored:
            return
        try:
            self._compare(self._settings)
        except UnsavedWork as error:
            raise UnsavedWork(f"machine {ending.machine.id} was not destroyed: {error}") from None

    def _compare(self, settings: Settings) -> None:
        name = self._opened.spec.name
        if not self._kept:
            _keep(self._opened, settings)
            self._kept = True
        remembered = _of(self._memory, self._opened, settings.store)
        seen = highest(remembered)
        own = {record_key(name, self._opened.side, one.block) for one in remembered}
        records = BlockRecords(self._opened.store, self._opened.store_key)
        unread: Unread = {}
        found = records.all_of(name, unread)
        this = record_key(name, self._opened.side, settings.block)
        if this in unread:  # its content is this side's: it was put back, or the bucket was copied
            _keep(self._opened, settings, again=True)
            found = records.all_of(name, unread := {})
        for refused in unread.values():
            raise refused
        numbers = {key: record.number for key, record in found.items()}
        for key, number in seen.items():
            if numbers.get(key, 0) < number:
                raise UnsavedWork(_put_back(name, key, settings, deleted=key not in numbers))
        for key, record in found.items():
            mine = key in own and numbers[key] <= seen.get(key, 0)
            if not record.withdrawn and not mine and (why := _differs(name, settings, record)):
                raise UnsavedWork(why)
        for one in remembered:
            if one.block == settings.block and one.seeing(numbers) != one:
                _remember(self._memory, one.seeing(numbers))


def _put_back(name: str, key: ObjectKey, settings: Settings, *, deleted: bool) -> str:
    side, block = side_and_block(key)
    what = "was deleted" if deleted else "is older than the one that was there"
    return (
        f"the settings {key}, which control side {side} has written, {what}: somebody else writes "
        "in the bucket. They may say that more is stored than this host knows. Where that control "
        f"side is gone: `torpor recover {name} --store {settings.store or 'STORE'} "
        f"--retire {side}`; where it lives, `torpor edit {block}` of any setting there writes them "
        "again"
    )


def _differs(name: str, settings: Settings, other: BlockRecord) -> str:
    """In words; empty where the same is stored."""
    fields = settings.differs_from(other.settings)
    if not fields:
        return ""
    return (
        f"workspace {name} has other settings here than {other.words} has written into its bucket "
        f"({', '.join(fields)}), so that one of the two would leave files out. Make them alike "
        f"with `torpor edit {settings.block}`; or, where that host is gone, `torpor recover "
        f"{name} --store {settings.store or 'STORE'} --retire {other.side}` withdraws "
        "its settings"
    )
