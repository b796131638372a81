"""A job that this run drives: its record, kept fresh in the store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any, Final

import msgspec

from torpor.control.jobs.records import DRIVEN_S, Attempt, Job, Jobs, Outcome, Stop
from torpor.shared.errors import HandedOver, TorporError
from torpor.shared.values import Machine, MachineId, SnapshotId

STOP_S: Final = 3.0
"""Seconds between two looks whether the job should stop."""


class Driven:
    """Keeps the record of a driven job. As a context: a thread writes into the record that the job
    is driven, and looks for requests to stop it. Thread-safe. Every method raises HandedOver once
    another run drives the job."""

    def __init__(
        self,
        jobs: Jobs,
        job: Job,
        warn: Callable[[str], None],
        look: Callable[[Job], object] = lambda job: None,
    ) -> None:
        """``look`` is called each time the record was kept fresh."""
        self._jobs = jobs
        self._job = job
        self._warn = warn
        self._look = look
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._stop: Stop | None = None
        self._taken: HandedOver | None = None
        self._on_stop: Callable[[Stop], None] | None = None
        self._on_stop_lock = threading.Lock()
        context = copy_context()  # a warning must know the flow run to which it belongs
        self._thread = threading.Thread(
            target=context.run, args=(self._keep_fresh,), name="job", daemon=True
        )

    def __enter__(self) -> Driven:
        self._thread.start()
        return self

    def __exit__(self, kind: object, cause: BaseException | None, trace: object) -> None:
        self._over.set()
        self._thread.join(STOP_S)

    @property
    def job(self) -> Job:
        return self._job

    @property
    def stop(self) -> Stop | None:
        """The last request to stop the job, as far as this run knows."""
        return self._stop

    def look_for_stop(self) -> Stop | None:
        """The last request to stop the job, as the store has it now."""
        self._stop = self._jobs.stop_asked(self._job.id) or self._stop
        return self._stop

    @contextmanager
    def while_others_run(self, on_stop: Callable[[Stop], None]) -> Iterator[None]:
        """Call ``on_stop`` on the thread for each request to stop, while the caller does something
        else."""
        with self._on_stop_lock:
            self._on_stop = on_stop
        try:
            yield
        finally:
            with self._on_stop_lock:  # so that no call is running any more
                self._on_stop = None

    def nap(self, seconds: float) -> None:
        """Sleep; a new request to stop the job ends it early."""
        until, known = time.monotonic() + seconds, self._stop
        while self._stop == known and (left := until - time.monotonic()) > 0:
            self.check()
            time.sleep(min(left, 0.5))

    def check(self) -> None:
        if self._taken is not None:
            raise self._taken

    def change(self, **changes: Any) -> None:
        """Change the record, and write it."""
        with self._lock:
            self._keep(msgspec.structs.replace(self._job, **changes))

    def begin_attempt(
        self, machine: Machine, spot: bool, price_usd_h: float, agent: str = ""
    ) -> Attempt:
        """Record that the command is about to be started on the machine, which calls itself
        ``agent``."""
        now_unix = time.time()
        attempt = Attempt(
            number=len(self._job.attempts) + 1,
            machine=machine.id,
            provider=machine.provider,
            rental="" if machine.label is None else machine.label.rental,
            spot=spot,
            price_usd_h=price_usd_h,
            began_unix=now_unix,
            seen_unix=now_unix,
            agent=agent,
        )
        begun = [*self._job.attempts, attempt]
        self.change(state="running", why="", failures=0, stopped=None, attempts=begun)
        return attempt

    def withdraw_attempt(self) -> None:
        """Remove the newest attempt: its command was not started, and the machine does not know of
        it."""
        self.change(state="waiting", attempts=self._job.attempts[:-1])

    def change_attempt(self, **changes: Any) -> None:
        """Change the newest attempt, and write the record. When the attempt has ended, no other
        machines stand ready any more."""
        with self._lock:
            others = [] if changes.get("end") else self._job.others
            changed = self._job.with_attempt(**changes)
            self._keep(msgspec.structs.replace(changed, others=others))

    def thawed(self, why_not: str) -> None:
        """Note that the newest attempt began with the frozen command of the one before; or, where
        that could not go on, from its files."""
        with self._lock:
            attempts = list(self._job.attempts)
            if why_not and len(attempts) > 1:
                error = f"its command was frozen, and did not go on: {why_not}"
                attempts[-2] = msgspec.structs.replace(attempts[-2], error=error)
            self._keep(msgspec.structs.replace(self._job, frozen=None, attempts=attempts))

    def see(self, log_offset: int) -> None:
        """Note that the command runs, and that its log was shown up to this offset; the thread
        writes it."""
        with self._lock:
            seen = self._job.with_attempt(seen_unix=time.time())
            self._job = msgspec.structs.replace(seen, log_offset=log_offset)

    def saved(
        self,
        snapshot: SnapshotId,
        read_unix: float,
        *,
        own: bool = True,
        machine: MachineId | None = None,
    ) -> None:
        """Record a whole snapshot of what the disk held at ``read_unix``. ``own``: the job or its
        machine has made it, so the job deletes it once it is superfluous. ``machine``: whose disk
        that was, if it is known; the newest attempt on it has been saved, too, if a node was lost
        since."""
        with self._lock:
            job = self._job
            last = job.attempts[-1] if job.attempts else None
            after = last is not None and (last.machine, last.end) == (machine, "machine lost")
            if job.attempt or after:
                job = job.with_attempt(saved=True)
            self._keep(
                msgspec.structs.replace(
                    job,
                    saves=job.saves + 1,
                    kept_saves=_with(job.kept_saves, snapshot) if own else job.kept_saves,
                    newest=snapshot,
                    newest_unix=read_unix,
                )
            )

    def saved_itself(self, snapshot: SnapshotId) -> None:
        """Record a snapshot that the machine has made by itself, which the job deletes once it is
        superfluous."""
        with self._lock:
            kept = _with(self._job.kept_saves, snapshot)
            self._keep(msgspec.structs.replace(self._job, kept_saves=kept))

    def end(self, state: Outcome, why: str) -> None:
        """Write how the job ended, for good."""
        with self._lock:
            self.check()
            self._job = self._jobs.end(msgspec.structs.replace(self._job, state=state, why=why))
        self._over.set()

    def leave(self, why: str, *, failed: bool = True) -> None:
        """End this run's part; the job goes on, and any run may continue it."""
        self._over.set()
        with self._lock:
            self.check()
            self._job = self._jobs.leave(msgspec.structs.replace(self._job, why=why), failed=failed)

    def _keep(self, job: Job) -> None:
        self.check()
        try:
            self._job = self._jobs.keep(job)
        except HandedOver as taken:
            self._taken = taken
            raise

    def _keep_fresh(self) -> None:
        kept = time.monotonic()
        while not self._over.wait(STOP_S):
            try:
                stop = self.look_for_stop()
                with self._on_stop_lock:
                    if stop is not None and self._on_stop is not None:
                        self._on_stop(stop)
                if time.monotonic() - kept >= DRIVEN_S:
                    with self._lock:
                        if self._over.is_set():
                            return
                        self._keep(self._job)
                    kept = time.monotonic()
                    self._look(self._job)
            except HandedOver as taken:
                self._taken = taken
                return
            except TorporError as error:
                self._warn(f"the record of job {self._job.id} could not be kept fresh: {error}")


def _with(saves: list[SnapshotId], snapshot: SnapshotId) -> list[SnapshotId]:
    return saves if snapshot in saves else [*saves, snapshot]
