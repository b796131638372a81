"""The one parent of an installation's server, store and workers: it starts them, restarts them, and
ends them with itself, also where it is killed.

It holds them by its own handles. Everybody else reads its lock and its record
(torpor/control/supervision.py), and asks it by a signal (deployments/parent.py):

    SIGTERM    end everything, flow runs too: `torpor down`
    LEAVE      end everything but flow runs: `torpor up` puts another supervisor in its place
    WORK       start the workers: everything is registered

Flow runs are no children of its: they outlive their worker, and report to the next server.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import psutil
from msgspec import structs

from deployments import server, worker
from deployments.installation import Installation
from deployments.lost_runs import end_lost_runs
from deployments.parent import LEAVE, WORK, made_of, works
from deployments.processes import flow_runs, last_words, mark, printed_since, trim
from deployments.server import Server
from torpor.control.disk_space import full_disks
from torpor.control.processes import end_processes, ending_with_this_process, is_running
from torpor.control.store import embedded
from torpor.control.supervision import (
    KEPT_EVENTS,
    LOCK,
    STORE,
    Event,
    Parent,
    Supervision,
    read_supervision,
)
from torpor.shared.errors import TorporError

_AWAITED: Final = (signal.SIGTERM, signal.SIGINT, WORK, LEAVE, signal.SIGCHLD)
LOOK_S: Final = 1.0
WRITE_S: Final = 30.0
FIRST_WAIT_S: Final = 2.0
LONGEST_WAIT_S: Final = 300.0
STEADY_S: Final = 600.0
"""What ran for so long is restarted at once when it ends; what ends sooner waits twice as long."""
LOCK_S: Final = 5.0
"""Who looks whether a supervisor lives holds its lock for a moment."""
ASK_S: Final = 60.0
MOST_SILENT: Final = 5
"""Looks at a server that runs, ASK_S apart: one that answers none of them is ended."""
_POLL_S: Final = 0.2
_LINE: Final = 300

Child = subprocess.Popen[bytes]

_log = logging.getLogger("torpor.supervisor")


class Check(NamedTuple):
    """Something to look at every ``every_s``. ``look`` does what is to be done, and returns a
    sentence for each thing that a person should know."""

    name: str
    every_s: float
    look: Callable[[Installation, Server], list[str]]


def _disks(installation: Installation, _: Server) -> list[str]:
    return full_disks([installation.folder])


def _logs(installation: Installation, _: Server) -> list[str]:
    for log in [*installation.folder.glob("*.log"), *installation.store.glob("*.log")]:
        trim(log)
    return []


def _lost_runs(installation: Installation, used: Server) -> list[str]:
    return end_lost_runs(used, workers=works(installation))


CHECKS: Final[tuple[Check, ...]] = (
    Check("runs", 30.0, _lost_runs),
    Check("disk", 60.0, _disks),
    Check("logs", 60.0, _logs),
)
"""Periodic checks of the installation, in this order, once the workers may work."""


@dataclass
class Part:
    """A child that is kept running while it is ``wanted``.

    ``answers``: whether it does its work, asked with what it has printed since its start until it
    does, and then every ``ask_s``. ``stop_s``: how long it may take to end when it is asked to; one
    that has none is killed, as a worker that is asked would end its flow runs.
    """

    role: str
    begin: Callable[[], Child]
    answers: Callable[[bytes], bool]
    log: Path
    stop_s: float
    ready_s: float = math.inf
    wanted: Callable[[], bool] = lambda: True
    ask_s: float = math.inf
    child: Child | None = None
    ready: bool = False
    before: bool = False
    said_bytes: int = 0
    started: float = 0.0
    wait_s: float = 0.0
    due: float = 0.0
    asked: float = 0.0
    silent: int = 0


@dataclass
class Supervisor:
    """Looks at everything once per ``look``. Its clocks are ``monotonic`` and ``unix``.

    ``working``: whether everything is registered, so that workers find their pools.
    """

    parts: Sequence[Part]
    checks: Sequence[tuple[str, float, Callable[[], list[str]]]]
    write: Callable[[Supervision], None]
    record: Supervision = field(default_factory=lambda: Supervision(0.0))
    working: bool = False
    monotonic: Callable[[], float] = time.monotonic
    unix: Callable[[], float] = time.time
    _next: dict[str, float] = field(default_factory=dict)
    _written: Supervision | None = None

    def look(self) -> None:
        """Restart what has ended and is due, and do the checks that are due."""
        for part in self.parts:
            try:
                self._keep(part)
            except Exception as error:  # noqa: BLE001 - as for the checks
                if part.child is None or isinstance(error, TorporError):
                    self._fails(part, str(error))
                else:
                    self._trouble(part.role, [f"could not be looked at: {error}"])
        for name, every_s, check in self.checks if self.working else ():
            if self.monotonic() >= self._next.get(name, 0.0):
                self._check(name, check)
                self._next[name] = self.monotonic() + every_s
        self._save()

    def work(self) -> None:
        """Everything is registered: start now what does not run, however often that failed."""
        self.working = True
        for part in self.parts:
            if part.child is None:
                part.due, part.wait_s = 0.0, 0.0

    @property
    def starts(self) -> bool:
        """Whether a child has begun, and does not do its work yet."""
        return any(part.child is not None and not part.ready for part in self.parts)

    def _keep(self, part: Part) -> None:
        if part.child is not None and (status := part.child.poll()) is not None:
            self._ended(part, _end_of(part.child, status, part.log))
        if part.child is None:
            if part.wanted() and self.monotonic() >= part.due:
                self._begin(part)
        elif not part.ready:
            if part.answers(printed_since(part.said_bytes, part.log)):
                self._is_ready(part, part.child)
            elif self.monotonic() > part.started + part.ready_s:
                self._fails(part, f"it did not begin its work within {part.ready_s:.0f} s")
        elif self.monotonic() >= part.asked + part.ask_s:
            self._ask(part)

    def _begin(self, part: Part) -> None:
        part.said_bytes = part.log.stat().st_size if part.log.exists() else 0
        part.started = self.monotonic()
        part.child = part.begin()

    def _is_ready(self, part: Part, child: Child) -> None:
        part.ready, part.asked, part.silent = True, self.monotonic(), 0
        running = self.record.running | {part.role: child.pid}
        self.record = structs.replace(self.record, running=running)
        self._trouble(part.role, [])
        if part.before:
            self._say(part.role, f"restarted as process {child.pid}")
        part.before = True

    def _ask(self, part: Part) -> None:
        part.asked = self.monotonic()
        part.silent = 0 if part.answers(b"") else part.silent + 1
        self._trouble(part.role, [])
        if part.silent >= MOST_SILENT and part.child is not None:
            self._say(
                part.role,
                f"it lived and did not answer, {MOST_SILENT} times in a row: it was ended",
            )
            _end(part.child, part.stop_s)

    def _ended(self, part: Part, how: str) -> None:
        if part.ready:
            self._say(part.role, how)
            steady = self.monotonic() - part.started > STEADY_S
            self._forget(part, 0.0 if steady else part.wait_s)
        else:
            self._fails(part, how)

    def _fails(self, part: Part, why: str) -> None:
        """It did not begin its work."""
        if part.child is not None:
            _end(part.child, part.stop_s)
            why += f"; the last of {part.log}:\n{last_words(part.log)}"
        self._forget(part, max(FIRST_WAIT_S, part.wait_s))
        wait_s = part.due - self.monotonic()
        part.before = True
        self._trouble(part.role, [f"cannot be started; next try in {wait_s:.0f} s: {why}"])

    def _forget(self, part: Part, wait_s: float) -> None:
        """The child is gone; the next one is due after ``wait_s``."""
        running = {role: pid for role, pid in self.record.running.items() if role != part.role}
        self.record = structs.replace(self.record, running=running)
        part.child, part.ready = None, False
        part.due = self.monotonic() + wait_s
        part.wait_s = min(LONGEST_WAIT_S, max(FIRST_WAIT_S, 2 * wait_s))

    def _check(self, name: str, check: Callable[[], list[str]]) -> None:
        try:
            self._trouble(name, check())
        except Exception as error:  # noqa: BLE001 - one check's fault must not end the others
            self._trouble(name, [f"could not be checked: {error}"])

    def _trouble(self, who: str, what: list[str]) -> None:
        before = self.record.troubles.get(who, [])
        if what == before:
            return
        others = {name: told for name, told in self.record.troubles.items() if name != who}
        self.record = structs.replace(self.record, troubles=others | ({who: what} if what else {}))
        for one in what:
            if one not in before:
                self._say(who, one)

    def _say(self, who: str, what: str) -> None:
        _log.warning("%s: %s", who, what)
        events = [*self.record.events, Event(self.unix(), who, what)]
        self.record = structs.replace(self.record, events=events[-KEPT_EVENTS:])

    def _save(self) -> None:
        old = self.record.looked_unix + WRITE_S < self.unix()
        if self.record is self._written and not old:
            return
        self.record = structs.replace(self.record, looked_unix=self.unix())
        try:
            self.write(self.record)
        except OSError as error:  # a full disk
            _log.warning("the record of the supervisor cannot be written: %s", error)
        self._written = self.record


def _end(child: Child, polite_s: float) -> None:
    if polite_s:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(polite_s)
    child.kill()
    child.wait()


def _end_of(child: Child, status: int, log: Path) -> str:
    how = f"by signal {-status}" if status < 0 else f"with status {status}"
    *_, line = last_words(log).splitlines()
    return f"process {child.pid} has ended {how}; the last line of {log}: {line[:_LINE]}"


def parts_of(installation: Installation, used: Server, may_work: Callable[[], bool]) -> list[Part]:
    """What is kept running: our own server, the store that is served here, and the workers. They
    end in the opposite order: flow runs still report."""
    parts = []
    if used.own:
        begin: Callable[[], Child] = partial(server.begin_server, installation, used)
        log, serves = installation.log(server.ROLE), partial(server.serves, used)
        stop_s, ready_s = server.STOP_S, server.READY_S
        parts.append(Part(server.ROLE, begin, serves, log, stop_s, ready_s, ask_s=ASK_S))
    begin = partial(_begin_store, installation)
    log, stop_s = embedded.log_of(installation.store), embedded.STOP_S
    wanted = partial(embedded.is_set_up, installation.store)
    parts.append(Part(STORE, begin, lambda said: True, log, stop_s, wanted=wanted))
    for pool in worker.POOLS:
        begin = partial(worker.begin_worker, installation, used, pool)
        log, ready_s = installation.log(pool.role), worker.READY_S
        parts.append(Part(pool.role, begin, worker.works, log, 0.0, ready_s, may_work))
    return parts


def _begin_store(installation: Installation) -> Child:
    env = {**os.environ, **mark(installation, STORE)}
    return embedded.restart(installation.store, env, ending_with_this_process()).process


def main() -> int:
    """Supervise until it is asked to end. A second supervisor of an installation is refused."""
    parser = argparse.ArgumentParser(prog="python -m deployments.supervisor")
    parser.add_argument("--port", type=int, help="of our own server")
    port = parser.parse_args().port
    logging.basicConfig(format="%(asctime)s %(message)s")
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    installation = Installation.here()
    used = server.server_of(installation, port)
    folder = installation.folder
    with installation.locked(LOCK, "another supervisor looks after", LOCK_S):
        seen = read_supervision(folder)
        record = Supervision(0.0, events=seen.events if seen else [])
        supervisor = Supervisor(
            [],
            [(one.name, one.every_s, partial(one.look, installation, used)) for one in CHECKS],
            lambda record: record.write(folder),
            record,
        )
        supervisor.parts = parts_of(installation, used, lambda: supervisor.working)
        record.write(folder)  # nothing of an earlier one runs
        made = made_of(installation, used)
        Parent(os.getpid(), used.api_url, used.own, made).write(folder)
        return _supervise(installation, supervisor)


def _supervise(installation: Installation, supervisor: Supervisor) -> int:
    served = False
    while True:
        supervisor.look()
        served = served or server.ROLE in supervisor.record.running
        if not served and (why := supervisor.record.troubles.get(server.ROLE)):
            _end_all(installation, supervisor, flow_runs_too=False)
            print(f"the {server.ROLE} {'; '.join(why)}", flush=True)
            return 1  # whoever started it reads that; later, it tries again
        wait_s = _POLL_S if supervisor.starts else LOOK_S
        asked = signal.sigtimedwait(_AWAITED, wait_s)
        what = asked.si_signo if asked else signal.SIGCHLD
        if what == WORK:
            supervisor.work()
        elif what != signal.SIGCHLD:
            _end_all(installation, supervisor, flow_runs_too=what != LEAVE)
            if what != LEAVE:
                (installation.folder / LOCK).write_bytes(b"")  # nobody starts it again
            return 0


def _end_all(installation: Installation, supervisor: Supervisor, *, flow_runs_too: bool) -> None:
    """End the children, and flow runs where that is asked for: with their workers, as these would
    start others."""
    children = [(part, part.child) for part in reversed(supervisor.parts) if part.child is not None]
    workers = [psutil.Process(it.pid) for one, it in children if one.role in worker.ROLES]
    try:
        if flow_runs_too:
            end_processes(
                lambda: [*filter(is_running, workers), *flow_runs(installation, *worker.ROLES)],
                polite_s=worker.STOP_S,
            )
    finally:
        for part, child in children:
            _end(child, part.stop_s)


if __name__ == "__main__":
    sys.exit(main())
