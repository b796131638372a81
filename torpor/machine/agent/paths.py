"""One file or directory of a snapshot, brought into a directory beside what is there."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path
from typing import Final

from blake3 import blake3

from torpor.machine.agent.call import Call
from torpor.machine.agent.manifests import read_wanted
from torpor.machine.agent.restore import RestoreRun, checked
from torpor.machine.agent.runs import seal_of
from torpor.machine.pipeline.download import FetchPlan, RestoreJournal, in_pieces
from torpor.machine.tree.compare import compare_tree
from torpor.machine.tree.walk import absolute_root
from torpor.machine.tree.write import TreeWriter
from torpor.shared.errors import InvalidInput
from torpor.shared.format.checks import check_manifest
from torpor.shared.format.selection import select
from torpor.shared.values import WorkspaceName
from torpor.shared.wire.request import Event
from torpor.shared.wire.restore import BeginPath, Checked, CheckRestore, RestorePlan

_STAGE: Final = b".torpor-"
"""A restore is written, finished and compared in a directory of this name, beside its place."""

_NO_LINKS: Final = {errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS}
"""What a file system without hard links says."""


class PathRun(RestoreRun):
    """A restore of a part of a snapshot. What the agent knows of the workspace as a whole stays
    as it was. Nothing is at its place before every byte has been compared."""

    def __init__(self, home: Path, run: str, workspace: WorkspaceName) -> None:
        super().__init__(home, run, workspace)
        self._stage = b""
        self._placed: Checked | None = None

    def begin_path(self, request: BeginPath, call: Call) -> RestorePlan:
        """Read and check the manifest, look at the place, plan what to fetch. Once a run; an
        agent that was restarted goes on with what the lost one has written for this run.

        ``aside``: what has the name already is renamed in the end; otherwise it is refused now.
        """
        if self._begun is not None:
            return self._begun
        self._seal = seal_of(request.key)
        _, root, manifest = read_wanted(request, self._seal, self.transfer(call))
        path = bytes.fromhex(request.path)
        self._manifest, self._name = select(manifest, request.root_number, path)
        check_manifest(self._manifest, f"what was chosen of snapshot {request.snapshot}")
        self._into = os.fsencode(absolute_root(request.into))
        self._aside = request.aside
        self._snapshot = request.snapshot
        self._refuse_what_is_there()
        own = blake3(self.id.encode()).hexdigest(8).encode()
        self._stage = os.path.join(self._into, _STAGE + own)
        self._targets = [self._stage]
        identity = blake3(root + self._stage + b"\0" + path).digest()
        self._journal = RestoreJournal(self.state.folder / "path", identity)
        if not os.path.isdir(self._stage):
            self._journal.clear()  # what it says was written went with a run that was given up
        self._done = self._journal.done() or set()
        self._plan = FetchPlan(self._manifest, request.max_parts, self._done, request.part_bytes)
        self._check_space()
        os.makedirs(self._into, mode=0o755, exist_ok=True)
        if not os.path.isdir(self._stage):
            os.mkdir(self._stage, 0o700)
        self._journal.begin()
        self._writer = TreeWriter(self._targets)
        self._writer.prepare(self._manifest.entries, in_pieces, afresh=not self._done)
        self._writer.close()
        self._begun = self._planned([os.path.join(self._into, self._name)])
        return self._begun

    def _compare(self, request: CheckRestore, call: Call) -> Checked:
        """Read and hash every byte, and then put it in its place. Once a run."""
        if self._placed is not None:
            return self._placed
        self._finish()
        result = compare_tree(
            self._manifest.entries,
            self._manifest.chunks,
            self._targets,
            self._seal,
            full=request.full,
            owners=os.geteuid() == 0,
            refused_xattrs=self._writer.refused_xattrs,
            progress=lambda size: call.emit(Event(size)),
            check=lambda: self.check(call),
        )
        answer = checked(result)
        if not result.differences:
            self._put_in_place()
            self._placed = answer
        return answer

    def _refuse_what_is_there(self) -> None:
        place = os.path.join(self._into, self._name)
        if os.path.lexists(self._into) and not os.path.isdir(self._into):
            raise InvalidInput(
                f"{os.fsdecode(self._into)} on the machine is not a directory: name a directory, "
                "or a path that does not exist yet"
            )
        if os.path.lexists(place) and not self._aside:
            raise InvalidInput(
                f"{os.fsdecode(place)} already exists on the machine: torpor never overwrites; "
                "restore into another directory, or use `move_aside`"
            )

    def _put_in_place(self) -> None:
        staged = os.path.join(self._stage, self._name)
        place = os.path.join(self._into, self._name)
        if self._aside and os.path.lexists(place):
            os.rename(place, _free_name(place + b".before-" + self._snapshot.encode()))
        try:
            if stat.S_ISDIR(os.lstat(staged).st_mode):
                os.rename(staged, place)  # the kernel refuses where something is in the way
            else:
                os.link(staged, place, follow_symlinks=False)  # unlike rename, never replaces
        except OSError as exc:
            if os.path.lexists(place):
                raise InvalidInput(
                    f"{os.fsdecode(place)} appeared on the machine during the restore: nothing "
                    "was overwritten; stop the program that writes there, and restore again"
                ) from None
            if exc.errno not in _NO_LINKS:
                raise
            os.rename(staged, place)
        self._journal.clear()

    def _give_back(self) -> None:
        if self._stage:
            _remove(self._stage)
        super()._give_back()


def _free_name(wanted: bytes) -> bytes:
    name, number = wanted, 1
    while os.path.lexists(name):
        number += 1
        name = b"%s-%d" % (wanted, number)
    return name


def _remove(stage: bytes) -> None:
    """Remove a directory of ours, whatever modes its contents were given."""
    for folder, names, _ in os.walk(stage):
        for name in names:
            path = os.path.join(folder, name)
            if not os.path.islink(path):
                os.chmod(path, 0o700)
    shutil.rmtree(stage, ignore_errors=True)
