"""Whether a tree is still equal to what it was. Walks may have found names that differ from what
was held; their files were read again, and may be equal."""

from __future__ import annotations

from torpor.machine.tree.names import Names
from torpor.machine.tree.walk import Walk
from torpor.shared.format.manifest import DIRECTORY, FILE, Entry


class Equality:
    """Compares each walk with what was held before the first. The time of a directory does not
    count, because it changes with every name in the directory, also an excluded one. After one walk
    that has found another difference, the tree counts as changed, whatever later walks find."""

    def __init__(self, before: Names) -> None:
        self._count = before.held_count
        self._changed = False
        self._read: dict[tuple[int, bytes], Entry] = {}

    def saw(self, held: Names, seen: Walk) -> None:
        """Note a walk. ``held``: the names that the walk ``seen`` was given."""
        self._changed = self._changed or len(seen.names) != self._count
        for position in seen.fresh:
            if self._changed:
                return
            entry = seen.names.entries[position]
            before = held.held(entry.root, entry.path)
            if before is None or before.entry.kind != entry.kind:
                self._changed = True
            elif entry.kind == FILE:
                self._read.setdefault((entry.root, entry.path), before.entry)
            elif not _are_equal(before.entry, entry):
                self._changed = True

    def holds(self, held: Names) -> bool:
        """Whether the tree is equal. ``held``: the names with the content of every file that was
        read, in chunks of one table."""
        if self._changed:
            return False
        now = ((before, held.held(root, path)) for (root, path), before in self._read.items())
        return all(found is not None and _are_equal(before, found.entry) for before, found in now)


def _are_equal(before: Entry, now: Entry) -> bool:
    return (
        (before.mode, before.uid, before.gid) == (now.mode, now.uid, now.gid)
        and (before.mtime_ns == now.mtime_ns or now.kind == DIRECTORY)
        and (before.size, before.target, before.xattrs) == (now.size, now.target, now.xattrs)
        and (before.digest == now.digest if now.digest else before.extents == now.extents)
        and not now.changed
    )
