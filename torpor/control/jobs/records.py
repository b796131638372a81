"""The records of jobs, in the store beside the snapshots of their workspace.

``jobs/open/ID`` is the truth about a job: flow runs, workers and machines may die under it. Only
the run that drives the job writes it, over the version that it has just read; whoever wants it to
stop writes ``jobs/stop/ID``, and whoever lets it use more ``jobs/approved/ID``. When the job has
ended, the record moves to ``jobs/ended/ID``.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from contextlib import suppress
from typing import Any, Final, Literal, get_args

import msgspec

from torpor.control.store.object_store import ObjectStore
from torpor.control.store.records import TRIES, Records, Unread, last_written, left_out
from torpor.shared.errors import (
    HandedOver,
    InvalidInput,
    ObjectChanged,
    ObjectExists,
    WorkspaceBusy,
)
from torpor.shared.values import (
    JOB_LOGS,
    MachineId,
    ObjectKey,
    SnapshotId,
    WorkspaceName,
    WorkspaceSpec,
)

DRIVEN_S: Final = 20.0
"""Seconds between two writes by which the driving run says so in the job's record."""
LOST_S: Final = 120.0
"""Seconds without such a write after which the driving run is gone, so that another one may
continue the job."""
MOST_ATTEMPTS: Final = 1000
MOST_ENDED: Final = 200
_MOST_BYTES: Final = 1024 * 1024
_ID_CHARS: Final = 12

Outcome = Literal["succeeded", "failed", "cancelled", "preempted", "over budget"]
"""How a job ended."""
NO_FAILURE: Final[tuple[Outcome, ...]] = ("succeeded", "cancelled")
"""Outcomes after which the run of a job does not fail."""
State = Literal["waiting", "running", "hibernating", Outcome]
"""The state of a job. ``waiting``: for a machine."""
AttemptEnd = Literal["", "command ended", "machine lost", "stopped", "supervisor lost"]
FORGOTTEN: Final = (
    "somebody, perhaps its command, has removed the folder of torpor on its machine, so that "
    "nobody knows how the command ended"
)
"""The error of an attempt that was started, and of which its machine knows nothing any more."""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One of the other machines of a job on several nodes. It holds a copy of a snapshot and no
    work of its own, is never handed over, and may always be ended."""

    machine: MachineId
    provider: str


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One start of the command on one machine. ``saved``: a newer save was made during it."""

    number: int
    machine: MachineId
    provider: str
    rental: str
    spot: bool
    price_usd_h: float
    began_unix: float
    seen_unix: float  # when the command was last seen running
    ended_unix: float | None = None
    end: AttemptEnd = ""
    status: int | None = None
    error: str = ""  # why it could not be started, how a notice went, or what was lost
    saved: bool = False
    agent: str = ""  # the machine's name for itself; empty in older records
    # seconds of work between the newest save and when the command was last seen
    lost_s: float = 0.0

    @property
    def was_seen(self) -> bool:
        """Whether its command is known to have been started."""
        return self.seen_unix != self.began_unix


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A command that is to run to its end on the machines of a workspace."""

    id: str
    workspace: WorkspaceName
    block: str  # the Workspace block's name: the block says what is stored
    command: list[str]
    env: list[str] = []  # NAME=VALUE
    secrets: list[str] = []  # NAME=BLOCK: the record never holds a secret itself
    save: list[str] = []
    save_minutes: float = 30.0
    spot: Literal["never", "allowed", "only"] = "never"
    retries: int = 0
    on_cancel: Literal["hibernate", "keep"] = "hibernate"
    keep_logs: bool = False  # whether logs of earlier jobs stay in the workspace
    keep_saves: int = 3  # how many of its newest saves stay
    nodes: int = 1  # how many machines at the same time
    gpu: str = ""  # the GPU of machines rented for it, in place of the workspace's
    image: str = ""  # the image of machines rented for it, in place of the workspace's
    # Both limits have the names that existing records have: hours of the command in all attempts,
    # and USD that the job may cost. 0 for no limit.
    max_hours: float = msgspec.field(name="most_hours", default=0.0)
    max_usd: float = msgspec.field(name="most_usd", default=0.0)
    past_budgets: bool = False  # a person lets it go on, up to ``max_usd``, where budgets are spent
    created_unix: float
    state: State = "waiting"
    begun_by: str = ""  # the flow run that began it; empty in older records
    driver: str = ""  # the flow run that drives it, or drove it last
    process: str = ""  # of that run, while it drives: Prefect may start a run twice
    driven_unix: float = 0.0
    driven_for: str = ""  # the job whose own run drives this one, while it waits for its turn
    failures: int = 0  # runs in a row that failed
    rented: MachineId | None = None  # the last machine that was rented for the job
    stopped: MachineId | None = None  # its machine, if the provider was seen to have stopped it
    others: list[Node] = []  # the machines that stand ready for an attempt, or work on it, by rank
    attempts: list[Attempt] = []
    saves: int = 0
    kept_saves: list[SnapshotId] = []  # its saves that it has not deleted
    newest: SnapshotId | None = None  # the newest of its saves, or what it began with
    newest_unix: float | None = None  # when the files of that save were read
    # the snapshot with its frozen command, which goes on in its next attempt
    frozen: SnapshotId | None = None
    # the snapshot with the end of the command; its machine may then be destroyed
    final: SnapshotId | None = None
    aside: str = ""  # newer work of other machines that it did not go on from, in words
    log_offset: int = 0  # how much of the log runs have shown
    why: str = ""  # the reason of its state, for people
    ended_unix: float | None = None
    version: int = 0  # counts its writes

    @property
    def ended(self) -> bool:
        return self.state in get_args(Outcome)

    @property
    def unsuccessful(self) -> bool:
        return self.ended and self.state != "succeeded"

    @property
    def outcome(self) -> str:
        """The job's state, and why, in words."""
        return f"{self.state}: {self.why}" if self.why else self.state

    @property
    def driven(self) -> bool:
        """Whether a run drives it now. Times in records are by the store's clock (Records)."""
        return bool(self.process) and time.time() - self.driven_unix < LOST_S

    @property
    def turn(self) -> tuple[bool, bool, float, str]:
        """The key that sorts the jobs of a workspace, which run one after the other. A job that has
        begun comes first, whatever the clocks of hosts say; otherwise the oldest does."""
        return (not self.attempts, self.rented is None, self.created_unix, self.id)

    @property
    def attempt(self) -> Attempt | None:
        """The attempt that has not ended."""
        newest = self.attempts[-1] if self.attempts else None
        return newest if newest is not None and not newest.end else None

    def worked_s(self, now_unix: float) -> float:
        """Seconds that the command has run, in all attempts."""
        return sum((one.ended_unix or now_unix) - one.began_unix for one in self.attempts)

    def has_nodes_for(self, machine: MachineId) -> bool:
        """Whether the command may run on this machine: the job's other machines work on the open
        attempt, or are ready for a first one."""
        if self.nodes == 1:
            return True
        if self.attempt is not None:
            return self.attempt.machine == machine
        return len(self.others) == self.nodes - 1

    def with_attempt(self, **changes: Any) -> Job:
        """The job with changes to its newest attempt."""
        newest = msgspec.structs.replace(self.attempts[-1], **changes)
        return msgspec.structs.replace(self, attempts=[*self.attempts[:-1], newest])


class Stop(msgspec.Struct, frozen=True):
    """A request to stop a job; ``state``: how the job then ends."""

    state: Literal["cancelled", "over budget"]
    then: Literal["hibernate", "keep"]
    why: str
    asked_unix: float


class Approval(msgspec.Struct, frozen=True, kw_only=True):
    """A person's permission for a job to use more than it was submitted with. 0: unchanged."""

    max_hours: float = msgspec.field(name="most_hours", default=0.0)
    max_usd: float = msgspec.field(name="most_usd", default=0.0)
    past_budgets: bool = False
    approved_unix: float

    def changes(self, job: Job) -> dict[str, Any]:
        """The fields of the job's record that differ from what was approved."""
        wanted = {
            "max_hours": self.max_hours or job.max_hours,
            "max_usd": self.max_usd or job.max_usd,
            "past_budgets": self.past_budgets or job.past_budgets,
        }
        return {name: value for name, value in wanted.items() if getattr(job, name) != value}


def new_job_id(run: str, retry: int = 0) -> str:
    """The id of the job that a flow run begins: Prefect may start the same run again. ``retry``:
    how many jobs the run has begun before.

    A hash of all of the run's id, which begins with its milliseconds (UUIDv7): a schedule makes
    several runs within one.
    """
    begun = f"{run} {retry}" if retry else run
    return hashlib.sha256(begun.encode()).hexdigest()[:_ID_CHARS]


def log_path(spec: WorkspaceSpec, job: str) -> str:
    """Where the whole log of a job lies on its machine, and in the workspace's snapshots."""
    return f"{spec.paths[0].rstrip('/')}/{JOB_LOGS}/{job_id(job)}.log"


def job_id(text: str) -> str:
    """Check a job's id; raises InvalidInput."""
    if not is_job_id(text):
        raise InvalidInput(
            f"{text!r} is not a job's id, such as 3f2a9c81d04e: `torpor job list` shows the ids"
        )
    return text


def is_job_id(text: str) -> bool:
    return len(text) == _ID_CHARS and not set(text) - set("0123456789abcdef")


_Kind = Literal["open", "ended", "stop", "approved"]


class Jobs:
    """The jobs of one workspace in one store."""

    def __init__(self, store: ObjectStore, workspace: WorkspaceName) -> None:
        self._store = store
        advice = "look at the workspace's machine"
        self._records = Records(store, Job, _MOST_BYTES, advice)
        self._stops = Records(store, Stop, _MOST_BYTES, advice)
        self._approvals = Records(store, Approval, _MOST_BYTES, advice)
        self.workspace = workspace

    def of(self, job: str) -> Job | None:
        """The job, open or ended; None if there is none of this id."""
        found = self._records.read(self._key("ended", job)) or self._records.read(
            self._key("open", job)
        )
        return None if found is None else found[0]

    def started_by(self, run: str) -> list[Job]:
        """The jobs that a flow run began, oldest first: each retry begins another one."""
        begun: list[Job] = []
        while (job := self.of(new_job_id(run, len(begun)))) is not None:
            begun.append(job)
        return begun

    def open(self, unread: Unread | None = None) -> list[Job]:
        """Every job that has not ended, by their turns. ``unread``: as in Records.read_each."""
        names = self._names("open")
        # listed after the open ones: a job that ends meanwhile is not lost
        ended = set(self._names("ended")) if names else set()
        jobs = []
        for name in names:
            with left_out(self._key("ended", name), unread):
                if name in ended and self._records.read(self._key("ended", name)) is not None:
                    continue  # a name alone, which anybody may write, ends no job
            with left_out(self._key("open", name), unread):
                found = self._records.read(self._key("open", name))
                if found is not None and found[0].ended:
                    self._file(found[0])  # its run was killed half-way
                elif found is not None:
                    jobs.append(found[0])
        return sorted(jobs, key=lambda job: job.turn)

    def ended(self, most: int = MOST_ENDED, unread: Unread | None = None) -> list[Job]:
        """The jobs that ended last, at most so many, oldest first. ``unread``: as in
        Records.read_each."""
        if not most:
            return []
        prefix = f"workspaces/{self.workspace}/jobs/ended/"
        jobs = self._records.read_each(last_written(self._store.list(prefix), most), unread)
        return sorted(jobs, key=lambda job: job.ended_unix or 0.0)[-most:]

    def take(self, job: Job, driver: str, driven_for: str = "", *, gone: bool = False) -> Job:
        """Make ``driver`` the run that drives the job, which may be new. WorkspaceBusy while
        another run drives it, or where one has written the record since it was read; an earlier
        process of the same run is replaced at once. HandedOver if the job has ended.
        ``driven_for``: that run's own job, if it is another one that waits for this job. ``gone``:
        the run that the record names as the driver has ended."""
        if job.driven and job.driver != driver and not gone:
            raise self._busy(job)
        key = self._key("open", job.id)
        found = self._records.read(key)
        now = job if found is None else found[0]
        if now.ended:
            raise self._driven_elsewhere(job)
        if now.driver != driver and found is not None and _writer(now) != _writer(job):
            raise self._busy(now)
        if now.version < job.version:  # a write that arrived late
            now = job
        taken = msgspec.structs.replace(
            now,
            driver=driver,
            process=secrets.token_hex(8),
            driven_unix=time.time(),
            driven_for=driven_for,
            version=now.version + 1,
        )
        try:
            if found is not None:
                self._records.replace(key, taken, found[1])
            elif job.driver:
                raise self._driven_elsewhere(job)
            else:
                self._records.create(key, taken)
        except (ObjectChanged, ObjectExists):
            raise self._busy(self.of(job.id) or job) from None
        return taken

    def keep(self, job: Job) -> Job:
        """Write what the driver knows. HandedOver if another run drives the job by now."""
        return self._rewrite(job)

    def leave(self, job: Job, *, failed: bool = True) -> Job:
        """Note that the driver stops and the job has not ended: any run may continue it, later if
        the driver has ``failed``."""
        return self._rewrite(job, process="", failures=job.failures + failed)

    def end(self, job: Job) -> Job:
        """Write how the job ended, for good. HandedOver if another run drives it by now."""
        ended = self._rewrite(job, ended_unix=time.time())
        self._file(ended)
        return ended

    def ask_stop(self, job: str, stop: Stop, *, unless_asked: bool = False) -> None:
        """Ask whoever drives the job to stop it. A later request replaces an earlier one, but not
        with ``unless_asked``."""
        key = self._key("stop", job)
        if not unless_asked:
            self._stops.put(key, stop)
            return
        with suppress(ObjectExists):
            self._stops.create(key, stop)

    def withdraw_stop(self, job: str) -> None:
        """Forget that the job was to be stopped."""
        self._store.delete([self._key("stop", job)])

    def stop_asked(self, job: str) -> Stop | None:
        """The last request to stop the job."""
        found = self._stops.read(self._key("stop", job))
        return None if found is None else found[0]

    def approve(self, job: str, approval: Approval) -> None:
        """Let the job use more; its driver reads the approval soon. A later approval replaces an
        earlier one."""
        self._approvals.put(self._key("approved", job), approval)

    def approved(self, job: str) -> Approval | None:
        """The last approval of the job."""
        found = self._approvals.read(self._key("approved", job))
        return None if found is None else found[0]

    def withdraw_approval(self, job: str) -> None:
        """Forget what the job was approved for."""
        self._store.delete([self._key("approved", job)])

    def _rewrite(self, job: Job, **changes: Any) -> Job:
        """Write the record of a job that this run drives, with ``changes``. HandedOver if another
        run drives it by now. A record that is older than this run's last write arrived late, at a
        store that cannot refuse late writes: it is overwritten."""
        key = self._key("open", job.id)
        for _ in range(TRIES):
            found = (
                None if self._records.read(self._key("ended", job.id)) else self._records.read(key)
            )
            if found is None or found[0].ended:
                raise self._driven_elsewhere(job)
            now, version = found
            mine = (now.driver, now.process) == (job.driver, job.process)
            if not mine and now.version >= job.version:
                raise self._driven_elsewhere(job, now)
            then = msgspec.structs.replace(
                job,
                driven_unix=time.time(),
                version=max(now.version, job.version) + 1,
                **changes,
            )
            with suppress(ObjectChanged):
                self._records.replace(key, then, version)
                return then
        raise self._records.contested(key)

    def _file(self, job: Job) -> None:
        """Move the record of a job that has ended to the history."""
        with suppress(ObjectExists):  # another run has done it
            self._records.create(self._key("ended", job.id), job)
        besides: tuple[_Kind, ...] = ("open", "stop", "approved")
        self._store.delete([self._key(kind, job.id) for kind in besides])

    def _busy(self, job: Job) -> WorkspaceBusy:
        return WorkspaceBusy(
            f"flow run {job.driver} works on job {job.id} of workspace {self.workspace}: wait "
            f"until it has ended. A run that is gone is replaced after {LOST_S:.0f} s"
        )

    def _driven_elsewhere(self, job: Job, now: Job | None = None) -> HandedOver:
        by = "has ended" if now is None else f"is driven by flow run {now.driver}"
        return HandedOver(f"job {job.id} of workspace {self.workspace} {by}: this run stops")

    def _names(self, kind: Literal["open", "ended"]) -> list[str]:
        """The ids of the jobs in this prefix; objects of other programs there have none."""
        prefix = f"workspaces/{self.workspace}/jobs/{kind}/"
        names = [found.key.removeprefix(prefix) for found in self._store.list(prefix)]
        return [name for name in names if is_job_id(name)]

    def _key(self, kind: _Kind, job: str) -> ObjectKey:
        return ObjectKey(f"workspaces/{self.workspace}/jobs/{kind}/{job_id(job)}")


def _writer(job: Job) -> tuple[str, int]:
    """The run and the version of a write."""
    return job.process, job.version
