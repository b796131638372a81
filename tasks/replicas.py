"""The steps of one machine's restore in a replicate, as tasks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

from tasks.progress import Progress
from tasks.step import step
from torpor.control.remote.part_tracker import Errand, Member
from torpor.control.remote.restore import RemoteRestore
from torpor.shared.wire.request import Event
from torpor.shared.wire.restore import Peer


@step("pass packs on")
def serve_packs(restore: RemoteRestore, host: str, most_bytes: int) -> Peer:
    """Let the machine keep the packs it fetches, and serve them to its peers."""
    return restore.serve(host, most_bytes)


@step("restore share", run_name="restore share {number}")
def restore_share(
    restore: RemoteRestore,
    member: Member,
    machine: str,
    number: int,
    together: int,
    progress: Progress,
    when_first: Callable[[], None],
) -> int:
    """Fetch, check and write parts, ``together`` at the same time, until the machine lacks none;
    returns how many were fetched. A repeat fetches the parts that failed. ``when_first`` is called
    when all parts that come first are there."""
    if together == 1:
        return _fetch_all(restore, member, machine, progress, when_first)
    with ThreadPoolExecutor(together, thread_name_prefix="restore-share") as threads:
        futures = [  # each runs in a context of the step, by which Prefect finds its server
            threads.submit(
                copy_context().run, _fetch_all, restore, member, machine, progress, when_first
            )
            for _ in range(together)
        ]
        return sum(future.result() for future in futures)


def _fetch_all(
    restore: RemoteRestore,
    member: Member,
    machine: str,
    progress: Progress,
    when_first: Callable[[], None],
) -> int:
    fetched = 0
    while (errand := member.next()) is not None:
        if _fetch(restore, member, errand, machine, progress):
            when_first()
        fetched += 1
    return fetched


def _fetch(
    restore: RemoteRestore, member: Member, errand: Errand, machine: str, progress: Progress
) -> bool:
    name = (machine, *errand.part.pieces, *errand.part.packs)
    try:
        restored = restore.restore_part(
            errand.part,
            lambda event: progress.event(name, event),
            peer=errand.peer,
            floor_bytes_s=errand.floor_bytes_s,
        )
    except BaseException:
        member.failed(errand)
        raise
    progress.event(name, Event(errand.part.bytes))
    return member.done(errand, restored)
