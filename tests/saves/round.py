"""One round: a workspace whose machines save by themselves, are backed up, killed and lost, while
folders vanish; and what a wake brings then."""

from __future__ import annotations

import random
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import msgspec

from flows import backup, delete_snapshots
from tasks.plain_runner import PlainRunner
from tests.fixtures.lab import DEMO, Lab
from tests.fixtures.manifests import PLAIN
from tests.fixtures.near_agent import NearMachine
from tests.fixtures.plain_flows import (
    hibernate_plainly,
    replicate_plainly,
    run_plainly,
    wake_plainly,
)
from tests.saves.judge import Judge, Save, Tree, Version
from torpor.control.jobs.standby import book_for, renewed_s
from torpor.control.store.manifests import snapshot_ids
from torpor.control.store.receipts import verified_snapshots
from torpor.control.upkeep.autosaves import thin
from torpor.machine.agent.rescue import Rescue
from torpor.machine.agent.state import WorkspaceState
from torpor.machine.supervisor.saves import Rescued, SaveRequest
from torpor.shared.errors import SnapshotKept, TorporError, UnsavedWork
from torpor.shared.format import lineage
from torpor.shared.format.names import snapshots_prefix
from torpor.shared.transfer.transfer import Transfer
from torpor.shared.values import Endpoint, Grant, MachineId, SnapshotId
from torpor.shared.wire.autosave import Book

ACTIONS: Final = (10, 26)
SHORT_LINEAGE: Final = 6
"""Ancestors that a snapshot names: a line outgrows them within a round."""
DESK: Final = "root@desk:22"
_PACKS: Final = 8  # a save of a few small files writes one or two
_HOST_KEY: Final = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGFoZXJlaXNub3NlcnZlcmF0YWxsanVzdGE="
_SNAPSHOT: Final = re.compile(r"\b\d{8}T\d{6}Z-[0-9a-f]{8}\b")
NOTHING: Final = ""
"""What an action returns that cannot be done now."""


class Killed(BaseException):
    """A process ends as by SIGKILL."""


@dataclass
class Own:
    """A machine, and what it has to save by itself. ``sent``: how many snapshots it has made;
    ``newest``: the number of the newest that the store has accepted."""

    near: NearMachine
    rented: bool = True
    book: Book | None = None
    given_unix: float = 0.0
    made: list[str] = field(default_factory=list)
    sent: int = 0
    newest: int = 0


@dataclass
class Late:
    """A manifest on its way, whose sender has ended. ``tree``: what it holds; ``number``: how many
    snapshots its machine had made with it, and what that ``owed`` then."""

    grant: Grant
    blob: bytes
    machine: MachineId
    tree: Tree
    number: int
    owed: dict[Version, Save]


class Round:
    """Random actions, and then the end of every machine and wakes. ``violations``: what must never
    be; ``did``: what was done."""

    def __init__(self, lab: Lab, rng: random.Random) -> None:
        self.violations: list[str] = []
        self.did: list[str] = []
        self._lab = lab
        self._rng = rng
        self._judge = Judge()
        self._machines: dict[MachineId, Own] = {}
        self._late: list[Late] = []
        self._number = 0
        self._passed_s = 0.0
        self._ended: dict[MachineId, Own] = {}
        self._opened = lab.opened = replace(lab.opened, log_in=self._log_in)

    def run(self) -> None:
        """All of it."""
        with self._clock(), patch.object(lineage, "MOST_ANCESTORS", SHORT_LINEAGE):
            try:
                self._begin()
                for _ in range(self._rng.randint(*ACTIONS)):
                    self._act()
                    if self.violations:
                        return
                self._end()
            finally:
                for own in self._machines.values():
                    own.near.lose()

    # -- the course of a round

    def _begin(self) -> None:
        machine = self._lab.rent().id
        self._take_on(machine, None)
        place = self._place(machine)
        place.mkdir()
        for number in range(self._rng.randint(12, 24)):
            self._write(place / f"src/{number}.txt")
        self._did("first snapshot", self._back_up(machine))

    def _act(self) -> None:
        self._pass(self._rng.choice([2, 5, 60, 300, 1200]))
        actions: list[tuple[int, Callable[[MachineId], str]]] = [
            (14, self._edit),
            (6, self._check_out),
            (10, self._make_folder),
            (12, self._vanish),
            (30, self._save_by_itself),
            (8, self._save_late),
            (5, self._arrive),
            (7, self._back_up),
            (6, self._killed_backup),
            (8, self._watch),
            (5, self._replicate),
            (4, self._work_at_the_desk),
            (5, self._lose),
            (4, self._hibernate),
            (4, self._delete_by_name),
            (3, self._copy_the_bucket),
        ]
        if not self._rented():
            self._did("wake", self._wake())
            return
        did, action = NOTHING, None
        while did == NOTHING:
            weights = [weight for weight, _ in actions]
            action = self._rng.choices([do for _, do in actions], weights)[0]
            machine = self._rng.choice(sorted(self._machines))
            try:
                did = action(machine)
            except TorporError as error:
                did = f"failed: {type(error).__name__}: {error}"
                self.violations.append(f"{action.__name__} of {machine} {did}")
        assert action is not None
        self._did(f"{action.__name__.strip('_').replace('_', ' ')} ({machine})", did)

    def _end(self) -> None:
        self._end_machines()
        while self._late:
            self._did("arrive", self._arrive_one())
        for _ in range(3):
            self._pass(60)
            self._did("last wake", self._wake())
            if self.violations:
                return
            for machine in self._rented():
                self._write(self._place(machine) / "src/0.txt")
            self._end_machines()

    def _end_machines(self) -> None:
        for machine in self._rented():
            self._pass(5)
            if self._rng.random() < 0.5:
                self._did(f"hibernate ({machine})", self._hibernate(machine))
            if machine in self._machines:
                self._did(f"lose ({machine})", self._lose(machine))

    def _rented(self) -> list[MachineId]:
        return [name for name, own in self._machines.items() if own.rented]

    def _did(self, what: str, came: str) -> None:
        self.did.append(f"{what}: {came}")

    # -- the user's work

    def _edit(self, machine: MachineId) -> str:
        place = self._place(machine)
        for _ in range(self._rng.randint(1, 3)):
            path = place / f"src/{self._rng.randrange(24)}.txt"
            if path.exists() and self._rng.random() < 0.2:
                path.unlink()
            else:
                self._write(path)
        return f"{len(self._tree(machine))} files"

    def _check_out(self, machine: MachineId) -> str:
        """As another branch: files move, change, come and go; less than half of them."""
        files = sorted(path for path in (self._place(machine) / "src").glob("*") if path.is_file())
        for path in self._rng.sample(files, len(files) // 3):
            how = self._rng.choice(["move", "change", "delete"])
            if how == "move":
                self._number += 1
                path.rename(path.with_name(f"{path.stem}-{self._number}"))
            elif how == "change":
                self._write(path)
            else:
                path.unlink()
        return f"{len(self._tree(machine))} files"

    def _make_folder(self, machine: MachineId) -> str:
        self._number += 1
        folder = self._place(machine) / f"build{self._number}"
        for number in range(self._rng.choice([5, 30, 60, 60])):
            self._write(folder / f"{number}.bin")
        return folder.name

    def _vanish(self, machine: MachineId) -> str:
        folders = sorted(self._place(machine).glob("build*"))
        if not folders:
            return NOTHING
        folder = self._rng.choice(folders)
        shutil.rmtree(folder)
        return folder.name

    def _write(self, path: Path) -> None:
        """Something that is nowhere else, of a length that the file did not have before."""
        self._number += 1
        path.parent.mkdir(exist_ok=True)
        before = path.stat().st_size if path.exists() else -1
        content = b"%d " % self._number * self._rng.randint(1, 30)
        path.write_bytes(content + b"." * (len(content) == before))

    # -- what machines save by themselves

    def _save_by_itself(self, machine: MachineId) -> str:
        own = self._machines[machine]
        if not own.rented:
            return NOTHING
        for _ in range(2):  # after a failure, the look of `watch` gives it new grants
            done = self._rescue(own)
            self._learn(machine)
            if done.error == "":
                return done.saved.snapshot if done.saved else "unchanged"
            own.book = None
        self.violations.append(f"machine {machine} cannot save by itself: {done.error}")
        return done.error

    def _save_late(self, machine: MachineId) -> str:
        """The saving process is ended while its manifest is on its way."""
        own = self._machines[machine]
        if not own.rented:
            return NOTHING
        held: list[tuple[Grant, bytes]] = []
        real = Transfer.put

        def put(self: Transfer, grant: Grant, pieces: Sequence[Any], md5: bytes) -> None:
            if "/snapshots/" not in grant.key:
                real(self, grant, pieces, md5)
                return
            held.append((grant, b"".join(bytes(piece) for piece in pieces)))
            raise Killed

        tree = self._tree(machine)
        try:
            with patch.object(Transfer, "put", put):
                done = self._rescue(own)
        except Killed:
            own.sent += 1
            self._late.append(Late(*held[0], machine, tree, own.sent, self._judge.owed(machine)))
            return str(held[0][0].key)
        if done.error:
            own.book = None
        return done.error or "unchanged"

    def _arrive(self, machine: MachineId) -> str:
        return self._arrive_one() if self._late else NOTHING

    def _arrive_one(self) -> str:
        late = self._late.pop(self._rng.randrange(len(self._late)))
        self._lab.store.put(late.grant.key, late.blob)
        (snapshot,) = _SNAPSHOT.findall(late.grant.key)
        own = self._machines.get(late.machine) or self._ended[late.machine]
        if own.newest < late.number:
            own.newest = late.number
            self._judge.accept(late.machine, snapshot, late.tree, verified=False)
        else:
            self._judge.arrive(late.machine, snapshot, late.tree, late.owed)
        return snapshot

    def _rescue(self, own: Own) -> Rescued:
        """What the saving process does, and how it ends."""
        if own.book is None or not own.book.saves:
            self._hand_over(own)
        book = own.book
        assert book is not None
        change = msgspec.structs.replace
        own.book = change(book, saves=book.saves[1:], packs=book.packs[_PACKS:])
        mine = change(book, saves=book.saves[:1], packs=book.packs[:_PACKS])
        orders = SaveRequest(mine, own.given_unix, None, scheduled=True, made=[*own.made])
        try:
            with own.near.as_user():
                done = Rescue(own.near.home, orders, lambda _: None).run()
        except TorporError as error:
            return Rescued(None, str(error))
        if done.saved:
            own.made.append(done.saved.root)
        return done

    def _hand_over(self, own: Own) -> None:
        """A book on what its tree goes on from, as `watch` hands it over."""
        line = WorkspaceState(own.near.home, DEMO).past().line
        there = snapshot_ids(self._lab.store, DEMO)
        basis = line.snapshot if line and line.snapshot in there else None
        own.book = book_for(self._lab.store, self._opened.spec, None, "", basis, every_s=3600.0)
        own.given_unix, own.made = time.time(), []

    def _watch(self, machine: MachineId) -> str:
        """New grants where half of their time is over, and the end of superfluous saves."""
        for own in self._machines.values():
            if own.book and time.time() - own.given_unix > renewed_s(own.book.lasts_s):
                own.book = None
        return f"deleted {thin(self._lab.store, DEMO, PLAIN)}"

    # -- runs

    def _back_up(self, machine: MachineId) -> str:
        keep = self._rng.choice([0, 0, 1, 2])
        report: Any = run_plainly(self._opened, backup, machine=machine, keep_last=keep)
        self._learn(machine)
        self._machines[machine].book = None
        return f"{report.snapshot}, deleted {report.deleted}"

    def _killed_backup(self, machine: MachineId) -> str:
        """Its run is killed after the commit and before the check; the machine keeps its book."""

        def before(step: str) -> None:
            if step == "verify":
                raise Killed

        try:
            with PlainRunner(self._opened, wait_factor=0.001, before=before):
                backup.fn(DEMO, machine=machine)
        except Killed:
            self._learn(machine)
            return "killed"
        return "not killed"

    def _hibernate(self, machine: MachineId) -> str:
        if not self._machines[machine].rented:
            return NOTHING
        tree = self._tree(machine)
        try:
            hibernate_plainly(self._opened, machine=machine)
        except UnsavedWork:
            self._learn(machine)
            if self._rng.random() < 0.5:
                return "kept"
            hibernate_plainly(self._opened, machine=machine, accept_lost=["~/workspace"])
            self._learn(machine, tree)
            self._judge.drop("its user accepted the loss", machine, tree)
            self._forget(machine)
            return "loss accepted"
        self._learn(machine, tree)
        self.violations += self._judge.destroyed(machine, tree)
        self._forget(machine)
        return "destroyed"

    def _replicate(self, machine: MachineId) -> str:
        if len(self._rented()) > 1:
            return NOTHING
        report = replicate_plainly(self._opened, count=1)
        (replica,) = report.ready
        self._take_on(MachineId(replica.machine), report.snapshot)
        return f"{replica.machine} has {report.snapshot}"

    def _work_at_the_desk(self, machine: MachineId) -> str:
        """The user's own machine holds the workspace, too, and is backed up."""
        desk = MachineId(DESK)
        if desk in self._machines:
            return NOTHING
        near = NearMachine(self._lab.folder / "desk")
        self._machines[desk] = Own(near, rented=False)
        woken = wake_plainly(self._opened, machine=DESK)
        self._judge.begin(desk, woken.snapshot)
        return f"desk has {woken.snapshot}"

    def _lose(self, machine: MachineId) -> str:
        if not self._machines[machine].rented:
            return NOTHING
        del self._lab.market.alive[machine]
        self._lab.market.sweep()
        self._forget(machine)
        return "lost"

    def _wake(self) -> str:
        woken = wake_plainly(self._opened)
        machine = MachineId(woken.machine)
        self._take_on(machine, woken.snapshot)
        named = {SnapshotId(name) for name in _SNAPSHOT.findall("\n".join(woken.warnings))}
        listed = snapshot_ids(self._lab.store, DEMO)
        self.violations += self._judge.woken(self._tree(machine), named, listed)
        dropped = [name for name in sorted(named) if name in listed and name != woken.snapshot]
        said = f"{machine} has {woken.snapshot}, named {sorted(named)}"
        if dropped and self._rng.random() < 0.3:
            self._drop(self._rng.choice(dropped))
            said += f", dropped {dropped}"
        return said

    def _delete_by_name(self, machine: MachineId) -> str:
        """A snapshot that no wake has named: the bad one, or one that seems to be superfluous."""
        snapshot = self._rng.choice(snapshot_ids(self._lab.store, DEMO))
        self._drop(snapshot)
        return snapshot

    def _copy_the_bucket(self, machine: MachineId) -> str:
        """A copy has other times, in the order of the names."""
        prefix = snapshots_prefix(DEMO)
        for found in [*self._lab.store.list(prefix)]:
            blob = self._lab.store.get(found.key, max_bytes=1 << 30)
            self._lab.store.delete([found.key])
            self._lab.store.put(found.key, blob)
        return f"{len(snapshot_ids(self._lab.store, DEMO))} snapshots"

    def _drop(self, snapshot: SnapshotId) -> None:
        try:
            run_plainly(self._opened, delete_snapshots, snapshots=[snapshot])
        except SnapshotKept:  # it is the newest of all
            return
        self._judge.delete(snapshot, snapshot_ids(self._lab.store, DEMO))

    # -- what the actions share

    def _take_on(self, machine: MachineId, basis: SnapshotId | None) -> None:
        self._machines[machine] = Own(self._lab.market.near[machine])
        self._judge.begin(machine, basis)

    def _forget(self, machine: MachineId) -> None:
        self._ended[machine] = self._machines.pop(machine)

    def _learn(self, machine: MachineId, tree: Tree | None = None) -> None:
        """What the machine has stored since the last look."""
        store = self._lab.store
        verified = {name for name, receipt in verified_snapshots(store, DEMO)}
        for snapshot in snapshot_ids(store, DEMO):
            if snapshot not in self._judge.saves:
                now = self._tree(machine) if tree is None else tree
                self._judge.accept(machine, snapshot, now, verified=snapshot in verified)
                own = self._machines[machine]
                own.newest = own.sent = own.sent + 1

    def _place(self, machine: MachineId) -> Path:
        return self._machines[machine].near.user_home / "workspace"

    def _tree(self, machine: MachineId) -> Tree:
        place = self._place(machine)
        return {
            str(path.relative_to(place)): path.read_bytes()
            for path in place.rglob("*")
            if path.is_file()
        }

    def _log_in(self, endpoint: Endpoint, *given: Any, **options: Any) -> NearMachine:
        if endpoint.host != "desk":
            return self._lab.market.log_in(endpoint, *given, **options)
        if endpoint.host_key is None:
            options["pin"](_HOST_KEY)
        return self._machines[MachineId(DESK)].near

    def _pass(self, seconds: float) -> None:
        self._passed_s += seconds

    @contextmanager
    def _clock(self) -> Iterator[None]:
        real = time.time
        with (
            patch("time.time", lambda: real() + self._passed_s),
            patch("torpor.control.jobs.standby.datetime", _Dates),
            patch("torpor.control.remote.snapshot.datetime", _Dates),
        ):
            yield


class _Dates(datetime):
    """Dates by the clock of the round."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> _Dates:
        return cls.fromtimestamp(time.time(), tz)
