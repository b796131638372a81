"""The control side's half of a full verify: which packs an agent reads, and what it says."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal

import msgspec

from torpor.format.manifest import Chunk, Pack
from torpor.format.names import pack_id_of, pack_key
from torpor.remote.session import Session
from torpor.store.seam import ObjectStore
from torpor.values import MIB, ObjectKey, WorkspaceName

_REQUEST_BYTES: Final = 512 * MIB
_REQUEST_CHUNKS: Final = 20_000
"""What one request asks for at most, as soon as it has a pack: minutes of work, 3 MiB of text."""
_GRANT_S: Final = 6 * 3600


class PackWork(msgspec.Struct, frozen=True):
    """A pack and the chunks of it that snapshots use, apart from each other."""

    pack: Pack
    chunks: list[Chunk]


class ExaminedPack(msgspec.Struct, frozen=True):
    """``damaged``: the offsets of chunks that cannot be had any more. A fault without any lies in
    bytes that no snapshot uses."""

    pack: bytes
    fault: Literal["", "missing", "cut short", "damaged"]
    damaged: frozenset[int]


class _Answered(msgspec.Struct, frozen=True):
    key: ObjectKey
    fault: Literal["", "missing", "cut short", "damaged"]
    damaged: list[int]


def examine(
    session: Session,
    store: ObjectStore,
    workspace: WorkspaceName,
    key: bytes | None,
    works: Sequence[PackWork],
    on_event: Callable[[int], None] | None = None,
) -> list[ExaminedPack]:
    """Have the machine's agent read packs whole and check every hash. Nothing is written there,
    and no workspace is held: asking again after a fault begins the unanswered request anew.

    ``on_event`` hears how many bytes were read so far. Raises what says nothing about the packs.
    """
    found: list[ExaminedPack] = []
    before = 0
    for request in _requests(works):
        answer = session.call(
            "verify.packs",
            {
                "key": None if key is None else key.hex(),
                "packs": [_wire(store, workspace, work) for work in request],
            },
            request=f"verify:{secrets.token_hex(8)}",
            on_event=_added(before, on_event),
        )
        before += int(answer["bytes"])
        answered = msgspec.convert(answer["packs"], list[_Answered])
        found += [_examined(work, one) for work, one in zip(request, answered, strict=True)]
    return found


def _requests(works: Sequence[PackWork]) -> Iterator[list[PackWork]]:
    request: list[PackWork] = []
    size = chunks = 0
    for work in works:
        full = size + work.pack.size > _REQUEST_BYTES or chunks + len(work.chunks) > _REQUEST_CHUNKS
        if request and full:
            yield request
            request, size, chunks = [], 0, 0
        request.append(work)
        size += work.pack.size
        chunks += len(work.chunks)
    if request:
        yield request


def _wire(store: ObjectStore, workspace: WorkspaceName, work: PackWork) -> dict[str, Any]:
    grant = store.grant("GET", pack_key(workspace, work.pack.id), expires_s=_GRANT_S)
    return {
        "grant": msgspec.to_builtins(grant),
        "bytes": work.pack.size,
        "md5": work.pack.md5.hex(),
        "chunks": [[c.name.hex(), c.plain, c.encoding, c.offset, c.stored] for c in work.chunks],
    }


def _examined(work: PackWork, answered: _Answered) -> ExaminedPack:
    damaged = frozenset(work.chunks[number].offset for number in answered.damaged)
    return ExaminedPack(pack_id_of(answered.key), answered.fault, damaged)


def _added(
    before: int, on_event: Callable[[int], None] | None
) -> Callable[[dict[str, Any]], None] | None:
    if on_event is None:
        return None
    return lambda event: on_event(before + int(event.get("bytes", 0)))
