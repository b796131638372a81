"""A benchmark's scratch name in the store, held exclusively, and its machines."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass
from threading import Event

from tasks.deploy import forget_measured_bases
from tasks.machines import (
    create_machine,
    endpoint_of,
    look_for_offers,
    open_session,
    own_machine,
    renting,
)
from tasks.measure import clear_scratch, remove_machine_content
from tasks.phases import phase
from tasks.workspace import OpenWorkspace
from torpor.control.measure.scratch import held, machines_name
from torpor.control.remote.seam import Session
from torpor.shared.errors import RunCancelled, TorporError
from torpor.shared.values import Endpoint, Machine, WorkspaceName


@dataclass(frozen=True)
class ScratchMachine:
    """A machine to measure on. ``address`` is user@host:port, as flows take a machine of one's own;
    ``here``: it is on the host where the flow runs."""

    session: Session
    address: str
    here: bool


@contextmanager
def held_and_cleared(opened: OpenWorkspace, workspace: WorkspaceName, run: str) -> Iterator[None]:
    """Hold this scratch name exclusively. First clear what a killed run left under it, and destroy
    its machines at this provider. At the end clear what this run stored, also after an error,
    unless another run holds the name by then."""
    with held(opened.store, opened.spec.name, run) as ours:
        _clear(opened, workspace)
        try:
            yield
        finally:
            if ours():
                _clear(opened, workspace)


@contextmanager
def scratch_machines(
    opened: OpenWorkspace, workspace: WorkspaceName, own: str, count: int
) -> Iterator[list[ScratchMachine]]:
    """The user's own machine, or ``count`` rented ones that are destroyed at the end.

    Rented machines are never handed over. They hold no work, so they may always be destroyed.
    """
    if own:
        with _attached(opened, workspace, own_machine(own), here=False) as own_one:
            try:
                yield [own_one]
            finally:
                with suppress(TorporError):  # it is away: the next benchmark on it removes it
                    remove_machine_content(own_one.session, opened.spec.name, place_too=True)
        return
    ended = Event()

    def nap(seconds: float) -> None:
        if ended.wait(seconds):
            raise RunCancelled("the benchmark ended before all of its machines were ready")

    mine = opened.under(machines_name(workspace))
    with ExitStack() as stack:
        with phase("machines"):
            offers = look_for_offers(mine, count)
            held = stack.enter_context(renting(mine))
            # Left before any machine is ended: a thread that still creates would rent once more.
            threads = stack.enter_context(ThreadPoolExecutor(count, thread_name_prefix="scratch"))
            stack.callback(ended.set)
            creating = [
                threads.submit(copy_context().run, create_machine, held, offers, None, nap)
                for _ in range(count)
            ]
            live = [future.result().machine for future in creating]
            here = live[0].provider.startswith("local:")
            scratch = [
                stack.enter_context(_attached(opened, workspace, machine, here=here))
                for machine in live
            ]
        yield scratch


@contextmanager
def _attached(
    opened: OpenWorkspace, workspace: WorkspaceName, machine: Machine, *, here: bool
) -> Iterator[ScratchMachine]:
    with open_session(opened, machine) as session:
        endpoint = endpoint_of(machine)
        if endpoint.host_key is not None:  # flows will take it for a machine of the user's own
            opened.hosts.pin(endpoint, endpoint.host_key)
        yield ScratchMachine(session, _address(endpoint), here)


def _clear(opened: OpenWorkspace, workspace: WorkspaceName) -> None:
    renting(opened.under(machines_name(workspace))).end_scratch()
    forget_measured_bases(opened)
    clear_scratch(opened, "")


def _address(endpoint: Endpoint) -> str:
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    return f"{endpoint.user}@{host}:{endpoint.port}"
