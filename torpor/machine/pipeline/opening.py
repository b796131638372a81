"""From a chunk's stored bytes to its plain ones: open > decode > check."""

from __future__ import annotations

from torpor.shared.codecs.codec import Buffer
from torpor.shared.codecs.encodings import decode_chunk
from torpor.shared.errors import SnapshotDamaged
from torpor.shared.format.keys import Seal, chunk_associated
from torpor.shared.format.manifest import Chunk


def open_chunk(chunk: Chunk, pack_id: bytes, stored: Buffer, seal: Seal) -> Buffer:
    """The chunk's plain bytes, whose hash is its name. Raises SnapshotDamaged or WrongKey."""
    associated = chunk_associated(chunk.name, pack_id, chunk.encoding, chunk.plain)
    plain = decode_chunk(chunk.encoding, seal.open(stored, associated), chunk.plain)
    if seal.name(plain) != chunk.name:
        raise SnapshotDamaged("its content does not match its hash")
    return plain
