"""The manifest: the one object that describes a snapshot completely."""

from __future__ import annotations

import struct
from array import array
from collections import deque
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, islice
from typing import Any, Final, NamedTuple

import msgspec
import zstandard

from torpor.shared.errors import ManifestInvalid, WrongKey
from torpor.shared.format.computed import Computed
from torpor.shared.format.keys import Seal
from torpor.shared.format.rows import (
    NO_CHUNK,
    Described,
    Listed,
    NotPlain,
    check_rows,
    count_rows,
    describe_rows,
    fill_rows,
    list_rows,
    row_ends,
)
from torpor.shared.values import GIB, MIB, SnapshotId, WorkspaceName

VERSION: Final = 1
MAGIC: Final = b"TORPOR\r\n"
MAX_BODY_BYTES: Final = 2 * GIB
BOMB_BYTES: Final = 16 * MIB
BOMB_RATIO: Final = 1000
"""A manifest body over 16 MiB is at most this many times as long as its zstd frame. Without the
limit, 60 KiB of frame could claim 2 GiB of zeros; a real entry takes more than a byte of the
frame."""
MAX_ROOTS: Final = 100_000
MAX_SKIPPED: Final = 1_000_000
MAX_FIGURES: Final = 10_000
MAX_FACTS: Final = 10_000
MAX_FACT_VALUES: Final = 200_000
"""The most values in a whole environment record, keys included: 20,000 packages of each kind are
80,000 values."""
MAX_FACT_DEPTH: Final = 8
HASH_BYTES: Final = 24
"""The least bytes of frame for each chunk and pack of a manifest. Each has a name of 32 random
bytes, which no compression makes much shorter. HASHES_FREE chunks and packs are exempt."""
HASHES_FREE: Final = 100_000
MAX_CHUNK_BYTES: Final = 16 * MIB
HOLE: Final = -1

FILE, DIRECTORY, SYMLINK, HARDLINK = 0, 1, 2, 3

_HEADER = struct.Struct("<8sHHQ32s8s")
_SEALED = 1
HEADER_BYTES: Final = _HEADER.size


class Extent(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """``length`` bytes from ``offset`` of a chunk, or a hole (chunk == HOLE)."""

    chunk: int
    offset: int
    length: int


class Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One name in the tree and everything that is true of it."""

    kind: int
    root: int
    path: bytes
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    size: int
    extents: tuple[Extent, ...] = ()
    target: bytes = b""
    digest: bytes = b""
    xattrs: tuple[tuple[bytes, bytes], ...] = ()
    changed: bool = False


EntryId = tuple[int, bytes]
"""A root's number and a path below it: an entry of a workspace."""


class EntryHead(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The first fields of an entry, without its content."""

    kind: int
    root: int
    path: bytes


class Content(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What is known of an entry's content once its file was read. ``changed``: the file changed
    while it was read."""

    size: int  # bytes
    extents: tuple[Extent, ...]
    digest: bytes
    changed: bool = False

    def put_into(self, entry: Entry) -> Entry:
        return msgspec.structs.replace(
            entry,
            size=self.size,
            extents=self.extents,
            digest=self.digest,
            changed=self.changed,
        )


class ReadContents(Computed[Content]):
    """The contents of files that were read, as MessagePack, one behind the other."""

    def __init__(self) -> None:
        self.rows = bytearray()
        self.ends = array("Q", (0,))

    def extend(self, contents: Iterable[Content]) -> None:
        packed = [*map(_encode, contents)]
        ends = accumulate(map(len, packed), initial=len(self.rows))
        self.rows += b"".join(packed)
        self.ends.extend(islice(ends, 1, None))

    def __len__(self) -> int:
        return len(self.ends) - 1

    def at(self, number: int) -> Content:
        return _decode_content(self.rows[self.ends[number] : self.ends[number + 1]])


_BLOCK_BYTES: Final = 4096
_LARGE: Final = 1024  # bytes of an entry: larger ones are kept unpacked
_LEAST_ENTRY: Final = 10  # bytes of the shortest entry
_encode: Final = msgspec.msgpack.Encoder().encode
_decode_content: Final = msgspec.msgpack.Decoder(Content).decode
_decode: Final = msgspec.msgpack.Decoder(Entry).decode
_decode_place: Final = msgspec.msgpack.Decoder(EntryHead).decode
_RAWS: Final = msgspec.msgpack.Decoder(list[msgspec.Raw])


class Totals(NamedTuple):
    """Totals of the files among some entries. ``changed``: paths of the files that changed while
    they were read; ``used``: the numbers of their chunks, in order."""

    files: int
    size: int  # of all files, in bytes
    changed: list[bytes]
    used: list[int]


class Entries(Computed[Entry]):
    """Entries as MessagePack, one behind the other, as in a manifest: about 130 bytes each, where
    Python objects take 600. Each access makes a new object, so compare with ``==`` and not with
    ``is``."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._rows = bytearray()
        self._ends = array("Q", (0,))  # in bytes: where each row ends, after a first 0
        # files of many chunks, decoded once: each of their chunks asks for its file
        self._large: dict[int, Entry] = {}
        for entry in entries:
            self.append(entry)

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Entries:
        return entries if isinstance(entries, Entries) else cls(entries)

    @classmethod
    def unpacked(cls, packed: msgspec.Raw) -> Entries:
        """The entries of a MessagePack array. Raises msgspec.MsgspecError where it holds anything
        else, UnicodeDecodeError or RecursionError."""
        new = cls()
        with memoryview(packed) as whole:
            try:
                count, start = _head(whole)
                new._ends = row_ends(whole[start:], count)
            except NotPlain:
                raws = _RAWS.decode(packed)
                deque(map(_decode, raws), maxlen=0)
                new._ends.extend(accumulate(len(memoryview(raw)) for raw in raws))
            new._rows += whole[len(whole) - new._ends[-1] :]
        return new

    def packed(self) -> tuple[bytes, bytearray]:
        """The head of a MessagePack array for these entries, and the entries."""
        count = len(self)
        if count < 16:
            return bytes([0x90 | count]), self._rows
        if count < 1 << 16:
            return struct.pack(">BH", 0xDC, count), self._rows
        return struct.pack(">BI", 0xDD, count), self._rows

    def check(self, plain: array[int], roots: int) -> bool:
        """Check these entries; see rows.check_rows. Raises NotPlain."""
        return check_rows(self._rows, self._ends, plain, roots)

    def listed(self, changed: bytearray | None = None) -> Iterator[Listed]:
        """List these entries; see rows.list_rows. Raises NotPlain."""
        return list_rows(self._rows, self._ends, changed)

    def totals(self, chunks: int) -> Totals:
        """Count the files among these entries. ``chunks``: how many chunks there are. Raises
        IndexError for an entry that names a chunk beyond them."""
        try:
            counted = count_rows(self._rows, self._ends, chunks)
        except NotPlain:
            return self._totals(chunks)
        changed = []
        if counted.changed:
            changed = [entry.path for entry in self if entry.changed and entry.kind == FILE]
        used = [number for number, is_used in enumerate(counted.used) if is_used]
        return Totals(counted.files, counted.size, changed, used)

    def _totals(self, chunks: int) -> Totals:
        used = sorted({e.chunk for entry in self for e in entry.extents if e.chunk >= 0})
        if used and used[-1] >= chunks:
            raise IndexError(f"chunk {used[-1]} of {chunks}")
        files = [entry for entry in self if entry.kind == FILE]
        changed = [entry.path for entry in files if entry.changed]
        return Totals(len(files), sum(entry.size for entry in files), changed, used)

    def described(self) -> Described:
        """Describe these entries; see rows.describe_rows. Raises NotPlain."""
        return describe_rows(self._rows, self._ends)

    def filled(self, contents: ReadContents, at: array[int]) -> Entries:
        """These entries with contents filled in: entry i gets ``contents[at[i]]``, and stays as it
        is where ``at[i]`` is -1."""
        new = Entries()
        try:
            new._rows, new._ends = fill_rows(
                self._rows, self._ends, contents.rows, contents.ends, at
            )
        except NotPlain:
            for entry, number in zip(self, at, strict=True):
                new.append(entry if number < 0 else contents.at(number).put_into(entry))
        return new

    def append(self, entry: Entry) -> None:
        self._rows += _encode(entry)
        self._ends.append(len(self._rows))

    def take(self, others: Entries, first: int, end: int) -> None:
        """Append ``others`` from position ``first`` to ``end``."""
        start = others._ends[first]
        moved = len(self._rows) - start
        with memoryview(others._rows) as rows:
            self._rows += rows[start : others._ends[end]]
        ends = others._ends[first + 1 : end + 1]
        self._ends.extend([at + moved for at in ends] if moved else ends)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def at(self, number: int) -> Entry:
        start, end = self._ends[number], self._ends[number + 1]
        if end - start <= _LARGE:
            return _decode(self._rows[start:end])
        if number not in self._large:
            self._large[number] = _decode(self._rows[start:end])
        return self._large[number]

    def places(self, numbers: Iterable[int]) -> Iterator[EntryHead]:
        """The head of each entry with one of these numbers."""
        for number in numbers:
            yield _decode_place(self._rows[self._ends[number] : self._ends[number + 1]])

    def __iter__(self) -> Iterator[Entry]:
        rows = memoryview(self._rows)
        return map(
            _decode, map(rows.__getitem__, map(slice, self._ends, islice(self._ends, 1, None)))
        )

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Entries):
            return self._rows == other._rows and len(self) == len(other)
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


def described(entries: Sequence[Entry]) -> Described:
    """What each entry is. No Python object is made for a packed entry."""
    if isinstance(entries, Entries):
        with suppress(NotPlain):
            return entries.described()
    found = Described(bytearray(), array("I"), array("q"), array("q"))
    for entry in entries:
        found.kinds.append(entry.kind)
        found.roots.append(entry.root)
        found.sizes.append(entry.size)
        is_one = len(entry.extents) == 1 and entry.extents[0].length == entry.size
        found.chunks.append(max(entry.extents[0].chunk, NO_CHUNK) if is_one else NO_CHUNK)
    return found


def content_bytes(
    entries: Sequence[Entry], roots: int, there: Container[int] = frozenset()
) -> list[int]:
    """Bytes of each root's files that take space on a disk, without holes. ``there``: chunks that
    are not counted."""
    sizes = [0] * roots
    for number, (root, size, chunk) in enumerate(zip(*described(entries)[1:], strict=True)):
        if chunk != NO_CHUNK:
            sizes[root] += 0 if chunk in there else size
        elif size:
            sizes[root] += sum(
                extent.length
                for extent in entries[number].extents
                if extent.chunk != HOLE and extent.chunk not in there
            )
    return sizes


def disk_bytes(manifest: Manifest) -> int:
    """The most bytes that a disk needs for the snapshot: the contents of its files, and a block for
    each name, because a small file fills only a part of its block. Holes do not count: a sparse
    file of 1 TiB may hold 30 MB."""
    content = content_bytes(manifest.entries, len(manifest.roots))
    return sum(content) + len(manifest.entries) * _BLOCK_BYTES


def _head(packed: memoryview) -> tuple[int, int]:
    """The number of elements of a MessagePack array, and the position of the first. Raises NotPlain
    for anything else."""
    form = packed[0]
    if form & 0xF0 == 0x90:
        return form & 0x0F, 1
    if form == 0xDC:
        return struct.unpack_from(">H", packed, 1)[0], 3
    if form == 0xDD:
        return struct.unpack_from(">I", packed, 1)[0], 5
    raise NotPlain


class Chunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """``plain`` bytes of content, kept as ``stored`` bytes at ``offset`` of a pack."""

    name: bytes
    plain: int
    encoding: int
    pack: int
    offset: int
    stored: int


class Pack(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """An object of ``size`` bytes."""

    id: bytes
    size: int
    md5: bytes


class Skipped(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Something that exists on the machine and is not kept: a FIFO, socket or device."""

    root: int
    path: bytes
    kind: str


class Manifest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    workspace: WorkspaceName
    snapshot: SnapshotId
    parent: SnapshotId | None
    run: str
    created_unix: int
    machine: str
    roots: list[str]
    entries: Sequence[Entry]  # of type Entries where the manifest was read, or is to be stored
    chunks: list[Chunk]
    packs: list[Pack]
    skipped: list[Skipped]
    environment: dict[str, Any]
    statistics: dict[str, int]


_FIELDS: Final = Manifest.__struct_fields__
_ENTRIES: Final = _FIELDS.index("entries")
_ENVIRONMENT: Final = _FIELDS.index("environment")
_NO_ENTRIES: Final = msgspec.Raw(b"\x90")
_NO_FACTS: Final = msgspec.Raw(b"\x80")
_MOST: Final = {
    "roots": MAX_ROOTS,
    "skipped": MAX_SKIPPED,
    "environment": MAX_FACTS,
    "statistics": MAX_FIGURES,
}
_DECODER = msgspec.msgpack.Decoder(Manifest)
_RAW_FACTS: Final = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_decode_fact: Final = msgspec.msgpack.Decoder().decode


_NESTS: Final = {list, dict}
_PLAIN: Final = {type(None), bool, int, float, str, bytes}


def encode_manifest(manifest: Manifest, seal: Seal) -> tuple[bytes, bytes]:
    """The object's bytes and the root hash (32 bytes)."""
    body = _body(manifest)
    size = sum(map(len, body))
    hasher = seal.hasher()
    packer = zstandard.ZstdCompressor(level=1).compressobj(size=size)
    frame = bytearray()
    for part in body:
        hasher.update(part)
        frame += packer.compress(part)
    frame += packer.flush()
    root = hasher.digest()
    flags = _SEALED if seal.sealed else 0
    header = _HEADER.pack(MAGIC, VERSION, flags, size, root, seal.key_id)
    return header + bytes(seal.seal(frame, header)), root


def _body(manifest: Manifest) -> list[bytes | bytearray]:
    """The manifest as MessagePack, in pieces, so that its entries are not copied."""
    rows = Entries.of(manifest.entries)
    before, after = (
        b"".join(_encode(getattr(manifest, name)) for name in names)
        for names in (_FIELDS[:_ENTRIES], _FIELDS[_ENTRIES + 1 :])
    )
    return [bytes([0x90 | len(_FIELDS)]) + before, *rows.packed(), after]


def _decoded(body: bytes, frame_bytes: int, facts: Collection[str] | None) -> Manifest:
    if _count(msgspec.Raw(body)) != len(_FIELDS):
        raise msgspec.ValidationError(f"it is no array of {len(_FIELDS)} fields")
    fields = _RAWS.decode(body)
    _check_counts(dict(zip(_FIELDS, fields, strict=True)), frame_bytes)
    environment = _facts_of(fields[_ENVIRONMENT], facts)
    entries = Entries.unpacked(fields[_ENTRIES])
    fields[_ENTRIES], fields[_ENVIRONMENT] = _NO_ENTRIES, _NO_FACTS
    return msgspec.structs.replace(
        _DECODER.decode(_encode(fields)), entries=entries, environment=environment
    )


def _check_counts(fields: Mapping[str, msgspec.Raw], frame_bytes: int) -> None:
    """Refuse a manifest whose counts are too high, before objects are made of it: objects take many
    times the bytes of their records."""
    for name, most in _MOST.items():
        if (count := _count(fields[name])) > most:
            raise msgspec.ValidationError(f"{count} of `{name}`, at most {most} are read")
    hashes = _count(fields["chunks"]) + _count(fields["packs"])
    if (hashes - HASHES_FREE) * HASH_BYTES > frame_bytes:
        raise msgspec.ValidationError(f"{hashes} chunks and packs in {frame_bytes} bytes")
    if (count := _count(fields["entries"])) * _LEAST_ENTRY > len(memoryview(fields["entries"])):
        raise msgspec.ValidationError(f"{count} entries in fewer bytes than they have")


def _facts_of(packed: msgspec.Raw, wanted: Collection[str] | None) -> dict[str, Any]:
    """The environment record, or only its ``wanted`` facts."""
    # each value takes at least a byte, so a shorter record holds no more
    if len(memoryview(packed)) > MAX_FACT_VALUES:
        _check_values(memoryview(packed), MAX_FACT_VALUES)
    named = _RAW_FACTS.decode(packed).items()
    found = {name: _decode_fact(raw) for name, raw in named if wanted is None or name in wanted}
    _check_nesting(found, MAX_FACT_DEPTH)
    return found


def _check_nesting(value: dict[Any, Any] | list[Any], depth: int) -> None:
    """ValidationError unless it holds plain values, and arrays and maps that are ``depth`` deep."""
    inside: Collection[Any] = value if isinstance(value, list) else value.values()
    kinds = {*map(type, inside)}
    if (
        not depth
        or kinds - _PLAIN - _NESTS
        or (inside is not value and {*map(type, value)} - {str})
    ):
        raise msgspec.ValidationError("`environment` has a value that no reader takes")
    if kinds & _NESTS:
        for one in inside:
            if isinstance(one, (list, dict)):
                _check_nesting(one, depth - 1)


def _count(packed: msgspec.Raw) -> int:
    """The number of elements of a MessagePack array, or of pairs of a map; 0 for any other
    value."""
    with memoryview(packed) as whole:
        return _inside(whole, 0)[0]


def _inside(packed: memoryview, at: int) -> tuple[int, int]:
    """As _count, for the value at this position, with the position of its first element; 0 for any
    other value."""
    form = packed[at]
    if form & 0xF0 in (0x80, 0x90):
        return form & 0x0F, at + 1
    if form in (0xDC, 0xDE):
        return struct.unpack_from(">H", packed, at + 1)[0], at + 3
    if form in (0xDD, 0xDF):
        return struct.unpack_from(">I", packed, at + 1)[0], at + 5
    return 0, 0


def _check_values(packed: memoryview, most: int) -> None:
    """Raise ValidationError where a MessagePack value holds more than ``most`` values, itself and
    keys included."""
    at, left, seen = 0, 1, 0
    while left:
        left, seen = left - 1, seen + 1
        if seen + left > most:
            raise msgspec.ValidationError(f"`environment` has more than {most} values")
        count, inside = _inside(packed, at)
        if inside:
            is_map = packed[at] & 0xF0 == 0x80 or packed[at] in (0xDE, 0xDF)
            left, at = left + count * (1 + is_map), inside
        else:
            at += _length(packed, at)


def _length(packed: memoryview, at: int) -> int:
    """The length in bytes of the MessagePack value at this position, which is neither an array nor
    a map."""
    form = packed[at]
    if form < 0x80 or form >= 0xE0 or form in (0xC0, 0xC1, 0xC2, 0xC3):
        return 1
    if form & 0xE0 == 0xA0:
        return 1 + (form & 0x1F)
    if 0xCA <= form <= 0xD8:  # numbers, and extensions of a fixed length
        return (5, 9, 2, 3, 5, 9, 2, 3, 5, 9, 3, 4, 6, 10, 18)[form - 0xCA]
    width = 1 << (form - (0xD9 if form >= 0xD9 else 0xC4 if form < 0xC7 else 0xC7))
    extra = 1 if 0xC7 <= form <= 0xC9 else 0  # one byte more for the kind of an extension
    return 1 + width + extra + int.from_bytes(packed[at + 1 : at + 1 + width], "big")


def manifest_root(blob: bytes, what: str) -> bytes:
    """The root hash in the header, unchecked: for comparing with a known one."""
    return _header(blob, what)[2]


def manifest_key_id(blob: bytes, what: str) -> bytes:
    """The key id in the header, unchecked; zeros where the manifest is not sealed."""
    return _header(blob, what)[3]


def decode_manifest(
    blob: bytes, seal: Seal, what: str, facts: Collection[str] | None = None
) -> tuple[Manifest, bytes]:
    """Open, check the root hash and the types; ``what`` names the object in errors. ``facts``: read
    only these of the environment record.

    Raises ManifestInvalid or WrongKey. The caller still runs ``checks.check_manifest`` before it
    trusts a field.
    """
    sealed, body_bytes, root, key_id = _header(blob, what)
    if sealed != seal.sealed:
        raise WrongKey(
            f"{what} is {'sealed' if sealed else 'not sealed'}, and the store block "
            f"{'has a key' if seal.sealed else 'has no key'}: use the store block it was made with"
        )
    if key_id != seal.key_id:
        raise WrongKey(f"{what} was sealed with another key than the store block has")
    try:
        frame = seal.open(memoryview(blob)[_HEADER.size :], blob[: _HEADER.size])
    except WrongKey as exc:
        raise ManifestInvalid(f"{what} is damaged: {exc}") from None
    try:
        # content size is checked against the header's claim before a byte is allocated
        if zstandard.frame_content_size(bytes(memoryview(frame)[:32])) != body_bytes:
            raise ManifestInvalid(f"{what} is damaged: its body is not as long as it says")
        if body_bytes > max(BOMB_BYTES, BOMB_RATIO * len(frame)):
            raise ManifestInvalid(
                f"{what} would unpack {len(frame)} bytes into {body_bytes}: refused as a bomb"
            )
        body = zstandard.ZstdDecompressor().decompress(
            frame, max_output_size=body_bytes, allow_extra_data=False
        )
    except zstandard.ZstdError as exc:
        raise ManifestInvalid(f"{what} is damaged: {exc}") from None
    if seal.name(body) != root:
        raise ManifestInvalid(f"{what} is damaged: its content does not match its root hash")
    try:
        return _decoded(body, len(frame), facts), root
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, IndexError) as exc:
        raise ManifestInvalid(f"{what} is not a manifest of version {VERSION}: {exc}") from None


def _header(blob: bytes, what: str) -> tuple[bool, int, bytes, bytes]:
    if len(blob) < _HEADER.size or blob[: len(MAGIC)] != MAGIC:
        raise ManifestInvalid(f"{what} is not a torpor manifest, or was cut short ({len(blob)} B)")
    _, version, flags, body_bytes, root, key_id = _HEADER.unpack_from(blob)
    if version != VERSION:
        raise ManifestInvalid(
            f"{what} has format version {version}, this torpor reads version {VERSION}: "
            "use a newer torpor"
        )
    if flags & ~_SEALED:
        raise ManifestInvalid(f"{what} has unknown flags {flags:#x}: use a newer torpor")
    if body_bytes > MAX_BODY_BYTES:
        raise ManifestInvalid(f"{what} says that its body has {body_bytes} bytes: refused")
    if not flags & _SEALED and any(key_id):
        raise ManifestInvalid(f"{what} is not sealed and names a key: refused")
    return bool(flags & _SEALED), body_bytes, root, key_id
