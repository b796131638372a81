"""The control side's half of a restore."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Final

import msgspec

from torpor.errors import AgentLost
from torpor.format.names import manifest_key
from torpor.remote.session import Session
from torpor.store.seam import ObjectStore
from torpor.values import MIB, ObjectKey, StoredSnapshot

_SHORTEST_GRANT_S: Final = 3600
_LONGEST_GRANT_S: Final = 24 * 3600


class RestorePart(msgspec.Struct, frozen=True):
    part: int
    bytes: int
    stored_bytes: int
    packs: list[ObjectKey]


class RestorePlan(msgspec.Struct, frozen=True):
    """What has to be fetched; ``done_bytes`` an interrupted restore left on the disk already."""

    roots: list[str]
    files: int
    bytes: int
    stored_bytes: int
    done_bytes: int
    parts: list[RestorePart]


class RestoreSeconds(msgspec.Struct, frozen=True):
    get: float = 0.0
    decode: float = 0.0
    write: float = 0.0


class RestoredPart(msgspec.Struct, frozen=True):
    part: int
    files: int
    bytes: int
    stored_bytes: int
    seconds: RestoreSeconds


class Finished(msgspec.Struct, frozen=True):
    files: int
    bytes: int
    warnings: list[str]
    warning_count: int


class Checked(msgspec.Struct, frozen=True):
    files: int
    bytes: int
    differences: list[str]
    difference_count: int


class RemoteRestore:
    """One snapshot being written to one machine. When the agent was lost, it begins again by
    itself: what is on the disk is not fetched again."""

    def __init__(
        self,
        session: Session,
        store: ObjectStore,
        wanted: StoredSnapshot,
        key: bytes | None,
        run: str,
        *,
        roots: list[str] | None = None,
        parts: int = 32,
    ) -> None:
        self.run = run
        self.wanted = wanted
        self._session = session
        self._store = store
        self._key = key
        self._roots = roots
        self._parts = parts
        self._requests = itertools.count(1)

    def begin(self) -> RestorePlan:
        """Take the workspace on the machine, check the manifest, the targets and the space."""
        key = manifest_key(self.wanted.workspace, self.wanted.snapshot)
        answer = self._call(
            "restore.begin",
            workspace=self.wanted.workspace,
            snapshot=self.wanted.snapshot,
            root=self.wanted.root,
            manifest_bytes=self.wanted.manifest_bytes,
            grant=self._grant(key, self.wanted.manifest_bytes),
            key=None if self._key is None else self._key.hex(),
            roots=self._roots,
            max_parts=self._parts,
        )
        return msgspec.convert(answer, RestorePlan)

    def restore_part(
        self, plan: RestorePart, on_event: Callable[[dict[str, Any]], None] | None = None
    ) -> RestoredPart:
        """Fetch and write one part, by the packs it names. Idempotent."""
        answer = self._held(
            lambda: self._call(
                "restore.part",
                on_event,
                part=plan.part,
                packs=[self._grant(key, plan.stored_bytes) for key in plan.packs],
            )
        )
        return msgspec.convert(answer, RestoredPart)

    def finish(self) -> Finished:
        """Attributes, links and directories, once every part is there."""
        return msgspec.convert(self._held(lambda: self._call("restore.finish")), Finished)

    def check(self, *, full: bool) -> Checked:
        """Compare the disk with the snapshot; ``full`` reads and hashes every byte."""
        return msgspec.convert(self._held(lambda: self._call("restore.check", full=full)), Checked)

    def end(self, *, complete: bool) -> None:
        """Give the workspace back; when complete, the next snapshot is an increment."""
        self._call("restore.end", complete=complete)

    def _held(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        try:
            return work()
        except AgentLost:
            self.begin()
            return work()

    def _call(
        self,
        op: str,
        on_event: Callable[[dict[str, Any]], None] | None = None,
        /,
        **args: Any,
    ) -> dict[str, Any]:
        request = f"{self.run}:{next(self._requests)}"
        return self._session.call(op, {"run": self.run, **args}, request=request, on_event=on_event)

    def _grant(self, key: ObjectKey, size: int) -> Any:
        expires_s = min(_LONGEST_GRANT_S, max(_SHORTEST_GRANT_S, size // MIB))
        return msgspec.to_builtins(self._store.grant("GET", key, expires_s=expires_s))
