"""The ``planes`` and ``rans`` codecs: elements cut into byte planes, each plane coded on its own.

Floating-point weights keep nearly all their redundancy in the exponent. With the sign turned out
of its byte, the exponents of BF16 take about 2.7 bits each, and the rest is noise that is stored
as it is. The stream is specified in docs/planes.md. ``planes`` uses stock zstd frames and raw
planes only; ``rans`` may also hold planes in the open rANS format, which a GPU writes and reads.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple, Protocol

import zstandard

from gpu_kernels import twin
from gpu_kernels.rans.portable import RansStreamError
from torpor.shared.codecs.layout import RUNS_MAX, Element, Run, covered, tidy
from torpor.shared.codecs.memory import Memory
from torpor.shared.errors import SnapshotDamaged

Buffer = bytes | bytearray | memoryview
Way = Callable[[Buffer], Buffer]
"""A function that makes the frame of a plane."""
Places = Sequence[tuple[int, int]]
"""The (offset, bytes) of all runs of one element in a chunk."""


class Method(IntEnum):
    """How one plane is stored; the number is its code in a stream."""

    RAW = 0
    ZSTD = 1
    RANS = 2


VERSION: Final = 1
PLAIN_MAX: Final = 1 << 30
"""The most plain bytes that one stream may claim to decode to (1 GiB)."""

_HEAD: Final = struct.Struct("<BBH")  # version, zero, runs
_RUN: Final = struct.Struct("<BI")  # element, bytes
_PLANE: Final = struct.Struct("<BI")  # method, stored bytes
_SAMPLE: Final = 8 << 10  # bytes of each of up to four samples of a plane
_ROOM_MAX: Final = 16 << 20  # bytes that a thread keeps at most as room for cutting chunks
_WORTH: Final = 0.985  # a plane whose sample shrinks less than this stays raw
# a slower way is taken only if its frame is smaller than this share of the faster way's
_RICHER: Final = 0.95
_VANISHING: Final = 16  # a sample that shrinks more than this many times counts as constant

# Huffman coding without a search for matches: a stock frame at 1 GB/s and more. A target length of
# 1, or a negative level, would switch the Huffman coding off as well.
_HUFFMAN: Final = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, window_log=18, target_length=0
)


class _Coders(threading.local):
    """What a thread keeps: zstd's contexts, and room for the planes of one chunk.

    Making a context is costly, and threads that run at once cannot share one. Fresh memory for
    every chunk would cost a tenth of the encoding time in page faults.
    """

    def __init__(self) -> None:
        self._room = bytearray()
        self.huffman = zstandard.ZstdCompressor(compression_params=_HUFFMAN)
        self.fast = zstandard.ZstdCompressor(level=1)
        self.text = zstandard.ZstdCompressor(level=3)
        self.decoder = zstandard.ZstdDecompressor()

    def room(self, size: int) -> memoryview:
        """Room for ``size`` bytes until this thread's next chunk is encoded."""
        if size > _ROOM_MAX:
            return memoryview(bytearray(size))
        if len(self._room) < size:
            self._room = bytearray(size)
        return memoryview(self._room)[:size]


_coders: Final = _Coders()


@dataclass(frozen=True)
class PlanesCodec:
    """One of the two codecs of this format; they differ in the methods that a plane may have."""

    name: str
    code: int
    methods: frozenset[Method]

    def encode(
        self, plain: Buffer, layout: Sequence[Run] = (), pack: Packer | None = None
    ) -> bytes | None:
        """The stream of ``plain``, whose runs the layout gives; None when nothing is gained.

        The layout must cover ``plain`` exactly. A wrong element costs ratio, nothing else. ``pack``
        replaces the packing on this thread, for example by a GPU.
        """
        plain = memoryview(plain).cast("B")
        runs = tuple(tidy(layout))
        if covered(runs) != len(plain):
            raise ValueError(f"a layout of {covered(runs)} bytes for {len(plain)} bytes")
        if not plain or len(plain) > PLAIN_MAX or len(runs) > RUNS_MAX:
            return None
        head = [_HEAD.pack(VERSION, 0, len(runs)), *(_RUN.pack(e, size) for size, e in runs)]
        body: list[Buffer] = []
        gained, room = False, _coders.room(len(plain))
        for element, places in _groups(runs):
            size = sum(size for _, size in places)
            here, room = room[:size], room[size:]
            for method, stored in (pack or self.pack_all)(plain, element, places, here):
                gained = gained or method is not Method.RAW
                head.append(_PLANE.pack(method, len(stored)))
                body.append(stored)
        if not gained or sum(map(len, head)) + sum(map(len, body)) >= len(plain):
            return None
        return b"".join((*head, *body))

    def decode(
        self,
        stored: Buffer,
        plain_bytes: int,
        into: Memory | None = None,
        unpack: Unpacker | None = None,
    ) -> memoryview:
        """Exactly ``plain_bytes``; raises SnapshotDamaged on any stream that is not right.

        Takes at most 2 * plain_bytes of memory beyond the stream; ``into`` lends that of the
        result. ``unpack`` replaces the decoding on this thread, for example by a GPU.
        """
        stored = memoryview(stored).cast("B")
        runs, at = self._read_runs(stored, plain_bytes)
        groups = list(_groups(runs))
        lengths: list[tuple[Method, int]] = []
        for element, _ in groups:
            for _ in range(element.width):
                lengths.append(self._read_plane(stored, at))
                at += _PLANE.size
        if at + sum(length for _, length in lengths) != len(stored):
            raise self._damaged("its planes do not add up to its size")
        lent = memoryview(bytearray(plain_bytes)) if into is None else into(plain_bytes)
        plain = lent[:plain_bytes]
        for element, places in groups:
            size = sum(size for _, size in places) // element.width
            planes = []
            for method, length in lengths[: element.width]:
                planes.append(StoredPlane(method, stored[at : at + length], size))
                at += length
            del lengths[: element.width]
            try:
                (unpack or self.unpack_all)(plain, element, places, planes)
            except RansStreamError as error:
                raise self._damaged(str(error)) from error
        return plain

    def pack_all(
        self, plain: memoryview, element: Element, places: Places, room: memoryview
    ) -> list[tuple[Method, Buffer]]:
        """Cut and store all planes of one element on this thread."""
        ways = choose_ways(plain, element, places)
        planes = _cut(plain, element, places, room)
        return [self.pack(plane, way) for plane, way in zip(planes, ways, strict=True)]

    def pack(self, plane: memoryview, way: Way | None) -> tuple[Method, Buffer]:
        """Store one plane as ``way`` frames it, or raw where the frame would be longer."""
        if way is huffman and Method.RANS in self.methods:
            stream = twin.rans_encode(plane, len(plane) - 1)
            if stream is not None:
                return Method.RANS, stream
        frame = plane if way is None else way(plane)
        return (Method.ZSTD, frame) if len(frame) < len(plane) else (Method.RAW, plane)

    def unpack_all(
        self,
        plain: memoryview,
        element: Element,
        places: Places,
        planes: Sequence[StoredPlane],
    ) -> None:
        """Decode and join all planes of one element on this thread."""
        _join(plain, element, places, [self.unpack(plane) for plane in planes])

    def unpack(self, plane: StoredPlane) -> Buffer:
        """Decode one plane; raises SnapshotDamaged or RansStreamError."""
        method, stored, size = plane
        if method is Method.ZSTD:
            return self._inflate(stored, size)
        if method is Method.RANS:
            return twin.rans_decode(stored, size)
        if len(stored) != size:
            raise self._damaged("a raw plane has the wrong size")
        return stored

    def _inflate(self, frame: memoryview, size: int) -> bytes:
        """One zstd frame whose header promises exactly ``size``: nothing else is allocated."""
        try:
            if zstandard.get_frame_parameters(frame).content_size != size:
                raise self._damaged("a zstd frame holds another size than its plane")
            plane = _coders.decoder.decompress(frame, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise self._damaged(f"zstd refuses a plane ({error})") from error
        if len(plane) != size:
            raise self._damaged("a zstd frame holds another size than its plane")
        return plane

    def _read_runs(self, stored: memoryview, plain_bytes: int) -> tuple[list[Run], int]:
        if len(stored) < _HEAD.size:
            raise self._damaged("it ends within its header")
        version, zero, count = _HEAD.unpack_from(stored)
        at = _HEAD.size + count * _RUN.size
        if version != VERSION or zero:
            raise self._damaged(f"version {version} is unknown here; a newer torpor may read it")
        if not 0 < count <= RUNS_MAX or len(stored) < at or plain_bytes > PLAIN_MAX:
            raise self._damaged("it ends within its header or is beyond the format's limits")
        runs: list[Run] = []
        for code, size in _RUN.iter_unpack(stored[_HEAD.size : at]):
            if code >= len(Element) or not size or size % Element(code).width:
                raise self._damaged("a run is empty, of no known element, or cuts one")
            runs.append(Run(size, Element(code)))
        if covered(runs) != plain_bytes:
            raise self._damaged(f"its runs make {covered(runs)} bytes, not {plain_bytes}")
        return runs, at

    def _read_plane(self, stored: memoryview, at: int) -> tuple[Method, int]:
        if len(stored) < at + _PLANE.size:
            raise self._damaged("it ends within its header")
        code, length = _PLANE.unpack_from(stored, at)
        if code not in self.methods:
            raise self._damaged(f"method {code} is not one that {self.name!r} knows")
        return Method(code), length

    def _damaged(self, why: str) -> SnapshotDamaged:
        return SnapshotDamaged(
            f"a chunk of codec {self.name!r} cannot be decoded: {why}; run verify on the snapshot"
        )


class StoredPlane(NamedTuple):
    """A plane as it is stored, and its plain bytes."""

    method: Method
    stored: memoryview
    plain_bytes: int


class Packer(Protocol):
    """Makes the planes of all runs of one element, in their order, as they are stored."""

    def __call__(
        self, plain: memoryview, element: Element, places: Places, room: memoryview
    ) -> Sequence[tuple[Method, Buffer]]:
        """``room`` is as large as the runs together; the returned buffers may lie in it."""


class Unpacker(Protocol):
    """Decodes the planes of all runs of one element, and puts them into ``plain``."""

    def __call__(
        self,
        plain: memoryview,
        element: Element,
        places: Places,
        planes: Sequence[StoredPlane],
    ) -> None: ...


PLANES: Final = PlanesCodec("planes", 3, frozenset({Method.RAW, Method.ZSTD}))
RANS: Final = PlanesCodec("rans", 4, frozenset(Method))


def choose_ways(plain: memoryview, element: Element, places: Places) -> list[Way | None]:
    """How to make each plane's frame, from four samples of each. The planes need not be cut yet."""
    elements = sum(size for _, size in places) // element.width
    step, width = max(elements // 4, _SAMPLE), element.width
    samples = memoryview(
        b"".join(
            part
            for at in range(0, elements, step)
            for part in _within(plain, places, at * width, min(at + _SAMPLE, elements) * width)
        )
    )
    room = memoryview(bytearray(len(samples) if width > 1 else 0))
    return [
        _choose(sample, element) for sample in _cut(samples, element, [(0, len(samples))], room)
    ]


def _groups(runs: Sequence[Run]) -> Iterator[tuple[Element, list[tuple[int, int]]]]:
    """Each element that occurs, by its code, with the (offset, bytes) of all its runs."""
    places: dict[Element, list[tuple[int, int]]] = {}
    at = 0
    for size, element in runs:
        places.setdefault(element, []).append((at, size))
        at += size
    yield from sorted(places.items())


def _cut(plain: memoryview, element: Element, places: Places, room: memoryview) -> list[memoryview]:
    """The planes of all runs of one element, one run behind the other, in ``room`` if cut."""
    width = element.width
    if width == 1:
        if len(places) == 1:
            return [plain[places[0][0] : places[0][0] + places[0][1]]]
        return [memoryview(b"".join(plain[at : at + size] for at, size in places))]
    elements = len(room) // width
    planes = [room[p * elements : (p + 1) * elements] for p in range(width)]
    done = 0
    for at, size in places:
        part = [plane[done : done + size // width] for plane in planes]
        twin.split(plain[at : at + size], width, element.turned, part)
        done += size // width
    return planes


def _join(
    plain: memoryview,
    element: Element,
    places: Places,
    planes: Sequence[Buffer],
) -> None:
    """Put the planes of one element back to where its runs are."""
    width, done = element.width, 0
    views = [memoryview(plane) for plane in planes]
    for at, size in places:
        part = [view[done : done + size // width] for view in views]
        if width == 1:
            plain[at : at + size] = part[0]
        else:
            twin.join(part, width, element.turned, plain[at : at + size])
        done += size // width


def huffman(plane: Buffer) -> Buffer:
    """A stock zstd frame of Huffman codes alone, without matches."""
    frame: bytes = _coders.huffman.compress(plane)
    return frame


def _choose(sample: memoryview, element: Element) -> Way | None:
    """How to make a plane's frame, from samples of it; None where raw is as good."""
    search = _coders.text.compress if element is Element.BYTES else _coders.fast.compress
    coded, searched = len(huffman(sample)), len(search(sample))
    if min(coded, searched) >= _WORTH * len(sample):
        return None
    # Samples that nearly vanish do not show what the bytes between them are: a search for matches
    # copes with both cases.
    if searched < _RICHER * coded or coded < len(sample) // _VANISHING:
        return search
    return huffman


def _within(plain: memoryview, places: Places, start: int, end: int) -> Iterator[memoryview]:
    """Bytes ``start`` to ``end`` of the runs, as if they lay one behind the other."""
    for at, size in places:
        if start < size and end > 0:
            yield plain[at + max(start, 0) : at + min(end, size)]
        start, end = start - size, end - size
