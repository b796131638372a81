"""The control side's half of a full verify: which packs an agent reads, and what it finds."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from torpor.control.remote.agent import Agent
from torpor.control.store.object_store import ObjectStore
from torpor.shared.errors import MachineError
from torpor.shared.format.manifest import Chunk, Pack
from torpor.shared.format.names import pack_key
from torpor.shared.values import MIB, WorkspaceName
from torpor.shared.wire.machine import ExaminePacks, Fault, PackChunk, PackFault, PackToExamine
from torpor.shared.wire.request import Event

_REQUEST_BYTES: Final = 512 * MIB
_REQUEST_CHUNKS: Final = 20_000
"""Chunks in one request at most, which has at least one pack: minutes of work, 3 MiB of text."""
_GRANT_S: Final = 6 * 3600


class PackWork(msgspec.Struct, frozen=True):
    """A pack, and the chunks of it that snapshots use."""

    pack: Pack
    chunks: list[Chunk]


class ExaminedPack(msgspec.Struct, frozen=True):
    """``damaged``: the offsets of chunks that are lost. A fault without any is in bytes that no
    snapshot uses."""

    pack: bytes
    fault: Fault
    damaged: frozenset[int]


class Examination:
    """Packs that one machine's agent reads whole, checking every hash. It writes
    nothing there and holds no workspace. After a fault, ``run`` continues after the last answer."""

    def __init__(
        self,
        agent: Agent,
        store: ObjectStore,
        workspace: WorkspaceName,
        key: bytes | None,
        works: Sequence[PackWork],
    ) -> None:
        self._agent = agent
        self._store = store
        self._workspace = workspace
        self._key = None if key is None else key.hex()
        self._works = works
        self._read = 0
        self.found: list[ExaminedPack] = []

    def run(self, on_event: Callable[[int], None] = lambda read: None) -> list[ExaminedPack]:
        """Read all packs; return what was found in each. ``on_event`` gets the bytes read so far.
        Raises the errors that say nothing about a pack, such as an unreachable store."""
        for works in _requests(self._works[len(self.found) :]):
            before = self._read

            def moved(event: Event, before: int = before) -> None:
                on_event(before + event.bytes)

            answer = self._agent.call(
                ExaminePacks(
                    self._key, [self._granted(work) for work in works], self._store.authority
                ),
                request_id=f"verify:{secrets.token_hex(8)}",
                on_event=moved,
            )
            if [pack.key for pack in answer.packs] != [
                pack_key(self._workspace, work.pack.id) for work in works
            ]:
                raise MachineError(
                    f"machine {self._agent.hello.machine} answers for other packs than it was "
                    "given to read: do not trust its host, and verify elsewhere"
                )
            self.found += [_examined(w, pack) for w, pack in zip(works, answer.packs, strict=True)]
            self._read += answer.bytes
            on_event(self._read)
        return self.found

    def _granted(self, work: PackWork) -> PackToExamine:
        key = pack_key(self._workspace, work.pack.id)
        grant = self._store.grant("GET", key, expires_s=_GRANT_S)
        chunks = [
            PackChunk(c.name.hex(), c.plain, c.encoding, c.offset, c.stored) for c in work.chunks
        ]
        return PackToExamine(grant, work.pack.size, work.pack.md5.hex(), chunks)


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


def _examined(work: PackWork, found: PackFault) -> ExaminedPack:
    damaged = {*found.damaged}
    offsets = (chunk.offset for number, chunk in enumerate(work.chunks) if number in damaged)
    return ExaminedPack(work.pack.id, found.fault, frozenset(offsets))
