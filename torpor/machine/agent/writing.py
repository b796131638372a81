"""A tree that is being restored: made, finished and compared, what comes first before the rest.

What comes first is in use from the moment it was compared: a program that was started on it may
change it. It is not written or compared again, as after the end of a restore.
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
from torpor.shared.format.manifest import Entry


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
        self.writer = TreeWriter(goal.targets)
        self._goal = goal
        self._entries = goal.manifest.entries
        self._journal = journal
        self._first = first
        self._in_use = in_use
        self._finished_ns = 0

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

    def finish_first(self, call: Call, check: Callable[[], None], *, full: bool) -> Comparison:
        """Finish and compare what comes first; without a difference it is in use from now on."""
        numbers = [n for n in sorted(self._first.ranks) if n not in self._in_use.signatures]
        self.writer.finish(self._numbered(numbers), in_pieces)
        self.writer.open_passages(self._numbered(sorted(self._first.passages)))
        self.writer.close()
        compared = self._goal.of(self._numbered(numbers)).compare(
            call, check, full=full, refused_xattrs=self.writer.attributes.refused_xattrs
        )
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
        return self.writer.attributes.warnings

    def compare(self, call: Call, check: Callable[[], None], *, full: bool) -> Compared:
        """Compare the rest."""
        in_use = self._in_use.signatures
        compared = self._goal.of(self._others()).compare(
            call,
            check,
            full=full,
            refused_xattrs=self.writer.attributes.refused_xattrs,
            in_use_ns=self._finished_ns if in_use else None,
        )
        if not in_use:
            return Compared(compared, [])
        whole = Comparison(len(self._entries))
        whole.differences = compared.differences
        rest = iter(compared.signatures)
        changed = []
        for number, entry in enumerate(self._entries):
            if number not in in_use:
                whole.signatures[number] = next(rest)
            elif in_use[number] is None or in_use[number] == self._now(entry):
                whole.signatures[number] = in_use[number]
            else:
                changed.append(shown(entry.path) or "the directory itself")
        return Compared(whole, changed)

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

    def _now(self, entry: Entry) -> Signature | None:
        try:
            return Signature.of(os.lstat(os.path.join(self._goal.targets[entry.root], entry.path)))
        except OSError:
            return None
