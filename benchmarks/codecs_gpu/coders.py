"""The codecs that this benchmark sets against each other, over chunks on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy

from gpu_kernels import batch
from gpu_kernels.cuda import Gpu
from torpor.shared.codecs.layout import Element
from torpor.shared.codecs.planes import choose_ways, huffman

PART_BYTES: Final = 65_536
"""What nvCOMP cuts a chunk into for its own bitstreams; its headers advise it for speed."""
STOCK: Final = frozenset({"lz4", "zstd"})
"""The algorithms of nvCOMP whose raw bitstreams any library reads. Only the same release is known
to read the bitstreams of the others, so no snapshot may hold one."""
ALGORITHMS: Final = {
    "ans": "ANS", "zstd": "Zstd", "lz4": "LZ4", "gdeflate": "GDeflate", "bitcomp": "Bitcomp",
}  # fmt: skip
# ANS: "<f2" stands for every half-precision format (ans.h). Bitcomp: integers, in each release.
_ANS_TYPES: Final = {"F8": "|f1", "F16": "<f2", "BF16": "<f2", "F32": "<f4"}
_BITCOMP_TYPES: Final = {1: "|u1", 2: "<u2", 4: "<u4", 8: "<u8"}


class Coder(Protocol):
    """One codec over all chunks at once. Encode first, any number of times, then ``settle`` once,
    then decode any number of times. ``encode`` and ``decode`` put work on the stream and wait for
    nothing; the ``ready`` before each is not timed."""

    name: str

    def ready_to_encode(self) -> None: ...
    def encode(self) -> None: ...

    def settle(self) -> int:
        """How many bytes encoding has made of all chunks; waits for them."""

    def ready_to_decode(self, rubbish: Any) -> None:
        """Put rubbish wherever decoding has to write; the targets have it already."""

    def decode(self) -> None: ...

    def check(self) -> None:
        """Raise if the codec itself finds that decoding went wrong; waits."""


def coded_planes(chunk: bytes, element: Element) -> list[int]:
    """The planes of a chunk that torpor gives to rANS where a GPU encodes. It leaves the others
    raw, or to zstd on the CPU."""
    ways = choose_ways(memoryview(chunk), element, [(0, len(chunk))])
    return [number for number, way in enumerate(ways) if way is huffman]


class Torpor:
    """Cut into planes, those of ``coded`` through rANS, the others as they are; and the reverse.

    ``coded`` names at least one plane of one chunk. Chunks that are neither cut nor coded are
    decoded by a copy.
    """

    name = "torpor"

    def __init__(
        self,
        gpu: Gpu,
        element: Element,
        plains: Sequence[Any],
        targets: Sequence[Any],
        coded: Sequence[Sequence[int]],
    ) -> None:
        self._gpu = gpu
        self._plain_bytes = sum(int(plain.nbytes) for plain in plains)
        self._encode: list[batch.KernelLaunches] = []
        self._join: list[batch.KernelLaunches] = []
        self._raw: list[tuple[Any, Any]] = []
        if element.width > 1:
            cut, planes = batch.split(gpu, plains, element.width, element.turned)
            self._encode.append(cut)
            self._join.append(batch.join(gpu, planes, targets, element.width, element.turned))
            sources = [
                p.plane(number) for p, of in zip(planes, coded, strict=True) for number in of
            ]
            self._ends = sources  # a decoded plane comes to where it was cut
        else:
            both = list(zip(plains, targets, strict=True))
            self._raw = [pair for pair, of in zip(both, coded, strict=True) if not of]
            pairs = [pair for pair, of in zip(both, coded, strict=True) if of]
            sources, self._ends = [plain for plain, _ in pairs], [target for _, target in pairs]
        self._encoding = batch.rans_encode(gpu, sources)
        self._encode.append(self._encoding.work)
        self._decoded: list[Any] = []
        self._decodings: list[batch.RansDecoding] = []

    def ready_to_encode(self) -> None:
        pass

    def encode(self) -> None:
        for work in self._encode:
            work.launch()

    def settle(self) -> int:
        streams: list[Any] = []
        kept = self._plain_bytes
        for plane, end, stream in zip(
            self._encoding.planes, self._ends, self._encoding.streams(), strict=True
        ):
            if stream is not None:
                streams.append(stream)
                self._decoded.append(end)
                kept += int(stream.nbytes - plane.nbytes)
            elif end is not plane:
                self._raw.append((plane, end))
        if streams:
            self._decodings.append(batch.rans_decode(self._gpu, streams, self._decoded))
        return kept

    def ready_to_decode(self, rubbish: Any) -> None:
        for plane in self._decoded:
            self._gpu.copy(rubbish[: plane.nbytes], plane)

    def decode(self) -> None:
        for plain, target in self._raw:
            self._gpu.copy(plain, target)
        for work in [*(decoding.work for decoding in self._decodings), *self._join]:
            work.launch()

    def check(self) -> None:
        for decoding in self._decodings:
            decoding.check()


class Nvcomp:
    """An algorithm of nvCOMP. ``part_bytes`` is what it gets as one buffer, a chunk or less.
    RuntimeError and ValueError are how nvCOMP refuses."""

    def __init__(
        self,
        gpu: Gpu,
        library: Any,
        algorithm: str,
        element: Element,
        plains: Sequence[Any],
        targets: Sequence[Any],
        part_bytes: int,
    ) -> None:
        self._gpu = gpu
        self._library = library
        self._parts, self._ends = _cut(plains, part_bytes), _cut(targets, part_bytes)
        self.name = f"nvCOMP {algorithm}"
        settings: dict[str, Any] = {"algorithm": ALGORITHMS[algorithm]}
        if algorithm in STOCK:
            self.name += f", {part_bytes >> 10} KiB"
            settings |= {
                "bitstream_kind": library.BitstreamKind.RAW, "uncomp_chunk_size": part_bytes,
            }  # fmt: skip
        else:
            settings |= {
                "bitstream_kind": library.BitstreamKind.NVCOMP_NATIVE,
                "uncomp_chunk_size": PART_BYTES,
            }
        if algorithm == "ans":
            settings["data_type"] = _ANS_TYPES.get(element.name, "|u1")
        elif algorithm == "bitcomp":
            settings["data_type"] = _BITCOMP_TYPES[element.width]
        self._codec = library.Codec(**settings, cuda_stream=gpu.stream.ptr)
        like = library.as_array(numpy.zeros(part_bytes, numpy.uint8))
        bound = int(self._codec.get_max_comp_buffer_size(like))
        self._rooms = [gpu.room(bound) for _ in self._parts]
        self._encoding = self._codec.compression_config([part.nbytes for part in self._parts])
        # without this one it would read the sizes from the streams, and wait for them
        self._decoding = self._codec.decompression_config(self._encoding)
        self._given = self._arrays(self._parts)
        self._out: Any = None
        self._made: Any = None

    def ready_to_encode(self) -> None:
        self._out = self._arrays(self._rooms)  # afresh: it writes there how far it filled them

    def encode(self) -> None:
        self._made = self._codec.encode(self._given, self._out, compression_config=self._encoding)

    def settle(self) -> int:
        sizes = self._sizes(self._rooms)
        self._given = self._arrays(
            [room[:size] for room, size in zip(self._rooms, sizes, strict=True)]
        )
        return sum(sizes)

    def ready_to_decode(self, rubbish: Any) -> None:
        self._out = self._arrays(self._ends)

    def decode(self) -> None:
        self._made = self._codec.decode(
            self._given, out=self._out, decompression_config=self._decoding
        )

    def check(self) -> None:
        if self._sizes(self._ends) != [end.nbytes for end in self._ends]:
            raise RuntimeError(f"{self.name} decoded to other sizes")

    def _arrays(self, arrays: Sequence[Any]) -> Any:
        with self._gpu.stream:
            return self._library.as_arrays(arrays, cuda_stream=self._gpu.stream.ptr)

    def _sizes(self, rooms: Sequence[Any]) -> list[int]:
        self._gpu.wait()
        sizes = [int(size) for size in self._made.buffer_sizes]
        if any(not 0 < size <= room.nbytes for size, room in zip(sizes, rooms, strict=True)):
            raise RuntimeError(f"{self.name} claims {sizes} bytes: out of bounds")
        return sizes


def _cut(arrays: Sequence[Any], part_bytes: int) -> list[Any]:
    return [
        array[at : at + part_bytes] for array in arrays for at in range(0, array.nbytes, part_bytes)
    ]
