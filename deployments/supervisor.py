"""The one process that restarts the server, the store and the workers of an installation.

They outlive it: a supervisor that is killed ends nothing, and the next one finds them by their
mark. What it did is in ``supervision.json`` (torpor/control/supervision.py).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from msgspec import structs

from deployments import server, worker
from deployments.installation import Installation
from deployments.lost_runs import end_lost_runs
from deployments.processes import (
    end,
    last_words,
    launch,
    mark,
    started_process,
    trim,
)
from deployments.server import Server
from torpor.control.disk_space import full_disks
from torpor.control.processes import ProcessRecord, boot_id, identify, is_alive
from torpor.control.store import embedded
from torpor.control.supervision import KEPT_EVENTS, Event, Supervision, read_supervision
from torpor.shared.errors import TorporError

ROLE: Final = "supervisor"
STORE_ROLE: Final = "store"
LOOK_S: Final = 1.0
WRITE_S: Final = 30.0
FIRST_WAIT_S: Final = 2.0
LONGEST_WAIT_S: Final = 300.0
STEADY_S: Final = 600.0
"""What ran for so long is restarted at once when it ends; what ends sooner waits twice as long."""
READY_S: Final = 120.0
"""1 s, measured."""
STOP_S: Final = 10.0
MOST_SILENT: Final = 5
"""Looks at a server that lives, a minute apart."""
_POLL_S: Final = 0.2
_LINE: Final = 300

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
    return end_lost_runs(used, workers=worker.works(installation))


@dataclass
class Answers:
    """Ends our own server when it lives and does not answer: its part then starts it again."""

    silent: int = 0

    def look(self, installation: Installation, used: Server) -> list[str]:
        hung = used.own and not server.answers(used)
        hung = hung and started_process(installation, server.ROLE) is not None
        self.silent = self.silent + 1 if hung else 0
        if self.silent < MOST_SILENT:
            return []
        self.silent = 0
        server.stop(installation)
        return [f"the server lived and did not answer, {MOST_SILENT} times in a row: it was ended"]


CHECKS: Final[tuple[Check, ...]] = (
    Check("answers", 60.0, Answers().look),
    Check("runs", 30.0, _lost_runs),
    Check("disk", 60.0, _disks),
    Check("logs", 60.0, _logs),
)
"""Periodic checks of the installation, in this order."""


@dataclass
class Part:
    """A process that is kept running. ``find`` returns it, or None if it does not run."""

    role: str
    find: Callable[[], ProcessRecord | None]
    start: Callable[[], object]
    log: Path
    process: ProcessRecord | None = None
    started: float = 0.0
    wait_s: float = 0.0
    due: float = 0.0


@dataclass
class Supervisor:
    """Looks at everything once per ``look``. Its clocks are ``monotonic`` and ``unix``."""

    parts: Sequence[Part]
    checks: Sequence[tuple[str, float, Callable[[], list[str]]]]
    write: Callable[[Supervision], None]
    record: Supervision
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
                self._trouble(part.role, [f"could not be looked at: {error}"])
        for name, every_s, check in self.checks:
            if self.monotonic() >= self._next.get(name, 0.0):
                self._check(name, check)
                self._next[name] = self.monotonic() + every_s
        self._save()

    def _keep(self, part: Part) -> None:
        if part.process is None or not is_alive(part.process):
            found = part.find()
            if found is None and part.process is not None:
                self._say(part.role, _end_of(part.process, part.log))
                lived_s = self.monotonic() - part.started
                part.wait_s = 0.0 if lived_s > STEADY_S else part.wait_s
                part.due = self.monotonic() + part.wait_s
            part.process = found
        if part.process is not None:
            self._trouble(part.role, [])
        elif self.monotonic() >= part.due:
            self._start(part)

    def _start(self, part: Part) -> None:
        part.wait_s = min(LONGEST_WAIT_S, max(FIRST_WAIT_S, 2 * part.wait_s))
        self._save()
        try:
            part.start()
        except Exception as error:  # noqa: BLE001 - whatever keeps it from starting may pass
            part.due = self.monotonic() + part.wait_s
            self._trouble(
                part.role, [f"cannot be started; next try in {part.wait_s:.0f} s: {error}"]
            )
            return
        part.started = self.monotonic()
        part.process = part.find()
        if part.process is None:  # it ended at once
            part.due = self.monotonic() + part.wait_s
        else:
            self._trouble(part.role, [])
            self._say(part.role, f"restarted as process {part.process.pid}")

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


def _end_of(process: ProcessRecord, log: Path) -> str:
    """How a process ended, as far as can be known: the status of another's child cannot."""
    said = f"process {process.pid} has ended"
    try:
        pid, status = os.waitpid(process.pid, os.WNOHANG)
    except ChildProcessError:
        pid = 0
    if pid:
        code = os.waitstatus_to_exitcode(status)
        said += f" by signal {-code}" if code < 0 else f" with status {code}"
    *_, line = last_words(log).splitlines()
    return f"{said}; the last line of {log}: {line[:_LINE]}"


def parts_of(installation: Installation, used: Server) -> list[Part]:
    """What is kept running: our own server, the store that runs here, and the workers."""
    parts = []
    if embedded.is_set_up(installation.store):
        start: Callable[[], object] = partial(
            embedded.restart, installation.store, {**os.environ, **mark(installation, STORE_ROLE)}
        )
        find = partial(embedded.process_of, installation.store)
        parts.append(Part(STORE_ROLE, find, start, embedded.log_of(installation.store)))
    if used.own:
        start = partial(server.start, installation, used)
        find = partial(started_process, installation, server.ROLE)
        parts.append(Part(server.ROLE, find, start, installation.log(server.ROLE)))
    for pool in worker.POOLS:
        start = partial(worker.start, installation, used, [pool])
        find = partial(started_process, installation, pool.role)
        parts.append(Part(pool.role, find, start, installation.log(pool.role)))
    return parts


def main() -> int:
    """Supervise until SIGTERM. A second supervisor of an installation is refused."""
    logging.basicConfig(format="%(asctime)s %(message)s")
    installation = Installation.here()
    used = server.server_of(installation)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with installation.locked(ROLE, "another supervisor looks after"):
        before = read_supervision(installation.folder)
        supervisor = Supervisor(
            parts_of(installation, used),
            [(one.name, one.every_s, partial(one.look, installation, used)) for one in CHECKS],
            lambda record: record.write(installation.folder),
            Supervision(
                identify(os.getpid()) or ProcessRecord(os.getpid(), 0),
                boot_id(),
                looked_unix=0.0,
                events=before.events if before else [],
            ),
        )
        while True:
            supervisor.look()
            time.sleep(LOOK_S)


def start(installation: Installation, env: Mapping[str, str]) -> None:
    """Start the supervisor in that environment, which names the server; the one that ran must have
    been ended."""
    argv = [sys.executable, "-m", "deployments.supervisor"]
    process = launch(installation, ROLE, argv, env)
    deadline = time.monotonic() + READY_S
    while not ((seen := read_supervision(installation.folder)) and seen.process == process):
        if not is_alive(process) or time.monotonic() > deadline:
            stop(installation)
            log = installation.log(ROLE)
            raise TorporError(
                f"the supervisor did not start within {READY_S:.0f} s; the last of {log}:\n"
                f"{last_words(log)}"
            )
        time.sleep(_POLL_S)


def wait(installation: Installation) -> bool:
    """Wait until no supervisor runs; whether `make down` ended it. `make up` replaces it while it
    holds the installation's lock."""
    while True:
        while lives(installation):
            time.sleep(LOOK_S)
        with installation.locked(wait_s=math.inf):
            seen = read_supervision(installation.folder)
            if not lives(installation):
                return seen is not None and seen.ended


def lives(installation: Installation) -> bool:
    """Whether the process lives that the supervisor's record names."""
    seen = read_supervision(installation.folder)
    return seen is not None and seen.boot == boot_id() and is_alive(seen.process)


def stop(installation: Installation) -> bool:
    """End the supervisor, and nothing that it looks after; False if none ran."""
    return end(installation, ROLE, polite_s=STOP_S) > 0


def end_on_purpose(installation: Installation) -> None:
    """End the supervisor, so that nothing starts it again until `make up`."""
    stop(installation)
    if seen := read_supervision(installation.folder):
        with contextlib.suppress(OSError):  # a full disk, on which nothing is started
            structs.replace(seen, ended=True).write(installation.folder)


if __name__ == "__main__":
    sys.exit(main())
