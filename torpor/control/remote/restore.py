"""The control side's half of a restore."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from torpor.control.remote.run import RemoteRun
from torpor.control.remote.session import Session
from torpor.control.store.seam import ObjectStore
from torpor.shared.format.names import manifest_key
from torpor.shared.values import MIB, ObjectKey, StoredSnapshot


class RestorePart(msgspec.Struct, frozen=True):
    part: int
    bytes: int
    stored_bytes: int
    packs: list[ObjectKey]


class RestorePlan(msgspec.Struct, frozen=True):
    """What has to be fetched; ``done_bytes`` an interrupted restore left on the disk already.

    ``complete``: an earlier run restored and compared everything; there is nothing left to do, and
    nothing may be written any more.
    """

    complete: bool
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
    """``peer_bytes`` of the stored bytes came from another machine; ``kept``: this machine passes
    all of the part on."""

    part: int
    files: int
    bytes: int
    stored_bytes: int
    seconds: RestoreSeconds
    peer_bytes: int = 0
    kept: bool = False


class Peer(msgspec.Struct, frozen=True):
    """Where one machine passes packs on: an address that is a secret, and who answers there."""

    url: str
    certificate: str

    def __repr__(self) -> str:
        return "Peer()"


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


class RemoteRestore(RemoteRun):
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
        part_bytes: int = 64 * MIB,
    ) -> None:
        super().__init__(session, store, key, run)
        self.wanted = wanted
        self._roots = roots
        self._parts = parts
        self._part_bytes = part_bytes

    def begin(self, *, resume: bool = False) -> RestorePlan:
        """Take the workspace on the machine, check the manifest, the targets and the space.

        ``resume``: an earlier run may have begun this restore, or completed it.
        """
        key = manifest_key(self.wanted.workspace, self.wanted.snapshot)
        answer = self._call(
            "restore.begin",
            workspace=self.wanted.workspace,
            snapshot=self.wanted.snapshot,
            root=self.wanted.root,
            manifest_bytes=self.wanted.manifest_bytes,
            grant=self._grant("GET", key, self.wanted.manifest_bytes),
            key=self._key,
            roots=self._roots,
            max_parts=self._parts,
            part_bytes=self._part_bytes,
            resume=resume,
        )
        return msgspec.convert(answer, RestorePlan)

    def serve(self, host: str, most_bytes: int) -> Peer:
        """From now on the machine keeps what it fetches, at most so much of it on disk, and passes
        it on to others that reach it at ``host``; until the end of the run."""
        answer = self._held("restore.serve", host=host, most_bytes=most_bytes)
        place = f"[{host}]" if ":" in host else host
        url = f"https://{place}:{int(answer['port'])}/{answer['url']}/"
        return Peer(url, str(answer["certificate"]))

    def restore_part(
        self,
        plan: RestorePart,
        on_event: Callable[[dict[str, Any]], None] | None = None,
        *,
        peer: Peer | None = None,
        floor_bytes_s: float = 0.0,
    ) -> RestoredPart:
        """Fetch and write one part, by the packs it names; from ``peer`` first, where one is named,
        and from the store what that does not give at ``floor_bytes_s``. Idempotent."""
        source = None
        if peer is not None:
            source = {**msgspec.structs.asdict(peer), "floor_bytes_s": floor_bytes_s}
        answer = self._held(
            "restore.part",
            on_event,
            part=plan.part,
            packs=[self._grant("GET", key, plan.stored_bytes) for key in plan.packs],
            peer=source,
        )
        return msgspec.convert(answer, RestoredPart)

    def finish(self) -> Finished:
        """Attributes, links and directories, once every part is there."""
        return msgspec.convert(self._held("restore.finish"), Finished)

    def check(self, *, full: bool) -> Checked:
        """Compare the disk with the snapshot; ``full`` reads and hashes every byte."""
        return msgspec.convert(self._held("restore.check", full=full), Checked)

    def end(self) -> None:
        """Give the workspace back."""
        self._send("restore.end")

    def _begin_again(self) -> None:
        self.begin(resume=True)
