"""Disk to store: one share of a pass, read > hash > known? > encode > seal > pack > PUT."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from torpor.machine.pipeline.buffers import PackBuffers
from torpor.machine.pipeline.chunks import ChunkPlace, ChunkTable
from torpor.machine.pipeline.contents import Contents
from torpor.machine.pipeline.journal import Journal
from torpor.machine.pipeline.numbers import Numbers
from torpor.machine.tree.names import Unread, UnreadFiles
from torpor.machine.tree.plan import ChunkRange, Group, ReadUnit
from torpor.machine.tree.read import Read, read_at, read_unchanged, read_whole
from torpor.shared.codecs.choose import Encoder
from torpor.shared.codecs.codec import Buffer
from torpor.shared.codecs.effort import Pace
from torpor.shared.codecs.encodings import decode_chunk, is_of_gpu
from torpor.shared.codecs.layout import Run
from torpor.shared.codecs.stock import RAW
from torpor.shared.errors import GrantExpired, SnapshotDamaged, StoreCorrupt
from torpor.shared.format.keys import SEAL_BYTES, Seal, chunk_associated
from torpor.shared.format.manifest import Extent, Pack
from torpor.shared.format.names import pack_id_of
from torpor.shared.transfer.transfer import Transfer
from torpor.shared.values import Grant


@dataclass
class Share:
    """Neighbouring jobs that one worker does, and how far they are. Bytes are plain unless they say
    stored."""

    jobs: Sequence[ReadUnit]
    done: int = 0  # of the jobs, from the first on: their chunks are in the store
    bytes: int = 0  # that were read
    new_bytes: int = 0  # of chunks that the store did not have, and has now
    stored_bytes: int = 0  # what those became

    @property
    def left(self) -> int:
        """The bytes of the jobs that are to be done."""
        return sum(job.length for job in self.jobs[self.done :])


class Source(NamedTuple):
    """What all shares of a pass need."""

    roots: Sequence[bytes]
    unread: UnreadFiles
    seal: Seal
    table: ChunkTable
    contents: Contents
    numbers: Numbers
    journal: Journal
    buffers: PackBuffers  # of PACK_BYTES
    encoder: Encoder


def store_share(
    share: Share,
    source: Source,
    sender: Transfer,
    grants: Iterable[Grant],
    *,
    progress: Callable[[], None],
    check: Callable[[], None],
) -> None:
    """Store every chunk of ``share`` that the store does not have, from where it stands on.

    ``check`` may raise RunCancelled. Raises GrantExpired when ``grants`` run out, and what the
    sender raises; claims of packs that did not reach the store are given back, and another call
    goes on.
    """
    at = share.done
    share.bytes = sum(job.length for job in share.jobs[:at])
    with source.buffers.lent() as buffer:
        packer = _Packer(source, sender, iter(grants), share, buffer)
        try:
            for job in share.jobs[at:]:
                check()
                if isinstance(job, ChunkRange):
                    _store_piece(job, source, packer, share)
                else:
                    _store_group(job, source, packer, share)
                packer.did_job()
                progress()
            packer.flush()
        finally:
            packer.give_back()


def _store_piece(piece: ChunkRange, source: Source, packer: _Packer, report: Share) -> None:
    read = _read(piece.file, piece.offset, piece.length, source)
    number, data = -1, bytes(read.data)
    if data:
        number = packer.store(data, source.numbers.runs(piece, data))
    source.contents.add_piece(piece, read, number)
    report.bytes += len(read.data)


def _store_group(group: Group, source: Source, packer: _Packer, report: Share) -> None:
    """In one go where nothing was known of the files and all are as the walk saw them, as nearly
    always at first; else file by file."""
    files = source.unread.together(group.files)
    data = None if files is None else read_unchanged(source.roots[files.root], files)
    if files is None or not data:
        del files
        _store_each(group, source, packer, report)
        return
    ends = [*accumulate(files.sizes, initial=0)]
    with memoryview(data) as view:
        digests = [source.seal.digest(view[start:end]) for start, end in pairwise(ends)]
    chunk = packer.store(data)
    source.contents.add_unchanged(group.files, files, chunk, digests)
    report.bytes += len(data)


def _store_each(group: Group, source: Source, packer: _Packer, report: Share) -> None:
    files = [source.unread.at(number) for number in group.files]
    reads = _read_group(files, source)
    fresh = []
    for number, file, read in zip(group.files, files, reads, strict=True):
        digest = _digest(read, file, source.seal)
        same = _as_before(file, digest, source.table)
        if same is None:
            fresh.append((number, file, read, digest))
        else:
            source.contents.add_small(number, file, read, same.chunk, same.offset, digest)
    plain = b"".join(read.data for _, _, read, _ in fresh)
    chunk = packer.store(plain) if plain else -1
    offset = 0
    for number, file, read, digest in fresh:
        source.contents.add_small(number, file, read, chunk, offset, digest)
        offset += len(read.data)
    report.bytes += sum(len(read.data) for read in reads)


def _as_before(file: Unread, digest: bytes, table: ChunkTable) -> Extent | None:
    """The earlier extent of a small file that was only touched. Its chunk is shared, so the chunk's
    name cannot identify it."""
    before = file.before
    if before is None or not digest or before.digest != digest or len(before.extents) != 1:
        return None
    (extent,) = before.extents
    is_whole = extent.length == before.size == file.signature.size
    return extent if is_whole and extent.chunk >= 0 and table.has_place(extent.chunk) else None


def _read(number: int, offset: int, length: int, source: Source) -> Read:
    file = source.unread[number]
    return read_at(source.roots[file.entry.root], file.entry.path, offset, length, file.signature)


def _read_group(files: Sequence[Unread], source: Source) -> list[Read]:
    reads: list[Read] = []
    for root, some in groupby(files, lambda file: file.entry.root):
        named = [(file.entry.path, file.signature) for file in some]
        reads += read_whole(source.roots[root], named)
    return reads


def _digest(read: Read, file: Unread, seal: Seal) -> bytes:
    """The digest of the content as the entry describes it: missing bytes read as zeros."""
    if not read.data:
        return b""
    missing = file.signature.size - len(read.data)
    return seal.digest(bytes(read.data) + bytes(missing) if missing else read.data)


class _Packer:
    """Fills packs and sends them. One thread's own."""

    def __init__(
        self,
        source: Source,
        sender: Transfer,
        grants: Iterable[Grant],
        share: Share,
        buffer: memoryview,
    ) -> None:
        self._source = source
        self._sender = sender
        self._grants = iter(grants)
        self._share = share
        self._jobs = share.done  # whose chunks are in the store, or in the open pack
        self._grant: Grant | None = None
        self._buffer = buffer
        self._bytes = 0  # of the buffer, filled
        self._places: list[tuple[int, ChunkPlace]] = []
        self._begin_pack()

    def store(self, plain: Buffer, runs: Sequence[Run] = ()) -> int:
        """The chunk's number. Its bytes go into the open pack unless the store has them."""
        name = self._source.seal.name(plain)
        number, must_store = self._source.table.claim(name, len(plain))
        if not must_store:
            return number
        try:
            encoding, encoded = self._encode(plain, name, runs)
            self._add(number, name, encoding, encoded, len(plain))
        except BaseException:
            self._source.table.release([number])
            raise
        return number

    def did_job(self) -> None:
        """One more job has all its chunks in a pack."""
        self._jobs += 1
        if not self._bytes:
            self._share.done = self._jobs

    def _add(self, number: int, name: bytes, encoding: int, encoded: Buffer, plain: int) -> None:
        if self._bytes + len(encoded) + SEAL_BYTES > len(self._buffer):
            self.flush()
        if self._grant is None:
            self._grant = next(self._grants, None)
            if self._grant is None:
                raise GrantExpired(
                    "the snapshot needs more packs than it has grants for: request more grants"
                )
        pack_id = pack_id_of(self._grant.key)
        stored = self._source.seal.seal(encoded, chunk_associated(name, pack_id, encoding, plain))
        self._places.append((number, ChunkPlace(pack_id, encoding, self._bytes, len(stored))))
        end = self._bytes + len(stored)
        self._buffer[self._bytes : end] = stored
        self._bytes = end

    def _encode(self, plain: Buffer, name: bytes, runs: Sequence[Run]) -> tuple[int, Buffer]:
        """Encode, then decode and compare: a fault of memory or codec must not reach the store."""
        encoder = self._source.encoder
        wall, cpu = time.perf_counter(), time.thread_time()
        encoding, encoded = encoder.encode(plain, runs)
        if is_of_gpu(encoding):  # by the GPU: waiting for it says nothing about the cores
            if _comes_back(encoding, encoded, plain):
                return encoding, encoded
            encoder.distrust_gpu()
            wall, cpu = time.perf_counter(), time.thread_time()
            encoding, encoded = encoder.encode(plain, runs)
        if not _comes_back(encoding, encoded, plain):
            raise StoreCorrupt(
                f"encoding {encoding} did not give chunk {name.hex()} back: bad memory on the "
                "machine, or a broken codec library; nothing was sent"
            )
        took = time.perf_counter() - wall
        self._encoded += took
        self._encoded_cpu += time.thread_time() - cpu
        self._by_step += took if encoder.effort.changes(encoding) else 0.0
        return encoding, encoded

    def flush(self) -> None:
        """Send the open pack; afterwards its chunks have places, in the journal too."""
        if not self._bytes or self._grant is None:
            self._share.done = self._jobs
            return
        filled = self._buffer[: self._bytes]
        md5 = hashlib.md5(filled, usedforsecurity=False).digest()
        started = time.perf_counter()
        pack = Pack(pack_id_of(self._grant.key), self._bytes, md5)
        with self._source.encoder.effort.sending():
            self._sender.put(self._grant, [filled], md5)
        located = self._source.table.settle(pack, self._places)
        self._source.journal.append(pack, located)
        ended = time.perf_counter()
        self._share.done = self._jobs
        self._share.new_bytes += sum(chunk.plain for chunk in located)
        self._share.stored_bytes += self._bytes
        self._source.encoder.effort.note(
            Pace(
                self._step,
                started - self._opened,
                self._encoded,
                self._encoded_cpu,
                self._by_step,
                ended - started,
            )
        )
        self._grant = None
        self._places, self._bytes = [], 0
        self._begin_pack()

    def _begin_pack(self) -> None:
        self._opened = time.perf_counter()  # when the open pack began to be filled
        self._step = self._source.encoder.effort.step
        # seconds of encoding for it: by both clocks, and of chunks that the step matters to
        self._encoded = self._encoded_cpu = self._by_step = 0.0

    def give_back(self) -> None:
        """Release the claims of a pack that was not sent; none after a flush."""
        self._source.table.release([number for number, _ in self._places])


def _comes_back(encoding: int, encoded: Buffer, plain: Buffer) -> bool:
    try:
        return encoding == RAW.code or decode_chunk(encoding, encoded, len(plain)) == plain
    except SnapshotDamaged:
        return False
