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
from torpor.machine.tree.write_back import WriteBack
from torpor.shared.errors import DiskFull, InvalidInput, MachineError
from torpor.shared.format.computed import SelectedElements
from torpor.shared.format.manifest import DIRECTORY, FILE, HARDLINK, HOLE, Entry, described
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
        self._write_back: WriteBack | None = None
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
        self._write_back = WriteBack(self._goal.targets)
        # Their content is gone; and after a restart, nobody knows what programs have changed.
        emptied = any(_chunks(entry) & self.plan.done for entry in made)
        self._read_back = self._in_use.lapsed or emptied

    def wrote(self, size: int) -> None:
        """So many bytes more of the content are written."""
        if self._write_back is not None:
            self._write_back.wrote(size)

    def finish_first(self, call: Call, check: Callable[[], None]) -> Comparison:
        """Finish and compare what comes first; without a difference it is in use from now on.

        Contents of an earlier run are read back: they may be from before the machine was started
        again.
        """
        numbers = [n for n in sorted(self._first.ranks) if n not in self._in_use.signatures]
        self._finish(numbers)
        self.writer.open_passages(self._numbered(sorted(self._first.passages)))
        self.writer.close()
        compared = self._compare(numbers, call, check, full=False)
        if compared.differences:
            self.begin_again()
        else:
            self._in_use.add(dict(zip(numbers, compared.signatures, strict=True)))
        return compared

    def finish(self) -> list[str]:
        """Finish the rest, once every chunk is there. Returns warnings."""
        self._finished_ns = time.time_ns() - RACY_NS  # the clock of files is behind
        self._finish(self._other_numbers())
        self.writer.close()
        return self.writer.attributes.noted()

    def compare(self, call: Call, check: Callable[[], None], *, full: bool) -> ComparedDisk:
        """Compare everything but what programs have changed since it was in use: with ``full`` read
        every file, otherwise those whose content this run's writes do not prove."""
        self._have_disk_take()
        in_use, full = self._in_use.signatures, full or self._read_back
        if not in_use:
            every = range(len(self._entries))
            return ComparedDisk(self._compare(every, call, check, full=full), [])
        changed = {number for number in in_use if self._is_changed(number)}
        numbers = [number for number in range(len(self._entries)) if number not in changed]
        compared = self._compare(numbers, call, check, full=full)
        whole = Comparison(len(self._entries))
        whole.from_memory = compared.from_memory
        for number, signature in zip(numbers, compared.signatures, strict=True):
            whole.signatures[number] = signature
        for place, words in compared.found:
            if numbers[place] in in_use and self._is_changed(numbers[place]):
                changed.add(numbers[place])  # while it was compared
            else:
                whole.found.append((numbers[place], words))
        names = [self._entries[n] for n in sorted(changed)]
        return ComparedDisk(whole, [shown(name.path) for name in names if name.kind != DIRECTORY])

    def close(self) -> None:
        """Nothing is written any more."""
        if self._write_back is not None:
            self._write_back.close()
            self._write_back = None

    def begin_again(self) -> None:
        """Forget what was fetched: the comparison failed, so the next run fetches everything."""
        self._in_use.clear()
        self._journal.restart()

    def end(self) -> None:
        """The restore is complete."""
        self.close()
        self._journal.clear()
        self._in_use.clear()

    def _have_disk_take(self) -> None:
        """Raise where the disk has not taken what was written; then all is fetched again: what it
        has lost nobody knows."""
        files = described(self._entries).of_kind(FILE)
        try:
            if self._write_back is not None:
                self._write_back.complete(self._entries[number] for number in files)
        except (DiskFull, MachineError):
            self.begin_again()
            raise

    def _finish(self, numbers: Sequence[int]) -> None:
        """Finish these names, and see that what was written is still proven: a file's own rename
        and its hard links move one of its times."""
        entries, proofs = self._selected(numbers), self.plan.proofs
        linked = self._linked(entries)
        if not self.writer.staged:
            proofs.drop_changed(self._goal.targets, linked)
        taken = self.writer.finish(entries, in_pieces)
        chunks = described(self._entries).chunks
        for number in (n for n in numbers if chunks[n] == NO_CHUNK):
            entry = self._entries[number]
            signature = self.writer.signatures.pop((entry.root, entry.path), None)
            if signature is not None:
                proofs.keep(number, signature)
        proofs.renew(self._goal.targets, numbers if self.writer.staged else linked)
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
        """The names that ``_other_numbers`` says."""
        return self._selected(self._other_numbers())

    def _other_numbers(self) -> Sequence[int]:
        """Names that are not in use; where files are not staged, without those that are complete as
        soon as they are there."""
        in_use = self._in_use.signatures
        if self.writer.staged and not in_use:
            return range(len(self._entries))
        chunks = described(self._entries).chunks
        every = self.writer.staged
        left = (n for n, c in enumerate(chunks) if (every or c == NO_CHUNK) and n not in in_use)
        return array("Q", left)

    def _selected(self, numbers: Sequence[int]) -> Sequence[Entry]:
        if len(numbers) == len(self._entries):
            return self._entries
        return SelectedElements(self._entries, numbers)

    def _numbered(self, numbers: Iterable[int]) -> list[Entry]:
        return [self._entries[number] for number in numbers]

    def _linked(self, entries: Sequence[Entry]) -> list[int]:
        """The files that get more names from the hard links among ``entries``."""
        links = described(entries).of_kind(HARDLINK)
        targets = {(entries[n].root, entries[n].target) for n in links}
        if not targets:
            return []
        files = described(self._entries).of_kind(FILE)
        return [n for n in files if (self._entries[n].root, self._entries[n].path) in targets]

    def _compare(
        self, numbers: Sequence[int], call: Call, check: Callable[[], None], *, full: bool
    ) -> Comparison:
        is_proven = self.plan.proofs.now(self._goal.targets)
        return self._goal.of(self._selected(numbers)).compare(
            call,
            check,
            full=full,
            attributes=self.writer.attributes,
            in_use_ns=self._finished_ns if self._in_use.signatures else None,
            proven=lambda at, st: is_proven(numbers[at], st),
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
