"""A tree that is being restored: made, finished and compared, what comes first before the rest.

If anything comes first, every file is written in a directory of torpor's own, and gets its name
when it is complete: a program that was started on what came first finds no file, not zeros.

What comes first is in use from the moment it is finished: a program that was started on it may
change it. It is not written again, and what was changed is not compared, as after a restore.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable, Container, Iterable, Sequence
from typing import NamedTuple

from torpor.machine.agent.call import Call
from torpor.machine.agent.goal import Goal, first_few, shown
from torpor.machine.agent.in_use import InUse
from torpor.machine.pipeline.download import FetchPlan, RestoreJournal, in_pieces
from torpor.machine.tree.abilities import FilesystemAbilities
from torpor.machine.tree.compare import Comparison
from torpor.machine.tree.first import First
from torpor.machine.tree.names import Signature
from torpor.machine.tree.walk import RACY_NS
from torpor.machine.tree.write import TreeWriter
from torpor.shared.errors import InvalidInput
from torpor.shared.format.computed import SelectedElements
from torpor.shared.format.manifest import DIRECTORY, FILE, HOLE, Entry, described
from torpor.shared.format.rows import NO_CHUNK


class ComparedDisk(NamedTuple):
    """``changed``: names in use that are no longer as they were restored."""

    comparison: Comparison
    changed: list[str]


class Writing:
    """What is fetched of a goal, and the tree that it is written into."""

    def __init__(
        self,
        goal: Goal,
        plan: FetchPlan,
        journal: RestoreJournal,
        first: First,
        in_use: InUse,
        stage: bytes = b"",
        abilities: Sequence[FilesystemAbilities] = (),
    ) -> None:
        self.plan = plan
        in_use.attributes.abilities = abilities
        self.writer = TreeWriter(goal.targets, in_use.attributes, stage)
        self._goal = goal
        self._entries = goal.manifest.entries
        self._journal = journal
        self._first = first
        self._in_use = in_use
        self._finished_ns = 0
        self._resumed = bool(plan.done)
        self._read_back = False

    @property
    def journal(self) -> RestoreJournal:
        return self._journal

    def prepare(self) -> None:
        """Make directories and big files; nothing that is in use is touched."""
        is_new, was_staged = self._journal.done() is None, self._journal.staged
        if is_new:
            self._in_use.clear()
        in_use = self._in_use.signatures
        self._journal.begin(staged=self.writer.staged)
        afresh = not self.plan.done and not in_use

        def is_stale(entry: Entry) -> bool:
            """Whether a file that is there must be written again: an earlier run named it before it
            was complete.

            A program may have made it since the first names were finished; then the restored file
            still lies beside it, staged.
            """
            if is_new or afresh or entry.kind != FILE:
                return afresh and not is_new
            return (in_pieces(entry) or not was_staged) and self._lacks(entry)

        made = self.writer.prepare(
            self._others(),
            in_pieces,
            afresh=afresh,
            stale=is_stale,
            passages=self._passages(),
        )
        self.writer.close()
        # Their content is gone; and after a restart, nobody knows what programs have changed.
        emptied = any(_chunks(entry) & self.plan.done for entry in made)
        self._read_back = self._in_use.lapsed or emptied

    def finish_first(self, call: Call, check: Callable[[], None]) -> Comparison:
        """Finish and compare what comes first; without a difference it is in use from now on.

        Contents that this run wrote were checked before, and are read back in the end; those of an
        earlier run are read back now: they may be from before the machine was started again.
        """
        numbers = [n for n in sorted(self._first.ranks) if n not in self._in_use.signatures]
        self._finish(self._numbered(numbers))
        self.writer.open_passages(self._numbered(sorted(self._first.passages)))
        self.writer.close()
        compared = self._compare(self._numbered(numbers), call, check, full=self._resumed)
        if compared.differences:
            self.begin_again()
        else:
            self._in_use.add(dict(zip(numbers, compared.signatures, strict=True)))
        return compared

    def finish(self) -> list[str]:
        """Finish the rest, once every chunk is there. Returns warnings."""
        self._finished_ns = time.time_ns() - RACY_NS  # the clock of files is behind
        self._finish(self._others())
        self.writer.close()
        return self.writer.attributes.noted()

    def compare(self, call: Call, check: Callable[[], None], *, full: bool) -> ComparedDisk:
        """Compare everything but what programs have changed since it was in use."""
        in_use, full = self._in_use.signatures, full or self._read_back
        if not in_use:
            return ComparedDisk(self._compare(self._entries, call, check, full=full), [])
        changed = {number for number in in_use if self._is_changed(number)}
        numbers = [number for number in range(len(self._entries)) if number not in changed]
        compared = self._compare(self._numbered(numbers), call, check, full=full)
        whole = Comparison(len(self._entries))
        for number, signature in zip(numbers, compared.signatures, strict=True):
            whole.signatures[number] = signature
        for place, words in compared.found:
            if numbers[place] in in_use and self._is_changed(numbers[place]):
                changed.add(numbers[place])  # while it was compared
            else:
                whole.found.append((numbers[place], words))
        names = [self._entries[n] for n in sorted(changed)]
        return ComparedDisk(whole, [shown(name.path) for name in names if name.kind != DIRECTORY])

    def begin_again(self) -> None:
        """Forget what was fetched: the comparison failed, so the next run fetches everything."""
        self._in_use.clear()
        self._journal.restart()

    def end(self) -> None:
        """The restore is complete."""
        self._journal.clear()
        self._in_use.clear()

    def _finish(self, entries: Sequence[Entry]) -> None:
        taken = self.writer.finish(entries, in_pieces)
        if taken:
            names = ", ".join(first_few([repr(shown(entry.path)) for entry in taken]))
            raise InvalidInput(
                f"{names}: programs on the machine made these names while the snapshot, which has "
                "them too, was restored; nothing was overwritten. Move them away, and wake again, "
                "which continues; or list them in the workspace's `first`, so that they are there "
                "before the programs start"
            )

    def _passages(self) -> Container[tuple[int, bytes]]:
        """The directories that programs may pass already: those of what is in use, or all of them
        where an earlier run had another order."""
        in_use = self._in_use.signatures
        if in_use.keys() <= self._first.ranks.keys():
            return self._first.places(self._entries) if in_use else ()
        return {(entry.root, entry.path) for entry in self._entries if entry.kind == DIRECTORY}

    def _lacks(self, entry: Entry) -> bool:
        """Whether content of a file is still to be fetched."""
        return not _chunks(entry) <= self.plan.done

    def _others(self) -> Sequence[Entry]:
        """Names that are not in use; where files are not staged, without those that are complete as
        soon as they are there."""
        in_use = self._in_use.signatures
        if self.writer.staged and not in_use:
            return self._entries
        chunks = described(self._entries).chunks
        every = self.writer.staged
        left = (n for n, c in enumerate(chunks) if (every or c == NO_CHUNK) and n not in in_use)
        return SelectedElements(self._entries, array("Q", left))

    def _numbered(self, numbers: Iterable[int]) -> list[Entry]:
        return [self._entries[number] for number in numbers]

    def _compare(
        self, entries: Sequence[Entry], call: Call, check: Callable[[], None], *, full: bool
    ) -> Comparison:
        return self._goal.of(entries).compare(
            call,
            check,
            full=full,
            attributes=self.writer.attributes,
            in_use_ns=self._finished_ns if self._in_use.signatures else None,
        )

    def _is_changed(self, number: int) -> bool:
        """Whether the name differs from what it was when it was finished."""
        entry, then = self._entries[number], self._in_use.signatures[number]
        try:
            now = os.lstat(os.path.join(self._goal.targets[entry.root], entry.path))
        except OSError:
            return True
        return then is not None and Signature.of(now) != then


def _chunks(entry: Entry) -> set[int]:
    """What the content of a file consists of."""
    return {extent.chunk for extent in entry.extents} - {HOLE}
