"""A control side that may burn down: from one request on, nothing of it reaches anybody."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

from tasks.ownership import check_owner
from tasks.plain_runner import PlainRunner
from tasks.workspace import OpenWorkspace
from tests.fixtures.alert_server import AlertMemory
from tests.fixtures.lab import DEMO, Lab
from torpor.control.recovery import look_at_bucket
from torpor.control.store.workspace_records import Settings, WorkspaceRecords
from torpor.shared.errors import StoreAway, StoreError
from torpor.shared.format.names import settings_key

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
    saw: str = ""  # the owner when it asked last
    fault: type[StoreError] | None = None  # of each read of the workspace's record
    alerts: AlertMemory = field(default_factory=AlertMemory)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def rise(self, requests: float, fault: type[StoreError] | None = None) -> None:
        """A new process on this host, which burns down after so many requests and answers."""
        self.left, self.dead, self.fault = requests, False, fault

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
        fields = {"name": DEMO, "exclude": self.exclude}
        return Settings(block=DEMO, blocks={f"workspace/{DEMO}": fields})

    def recover(self) -> None:
        """What `torpor recover` does in the bucket: its user's block becomes as the record says,
        and then this side the owner. It may burn down at each request."""
        opened = self.opened
        found, _ = look_at_bucket(opened.store, opened.store_key, [DEMO])
        if (settings := found[0].settings) is not None:
            self.exclude = [*settings.blocks[settings.reference]["exclude"]]
        WorkspaceRecords(opened.store, opened.store_key).take(DEMO, self.name, self.name)

    def edit(self, exclude: list[str]) -> None:
        """What `torpor edit` does; nothing burns meanwhile."""
        self.exclude = exclude
        opened = replace(self.lab.opened, side=self.name, settings=self.settings)
        with PlainRunner(opened):
            check_owner(opened)

    def reads(self, key: str) -> None:
        """It asks who owns the workspace, and hears no older answer than that."""
        if key != settings_key(DEMO):
            return
        if self.fault is not None:
            raise self.fault(f"{key} is not given out")
        self.saw = owner_of(self.lab)


def owner_of(lab: Lab) -> str:
    """The side that owns the workspace now; empty for none."""
    record = WorkspaceRecords(lab.store, lab.opened.store_key).read(DEMO)
    return "" if record is None or record.owner is None else record.owner.side


asking = threading.local()
"""``side``: the side whose request this thread sends."""


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
            if does.__name__ == "read":
                self._side.reads(str(asked[0]))
            asking.side = self._side
            answer = does(*asked, **how)
            self._side.tick()
            return answer

        return call

    def __enter__(self) -> Mortal:
        self._asked.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._asked.__exit__(*error)
