"""The chunks of a snapshot: where each is stored, and which share stores the others."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from torpor.shared.errors import AgentLost
from torpor.shared.format.manifest import Chunk, Entries, Entry, Extent, Pack


class ChunkPlace(NamedTuple):
    """The position of a chunk in its pack."""

    pack: bytes  # the pack's id
    encoding: int
    offset: int
    stored: int


class Located(NamedTuple):
    """A chunk in a pack that the store is known to have."""

    name: bytes
    plain: int
    place: ChunkPlace


class ChunkTable:
    """Numbers chunks for one run. Thread-safe.

    A chunk is claimed by the first share that meets it; others refer to it at once. A chunk
    whose pack was never confirmed has no place; the next pass reads the files that use it again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: list[bytes] = []
        self._plain: list[int] = []
        self._places: list[ChunkPlace | None] = []
        self._pending: set[int] = set()
        self._numbers: dict[bytes, int] = {}
        self._known: dict[bytes, Located] = {}
        self._packs: dict[bytes, Pack] = {}
        self._lost: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._names)

    def adopt(self, chunks: Sequence[Chunk], packs: Sequence[Pack]) -> None:
        """Adopt a manifest's chunks under their own numbers; only as the first call."""
        if self._names:
            raise RuntimeError("adopt comes first: numbers are taken already")
        for chunk in chunks:
            self._numbers[chunk.name] = len(self._names)
            self._names.append(chunk.name)
            self._plain.append(chunk.plain)
            self._places.append(
                ChunkPlace(packs[chunk.pack].id, chunk.encoding, chunk.offset, chunk.stored)
            )
        self._packs.update((pack.id, pack) for pack in packs)

    def know(self, located: Iterable[Located], packs: Iterable[Pack]) -> None:
        """Add chunks that the store holds and that may be named."""
        with self._lock:
            for chunk in located:
                if chunk.place.pack not in self._lost:
                    self._known.setdefault(chunk.name, chunk)
            for pack in packs:
                self._packs.setdefault(pack.id, pack)

    def claim(self, name: bytes, plain: int) -> tuple[int, bool]:
        """The chunk's number, and whether the caller must store it."""
        with self._lock:
            number = self._numbers.get(name)
            if number is None:
                number = len(self._names)
                self._numbers[name] = number
                self._names.append(name)
                self._plain.append(plain)
                known = self._known.get(name)
                self._places.append(known.place if known else None)
            if self._places[number] is not None or number in self._pending:
                return number, False
            self._pending.add(number)
            return number, True

    def settle(self, pack: Pack, places: Iterable[tuple[int, ChunkPlace]]) -> list[Located]:
        """The store has confirmed ``pack``: give its chunks their places."""
        with self._lock:
            self._packs[pack.id] = pack
            located = []
            for number, place in places:
                self._places[number] = place
                self._pending.discard(number)
                located.append(Located(self._names[number], self._plain[number], place))
            return located

    def release(self, numbers: Iterable[int]) -> None:
        """Release claims whose pack did not reach the store."""
        with self._lock:
            self._pending.difference_update(numbers)

    def lose(self, pack_ids: set[bytes]) -> None:
        """These packs are gone from the store, or soon will be: take their chunks' places away. No
        manifest that is read later restores them."""
        with self._lock:
            self._lost |= pack_ids
            for number, place in enumerate(self._places):
                if place is not None and place.pack in pack_ids:
                    self._places[number] = None
            self._known = {n: k for n, k in self._known.items() if k.place.pack not in pack_ids}

    def without_place(self) -> set[int]:
        """The chunks that the store is not known to have."""
        with self._lock:
            return {number for number, place in enumerate(self._places) if place is None}

    def has_place(self, number: int) -> bool:
        return self._places[number] is not None

    def has_pack(self, pack_id: bytes) -> bool:
        """Whether the store is known to have this pack."""
        return pack_id in self._packs

    def compact(
        self, entries: Entries, used: Sequence[int]
    ) -> tuple[Entries, list[Chunk], list[Pack]]:
        """The manifest's tables: only what ``entries`` use, renumbered. ``used``: in order.

        Raises AgentLost when a chunk in use has no place: its share was lost; ask for a new pass.
        """
        packs: dict[bytes, int] = {}
        chunks = []
        for number in used:
            place = self._places[number]
            if place is None:
                raise AgentLost("a chunk of this snapshot was never stored: make another pass")
            pack = packs.setdefault(place.pack, len(packs))
            chunks.append(
                Chunk(
                    self._names[number],
                    self._plain[number],
                    place.encoding,
                    pack,
                    place.offset,
                    place.stored,
                )
            )
        if used and used[-1] >= len(used):
            entries = _renumbered(entries, {old: new for new, old in enumerate(used)})
        return entries, chunks, [self._packs[pack_id] for pack_id in packs]


def _renumbered(entries: Entries, numbers: dict[int, int]) -> Entries:
    def moved(entry: Entry) -> Entry:
        if not entry.extents:
            return entry
        extents = tuple(
            Extent(numbers[e.chunk], e.offset, e.length) if e.chunk >= 0 else e
            for e in entry.extents
        )
        return msgspec.structs.replace(entry, extents=extents)

    return Entries(map(moved, entries))
