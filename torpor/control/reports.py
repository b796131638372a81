"""The reports of flows: small, typed, without secrets, under 64 KiB."""

from __future__ import annotations

from collections.abc import Sized
from datetime import datetime, timezone
from typing import Final

import msgspec

from torpor.shared.errors import MachineError
from torpor.shared.values import Machine, MachineId, SnapshotId, WorkspaceName
from torpor.shared.wire.restore import RestorePlan

Row = dict[str, str]

_SHOWN: Final = 5
"""The most names in one row."""

MOST_ROWS: Final = 200
"""The most rows of a table in the UI. Python gets all of them."""

_MOMENT: Final = "%Y-%m-%d %H:%M UTC"

ALL: Final = "all workspaces"
"""The value of ``workspace`` for a flow that acts on every workspace. No workspace has this name,
because it has a space."""


def moment(unix: float) -> str:
    """A time for people."""
    return _at(unix, _MOMENT)


def read_moment(words: str) -> float:
    """The time of a text that ``moment`` wrote."""
    return datetime.strptime(words, _MOMENT).replace(tzinfo=timezone.utc).timestamp()


def exact_moment(unix: float) -> str:
    """A time for people, to the second."""
    return _at(unix, "%Y-%m-%d %H:%M:%S UTC")


def _at(unix: float, form: str) -> str:
    """A time as text; a machine or a market may state an impossible one."""
    try:
        return datetime.fromtimestamp(unix, timezone.utc).strftime(form)
    except (OverflowError, ValueError, OSError):
        return f"a time that no clock shows ({unix:g})"


def without(unread: Sized) -> str:
    """For the title of figures: that they leave these records out. Empty where there is none."""
    if not unread:
        return ""
    records = "1 record" if len(unread) == 1 else f"{len(unread)} records"
    return f", WITHOUT {records} that cannot be believed"


class Report(msgspec.Struct, frozen=True):
    """What a flow has done, as a table in the UI."""

    def title(self) -> str:
        """The report in one sentence."""
        raise NotImplementedError

    def rows(self) -> list[Row]:
        raise NotImplementedError

    @property
    def about(self) -> str:
        """What the report is about, where a flow has a table for each workspace; otherwise
        empty."""
        return ""


class WorkspaceReport(Report, frozen=True):
    """What a flow has done for one workspace."""

    workspace: WorkspaceName

    @property
    def about(self) -> str:
        return self.workspace


class HibernateReport(WorkspaceReport, frozen=True):
    """A verified snapshot, and whether the machine was destroyed. Bytes are plain unless they say
    stored; seconds are wall time by phase."""

    snapshot: SnapshotId
    root: str
    machine: str
    destroyed: bool
    passes: int
    files: int
    bytes: int
    new_bytes: int
    stored_bytes: int  # what was stored of new_bytes
    total_stored_bytes: int  # stored bytes of everything that the snapshot names
    packs: int
    encoding: str  # how chunks were encoded, and why
    sealed: bool
    changed: list[str]
    skipped: int
    seconds: dict[str, float]
    saved_usd_h: float
    lost: list[str] = []  # what was on the machine and is not in the snapshot
    # a user's own files outside of the workspace, stored as a snapshot of their own
    beside: list[str] = []
    missed: bool = False  # whether most of a directory, or a disk, was there before and is gone
    parted_count: int = 0
    parted: list[str] = []  # the first hard links between directories of the workspace
    read_unix: float = 0.0  # when the last pass began, which is the moment that the snapshot holds
    accepted_count: int = 0
    # the first files that changed during or after the last pass, and were accepted
    accepted: list[str] = []
    warnings: list[str] = []
    skipped_names: list[str] = []  # the first FIFOs, sockets and devices, which are not kept
    blind: str = ""  # where a disk begins that does not show which files are read
    programs: list[str] = []  # what happened to the processes of the workspace's programs

    @property
    def ratio(self) -> float:
        """Plain bytes over stored bytes, of the whole snapshot."""
        return self.bytes / self.total_stored_bytes if self.total_stored_bytes else 1.0

    def title(self) -> str:
        return f"Workspace {self.workspace} hibernated as {self.snapshot}"

    def rows(self) -> list[Row]:
        """The report as a table of two columns. Files left behind come at the top, because the UI
        shows ten rows on a page."""
        return [
            _row("snapshot", f"{self.snapshot}, as of {moment(self.read_unix)}"),
            _row("machine", f"{self.machine}, {'destroyed' if self.destroyed else 'kept'}"),
            *(_row("warning", line) for line in self.warnings),
            *(_row("stored beside", line) for line in self.beside),
            *(_row("left behind", line) for line in self.lost),
            *(_row("program", line) for line in self.programs),
            _row("files", f"{self.files:,}"),
            *([_row("not kept", _first(self.skipped, self.skipped_names))] if self.skipped else []),
            *([_row("hard links", self._parted())] if self.parted_count else []),
            *([_row("order of the next wake", self._blind())] if self.blind else []),
            _row("bytes", f"{self.bytes:,}"),
            _row(
                "stored",
                f"{self.total_stored_bytes:,} in {_count(self.packs, 'pack')}, "
                f"ratio {self.ratio:.2f}",
            ),
            _row(
                "new",
                f"{self.new_bytes:,} bytes, stored as {self.stored_bytes:,}, "
                f"in {_count(self.passes, 'pass', 'passes')}; {self.encoding}",
            ),
            _row("sealed", "yes, AES-256-GCM" if self.sealed else "no: the store block has no key"),
            _row(
                "changed while read",
                ", ".join(self.changed) or ("no other file" if self.accepted_count else "no file"),
            ),
            *([_row("changed, as accepted", self._accepted())] if self.accepted_count else []),
            _row("seconds by phase", _phases(self.seconds)),
            _row("saved", f"{self.saved_usd_h:.2f} $ an hour, next to keeping the machine"),
        ]

    def _parted(self) -> str:
        return f"{_first(self.parted_count, self.parted)}: they come back as separate files"

    def _blind(self) -> str:
        return f"not learned: on the disk of {self.blind} no file shows that it was read (noatime)"

    def _accepted(self) -> str:
        names = _first(self.accepted_count, self.accepted)
        return f"{names}: the snapshot has each as it was when it was read"


class AsleepReport(WorkspaceReport, frozen=True):
    """The report of a hibernate with nothing to do: the workspace's machine was destroyed before,
    and this verified snapshot holds what it held."""

    snapshot: SnapshotId
    words: str

    def title(self) -> str:
        return f"Workspace {self.workspace} is asleep in {self.snapshot}"

    def rows(self) -> list[Row]:
        return [_row("snapshot", self.snapshot), _row("result", self.words)]


class HibernatePreview(WorkspaceReport, frozen=True):
    """What a hibernate would do with a machine; nothing was done. Bytes are plain unless they say
    stored. ``since``: the snapshot that the machine compared its tree with; empty where it
    remembers none of the newest, and all files count as new."""

    machine: MachineId
    destroys: bool
    since: str
    files: int
    bytes: int
    new_files: int
    new_bytes: int
    skipped: int
    stored_bytes: int  # at most, of the snapshot that a hibernate would make
    price_usd_h: float
    storage_usd_month: float | None  # of stored_bytes; None: the store's price is unknown
    keeps: list[str] = []  # why the machine would be kept
    yours: str = ""  # a user's own files beside the workspace
    lost: list[str] = []  # what would be left behind
    programs: list[str] = []  # whether each would be frozen

    def title(self) -> str:
        return f"A dry run: workspace {self.workspace} on machine {self.machine}; nothing was done"

    def rows(self) -> list[Row]:
        ends = "destroyed" if self.destroys and not self.keeps else "kept"
        return [
            _row("machine", f"{self.machine}, would be {ends}"),
            *(_row("keeps it", line) for line in self.keeps),
            _row("would store", self._new()),
            _row("workspace", f"{_count(self.files, 'file')}, {self.bytes:,} bytes"),
            *([_row("not kept", self._skipped())] if self.skipped else []),
            *([_row("beside it", self._yours())] if self.yours and self.destroys else []),
            *(_row("left behind", line) for line in self.lost),
            *(_row("program", line) for line in self.programs),
            _row("saves", self._saves()),
        ]

    def _new(self) -> str:
        if not self.since:
            return f"all of it, {self.new_bytes:,} bytes: the machine remembers no earlier snapshot"
        if not self.new_files:
            return f"no file that is new or changed since {self.since}"
        files = _count(self.new_files, "new or changed file")
        return f"{files} since {self.since}, {self.new_bytes:,} bytes"

    def _skipped(self) -> str:
        return _count(self.skipped, "FIFO, socket or device", "FIFOs, sockets and devices")

    def _yours(self) -> str:
        return f"{self.yours}. At a terminal you are asked; elsewhere they are stored, or keep it"

    def _saves(self) -> str:
        if self.keeps or not self.destroys:
            return "nothing: the machine would be kept"
        hour = f"{self.price_usd_h:.2f} $ an hour"
        most = f"storing it, at most {self.stored_bytes:,} bytes,"
        if self.storage_usd_month is None:
            return f"{hour}; what {most} costs is not known (`price_gb_month_usd` of its block)"
        return f"{hour}; {most} costs {self.storage_usd_month:.2f} $ a month"


class FirstReport(msgspec.Struct, frozen=True):
    """The files that a workspace wants first. They could be used ``seconds`` after the restore
    began."""

    names: int
    bytes: int  # plain bytes that were fetched for these files
    stored_bytes: int  # the stored bytes of these
    seconds: float

    @classmethod
    def of(cls, plan: RestorePlan, first_s: float | None) -> FirstReport | None:
        """The report; None where nothing comes first, or an earlier run has restored everything."""
        if first_s is None:
            return None
        parts = [part for part in plan.parts if part.first]
        plain = sum(part.bytes for part in parts)
        return cls(plan.first, plain, sum(part.stored_bytes for part in parts), first_s)

    def words(self) -> str:
        return (
            f"{_count(self.names, 'name')} usable after {self.seconds:.2f} s, {self.bytes:,} bytes "
            f"fetched as {self.stored_bytes:,}"
        )


class WakeReport(WorkspaceReport, frozen=True):
    """A workspace that was restored onto a machine and compared with its snapshot."""

    snapshot: SnapshotId
    root: str
    machine: MachineId
    host: str
    port: int
    user: str
    roots: list[str]
    files: int
    bytes: int
    stored_bytes: int
    checked: str
    warnings: list[str]
    seconds: dict[str, float]
    price_usd_h: float
    decoding: str = ""
    budgets: list[str] = []  # what is left of the budgets
    provider: str = "own"  # "own": the user's own machine
    first: FirstReport | None = None
    programs: list[str] = []  # how each program began
    packages: list[str] = []  # which packages came back, and which did not
    chosen: str = ""  # whether frozen programs could go on there, where that ranked the offers

    def title(self) -> str:
        return f"Workspace {self.workspace} woken from {self.snapshot}"

    def rows(self) -> list[Row]:
        """The report as a table of two columns."""
        at = "" if self.provider == "own" else f" at {self.provider}"
        return [
            _row("snapshot", self.snapshot),
            _row("machine", f"{self.machine}{at}, {self.price_usd_h:.2f} $ an hour"),
            *([_row("chosen", self.chosen)] if self.chosen else []),
            _row("log in", self._login()),
            _row("directories", ", ".join(self.roots)),
            _row("files", f"{self.files:,}"),
            _row("bytes", f"{self.bytes:,}, fetched as {self.stored_bytes:,}"),
            *([_row("first", self.first.words())] if self.first else []),
            *(_row("packages", line) for line in self.packages),
            *(_row("program", line) for line in self.programs),
            _row("checked", self.checked),
            *([_row("decoding", self.decoding)] if self.decoding else []),
            *(_row("budget", words) for words in self.budgets),
            _row("warnings", "; ".join(self.warnings) or "none"),
            _row("seconds by phase", _phases(self.seconds)),
        ]

    def _login(self) -> str:
        """The command to log in. torpor knows the key and the host key only of machines that it
        rents."""
        if self.provider != "own":
            return f"torpor ssh {self.workspace}"
        return f"ssh -p {self.port} {self.user}@{self.host}"


class CreateReport(Machine, Report, frozen=True):
    """The machine that was created. ``programs``: how each of the workspace's programs began."""

    programs: list[str] = []

    @property
    def about(self) -> str:
        return self.label.workspace if self.label else ""

    def title(self) -> str:
        return f"Machine {self.id} created for workspace {self.about}"

    def rows(self) -> list[Row]:
        """The report as a table of two columns."""
        at = self.endpoint
        return [
            _row("machine", f"{self.id} at {self.provider}, {self.price_usd_h:.2f} $ an hour"),
            *([_row("log in", f"torpor ssh {self.about}")] if at else []),
            *(_row("program", line) for line in self.programs),
        ]


class BenchmarkReport(msgspec.Struct, frozen=True):
    """Where the figures of a benchmark are, and what they advise. ``notes``: what could not be
    measured."""

    workspace: WorkspaceName
    folder: str
    figures: int
    advice: dict[str, str]
    notes: list[str]
    seconds: dict[str, float]


class Replica(msgspec.Struct, frozen=True):
    """The result for one machine of a replicate. Bytes are stored bytes; seconds wall time."""

    machine: str
    ready: bool
    words: str  # how it was checked, or why it failed
    host: str = ""
    port: int = 0
    user: str = ""
    store_bytes: int = 0
    peer_bytes: int = 0
    seconds: dict[str, float] = {}
    price_usd_h: float = 0.0
    warnings: list[str] = []
    first: FirstReport | None = None

    def row(self) -> Row:
        """The machine as one row of the table."""
        return {
            "machine": self.machine,
            "state": "ready" if self.ready else "failed",
            "address": f"{self.user}@{self.host}:{self.port}" if self.ready else "-",
            "from the store": f"{self.store_bytes:,}",
            "from peers": f"{self.peer_bytes:,}",
            "seconds": f"{sum(self.seconds.values()):.1f}: {_phases(self.seconds)}",
            "words": "; ".join(
                [self.words, *([self.first.words()] if self.first else []), *self.warnings]
            ),
        }


class ReplicateReport(WorkspaceReport, frozen=True):
    """One snapshot on many machines. ``ready`` of ``wanted`` came up; ``replaced``: how many
    machines were started in place of failed ones; ``source`` says where the bytes came from, and
    why."""

    snapshot: SnapshotId
    root: str
    wanted: int
    replaced: int
    source: str
    replicas: list[Replica]
    seconds: dict[str, float]
    budgets: list[str] = []  # what is left of the budgets

    @property
    def ready(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.ready]

    @property
    def failed(self) -> list[Replica]:
        return [replica for replica in self.replicas if not replica.ready]

    @property
    def missing(self) -> int:
        """The number of machines that are missing."""
        return max(0, self.wanted - len(self.ready))

    def rows(self) -> list[Row]:
        """The report as a table, a row for each machine."""
        return [replica.row() for replica in self.replicas]

    def fault(self) -> MachineError | None:
        """The error of a run in which no machine came up."""
        if self.ready or not self.wanted:
            return None
        first = self.failed[0].words if self.failed else "-"
        return MachineError(
            f"none of {self.wanted} machines came up with snapshot {self.snapshot} of workspace "
            f"{self.workspace}; the first: {first}. The snapshot is untouched: fix the cause and "
            "run replicate again"
        )

    def title(self) -> str:
        price = sum(replica.price_usd_h for replica in self.ready)
        return (
            f"{len(self.ready)} of {_count(self.wanted, 'machine')} hold {self.snapshot} of "
            f"workspace {self.workspace}, {price:.2f} $ an hour together; "
            f"{len(self.failed)} failed, {self.replaced} replaced; {self.source}; "
            f"seconds by phase: {_phases(self.seconds)}"
            f"{''.join(f'; {words}' for words in self.budgets)}"
        )


class SyncReport(WorkspaceReport, frozen=True):
    """A machine that was brought from one snapshot (``last``) to another. ``saved``: the snapshot
    taken before, if the user asked for one. Lists of names are cut short."""

    snapshot: SnapshotId
    root: str
    last: SnapshotId | None
    saved: SnapshotId | None
    machine: MachineId
    roots: list[str]
    files: int
    bytes: int
    written: int
    removed: int
    copied_bytes: int  # taken from the machine itself
    stored_bytes: int  # fetched from the store
    left_out: int  # names of the snapshot that are excluded here
    kept: list[str]
    discarded: list[str]
    discarded_count: int
    checked: str
    warnings: list[str]
    seconds: dict[str, float]

    def title(self) -> str:
        return f"Workspace {self.workspace} synced to {self.snapshot}"

    def rows(self) -> list[Row]:
        """The report as a table of two columns."""
        saved = f", saved as {self.saved}" if self.saved else ""
        discarded = f"{self.discarded_count:,}: {', '.join(self.discarded)}"
        return [
            _row("snapshot", f"{self.snapshot}, on {self.machine}"),
            _row("before", f"{self.last or 'unknown'}{saved}"),
            _row("files", f"{self.files:,}: {self.written:,} written, {self.removed:,} removed"),
            _row(
                "bytes",
                f"{self.bytes:,}: fetched as {self.stored_bytes:,}, {self.copied_bytes:,} copied "
                "on the machine",
            ),
            _row("discarded", discarded if self.discarded_count else "nothing"),
            _row("kept as they were", ", ".join(self.kept) or "nothing"),
            _row("excluded", f"{self.left_out:,} names of the snapshot"),
            _row("checked", self.checked),
            _row("warnings", "; ".join(self.warnings) or "none"),
            _row("seconds by phase", _phases(self.seconds)),
        ]


def _row(what: str, value: str) -> Row:
    return {"what": what, "value": value}


def _count(number: int, singular: str, many: str = "") -> str:
    return f"{number:,} {singular if number == 1 else many or singular + 's'}"


def _first(count: int, names: list[str]) -> str:
    more = count - len(names[:_SHOWN])
    shown = ", ".join([*names[:_SHOWN], *([f"and {more:,} more"] if more else [])])
    return f"{_count(count, 'name')}, {shown}"


def _phases(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())
