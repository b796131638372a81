"""From a chunk's stored bytes to its plain ones: open > decode > check."""

from __future__ import annotations

from torpor.shared.codecs.codec import Buffer
from torpor.shared.codecs.encodings import decode_chunk, is_of_gpu
from torpor.shared.codecs.memory import Memory
from torpor.shared.codecs.trial import GpuTrial
from torpor.shared.errors import SnapshotDamaged
from torpor.shared.format.keys import Seal, chunk_associated
from torpor.shared.format.manifest import Chunk


def open_chunk(
    chunk: Chunk,
    pack_id: bytes,
    stored: Buffer,
    seal: Seal,
    gpu: GpuTrial | None = None,
    into: Memory | None = None,
) -> Buffer:
    """The chunk's plain bytes, whose hash is its name. Raises SnapshotDamaged or WrongKey.

    They may lie in ``stored``, or in memory that ``into`` has lent.
    """
    associated = chunk_associated(chunk.name, pack_id, chunk.encoding, chunk.plain)
    opened = seal.open(stored, associated)
    if gpu is not None and is_of_gpu(chunk.encoding):
        return gpu.decode(opened, chunk.plain, lambda plain: seal.name(plain) == chunk.name)
    plain = decode_chunk(chunk.encoding, opened, chunk.plain, into)
    if seal.name(plain) != chunk.name:
        raise SnapshotDamaged("its content does not match its hash")
    return plain
