"""A tree that is being restored: made, finished and compared, what comes first before the rest.

If anything comes first, every file is written in a directory of torpor's own, and gets its name
when it is complete: a program that was started on what came first finds no file, not zeros.

What comes first is in use from the moment it is finished: a program that was started on it may
change it. It is not written again, and what was changed is not compared, as after a restore.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from torpor.machine.agent.call import Call
from torpor.machine.agent.goal import Goal, first_few, shown
from torpor.machine.agent.in_use import InUse
from torpor.machine.pipeline.download import FetchPlan, RestoreJournal, in_pieces
from torpor.machine.tree.compare import Comparison
from torpor.machine.tree.first import First
from torpor.machine.tree.walk import RACY_NS, Signature
from torpor.machine.tree.write import TreeWriter
from torpor.shared.errors import InvalidInput
from torpor.shared.format.manifest import DIRECTORY, FILE, HOLE, Entry


class Compared(NamedTuple):
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
    ) -> None:
        self.plan = plan
        self.writer = TreeWriter(goal.targets, in_use.attributes, stage)
        self._goal = goal
        self._entries = goal.manifest.entries
        self._journal = journal
        self._first = first
        self._in_use = in_use
        self._finished_ns = 0
        self._resumed = bool(plan.done)

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

        self.writer.prepare(
            self._others(),
            in_pieces,
            afresh=afresh,
            stale=is_stale,
            passages=self._first.places(self._entries) if in_use else (),
        )
        self.writer.close()

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

    def give(self, entry: Entry) -> bool:
        """Finish a file or link that is complete, beside others; False where a program has made
        something under its name."""
        return self.writer.give(entry, in_pieces)

    def use(self, signatures: Mapping[int, Signature | None]) -> None:
        """From now on these entries are in use, if they were not before."""
        known = self._in_use.signatures
        self._in_use.add({n: seen for n, seen in signatures.items() if n not in known})

    def open_directories(self) -> None:
        """Let others pass every directory, while it is still written in."""
        self.writer.open_passages([entry for entry in self._entries if entry.kind == DIRECTORY])
        self.writer.close()

    def finish(self) -> list[str]:
        """Finish the rest, once every chunk is there. Returns warnings."""
        self._finished_ns = time.time_ns() - RACY_NS  # the clock of files is behind
        self._finish(self._others())
        self.writer.close()
        return list(dict.fromkeys(self.writer.attributes.warnings))

    def compare(self, call: Call, check: Callable[[], None], *, full: bool) -> Compared:
        """Compare everything but what programs have changed since it was in use."""
        in_use = self._in_use.signatures
        if not in_use:
            return Compared(self._compare(self._entries, call, check, full=full), [])
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
        return Compared(whole, [shown(name.path) for name in names if name.kind != DIRECTORY])

    def begin_again(self) -> None:
        """Forget what was fetched: the comparison failed, so the next run fetches everything."""
        self._in_use.clear()
        self._journal.restart()

    def end(self) -> None:
        """The restore is complete."""
        self._journal.clear()
        self._in_use.clear()

    def _finish(self, entries: list[Entry]) -> None:
        taken = self.writer.finish(entries, in_pieces)
        if taken:
            names = ", ".join(first_few([repr(shown(entry.path)) for entry in taken]))
            raise InvalidInput(
                f"{names}: programs on the machine made these names while the snapshot, which has "
                "them too, was restored; nothing was overwritten. Move them away, and wake again, "
                "which continues; or list them in the workspace's `first`, so that they are there "
                "before the programs start"
            )

    def _lacks(self, entry: Entry) -> bool:
        """Whether content of a file is still to be fetched."""
        done = self.plan.done
        return any(extent.chunk != HOLE and extent.chunk not in done for extent in entry.extents)

    def _others(self) -> list[Entry]:
        """Names that are not in use."""
        in_use = self._in_use.signatures
        if not in_use:
            return self._entries
        return [entry for number, entry in enumerate(self._entries) if number not in in_use]

    def _numbered(self, numbers: Iterable[int]) -> list[Entry]:
        return [self._entries[number] for number in numbers]

    def _compare(
        self, entries: list[Entry], call: Call, check: Callable[[], None], *, full: bool
    ) -> Comparison:
        return self._goal.of(entries).compare(
            call,
            check,
            full=full,
            refused_xattrs=self.writer.attributes.refused_xattrs,
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
