"""Which files are known to hold what was written to them, without reading them again.

The content that is given to a write was hashed before. Right after a file is complete, its
signature is kept: inode, size, the time of its last change, and the time at which anything of it
changed, which no program can set. While the file has that signature, nobody has written to it
since. Safety rule 25 says what this proves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence

from torpor.machine.tree.batch import SIGNATURE_BYTES, Stat, packed_signature
from torpor.machine.tree.looks import looked, opened_targets, runs_of
from torpor.machine.tree.mappings import mapped_for_writing
from torpor.machine.tree.names import NO_SIGNATURE
from torpor.shared.format.manifest import Entry

_CTIME_AT = 24  # the last field: our own rename or hard link moves it


class WriteProofs:
    """The signature of each file that this process has written whole, by the entry's number.
    Thread-safe: each number is written by one thread at a time."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries
        self._packed = bytearray(SIGNATURE_BYTES * len(entries))

    def keep(self, number: int, signature: bytes | bytearray | memoryview) -> None:
        """``signature``: 32 bytes of a file that is complete; zeros prove nothing."""
        at = number * SIGNATURE_BYTES
        self._packed[at : at + SIGNATURE_BYTES] = signature

    def drop_changed(self, targets: Sequence[bytes], numbers: Iterable[int]) -> None:
        """Look at files, and prove nothing of those that were changed since they were complete."""
        for number, st in self._looked(targets, numbers):
            if not self._holds(number, st):
                self.keep(number, NO_SIGNATURE)

    def renew(self, targets: Sequence[bytes], numbers: Iterable[int]) -> None:
        """Look at files that were given names since, which moves one of their times."""
        for number, st in self._looked(targets, numbers):
            now, at = packed_signature(*st[:4]), number * SIGNATURE_BYTES
            is_same = not st.error and now[:_CTIME_AT] == self._packed[at : at + _CTIME_AT]
            self.keep(number, now if is_same else NO_SIGNATURE)

    def now(self, targets: Sequence[bytes]) -> Callable[[int, Stat], bool]:
        """Whether the content of a file is proven, by its number and by what it is now. Not where a
        program has it mapped for writing: a store through a mapping may move no time."""
        mapped: set[tuple[int, int] | bytes] = set()
        real = [os.path.join(os.path.realpath(target), b"") for target in targets]
        for device, inode, path, _ in mapped_for_writing():
            mapped.add((device, inode))
            if path.startswith(tuple(real)):  # some file systems show another device there
                mapped.add(path)

        def is_proven(number: int, st: Stat) -> bool:
            if not self._holds(number, st) or (st.device, st.inode) in mapped:
                return False
            entry = self._entries[number]
            return real[entry.root] + entry.path not in mapped

        return is_proven

    def _holds(self, number: int, st: Stat) -> bool:
        at = number * SIGNATURE_BYTES
        kept = self._packed[at : at + SIGNATURE_BYTES]
        return not st.error and kept != NO_SIGNATURE and packed_signature(*st[:4]) == kept

    def _looked(
        self, targets: Sequence[bytes], numbers: Iterable[int]
    ) -> Iterable[tuple[int, Stat]]:
        """What files are, of which something is proven."""
        kept = memoryview(self._packed).cast("Q")[:: SIGNATURE_BYTES // 8]
        known = (number for number in numbers if kept[number])
        with opened_targets(targets) as places:
            for run in runs_of(self._entries, known):
                stats = looked(places, [entry for _, entry in run])
                yield from zip((number for number, _ in run), stats, strict=True)
