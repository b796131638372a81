"""One file or directory of a snapshot, brought into a directory beside what is there."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from blake3 import blake3

from torpor.machine.agent.call import Call
from torpor.machine.agent.goal import Goal, first_few, shown
from torpor.machine.agent.in_use import InUse
from torpor.machine.agent.manifests import read_wanted
from torpor.machine.agent.restore import Begun, RestoreRun, move_aside
from torpor.machine.agent.runs import seal_of
from torpor.machine.agent.writing import Writing
from torpor.machine.pipeline.download import RestoreJournal
from torpor.machine.tree.absence import is_there
from torpor.machine.tree.changes import leave_out
from torpor.machine.tree.compare import Comparison
from torpor.machine.tree.first import NO_FIRST
from torpor.machine.tree.naming import take_name
from torpor.machine.tree.walk import absolute_root
from torpor.shared.errors import InvalidInput
from torpor.shared.format.checks import check_manifest
from torpor.shared.format.git_names import is_head, is_of_git
from torpor.shared.format.manifest import DIRECTORY, Manifest
from torpor.shared.format.selection import select
from torpor.shared.values import SnapshotId, WorkspaceName
from torpor.shared.wire.restore import BeginPath, Checked, CheckRestore, RestorePlan

_STAGE: Final = b".torpor-"
"""The prefix of a directory beside the target in which a restore is written, finished and
compared."""


class _Placing(NamedTuple):
    """Where the restored name goes in the end, and where it is until then."""

    stage: bytes
    into: bytes
    name: bytes
    aside: bool
    snapshot: SnapshotId

    @property
    def place(self) -> bytes:
        return os.path.join(self.into, self.name)


class PathRun(RestoreRun):
    """A restore of a part of a snapshot. What the agent knows of the workspace as a whole stays
    as it was. Nothing is at its place before every byte has been compared."""

    def __init__(self, home: Path, run: str, workspace: WorkspaceName) -> None:
        super().__init__(home, run, workspace)
        self._placing: _Placing | None = None
        self._placed: Checked | None = None

    def begin_path(self, request: BeginPath, call: Call) -> RestorePlan:
        """Read and check the manifest, look at the place, plan what to fetch. Once a run; an
        agent that was restarted goes on with what the lost one has written for this run.

        ``aside``: what has the name already is renamed in the end; without it, the call raises.
        """
        if self._begun is None:
            self._begun = self._begin_path(request, call)
        return self._begun.answer

    def compare(self, request: CheckRestore, call: Call) -> Checked:
        """Read and hash every byte, and then put it in its place. Once a run."""
        if self._placed is not None:
            return self._placed
        compared = super().compare(request, call)
        return self._placed or compared

    def _begin_path(self, request: BeginPath, call: Call) -> Begun:
        seal = seal_of(request.key)
        wanted = read_wanted(request, seal, self.transfer(call))
        path = bytes.fromhex(request.path)
        manifest, name = select(wanted.manifest, request.root_number, path)
        left_out: list[str] = []
        if request.leave_git:
            manifest, left_out = _without_git(manifest, whole=is_of_git(os.fsdecode(name)))
        check_manifest(manifest, f"what was chosen of snapshot {request.snapshot}")
        into = os.fsencode(absolute_root(request.into))
        own = blake3(self.id.encode()).hexdigest(8).encode()
        stage = os.path.join(into, _STAGE + own)
        placing = _Placing(stage, into, name, request.aside, request.snapshot)
        _check_nothing_there(placing)
        self._placing = placing
        identity = blake3(wanted.root + stage + b"\0" + path).digest()
        journal = RestoreJournal(self.state.folder / "path", identity)
        if not os.path.isdir(stage):
            # stale journal: its staging directory is gone, with a run that was given up
            journal.clear()
        goal = Goal(manifest, [stage], seal)
        able = goal.abilities(self.state.probe_note)
        plan = self._plan(goal, request, journal.done() or set(), able)
        os.makedirs(into, mode=0o755, exist_ok=True)
        if not os.path.isdir(stage):
            os.mkdir(stage, 0o700)
        in_use = InUse(self.state.folder / "path-in-use", identity)
        writing = Writing(goal, plan, journal, NO_FIRST, in_use, abilities=able)
        writing.prepare()
        answer = self._answer(goal, [placing.place], plan)
        answer = msgspec.structs.replace(answer, left_out=first_few(left_out))
        return Begun(answer, wanted, goal, writing)

    def _compared(self, begun: Begun, writing: Writing, compared: Comparison) -> None:
        if not compared.differences and self._placing is not None:
            aside = _put_in_place(self._placing)
            writing.end()
            self._placed = Checked([], 0, moved_aside=shown(aside))

    def _give_back(self) -> None:
        if self._placing is not None:
            _remove(self._placing.stage)
        super()._give_back()


def _without_git(manifest: Manifest, *, whole: bool) -> tuple[Manifest, list[str]]:
    """The manifest without names that have git take a directory for a repository (each `.git`, and
    each file `HEAD`), except the chosen path itself; and those names. ``whole``: a `.git` was
    chosen, which keeps its `HEAD`."""
    left_out: list[str] = []
    folders = {entry.path for entry in manifest.entries if entry.kind == DIRECTORY}

    def is_out(root: int, path: bytes) -> bool:
        _, slash, last = path.rpartition(b"/")
        name = os.fsdecode(last)
        makes_one = is_head(name) and path not in folders and not whole
        if is_out := bool(slash) and (is_of_git(name) or makes_one):
            left_out.append(shown(path))
        return is_out

    entries = leave_out(manifest.entries, is_out)
    return msgspec.structs.replace(manifest, entries=entries), left_out


def _check_nothing_there(placing: _Placing) -> None:
    if os.path.lexists(placing.into) and not os.path.isdir(placing.into):
        raise InvalidInput(
            f"{os.fsdecode(placing.into)} on the machine is not a directory: name a directory, "
            "or a path that does not exist yet"
        )
    if is_there(placing.place) and not placing.aside:
        raise InvalidInput(
            f"{os.fsdecode(placing.place)} already exists on the machine: torpor never overwrites; "
            "restore into another directory, or use `move_aside`"
        )


def _put_in_place(placing: _Placing) -> bytes:
    """Move the restored name to its place. Returns the new name of what had the name before; empty
    where nothing had."""
    place, aside = placing.place, b""
    if placing.aside and is_there(place):
        aside = move_aside(place, placing.snapshot)
    try:
        if _took_its_name(os.path.join(placing.stage, placing.name), place):
            return aside
    except OSError:
        if aside and not os.path.lexists(place):
            os.rename(aside, place)
        raise
    was = f" What had the name before is {os.fsdecode(aside)}." if aside else ""
    raise InvalidInput(
        f"{os.fsdecode(place)} appeared on the machine during the restore: nothing was "
        f"overwritten.{was} Stop the program that writes there, and restore again"
    )


def _took_its_name(staged: bytes, place: bytes) -> bool:
    if not stat.S_ISDIR(os.lstat(staged).st_mode):
        return take_name(staged, place)
    try:
        os.rename(staged, place)  # the kernel refuses where the name exists
    except OSError:
        if os.path.lexists(place):
            return False
        raise
    return True


def _remove(stage: bytes) -> None:
    """Remove a directory of ours, whatever modes its contents were given."""
    for folder, names, _ in os.walk(stage):
        for name in names:
            path = os.path.join(folder, name)
            if not os.path.islink(path):
                os.chmod(path, 0o700)
    shutil.rmtree(stage, ignore_errors=True)
