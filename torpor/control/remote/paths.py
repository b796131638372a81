"""The control side's half of restoring one file or directory."""

from __future__ import annotations

from typing import NamedTuple

from torpor.control.remote.agent import Agent
from torpor.control.remote.restore import RemoteRestore
from torpor.control.store.object_store import ObjectStore
from torpor.shared.values import StoredSnapshot, WorkspaceSpec
from torpor.shared.wire.restore import BeginPath, RestorePlan


class SnapshotPath(NamedTuple):
    """A name in a snapshot: the number of the workspace's directory, and the path below it."""

    root: int
    path: bytes


class RemotePath(RemoteRestore):
    """Part of a snapshot on its way to one machine. After a lost agent it begins again, without
    fetching again what is on the disk."""

    def __init__(
        self,
        agent: Agent,
        store: ObjectStore,
        wanted: StoredSnapshot,
        key: bytes | None,
        run: str,
        chosen: SnapshotPath,
        *,
        into: str,
        aside: bool,
        spec: WorkspaceSpec,
        leave_git: bool = False,
    ) -> None:
        super().__init__(
            agent,
            store,
            wanted,
            key,
            run,
            paths=spec.restorable,
            parts=spec.parts,
            part_bytes=spec.part_bytes,
        )
        self._chosen = chosen
        self._into = into
        self._aside = aside
        self._leave_git = leave_git

    def begin(self, *, resume: bool = False, rented: bool = False) -> RestorePlan:
        """Take the workspace on the machine; check the manifest, the target and the free space.

        ``resume`` has no effect: no other run leaves anything to continue with.
        """
        plan = self._call(
            BeginPath(
                **self._of(self.wanted, self._paths),
                root_number=self._chosen.root,
                path=self._chosen.path.hex(),
                into=self._into,
                aside=self._aside,
                leave_git=self._leave_git,
                max_parts=self._parts,
                part_bytes=self._part_bytes,
            )
        )
        return self._within_limits(plan)
