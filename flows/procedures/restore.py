"""The restore of one snapshot on one machine, from its plan to its hand-over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from typing import Final

from flows.procedures.parts import do_parts
from tasks.phases import phase
from tasks.restore import begin_restore, check_restore, finish_first, finish_restore, restore_part
from tasks.runner import runner
from torpor.control.remote.restore import RemoteRestore
from torpor.control.remote.seam import Session
from torpor.control.rental.renting import Tenancy
from torpor.shared.errors import (
    InvalidInput,
    RestoreUnfinished,
    RunCancelled,
    SnapshotDamaged,
    StartedTooEarly,
    TorporError,
)
from torpor.shared.values import Machine
from torpor.shared.wire.restore import RestorePlan

NOTHING_RESTORED: Final = "nothing was restored"
_AT_ONCE: Final = 4
"""Packs that a command waits for, fetched at the same time: more connections fill the line."""
_WAIT_S: Final = 5.0
"""For one question what a command waits for; the end of a restore that fails waits for it."""


class EarlyStart:
    """What a wake starts before all is restored: nothing, unless a subclass says otherwise."""

    started = False

    def may_start(self, session: Session, tenancy: Tenancy) -> bool:
        """Whether a command is to be started behind the gate; asked before the restore begins."""
        return False

    def planned(self, restore: RemoteRestore) -> None:
        """The restore has begun, and has its plan."""

    def start(self) -> None:
        """Called once, when a command can start; what it raises ends the restore."""

    @contextmanager
    def attended(self) -> Iterator[None]:
        """While all is restored, stay with what was started."""
        yield


@contextmanager
def begun(restore: RemoteRestore, *, resume: bool = False, rented: bool = False) -> Iterator[None]:
    """Hold the workspace on the machine, and release it at the end, also after an error.
    ``resume``: an earlier run may have begun this restore. ``rented``: this run has rented the
    machine."""
    try:
        begin_restore(restore, resume, rented)
        yield
    except BaseException:
        restore.give_up(RunCancelled("the restore has failed: nothing more is fetched"))
        raise
    finally:
        with suppress(TorporError):  # an agent that cannot be reached ends the run itself
            restore.end()


@contextmanager
def arrival(restore: RemoteRestore, tenancy: Tenancy) -> Iterator[RemoteRestore]:
    """Begin a restore on a machine that is handed over afterwards, or continue what an earlier run
    began there. Once the agent has said that it holds nothing else, the machine may be destroyed
    after an error."""
    try:
        with begun(restore, resume=not tenancy.fresh, rented=tenancy.rental is not None):
            if not restore.plan.complete:
                tenancy.holds_nothing_else()
            yield restore
    except RestoreUnfinished:  # of another snapshot, and nothing else
        tenancy.holds_nothing_else()
        raise
    except InvalidInput:  # the targets are filled: another run may have restored them meanwhile
        tenancy.check_unclaimed()
        raise


def restore_parts(
    restore: RemoteRestore,
    flow: str,
    machine: Machine | None = None,
    *,
    when_submitted: Callable[[], None] = lambda: None,
    when_first: Callable[[], None] = lambda: None,
) -> None:
    """Fetch everything from the store. What the workspace wants first is finished as soon as it is
    there, while the rest follows; an event says so of ``machine``. Behind a gate the command starts
    at once, and what it waits for is fetched before the parts.

    ``when_submitted`` is called when every part waits for its turn. ``when_first`` is called once:
    when the command can start. What it raises ends the restore.
    """
    plan, wanted = restore.plan, restore.wanted

    def reached() -> None:
        finish_first(restore, machine)
        when_first()

    after = (sum(part.first for part in plan.parts), reached) if plan.first else None
    if plan.gated:
        after = (0, when_first)
    with phase("restore"), _wanted_fetched(restore):
        do_parts(
            f"{flow}-{wanted.workspace}-progress",
            f"Workspace {wanted.workspace} from {wanted.snapshot}",
            sum(part.bytes for part in plan.parts),
            plan.parts,
            lambda part, progress: restore_part.submit(restore, part, progress),
            submitted=when_submitted,
            after=after,
        )


@contextmanager
def _wanted_fetched(restore: RemoteRestore) -> Iterator[None]:
    """Meanwhile, fetch what a command behind the gate waits for."""
    if not restore.plan.gated:
        yield
        return
    ended = threading.Event()

    def fetch() -> None:
        going = True
        while going and not ended.is_set():
            try:
                going = restore.fetch_wanted(_WAIT_S)
            except TorporError as error:  # the parts bring the same
                runner().log.warning("what the command waits for comes in its turn: %s", error)
                return

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="wanted") as threads:
        for _ in range(_AT_ONCE):
            threads.submit(copy_context().run, fetch)
        try:
            yield
        finally:
            ended.set()


def restore_all(
    restore: RemoteRestore,
    flow: str,
    machine: Machine | None = None,
    *,
    full_check: bool = True,
    when_first: Callable[[], None] = lambda: None,
    started_early: Callable[[], bool] = lambda: False,
) -> None:
    """Fetch, finish and check what an earlier run has not restored. ``machine`` and ``when_first``:
    as in ``restore_parts``. ``started_early``: whether a command was started before all was
    restored; StartedTooEarly where only that can have changed a directory or a file."""
    if restore.plan.complete:
        return
    with _early_start_named(started_early, InvalidInput):
        restore_parts(restore, flow, machine, when_first=when_first)
    with _early_start_named(started_early, InvalidInput, SnapshotDamaged):
        finish_restore(restore)
        check_restore(restore, full_check)


def restore_beside(
    early: EarlyStart, restore: RemoteRestore, machine: Machine, *, full_check: bool
) -> None:
    """Wake ``machine``: fetch, finish and check all, beside what starts early."""
    early.planned(restore)
    with early.attended():
        restore_all(
            restore,
            "wake",
            machine,
            full_check=full_check,
            when_first=early.start,
            started_early=lambda: early.started,
        )


def gate_words(plan: RestorePlan, command: str, why_not: str = "") -> str:
    """How ``command`` used the gate that was asked for. ``why_not``: why that was not asked of this
    restore."""
    if plan.gated:
        return f"the {command} started before its files were there"
    return NOTHING_RESTORED if plan.complete else f"not used: {plan.ungated or why_not}"


@contextmanager
def _early_start_named(
    started_early: Callable[[], bool], *errors: type[TorporError]
) -> Iterator[None]:
    try:
        yield
    except errors as error:
        if not started_early():
            raise
        raise StartedTooEarly(
            "the command started before all was restored, and wrote to files that were still "
            f"restored: {error}"
        ) from error
