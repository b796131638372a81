"""A workspace with its store, provider and identity."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import TypeVar

import msgspec

from blocks import Workspace
from blocks.budget import open_all_budgets
from blocks.control_side import own_side
from blocks.reference import loading_once
from blocks.settings import settings_of
from blocks.workspace import open_all_providers, open_each_provider
from torpor.control.hosts import KnownHosts
from torpor.control.jobs.records import Jobs
from torpor.control.money.budgets import OpenBudget
from torpor.control.providers.gpu_wishes import counted, wishes_of
from torpor.control.providers.provider import Provider, volumes_of
from torpor.control.remote.agent import LogIn
from torpor.control.remote.session import SshSession
from torpor.control.remote.ssh import Identity
from torpor.control.rental.markets import Markets
from torpor.control.rental.records import Rentals
from torpor.control.store.object_store import ObjectStore
from torpor.control.store.s3 import RootOf
from torpor.control.store.workspace_records import Settings
from torpor.control.store_prices import StorePrice
from torpor.shared.errors import InvalidInput, TorporError
from torpor.shared.format.keys import Seal, workspace_key
from torpor.shared.values import (
    HOME_ROOT,
    Away,
    MachineId,
    Want,
    WantChange,
    WorkspaceName,
    WorkspaceSpec,
    home_of,
    machine_path,
    overlap,
    tidy_path,
)

Opened = TypeVar("Opened", bound="StoredWorkspace")


@dataclass(frozen=True)
class StoredWorkspace:
    """A workspace and its opened store: what snapshots and restores need."""

    spec: WorkspaceSpec
    store: ObjectStore
    sealing: bytes | RootOf | None = field(repr=False)
    """The workspace's own key, never the store's, or what reads it from the store."""

    @property
    def key(self) -> bytes | None:
        """The workspace's own key; None where it stays plain. The first use may ask the store, and
        raises as the store does."""
        return self.sealing(self.store) if callable(self.sealing) else self.sealing

    def under(self: Opened, name: WorkspaceName) -> Opened:
        """This workspace under a reserved name, for machines that hold no work of their own. The
        key stays the workspace's, because nothing is sealed under the reserved name."""
        return replace(self, spec=msgspec.structs.replace(self.spec, name=name))

    def accepting(self: Opened, paths: Sequence[str]) -> Opened:
        """This workspace, whose snapshots may also name these directories; raises InvalidInput."""
        accepted = [machine_path(path.strip()) for path in paths]
        return replace(self, spec=msgspec.structs.replace(self.spec, accept_paths=accepted))

    def accepting_losses(self: Opened, changed: Sequence[str], lost: Sequence[str]) -> Opened:
        """This workspace, where files that match ``changed`` may change while they are read, and
        where the directories ``lost``, outside of the workspace, may be lost with the machine."""
        of = self.spec
        spec = msgspec.structs.replace(
            of,
            accept_changed=[*of.accept_changed, *changed],
            accept_lost=[*of.accept_lost, *lost],
        )
        return replace(self, spec=spec)

    def through(self: Opened, way: Callable[[ObjectStore], ObjectStore]) -> Opened:
        """This workspace, its store read through a wrapper of it."""
        return replace(self, store=way(self.store))

    @property
    def seal(self) -> Seal:
        return Seal(self.key)

    @property
    def hosts(self) -> KnownHosts:
        return KnownHosts(self.store, self.spec.name)

    @property
    def rentals(self) -> Rentals:
        return Rentals(self.store, self.spec.name)

    @property
    def jobs(self) -> Jobs:
        return Jobs(self.store, self.spec.name)


@dataclass(frozen=True)
class OpenWorkspace(StoredWorkspace):
    """A workspace with its store, its providers and the SSH identity of its machines, all
    opened."""

    providers: tuple[Provider, ...]
    identity: Identity = field(repr=False)
    owner: str
    log_in: LogIn = field(default=SshSession.open, repr=False)
    others: Callable[[], Sequence[Provider]] = field(default=tuple, repr=False)
    """Opens all provider blocks of the installation."""
    each: Callable[[], Sequence[tuple[str, Provider | TorporError]]] = field(
        default=tuple, repr=False
    )
    """Opens all provider blocks of the installation, by their references, with the error of each
    that cannot be opened."""
    project: str = ""
    job: str = ""
    """The job that machines are rented for."""
    thaws: bool = False
    """Whether the newest snapshot holds the frozen command of that job."""
    beside: frozenset[MachineId] = frozenset()
    """Machines of the workspace that lack the newest save of that job: another machine is rented
    beside them."""
    most_usd_h: float | None = None
    """The most USD an hour that all machines rented at once may cost: the job's money pays for no
    more."""
    past_budgets: bool = False
    """Whether a person lets that job rent where the budgets of the workspace are spent."""
    budgets: Callable[[], Sequence[OpenBudget]] = field(default=tuple, repr=False)
    """Opens all budgets of the installation, also those of other workspaces."""
    store_price: Callable[[], StorePrice | None] = field(default=lambda: None, repr=False)
    """Loads what the store costs; None if unknown."""
    store_key: bytes | RootOf | None = field(default=None, repr=False)
    """The store key, or what reads it from the store; None where the store is plain."""
    side: str = ""
    """This control side, as records name it."""
    store_block: str = ""
    """The Object Store block, as the Workspace block names it."""
    settings: Callable[[], Settings | None] = field(default=lambda: None, repr=False)
    """Loads what its blocks hold, for its record in the bucket; None if its block is not saved."""
    of_block: WorkspaceName | None = None
    """The workspace of its block, where this is a reserved name of it."""
    left: Sequence[str] = ()
    """What the snapshot to wake lacks, for people: files left behind on its machine, and the work
    of others."""
    places: Sequence[str] = ()
    """The paths of the woken snapshot's directories on the machine that made it; empty where
    unknown."""

    @property
    def root(self) -> WorkspaceName:
        """The workspace of its block, which has an owner, also under a reserved name of it."""
        return self.of_block or self.spec.name

    def under(self, name: WorkspaceName) -> OpenWorkspace:
        return replace(super().under(name), of_block=self.root)

    @property
    def freezing(self) -> OpenWorkspace:
        """This workspace, wanting a machine on which its programs, or a job's frozen command, can
        go on where possible."""
        spec = self.spec
        process = spec.process if spec.freezes else "try" if self.thaws else "never"
        want = msgspec.structs.replace(spec.want, process=process)
        return replace(self, spec=msgspec.structs.replace(spec, want=want))

    def wanting(self, change: WantChange) -> OpenWorkspace:
        """This workspace with other wishes for one rental. InvalidInput where the GPU is not
        understood."""
        wishes_of(Want(gpu=change.gpu))
        change = msgspec.structs.replace(change, gpu=counted(change.gpu))
        spec = msgspec.structs.replace(self.spec, want=change.of(self.spec.want))
        return replace(self, spec=spec)

    def base(self, name: WorkspaceName, paths: list[str]) -> StoredWorkspace:
        """The workspace in the same store that keeps the environment of a stack."""
        of = self.spec
        spec = WorkspaceSpec(
            name, paths, parts=of.parts, part_bytes=of.part_bytes, compression=of.compression
        )
        sealing = None
        if self.store_key is not None or self.sealing is not None:
            sealing = _key_of(self.store_key or b"", name)
        return StoredWorkspace(spec, self.store, sealing)

    @property
    def home(self) -> StoredWorkspace | None:
        """The workspace in the same store that keeps a home's files beside this workspace; None
        where the store is not sealed."""
        if self.store_key is None:
            return None
        kept = self.base(home_of(self.spec.name), [HOME_ROOT])
        return kept.accepting_losses(self.spec.accept_changed, [])

    @property
    def at_home(self) -> OpenWorkspace:
        """The workspace of ``home`` without a provider, for actions on the store alone;
        InvalidInput where the store is not sealed."""
        home = self.home
        if home is None:
            raise InvalidInput(
                f"workspace {self.spec.name} is in a store block without a key, where no files of "
                "a home are kept"
            )
        return replace(
            self,
            spec=home.spec,
            sealing=home.sealing,
            providers=(),
            others=tuple,
            each=tuple,
            of_block=self.root,
        )

    @property
    def markets(self) -> Markets:
        return Markets(self.providers, self.others)

    @classmethod
    def of(
        cls, workspace: Workspace | str, on_away: Callable[[Away], None] | None = None
    ) -> OpenWorkspace:
        """Load the blocks that a workspace refers to; errors name the block and what to do.
        ``on_away`` is told of each wait for the store."""
        with loading_once():
            block = Workspace.of(workspace)
            tuning = block.open_tuning()
            spec, providers = block.spec(tuning), block.open_providers()
            store = block.open_store(on_away)
            identity = block.open_identity()
            store_key, price = block.store_key(), block.store_price()
            side = own_side()
        saved = block._block_document_name is not None
        return cls(
            spec=spec,
            store=store,
            providers=providers,
            identity=identity.identity(),
            owner=tuning.owner,
            others=open_all_providers,
            each=open_each_provider,
            project=block.project,
            budgets=cache(open_all_budgets),
            store_price=lambda: price,
            sealing=None if store_key is None else _key_of(store_key, spec.name),
            store_key=store_key,
            side=side,
            store_block=block.store.rpartition("/")[2],
            settings=cache(
                lambda: settings_of(block, sealed=store_key is not None) if saved else None
            ),
        )


def _key_of(store_key: bytes | RootOf, name: WorkspaceName) -> bytes | RootOf:
    """The key of a workspace, or what reads it from the store."""
    if callable(store_key):
        return lambda store: workspace_key(store_key(store), name)
    return workspace_key(store_key, name)


def check_volumes(providers: Sequence[Provider], spec: WorkspaceSpec) -> None:
    """InvalidInput if a machine of one of these providers would have a volume inside the
    workspace."""
    for provider in providers:
        for path, root in product(volumes_of(provider), spec.paths):
            if overlap(path, tidy_path(re.sub("^~", "/root", root))):
                raise InvalidInput(
                    f"workspace {spec.name}: a block of {provider.identity} mounts a volume at "
                    f"{path}, which overlaps the workspace's path {root}. What is on a volume is "
                    "not stored: mount it elsewhere, as at /data, and link to it. Nothing was "
                    "rented"
                )
