"""The first machine of the demo workspace, and local machines whose server stopped."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from blocks import SSHIdentity, Workspace
from blocks.reference import load_named
from deployments.installation import Installation
from flows import create, list_machines, list_snapshots
from torpor.control.providers.local.provider import LocalProvider
from torpor.control.providers.removal import remove_tree
from torpor.control.rental.order import order_for
from torpor.shared.errors import ProviderError
from torpor.shared.values import KIB, MIB, Machine, Want

_README: Final = """\
This is the workspace `demo`. Everything in this folder is hibernated and woken.

1. In Prefect's UI run the deployment `hibernate` with the workspace `demo`. The folder is stored,
   verified, and this machine is destroyed.
2. Run `wake`. The folder is back on a new machine, byte for byte.
"""


def make_demo(name: str) -> None:
    """Give the demo workspace its first machine, with some files on it.

    An interrupted run may have left a machine without files: it gets them. Does nothing if the
    workspace has a snapshot, or no longer uses the local provider.
    """
    provider = Workspace.of(name).open_providers()[0]
    if not isinstance(provider, LocalProvider) or list_snapshots(name):
        return
    machines = list_machines(name) or [create(name)]
    if machines[0].label is None:
        raise ProviderError(f"machine {machines[0].id} came without a label")
    folder = provider.home(machines[0].label) / "workspace"
    if (folder.exists() and any(folder.iterdir())) or len(machines) > 1:
        return
    unfinished = folder.with_name(f".{folder.name}.new")
    remove_tree(unfinished)
    fill(unfinished)
    unfinished.rename(folder)  # replaces the empty folder that create has made


def fill(folder: Path) -> None:
    """Write a little of everything: text, many small files, a link, and bytes that do not
    compress."""
    (folder / "notes").mkdir(parents=True)
    (folder / "README.txt").write_text(_README)
    for number in range(200):
        (folder / "notes" / f"{number:03}.txt").write_text(f"note {number}\n" * (1 + number))
    (folder / "weights.bin").write_bytes(os.urandom(4 * MIB))
    (folder / "log.txt").write_bytes(b"one line like every other\n" * (40 * KIB))
    (folder / "latest.bin").symlink_to("weights.bin")


def revive(installation: Installation) -> list[Machine]:
    """Start the SSH servers of stopped machines again, after a restart of this host say."""
    provider = LocalProvider(installation.machines)
    stopped = [machine for machine in provider.list_own() if machine.state == "stopped"]
    offers = provider.offers(Want()) if stopped else []
    if not offers:
        return []
    key = load_named(SSHIdentity, "default", of="make up").identity().load()
    return [
        provider.create(order_for(offers[0], machine.label, key))
        for machine in stopped
        if machine.label is not None
    ]
