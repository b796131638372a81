"""Limits how long one store may delay a caller that asks many: a store that drips its answers, or
whose listing never ends, breaks no timeout of a single request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Final, TypeVar

from torpor.control.store.object_store import ObjectStore
from torpor.control.store.signatures import Signer
from torpor.shared.errors import StoreError
from torpor.shared.transfer.retries import hurried
from torpor.shared.transfer.transfer import Range
from torpor.shared.values import Capabilities, Grant, ObjectKey, StoredObject

_NAP_S: Final = 0.25  # seconds within which a call ends whose time is over
_Answer = TypeVar("_Answer")


class StorePatience:
    """Gives each store ``most_s`` in all, by its address. Calls of one store that wait at the same
    time are counted once. The patience of a store's block (transfer/retries.py) is not used,
    because a caller that asks many stores comes back to one that is away."""

    def __init__(self, most_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_s, self._clock = most_s, clock
        self._lock = threading.Lock()
        self._of: dict[str, _WaitLimit] = {}

    def of(self, store: ObjectStore) -> ObjectStore:
        """The store with a limited time. Once its time is over, each call raises StoreError, which
        is not tried again: at once, or while it waits. The request of one that waited may go on."""
        with self._lock:
            limit = self._of.setdefault(
                store.address, _WaitLimit(store.address, self._most_s, self._clock)
            )
        return _PatientStore(store, limit)


class _WaitLimit:
    """How long one store has delayed the caller."""

    def __init__(self, address: str, most_s: float, clock: Callable[[], float]) -> None:
        self._address, self._most_s, self._clock = address, most_s, clock
        self._lock = threading.Lock()
        self._open, self._since_s, self._before_s = 0, 0.0, 0.0

    @contextmanager
    def one_call(self) -> Iterator[None]:
        self.check()
        with self._lock:
            if not self._open:
                self._since_s = self._clock()
            self._open += 1
        try:
            yield
        finally:
            with self._lock:
                self._open -= 1
                if not self._open:
                    self._before_s += self._clock() - self._since_s

    def check(self) -> None:
        """StoreError once the store's time is over."""
        with self._lock:
            open_s = self._clock() - self._since_s if self._open else 0.0
            held_s = self._before_s + open_s
        if held_s >= self._most_s:
            raise StoreError(
                f"the store {self._address} has held up this run for {self._most_s:.0f} s in all, "
                "and is not asked any more: see why it answers so slowly, or lists without an end"
            )


class _PatientStore:
    """An ``ObjectStore``. Each call has a thread of its own, which is left alone where the
    store does not answer in time; no thread keeps a process from ending."""

    def __init__(self, store: ObjectStore, limit: _WaitLimit) -> None:
        self._store, self._limit = store, limit
        self._signer: Signer | None = None

    def __repr__(self) -> str:
        return repr(self._store)

    @property
    def address(self) -> str:
        return self._store.address

    @property
    def authority(self) -> str:
        return self._store.authority

    @property
    def signer(self) -> Signer:
        if self._signer is None:
            self._signer = self._asked(lambda: self._store.signer)
        return self._signer

    def probe(self) -> Capabilities:
        return self._asked(self._store.probe)

    def clock_ahead_s(self) -> float:
        return self._asked(self._store.clock_ahead_s)

    def put(
        self,
        key: ObjectKey,
        body: bytes,
        *,
        if_absent: bool = False,
        if_version: str | None = None,
    ) -> StoredObject:
        return self._asked(
            lambda: self._store.put(key, body, if_absent=if_absent, if_version=if_version)
        )

    def get(self, key: ObjectKey, *, max_bytes: int) -> bytes:
        return self._asked(lambda: self._store.get(key, max_bytes=max_bytes))

    def read(self, key: ObjectKey, *, max_bytes: int) -> tuple[bytes, str]:
        return self._asked(lambda: self._store.read(key, max_bytes=max_bytes))

    def get_range(self, key: ObjectKey, wanted: Range) -> bytes:
        return self._asked(lambda: self._store.get_range(key, wanted))

    def head(self, key: ObjectKey) -> StoredObject | None:
        return self._asked(lambda: self._store.head(key))

    def list(self, prefix: str) -> Iterator[StoredObject]:
        yield from self._asked(lambda: [*self._store.list(prefix)])

    def delete(self, keys: Iterable[ObjectKey]) -> None:
        named = [*keys]
        self._asked(lambda: self._store.delete(named))

    def grant(self, verb: str, key: ObjectKey, *, expires_s: int) -> Grant:
        return self._store.grant(verb, key, expires_s=expires_s)

    def _asked(self, call: Callable[[], _Answer]) -> _Answer:
        with self._limit.one_call():
            answer: Future[_Answer] = Future()
            threading.Thread(target=_give, args=(answer, call), daemon=True).start()
            while not wait([answer], _NAP_S).done:
                self._limit.check()
            return answer.result()


def _give(answer: Future[_Answer], call: Callable[[], _Answer]) -> None:
    try:
        with hurried():
            answer.set_result(call())
    except BaseException as error:  # noqa: BLE001 - whoever waits for the answer raises it
        answer.set_exception(error)
