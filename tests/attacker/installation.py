"""An installation in memory, as somebody finds it who holds the key of its bucket: workspaces awake
and asleep, and every kind of record. It is built once, and put back for each round."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import msgspec

from flows import delete_snapshots, prune
from tasks.workspace import OpenWorkspace
from tests.fixtures.lab import FolderMarket, make_lab
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.near_agent import NearMachine, near_machines
from tests.fixtures.plain_flows import hibernate_plainly, run_plainly, wake_plainly
from tests.fixtures.rentals import handed_over
from torpor.control.jobs.records import Job, Stop
from torpor.control.measure.scratch import held
from torpor.control.remote.ssh import Identity
from torpor.control.rental.canaries import Canary, CanaryRecords
from torpor.control.rental.order import host_key_of
from torpor.control.safety import Warrant
from torpor.control.store.receipts import verified_snapshots
from torpor.control.store.signatures import ROOT_BYTES, Signer
from torpor.control.store.workspace_records import Settings, WorkspaceRecords
from torpor.control.upkeep.pins import pin
from torpor.machine.agent import snapshot, writing
from torpor.machine.tree import compare, walk
from torpor.shared.errors import HostKeyChanged
from torpor.shared.format.keys import workspace_key
from torpor.shared.values import (
    BENCHMARK,
    Endpoint,
    Host,
    Machine,
    MachineId,
    ObjectKey,
    StoredObject,
    WorkspaceName,
    WorkspaceSpec,
    reserved_name,
)
from torpor.shared.wire.protocol import request_line
from torpor.shared.wire.request import Request

AWAKE, ASLEEP, OWN, NEAR = (WorkspaceName(name) for name in ("demo", "other", "mine", "third"))
"""Of the bucket that is attacked: one with unsaved work on its machine, one asleep with jobs, one
on its user's own machine. ``NEAR``: of another bucket of the same key, with unsaved work."""
DESK: Final = "me@desk"
OPEN, STOPPED, ENDED, LONG_AGO = "0123456789ab", "ba9876543210", "aaaabbbbcccc", "ddddeeeeffff"
GONE: Final = WorkspaceName("gone")
"""Deleted on purpose: its block's record was in the bucket."""
SIDE: Final = "0a0a0a0a"
LOGIN: Final = "-----BEGIN OPENSSH PRIVATE KEY-----"
"""What a record of a sealed store has and nobody else reads."""
COMMANDS: Final = {name: ["train", name] for name in (OPEN, STOPPED, ENDED, LONG_AGO)}
"""The commands that the user asked for, by their jobs."""
_HOST_KEY: Final = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI"
_JUMP: Final = Endpoint("gate", 22, "me", _HOST_KEY + "gate")
_RACY_NS: Final = 10_000_000  # the clock of files ticks every 4 ms
Tree = dict[str, bytes]


class Bucket(MemoryStore):
    """A bucket, and every body that has lain under each name: who reads it may keep them."""

    def __init__(self, root: bytes, place: str) -> None:
        super().__init__()
        self.signer = Signer(root, place)
        self.bodies: dict[ObjectKey, list[bytes]] = {}

    def put(self, key: ObjectKey, body: bytes, **how: Any) -> StoredObject:
        done = super().put(key, body, **how)
        known = self.bodies.setdefault(key, [])
        if body not in known:
            known.append(bytes(body))
        return done

    def attack(self, key: ObjectKey, body: bytes) -> None:
        """A write of somebody else."""
        super().put(key, body)

    def names(self) -> list[ObjectKey]:
        return [found.key for found in self.list("")]

    def body(self, key: ObjectKey) -> bytes:
        return self.get(key, max_bytes=1 << 30)

    def kept(self) -> Callable[[], None]:
        """What it holds now; a call puts that back."""
        objects = dict(self._objects)
        bodies = {key: list(of) for key, of in self.bodies.items()}

        def put_back() -> None:
            self._objects = dict(objects)
            self.bodies = {key: list(of) for key, of in bodies.items()}

        return put_back


class Market(FolderMarket):
    """Says which machine it is about to end, and that it has."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.ending: Callable[[Machine], Callable[[], None]] = lambda machine: lambda: None

    def destroy(self, machine: Machine, warrant: Warrant) -> None:
        ended = self.ending(machine)
        super().destroy(machine, warrant)
        if machine.id not in self.alive:
            ended()


class Session:
    """A login on a machine, whose requests are heard before they are served."""

    def __init__(self, near: NearMachine, hear: Callable[[bytes], None]) -> None:
        self._near = near
        self._hear = hear

    def __getattr__(self, name: str) -> Any:
        return getattr(self._near, name)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._near.close()

    def call(self, request: Request[Any], **options: Any) -> Any:
        self._hear(request_line("heard", request))
        return self._near.call(request, **options)

    def execute(self, argv: list[str], **options: Any) -> Any:
        self._hear(" ".join(argv).encode())
        return self._near.execute(argv, **options)


@dataclass
class Installation:
    """``one`` is the bucket that is attacked. ``log_in``: who is asked for each login. ``keys``: of
    each workspace; None where its store is plain."""

    folder: Path
    one: Bucket
    two: Bucket
    market: Market
    opened: dict[WorkspaceName, OpenWorkspace]
    store_key: bytes | None
    desk: NearMachine
    log_in: Callable[[Endpoint], Callable[[bytes], None]] = lambda endpoint: lambda line: None
    put_back: Callable[[], None] = lambda: None
    met: set[str] = field(default_factory=set)
    """The hosts that somebody has logged in to."""

    @property
    def keys(self) -> dict[WorkspaceName, bytes | None]:
        return {name: one.key for name, one in self.opened.items()}

    def store_of(self, name: WorkspaceName) -> Bucket:
        return self.two if name == NEAR else self.one

    def home(self, host: str) -> Path:
        return self.desk.user_home if host == "desk" else self.folder / host

    def work(self, host: str) -> Tree:
        """The workspace's files on a machine."""
        place = self.home(host) / "workspace"
        files = [path for path in place.rglob("*") if path.is_file() and not path.is_symlink()]
        return {str(path.relative_to(place)): path.read_bytes() for path in files}

    def write(self, host: str, name: str, body: bytes) -> None:
        path = self.home(host) / "workspace" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)

    def host_key(self, host: str) -> str:
        """The key that its SSH server shows."""
        machine = self.market.alive.get(MachineId(host))
        if machine is None or machine.label is None:
            return key_of_own(host)
        return host_key_of(self.opened[AWAKE].identity.load(), machine.label).public

    def machines_of(self, name: WorkspaceName) -> list[MachineId]:
        alive = list(self.market.alive.values())
        return [one.id for one in alive if one.label is not None and one.label.workspace == name]

    def enter(
        self,
        endpoint: Endpoint,
        identity: Identity,
        *,
        pin: Callable[[str], None] | None = None,
        check: Callable[[], None] = lambda: None,
        **__: object,
    ) -> Session:
        """A login, as SSH makes it."""
        hear = self.log_in(endpoint)
        key = self.host_key(endpoint.host)
        if endpoint.host_key not in (None, key):
            raise HostKeyChanged(f"{endpoint.host} shows another host key than the one recorded")
        if endpoint.host == "desk":
            near = self.desk
        else:
            near = self.market.log_in(endpoint, identity, check=check)
        if pin is not None and endpoint.host_key is None:
            pin(key)
        self.met.add(endpoint.host)
        return Session(near, hear)

    def keep(self) -> None:
        """This is the state that ``put_back`` brings back."""
        market, template = self.market, self.folder.with_name(self.folder.name + "-kept")
        stores = [self.one.kept(), self.two.kept()]
        alive, orders, met = dict(market.alive), list(market.orders), set(self.met)
        shutil.copytree(self.folder, template, symlinks=True)

        def put_back() -> None:
            for near in (*market.near.values(), self.desk):
                near.runs.close()
            market.near.clear()
            shutil.rmtree(self.folder)
            shutil.copytree(template, self.folder, symlinks=True)
            for store in stores:
                store()
            market.alive, market.orders = dict(alive), list(orders)
            market.near.update({one: NearMachine(self.folder / one) for one in alive})
            self.desk = NearMachine(self.folder / "desk")
            self.met = set(met)

        self.put_back = put_back


def key_of_own(host: str) -> str:
    return _HOST_KEY + host


@contextmanager
def make_installation(sealed: bool) -> Iterator[Installation]:
    root = secrets.token_bytes(ROOT_BYTES)
    one, two = Bucket(root, "bucket/one"), Bucket(root, "bucket/two")
    with make_lab(one, sealed=sealed, parts=1) as lab:
        folder = lab.folder / "machines"
        market = Market(folder)
        made = Installation(
            folder, one, two, market, {}, lab.opened.store_key, NearMachine(folder / "desk")
        )
        of = replace(lab.opened, providers=(market,), log_in=made.enter)  # type: ignore[arg-type]
        for name in (AWAKE, ASLEEP, OWN, NEAR):
            key = of.store_key
            spec = msgspec.structs.replace(of.spec, name=name)
            made.opened[name] = replace(
                of,
                spec=spec,
                store=made.store_of(name),
                sealing=None if key is None else workspace_key(key, name),
                side=SIDE,
                settings=partial(settings_of, spec, sealed=key is not None),
            )
        with near_machines(market.greeting), _settled_soon():
            _furnish(made)
            made.keep()
            try:
                yield made
            finally:
                for near in (*market.near.values(), made.desk):
                    near.runs.close()
                two.close()
                one.close()


@contextmanager
def _settled_soon() -> Iterator[None]:
    """A file that was just written may be trusted sooner than a whole installation can wait."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(snapshot, "PAUSE_S", 0.02))
        for module in (walk, compare, writing):
            stack.enter_context(patch.object(module, "RACY_NS", _RACY_NS))
        yield


def settings_of(spec: WorkspaceSpec, *, sealed: bool, patterns: Sequence[str] = ()) -> Settings:
    """What the record of a workspace's block holds."""
    fields = {"name": spec.name, "paths": spec.paths, "exclude": list(patterns)}
    kept = {f"workspace/{spec.name}": fields}
    kept |= {"ssh-identity/default": {"private_key": LOGIN}} if sealed else {}
    return Settings(block=spec.name, blocks=kept)


def _raise(error: Exception) -> None:
    raise error


def _on_record(made: Installation) -> None:
    """The record of each block, after an earlier one; and of a workspace that was deleted."""
    of = made.opened[AWAKE].spec
    specs = [one.spec for one in made.opened.values()]
    for spec in (*specs, msgspec.structs.replace(of, name=GONE)):
        for store in (made.one, made.two):
            records = WorkspaceRecords(store, made.store_key)
            for patterns in (["*.old"], []):
                settings = settings_of(spec, sealed=made.store_key is not None, patterns=patterns)
                records.keep(spec.name, settings, SIDE, "host", _raise)
            if spec.name == GONE:
                records.delete(GONE)


def _furnish(made: Installation) -> None:
    _on_record(made)
    for name in (ASLEEP, AWAKE, NEAR):
        _use(made, made.opened[name])
    # the attacked workspace's name in the other bucket: everything under the same names
    _use(made, replace(made.opened[AWAKE], store=made.two))
    for name in (AWAKE, NEAR):
        woken = wake_plainly(made.opened[name])
        made.write(woken.machine, "saved.txt", b"saved again")
        hibernate_plainly(made.opened[name], destroy=False)
        made.write(woken.machine, "late.txt", b"not saved of " + name.encode())
    _jobs(made)
    made.write("desk", "own.txt", b"of my own")
    mine = made.opened[OWN]
    hibernate_plainly(mine, machine=DESK, destroy=False)
    mine.hosts.pin(Endpoint("elsewhere", 22, "me", jump=_JUMP), key_of_own("elsewhere"))
    of = made.opened[ASLEEP]
    newest, older, *_ = [name for name, _ in verified_snapshots(made.one, ASLEEP)]
    pin(made.one, ASLEEP, newest, "a paper needs it")
    run_plainly(of, delete_snapshots, snapshots=[older])
    run_plainly(of, prune, dry_run=False)
    canary = Canary(gpu="H100", gpu_count=1, region="US", flown_unix=time.time(), host=Host())
    CanaryRecords(made.one).keep(made.market.identity, canary)
    scratch = reserved_name(BENCHMARK, AWAKE)
    with held(made.one, scratch, "a run"):
        claim = [(key, made.one.body(key)) for key in made.one.names() if key.endswith("/claim")]
    for key, body in claim:  # its run was killed
        made.one.put(key, body)


def _use(made: Installation, opened: OpenWorkspace) -> None:
    """Woken and hibernated: a workspace with two verified snapshots and ended rentals."""
    machine, _ = handed_over(opened)
    made.write(machine.id, "saved.txt", b"first of " + opened.spec.name.encode())
    made.write(machine.id, "more/data", os.urandom(2000))
    hibernate_plainly(opened)
    woken = wake_plainly(opened)
    made.write(woken.machine, "saved.txt", b"second of " + opened.spec.name.encode())
    hibernate_plainly(opened)


def _jobs(made: Installation) -> None:
    for name, job in ((ASLEEP, ENDED), (AWAKE, LONG_AGO), (ASLEEP, OPEN), (ASLEEP, STOPPED)):
        for store in (made.one, made.two) if name == AWAKE else (made.one,):
            jobs = replace(made.opened[name], store=store).jobs
            record = Job(
                id=job, workspace=name, block=name, command=COMMANDS[job], created_unix=time.time()
            )
            taken = jobs.take(record, "a run")
            if job in (ENDED, LONG_AGO):
                taken = jobs.keep(msgspec.structs.replace(taken, state="running"))
                jobs.end(msgspec.structs.replace(taken, state="succeeded"))
            else:
                jobs.leave(taken, failed=False)
    stop = Stop("cancelled", "hibernate", "it is not needed", time.time())
    made.opened[ASLEEP].jobs.ask_stop(STOPPED, stop)
