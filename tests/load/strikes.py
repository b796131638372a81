"""Faults while jobs run: each strike hits one part of the installation, or a machine."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

from tests.fixtures.own_installation import kill_all
from tests.fixtures.postgres import Postgres
from tests.load.crowd import Crowd
from torpor.control.supervision import STORE, children_of

AWAY_S = 20.0
"""How long the store answers nobody."""
DOWN_S = 5.0
"""How long PostgreSQL is down."""
BETWEEN_S = (10.0, 30.0)


@dataclass
class Strikes:
    """``left``: how many are still to come. Every second one preempts a machine, unless ``only``
    names the kinds."""

    crowd: Crowd
    left: int
    postgres: Postgres | None = None
    only: tuple[str, ...] = ()
    struck: Counter[str] = field(default_factory=Counter)
    _at: float = 0.0
    _next: list[str] = field(default_factory=list)

    def look(self) -> None:
        """Strike if it is time, once a job has begun."""
        begun = any(task.job and not task.over for task in self.crowd.tasks)
        if not self.left or time.monotonic() < self._at or not begun:
            return
        if not self._next:
            others = [name for name in self._kinds() if name != "machine"]
            self.crowd.rng.shuffle(others)
            mixed = [name for other in others for name in (other, "machine")]
            self._next = [*self.only] or mixed
        name = self._next[0]
        if not self._kinds()[name]():
            return  # nothing to hit by now
        print(f"     strike: {self._next.pop(0)}", flush=True)
        self.struck[name] += 1
        self.left -= 1
        self._at = time.monotonic() + self.crowd.rng.uniform(*BETWEEN_S)

    def _kinds(self) -> dict[str, Callable[[], object]]:
        kinds: dict[str, Callable[[], object]] = {
            "machine": self._preempt,
            "worker": self._kill_worker,
            "worker and runs": lambda: self.crowd.alone.kill("job-worker"),
            "server": lambda: self.crowd.alone.kill("server"),
            "store": self._store_away,
        }
        if self.postgres is not None:
            kinds["postgres"] = self._stop_postgres
        return kinds

    def _preempt(self) -> bool:
        """Not the third machine in a row that has saved nothing: such a job ends as preempted."""
        working = [one for one in self.crowd.working() if one[0].may_lose]
        if not working:
            return False
        task, at, machine = self.crowd.rng.choice(working)
        self.crowd.preempted[task.workspace] += 1
        self.crowd.markets.fakes[at].market.end(machine)
        return True

    def _kill_worker(self) -> bool:
        """Its runs go on."""
        pid = children_of(self.crowd.alone.installation.folder).get("job-worker")
        return pid is not None and bool(kill_all([psutil.Process(pid)]))

    def _store_away(self) -> bool:
        pid = children_of(self.crowd.alone.installation.folder).get(STORE)
        if pid is None:
            return False
        store = psutil.Process(pid)
        store.suspend()
        try:
            time.sleep(AWAY_S)
        finally:
            store.resume()
        return True

    def _stop_postgres(self) -> bool:
        assert self.postgres is not None
        self.postgres.stop("immediate")
        time.sleep(DOWN_S)
        self.postgres.start()
        return True
