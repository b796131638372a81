"""Random actions on a real store against a model of what must exist.

The model knows each snapshot's files. After every action what is listed must be what the model
knows, and every pack that a listed manifest names must be there as written; packs never change, so
each listed snapshot can be restored. Some actions restore one, and compare every byte.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from tests.fixtures.clocked_agent import ClockedStore, NearAgent, killed_at_request
from tests.fixtures.engine import WORKSPACE
from tests.fixtures.own_saves import book_of, saved
from torpor.control.store.manifests import open_manifest, snapshot_ids
from torpor.control.store.marks import SHORTEST_GRACE_S
from torpor.control.upkeep.deletion import delete_snapshot
from torpor.control.upkeep.pins import pin, pinned_ids, unpin
from torpor.control.upkeep.prune import PrunePlan, PruneRules, carry_out, plan_prune
from torpor.control.upkeep.verification import quick_look, to_verify
from torpor.shared.errors import (
    GrantExpired,
    SnapshotKept,
    SnapshotMissing,
    StillChanging,
    TorporError,
)
from torpor.shared.format.keys import Seal
from torpor.shared.format.names import marks_prefix, pack_key, packs_prefix
from torpor.shared.values import KIB, ObjectKey, SnapshotId
from torpor.shared.wire.autosave import Book

HOUR_S: Final = 3600.0
MOST_SNAPSHOTS: Final = 12
KILL_STEPS: Final = 36
NOTHING: Final = "nothing"
"""What an action returns that cannot be done now: another one is chosen."""
Tree = dict[str, bytes]


class Violation(AssertionError):
    """Something that must never be."""


@dataclass
class Machine:
    """A machine, the snapshot that it is in the middle of, and what it has to save by itself."""

    agent: NearAgent
    under_way: Iterator[str] | None = None
    book: Book | None = None
    given_unix: float = 0.0

    @property
    def tree(self) -> Tree:
        return {
            str(path.relative_to(self.agent.root)): path.read_bytes()
            for path in self.agent.root.rglob("*")
            if path.is_file()
        }


@dataclass
class Model:
    """One workspace on two machines. ``act`` does one random action and checks everything."""

    store: ClockedStore
    folder: Path
    rng: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    freed_bytes: int = 0
    _machines: list[Machine] = field(init=False)
    _snapshots: dict[SnapshotId, Tree] = field(default_factory=dict)
    _pinned: set[SnapshotId] = field(default_factory=set)
    _needed: dict[SnapshotId, dict[ObjectKey, tuple[int, str]]] = field(default_factory=dict)
    _plan: PrunePlan | None = None
    _numbers: int = 0

    def __post_init__(self) -> None:
        self._machines = [self._machine(name) for name in ("one", "two")]

    def act(self) -> str:
        """One action; returns what it was. Raises Violation."""
        actions: list[tuple[int, Callable[[], str]]] = [
            (18, self._change),
            (14, self._snapshot),
            (22, self._step),
            (8, self._delete),
            (2, self._pin),
            (2, self._unpin),
            (9, self._prune),
            (2, self._plan_now),
            (2, self._carry_out_late),
            (10, self._time_passes),
            (2, self._verify),
            (4, self._restore),
            (8, self._race),
            (4, self._stand_by),
            (8, self._own_save),
            (5, self._own_race),
            (4, self._kill_snapshot),
            (4, self._kill_prune),
            (2, self._kill_delete),
            (2, self._kill_restore),
            (1, self._lose_machine),
        ]
        if len(self._snapshots) > MOST_SNAPSHOTS:
            actions.append((60, self._delete))
        what = NOTHING
        while what == NOTHING:
            weights = [weight for weight, _ in actions]
            chosen = self.rng.choices([do for _, do in actions], weights)[0]
            try:
                what = chosen()
            except TorporError as error:
                name = chosen.__name__.strip("_").replace("_", " ")
                raise Violation(f"{name} failed: {type(error).__name__}: {error}") from error
        self.counts[what] += 1
        self.check(what)
        return what

    def check(self, after: str) -> None:
        """What must exist exists."""
        listed = set(snapshot_ids(self.store, WORKSPACE))
        if listed != set(self._snapshots):
            raise Violation(
                f"after {after}: lost {sorted(set(self._snapshots) - listed)}, "
                f"unknown {sorted(listed - set(self._snapshots))}"
            )
        if set(pinned_ids(self.store, WORKSPACE)) != self._pinned:
            raise Violation(f"after {after}: the pins are others")
        there = self._packs()
        for snapshot in listed:
            for key, needed in self._needs(snapshot).items():
                if there.get(key) != needed:
                    raise Violation(f"after {after}: {snapshot} lacks {key}")

    def end(self) -> None:
        """Every snapshot is restored once; and with all of them gone, nothing is left behind."""
        for machine in self._machines:
            self._abort(machine)
        for snapshot in list(self._snapshots):
            self._restore_one(snapshot)
        for snapshot in list(self._pinned):
            unpin(self.store, WORKSPACE, snapshot)
        for snapshot in list(self._snapshots):
            delete_snapshot(self.store, WORKSPACE, snapshot, even_newest=snapshot)
        for _ in range(3):
            self.store.advance(100 * HOUR_S)
            self._carry_out(self._look(PruneRules(without_snapshots=True)))
        left = [
            *self.store.list(packs_prefix(WORKSPACE)),
            *self.store.list(marks_prefix(WORKSPACE)),
        ]
        if left:
            raise Violation(f"{len(left)} objects are left of nothing: {left[:3]}")

    def close(self) -> None:
        for machine in self._machines:
            self._abort(machine)
            machine.agent.runs.close()

    # -- work and time

    def _change(self) -> str:
        machine = self._idle()
        if machine is None:
            return NOTHING
        root = machine.agent.root
        for _ in range(self.rng.randint(1, 4)):
            path = root / f"d{self.rng.randrange(3)}" / f"f{self.rng.randrange(8)}"
            if self.rng.random() < 0.25:
                path.unlink(missing_ok=True)
            else:
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(self._content())
        (root / "always").write_bytes(b"never empty")
        return "change"

    def _content(self) -> bytes:
        """From few contents, so that machines and snapshots share chunks."""
        seed = self.rng.randrange(40)
        big = seed % 4 == 0  # a chunk of its own
        size = 1100 * KIB if big else seed * 500
        return random.Random(seed).randbytes(4096) * (size // 4096) + bytes([seed])

    def _time_passes(self) -> str:
        self.store.advance(self.rng.choice([0.2, 0.9, 1.1, 3, 7, 25, 30, 80]) * HOUR_S)
        return "time passes"

    # -- snapshots

    def _snapshot(self) -> str:
        machine = self._idle()
        if machine is None:
            return NOTHING
        machine.under_way = machine.agent.snapshot_steps()
        while machine.under_way is not None:
            self._one_step(machine)
        return "snapshot"

    def _step(self) -> str:
        """One machine goes a few steps on with its snapshot, or begins one."""
        machine = self.rng.choice(self._machines)
        if machine.under_way is None:
            machine.under_way = machine.agent.snapshot_steps()
        for _ in range(self.rng.randint(1, 6)):
            if machine.under_way is not None:
                self._one_step(machine)
        return "part of a snapshot"

    def _race(self) -> str:
        """A snapshot stops right before its commit, or earlier, while what it stands on goes."""
        machine = self._idle()
        if machine is None:
            return NOTHING
        machine.under_way = machine.agent.snapshot_steps()
        stop = self.rng.choice(["begin", "scan", "store", "compare", "compare"])
        while machine.under_way is not None and not self._one_step(machine).startswith(stop):
            continue
        for _ in range(self.rng.choice([1, len(self._snapshots), 2 * len(self._snapshots)])):
            self._delete()
        for _ in range(self.rng.randint(1, 4)):
            self._prune()
            if self.rng.random() < 0.5:
                self._time_passes()
        while machine.under_way is not None:
            self._one_step(machine)
        return "snapshot in a race"

    def _one_step(self, machine: Machine) -> str:
        assert machine.under_way is not None
        try:
            done = next(machine.under_way)
        except StopIteration:
            machine.under_way = None
            return "ended"
        except (GrantExpired, StillChanging, SnapshotMissing):
            self._abort(machine)
            return "given up"
        if done == "commit":
            self._learn(machine)
        return done

    def _learn(self, machine: Machine) -> None:
        for snapshot in set(snapshot_ids(self.store, WORKSPACE)) - set(self._snapshots):
            self._snapshots[snapshot] = machine.tree

    def _kill_snapshot(self) -> str:
        machine = self._idle()
        if machine is None:
            return NOTHING
        killed = self._killed(machine.agent.hibernated)
        self._learn(machine)
        return f"snapshot, {killed}"

    # -- saves that a machine makes by itself

    def _stand_by(self) -> str:
        self._hand_over(self.rng.choice(self._machines))
        return "stand by"

    def _hand_over(self, machine: Machine) -> None:
        newest_first = sorted(self._snapshots, reverse=True)
        basis = self.rng.choice([None, *newest_first[:1], *newest_first])
        machine.book = book_of(machine.agent, machine.agent.root, basis)
        machine.given_unix = time.time()

    def _own_save(self) -> str:
        able = [
            machine for machine in self._machines if machine.book is not None and machine.book.saves
        ]
        return self._saved_by(self.rng.choice(able)) if able else NOTHING

    def _saved_by(self, machine: Machine) -> str:
        """Its control side is gone, maybe in the middle of a snapshot."""
        self._abort(machine)
        book = machine.book
        assert book is not None
        replace = msgspec.structs.replace
        machine.book = replace(book, saves=book.saves[1:], packs=book.packs[64:])
        try:
            self.store.refuse_late(book.saves[0].grant)
        except GrantExpired:
            return "own save, refused"
        mine = replace(book, saves=book.saves[:1], packs=book.packs[:64])
        saved(machine.agent, mine, given_unix=machine.given_unix)
        self._learn(machine)
        return "own save"

    def _own_race(self) -> str:
        """A machine saves itself while what it stands on goes, maybe what was marked long ago."""
        if self.rng.random() < 0.5:
            self._race()
            self.store.advance(25 * HOUR_S)
        machine = self.rng.choice(self._machines)
        self._hand_over(machine)
        for _ in range(self.rng.choice([1, len(self._snapshots), 2 * len(self._snapshots)])):
            self._delete()
        for _ in range(self.rng.randint(1, 3)):
            self._prune()
            if self.rng.random() < 0.4:
                self._time_passes()
        return f"{self._saved_by(machine)} in a race"

    def _lose_machine(self) -> str:
        machine = self.rng.choice(self._machines)
        self._abort(machine)
        machine.book = None
        shutil.rmtree(machine.agent.home)
        machine.agent.home.mkdir()
        return "machine lost"

    # -- keeping and deleting

    def _pin(self) -> str:
        if not self._snapshots or len(self._pinned) >= 3:
            return NOTHING
        snapshot = self.rng.choice(sorted(self._snapshots))
        pin(self.store, WORKSPACE, snapshot, "the model says so")
        self._pinned.add(snapshot)
        return "pin"

    def _unpin(self) -> str:
        if not self._pinned:
            return NOTHING
        snapshot = self.rng.choice(sorted(self._pinned))
        unpin(self.store, WORKSPACE, snapshot)
        self._pinned.discard(snapshot)
        return "unpin"

    def _delete(self) -> str:
        if not self._snapshots:
            return NOTHING
        among = self._snapshots if self.rng.random() < 0.2 else set(self._snapshots) - self._pinned
        if not among:
            return NOTHING
        snapshot = self.rng.choice(sorted(among))
        try:
            delete_snapshot(self.store, WORKSPACE, snapshot, even_newest=snapshot)
        except SnapshotKept:
            if snapshot not in self._pinned:
                raise Violation(f"{snapshot} is not pinned, and was kept") from None
            return "delete, refused"
        if snapshot in self._pinned:
            raise Violation(f"{snapshot} is pinned, and was deleted")
        del self._snapshots[snapshot]
        return "delete"

    def _kill_delete(self) -> str:
        free = sorted(set(self._snapshots) - self._pinned)
        if not free:
            return NOTHING
        snapshot = self.rng.choice(free)
        killed = self._killed(
            lambda: delete_snapshot(self.store, WORKSPACE, snapshot, even_newest=snapshot), 24
        )
        if snapshot not in snapshot_ids(self.store, WORKSPACE):  # either may be
            del self._snapshots[snapshot]
        return f"delete, {killed}"

    # -- prune

    def _rules(self) -> PruneRules:
        return PruneRules(
            grace_s=self.rng.choice([SHORTEST_GRACE_S, 24 * HOUR_S]),
            young_s=self.rng.choice([0, 2 * HOUR_S, 72 * HOUR_S]),
            dead_below=self.rng.choice([0, 0.25, 0.6]),
            rewrite_bytes=self.rng.choice([0, 1 << 30]),
            without_snapshots=True,
        )

    def _look(self, rules: PruneRules) -> PrunePlan:
        return plan_prune(self.store, WORKSPACE, Seal(None), rules)

    def _prune(self) -> str:
        if self._lacks_pinned():
            return NOTHING
        return self._carry_out(self._look(self._rules()))

    def _plan_now(self) -> str:
        self._plan = self._look(self._rules())
        return "a plan to prune"

    def _carry_out_late(self) -> str:
        """A prune that slept since it looked, while others pruned as well."""
        if self._plan is None:
            return NOTHING
        plan, self._plan = self._plan, None
        self._carry_out(plan)
        return "a late prune"

    def _carry_out(self, plan: PrunePlan) -> str:
        before = self._packs()
        done = carry_out(self.store, plan)
        after = self._packs()
        gone = {key: size for key, (size, _) in before.items() if key not in after}
        planned = {str(pack_key(WORKSPACE, bytes.fromhex(pack.id))) for pack in plan.free}
        if set(gone) - planned:
            raise Violation(f"{len(set(gone) - planned)} packs went that no plan named")
        if (done.freed.packs, done.freed.bytes) != (len(plan.free), plan.free_bytes):
            raise Violation(f"it said {plan.free_bytes} bytes, and reports {done.freed}")
        fresh = [
            pack for pack in plan.free if pack_key(WORKSPACE, bytes.fromhex(pack.id)) in before
        ]
        if sum(gone.values()) != sum(pack.bytes for pack in fresh):
            raise Violation(f"it reports {done.freed}, and {sum(gone.values())} bytes went")
        self.freed_bytes += sum(gone.values())
        return "prune that freed" if gone else "prune"

    def _kill_prune(self) -> str:
        rules = self._rules()
        return f"prune, {self._killed(lambda: carry_out(self.store, self._look(rules)))}"

    def _lacks_pinned(self) -> bool:
        return bool(self._pinned - set(self._snapshots))

    # -- verify and restore

    def _verify(self) -> str:
        if not self._snapshots:
            return NOTHING
        found = quick_look(self.store, WORKSPACE, Seal(None), to_verify(self.store, WORKSPACE))
        self._machines[0].agent.examine(found)
        verdicts = found.verdicts()
        if [v.snapshot for v in verdicts if v.whole] != sorted(self._snapshots, reverse=True):
            raise Violation(f"a full verify says {[v for v in verdicts if not v.whole]}")
        return "verify"

    def _restore(self) -> str:
        if not self._snapshots:
            return NOTHING
        self._restore_one(self.rng.choice(sorted(self._snapshots)))
        return "restore"

    def _kill_restore(self) -> str:
        """A restore that is killed, and goes on afterwards."""
        if not self._snapshots:
            return NOTHING
        snapshot = self.rng.choice(sorted(self._snapshots))
        killed = self._restore_one(snapshot, kill=True)
        return f"restore, {killed}"

    def _restore_one(self, snapshot: SnapshotId, *, kill: bool = False) -> str:
        self._numbers += 1
        folder = self.folder / f"back-{self._numbers}"
        agent = NearAgent(self.store, folder / "home", folder / "unused")
        target = folder / "target"
        killed = "not killed"
        try:
            if kill:
                killed = self._killed(lambda: agent.restore(snapshot, [target]), 12)
            agent.restore(snapshot, [target], resume=kill)
            agent.root = target
            if Machine(agent).tree != self._snapshots[snapshot]:
                raise Violation(f"{snapshot} came back otherwise than it was")
        except TorporError as error:
            raise Violation(f"{snapshot} is listed and cannot be restored: {error}") from error
        finally:
            agent.runs.close()
            shutil.rmtree(folder)
        return killed

    # -- what the actions share

    def _machine(self, name: str) -> Machine:
        root = self.folder / name / "workspace"
        root.mkdir(parents=True)
        (root / "always").write_bytes(b"never empty")
        return Machine(NearAgent(self.store, self.folder / name / "home", root))

    def _idle(self) -> Machine | None:
        idle = [machine for machine in self._machines if machine.under_way is None]
        return self.rng.choice(idle) if idle else None

    def _abort(self, machine: Machine) -> None:
        """As after kill -9 of the agent."""
        machine.under_way = None
        machine.agent.restart()

    def _killed(self, work: Callable[[], object], most: int = KILL_STEPS) -> str:
        def tolerant() -> None:
            with contextlib.suppress(GrantExpired, StillChanging, SnapshotMissing):
                work()

        killed = killed_at_request(self.store, self.rng.randint(1, most), tolerant)
        self.store.look()
        return "killed" if killed else "not killed"

    def _packs(self) -> dict[ObjectKey, tuple[int, str]]:
        return {
            pack.key: (pack.bytes, pack.md5 or "")
            for pack in self.store.list(packs_prefix(WORKSPACE))
        }

    def _needs(self, snapshot: SnapshotId) -> dict[ObjectKey, tuple[int, str]]:
        """From its manifest, which never changes."""
        if snapshot not in self._needed:
            manifest, _ = open_manifest(self.store, WORKSPACE, snapshot, Seal(None))
            self._needed[snapshot] = {
                pack_key(WORKSPACE, pack.id): (pack.size, pack.md5.hex()) for pack in manifest.packs
            }
        return self._needed[snapshot]
