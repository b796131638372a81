"""Another machine as a source of packs: it is asked first, never trusted, and left at the first
fault."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

from torpor.machine.agent.kept_packs import KeptPacks
from torpor.machine.agent.pack_server import PackServer, trusting
from torpor.shared.codecs.memory import ReusedMemory
from torpor.shared.errors import StoreError
from torpor.shared.format.names import pack_id_of
from torpor.shared.transfer.connections import Connections
from torpor.shared.transfer.transfer import SLOWEST_BYTES_S, Range, Transfer
from torpor.shared.values import Grant, ObjectKey
from torpor.shared.wire.restore import Peer

PEER_S: Final = 5.0
"""Seconds after which a silent peer is not asked again. At the floor rate a request may take this
long."""
MOST_PEERS: Final = 64


class Passing:
    """This machine's part in passing packs on, for one run: the packs it keeps, the server that
    serves them, and connections to other machines. Thread-safe.

    ``folder`` is the workspace's state, which the run holds. What a killed agent kept there is
    removed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._packs = folder / "passing"
        shutil.rmtree(self._packs, ignore_errors=True)
        self._lock = threading.Lock()
        self._kept: KeptPacks | None = None
        self._server: PackServer | None = None
        self._connections: dict[str, Connections] = {}
        self._closed = False

    def serve(self, host: str, most_bytes: int) -> PackServer:
        """Keep packs from now on and pass them on at ``host``. Once a run."""
        with self._lock:
            if self._closed:
                raise StoreError("the run has ended: it passes nothing on any more")
            if self._server is None:
                kept = KeptPacks(self._packs, most_bytes)
                self._server = PackServer(kept, host, self._folder)
                self._kept = kept
            return self._server

    def keep(self, pack: bytes, offset: int, stored: bytes | bytearray | memoryview) -> None:
        if self._kept is not None:
            self._kept.keep(pack, offset, stored)

    def holds(self, pack: bytes, offsets: Sequence[int]) -> bool:
        """Whether this machine has all of those chunks to pass on."""
        kept = self._kept
        return kept is not None and all(kept.holds(pack, offset) for offset in offsets)

    def connections(self, certificate: str) -> Connections:
        with self._lock:
            found = self._connections.get(certificate)
            if found is None:
                while len(self._connections) >= MOST_PEERS:
                    self._connections.pop(next(iter(self._connections))).close()
                found = Connections(timeout_s=PEER_S, tls=trusting(certificate))
                self._connections[certificate] = found
            return found

    def close(self) -> None:
        """Stop passing packs on, and delete what was kept. Idempotent."""
        with self._lock:
            self._closed = True
            server, self._server = self._server, None
            kept, self._kept = self._kept, None
            connections = list(self._connections.values())
        if server is not None:
            server.close()
        if kept is not None:
            kept.remove()
        for each in connections:
            each.close()


class PeerFirst:
    """Fetches as ``Transfer.get_ranges`` does: from the peer once, then from the store.

    A range that is asked for again did not match its hash, so the peer is not used any more.
    """

    def __init__(
        self,
        store: Transfer,
        peer: Peer | None,
        passing: Passing,
        cancelled: Callable[[], bool],
    ) -> None:
        self.peer_bytes = 0
        self._store = store
        self._peer = peer
        self._passing = passing
        self._cancelled = cancelled
        self._asked: set[tuple[ObjectKey, Range]] = set()
        self._memory = ReusedMemory()

    def get_ranges(
        self, grant: Grant, ranges: Sequence[Range]
    ) -> Generator[memoryview, None, None]:
        """Yield each range's bytes in order, there until the next is asked for; the caller checks
        their hashes."""
        asked = {(grant.key, wanted) for wanted in ranges}
        if not self._asked.isdisjoint(asked) and self._peer is not None:
            self._peer = None
            self.peer_bytes = max(0, self.peer_bytes - sum(wanted.length for wanted in ranges))
        self._asked |= asked
        peer, done = self._peer, 0
        if peer is not None and ranges:
            try:
                with closing(self._from_peer(peer, grant, ranges)) as stream:
                    for view in stream:
                        done += 1
                        self.peer_bytes += len(view)
                        yield view
                        if self._peer is None:
                            break
            except StoreError:
                self._peer = None  # the peer is dead, slow, or without the pack
        if done < len(ranges):
            yield from self._store.get_ranges(grant, ranges[done:], into=self._memory)

    def _from_peer(
        self, peer: Peer, grant: Grant, ranges: Sequence[Range]
    ) -> Generator[memoryview, None, None]:
        transfer = Transfer(
            timeout_s=PEER_S,
            attempts=1,
            cancelled=self._cancelled,
            connections=self._passing.connections(peer.certificate),
            slowest_bytes_s=max(SLOWEST_BYTES_S, peer.floor_bytes_s),
        )
        url = peer.url + pack_id_of(grant.key).hex()
        return transfer.get_ranges(Grant(grant.key, "GET", url, 0), ranges, into=self._memory)
