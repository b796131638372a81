"""Open what a workspace block refers to."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec
from prefect import task

from blocks import Workspace
from tasks.retrying import STEP
from torpor.control.ledger import Ledger
from torpor.control.providers.seam import Provider
from torpor.control.remote.ssh import Identity
from torpor.control.store.seam import ObjectStore
from torpor.shared.format.keys import Seal, workspace_key
from torpor.shared.values import Capabilities, WorkspaceName, WorkspaceSpec


@dataclass(frozen=True)
class Place:
    """One workspace, and the store, provider and identity that go with it, opened."""

    spec: WorkspaceSpec
    store: ObjectStore
    provider: Provider
    identity: Identity = field(repr=False)
    ssh_public_key: str
    owner: str
    key: bytes | None = field(repr=False)  # the workspace's own key, never the store's

    def under(self, name: WorkspaceName) -> Place:
        """The same place under another name, such as drills and benchmarks lease machines under.
        The key stays the workspace's: nothing is sealed there."""
        return replace(self, spec=msgspec.structs.replace(self.spec, name=name))

    @property
    def seal(self) -> Seal:
        return Seal(self.key)

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.store, self.spec.name)


def open_place(workspace: Workspace | str) -> Place:
    """Load the blocks a workspace refers to; errors name the block and what to do."""
    block = Workspace.of(workspace)
    spec = block.spec()
    store = block.open_store()
    identity = block.open_identity()
    store_key = block.store_key()
    return Place(
        spec=spec,
        store=store,
        provider=block.open_provider(),
        identity=identity.identity(),
        ssh_public_key=identity.public_key,
        owner=block.owner,
        key=None if store_key is None else workspace_key(store_key, spec.name),
    )


@task(name="probe store", **STEP)
def probe_store(place: Place) -> Capabilities:
    """See that the store answers, takes our key, and what it can do."""
    return place.store.probe()
