"""How fast raw random bytes go to a store and come back, over grants."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

from torpor.shared.errors import InvalidInput, StoreCorrupt
from torpor.shared.transfer.connections import Connections
from torpor.shared.transfer.transfer import Range, Transfer
from torpor.shared.values import MIB, Grant

MOST_CONNECTIONS: Final = 64
MOST_BATCH_BYTES: Final = 256 * MIB
"""The most bytes of one batch. They are in memory twice: the bytes that are sent and the bytes that
come back."""


class Moved(NamedTuple):
    """Seconds of wall time for the whole batch, each way."""

    up_s: float
    down_s: float


def move(
    puts: Sequence[Grant],
    gets: Sequence[Grant],
    object_bytes: int,
    connections: int,
    cancelled: Callable[[], bool] = lambda: False,
    authority: str = "",
) -> Moved:
    """Write a fresh object to each of ``puts``, then read each of ``gets`` once and compare.

    Every byte comes from the kernel's random generator, so that neither deduplication nor
    compression helps. ``authority``: certificates (PEM) to trust beside the public ones. Raises
    what the store raises, and StoreCorrupt where other bytes come back.
    """
    if not 0 < connections <= MOST_CONNECTIONS or not 0 < len(puts) == len(gets):
        raise InvalidInput(
            f"{len(puts)} objects over {connections} connections cannot be measured: use 1 to "
            f"{MOST_CONNECTIONS} connections"
        )
    if not 0 < object_bytes * len(puts) <= MOST_BATCH_BYTES:
        raise InvalidInput(
            f"a batch of {len(puts)} objects of {object_bytes} bytes does not fit in memory: at "
            f"most {MOST_BATCH_BYTES} bytes are moved at once"
        )
    bodies = {grant.key: os.urandom(object_bytes) for grant in puts}
    digests = {key: _md5(body) for key, body in bodies.items()}
    buffers = {key: bytearray(object_bytes) for key in bodies}
    lent = Connections(timeout_s=60.0)
    lent.trust(authority)
    with Transfer(cancelled=cancelled, connections=lent) as transfer:

        def put(grant: Grant) -> None:
            transfer.put(grant, [bodies[grant.key]], digests[grant.key])

        def get(grant: Grant) -> None:
            view = memoryview(buffers[grant.key])
            for _ in transfer.get_ranges(grant, [Range(0, object_bytes)], into=lambda _: view):
                pass

        moved = Moved(_timed(put, puts, connections), _timed(get, gets, connections))
    for key, body in bodies.items():
        if buffers[key] != body:
            raise StoreCorrupt(f"{key} came back with other bytes than were sent")
    return moved


def _timed(work: Callable[[Grant], None], grants: Sequence[Grant], connections: int) -> float:
    """Seconds from the start of all threads until the last one ends."""
    ready = threading.Barrier(connections + 1)

    def share(mine: Sequence[Grant]) -> None:
        ready.wait()
        for grant in mine:
            work(grant)

    with ThreadPoolExecutor(connections) as threads:
        futures = [threads.submit(share, grants[n::connections]) for n in range(connections)]
        ready.wait()
        started = time.monotonic()
        for future in futures:
            future.result()
        return time.monotonic() - started


def _md5(body: bytes) -> bytes:
    return hashlib.md5(body, usedforsecurity=False).digest()
