"""The restore of one snapshot on one machine, from its plan to its hand-over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from flows.procedures.parts import do_parts
from tasks.phases import phase
from tasks.restore import begin_restore, check_restore, finish_first, finish_restore, restore_part
from torpor.control.deploy.bases import shown_name
from torpor.control.remote.restore import RemoteRestore
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


@contextmanager
def restore_run(
    restore: RemoteRestore, *, resume: bool = False, rented: bool = False
) -> Iterator[None]:
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
        with suppress(TorporError):  # an agent that cannot be reached ends the run by itself
            restore.end()


@contextmanager
def restore_run_before_handover(
    restore: RemoteRestore, tenancy: Tenancy, give_up: Callable[[], None] | None = None
) -> Iterator[RemoteRestore]:
    """Begin a restore on a machine that is handed over afterwards, or continue what an earlier run
    began there. Once the agent has said that it holds nothing else, the machine may be destroyed
    after an error. ``give_up``: the caller continues no earlier restore, so that the machine may be
    destroyed only after RestoreUnfinished, for which ``give_up`` is called."""
    try:
        with restore_run(restore, resume=not tenancy.fresh, rented=tenancy.rental is not None):
            if give_up is None and not restore.plan.complete:
                tenancy.holds_nothing_else()
            yield restore
    # an unfinished restore: of another snapshot, or one that the caller does not continue
    except RestoreUnfinished:
        (give_up or tenancy.holds_nothing_else)()
        raise
    except InvalidInput:  # the targets hold files: another run may have restored them meanwhile
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
    """Fetch everything from the store. Files that the workspace wants first are finished as soon as
    they are there, while the rest follows; an event says that ``machine`` has them.

    ``when_submitted`` is called when every part waits for its turn. ``when_first`` is called once:
    when what comes first can be used. What it raises ends the restore.
    """
    plan, wanted = restore.plan, restore.wanted

    def reached() -> None:
        finish_first(restore, machine)
        when_first()

    after = (sum(part.first for part in plan.parts), reached) if plan.first else None
    with phase("restore"):
        do_parts(
            f"{flow}-{wanted.workspace}-progress",
            f"restoring {shown_name(wanted.workspace)}",
            sum(part.bytes for part in plan.parts),
            plan.parts,
            lambda part, progress: restore_part.submit(restore, part, progress),
            submitted=when_submitted,
            after=after,
        )


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
    as in ``restore_parts``. ``started_early``: whether a server was started before all was
    restored; StartedTooEarly where only that can have changed a directory or a file."""
    if restore.plan.complete:
        return
    with _early_start_named(started_early, InvalidInput):
        restore_parts(restore, flow, machine, when_first=when_first)
    with _early_start_named(started_early, InvalidInput, SnapshotDamaged):
        finish_restore(restore)
        check_restore(restore, full_check)


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
            "the server started before all was restored, and wrote to files that were still "
            f"restored: {error}"
        ) from error
