"""The restore's half of the gate: names as soon as files are complete, and what is wanted first.

Symlinks, empty files and directories are made at the beginning. Each other file gets its name when
its last chunk is there. A program may change it from then on, as what came first of a restore.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from torpor.machine.agent.writing import Writing
from torpor.machine.gate.record import GateRecord
from torpor.machine.pipeline.download import Lot
from torpor.shared.format.manifest import DIRECTORY, FILE, HARDLINK, HOLE, Entry

_POLL_S: Final = 0.05


class RestoreGate:
    """The gate of one restore into ``targets``, which are without symlinks. ``identity``: None
    where this restore has begun the ``record`` before. Thread-safe."""

    def __init__(
        self, record: GateRecord, identity: bytes | None, writing: Writing, targets: list[bytes]
    ) -> None:
        self._record = record
        self._writing = writing
        self._plan = writing.plan
        self._plan.exclusive = True
        self._entries = self._plan.manifest.entries
        self._targets = targets
        self._lock = threading.Lock()
        self._changed = threading.Condition()
        self._urgent = 0
        self._queue: deque[Lot] = deque()
        self._handed: set[Lot] = set()
        numbers = {(entry.root, entry.path): n for n, entry in enumerate(self._entries)}
        self._links: dict[int, list[int]] = {}
        for number, entry in enumerate(self._entries):
            if entry.kind == HARDLINK:
                self._links.setdefault(numbers[entry.root, entry.target], []).append(number)
        self._lacking = {n: len(self._missing(e)) for n, e in enumerate(self._entries)}
        self._left = sum(map(bool, self._lacking.values()))
        if identity is not None:
            record.begin(identity, dict(self._pending()))
        self._open()

    def wrote(self, chunk: int) -> None:
        """A chunk is on the disk: give the files that it completes their names."""
        complete = []
        with self._lock:
            for number in set(self._plan.users(chunk)):
                self._lacking[number] -= 1
                if not self._lacking[number]:
                    self._left -= 1
                    complete.append(number)
        self._give(complete)

    def wanted(self, wait_s: float, check: Callable[[], None]) -> Lot | None:
        """The next chunks that the command waits for and that nobody was sent for; None where
        there are none for ``wait_s``, or all are there. ``check`` may raise RunCancelled."""
        until = time.monotonic() + wait_s
        while time.monotonic() < until and self._left:
            check()
            with self._lock:
                for number in self._record.wanted.new():
                    self._queue.extend(self._lots_of(number))
                while self._queue:
                    lot = self._queue.popleft()
                    if lot not in self._handed:
                        self._handed.add(lot)
                        return lot
            time.sleep(_POLL_S)
        return None

    @contextmanager
    def urgent(self) -> Iterator[None]:
        """Fetch what is wanted; the parts begin no other pack meanwhile."""
        with self._changed:
            self._urgent += 1
        try:
            yield
        finally:
            with self._changed:
                self._urgent -= 1
                self._changed.notify_all()

    def give_way(self, check: Callable[[], None]) -> None:
        """Wait while something urgent is fetched; ``check`` may raise RunCancelled."""
        with self._changed:
            while self._urgent:
                self._changed.wait(_POLL_S)
                check()

    def end(self) -> None:
        """No more names come."""
        self._record.end()

    def _open(self) -> None:
        """Make what needs no content, and let others pass the directories."""
        in_use = [n for n in self._lacking if n in self._writing.in_use]
        self._record.give(in_use)  # a run that was killed may not have said that
        ready = [n for n, lacks in self._lacking.items() if not lacks and self._is_file(n)]
        self._give([number for number in ready if number not in self._writing.in_use])
        self._writing.open_directories()

    def _is_file(self, number: int) -> bool:
        return self._entries[number].kind not in (DIRECTORY, HARDLINK)

    def _give(self, numbers: list[int]) -> None:
        if numbers:
            together = [[number, *self._links.get(number, ())] for number in numbers]
            self._writing.give(together, self._record.give)
        self._record.moved()

    def _pending(self) -> Iterator[tuple[int, bytes]]:
        for number, lacks in self._lacking.items():
            for name in (number, *self._links.get(number, ())) if lacks else ():
                entry = self._entries[name]
                yield name, os.path.join(self._targets[entry.root], entry.path)

    def _lots_of(self, number: int) -> list[Lot]:
        """The chunks that a wanted name lacks, in its order."""
        if not 0 <= number < len(self._entries):
            return []
        entry = self._entries[number]
        if entry.kind == HARDLINK:
            entry = next(self._entries[n] for n, names in self._links.items() if number in names)
        return list(dict.fromkeys(self._plan.lot_of(chunk) for chunk in self._missing(entry)))

    def _missing(self, entry: Entry) -> dict[int, None]:
        if entry.kind != FILE:
            return {}
        chunks = (extent.chunk for extent in entry.extents)
        return {n: None for n in chunks if n != HOLE and n not in self._plan.done}
