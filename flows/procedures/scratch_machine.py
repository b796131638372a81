"""A benchmark's scratch name in the store, held exclusively, and its machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flows.procedures.rented_machine import machine_under
from tasks.deploy import forget_measured_bases
from tasks.machines import end_scratch_machines, open_session, own_machine
from tasks.measure import clear_scratch
from tasks.workspace import OpenWorkspace
from torpor.control.measure.scratch import held, machines_name
from torpor.control.remote.agent import Session
from torpor.shared.values import WorkspaceName


@contextmanager
def held_and_cleared(opened: OpenWorkspace, workspace: WorkspaceName, run: str) -> Iterator[None]:
    """Hold this scratch name exclusively. First delete what a killed run left under the name, and
    destroy that run's machines at this provider. At the end, also after an error, delete what this
    run stored, unless another run holds the name by then."""
    with held(opened.store, opened.spec.name, run) as ours:
        _clear(opened, workspace)
        try:
            yield
        finally:
            if ours():
                _clear(opened, workspace)


@contextmanager
def scratch_machine(opened: OpenWorkspace, workspace: WorkspaceName, own: str) -> Iterator[Session]:
    """The user's own machine, or a rented one that is destroyed at the end."""
    if own:
        with open_session(opened, own_machine(own)) as session:
            yield session
        return
    with machine_under(opened, machines_name(workspace)) as session:
        yield session


def _clear(opened: OpenWorkspace, workspace: WorkspaceName) -> None:
    end_scratch_machines(opened.under(machines_name(workspace)))
    forget_measured_bases(opened)
    clear_scratch(opened)
