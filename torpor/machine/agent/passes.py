"""One pass of a snapshot: what a walk found is read, encoded and sent by several workers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Final, NamedTuple

from torpor.machine.agent.workers import WORKERS
from torpor.machine.pipeline.upload import Share, Source, store_share
from torpor.machine.tree.plan import ReadUnit, share_out
from torpor.machine.tree.walk import Walk
from torpor.shared.errors import GrantExpired, RunCancelled
from torpor.shared.format.sizes import packs_needed
from torpor.shared.transfer.transfer import Transfer
from torpor.shared.values import MIB, Grant
from torpor.shared.wire.snapshot import PassesOutcome

SHARES: Final = 4 * WORKERS
"""The most shares of a pass. Each share ends with a pack of its own, which may be small."""
SHARE_BYTES: Final = 8 * MIB
"""The least bytes of a share, so that every worker takes part also in a small workspace."""

Check = Callable[[], None]


class Workers(NamedTuple):
    """At most this many threads, each of which works within a ``turn``."""

    most: int
    turn: Callable[[Check], AbstractContextManager[None]]


class Means(NamedTuple):
    """What a pass is stored with. ``grants``: the grants that are left, for one share. ``sender``:
    a transfer that also stops when its argument says so. ``check`` may raise RunCancelled."""

    grants: Callable[[], Iterable[Grant]]
    sender: Callable[[Callable[[], bool]], Transfer]
    workers: Workers
    moved: Callable[[int], None]
    check: Check


class Pass:
    """The last walk of the workspace, and what is left to be read after it. ``found``: what the
    answer says of the walk; ``began_s``: when the walk began, by the monotonic clock."""

    def __init__(
        self,
        seen: Walk,
        source: Source,
        jobs: Sequence[ReadUnit],
        found: PassesOutcome,
        began_s: float,
    ) -> None:
        self.seen = seen
        self.source = source
        self.found = found
        self.began_s = began_s
        self.bytes = sum(job.length for job in jobs)
        self._shares = [Share(some) for some in share_out(jobs, SHARES, SHARE_BYTES)]

    @property
    def packs(self) -> int:
        """The most packs that the rest of the pass makes; 0 when all is stored."""
        return sum(packs_needed(share.left) for share in self._left())

    def take_stored(self) -> tuple[int, int]:
        """The bytes of new chunks since the last call: plain, and stored."""
        new = sum(share.new_bytes for share in self._shares)
        stored = sum(share.stored_bytes for share in self._shares)
        for share in self._shares:
            share.new_bytes = share.stored_bytes = 0
        return new, stored

    def store(self, means: Means) -> None:
        """Store the rest of the pass. When a share fails, the others stop; shares that lack a grant
        do not stop those that have one. Raises what failed first, and GrantExpired if nothing else
        did."""
        left = self._left()
        work = _Work(means, self.source, left, self._moved)
        helpers = [
            # the agent does not wait for these threads when it ends
            threading.Thread(target=work.run, name="store", daemon=True)
            for _ in range(min(len(left), means.workers.most) - 1)
        ]
        with suppress(RuntimeError):  # the system starts no more threads: fewer threads do the work
            for helper in helpers:
                helper.start()
        work.run()
        for helper in helpers:
            if helper.ident is not None:
                helper.join()
        work.raise_first()

    def _left(self) -> list[Share]:
        return [share for share in self._shares if share.done < len(share.jobs)]

    def _moved(self) -> int:
        return sum(share.bytes for share in self._shares)


class _Work:
    """The shares that workers take one after the other. Thread-safe."""

    def __init__(
        self, means: Means, source: Source, shares: Iterable[Share], moved: Callable[[], int]
    ) -> None:
        self._means = means
        self._source = source
        self._waiting = deque(shares)
        self._moved = moved
        self._failed: BaseException | None = None
        self._late: GrantExpired | None = None

    def run(self) -> None:
        """Store shares until none waits. Errors are kept for ``raise_first``."""
        with suppress(IndexError):
            while self._failed is None and self._late is None:
                self._store(self._waiting.popleft())

    def raise_first(self) -> None:
        if self._failed is not None:
            raise self._failed
        if self._late is not None:
            raise self._late

    def _store(self, share: Share) -> None:
        means = self._means
        try:
            with means.workers.turn(self._check):
                store_share(
                    share,
                    self._source,
                    means.sender(lambda: self._failed is not None),
                    means.grants(),
                    progress=lambda: means.moved(self._moved()),
                    check=self._check,
                )
        except GrantExpired as late:
            self._late = late
        except BaseException as error:  # noqa: BLE001  the thread's border: it is raised again
            self._failed = self._failed or error

    def _check(self) -> None:
        self._means.check()
        if self._failed is not None:
            raise RunCancelled("another share of this pass has failed")
