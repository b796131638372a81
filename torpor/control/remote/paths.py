"""The control side's half of restoring one file or directory."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from torpor.control.remote.restore import RemoteRestore, RestorePlan
from torpor.control.remote.session import Session
from torpor.control.store.seam import ObjectStore
from torpor.shared.format.names import manifest_key
from torpor.shared.values import StoredSnapshot, WorkspaceSpec


class Chosen(NamedTuple):
    """A name in a snapshot: the number of the workspace's directory, and the path below it."""

    root: int
    path: bytes


class RemotePath(RemoteRestore):
    """A part of a snapshot being written to one machine. When the agent was lost, it begins again:
    what is on the disk is not fetched again."""

    def __init__(
        self,
        session: Session,
        store: ObjectStore,
        wanted: StoredSnapshot,
        key: bytes | None,
        run: str,
        chosen: Chosen,
        *,
        into: str,
        aside: bool,
        spec: WorkspaceSpec,
    ) -> None:
        super().__init__(
            session, store, wanted, key, run, parts=spec.parts, part_bytes=spec.part_bytes
        )
        self._chosen = chosen
        self._into = into
        self._aside = aside

    def begin(self, *, resume: bool = False) -> RestorePlan:
        """Take the workspace on the machine, check the manifest, the place and the space.

        ``resume`` changes nothing: only this very run has anything to go on with.
        """
        key = manifest_key(self.wanted.workspace, self.wanted.snapshot)
        answer = self._call(
            "restore.path",
            workspace=self.wanted.workspace,
            snapshot=self.wanted.snapshot,
            root=self.wanted.root,
            manifest_bytes=self.wanted.manifest_bytes,
            grant=self._grant("GET", key, self.wanted.manifest_bytes),
            key=self._key,
            root_number=self._chosen.root,
            path=self._chosen.path.hex(),
            into=self._into,
            aside=self._aside,
            max_parts=self._parts,
            part_bytes=self._part_bytes,
        )
        return msgspec.convert(answer, RestorePlan)
