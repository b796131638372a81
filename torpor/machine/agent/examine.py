"""The agent's half of a full verify: packs are read and checked, and nothing is kept."""

from __future__ import annotations

from typing import Final

from torpor.machine.agent.call import Call
from torpor.machine.agent.runs import RunRegistry, seal_of
from torpor.machine.pipeline.examine import examine_pack
from torpor.shared.errors import InvalidInput, StoreCorrupt, StoreError
from torpor.shared.format.manifest import MAX_CHUNK_BYTES, Chunk
from torpor.shared.format.names import pack_id_of
from torpor.shared.transfer.connections import Connections
from torpor.shared.transfer.transfer import Transfer
from torpor.shared.values import MIB
from torpor.shared.wire.machine import Examined, ExaminePacks, PackChunk, PackFault, PackToExamine
from torpor.shared.wire.request import Event

_MOST_STORED: Final = MAX_CHUNK_BYTES + MIB
"""The most bytes of a chunk in its pack: an encoding may add a little, though one that adds bytes
is not used."""


def examine(request: ExaminePacks, call: Call, runs: RunRegistry) -> Examined:
    """Read every pack; return the fault of each (pipeline/examine.py)."""
    seal = seal_of(request.key)
    works = [(pack, [_chunk(pack, chunk) for chunk in pack.chunks]) for pack in request.packs]
    connections = Connections(timeout_s=60.0)
    connections.trust(request.authority)
    transfer = Transfer(
        connections=connections,
        cancelled=call.cancelled,
        on_retry=_not_of_corrupt_objects,
        on_away=lambda away: call.emit(Event(0, away)),
    )
    found = []
    came = 0
    try:
        with runs.worker(call.check):
            for pack, chunks in works:
                md5 = bytes.fromhex(pack.md5)
                examined = examine_pack(
                    pack.grant, pack.bytes, md5, chunks, seal, transfer, call.check
                )
                came += examined.bytes
                call.emit(Event(came))
                found.append(PackFault(pack.grant.key, examined.fault, examined.damaged))
    finally:
        connections.close()
    return Examined(came, found)


def _not_of_corrupt_objects(error: StoreError, _: float) -> None:
    """Have an object that is too short not fetched again: its wrong length is the result."""
    if isinstance(error, StoreCorrupt):
        raise error


def _chunk(pack: PackToExamine, asked: PackChunk) -> Chunk:
    """Check every size in the request before it costs memory."""
    pack_id_of(pack.grant.key)
    fits = 0 <= asked.plain <= MAX_CHUNK_BYTES and 0 < asked.stored <= _MOST_STORED
    if not fits or asked.offset < 0 or asked.offset + asked.stored > pack.bytes:
        raise InvalidInput(f"a chunk of {pack.grant.key} does not lie in its pack: {asked}")
    return Chunk(
        bytes.fromhex(asked.name), asked.plain, asked.encoding, 0, asked.offset, asked.stored
    )
