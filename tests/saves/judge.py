"""What a workspace owes its user: the last content that each machine has saved of each file."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from torpor.shared.values import SnapshotId

FEW: Final = 10
"""Fewer files than these are never most of a workspace."""
Tree = dict[str, bytes]


@dataclass(eq=False)
class Version:
    """A content that a machine saved of a path. ``over``: why nobody is owed it any more.
    ``missed``: its machine has saved itself without it since, and nobody has deleted it; new files
    do not make up for it later."""

    path: str
    content: bytes
    machine: str
    over: str = ""
    missed: bool = False


@dataclass(eq=False)
class Save:
    """A snapshot that the store has accepted. ``verified``: by the run that made it: its machine
    compares the next ones with it. ``owed``: what its machine owed when it was made, and
    the last save of each that held it."""

    snapshot: SnapshotId
    tree: Tree
    verified: bool
    owed: dict[Version, Save] = field(default_factory=dict)


class Judge:
    """Learns of each save and each restore, and judges each wake and each end of a machine."""

    def __init__(self) -> None:
        self.saves: dict[SnapshotId, Save] = {}
        self._lines: dict[str, dict[Version, Save]] = {}
        self._misses: dict[str, set[Version]] = {}
        """What each machine has saved itself without, and nobody has deleted there."""
        self._had: dict[str, set[str]] = {}
        """The paths that each machine's disk has held, as far as saves and restores show."""
        self._newest: dict[str, Tree] = {}
        """What each machine has saved last."""
        self._holders: dict[Version, Save] = {}
        """The last save of all machines that held it."""

    def begin(self, machine: str, basis: SnapshotId | None = None) -> None:
        """The machine goes on from a snapshot."""
        owed = self.saves[basis].owed if basis else {}
        self._had[machine] = set(self.saves[basis].tree if basis else ())
        self._misses[machine] = set()
        self._lines[machine] = dict(owed)  # also what another machine has deleted since

    def accept(self, machine: str, snapshot: SnapshotId, tree: Tree, *, verified: bool) -> None:
        """The store has a snapshot that the machine made of ``tree`` after all of its others."""
        save = self.saves[snapshot] = Save(snapshot, tree, verified)
        self._newest[machine] = tree
        line, contents = self._lines[machine], set(tree.values())
        misses = self._misses.setdefault(machine, set())
        self._had[machine].update(tree)
        for version, holder in list(line.items()):
            if tree.get(version.path) == version.content:
                self._hold(version, save, line)
                misses.discard(version)
                continue
            if version.path in tree:
                version.over = f"{machine} overwrote it"
            elif version.content in contents:
                version.over = f"{machine} moved it"
            elif not (version in misses or is_missed(holder.tree, tree)):
                version.over = f"{machine} deleted it"
            version.missed = not version.over
            (misses.discard if version.over else misses.add)(version)
            if version.over:
                del line[version]
        held = {v.path for v in line if tree.get(v.path) == v.content}
        for path, content in tree.items():
            if path not in held:
                self._hold(Version(path, content, machine), save, line)
        save.owed = dict(line)

    def owed(self, machine: str) -> dict[Version, Save]:
        """What the machine owes now, and the last save of each that held it."""
        return dict(self._lines[machine])

    def arrive(
        self, machine: str, snapshot: SnapshotId, tree: Tree, before: dict[Version, Save]
    ) -> None:
        """The store has a snapshot that is older than others which the machine has made since: they
        have seen what it holds overwritten or deleted, also what it had back of what was missed
        before. ``before``: what the machine owed then."""
        line = self._lines[machine]
        holds = {v: of for v, of in line.items() if tree.get(v.path) == v.content}
        save = self.saves[snapshot] = Save(snapshot, tree, False, before | holds)
        now = self._newest.get(machine, tree)
        for version in holds if not is_missed(tree, now) else ():
            if version.missed and version.path not in now:
                version.over = f"{machine} had it back, and deleted it"
        known = {version.path for version in holds}
        for path, content in tree.items():
            if path not in known:  # it alone had that, and its machine has saved later
                save.owed[Version(path, content, machine, "it is older")] = save
        for version, holder in before.items():
            if line.get(version) is not holder or tree.get(version.path) == version.content:
                continue
            if version.path in tree:
                version.over = f"{machine} overwrote it"
            elif not is_missed(holder.tree, tree):
                version.over = f"{machine} deleted it"

    def drop(self, why: str, machine: str, tree: Tree) -> None:
        """The user has said that what the machine misses may go."""
        for version in list(self._lines[machine]):
            if tree.get(version.path) != version.content:
                version.over = why
                del self._lines[machine][version]

    def delete(self, snapshot: SnapshotId, listed: Iterable[SnapshotId]) -> None:
        """The user has deleted it by name: nobody is owed what it alone had, nor what else is equal
        to it has, nor what was missed since, of which it was the last holder."""
        gone = self.saves[snapshot].tree
        for holders in (*self._lines.values(), self._holders):
            for version, holder in [*holders.items()]:
                if holder.snapshot == snapshot and not version.missed:
                    holders[version] = self._another(version, listed) or holder
        left = [one for one in listed if one in self.saves and self.saves[one].tree != gone]
        for version, holder in self._holders.items():
            if version.missed and holder.snapshot == snapshot:
                version.over = version.over or "its user dropped the last save that held it"
            if _has(version, [gone]) and self._another(version, left) is None:
                version.over = version.over or "its user deleted the snapshot"

    def destroyed(self, machine: str, tree: Tree) -> list[str]:
        """Why the machine had to be kept, that was ended with this tree. What it never held, as
        the state that it was woken from lacks that, was named by its wake."""
        missed = [
            version
            for version, holder in self._lines[machine].items()
            if holder.verified and not version.over and version.path not in tree
            if version.path in self._had[machine]
        ]
        if not missed:
            return []
        return [f"machine {machine} was ended and missed {_named(missed)} of a verified snapshot"]

    def woken(
        self, tree: Tree, named: Collection[SnapshotId], listed: Collection[SnapshotId]
    ) -> list[str]:
        """What a wake with this tree brings nowhere and names nowhere, or names in vain."""
        there = [self.saves[name].tree for name in named if name in listed and name in self.saves]
        known = [self.saves[name] for name in listed if name in self.saves]
        every = [save.tree for save in known]
        gone = [name for name in named if name not in listed]
        violations = [f"{name} is named, and does not exist" for name in gone]
        lost: dict[tuple[str, SnapshotId, str], list[Version]] = {}
        for version, holder in self._holders.items():
            if version.over or _has(version, [tree, *there]):
                continue
            held = _has(version, every)
            how = "is brought by no wake, and named by none" if held else "is in no snapshot"
            lost.setdefault((version.machine, holder.snapshot, how), []).append(version)
        return violations + [
            f"{_named(versions)}, which machine {machine} saved last in {snapshot}, {how}"
            for (machine, snapshot, how), versions in lost.items()
        ]

    def _another(self, version: Version, listed: Iterable[SnapshotId]) -> Save | None:
        """The newest save that is there and holds it."""
        there = [self.saves[name] for name in listed if name in self.saves]
        owed = (one for one in there[::-1] if version in one.owed)
        return next((one for one in owed if _has(version, [one.tree])), None)

    def _hold(self, version: Version, save: Save, line: dict[Version, Save]) -> None:
        version.missed = False
        line[version] = self._holders[version] = save


def is_missed(before: Tree, now: Tree) -> bool:
    """Whether ``now`` lacks most of what ``before`` held, which is not taken for a deletion. Files
    that were moved are there; new files make up for others."""
    contents = set(now.values())
    gone = [path for path, held in before.items() if path not in now and held not in contents]
    return len(gone) >= FEW and 2 * len(now) < len(before)


def _has(version: Version, trees: Iterable[Mapping[str, bytes]]) -> bool:
    return any(tree.get(version.path) == version.content for tree in trees)


def _named(versions: list[Version]) -> str:
    return f"{len(versions)} files such as {min(version.path for version in versions)}"
