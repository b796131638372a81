"""The agent's half of a full verify: packs are read and checked, and nothing is kept."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from torpor.machine.agent.runs import RunRegistry
from torpor.machine.pipeline.examine import examine_pack
from torpor.shared.errors import InvalidInput, StoreCorrupt, StoreError
from torpor.shared.format.keys import Seal
from torpor.shared.format.manifest import MAX_CHUNK_BYTES, Chunk
from torpor.shared.format.names import pack_id_of
from torpor.shared.transfer.connections import Connections
from torpor.shared.transfer.transfer import Transfer
from torpor.shared.values import MIB, Grant, object_key
from torpor.shared.wire.protocol import Call

_MOST_STORED: Final = MAX_CHUNK_BYTES + MIB
"""A chunk's bytes in its pack: an encoding may add a little, and is only kept where it does not."""


class ChunkPlace(msgspec.Struct, frozen=True, array_like=True):
    """A chunk as a request names it; ``name`` in hex."""

    name: str
    plain: int
    encoding: int
    offset: int
    stored: int


class PackToExamine(msgspec.Struct, frozen=True):
    grant: Grant
    bytes: int
    md5: str
    chunks: list[ChunkPlace]


class ExamineRequest(msgspec.Struct, frozen=True):
    """Belongs to no run and holds no workspace: work may go on beside it."""

    key: str | None
    packs: list[PackToExamine]


def examine(args: ExamineRequest, call: Call, runs: RunRegistry) -> dict[str, Any]:
    """Read every pack and say what is wrong with each; see pipeline/examine.py."""
    seal = Seal(None if args.key is None else bytes.fromhex(args.key))
    works = [(pack, [_chunk(pack, place) for place in pack.chunks]) for pack in args.packs]
    connections = Connections(timeout_s=60.0)
    transfer = Transfer(
        connections=connections, cancelled=call.cancelled, on_retry=_not_of_corrupt_objects
    )
    found = []
    came = 0
    try:
        with runs.worker(call.check):
            for pack, chunks in works:
                md5 = bytes.fromhex(pack.md5)
                one = examine_pack(pack.grant, pack.bytes, md5, chunks, seal, transfer, call.check)
                came += one.bytes
                call.emit({"bytes": came})
                found.append({"key": pack.grant.key, "fault": one.fault, "damaged": one.damaged})
    finally:
        connections.close()
    return {"packs": found, "bytes": came}


def _not_of_corrupt_objects(error: StoreError, _: float) -> None:
    """An object that is shorter than it was stays so: that is what is to be found out."""
    if isinstance(error, StoreCorrupt):
        raise error


def _chunk(pack: PackToExamine, place: ChunkPlace) -> Chunk:
    """Whoever reads a request believes nothing of it that costs memory."""
    object_key(pack.grant.key)
    pack_id_of(pack.grant.key)
    fits = 0 <= place.plain <= MAX_CHUNK_BYTES and 0 < place.stored <= _MOST_STORED
    if not fits or place.offset < 0 or place.offset + place.stored > pack.bytes:
        raise InvalidInput(f"a chunk of {pack.grant.key} does not lie in its pack: {place}")
    return Chunk(
        bytes.fromhex(place.name), place.plain, place.encoding, 0, place.offset, place.stored
    )
