"""Store to disk: one part of a restore, GET > check > open > decode > check > write."""

from __future__ import annotations

import os
import threading
from array import array
from bisect import bisect_right
from collections.abc import (
    Callable,
    Container,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from contextlib import closing
from itertools import repeat
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

import msgspec
from blake3 import blake3

from torpor.machine.tree.plan import part_ends
from torpor.machine.tree.write import ContentWriter
from torpor.shared.codecs.codec import Buffer
from torpor.shared.codecs.memory import Memory, ReusedMemory
from torpor.shared.codecs.trial import GpuTrial
from torpor.shared.errors import InvalidInput, SnapshotDamaged, TorporError, WrongKey
from torpor.shared.format.chunks import open_chunk
from torpor.shared.format.keys import Seal
from torpor.shared.format.manifest import FILE, HOLE, Chunk, Entry, Manifest, described
from torpor.shared.format.names import pack_id_of
from torpor.shared.format.rows import NO_CHUNK
from torpor.shared.format.sizes import PART_BYTES
from torpor.shared.transfer.transfer import GAP_BYTES, Range
from torpor.shared.values import MIB, Grant

NOTHING_FIRST: Final[Mapping[int, int]] = MappingProxyType({})
_LITTLE: Final = 32
"""A later chunk is fetched with the first ones of its pack if it is at most 1/32 as long: it is not
worth another request."""
PIECE_BYTES: Final = 8 * MIB
FIRST_PARTS: Final = 16
"""The first chunks are cut finer than packs and parts, so that each of the agent's eight workers
gets some and later chunks do not share the line."""
_ATTEMPTS: Final = 3
"""How often a chunk that does not match its name is fetched before it counts as damaged. A fault in
transit disappears, a fault in the store stays."""


class Fetcher(Protocol):
    """A source of ranges of packs. The caller checks the bytes."""

    def get_ranges(
        self, grant: Grant, ranges: Sequence[Range]
    ) -> Generator[memoryview, None, None]:
        """Yield each range's bytes in order, there until the next is asked for."""


class PackUse(msgspec.Struct, frozen=True, gc=False):
    """Where a run of a chunk goes."""

    entry: int
    file_offset: int
    chunk_offset: int
    length: int


class Lot(NamedTuple):
    """Chunks of one pack: a piece of those that come first, from 1 on, or 0: those that come
    later."""

    pack: bytes
    piece: int


class FetchPlan:
    """Which chunks go where, which packs make up which part, and which chunks are ``done``.

    ``first``: entries that are wanted first, by number, each with its position in the user's order;
    packs with any of ``then`` follow. Which chunks come first depends on the snapshot and on
    ``first`` alone, never on what is done.
    """

    def __init__(
        self,
        manifest: Manifest,
        max_parts: int,
        done: set[int],
        part_bytes: int = PART_BYTES,
        first: Mapping[int, int] = NOTHING_FIRST,
        then: Set[int] = frozenset(),
    ) -> None:
        self.manifest = manifest
        self.done = done
        self._files = [array("L") for _ in manifest.chunks]  # that are one run of the chunk
        self._runs: list[list[PackUse]] = [[] for _ in manifest.chunks]  # of other files
        what = described(manifest.entries)
        for number, (size, whole) in enumerate(zip(what.sizes, what.chunks, strict=True)):
            if whole != NO_CHUNK:
                self._files[whole].append(number)
            elif size:
                self._plan_runs(number, manifest.entries[number])
        used: dict[bytes, list[int]] = {}
        for number, chunk in enumerate(manifest.chunks):
            if self._is_used(number):
                used.setdefault(manifest.packs[chunk.pack].id, []).append(number)
        for numbers in used.values():
            numbers.sort(key=lambda n: manifest.chunks[n].offset)
        ranks = {
            number: min(wanted)
            for number in range(len(manifest.chunks) if first else 0)
            if (wanted := [first[entry] for entry in self.users(number) if entry in first])
        }
        self._first = _taken_along(manifest.chunks, used.values(), ranks) if ranks else set()
        self._lots: dict[Lot, list[int]] = {}
        for pack, numbers in used.items():
            for number, lot in self._cut_pack(pack, numbers):
                if number not in done:
                    self._lots.setdefault(lot, []).append(number)
        self.parts = self._share_out(ranks, then, max_parts, part_bytes)

    def _plan_runs(self, number: int, entry: Entry) -> None:
        at = 0
        for extent in entry.extents:
            if extent.chunk != HOLE:
                use = PackUse(number, at, extent.offset, extent.length)
                self._runs[extent.chunk].append(use)
            at += extent.length

    def users(self, chunk: int) -> Iterator[int]:
        """The entries that use a chunk; one that uses it twice comes twice."""
        yield from self._files[chunk]
        yield from (use.entry for use in self._runs[chunk])

    def write(self, chunk: int, plain: Buffer, writer: ContentWriter) -> None:
        """Put a chunk's content where it belongs."""
        entries, view = self.manifest.entries, memoryview(plain)
        for use in self._runs[chunk]:
            data = view[use.chunk_offset : use.chunk_offset + use.length]
            writer.write_at(entries[use.entry], use.file_offset, data)
        files = [entries[number] for number in self._files[chunk]]
        if files:
            writer.write_files([(file, file.extents[0].offset) for file in files], plain)

    def _is_used(self, chunk: int) -> bool:
        return bool(self._files[chunk] or self._runs[chunk])

    def chunks_of(self, pack_id: bytes, piece: int = 0) -> list[int]:
        """The chunks to fetch from a pack, by offset: of one piece, or those that come later."""
        return self._lots.get(Lot(pack_id, piece), [])

    def plain_bytes(self, lots: Iterable[Lot]) -> int:
        return sum(self.manifest.chunks[n].plain for lot in lots for n in self.chunks_of(*lot))

    def stored_bytes(self, lots: Iterable[Lot]) -> int:
        return sum(self.manifest.chunks[n].stored for lot in lots for n in self.chunks_of(*lot))

    def check_fetched(self, who: str, then: str, *, first: bool = False) -> None:
        """Raise InvalidInput while chunks are missing, of all or of those that come first."""
        everything = range(len(self._files))
        wanted = self._first if first else [n for n in everything if self._is_used(n)]
        missing = sum(number not in self.done for number in wanted)
        if missing:
            raise InvalidInput(f"{who} still lacks {missing} chunks: {then}")

    def _cut_pack(self, pack: bytes, numbers: Iterable[int]) -> Iterator[tuple[int, Lot]]:
        piece, size = 1, 0
        for number in numbers:
            if number not in self._first:
                yield number, Lot(pack, 0)
                continue
            if size >= PIECE_BYTES:
                piece, size = piece + 1, 0
            size += self.manifest.chunks[number].stored
            yield number, Lot(pack, piece)

    def _share_out(
        self, ranks: Mapping[int, int], then: Set[int], max_parts: int, part_bytes: int
    ) -> list[list[Lot]]:
        last = len(ranks)
        others = [lot for lot in self._lots if not lot.piece]
        if then:
            others.sort(key=lambda lot: then.isdisjoint(self._entries_of(lot)))
        first = [lot for lot in self._lots if lot.piece]
        first.sort(key=lambda lot: min(ranks.get(n, last) for n in self._lots[lot]))
        share = self.plain_bytes(first) / max(1, self.plain_bytes(self._lots))
        most = max(round(max_parts * share), min(FIRST_PARTS, max_parts // 2), 1)
        early = self._cut(first, min(most, max(1, max_parts - 1)), min(part_bytes, PIECE_BYTES))
        return [*early, *self._cut(others, max(1, max_parts - len(early)), part_bytes)]

    def _entries_of(self, lot: Lot) -> Iterator[int]:
        return (entry for number in self._lots[lot] for entry in self.users(number))

    def _cut(self, lots: Sequence[Lot], most: int, part_bytes: int) -> list[list[Lot]]:
        """``lots`` in their order, in at most ``most`` parts."""
        ends = part_ends(self.plain_bytes(lots), most, part_bytes)
        parts: list[list[Lot]] = [[] for _ in ends]
        done = 0
        for lot in lots:
            size = self.plain_bytes([lot])
            parts[min(bisect_right(ends, done + size // 2), len(ends) - 1)].append(lot)
            done += size
        return [part for part in parts if part]


def _taken_along(
    chunks: Sequence[Chunk], packs: Iterable[Sequence[int]], wanted: Container[int]
) -> set[int]:
    """The ``wanted`` chunks, and those of the same packs, each sorted by offset, that cost no more
    than another request: between two that are near each other, or little beside them."""
    found: set[int] = set()
    for numbers in packs:
        here = [number for number in numbers if number in wanted]
        if not here:
            continue
        others = sum(chunks[n].stored for n in numbers) - sum(chunks[n].stored for n in here)
        if others * _LITTLE <= sum(chunks[n].stored for n in here):
            here = [*numbers]
        found.update(here)
        between: list[int] = []
        for number in numbers[numbers.index(here[0]) :]:
            if number not in found:
                between.append(number)
                continue
            if between and chunks[number].offset - chunks[between[0]].offset <= GAP_BYTES:
                found.update(between)
            between = []
    return found


def in_pieces(entry: Entry) -> bool:
    """Whether a file is made first and written run by run, not created with its content."""
    return (
        entry.kind == FILE
        and entry.size > 0
        and (len(entry.extents) != 1 or entry.extents[0].chunk == HOLE)
    )


class RestoreJournal:
    """The chunks on the disk: one 4-byte number each, in the file ``path``.

    Begins with what is restored and where, so that it counts only for the same restore, and with
    whether its files are ``staged``: they get their names only when they are complete.
    """

    def __init__(self, path: Path, identity: bytes) -> None:
        self._path = path
        self._identities = (identity, blake3(identity + b"staged").digest())  # 32 bytes each
        self._lock = threading.Lock()
        self.staged = self._begins_with() == self._identities[True]

    def done(self) -> set[int] | None:
        """The chunks of an interrupted restore to the same place; None if there was none."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return None
        if data[:32] not in self._identities:
            return None
        numbers = data[32 : len(data) - (len(data) - 32) % 4]
        return {int.from_bytes(numbers[i : i + 4], "little") for i in range(0, len(numbers), 4)}

    def of_another(self) -> bool:
        """Whether a restore of another snapshot, or to elsewhere, was interrupted."""
        return self._begins_with() not in (None, *self._identities)

    def begin(self, *, staged: bool = False) -> None:
        """Start again, or cut off a torn tail."""
        done = self.done()
        self.staged = staged
        numbers = b"".join(number.to_bytes(4, "little") for number in sorted(done or ()))
        partial = self._path.with_suffix(".new")
        partial.write_bytes(self._identities[staged] + numbers)
        partial.replace(self._path)

    def restart(self) -> None:
        """Forget all chunks; the restore stays unfinished."""
        self._path.unlink(missing_ok=True)
        self.begin(staged=self.staged)

    def add(self, number: int) -> None:
        with self._lock, self._path.open("ab") as file:
            file.write(number.to_bytes(4, "little"))

    def clear(self) -> None:
        self._path.unlink(missing_ok=True)
        self.staged = False

    def _begins_with(self) -> bytes | None:
        try:
            return self._path.read_bytes()[:32]
        except FileNotFoundError:
            return None


def restore_part(
    plan: FetchPlan,
    seal: Seal,
    fetcher: Fetcher,
    grants: Iterable[Grant],
    writer: ContentWriter,
    journal: RestoreJournal | None,
    *,
    pieces: Sequence[int] = (),
    progress: Callable[[int], None],
    check: Callable[[], None],
    keep: Callable[[bytes, int, Buffer], None] = lambda pack_id, offset, stored: None,
    gpu: GpuTrial | None = None,
) -> int:
    """Fetch and write those ``pieces`` of the granted packs, or what is no piece of them, but for
    the chunks that are done. Returns how many stored bytes were fetched; ``progress`` hears of
    plain ones. Every chunk is checked against
    its name before a byte of it is written; ``keep`` then gets its stored form. There is no
    ``journal``: the disk shows what is done."""
    plain_bytes = stored_bytes = 0
    memory = ReusedMemory()
    try:
        for grant, piece in zip(grants, pieces or repeat(0), strict=bool(pieces)):
            pack_id = pack_id_of(grant.key)
            numbers = [n for n in plan.chunks_of(pack_id, piece) if n not in plan.done]
            if not numbers:
                continue
            chunks = [plan.manifest.chunks[n] for n in numbers]
            ranges = [Range(chunk.offset, chunk.stored) for chunk in chunks]
            with closing(fetcher.get_ranges(grant, ranges)) as stream:
                for number, chunk in zip(numbers, chunks, strict=True):
                    check()
                    came: Buffer = next(stream)
                    stored, plain = _plain(
                        chunk, pack_id, came, seal, fetcher, grant, plan, number, gpu, memory
                    )
                    keep(pack_id, chunk.offset, stored)
                    plan.write(number, plain, writer)
                    if journal is not None:
                        journal.add(number)
                    plan.done.add(number)
                    plain_bytes += chunk.plain
                    stored_bytes += chunk.stored
                    progress(plain_bytes)
    finally:
        writer.close()
    return stored_bytes


def _plain(
    chunk: Chunk,
    pack_id: bytes,
    stored: Buffer,
    seal: Seal,
    fetcher: Fetcher,
    grant: Grant,
    plan: FetchPlan,
    number: int,
    gpu: GpuTrial | None,
    memory: Memory,
) -> tuple[Buffer, Buffer]:
    """Open, decode and check one chunk; fetch it again when it is not what it was. Returns it as
    it is stored, and plain."""
    fault: TorporError | None = None
    for attempt in range(_ATTEMPTS):
        if attempt:
            with closing(fetcher.get_ranges(grant, [Range(chunk.offset, chunk.stored)])) as again:
                stored = next(again)
        try:
            plain = open_chunk(chunk, pack_id, stored, seal, gpu, memory)
        except (SnapshotDamaged, WrongKey) as exc:
            fault = exc
            continue
        return stored, plain
    users = [*dict.fromkeys(plan.users(number))]
    names = [os.fsdecode(plan.manifest.entries[user].path) for user in users[:5]]
    more = len(users) - len(names)
    raise SnapshotDamaged(
        f"chunk {chunk.name.hex()[:16]} at {chunk.offset} of {grant.key} is damaged in the store: "
        f"{fault}; it holds {', '.join(names)}{f' and {more} more' if more > 0 else ''}: run "
        "verify, and wake an earlier snapshot if this one cannot be repaired"
    )
