"""The one parent of an installation's server, store and workers: it starts them, restarts them, and
ends them with itself, also where it is killed.

It holds them by its own handles. Everybody else reads its lock and its record
(torpor/control/supervision.py), and knows one signal: SIGTERM ends it with its children. Flow runs
are no children of its: they outlive their worker, and report to the next server. Only where `down`
asks (it holds a lock meanwhile: deployments/parent.py) do they end too.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from msgspec import structs

from deployments import server, unit, worker
from deployments.installation import CHECKOUT, Installation, unwritten
from deployments.lost_runs import end_lost_runs
from deployments.parent import DOWN, described
from deployments.processes import flow_runs, last_words, mark, printed_since, trim
from deployments.server import Server
from torpor.control.disk_space import full_disks
from torpor.control.processes import end_processes, ending_with_this_process
from torpor.control.store import embedded
from torpor.control.supervision import (
    KEPT_EVENTS,
    LOCK,
    RECORD,
    STORE,
    Supervision,
    SupervisorEvent,
    is_held,
    read_supervision,
)
from torpor.shared.errors import TorporError

_AWAITED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
POLL_S: Final = 1.0
WRITE_S: Final = 30.0
STEADY_S: Final = 60.0
PAUSE_S: Final = 10.0
MOST_PAUSE_S: Final = 120.0
"""The longest pause in seconds before a part is started again. A part that has done its work for
STEADY_S is restarted at once when it ends. A part that ends sooner is restarted after the first
pause, and each further time after twice the last pause, up to the longest."""
LOCK_S: Final = 5.0
"""Seconds to wait for the supervisor's lock, which others hold for a moment to look whether a
supervisor lives."""
ASK_S: Final = 60.0
MOST_SILENT: Final = 5
"""Looks, ASK_S apart, that a running server may leave unanswered before it is ended."""
MOST_TOLD: Final = 50
"""Sentences of one check that the record keeps at most."""
TROUBLE_CHARACTERS: Final = 4000
EVENT_CHARACTERS: Final = 400
"""Characters of an event in the record, which keeps 200 events. The begin of a text is kept, and
not the end of a log."""
_POLL_S: Final = 0.2
_LINE: Final = 300

Child = subprocess.Popen[bytes]

_log = logging.getLogger("torpor.supervisor")


class Check(NamedTuple):
    """A look that is repeated every ``every_s``. ``look`` acts, and returns a sentence for each
    thing that a person should know. ``asks``: the look asks the server, so it waits until the
    server answers."""

    name: str
    every_s: float
    look: Callable[[], list[str]]
    asks: bool = False


@dataclass
class Part:
    """A child that is kept running while it is ``wanted``.

    ``answers``: whether it does its work, called with the child's output since its start until it
    works, and then every ``ask_s``. ``stop_s``: seconds that the child may take to end when it is
    asked to. A child without ``stop_s`` is killed, because a worker that is asked to end would end
    its flow runs.
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
    said_bytes: int = 0
    started: float = 0.0
    works_since: float = 0.0
    due: float = 0.0
    asked: float = 0.0
    silent: int = 0
    failures: int = 0


@dataclass
class Supervisor:
    """Looks at everything once per ``look``. Its clocks are ``monotonic`` and ``unix``."""

    parts: Sequence[Part]
    checks: Sequence[Check]
    write: Callable[[Supervision], None]
    record: Supervision
    monotonic: Callable[[], float] = time.monotonic
    unix: Callable[[], float] = time.time
    _next: dict[str, float] = field(default_factory=dict)
    _written: Supervision | None = None

    def look(self) -> None:
        """Restart children that have ended and are due, and run the checks that are due."""
        for part in self.parts:
            try:
                self._keep(part)
            except Exception as error:  # noqa: BLE001 - as for the checks
                if part.child is None or isinstance(error, TorporError):
                    self._fails(part, str(error))
                else:
                    self._trouble(part.role, [f"could not be looked at: {error}"])
        for name, every_s, check, asks in self.checks:
            if (self.serves or not asks) and self.monotonic() >= self._next.get(name, 0.0):
                self._check(name, check)
                self._next[name] = self.monotonic() + every_s
        self.save()

    @property
    def serves(self) -> bool:
        """Whether the server does its work; a server of the user's own always counts as working."""
        return not self.record.own or server.ROLE in self.record.running

    @property
    def has_checked(self) -> bool:
        """Whether the server was asked for lost runs. Until then no worker may take a run."""
        return all(check.name in self._next for check in self.checks if check.asks)

    @property
    def starts(self) -> bool:
        """Whether a child has begun and does not do its work yet."""
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
        part.works_since = self.monotonic()
        running = self.record.running | {part.role: child.pid}
        self.record = structs.replace(self.record, running=running)
        self._trouble(part.role, [])
        if part.due:
            self.say(part.role, f"restarted as process {child.pid}")

    def _ask(self, part: Part) -> None:
        part.asked = self.monotonic()
        part.silent = 0 if part.answers(b"") else part.silent + 1
        self._trouble(part.role, [])
        if part.silent >= MOST_SILENT and part.child is not None:
            self.say(
                part.role,
                f"it lived and did not answer, {MOST_SILENT} times in a row: it was ended",
            )
            _end(part.child, part.stop_s)

    def _ended(self, part: Part, how: str) -> None:
        if part.ready:
            self.say(part.role, how)
            if self.monotonic() - part.works_since > STEADY_S:
                part.failures = 0
                self._forget(part, 0.0)
            else:
                self._forget(part, self._pause_s(part))
        else:
            self._fails(part, how)

    def _fails(self, part: Part, why: str) -> None:
        """Note that a part did not begin its work."""
        if part.child is not None:
            _end(part.child, part.stop_s)
            why += f"; the last of {part.log}:\n{last_words(part.log)}"
        pause_s = self._pause_s(part)
        self._forget(part, pause_s)
        words = [f"cannot be started; next try in {pause_s:.0f} s: {why}"]
        # An event for each try would push all others out of the record.
        self._trouble(part.role, words, is_event=part.role not in self.record.troubles)

    def _pause_s(self, part: Part) -> float:
        """The pause before the next start, after one more end of this part."""
        part.failures += 1
        return min(PAUSE_S * 2.0 ** min(part.failures - 1, 10), MOST_PAUSE_S)

    def _forget(self, part: Part, wait_s: float) -> None:
        """Forget the child that is gone; the next start is due after ``wait_s``."""
        running = {role: pid for role, pid in self.record.running.items() if role != part.role}
        self.record = structs.replace(self.record, running=running)
        part.child, part.ready = None, False
        part.due = self.monotonic() + wait_s

    def _check(self, name: str, check: Callable[[], list[str]]) -> None:
        try:
            self._trouble(name, check())
        except Exception as error:  # noqa: BLE001 - one check's fault must not end the others
            self._trouble(name, [f"could not be checked: {error}"])

    def _trouble(self, who: str, what: list[str], *, is_event: bool = True) -> None:
        before = self.record.troubles.get(who, [])
        if more := what[MOST_TOLD:]:
            what = [*what[:MOST_TOLD], f"and {len(more)} more"]
        what = [one[:TROUBLE_CHARACTERS] for one in what]
        if what == before:
            return
        others = {name: told for name, told in self.record.troubles.items() if name != who}
        self.record = structs.replace(self.record, troubles=others | ({who: what} if what else {}))
        for one in what:
            if one not in before:
                if is_event:
                    self.say(who, one)
                else:
                    _log.warning("%s: %s", who, one)

    def say(self, who: str, what: str) -> None:
        _log.warning("%s: %s", who, what)
        event = SupervisorEvent(self.unix(), who, what[:EVENT_CHARACTERS])
        events = [*self.record.events, event]
        self.record = structs.replace(self.record, events=events[-KEPT_EVENTS:])

    def save(self) -> None:
        old = self.record.looked_unix + WRITE_S < self.unix()
        if self.record is self._written and not old:
            return
        self.record = structs.replace(self.record, looked_unix=self.unix())
        try:
            self.write(self.record)
        except Exception as error:  # noqa: BLE001 - a full disk, or a path that is no UTF-8
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
    """The parts to keep running: our own server, the store that is served here, and the workers,
    which begin once they ``may_work``. They end in the opposite order, so that flow runs can still
    report."""
    parts = []
    if used.own:
        begin: Callable[[], Child] = partial(server.begin_server, installation, used)
        log, serves = installation.log(server.ROLE), partial(server.serves, used)
        stop_s, ready_s = server.STOP_S, server.READY_S
        parts.append(Part(server.ROLE, begin, serves, log, stop_s, ready_s, ask_s=ASK_S))
    folder = installation.store
    begin, wanted = partial(_begin_store, installation), partial(embedded.is_set_up, folder)
    log, stop_s, ready_s = embedded.log_of(folder), embedded.STOP_S, embedded.READY_S
    parts.append(
        Part(STORE, begin, lambda _: embedded.answers(folder), log, stop_s, ready_s, wanted)
    )
    for pool in worker.POOLS:
        begin = partial(worker.begin_worker, installation, used, pool)
        log, ready_s = installation.log(pool.role), worker.READY_S
        parts.append(Part(pool.role, begin, worker.works, log, 0.0, ready_s, may_work))
    return parts


def checks_of(installation: Installation, used: Server, looking: Supervisor) -> list[Check]:
    """All checks, in the order in which they run."""

    def lost_runs() -> list[str]:
        workers = any(part.child for part in looking.parts if part.role in worker.ROLES)
        return end_lost_runs(used, workers=workers)

    def logs() -> list[str]:
        for log in [*installation.folder.glob("*.log"), *installation.store.glob("*.log")]:
            trim(log)
        return []

    def started_by() -> list[str]:
        old = unit.outdated(installation)
        return [old] if old else []

    return [
        Check("runs", 30.0, lost_runs, asks=True),
        Check("disk", 60.0, partial(full_disks, [installation.folder])),
        Check("logs", 60.0, logs),
        Check("unit", 600.0, started_by),
    ]


def _begin_store(installation: Installation) -> Child:
    env = {**os.environ, **mark(installation, STORE)}
    return embedded.begin(installation.store, env, ending_with_this_process()).process


def main() -> int:
    """Supervise until it is asked to end. A second supervisor of an installation is refused."""
    parser = argparse.ArgumentParser(prog="python -m deployments.supervisor")
    parser.add_argument("--port", type=int, help="of our own server")
    parser.add_argument(
        "--earlier-unit",
        action="store_true",
        help="of systemd, which starts again what ends with another status than 0, and may run no "
        "`up` beside this",
    )
    options = parser.parse_args()
    refused = 0 if options.earlier_unit else unit.REFUSED
    logging.basicConfig(format="%(asctime)s %(message)s")
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    installation = Installation.here()
    folder = installation.folder
    try:
        with installation.locked(LOCK, "another supervisor looks after", LOCK_S):
            if is_held(folder / DOWN):
                _print(f"`torpor down` ends what runs in {folder}")
                return refused
            used = server.server_of(installation, options.port)
            _supervise(installation, used, registers=options.earlier_unit)
            # The lock ends together with the process, not before.
            os._exit(refused if is_held(folder / DOWN) else 0)
    except (TorporError, OSError) as error:
        _print(f"{error}")
        return refused if is_held(folder / LOCK) else 1


def _print(words: str) -> None:
    """Print why the supervisor ends. An error of writing is ignored, because the exit status must
    not depend on a full disk."""
    with contextlib.suppress(OSError):
        print(f"torpor: {words}", file=sys.stderr, flush=True)


def _supervise(installation: Installation, used: Server, *, registers: bool) -> None:
    """Run the supervisor. ``registers``: also run an `up` beside it, once it lives."""
    folder, before = installation.folder, read_supervision(installation.folder)
    record = structs.replace(described(used), events=before.events if before else [])
    if used.own:
        installation.note_port(used.port)
    try:
        record.write(folder)  # nothing of an earlier supervisor runs
    except OSError as error:  # nobody could find or end a supervisor without a record
        raise unwritten(folder / RECORD, error) from error
    _log_to(installation.log(LOCK))
    _tell_systemd()
    if registers:
        _register()
    looking = Supervisor([], [], lambda record: record.write(folder), record)
    looking.checks = checks_of(installation, used, looking)
    looking.parts = parts_of(
        installation,
        used,
        lambda: looking.serves and looking.has_checked and installation.is_registered(used.api_url),
    )
    if before and before.running:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(before.looked_unix))
        looking.say(LOCK, f"the one before was killed; nothing was watched since about {at} UTC")
    asked: signal.struct_siginfo | None = None
    while asked is None or asked.si_signo == signal.SIGCHLD:
        try:
            looking.look()
        except Exception:  # noqa: BLE001 - the parent of all must not end by a fault of one look
            _log.exception("a look has failed")
        asked = signal.sigtimedwait(_AWAITED, _POLL_S if looking.starts else POLL_S)
    _end_all(installation, looking)


def _log_to(log: Path) -> None:
    """Append all output to ``log`` from now on, because every message names that file. Also under
    systemd, whose journal has the output up to here."""
    try:
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        _log.warning("%s", unwritten(log, error))
        return
    if not os.path.samestat(os.fstat(fd), os.fstat(sys.stderr.fileno())):
        _print(f"the supervisor lives, and prints to {log}")
        for ours in (sys.stdout, sys.stderr):
            os.dup2(fd, ours.fileno())
    os.close(fd)


def _register() -> None:
    """Begin to register in another process, whose output goes into the supervisor's log."""
    argv = [sys.executable, "-m", "deployments.up"]
    subprocess.Popen(
        argv, cwd=CHECKOUT, stdin=subprocess.DEVNULL, preexec_fn=ending_with_this_process()
    )


def _tell_systemd() -> None:
    """Tell systemd that the supervisor lives, so that the `up` of the unit finds it and its
    port."""
    where = os.environ.pop("NOTIFY_SOCKET", "")
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ours:
        ours.sendto(b"READY=1", where.replace("@", "\0", 1) if where.startswith("@") else where)


def _end_all(installation: Installation, looking: Supervisor) -> None:
    """End the children. If `down` asks, also the flow runs: together with the workers, which would
    start others, and before the server, to which they report."""
    children = [(part, part.child) for part in reversed(looking.parts) if part.child is not None]
    try:
        if is_held(installation.folder / DOWN):
            workers = [child for part, child in children if part.role in worker.ROLES]
            for child in workers:
                child.kill()
            end_processes(lambda: flow_runs(installation, *worker.ROLES), polite_s=worker.STOP_S)
    except TorporError as error:  # `down` looks again, and reports it
        _log.warning("%s", error)
    finally:
        for part, child in children:
            _end(child, part.stop_s)
        looking.record = structs.replace(looking.record, running={}, troubles={})
        looking.save()


if __name__ == "__main__":
    sys.exit(main())
