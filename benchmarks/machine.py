"""A local machine with a real agent, driven over SSH as the flows drive it, but without Prefect."""

from __future__ import annotations

import os
import resource
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import asyncssh

from torpor.control.measure.peers import Cost
from torpor.control.providers.local import LocalProvider
from torpor.control.remote.restore import RemoteRestore
from torpor.control.remote.session import Session
from torpor.control.remote.snapshot import RemoteSnapshot
from torpor.control.remote.ssh import Identity
from torpor.control.remote.sync import RemoteSync
from torpor.control.safety import never_handed_over, verify_snapshot
from torpor.control.store.embedded import EmbeddedStore
from torpor.control.store.s3 import S3Store
from torpor.control.store.snapshots import find_snapshot, read_manifest
from torpor.shared.format.keys import Seal
from torpor.shared.format.manifest import Manifest
from torpor.shared.values import Label, StoredSnapshot, Want, WorkspaceName, WorkspaceSpec

_NAME = WorkspaceName("bench")
_TICKS = os.sysconf("SC_CLK_TCK")


class Synced(NamedTuple):
    """What a sync took; ``fetched_bytes`` with the manifest, ``copied_bytes`` on the machine."""

    cost: Cost
    fetched_bytes: int
    copied_bytes: int
    files: int
    seconds: dict[str, float]


class BenchMachine:
    """Created, attached to, and destroyed at the end. ``workspace`` is the folder to fill."""

    def __init__(self, folder: Path, store: EmbeddedStore) -> None:
        self._provider = LocalProvider(folder)
        key = asyncssh.generate_private_key("ssh-ed25519")
        public = key.export_public_key().decode().strip()
        self._label = Label("benchmark", _NAME, secrets.token_hex(8))
        offer = self._provider.offers(Want())[0]
        self._machine = self._provider.create(offer, self._label, public)
        self._identity = Identity(key.export_private_key().decode())
        self._store = S3Store.connect(store.settings("torpor"))
        self.home = next(folder.glob("m-*/home"))
        self.workspace = self.home / "workspace"
        self._session: Session | None = None

    def __enter__(self) -> BenchMachine:
        endpoint = self._machine.endpoint
        if endpoint is None:
            raise SystemExit("the local machine has no address")
        self._session = Session.open(endpoint, self._identity)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            self._session.close()
        live = self._provider.find(self._machine.id)
        if live is not None:
            self._provider.destroy(live, never_handed_over(live, self._label))

    def snapshot(self) -> Cost:
        """Passes until nothing is new, manifest, verification; as flows/hibernate.py does."""
        started = self._now()
        run = RemoteSnapshot(
            self._attached(), self._store, self._spec(), None, secrets.token_hex(8)
        )
        run.begin()
        number = 1
        with ThreadPoolExecutor(8) as threads:
            while (seen := run.scan(number)).read_files:
                parts = seen.parts
                list(threads.map(lambda p, n=number: run.store_part(n, p), parts))
                number += 1
        if run.lost_packs():
            raise SystemExit("the store lost packs")
        stored, _ = run.commit({})
        verify_snapshot(self._store, stored, Seal(None), run.reread)
        run.end(committed=True)
        return self._since(started)

    def restore(self, target: Path) -> Cost:
        """The newest snapshot into ``target``, every byte checked at the end."""
        started = self._now()
        wanted = find_snapshot(self._store, _NAME, None)
        run = RemoteRestore(
            self._attached(), self._store, wanted, None, secrets.token_hex(8), roots=[str(target)]
        )
        plan = run.begin()
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(run.restore_part, plan.parts))
        run.finish()
        checked = run.check(full=True)
        if checked.difference_count:
            raise SystemExit(f"restored wrongly: {checked.differences}")
        run.end()
        return self._since(started)

    def newest(self) -> StoredSnapshot:
        """The newest snapshot in the store."""
        return find_snapshot(self._store, _NAME, None)

    def manifest(self, wanted: StoredSnapshot) -> Manifest:
        return read_manifest(self._store, wanted, Seal(None))

    def sync(self, wanted: StoredSnapshot) -> Synced:
        """The workspace becomes another snapshot, as flows/sync.py does it."""
        started = self._now()
        run = RemoteSync(
            self._attached(), self._store, wanted, self._spec(), None, secrets.token_hex(8)
        )
        seconds = {}
        for step in ("look", "stage", "fetch", "change", "check"):
            began = time.monotonic()
            if step == "look":
                intent = run.begin()
            elif step == "stage":
                plan = run.stage()
            elif step == "fetch":
                with ThreadPoolExecutor(8) as threads:
                    parts = list(threads.map(run.sync_part, plan.parts))
            elif step == "change":
                run.finish()
            elif run.check(full=False).difference_count:
                raise SystemExit("synced wrongly")
            seconds[step] = time.monotonic() - began
        run.end()
        cost = self._since(started)
        fetched = sum(part.stored_bytes for part in parts) + wanted.manifest_bytes
        return Synced(cost, fetched, plan.copied_bytes, intent.staged, seconds)

    def _attached(self) -> Session:
        if self._session is None:
            raise SystemExit("enter the machine first")
        return self._session

    def _spec(self) -> WorkspaceSpec:
        return WorkspaceSpec(_NAME, [str(self.workspace)])

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
