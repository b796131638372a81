"""nvCOMP on batches of chunks: its kernels lie on a device's queues, between our own copies.

``lz4`` and ``zstd`` are raw bitstreams: of each chunk a stock LZ4 block or zstd frame, which CPU
libraries read. What ``ans``, ``gdeflate`` and ``bitcomp`` make is nvCOMP's own, and its next
release may not read it: it is Transient, for benchmarks and between machines of one version.
Optional (``torpor[gpu]``), and written for the Python interface of nvCOMP 6.
"""

from __future__ import annotations

import ctypes
import importlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any, Final, NamedTuple, Protocol, TypeVar, cast

from blake3 import blake3

from gpu_kernels.device import ALIGN, Device, Memory, Queue
from gpu_kernels.driver import GpuError
from gpu_kernels.native import Buffer

CHUNK_BYTES: Final = 4 << 20
CHUNK_MAX: Final = 1 << 24
"""The most that nvCOMP's LZ4, ANS and Bitcomp take as one chunk (lz4.h, ans.h, bitcomp.h)."""
BATCH: Final = 16
"""Chunks that are given to the GPU at once."""
LANES: Final = 2
"""Queues: while one batch is worked on, the next is copied to the GPU or the last one back."""
PART_BYTES: Final = 65_536
"""What nvCOMP cuts a chunk into for its own bitstreams; its headers advise it for speed."""

_NAMES: Final = {
    "lz4": "LZ4", "zstd": "Zstd", "ans": "ANS", "gdeflate": "GDeflate", "bitcomp": "Bitcomp",
}  # fmt: skip
STOCK: Final = frozenset({"lz4", "zstd"})
TRANSIENT: Final = frozenset(_NAMES) - STOCK
_WIDTHS: Final = {
    "BYTES": 1, "F8": 1, "F16": 2, "BF16": 2, "F32": 4, "F64": 8, "I16": 2, "I32": 4, "I64": 8,
}  # fmt: skip
# ANS: "<f2" stands for every half-precision format (ans.h). Bitcomp: integers, in each release.
_ANS_TYPES: Final = {"F8": "|f1", "F16": "<f2", "BF16": "<f2", "F32": "<f4"}
_BITCOMP_TYPES: Final = {1: "|u1", 2: "<u2", 4: "<u4", 8: "<u8"}
_MAJOR: Final = "6"

_T = TypeVar("_T")


class NvcompError(GpuError):
    """nvCOMP cannot be used, or failed: the message says why, in one line for a log."""


class EncodedRefused(Exception):
    """Bytes that no decoder was given: damaged, of another size, or of another nvCOMP."""


@dataclass(frozen=True)
class Encoded:
    """One chunk as nvCOMP takes and makes it; ``digest`` is the BLAKE3 of ``stored``."""

    algorithm: str
    plain_bytes: int
    stored: bytes = field(repr=False)
    digest: bytes = field(repr=False)


@dataclass(frozen=True)
class Stock(Encoded):
    """An LZ4 block or a zstd frame, by any encoder."""

    def __post_init__(self) -> None:
        if self.algorithm not in STOCK:
            raise ValueError(f"{self.algorithm!r} is no stock format; these are {sorted(STOCK)}")


@dataclass(frozen=True)
class Transient(Encoded):
    """A bitstream of nvCOMP's own, of no use under any version but the one that made it.

    It has no code and is no buffer, so nothing that writes a snapshot takes it.
    """

    nvcomp_version: str

    def __post_init__(self) -> None:
        if self.algorithm not in TRANSIENT:
            raise ValueError(f"{self.algorithm!r} is not nvCOMP's own: {sorted(TRANSIENT)} are")


class BatchArray(Protocol):
    """Buffers as nvCOMP holds them."""

    @property
    def buffer_sizes(self) -> Sequence[int]:
        """Bytes of each buffer; waits for the work that writes them."""


class Codec(Protocol):
    """``nvidia.nvcomp.Codec``, as far as it is used here. RuntimeError and ValueError say no."""

    def encode(
        self, srcs: BatchArray, out: BatchArray, compression_config: Any = None
    ) -> BatchArray:
        """Put the work on the codec's stream and return at once."""

    def decode(
        self, srcs: BatchArray, *, out: BatchArray, decompression_config: Any = None
    ) -> BatchArray:
        """As ``encode``, but without a config it waits for the stream, to read the sizes."""

    def compression_config(self, uncompressed_sizes: Sequence[int]) -> Any: ...
    def decompression_config(self, compression_config: Any) -> Any: ...
    def get_max_comp_buffer_size(self, source: Any) -> int: ...


class Nvcomp(Protocol):
    """The module ``nvidia.nvcomp``."""

    @property
    def __version__(self) -> str: ...
    @property
    def BitstreamKind(self) -> Any: ...  # noqa: N802  (nvCOMP's name)
    def Codec(self, **settings: Any) -> Codec: ...  # noqa: N802
    def as_array(self, source: Any) -> Any: ...
    def as_arrays(self, sources: Sequence[Any], *, cuda_stream: int) -> BatchArray: ...


class Lane(NamedTuple):
    """A queue, and a codec whose work goes onto it."""

    queue: Queue
    codec: Codec


def load() -> Nvcomp:
    """The library; NvcompError where it is not installed, or not the one this was written for.

    It loads without a driver; a Device tells whether there is one.
    """
    try:
        library = importlib.import_module("nvidia.nvcomp")
    except (ImportError, OSError) as error:
        raise NvcompError(f"nvCOMP is not here ({error}): install torpor[gpu]") from error
    version = str(library.__version__)
    if version.partition(".")[0] != _MAJOR:
        raise NvcompError(f"nvCOMP {version} is here, torpor knows {_MAJOR}: install torpor[gpu]")
    return cast(Nvcomp, library)


def settings(library: Nvcomp, algorithm: str, element: str, chunk_bytes: int) -> dict[str, Any]:
    """What ``nvidia.nvcomp.Codec`` is made with, besides its stream. ``element`` is a name of
    torpor.shared.codecs.layout.Element."""
    if algorithm not in _NAMES or element not in _WIDTHS:
        raise ValueError(f"nvCOMP has no {algorithm!r} of {element!r}; it has {sorted(_NAMES)}")
    made: dict[str, Any] = {"algorithm": _NAMES[algorithm]}
    if algorithm in STOCK:
        kind, part_bytes = library.BitstreamKind.RAW, chunk_bytes
    else:
        kind, part_bytes = library.BitstreamKind.NVCOMP_NATIVE, PART_BYTES
    if algorithm == "ans":
        made["data_type"] = _ANS_TYPES.get(element, "|u1")
    elif algorithm == "bitcomp":
        made["data_type"] = _BITCOMP_TYPES[_WIDTHS[element]]
    return made | {"bitstream_kind": kind, "uncomp_chunk_size": part_bytes}


def bound_of(library: Nvcomp, made: dict[str, Any], chunk_bytes: int) -> int:
    """The most bytes that a codec of those settings makes of a chunk."""
    like = library.as_array(_OnHost(chunk_bytes))
    return int(library.Codec(**made).get_max_comp_buffer_size(like))


def arrays(library: Nvcomp, queue: Queue, memories: Sequence[Memory]) -> BatchArray:
    """Memory of the queue as nvCOMP takes it; nothing is copied."""
    runs = [_OnDevice(memory, queue.stream) for memory in memories]
    return library.as_arrays(runs, cuda_stream=queue.stream)


def sizes_of(queue: Queue, made: BatchArray, rooms: Sequence[Memory], algorithm: str) -> list[int]:
    """How much of each room nvCOMP has filled; waits for the work on the queue."""
    queue.wait()  # with our patience; nvCOMP's own has no end
    sizes = [int(size) for size in made.buffer_sizes]
    if len(sizes) != len(rooms) or any(
        not 0 < size <= room.bytes for size, room in zip(sizes, rooms, strict=True)
    ):
        raise NvcompError(f"nvCOMP's {algorithm} claims {sizes} bytes: out of bounds")
    return sizes


@contextmanager
def as_ours(what: str) -> Iterator[None]:
    """Raise nvCOMP's errors as ours."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise NvcompError(f"nvCOMP's {what}: {error}") from error


def digest_of(stored: Buffer) -> bytes:
    """The digest that an Encoded of ``stored`` must carry."""
    return blake3(stored).digest()


class Batches:
    """Encodes and decodes chunks with one algorithm on one device. For one thread, and for one
    ``encode`` or ``decode`` at a time.

    Takes ``device_bytes`` of the device and as much pinned memory of the host, until it is closed;
    nvCOMP takes memory of its own besides. GpuError where the GPU or nvCOMP fails.
    """

    def __init__(
        self,
        device: Device,
        library: Nvcomp,
        algorithm: str,
        element: str = "BYTES",
        chunk_bytes: int = CHUNK_BYTES,
        batch: int = BATCH,
    ) -> None:
        if not 0 < chunk_bytes <= CHUNK_MAX or batch < 1:
            raise ValueError(f"{batch} chunks of {chunk_bytes} bytes: the limit is {CHUNK_MAX}")
        self.algorithm = algorithm
        self.version = library.__version__
        self._device = device
        self._library = library
        self._chunk_bytes = chunk_bytes
        self._width = 1 if algorithm in STOCK else _WIDTHS.get(element, 1)
        self._batch = batch
        self._at_work = False
        made = settings(library, algorithm, element, chunk_bytes)
        device.enter()
        with as_ours(f"{algorithm} cannot be set up"):
            self.bound = bound_of(library, made, chunk_bytes)
            lane_bytes = batch * (_aligned(chunk_bytes) + _aligned(self.bound))
            self.device_bytes = LANES * lane_bytes
            queues = [device.queue(lane_bytes, lane_bytes) for _ in range(LANES)]
            self.lanes = [
                Lane(queue, library.Codec(**made, cuda_stream=queue.stream)) for queue in queues
            ]

    def encode(self, plains: Iterable[Buffer]) -> Iterator[Encoded]:
        """Each chunk encoded, in order. A chunk may come out longer: at most ``bound`` bytes."""
        return self._in_turns(self._encode, plains)

    def decode(self, encoded: Iterable[Encoded]) -> Iterator[bytes]:
        """Each chunk's plain bytes, in order; EncodedRefused before the GPU sees any of a batch."""
        return self._in_turns(self._decode, encoded)

    def close(self) -> None:
        """Give all memory back. Call it before the device is closed, and not behind a GpuError.
        Idempotent.
        """
        if self._at_work:
            raise RuntimeError("end the encode or decode of these Batches before they are closed")
        queues = [lane.queue for lane in self.lanes]
        self.lanes.clear()  # nvCOMP's managers must not outlive their streams (lz4.hpp)
        for queue in queues:
            self._device.drop(queue)

    def _encode(self, lane: Lane, plains: Sequence[Buffer]) -> Generator[list[Encoded], None, None]:
        for plain in plains:
            if not 0 < len(plain) <= self._chunk_bytes or len(plain) % self._width:
                raise ValueError(
                    f"a chunk of {len(plain)} bytes; {self.algorithm} takes up to "
                    f"{self._chunk_bytes} here, in elements of {self._width}"
                )
        queue, codec = lane
        with queue.scope(), as_ours(f"{self.algorithm} does not encode"):
            held = [queue.put(plain) for plain in plains]
            rooms = [queue.room(self.bound) for _ in plains]
            given, out = arrays(self._library, queue, held), arrays(self._library, queue, rooms)
            made = codec.encode(given, out)  # nothing says that it keeps them: they stay till then
            yield []
            sizes = sizes_of(queue, made, rooms, self.algorithm)
            parts = [room.part(0, size) for room, size in zip(rooms, sizes, strict=True)]
            stored = [bytes(view) for view in queue.fetch(parts)]
        yield [self._typed(one, len(plain)) for one, plain in zip(stored, plains, strict=True)]

    def _decode(self, lane: Lane, batch: Sequence[Encoded]) -> Generator[list[bytes], None, None]:
        for one in batch:
            self._check(one)
        queue, codec = lane
        with queue.scope(), as_ours(f"{self.algorithm} does not decode"):
            held = [queue.put(one.stored) for one in batch]
            rooms = [queue.room(one.plain_bytes) for one in batch]
            given, out = arrays(self._library, queue, held), arrays(self._library, queue, rooms)
            made = codec.decode(given, out=out)
            yield []
            sizes = sizes_of(queue, made, rooms, self.algorithm)
            if sizes != [one.plain_bytes for one in batch]:
                raise NvcompError(f"nvCOMP's {self.algorithm} decoded to other sizes: {sizes}")
            plains = [bytes(view) for view in queue.fetch(rooms)]
        yield plains

    def _in_turns(
        self,
        work: Callable[[Lane, Sequence[_T]], Generator[list[Any], None, None]],
        items: Iterable[_T],
    ) -> Iterator[Any]:
        """Run batches on the lanes in turn; each begins before the one ahead is waited for."""
        if self._at_work:  # both would take the same memory
            raise RuntimeError("end one encode or decode of these Batches before the next")
        if not self.lanes:
            raise RuntimeError("these Batches are closed")
        self._at_work = True
        running: deque[Generator[list[Any], None, None]] = deque()
        lanes, source = cycle(self.lanes), iter(items)
        try:
            while batch := list(islice(source, self._batch)):
                if len(running) == len(self.lanes):
                    yield from _rest(running.popleft())
                begun = work(next(lanes), batch)
                next(begun)  # all is on the stream now, and nothing was waited for
                running.append(begun)
            while running:
                yield from _rest(running.popleft())
        finally:
            self._at_work = False
            for begun in running:
                begun.close()

    def _typed(self, stored: bytes, plain_bytes: int) -> Encoded:
        digest = digest_of(stored)
        if self.algorithm in STOCK:
            return Stock(self.algorithm, plain_bytes, stored, digest)
        return Transient(self.algorithm, plain_bytes, stored, digest, self.version)

    def _check(self, one: Encoded) -> None:
        """nvCOMP's decoders trust what they get, so nothing damaged may reach them."""
        if one.algorithm != self.algorithm:
            raise EncodedRefused(f"a chunk of {one.algorithm} was given to {self.algorithm}")
        if isinstance(one, Transient) and one.nvcomp_version != self.version:
            raise EncodedRefused(
                f"a chunk of {one.algorithm} was made by nvCOMP {one.nvcomp_version}, and here is "
                f"{self.version}, which need not read it: encode it again with this version"
            )
        if not 0 < one.plain_bytes <= self._chunk_bytes or not 0 < len(one.stored) <= self.bound:
            raise EncodedRefused(
                f"a chunk of {one.algorithm} claims {one.plain_bytes} bytes in {len(one.stored)}; "
                f"the limits are {self._chunk_bytes} in {self.bound}"
            )
        if digest_of(one.stored) != one.digest:
            raise EncodedRefused(
                f"a chunk of {one.algorithm}, {len(one.stored)} bytes, is damaged: its hash is "
                "another one; fetch it again"
            )


class _OnDevice:
    """Memory of a queue, by the CUDA array interface, version 3."""

    def __init__(self, memory: Memory, stream: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (memory.bytes,), "typestr": "|u1", "strides": None, "version": 3,
            "data": (memory.address, False), "stream": stream,
        }  # fmt: skip


class _OnHost:
    """Zeros on the host, by numpy's array interface: nvCOMP tells bounds of arrays only."""

    def __init__(self, size: int) -> None:
        self._bytes = (ctypes.c_ubyte * size)()
        self.__array_interface__ = {
            "shape": (size,), "typestr": "|u1", "strides": None, "version": 3,
            "data": (ctypes.addressof(self._bytes), False),
        }  # fmt: skip


def _rest(begun: Iterator[list[_T]]) -> Iterator[_T]:
    for results in begun:
        yield from results


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
