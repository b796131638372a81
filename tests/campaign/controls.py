"""Control sides: each run of a flow in a process of its own, so that it can be killed like one."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from prefect import Flow

from deployments import parent, server
from deployments.down import down
from deployments.installation import Installation
from flows import hibernate, replicate, wake
from tasks.phases import phases_told_to
from tests.fixtures.kill_points import Child, Moment, Say, dying_at
from tests.fixtures.plain_flows import run_plainly
from tests.fixtures.prefect_server import talking_to
from tests.fixtures.short_agent import (
    SMALL_PARTS,
    SOON_ABANDONED,
    Change,
    clock_shifted,
    copy_agent,
    installing,
)
from tests.fixtures.world import World
from torpor.control.ports import free_ports
from torpor.control.processes import all_processes

SKEW_S: Final = -3 * 3600
BLOCK: Final = "demo"
_MARK: Final = "TORPOR_TESTS_CONTROL"
"""In the environment of every process that a control side starts; machines do not inherit it."""
_FLOWS: Final[dict[str, Flow[..., Any]]] = {
    "hibernate": hibernate,
    "wake": wake,
    "replicate": replicate,
}


class Control(Child):
    """One control side under way, or at its end. It says the phases that it enters."""

    def phase(self) -> str:
        """The phase that it entered last."""
        return next((line for line in reversed(self.said()) if line[:1] != "{"), "start")

    def entered(self, phase: str) -> bool:
        return phase in self.said()


class Controls:
    """Makes control sides for one world; what they need is in ``folder``."""

    def __init__(self, folder: Path, world: World, abandoned: Change = SOON_ABANDONED) -> None:
        self._world = world
        self._mark = str(folder)
        self._prefect: tuple[Installation, server.Server] | None = None
        # What makes a campaign of hours one of minutes: small parts, a short wait for the lost.
        self._source = copy_agent(folder / "source", SMALL_PARTS, abandoned)
        shift = clock_shifted(SKEW_S)
        self._skewed = copy_agent(folder / "skewed", SMALL_PARTS, abandoned, shift)

    def start(
        self,
        flow: str,
        options: dict[str, Any],
        by_prefect: bool = False,
        dies_at: Moment | None = None,
        *,
        skewed: bool = False,
    ) -> Control:
        """A control side that begins now. ``skewed``: machines live SKEW_S in the future."""

        def work(say: Say) -> None:
            os.environ[_MARK] = self._mark
            logging.disable(logging.WARNING)  # what it met is no news here
            source = self._skewed if skewed else self._source
            with installing(source), phases_told_to(say), dying_at(dies_at):
                if by_prefect:
                    self._to_prefect(lambda: _FLOWS[flow](BLOCK, **options))
                else:
                    run_plainly(self._world.opened, _FLOWS[flow], **options)

        return Control(work)

    def left(self) -> list[int]:
        """The processes that ended control sides left behind; none, while none is under way."""
        mark = f"{_MARK}={self._mark}".encode()
        return [process.pid for process, words in all_processes().items() if mark in words]

    @contextmanager
    def prefect(self, folder: Path) -> Iterator[None]:
        """One long-lived Prefect server, so that a real flow costs seconds and not tens."""
        made = Installation(folder)
        url = f"http://{server.HOST}:{free_ports(1)[0]}/api"
        self._prefect = made, server.Server(url, own=True, login=made.login())
        try:
            parent.start(*self._prefect)
            saved = Child(lambda _: self._to_prefect(lambda: self._world.access.save_blocks(BLOCK)))
            assert str(saved.told()) == "completed", saved.told()
            yield
        finally:
            down(made)

    def _to_prefect(self, work: Callable[[], object]) -> None:
        assert self._prefect is not None
        with talking_to(*self._prefect):
            work()
