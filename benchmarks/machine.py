"""A local machine with a real agent, driven over SSH by the flows' own steps, without Prefect."""

from __future__ import annotations

import os
import resource
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import asyncssh

from benchmarks.other_tools import Cost
from flows.procedures.restore import restore_parts, restore_run
from flows.procedures.save import Snapshot
from flows.procedures.sync import Synchronisation
from tasks.deploy import note_ready
from tasks.plain_runner import PlainRunner
from tasks.restore import check_restore, finish_restore
from tasks.workspace import StoredWorkspace
from torpor.control.providers.local.provider import LocalProvider
from torpor.control.remote.restore import RemoteRestore
from torpor.control.remote.session import SshSession
from torpor.control.remote.snapshot import RemoteSnapshot
from torpor.control.remote.ssh import Identity
from torpor.control.rental.order import order_for
from torpor.control.reports import SyncReport
from torpor.control.safety import never_handed_over
from torpor.control.store.embedded import EmbeddedStore
from torpor.control.store.manifests import find_snapshot, read_manifest
from torpor.control.store.object_store import ObjectStore
from torpor.control.store.s3 import S3Store
from torpor.shared.format.keys import Seal
from torpor.shared.format.manifest import Manifest
from torpor.shared.values import Label, Machine, StoredSnapshot, Want, WorkspaceName, WorkspaceSpec

_NAME = WorkspaceName("bench")
_TICKS = os.sysconf("SC_CLK_TCK")


class BenchMachine:
    """Created, attached to, and destroyed at the end. ``workspace`` is the folder to fill."""

    def __init__(self, folder: Path, store: EmbeddedStore) -> None:
        self._provider = LocalProvider(folder)
        key = asyncssh.generate_private_key("ssh-ed25519")
        self._label = Label("benchmark", _NAME, secrets.token_hex(8))
        offer = self._provider.offers(Want())[0]
        self._machine = self._provider.create(order_for(offer, self._label, key))
        self._identity = Identity(key.export_private_key().decode())
        self.store = S3Store.connect(store.settings("torpor", root=bytes(32)))
        self.home = next(folder.glob("m-*/home"))
        self.workspace = self.home / "workspace"
        self._session: SshSession | None = None

    def __enter__(self) -> BenchMachine:
        self._session = self._open()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._session is not None:
            self._session.close()
        live = self._provider.find(self._machine.id)
        if isinstance(live, Machine):
            self._provider.destroy(live, never_handed_over(live, self._label))

    def attach(self) -> Cost:
        """Another session with the agent, from the login to its first words."""
        started = self._now()
        session = self._open()
        cost = self._since(started)
        session.close()
        return cost

    def snapshot(self, *, ends: bool = False) -> Cost:
        """Passes until nothing is new, manifest, verification; with ``ends`` also what a destroy
        would lose, as in a hibernation."""
        started = self._now()
        with PlainRunner():
            session = self._attached()
            with Snapshot(self._kept, session, self._machine, () if ends else None) as snapshot:
                snapshot.store_changes()
                snapshot.commit()
                snapshot.verify()
        return self._since(started)

    def feed(self, store: ObjectStore) -> tuple[Cost, int]:
        """One pass of a snapshot into that store, and the bytes that it sent. Nothing is
        committed."""
        spec = WorkspaceSpec(_NAME, [str(self.workspace)])
        started = self._now()
        remote = RemoteSnapshot(self._attached(), store, spec, None, secrets.token_hex(8))
        remote.begin()
        try:
            sent = remote.store(1).stored_bytes
            return self._since(started), sent
        finally:
            remote.end(committed=False)

    def restore(
        self,
        target: Path,
        first: Sequence[str] = (),
        when_first: Callable[[], None] = lambda: None,
        wanted: StoredSnapshot | None = None,
    ) -> Cost:
        """A snapshot, the newest unless it is named, into ``target``, checked as a wake
        checks it; ``first`` before the rest."""
        started = self._now()
        with PlainRunner() as runner:
            remote = RemoteRestore(
                self._attached(),
                self.store,
                wanted or self.newest(),
                None,
                runner.run,
                roots=[str(target)],
                first=first,
            )
            with restore_run(remote):
                restore_parts(remote, "benchmark", when_first=when_first)
                finish_restore(remote)
                check_restore(remote, False)
        return self._since(started)

    def note_ready(self) -> None:
        """What was used in the workspace by now comes first in the next restore."""
        with PlainRunner():
            note_ready(self._attached(), _NAME)

    def newest(self) -> StoredSnapshot:
        """The newest snapshot in the store."""
        return find_snapshot(self.store, _NAME, None)

    def manifest(self, wanted: StoredSnapshot) -> Manifest:
        return read_manifest(self.store, wanted, Seal(None))

    def sync(self, wanted: StoredSnapshot) -> tuple[Cost, SyncReport]:
        """The workspace becomes another snapshot."""
        started = self._now()
        with PlainRunner():
            report = Synchronisation(self._kept, self._attached(), self._machine.id, wanted).run()
        return self._since(started), report

    def _open(self) -> SshSession:
        endpoint = self._machine.endpoint
        if endpoint is None:
            raise SystemExit("the local machine has no address")
        return SshSession.open(endpoint, self._identity)

    def _attached(self) -> SshSession:
        if self._session is None:
            raise SystemExit("enter the machine first")
        return self._session

    @property
    def _kept(self) -> StoredWorkspace:
        return StoredWorkspace(WorkspaceSpec(_NAME, [str(self.workspace)]), self.store, None)

    def peak_bytes(self) -> int:
        """The agent's highest resident memory so far."""
        return max(_peak_of(pid) for pid in self.agent_pids())

    def connections(self, port: int) -> int:
        """The agent's established connections to ``port`` right now."""
        return max(_connections_of(pid, port) for pid in self.agent_pids())

    def _now(self) -> tuple[float, float, float]:
        own = resource.getrusage(resource.RUSAGE_SELF)
        agent = sum(map(_cpu_of, self.agent_pids()))
        return time.monotonic(), own.ru_utime + own.ru_stime + agent, agent

    def _since(self, started: tuple[float, float, float]) -> Cost:
        return Cost(*(now - then for now, then in zip(self._now(), started, strict=True)))

    def agent_pids(self) -> list[int]:
        """The agent's processes: those whose working directory is its home."""
        home = str(self.home / ".torpor")
        pids = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    if os.readlink(entry / "cwd") == home:
                        pids.append(int(entry.name))
                except OSError:
                    continue
        return pids


def _cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _peak_of(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in text.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def _connections_of(pid: int, port: int) -> int:
    sockets = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            sockets.add(os.readlink(fd))
    established = 0
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        remote_port, state, inode = int(fields[2][-4:], 16), fields[3], fields[9]
        established += remote_port == port and state == "01" and f"socket:[{inode}]" in sockets
    return established
