"""Jobs: commands that a supervisor runs on a machine.

These requests hold no workspace: a job runs while snapshots are taken.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from torpor.shared.values import Host, SnapshotId
from torpor.shared.wire.losses import Moment
from torpor.shared.wire.request import Count, Request, Snapshot, Words
from torpor.shared.wire.snapshot import Froze

CRIU: Final = "criu-"
"""The beginning of the name of CRIU's folder among the bundles on a machine."""


SPOT_NOTICE_S: Final = {"aws": 120.0, "gcp": 30.0, "azure": 30.0}
"""The least seconds that a spot machine lives on after its market's notice, by the kind of the
market's metadata service (``NoticeSource``)."""
LONGEST_NOTICE_S: Final = {"aws-spot": SPOT_NOTICE_S["aws"], "azure": 900.0}
"""The longest time in seconds that a notice of this kind may leave, if the notice says a time."""


class Notice(msgspec.Struct, frozen=True):
    """The machine is about to be taken away. ``until_unix``: when, if its market says so."""

    kind: Literal["aws-spot", "aws-rebalance", "gcp", "azure", "signal"]
    words: Words
    at_unix: float
    until_unix: float | None = None


class OwnSave(msgspec.Struct, frozen=True):
    """A snapshot that the machine stored by itself, after a notice or on schedule; not verified.
    ``root`` in hex."""

    snapshot: Snapshot
    root: str
    manifest_bytes: Count
    made_unix: float


class JobState(msgspec.Struct, frozen=True):
    """The command of a job on this machine.

    ``lost``: its supervisor ended without a word on how the command ended, or the machine started
    again; the same attempt is not started again, and whatever was left of the command is ended
    before the next one. ``status``: its exit status, negative for a signal.
    ``error``: why the command could not be started; its status is then 126 or 127, as a shell's.
    ``log_from``: how long the log was when this attempt began; shorter than what an earlier machine
    wrote, if that was not saved. ``went_on``: its processes went on where they
    were frozen; ``afresh``: why they did not.
    ``frozen``: the save for which the command's processes were frozen and ended, whether or not it
    was stored.

    The autosave process says the rest of this attempt. ``saved``: what the machine saved last by
    itself; ``save_error``: why it did not after a notice, or what went wrong although it did;
    ``not_frozen``: why the command was not frozen, or why that save is not stored;
    ``saves_until_unix``: when its grants for this job end, 0 without any.
    """

    job: str
    attempt: int
    state: Literal["none", "running", "ended", "lost"]
    status: int | None = None
    started_unix: float = 0.0
    ended_unix: float | None = None
    error: Words = ""
    log_from: Count = 0
    went_on: bool = False
    afresh: Words = ""
    frozen: Snapshot | None = None
    notice: Notice | None = None
    saved: OwnSave | None = None
    save_error: Words = ""
    not_frozen: Words = ""
    saves_until_unix: Moment = 0.0


class NoticeSource(msgspec.Struct, frozen=True):
    """Where the machine's market says that it will take the machine: the base URL of its metadata
    service."""

    kind: Literal["aws", "gcp", "azure"]
    url: str


class StartJob(Request[JobState], frozen=True):
    """Start the command unless this attempt was started before, or an earlier one still runs.
    First end what an earlier attempt left. InvalidInput for what can never be started.
    ``folder`` and ``log`` may begin with ~/; the log is appended to.

    The command has a session of its own and the agent's environment, with TORPOR_JOB,
    TORPOR_ATTEMPT and TORPOR_JOB_FOLDER; on several machines also TORPOR_NODES (how many),
    TORPOR_NODE_RANK, TORPOR_NODE_IPS (separated by commas) and TORPOR_MASTER (that of rank 0).

    ``environment``: variables for the command, which may be secrets: they stay in memory.
    ``serves``: the command is a server, which also runs while nobody uses it. ``forget``: the jobs
    whose logs are removed first, from the folder of ``log``. ``images``: a folder into which its
    processes were frozen, and from which they go on, by the CRIU in the folder ``criu``; where they
    cannot, the command is started afresh. The images are removed then. ``freezes``: they are frozen
    into it, too, when the market takes the machine; only what was frozen for the snapshot
    ``frozen`` goes on. ``nodes``: the addresses of all machines of a job on several, by their
    ranks; this machine's is ``rank``. ``workspace``: whose autosave process hears for the command
    that the machine will be taken away, from before it starts; empty for none."""

    op = "job.start"
    job: str
    attempt: int
    argv: list[str]
    folder: str
    log: str
    notices: list[NoticeSource]
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    serves: bool = False
    forget: list[str] = msgspec.field(default_factory=list)
    images: str = ""
    criu: str = ""
    nodes: list[str] = msgspec.field(default_factory=list)
    rank: Count = 0
    freezes: bool = False
    frozen: SnapshotId | None = None
    workspace: str = ""


class JobLook(msgspec.Struct, frozen=True):
    """``text``: the log from the offset that was asked for; ``offset``: where it goes on;
    ``bytes``: how long the log is. ``unread``: why the log cannot be read; its text is then empty,
    and the state is known all the same."""

    state: JobState
    text: str
    offset: Count
    bytes: Count = 0
    unread: Words = ""


class LookAtJob(Request[JobLook], frozen=True):
    """How the command stands, and the next ``most_bytes`` (1 MiB at most) of its log from
    ``offset``. Text is cut between characters, and bytes that are none are replaced. A log that is
    shorter than ``offset`` is read from ``log_from``."""

    op = "job.look"
    job: str
    offset: int
    most_bytes: int


class StopJob(Request[JobState], frozen=True):
    """End the command and everything in its session: SIGTERM, then SIGKILL after ``grace_s``. Also
    ends what the command left in the background. Idempotent, and needs no supervisor."""

    op = "job.stop"
    job: str
    grace_s: float


class Tried(msgspec.Struct, frozen=True):
    """``why_not``: why no processes can be frozen here; empty if a small process tree of torpor's
    own was frozen and went on. ``programs``: how many ``bytes`` of memory each one that was asked
    for holds, 0 where it does not run, or why it would not be frozen. ``host``: what the machine
    is."""

    why_not: Words = ""
    programs: list[Froze] = []
    host: Host = Host()


class TryFreezing(Request[Tried], frozen=True):
    """Freeze a small process tree of torpor's own, and let it go on: the only proof that the
    machine can do that. ``criu`` as in StartJob; empty: only say what can be said without it.
    ``programs``: the jobs of programs that are looked at, too, and not stopped."""

    op = "freeze.try"
    criu: str
    programs: list[str] = msgspec.field(default_factory=list)
