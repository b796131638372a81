"""Gives machines what they need to save by themselves, and finds what a job's machines have
saved."""

from __future__ import annotations

import secrets
from typing import Final

from tasks.runner import runner
from tasks.step import step
from tasks.workspace import OpenWorkspace, StoredWorkspace
from torpor.control.jobs.records import Job
from torpor.control.jobs.standby import book_for, renewed_s
from torpor.control.remote.agent import Agent
from torpor.control.store.receipts import agent_of
from torpor.control.upkeep.lineage import JobLineage, NewestState, SnapshotLines, choose_newest
from torpor.shared.format.lineage import lineage_of
from torpor.shared.format.manifest import Manifest
from torpor.shared.values import Machine, SnapshotId
from torpor.shared.wire.autosave import Autosave, Book, LookAtAutosave

STANDBY_S: Final = 180.0
"""Seconds after which an agent that has not answered hangs. The request is up to 16 MiB, and the
line may be slow."""


@step("stand by")
def stand_by(
    opened: OpenWorkspace,
    session: Agent,
    machine: Machine,
    job: str,
    basis: SnapshotId | None,
    manifest: Manifest | None = None,
    every_s: float = 0.0,
) -> float:
    """Give the machine of a job all it needs to save by itself; returns in how many seconds it
    needs that again. ``basis``: the newest snapshot of this machine, or the one that it was woken
    from; ``manifest``: that snapshot's manifest, if at hand; ``every_s``: the interval of its
    saves, if no run saves in between."""
    book = book_for(opened.store, opened.spec, opened.key, job, basis, manifest, every_s)
    give_book(opened, session, machine, book)
    return renewed_s(book.lasts_s)


def give_book(
    opened: OpenWorkspace, session: Agent, machine: Machine, book: Book, instead_of: str = ""
) -> None:
    """Let the machine save by itself with that book from now on, in place of an earlier book, which
    may be the one of the job ``instead_of``."""
    notices = opened.markets.of(machine.provider).abilities.notices
    request_id = f"{runner().run}:autosave:{secrets.token_hex(8)}"
    request = Autosave(book, list(notices), instead_of)
    session.call(request, request_id=request_id, within_s=STANDBY_S)


def job_line(job: Job) -> JobLineage:
    """The line of a job: the snapshots that its machines stored on top of its newest save."""
    return JobLineage(
        job.newest,
        frozenset(one.agent for one in job.attempts if one.agent),
        frozenset(
            {str(one.machine) for one in job.attempts}
            | ({str(job.rented)} if job.rented else set())
        ),
    )


@step("find newest save")
def newest_save(opened: StoredWorkspace, job: Job) -> NewestState:
    """The newest state of the job's own line that is whole in the store: the job's newest save, or
    a snapshot that its machine made by itself after that; before its first save, the workspace's
    newest state."""
    of = opened.spec
    chosen = choose_newest(opened.store, of.name, opened.seal, of.restorable, job_line(job))
    for _, error in chosen.refused:
        runner().log.warning("a newer snapshot is not used: %s", error)
    if chosen.snapshot is None and chosen.refused:
        raise chosen.refused[0].error
    return chosen


def is_of_job(job: Job, chosen: NewestState) -> bool:
    """Whether the chosen snapshot has work of the job: the job's machine made it, or it goes on
    from the snapshot that the job went on from. If not, the store has nothing of the job's own
    line."""
    manifest = chosen.manifest
    return manifest is not None and (
        agent_of(manifest) in job_line(job).agents or job.newest in lineage_of(manifest).names
    )


@step("look where a machine goes on from")
def goes_on_from(opened: StoredWorkspace, session: Agent, since: SnapshotId) -> bool:
    """Whether the workspace on a machine is the snapshot ``since`` or descends from it, as far as
    is known."""
    look = LookAtAutosave(opened.spec.name)
    request_id = f"{runner().run}:line:{secrets.token_hex(8)}"
    line = session.call(look, request_id=request_id, within_s=STANDBY_S).line
    lines = SnapshotLines.of(opened.store, opened.spec.name, opened.seal)
    return line is not None and lines.goes_on_from(line, since)
