"""Several Workspace blocks for one workspace: how they differ, and what watch does not do because
of that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from tasks.runner import runner
from tasks.workspace import OpenWorkspace
from torpor.control.watch_report import Watched
from torpor.shared.values import WorkspaceName

_STORED: Final = {
    "paths": "paths",
    "exclude": "exclude",
    "accept_changed": "accept_changed",
    "accept_lost": "accept_lost",
    "left_behind": "left_behind",
    "left_behind_gib": "left_behind_gib",
    "quiesce": "the quiesce command",
    "resume": "the resume command",
    "programs": "programs",
    "process": "process",
}


class BlockDifferences(msgspec.Struct, frozen=True):
    """How the ``blocks`` of a workspace differ. ``stored``: in what a hibernation stores, and
    where, so that only a person can choose a block. ``idle``: in when a machine counts as idle.
    ``left``: in what happens to a machine that a killed run left."""

    blocks: list[str]
    stored: list[str]
    idle: bool
    left: bool

    @property
    def words(self) -> str:
        """How the blocks differ, and what watch does not do because of that; empty if they do
        not."""
        differ = []
        if self.stored:
            differ.append(
                f"{', '.join(self.stored)}: it is hibernated neither when it is idle nor for a "
                "budget, and what killed runs left is only reported"
            )
        else:
            if self.idle:
                differ.append("when it is idle: it is hibernated for a budget only")
            if self.left:
                differ.append("when_left: what killed runs left is only reported")
        names = ", ".join(self.blocks)
        said = "; and in ".join(differ)
        return f"the blocks {names} are all for this workspace and differ in {said}" if said else ""


def block_differences(
    blocks: Mapping[str, OpenWorkspace], named: Mapping[WorkspaceName, Sequence[str]]
) -> dict[WorkspaceName, BlockDifferences]:
    """The differences of each workspace that has several blocks."""
    return {
        name: _compared({block: blocks[block] for block in of})
        for name, of in named.items()
        if len(of) > 1
    }


def most_frequent_saves(blocks: Sequence[OpenWorkspace]) -> OpenWorkspace:
    """The block of a workspace with the most frequent saves of the machine by itself, because any
    of the blocks may have rented the machine. The first block if none has such saves."""
    saving = [opened for opened in blocks if opened.spec.save_minutes]
    return min(saving, key=lambda opened: opened.spec.save_minutes, default=blocks[0])


def undecided(one: Watched, of: BlockDifferences | None, has_job: bool) -> Watched:
    """The row with the verdict "kept" where a job will hibernate the workspace, or where its blocks
    differ."""
    differ = of.words if of else ""
    if has_job and not one.over:
        if one.hibernates:
            step = "none: its job hibernates it when it has ended"
            one = msgspec.structs.replace(one, next_step=step, hibernates=False)
        return msgspec.structs.replace(one, differ=differ)
    if of is None or not differ:
        return one
    keeps = of.stored or (of.idle and not one.over)
    if not (one.hibernates or one.over) or not keeps:
        return msgspec.structs.replace(one, differ=differ)
    step = f"hibernate it yourself, or make the blocks alike: {differ}"
    if one.over:
        step = f"{one.over}: {step}"
        runner().log.warning("machine %s was not hibernated: %s", one.machine, step)
    return msgspec.structs.replace(one, next_step=step, hibernates=False, over="", differ=differ)


def _compared(blocks: Mapping[str, OpenWorkspace]) -> BlockDifferences:
    opened = [*blocks.values()]
    first = opened[0]
    stored = [
        words
        for field, words in _STORED.items()
        if any(getattr(one.spec, field) != getattr(first.spec, field) for one in opened)
    ]
    if any(one.store.address != first.store.address for one in opened):
        stored.append("the store")
    elif any(one.key != first.key for one in opened):
        stored.append("the store's encryption")
    return BlockDifferences(
        [*blocks],
        stored,
        idle=any(one.spec.idle != first.spec.idle for one in opened),
        left=any(one.spec.when_left != first.spec.when_left for one in opened),
    )
