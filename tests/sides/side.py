"""A control side that may burn down: from one request on, nothing of it reaches anybody."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

from tasks.block_record import keep_settings
from tasks.plain_runner import PlainRunner
from tasks.workspace import OpenWorkspace
from tests.fixtures.alert_server import AlertMemory
from tests.fixtures.lab import Lab
from torpor.control.store.block_records import BlockRecord, BlockRecords, Settings, settings_for
from torpor.shared.errors import StoreAway
from torpor.shared.values import WorkspaceName

_BESIDE: Final = ("market", "job", "Thread-")
"""Threads of a flow that answer it by a queue: it would wait for what has burnt there."""


class Burnt(BaseException):
    """The host is gone in this moment."""


@dataclass
class Side:
    """One control side of the lab's bucket and market. ``exclude``: what its own Workspace block
    leaves out. ``left``: after so many requests and answers it burns down."""

    name: str
    lab: Lab
    exclude: list[str] = field(default_factory=list)
    left: float = float("inf")
    dead: bool = False
    alerts: AlertMemory = field(default_factory=AlertMemory)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def rise(self, requests: float) -> None:
        """A new process on this host, which burns down after so many requests and answers."""
        self.left, self.dead = requests, False

    def tick(self) -> None:
        with self._lock:
            self.left -= 1
            self.dead = self.dead or self.left < 0
        if self.dead and threading.current_thread().name.startswith(_BESIDE):
            raise StoreAway(f"{self.name} is burnt down")  # who waits for the thread burns next
        if self.dead:
            raise Burnt(self.name)

    @property
    def opened(self) -> OpenWorkspace:
        """The workspace as this side opens it."""
        opened = self.lab.opened
        market: Any = Mortal(self.lab.market, self)

        def log_in(*asked: Any, **how: Any) -> Any:
            self.tick()
            return Mortal(self.lab.market.log_in(*asked, **how), self)

        return replace(
            opened,
            spec=msgspec.structs.replace(opened.spec, exclude=self.exclude),
            store=Mortal(opened.store, self),  # type: ignore[arg-type]
            providers=(market,),
            log_in=log_in,
            side=self.name,
            settings=self.settings,
        )

    def settings(self) -> Settings:
        spec = msgspec.structs.replace(self.lab.opened.spec, exclude=self.exclude)
        return settings_for(spec, spec.name, sealed=self.lab.opened.store_key is not None)

    @property
    def records(self) -> BlockRecords:
        """The records as a person reads them; nothing burns meanwhile."""
        return BlockRecords(self.lab.store, self.lab.opened.store_key)

    def edit(self, exclude: list[str]) -> None:
        """What `torpor edit` does."""
        self.exclude = exclude
        with self._alone() as opened:
            keep_settings(opened)

    def take(self) -> None:
        """Its user makes its block as the other side's record says."""
        theirs = [one for one in self.recorded() if one.side != self.name]
        for record in sorted(theirs, key=lambda one: one.written_unix)[-1:]:
            self.edit(list(record.settings.stored["exclude"]))

    def retire(self, side: str) -> None:
        """What `torpor recover --retire` does."""
        listed = [one.key for one in self.records.listed(self._workspace)]
        self.records.withdraw(key for key in listed if f"/{side}/" in key)

    def recorded(self) -> list[BlockRecord]:
        """What counts in the bucket."""
        return [*self.records.read_all(self.records.listed(self._workspace), {}).values()]

    @contextmanager
    def _alone(self) -> Iterator[OpenWorkspace]:
        """The workspace, in a process of its user; nothing burns meanwhile."""
        opened = replace(self.lab.opened, side=self.name, settings=self.settings)
        with PlainRunner(opened):
            yield opened

    @property
    def _workspace(self) -> WorkspaceName:
        return self.lab.opened.spec.name


class Mortal:
    """What a side asks: each request and each answer may be its last."""

    def __init__(self, asked: Any, side: Side) -> None:
        self._asked = asked
        self._side = side

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._asked, name)
        if not callable(found) or name in ("signer",):
            return found
        return self._call(found)

    def _call(self, does: Callable[..., Any]) -> Callable[..., Any]:
        def call(*asked: Any, **how: Any) -> Any:
            self._side.tick()
            answer = does(*asked, **how)
            self._side.tick()
            return answer

        return call

    def __enter__(self) -> Mortal:
        self._asked.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._asked.__exit__(*error)
