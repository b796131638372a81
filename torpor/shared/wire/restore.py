"""The requests of a restore, of a whole snapshot or of one path, and their answers."""

from __future__ import annotations

from typing import Annotated, Generic

import msgspec

from torpor.shared.values import GpuUse, Grant, ObjectKey, SnapshotId, WorkspaceName
from torpor.shared.wire.request import A, BeginsRun, Count, Names, Nothing, OfRun, Request, Words


class OfSnapshot(BeginsRun[A], Generic[A], frozen=True):
    """Begins a run that brings a snapshot, or some of it, onto this machine. ``root`` and ``key``
    (the workspace key) in hex. ``paths``: the directories that its manifest may name; any other is
    refused (OtherPaths)."""

    snapshot: SnapshotId
    root: str
    manifest_bytes: int
    grant: Grant
    key: str | None
    paths: list[str]


class RestorePart(msgspec.Struct, frozen=True):
    """A part of a plan: which packs it reads. ``pieces``: which piece of each, where the part comes
    first; else empty. Parts that come first stand before the others, and what is in a piece is in
    no other part."""

    part: Count
    bytes: Count
    stored_bytes: Count
    packs: list[ObjectKey]
    pieces: list[Count] = []

    @property
    def first(self) -> bool:
        return bool(self.pieces)


class RestorePlan(msgspec.Struct, frozen=True):
    """What to fetch.

    ``complete``: an earlier run restored and compared everything; nothing is left to do, and
    nothing may be written. ``first``: how many names come first, with the directories that they are
    in; ``unmatched``: patterns that name nothing. ``moved_aside``: the new names of what was in the
    targets. ``left_out``: what of the snapshot is not restored, as that was asked for.
    """

    complete: bool
    roots: list[str]
    files: Count
    bytes: Count
    stored_bytes: Count
    parts: list[RestorePart]
    first: Count = 0
    unmatched: list[str] = []
    moved_aside: Names = []
    left_out: Names = []


class BeginRestore(OfSnapshot[RestorePlan], frozen=True):
    """Take the workspace, check the manifest, the targets and the space. ``resume``: an earlier
    run may have begun or completed this restore; RestoreUnfinished where the machine holds an
    unfinished restore of another snapshot, or one that an older version began with a command
    beside it. ``first``: patterns of what comes first; without any, what the snapshot says that was
    used.
    ``roots``: the targets, one for each directory of the manifest, whatever it calls them; None:
    these directories themselves. ``aside``: a target that holds something is renamed, where nothing
    says that it is of this workspace; never with ``resume``. ``keep_packages``: later snapshots of
    the machine name the added packages that this one names."""

    op = "restore.begin"
    roots: list[str] | None
    max_parts: int
    part_bytes: int
    resume: bool = False
    gpu: GpuUse | None = None
    first: list[str] = msgspec.field(default_factory=list)
    aside: bool = False
    keep_packages: bool = False


class BeginPath(OfSnapshot[RestorePlan], frozen=True):
    """Begin to restore one file or directory: ``path`` (hex: a name may be any bytes) below root
    ``root_number``, to ``into``. ``restore.part``, ``finish``, ``check`` and ``end`` follow. The
    check puts it there when every byte is equal, and never replaces anything. ``aside``: what has
    the name there is renamed to NAME.before-SNAPSHOT first. ``leave_git``: nothing is restored of a
    directory below the path that git may take for its own."""

    op = "restore.path"
    root_number: int
    path: str
    into: str
    aside: bool
    max_parts: int
    part_bytes: int
    leave_git: bool = False


class Served(msgspec.Struct, frozen=True):
    """Where this machine serves packs: https://HOST:PORT/URL/PACK. ``url`` is a token, and
    ``certificate`` is PEM."""

    port: Annotated[int, msgspec.Meta(ge=1, le=65_535)]
    url: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    certificate: Annotated[str, msgspec.Meta(max_length=16_384)]

    def __repr__(self) -> str:
        """Without the token: it is a secret while it lasts."""
        return "Served()"


class ServePacks(OfRun[Served], frozen=True):
    """Keep what is fetched, at most ``most_bytes`` of it and as far as the disk has room, and serve
    it on ``host`` to clients that send the token, until the end of the run."""

    op = "restore.serve"
    host: str
    most_bytes: int


class Peer(msgspec.Struct, frozen=True):
    """Where another machine serves packs. ``url`` ends with a slash and holds a token; below
    ``floor_bytes_s`` the store is faster."""

    url: str
    certificate: str
    floor_bytes_s: float = 0.0

    def __repr__(self) -> str:
        """Without the URL: its token is a secret while it lasts."""
        return "Peer()"


class RestoredPart(msgspec.Struct, frozen=True):
    """``peer_bytes`` of the stored bytes came from another machine; ``kept``: this machine passes
    all of the part on."""

    stored_bytes: Count
    peer_bytes: Count = 0
    kept: bool = False


class FetchPart(OfRun[RestoredPart], frozen=True):
    """Fetch, check and write these ``pieces`` of the packs; without ``pieces``, everything of the
    part that does not come first. Packs come from ``peer`` where one is given, and else from the
    store."""

    op = "restore.part"
    packs: list[Grant]
    peer: Peer | None = None
    pieces: list[int] = msgspec.field(default_factory=list)


class Finished(msgspec.Struct, frozen=True):
    """What was restored, and warnings about what could not be restored as it was. ``decoding``:
    whether the GPU decoded chunks and why, in words; empty if it was not asked for."""

    files: Count
    bytes: Count
    warnings: Names
    decoding: Words = ""


class FinishRestore(OfRun[Finished], frozen=True):
    """Set attributes, links and directories, once every part is there. InvalidInput names files
    that a program made under names which the restore still has to give; nothing is overwritten, and
    the request may be sent again."""

    op = "restore.finish"


class Checked(msgspec.Struct, frozen=True):
    """The differences between disk and snapshot: the first few names, and the count. ``changed``:
    names that came first and that a program has changed since. ``moved_aside``: the new name of
    what was at the place of a restored path."""

    differences: Names
    difference_count: Count
    changed: Names = []
    moved_aside: Words = ""


class FinishFirst(OfRun[Checked], frozen=True):
    """Finish what comes first, once those parts are there, and compare its names and attributes,
    while the rest follows. Contents were checked before they were written, and what an earlier run
    wrote is read back.

    Without differences, programs may use it: ``restore.finish`` leaves it alone, also after a kill
    of the agent, but not after a start of the machine. Directories that the rest is still written
    into stay writable for the agent until then. Where anything comes first, all files are in the
    directory .torpor-... of their target until they are finished."""

    op = "restore.first"


class CheckRestore(OfRun[Checked], frozen=True):
    """Compare the disk with the snapshot; ``full`` reads and hashes every byte. Without differences
    the restore is finished, and the agent keeps its index."""

    op = "restore.check"
    full: bool


class EndRestore(OfRun[Nothing], frozen=True):
    """Give the workspace back."""

    op = "restore.end"


class NoteReady(Request[Nothing], frozen=True):
    """Note that the workspace's machine is ready: files that were used by now come first in the
    next restore. Holds no workspace, and does nothing where no restore brought the workspace."""

    op = "workspace.ready"
    workspace: WorkspaceName
