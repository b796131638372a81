"""The requests of a snapshot, and their answers. Bytes are plain unless they say stored."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from torpor.shared.values import Compression, Grant, ObjectKey, SnapshotId
from torpor.shared.wire.request import BeginsRun, Count, Names, OfRun, Words


class KnownSnapshot(msgspec.Struct, frozen=True):
    """An earlier snapshot of the workspace: its root hash (hex), and a grant for its manifest."""

    root: str
    bytes: int
    grant: Grant


class PackClaim(msgspec.Struct, frozen=True):
    """A pack that the agent says it has stored; ``md5`` in hex."""

    key: ObjectKey
    bytes: Count
    md5: str


class SnapshotBegun(msgspec.Struct, frozen=True):
    """``resumable``: packs that earlier runs stored and no snapshot names yet."""

    resumable: list[PackClaim]


class UserFiles(msgspec.Struct, frozen=True):
    """What a user has written in the home of the agent's user, and nothing else of that home.

    ``beside``: the directories of the workspace, which are stored apart. The others are as in
    ``torpor.shared.wire.losses.LookForLosses``."""

    beside: list[str]
    accepted: list[str]
    rented: bool
    volumes: list[str]


class BeginSnapshot(BeginsRun[SnapshotBegun], frozen=True):
    """Take the workspace. ``key`` is the workspace key in hex; ``known`` is newest first, at most
    8. Images of programs that no run has frozen are removed, so that no snapshot holds older memory
    than files. ``user_files``: the only root is ``~``, and the snapshot holds these files alone;
    each pass and a confirm look for them, and raise UnsavedWork where some of them may not be
    stored, or where it is not known."""

    op = "snapshot.begin"
    roots: list[str]
    exclude: list[str]
    key: str | None
    known: list[KnownSnapshot]
    compression: Compression = Compression()
    user_files: UserFiles | None = None


class Vanished(msgspec.Struct, frozen=True):
    """How many files of what total size an earlier snapshot had below ``path`` that are gone
    now."""

    path: Words
    files: Count
    bytes: Count


class Missed(msgspec.Struct, frozen=True):
    """What the workspace had on this machine and the snapshot does not.

    ``unnamed``: directories that hold something and are in none of the roots. ``vanished``: where
    most of a root was. ``disks``: mount points on which some of it was, and where nothing is
    mounted now.
    """

    unnamed: Names = []
    vanished: Annotated[list[Vanished], msgspec.Meta(max_length=100)] = []
    disks: Names = []


class PassesOutcome(msgspec.Struct, frozen=True):
    """What came of some passes. ``passes``: those that this request has ended. ``new_bytes`` and
    ``stored_bytes``: of the chunks that the run has stored since it began, plain and stored.
    ``unchanged``: the tree is equal to the snapshot that it goes on from.

    Of the last walk, which began ``ago_s`` seconds ago: ``unread``: the bytes that it found to be
    read. ``unaccepted``: names that are new since the pass before, but for those that may change.
    ``parted``: names whose file has a name in another directory of the workspace too; they come
    back as separate files.

    ``packs``: how many grants the rest of the pass under way may need, because those of the request
    are used up or ended for the reason ``why``; ``stored``: a pack that was stored with one of
    them.
    """

    passes: Count
    new_bytes: Count
    stored_bytes: Count
    skipped: Count
    unaccepted_count: Count
    unaccepted: Names
    unchanged: bool = False
    unread: Count = 0
    ago_s: float = 0.0
    parted_count: Count = 0
    parted: Names = []
    missed: Missed = Missed()
    packs: Count = 0
    stored: Words = ""
    why: Words = ""


class StorePasses(OfRun[PassesOutcome], frozen=True):
    """Walk the workspace and store what is new, until a pass finds nothing unaccepted: the journal
    then holds everything that is on the disk. At most ``passes`` of them. A request without
    ``packs`` stores nothing: it ends where grants are needed, as one does whose grants are used up
    or have ended. The next one that has some goes on with that pass.

    ``resumed``: the resumable packs that the store still has; ``unusable``: packs that a
    manifest must not name, which begins a pass; ``accepted``: patterns of files that may change;
    ``accept_lost``: directories that count as kept, which may begin with ~/."""

    op = "snapshot.store"
    passes: int
    packs: list[Grant]
    resumed: list[ObjectKey]
    unusable: list[ObjectKey] = msgspec.field(name="lost")
    accepted: list[str]
    accept_lost: list[str]


IMAGE_FILES: Final = ("tree.json", "complete")
"""Two files of each frozen program's images: one that must be unchanged, and one whose presence
shows that the images are whole."""


class Program(msgspec.Struct, frozen=True):
    """A job whose processes are frozen into ``images``, a folder of the workspace."""

    job: str
    images: str


class Froze(msgspec.Struct, frozen=True):
    """What happened to a program: the ``bytes`` of its images and the seconds they took, or
    ``why_not``, and then it runs on."""

    job: str
    bytes: Count = 0
    seconds: float = 0.0
    why_not: Words = ""


class Quiesced(msgspec.Struct, frozen=True):
    programs: list[Froze] = []


class Quiesce(OfRun[Quiesced], frozen=True):
    """Run the user's hook, if there is one; HookFailed unless it exits with 0. Then freeze the
    ``programs`` that run, by the CRIU in the folder ``criu``. Each may take ``timeout_s``.
    ``resume``: a command for the end of the run, as long at most, unless the machine ends; whatever
    becomes of the run: within two minutes after the agent or the control side was killed, a process
    of its own runs it. Then the programs go on, too, and their images are removed; when the machine
    ends, they are killed: they may go on elsewhere. A program that is frozen already stays so."""

    op = "snapshot.hook"
    argv: list[str]
    timeout_s: float
    resume: list[str] = msgspec.field(default_factory=list)
    programs: list[Program] = msgspec.field(default_factory=list)
    criu: str = ""


class Packs(msgspec.Struct, frozen=True):
    packs: list[PackClaim]


class ListPacks(OfRun[Packs], frozen=True):
    """List every pack that the manifest will name."""

    op = "snapshot.packs"


class Committed(msgspec.Struct, frozen=True):
    """A manifest that the store has acknowledged; not verified yet. ``root`` in hex; ``encoding``:
    how chunks were encoded and why, in words. ``unaccepted`` and ``accepted``: files that changed
    while they were read. ``blind``: where a disk begins that does not show which files are read."""

    root: str
    manifest_bytes: Count
    files: Count
    bytes: Count
    unaccepted_count: Count
    unaccepted: Names
    encoding: Words
    accepted_count: Count = 0
    accepted: Names = []
    blind: Words = ""


class Commit(OfRun[Committed], frozen=True):
    """Write the manifest. The same snapshot again sends the same bytes again."""

    op = "snapshot.commit"
    snapshot: SnapshotId
    created_unix: int
    statistics: dict[str, int]
    accepted: list[str]
    grant: Grant


class Reread(msgspec.Struct, frozen=True):
    """``wrong``: packs that differ from what was written."""

    wrong: list[ObjectKey]


class RereadPacks(OfRun[Reread], frozen=True):
    """Read whole packs back, if the store shows no MD5."""

    op = "snapshot.reread"
    packs: list[Grant]


class Confirmed(msgspec.Struct, frozen=True):
    """How the machine's disk differs from the committed snapshot, by a new walk: in names that may
    not change, and in those that may."""

    unaccepted_count: Count
    unaccepted: Names
    accepted_count: Count = 0
    accepted: Names = []


class Confirm(OfRun[Confirmed], frozen=True):
    """Walk once more and compare with what was committed."""

    op = "snapshot.confirm"
    accepted: list[str]


class SnapshotEnded(msgspec.Struct, frozen=True):
    """``resume_error``: what went wrong with the resume command."""

    resume_error: Words = ""


class EndSnapshot(OfRun[SnapshotEnded], frozen=True):
    """Give the workspace back; keep the index when the snapshot is committed and verified.
    ``kept``: the machine goes on, so what a hook stopped is resumed."""

    op = "snapshot.end"
    committed: bool
    kept: bool = True
