"""``python -m tests.saves.rules --actions 200000 --seed 1``: the rules of what is newest and of
what may go, without machines, against the judge. Exit 1 where work is lost, or named by nothing."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Final

from tests.campaign.command import Command, Found, Given
from tests.fixtures.manifests import PLAIN, entry, honest
from tests.fixtures.memory_store import MemoryStore
from tests.saves.judge import Judge, Save, Tree, Version
from torpor.control.safety import verify_snapshot
from torpor.control.store.manifests import find_snapshot, snapshot_ids
from torpor.control.upkeep.autosaves import delete_superseded, thin
from torpor.control.upkeep.deletion import delete_snapshot
from torpor.control.upkeep.history import taken_snapshots
from torpor.control.upkeep.lineage import choose_newest
from torpor.control.upkeep.pins import holds, pinned
from torpor.control.upkeep.retention import Retention, judge
from torpor.control.upkeep.superseded import Succession
from torpor.shared.errors import SnapshotKept, SnapshotMissing
from torpor.shared.format.lineage import AUTOSAVE, OWN_SAVE, Lineage
from torpor.shared.format.manifest import DIRECTORY, FILE, HOLE, Extent, encode_manifest
from torpor.shared.format.names import manifest_key, snapshots_prefix
from torpor.shared.values import SnapshotId, WorkspaceName, new_snapshot_id

DEMO: Final = WorkspaceName("demo")
ROOTS: Final = ["~/workspace"]
ROUND: Final = 40
"""Actions on one workspace; then another one begins."""
_BOOK: Final = 4  # names that are drawn at once


@dataclass
class Machine:
    """``tree``: its files; ``line``: what its tree goes on from. ``judged``: what the judge calls
    it, by another name after each time that it was set back. ``names``: drawn for its saves."""

    tree: Tree
    line: Lineage | None
    judged: str
    names: list[SnapshotId] = field(default_factory=list)


@dataclass
class Late:
    """A manifest on its way."""

    snapshot: SnapshotId
    blob: bytes
    judged: str
    tree: Tree
    number: int
    owed: dict[Version, Save]


class Rules:
    """What torpor decides by; a mutation replaces one of them."""

    def newest(self, store: MemoryStore) -> tuple[SnapshotId, set[SnapshotId]] | None:
        """What a wake brings, and the tips that it names."""
        chosen = choose_newest(store, DEMO, PLAIN)
        if chosen.snapshot is None:
            return None
        return chosen.snapshot.snapshot, {one.snapshot for one in chosen.aside}

    def named(self, store: MemoryStore, newest: SnapshotId, aside: Iterable[SnapshotId]) -> None:
        """What a wake pins."""
        succession = Succession(store, DEMO, PLAIN)
        for one in (newest, *aside):
            succession.hold(one)

    def backed_up(self, store: MemoryStore, snapshot: SnapshotId, keep_last: int) -> None:
        """A backup's check and what it deletes."""
        Succession(store, DEMO, PLAIN).hold(snapshot)
        found = find_snapshot(store, DEMO, snapshot)
        verified = verify_snapshot(store, found, PLAIN, machine="m", made_by="backup")
        delete_superseded(store, verified, PLAIN)
        taken = list(taken_snapshots(store, DEMO, PLAIN, ROOTS))
        verdicts = judge(taken, Retention(last=keep_last), pinned(store, DEMO))
        wanted = [one.snapshot for one in verdicts if not one.kept]
        Succession.of(store, verified, PLAIN).end(wanted, "no rule keeps it")

    def thin(self, store: MemoryStore) -> None:
        thin(store, DEMO, PLAIN)

    def delete(self, store: MemoryStore, snapshot: SnapshotId) -> None:
        """What a user has named."""
        Succession(store, DEMO, PLAIN).named(snapshot)
        delete_snapshot(store, DEMO, snapshot, named=True)

    def line(
        self,
        before: Lineage | None,
        snapshot: SnapshotId,
        there: list[SnapshotId],
        *,
        equal: bool,
        autosave: bool,
    ) -> Lineage:
        """What a machine says that its next snapshot goes on from; ``there``: what exists."""
        return Lineage.after(before, snapshot, equal=equal, autosave=autosave)


class Model:
    """Random actions on one workspace."""

    def __init__(self, rng: random.Random, rules: Rules) -> None:
        self.violations: list[str] = []
        self.did: list[str] = []
        self._rng, self._rules, self._judge = rng, rules, Judge()
        self._now_s = 0.0
        self._store = MemoryStore(lambda: self._now_s)
        self._machines: dict[str, Machine] = {}
        self._trees: dict[SnapshotId, tuple[Tree, Lineage]] = {}
        self._late: list[Late] = []
        self._ended: dict[str, Machine] = {}
        self._sent: Counter[str] = Counter()
        self._newest: Counter[str] = Counter()
        self._count = 0
        self._new_machine({}, None, None)
        for _ in range(20):
            self._write("m1", f"src.{self._number()}")
        self._back_up("m1")

    def act(self) -> None:
        """One action."""
        self._now_s += self._rng.choice([0, 0, 1, 5, 300, 3000])
        if not self._machines:
            self._wake("")
            return
        actions: list[tuple[int, Callable[[str], None]]] = [
            (20, self._edit),
            (10, self._make_folder),
            (10, self._vanish),
            (25, self._save),
            (5, self._save_late),
            (5, self._arrive),
            (8, self._back_up),
            (5, self._killed_backup),
            (6, self._thin),
            (4, self._replicate),
            (3, self._set_back),
            (2, self._forget),
            (7, self._lose),
            (4, self._delete_by_name),
            (2, self._copy),
        ]
        weights = [weight for weight, _ in actions]
        action = self._rng.choices([do for _, do in actions], weights)[0]
        action(self._rng.choice([*self._machines]))

    def end(self) -> None:
        """All machines are lost, what is late arrives, and somebody wakes what is there."""
        for machine in [*self._machines]:
            self._lose(machine)
        while self._late:
            self._arrive("")
        for _ in range(2):
            self._wake("")
            self._lose(next(iter(self._machines)))

    # -- a user's work

    def _number(self) -> int:
        self._count += 1
        return self._count

    def _write(self, machine: str, path: str) -> None:
        self._machines[machine].tree[path] = b"%d" % self._number()

    def _edit(self, machine: str) -> None:
        tree = self._machines[machine].tree
        for path in self._rng.sample([*tree], min(len(tree), 2)):
            if self._rng.random() < 0.3:
                del tree[path]
            else:
                self._write(machine, path)
        self._write(machine, f"src.{self._number()}")

    def _make_folder(self, machine: str) -> None:
        folder = self._number()
        for number in range(self._rng.choice([5, 30, 60])):
            self._write(machine, f"build{folder}.{number}")
        self._did(machine, f"made build{folder}")

    def _vanish(self, machine: str) -> None:
        tree = self._machines[machine].tree
        folders = sorted({path.split(".")[0] for path in tree})
        if not folders:
            return
        folder = self._rng.choice(folders)
        back = {path: held for path, held in tree.items() if path.startswith(f"{folder}.")}
        for path in back:
            del tree[path]
        if self._rng.random() < 0.3:  # a disk that is mounted again
            self._save(machine)
            self._machines[machine].tree.update(back)
        self._did(machine, f"lost {folder} ({len(back)})")

    # -- saves

    def _blob(self, of: Machine, machine: str, snapshot: SnapshotId, own: bool) -> bytes:
        equal = bool(of.line and of.line.snapshot in self._trees) and (
            of.tree == self._trees[of.line.snapshot][0] if of.line else False
        )
        of.line = self._rules.line(of.line, snapshot, self._listed(), equal=equal, autosave=own)
        self._trees[snapshot] = dict(of.tree), of.line
        manifest = honest(
            snapshot=snapshot,
            machine=machine,
            roots=ROOTS,
            entries=[
                entry(DIRECTORY, b""),
                *(
                    entry(FILE, path.encode(), size=int(n), extents=[Extent(HOLE, 0, int(n))])
                    for path, n in sorted(of.tree.items())
                ),
            ],
            chunks=[],
            packs=[],
            environment=of.line.record(),
            statistics={OWN_SAVE: 1, AUTOSAVE: 1} if own else {},
        )
        return encode_manifest(manifest, PLAIN)[0]

    def _draw(self, count: int) -> list[SnapshotId]:
        newest = max(snapshot_ids(self._store, DEMO), default=None)
        drawn = []
        now = datetime(2026, 11, 20, tzinfo=timezone.utc) + timedelta(seconds=self._now_s)
        for _ in range(count):
            newest = new_snapshot_id(now, newest)
            drawn.append(newest)
        return drawn

    def _own_name(self, of: Machine) -> SnapshotId:
        if not of.names:
            of.names = self._draw(_BOOK)
        return of.names.pop(0)

    def _put(self, machine: str, snapshot: SnapshotId, *, own: bool) -> None:
        of = self._machines[machine]
        self._store.put(manifest_key(DEMO, snapshot), self._blob(of, machine, snapshot, own))
        self._judge.accept(of.judged, snapshot, dict(of.tree), verified=not own)
        self._sent[of.judged] += 1
        self._newest[of.judged] = self._sent[of.judged]
        self._did(machine, f"stored {snapshot} ({len(of.tree)} files){' itself' if own else ''}")

    def _save(self, machine: str) -> None:
        self._put(machine, self._own_name(self._machines[machine]), own=True)

    def _save_late(self, machine: str) -> None:
        of = self._machines[machine]
        snapshot, owed = self._own_name(of), self._judge.owed(of.judged)
        blob = self._blob(of, machine, snapshot, True)
        self._sent[of.judged] += 1
        number = self._sent[of.judged]
        self._late.append(Late(snapshot, blob, of.judged, dict(of.tree), number, owed))
        self._did(machine, f"{snapshot} is on its way")

    def _arrive(self, machine: str) -> None:
        if not self._late:
            return
        late = self._late.pop(self._rng.randrange(len(self._late)))
        self._store.put(manifest_key(DEMO, late.snapshot), late.blob)
        if self._newest[late.judged] < late.number:
            self._newest[late.judged] = late.number
            self._judge.accept(late.judged, late.snapshot, late.tree, verified=False)
        else:
            self._judge.arrive(late.judged, late.snapshot, late.tree, late.owed)
        self._did(late.judged, f"{late.snapshot} arrives")

    def _back_up(self, machine: str) -> None:
        (snapshot,) = self._draw(1)
        self._put(machine, snapshot, own=False)
        keep_last = self._rng.choice([0, 1, 1, 2])
        self._rules.backed_up(self._store, snapshot, keep_last)
        self._machines[machine].names = []
        self._did(machine, f"backed up, keep_last={keep_last}: {self._listed()}")

    def _killed_backup(self, machine: str) -> None:
        (snapshot,) = self._draw(1)
        self._put(machine, snapshot, own=False)

    def _thin(self, machine: str) -> None:
        self._rules.thin(self._store)
        self._did("", f"thinned: {self._listed()}")

    # -- machines

    def _new_machine(self, tree: Tree, line: Lineage | None, basis: SnapshotId | None) -> str:
        name = f"m{len(self._machines) + len(self._ended) + 1}"
        self._machines[name] = Machine(dict(tree), line, name)
        self._judge.begin(name, basis)
        return name

    def _replicate(self, machine: str) -> None:
        if len(self._machines) < 3:
            self._bring()

    def _bring(self) -> tuple[SnapshotId, set[SnapshotId]] | None:
        found = self._rules.newest(self._store)
        if found is None:
            return None
        tree, line = self._trees[found[0]]
        name = self._new_machine(tree, line, found[0])
        self._did(name, f"is made from {found[0]}, aside {sorted(found[1])}")
        return found

    def _wake(self, machine: str) -> None:
        found = self._bring()
        if found is None:
            self._new_machine({}, None, None)
            return
        newest, aside = found
        self._rules.named(self._store, newest, aside)
        named = {*aside, *holds(self._store, DEMO)}
        tree = self._trees[newest][0]
        self.violations += self._judge.woken(tree, named, self._listed())

    def _set_back(self, machine: str) -> None:
        """A sync to an earlier snapshot."""
        of, snapshot = self._machines[machine], self._rng.choice(self._listed() or [None])
        if snapshot is None:
            return
        tree, of.line = self._trees[snapshot]
        of.tree, of.names = dict(tree), []
        of.judged += "'"
        self._judge.begin(of.judged, snapshot)
        self._did(machine, f"is set back to {snapshot}")

    def _forget(self, machine: str) -> None:
        """Its user removes torpor's folder."""
        self._machines[machine].line = None
        self._did(machine, "forgets what it goes on from")

    def _lose(self, machine: str) -> None:
        self._ended[machine] = self._machines.pop(machine)
        self._did(machine, "is lost")

    def _delete_by_name(self, machine: str) -> None:
        listed = self._listed()
        if not listed:
            return
        snapshot = self._rng.choice(listed)
        try:
            self._rules.delete(self._store, snapshot)
        except (SnapshotKept, SnapshotMissing):
            return
        self._judge.delete(snapshot, self._listed())
        self._did("", f"{snapshot} is deleted by name")

    def _copy(self, machine: str) -> None:
        """A copy of a bucket has other times, in the order of the names."""
        for found in [*self._store.list(snapshots_prefix(DEMO))]:
            blob = self._store.get(found.key, max_bytes=1 << 30)
            self._now_s += 1
            self._store.put(found.key, blob)
        self._did("", "the bucket is copied")

    def _listed(self) -> list[SnapshotId]:
        return snapshot_ids(self._store, DEMO)

    def _did(self, machine: str, what: str) -> None:
        self.did.append(f"{machine} {what}".strip())


def run(seed: int, actions: int, rules: Rules | None = None, most: int = 5) -> Found:
    """So many actions, on one workspace after the other, until ``most`` violations."""
    violations: list[str] = []
    counts: Counter[str] = Counter()
    done = number = 0
    while done < actions and len(violations) < most:
        model = Model(random.Random(f"{seed}:{number}"), rules or Rules())
        for _ in range(ROUND):
            model.act()
            done += 1
            if model.violations:
                break
        else:
            model.end()
        counts.update(did.split()[1] if len(did.split()) > 1 else did for did in model.did)
        if model.violations:
            print("\n  ".join([f"workspace {number}:", *model.did]), flush=True)
        violations += [f"workspace {number}: {one}" for one in model.violations]
        number += 1
    return Found(f"{done} actions on {number} workspaces", violations, dict(counts))


def _carry_out(seed: int, actions: int, given: Given) -> Found:
    return run(seed, actions)


COMMAND = Command("tests.saves.rules", "actions", 200_000, _carry_out)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
