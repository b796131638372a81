"""List and stop the local machines of an installation."""

from __future__ import annotations

from functools import partial

from deployments.installation import Installation
from torpor.control.processes import end_processes
from torpor.control.providers.local.folder import folders_in
from torpor.control.providers.local.provider import LocalProvider
from torpor.control.providers.local.server import machine_processes
from torpor.shared.errors import NotOurs
from torpor.shared.values import Machine


def running_machines(installation: Installation) -> list[Machine]:
    """The machines whose SSH server runs."""
    provider = LocalProvider(installation.machines)
    return [machine for machine in provider.list_own() if machine.state == "running"]


def stop_machines(installation: Installation) -> None:
    """End every process of every local machine. Their files stay; `make up` serves them again."""
    for folder in folders_in(installation.machines):
        try:
            record = folder.read_machine()
        except NotOurs:
            continue  # a damaged folder, which list_own names, stays as it is
        if record is not None:
            end_processes(partial(machine_processes, folder, record.id))
