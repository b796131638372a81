"""The other machines of a job on several nodes: all but rank 0's, which is the workspace's own.

They are rented under a reserved name and hold a copy of a snapshot, and no work of their own. They
are never handed over: whoever drives their job may end them at any time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import replace
from typing import Final, TypeVar

import msgspec

from flows.procedures.fleet import Fleet, FleetRequest
from flows.procedures.job.log import ShownLog
from tasks.jobs import (
    address_of,
    end_command,
    for_nodes,
    look_at_command,
    nodes_of,
    secrets_to_hide,
    start_command,
)
from tasks.machines import end_scratch_machines, look_for_offers, open_session, renting
from tasks.restore import pick_snapshot_to_wake
from tasks.runner import runner
from tasks.workspace import OpenWorkspace
from torpor.control.jobs.log_lines import LogLines
from torpor.control.jobs.records import Job, Node, log_path
from torpor.control.providers.offers import Offer, preference, wanting_only
from torpor.control.remote.agent import Session
from torpor.control.remote.part_tracker import PartTracker
from torpor.control.rental.search import Offers
from torpor.shared.errors import CreateFailed, MachineError, MachineUnreachable, TorporError
from torpor.shared.values import Machine, SnapshotId
from torpor.shared.wire.job import StartJob

UNPROVEN_S: Final = 120.0
"""Seconds that a node may be missing in its market's answers, without a proof of its end."""
POLL_S: Final = 5.0
LOG_IN_S: Final = 120.0
"""Seconds that a node has to answer a login. The restore has installed its agent."""
TOGETHER: Final = 8
"""Nodes that are asked at the same time."""

A = TypeVar("A")
Q = TypeVar("Q")


class SupervisorLost(MachineError):
    """The supervisor of a node's command has ended, while the machine answers."""


# -- the machines


def end_nodes(opened: OpenWorkspace, job: str) -> None:
    """End every machine of the other nodes of ``job``, and of jobs that are over; raise the last
    failure after trying all."""
    open_jobs = [one.id for one in opened.jobs.open() if one.id != job]
    end_scratch_machines(nodes_of(opened), spared=open_jobs)


def bring_nodes(
    opened: OpenWorkspace, job: Job, record: Callable[[list[Node]], None]
) -> tuple[OpenWorkspace, SnapshotId]:
    """Rent all other machines of the job in one region of one market, and restore the snapshot on
    each. All of them, or none: after a failure the next region is tried, and the last failure is
    raised. Machines that ``record`` cannot record are ended, too. Returns the workspace, for
    renting its own machine beside the others, and the snapshot."""
    wanted, opened = pick_snapshot_to_wake(opened, job.newest or "")
    opened = for_nodes(opened, job.nodes)
    failure: TorporError | None = None
    for there, offers in _regions(opened, job.nodes):
        request = FleetRequest(job.nodes - 1, 0, [], True)
        try:
            with renting(nodes_of(there)) as held:  # ends all of them after an error
                tracker = PartTracker("never", request.total)
                fleet = Fleet(there, wanted, held, offers, request, tracker, together=True)
                fleet.bring([])
                ready, at = fleet.ready, there.providers[0].identity
                record([Node(machine=machine, provider=at) for machine in ready])
                for rental in nodes_of(there).rentals.open():
                    if rental.machine in ready:
                        held.leave(rental)
        except (CreateFailed, MachineUnreachable) as error:
            runner().log.warning("%d nodes did not start together: %s", job.nodes, error)
            failure = error
        else:
            return there, wanted.snapshot
    raise failure or AssertionError("no region without an offer is tried")


def _regions(opened: OpenWorkspace, count: int) -> Iterator[tuple[OpenWorkspace, Offers]]:
    """Each region of each market with its offers of one of the wanted GPUs, the one with the best
    offer first."""
    offers, want = look_for_offers(opened, count), opened.spec.want
    groups: dict[tuple[str, str, int], list[Offer]] = {}
    for one in offers.fitting:
        groups.setdefault((one.provider, one.region, preference(one, want)), []).append(one)
    for (provider, region, place), here in groups.items():
        want = wanting_only(opened.spec.want, place)
        want = msgspec.structs.replace(want, regions=[region] if region else want.regions)
        there = replace(
            opened,
            spec=msgspec.structs.replace(opened.spec, want=want),
            providers=(opened.markets.of(provider),),
            others=lambda: opened.markets.every(),
        )
        yield there, Offers(here, [])


# -- their commands


class _Other:
    """One node, as this run is logged in to it."""

    def __init__(self, rank: int, machine: Machine, session: Session, shown: ShownLog) -> None:
        self.rank = rank
        self.machine = machine
        self.session = session
        self.shown = shown
        self.offset = 0


class OtherNodes:
    """The commands of ranks 1 to N-1, in one attempt; a job on one machine has none. As a context:
    logs out at the end. Each method raises MachineError for a node that is lost, AgentLost where it
    may be."""

    def __init__(self, opened: OpenWorkspace, job: Job) -> None:
        self._opened = opened
        self._job = job
        self._others: list[_Other] = []
        self._left = ExitStack()
        self.noticed = False  # whether a market has announced that it takes one of them

    def __enter__(self) -> OtherNodes:
        return self

    def __exit__(self, *_: object) -> None:
        self._left.close()

    def __bool__(self) -> bool:
        return bool(self._job.others)

    def log_in(self) -> None:
        """Connect to each node."""
        if not self:
            return
        log, secrets = log_path(self._opened.spec, self._job.id), secrets_to_hide(self._job)

        def log_in(asked: tuple[int, Node]) -> _Other:
            rank, node = asked
            machine = self._find(rank, node)
            session = self._left.enter_context(open_session(self._opened, machine, LOG_IN_S))
            shown = ShownLog(LogLines(log, secrets), None, f"node {rank}: ")
            return _Other(rank, machine, session, shown)

        self._others = self._each(log_in, [*enumerate(self._job.others, 1)])

    def _find(self, rank: int, node: Node) -> Machine:
        """The machine of a node. Its market may not show it for a while."""
        give_up = time.monotonic() + UNPROVEN_S
        market = self._opened.markets.of(node.provider)
        while True:
            found = market.find(node.machine)
            if isinstance(found, Machine) and found.state in ("running", "starting"):
                return found
            why = f"it is {found.state}" if isinstance(found, Machine) else found.proof
            if why or time.monotonic() >= give_up:
                raise MachineError(
                    f"node {rank}, machine {node.machine} at {node.provider}, is lost: "
                    f"{why or 'its market does not show it'}"
                )
            time.sleep(POLL_S)

    def addresses(self, session: Session) -> list[str]:
        """The addresses by which the nodes reach each other, by rank; ``session``: that of rank 0.
        Empty for a job on one machine."""
        if not self:
            return []
        return [address_of(session), *self._each(lambda one: address_of(one.session), self._others)]

    def start(self, request: StartJob) -> None:
        """Start the command on each node, unless this attempt was started before."""

        def start(one: _Other) -> None:
            asked = msgspec.structs.replace(request, rank=one.rank)
            one.offset = start_command(one.session, asked).log_from

        self._each(start, self._others)

    def go_on(self) -> None:
        """Show the logs of all nodes from the begin of this attempt, whose commands were started
        before."""

        def look(one: _Other) -> None:
            one.offset = look_at_command(one.session, self._job.id, 0, 0).state.log_from

        self._each(look, self._others)

    def look(self) -> str:
        """Show what is new in the nodes' logs. Returns how a command has failed; empty where none
        has."""
        failures = self._each(self._look_at, self._others)
        return next((failure for failure in failures if failure), "")

    def stop(self) -> None:
        """End the commands of all nodes. A node that cannot be reached ends with its machine."""

        def stop(one: _Other) -> None:
            try:
                end_command(one.session, self._job.id)
            except MachineError as error:
                runner().log.warning("node %d was not stopped: %s", one.rank, error)

        self._each(stop, self._others)

    def close_if(self, gone: Callable[[Machine], bool]) -> None:
        """Close the sessions of machines that are gone, because their calls would wait for the
        line."""
        for one in self._others:
            if gone(one.machine):
                one.session.close()

    def _look_at(self, one: _Other) -> str:
        look = one.shown.show(one.session, self._job.id, one.offset)
        one.offset = look.offset
        self.noticed = self.noticed or look.state.notice is not None
        state = look.state
        if state.state in ("lost", "none"):
            raise SupervisorLost(f"node {one.rank} lost its supervisor")
        if state.state == "running" or state.status == 0:
            return ""
        error = state.error or f"the command ended with status {state.status}"
        return f"on node {one.rank}, {error}"

    def _each(self, ask: Callable[[Q], A], of: Sequence[Q]) -> list[A]:
        if not of:
            return []
        with ThreadPoolExecutor(TOGETHER, thread_name_prefix="node") as threads:
            futures = [threads.submit(copy_context().run, ask, question) for question in of]
            try:
                return [future.result() for future in futures]
            except Exception:
                raise
            except BaseException:  # somebody ends this process: no call may delay that
                self.close_if(lambda machine: True)
                raise
