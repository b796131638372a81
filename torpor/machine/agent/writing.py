"""A tree that is being restored: made, finished and compared, what comes first before the rest.

What comes first is in use from the moment it is finished: a program that was started on it may
change it. It is not written again, and what was changed is not compared, as after a restore.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torpor.machine.agent.call import Call
from torpor.machine.agent.goal import Goal, shown
from torpor.machine.agent.in_use import InUse
from torpor.machine.pipeline.download import FetchPlan, RestoreJournal, in_pieces
from torpor.machine.tree.compare import Comparison
from torpor.machine.tree.first import First
from torpor.machine.tree.walk import RACY_NS, Signature
from torpor.machine.tree.write import TreeWriter
from torpor.shared.format.manifest import DIRECTORY, Entry


class Compared(NamedTuple):
    """``changed``: names in use that are no longer as they were restored."""

    comparison: Comparison
    changed: list[str]


class Writing:
    """What is fetched of a goal, and the tree that it is written into."""

    def __init__(
        self, goal: Goal, plan: FetchPlan, journal: RestoreJournal, first: First, in_use: InUse
    ) -> None:
        self.plan = plan
        self.writer = TreeWriter(goal.targets, in_use.attributes)
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
        self._journal.begin()
        if not self.plan.done:
            self._in_use.clear()
        self.writer.prepare(
            self._others(),
            in_pieces,
            afresh=not self.plan.done,
            passages=self._first.places(self._entries) if self._in_use.signatures else (),
        )
        self.writer.close()

    def finish_first(self, call: Call, check: Callable[[], None]) -> Comparison:
        """Finish and compare what comes first; without a difference it is in use from now on.

        Contents that this run wrote were checked before, and are read back in the end; those of an
        earlier run are read back now: they may be from before the machine was started again.
        """
        numbers = [n for n in sorted(self._first.ranks) if n not in self._in_use.signatures]
        self.writer.finish(self._numbered(numbers), in_pieces)
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
        self.writer.finish(self._others(), in_pieces)
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
        return Compared(whole, [shown(one.path) for one in names if one.kind != DIRECTORY])

    def begin_again(self) -> None:
        """What was written is not what it should be: fetch everything again next time."""
        self._journal.restart()
        self._in_use.clear()

    def end(self) -> None:
        """The restore is complete."""
        self._journal.clear()
        self._in_use.clear()

    def _others(self) -> list[Entry]:
        """What is not in use."""
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
        """Whether it is no longer as it was when it was finished."""
        entry, then = self._entries[number], self._in_use.signatures[number]
        try:
            now = os.lstat(os.path.join(self._goal.targets[entry.root], entry.path))
        except OSError:
            return True
        return then is not None and Signature.of(now) != then
