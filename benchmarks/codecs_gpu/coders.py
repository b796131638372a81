"""The codecs that this benchmark sets against each other, over chunks on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from gpu_kernels import batch, nvcomp
from gpu_kernels.batch import RansDecoding, Work
from gpu_kernels.device import Memory, Queue
from torpor.shared.codecs.layout import Element
from torpor.shared.codecs.planes import choose_ways, huffman


class DeviceCoder(Protocol):
    """One codec over all chunks at once, in an open scope of a queue; it takes memory there.

    Each ``ready`` comes before its work is timed; the work is put on the queue, and nothing is
    waited for. Encode comes first, as often as one likes, then ``settle`` once, then decode as
    often. GpuError where the GPU fails or what is decoded is refused.
    """

    name: str

    def ready_to_encode(self) -> None: ...
    def encode(self) -> None: ...

    def settle(self) -> int:
        """How many bytes encoding has made of all chunks; waits for them."""

    def ready_to_decode(self, rubbish: Memory) -> None:
        """Lay rubbish wherever decoding has to write; the targets have it already."""

    def decode(self) -> None: ...

    def check(self) -> None:
        """Whether decoding went as it should, as far as the codec itself can tell; waits."""

    def close(self) -> None:
        """Let go of what must go before the queue does."""


def coded_planes(chunk: bytes, element: Element) -> list[int]:
    """The planes of a chunk that torpor gives to rANS where a GPU encodes. It leaves the others
    raw, or to zstd on the CPU."""
    ways = choose_ways(memoryview(chunk), element, [(0, len(chunk))])
    return [number for number, way in enumerate(ways) if way is huffman]


class Torpor:
    """Cut into planes, those of ``coded`` through rANS, the others as they are; and the reverse.

    ``coded`` names at least one plane of one of the chunks. A stored plane lies where it is joined
    from, as it does when it has been copied to the GPU. Chunks that are not cut and not coded are
    stored raw, and decoded by a copy.
    """

    name = "torpor"

    def __init__(
        self,
        queue: Queue,
        element: Element,
        plains: Sequence[Memory],
        targets: Sequence[Memory],
        coded: Sequence[Sequence[int]],
    ) -> None:
        self._queue = queue
        self._plain_bytes = sum(plain.bytes for plain in plains)
        self._encode: list[Work] = []
        self._join: list[Work] = []
        self._raw: list[tuple[Memory, Memory]] = []
        if element.width > 1:
            cut, planes = batch.prepare_split(queue, plains, element.width, element.turned)
            self._encode.append(cut)
            self._join.append(
                batch.prepare_join(queue, planes, targets, element.width, element.turned)
            )
            sources = [
                one.plane(number) for one, of in zip(planes, coded, strict=True) for number in of
            ]
            self._ends = sources  # a decoded plane comes to where it was cut
        else:
            both = list(zip(plains, targets, strict=True))
            self._raw = [pair for pair, of in zip(both, coded, strict=True) if not of]
            coded_pairs = [pair for pair, of in zip(both, coded, strict=True) if of]
            sources = [plain for plain, _ in coded_pairs]
            self._ends = [target for _, target in coded_pairs]
        self._encoding = batch.prepare_rans_encode(queue, sources)
        self._encode.append(self._encoding.work)
        self._decoded: list[Memory] = []
        self._decoding: list[RansDecoding] = []

    def ready_to_encode(self) -> None:
        pass

    def encode(self) -> None:
        for work in self._encode:
            work.launch()

    def settle(self) -> int:
        streams: list[Memory] = []
        kept = self._plain_bytes
        for plane, end, stream in zip(
            self._encoding.planes, self._ends, self._encoding.streams(), strict=True
        ):
            if stream is not None:
                streams.append(stream)
                self._decoded.append(end)
                kept += stream.bytes - plane.bytes
            elif end is not plane:
                self._raw.append((plane, end))
        if streams:
            self._decoding.append(batch.prepare_rans_decode(self._queue, streams, self._decoded))
        return kept

    def ready_to_decode(self, rubbish: Memory) -> None:
        for plane in self._decoded:
            self._queue.copy(rubbish.part(0, plane.bytes), plane)

    def decode(self) -> None:
        for plain, target in self._raw:
            self._queue.copy(plain, target)
        for decoding in self._decoding:
            decoding.work.launch()
        for work in self._join:
            work.launch()

    def check(self) -> None:
        for decoding in self._decoding:
            decoding.check()

    def close(self) -> None:
        pass


class Nvcomp:
    """An algorithm of nvCOMP, with gpu_kernels.nvcomp's settings. ``part_bytes`` is what it gets
    as one buffer, a chunk or less."""

    def __init__(
        self,
        queue: Queue,
        library: nvcomp.Nvcomp,
        algorithm: str,
        element: Element,
        plains: Sequence[Memory],
        targets: Sequence[Memory],
        part_bytes: int,
    ) -> None:
        self._queue = queue
        self._library = library
        self._algorithm = algorithm
        self._parts = _cut(plains, part_bytes)
        self._ends = _cut(targets, part_bytes)
        self._out: list[nvcomp.BatchArray] = []
        self._made: list[nvcomp.BatchArray] = []
        self._configs: list[Any] = []
        self._codecs: list[nvcomp.Codec] = []
        made = nvcomp.settings(library, algorithm, element.name, part_bytes)
        self.name = f"nvCOMP {algorithm}"
        if algorithm in nvcomp.STOCK:
            self.name += f", {part_bytes >> 10} KiB"
        with nvcomp.as_ours(f"{algorithm} cannot be set up"):
            bound = nvcomp.bound_of(library, made, part_bytes)
            self._rooms = [queue.room(bound) for _ in self._parts]
            codec = library.Codec(**made, cuda_stream=queue.stream)
            self._codecs.append(codec)
            encoding = codec.compression_config([part.bytes for part in self._parts])
            # without this one it would read the sizes from the streams, and wait for them
            self._configs = [encoding, codec.decompression_config(encoding)]
        self._given = self._arrays(self._parts)

    def ready_to_encode(self) -> None:
        self._ready(self._rooms)

    def encode(self) -> None:
        (codec,), (out,), config = self._codecs, self._out, self._configs[0]
        with nvcomp.as_ours(f"{self._algorithm} does not encode"):
            self._made = [codec.encode(self._given, out, compression_config=config)]

    def settle(self) -> int:
        sizes = self._sizes(self._rooms)
        stored = [room.part(0, size) for room, size in zip(self._rooms, sizes, strict=True)]
        self._given = self._arrays(stored)
        return sum(sizes)

    def ready_to_decode(self, rubbish: Memory) -> None:
        self._ready(self._ends)

    def decode(self) -> None:
        (codec,), (out,), config = self._codecs, self._out, self._configs[1]
        with nvcomp.as_ours(f"{self._algorithm} does not decode"):
            self._made = [codec.decode(self._given, out=out, decompression_config=config)]

    def check(self) -> None:
        sizes = self._sizes(self._ends)
        if sizes != [end.bytes for end in self._ends]:
            raise nvcomp.NvcompError(f"nvCOMP's {self._algorithm} decoded to other sizes")

    def close(self) -> None:
        """nvCOMP's codecs must not outlive the queue's stream, nor what is theirs them."""
        self._made.clear()
        self._out.clear()
        self._configs.clear()
        self._codecs.clear()

    def _ready(self, rooms: Sequence[Memory]) -> None:
        """New buffers for each round: nvCOMP writes into them how far it filled them."""
        self._out = [self._arrays(rooms)]

    def _arrays(self, memories: Sequence[Memory]) -> nvcomp.BatchArray:
        with nvcomp.as_ours(f"{self._algorithm} does not take its buffers"):
            return nvcomp.arrays(self._library, self._queue, memories)

    def _sizes(self, rooms: Sequence[Memory]) -> list[int]:
        with nvcomp.as_ours(f"{self._algorithm} fails"):
            return nvcomp.sizes_of(self._queue, self._made[0], rooms, self._algorithm)


def _cut(memories: Sequence[Memory], part_bytes: int) -> list[Memory]:
    return [
        memory.part(at, min(part_bytes, memory.bytes - at))
        for memory in memories
        for at in range(0, memory.bytes, part_bytes)
    ]
