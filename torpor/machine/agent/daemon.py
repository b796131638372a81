"""The agent: serves requests on a Unix socket and outlives the connections that bring them."""

from __future__ import annotations

import errno
import select
import shutil
import socket
import threading
import time
import traceback
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torpor.machine.agent import machine
from torpor.machine.agent.autosave import dismiss_autosaves
from torpor.machine.agent.call import Call, Operations, Runs
from torpor.machine.agent.connection import Connection
from torpor.machine.agent.home import OwnHome, note_busy, was_marked_again
from torpor.machine.agent.jobs import dismiss_supervisors
from torpor.machine.agent.log import LOG_FILE, Log, scrub
from torpor.machine.agent.orphans import Orphans
from torpor.machine.agent.os_trouble import name_of, os_trouble
from torpor.machine.agent.resume import GRACE_S, watch_owed
from torpor.machine.sampler.process import dismiss
from torpor.shared.errors import (
    AgentLost,
    DiskFull,
    InvalidInput,
    MachineError,
    TorporError,
    WorkspaceBusy,
)
from torpor.shared.values import MIB
from torpor.shared.wire.machine import Bye, Forget
from torpor.shared.wire.protocol import Cancel, Envelope, Said, encode_line, parse_line
from torpor.shared.wire.request import Event, Nothing

KEPT_RESULTS: Final = 1024
MAX_KEPT_BYTES: Final = 64 * MIB
MAX_RUNNING: Final = 256  # requests at once; a phase has at most 64 parts
MAX_CONNECTIONS: Final = 64
FLUSH_S: Final = 5.0


@dataclass(frozen=True)
class Patience:
    """How long the agent waits, in seconds; tests shorten it."""

    abandon_s: float = 60.0  # a run whose control side is gone ends after this time
    leave_s: float = 600.0  # without a connection or a run, the agent leaves after this time
    tick_s: float = 1.0
    # what a run left paused goes on after this time, unless another run takes it over
    resume_s: float = GRACE_S


class Daemon:
    """One agent for one HOME. ``serve`` returns when it is time to leave."""

    def __init__(
        self,
        home: Path,
        agent: str,
        operations: Operations,
        runs: Runs,
        patience: Patience | None = None,
    ) -> None:
        self._home = home
        self._own_home = OwnHome(home)
        self._agent = agent
        self._operations = operations
        operations.add(Bye, self._bye)
        operations.add(Forget, self._forget_home)
        self._runs = runs
        self._patience = patience or Patience()
        self._log = Log(home / LOG_FILE)
        self._lock = threading.Lock()
        self._connections: set[Connection] = set()
        self._orphans = Orphans()
        self._requests: OrderedDict[str, _Served] = OrderedDict()
        self._kept_bytes = 0
        self._running = 0
        self._alone_since = time.monotonic()
        self._quiet_since = time.monotonic()
        self._abandoned = False
        self._leaving = False
        self._forget = False
        self._stopping = False
        self._noted = False
        self._woken, self._wakes = socket.socketpair()
        self._wakes.setblocking(False)

    def serve(self, listener: socket.socket) -> None:
        """Serve until ``bye`` or ``forget`` comes, or until idle for ``leave_s``."""
        listener.setblocking(False)
        watch_owed(self._home, self._patience.resume_s)
        try:
            while not self._should_leave():
                self._note_busy()
                on = [listener, self._woken]
                ready, _, _ = select.select(on, [], [], self._patience.tick_s)
                if self._woken in ready:
                    self._woken.recv(64)
                if listener in ready:
                    self._accept(listener)
        finally:
            self._leave(listener)
            self._woken.close()
            self._wakes.close()

    def stop(self) -> None:
        """Leave now, from a signal handler: end the runs, send the answers that are ready."""
        self._stopping = True
        self._wake()

    def _wake(self) -> None:
        """Wake the loop, so that it looks at once whether to leave: neither a signal nor a thread
        ends a select."""
        with suppress(OSError):  # the loop has left, or a byte is there already
            self._wakes.send(b"w")

    # -- connections

    def _accept(self, listener: socket.socket) -> None:
        try:
            peer, _ = listener.accept()
        except BlockingIOError:  # the connection went away again
            return
        except OSError as error:  # no file descriptor or memory is left: serve the open connections
            self._log.write(f"a connection could not be accepted: {error}")
            time.sleep(self._patience.tick_s)
            return
        peer.setblocking(True)
        with self._lock:
            full = len(self._connections) >= MAX_CONNECTIONS
        if full:
            peer.close()
            return
        connection = Connection(peer)
        with self._lock:
            self._connections.add(connection)
            self._abandoned = False
        threading.Thread(
            target=self._read, args=(connection,), name="agent-reader", daemon=True
        ).start()

    def _read(self, connection: Connection) -> None:
        try:
            hello = machine.hello(self._home, self._agent, self._busy())
            connection.answer(encode_line(Said(hello=hello)))
            for line in connection.lines():
                self._take(connection, line)
        except (InvalidInput, OSError) as error:
            self._log.write(f"a connection ended: {scrub(str(error))}")
            connection.answer(encode_line(Said(error=InvalidInput(str(error)).to_wire())))
            connection.flush(FLUSH_S)
        finally:
            connection.release()
            with self._lock:
                self._connections.discard(connection)
                self._orphans.gone(connection)
                for served in self._requests.values():
                    served.listeners -= {connection}
                if not self._connections:
                    self._alone_since = self._quiet_since = time.monotonic()

    def _take(self, connection: Connection, line: bytes) -> None:
        if not line:  # an empty line, sent for a login's files that read
            return
        message = parse_line(line)
        if isinstance(message, Envelope):
            self._start(connection, message)
        elif isinstance(message, Cancel):
            with self._lock:
                served = self._requests.get(message.id)
            if served is not None:
                served.call.cancel()
        else:
            connection.event(encode_line(Said(pong=True)))

    # -- requests

    def _start(self, connection: Connection, request: Envelope) -> None:
        run = request.args.get("run")
        with self._lock:
            if isinstance(run, str):
                self._orphans.named(connection, run)
            served = self._requests.get(request.id)
            if served is not None:
                if served.digest != request.digest:
                    refusal = f"request id {request.id} was used before for another request"
                elif served.answer is None:
                    served.listeners |= {connection}
                    return
                else:
                    connection.answer(served.answer)
                    return
            elif self._running >= MAX_RUNNING:
                refusal = f"{MAX_RUNNING} requests are running already; send fewer at once"
            else:
                served = _Served(request, self._home)
                served.listeners |= {connection}
                self._requests[request.id] = served
                self._running += 1
                refusal = ""
        if refusal or served is None:
            connection.answer(_failure(request.id, InvalidInput(refusal)))
            return
        try:
            threading.Thread(
                target=self._serve, args=(request, served), name=f"agent-{request.op}", daemon=True
            ).start()
        except RuntimeError as error:  # the system starts no more threads
            self._finish(served, _failure(request.id, self._translate(request, error)))

    def _serve(self, request: Envelope, served: _Served) -> None:
        try:
            typed = self._operations.parse(request.op, request.args)
            answer = self._operations.serve(typed, served.call)
            line = encode_line(Said(id=request.id, result=answer))
        except BaseException as error:  # noqa: BLE001  the thread's border: all becomes an answer
            line = _failure(request.id, self._translate(request, error))
        self._finish(served, line)

    def _bye(self, request: Bye, call: Call) -> Nothing:
        self._leaving = True
        return Nothing()

    def _forget_home(self, request: Forget, call: Call) -> Nothing:
        if self._busy():
            raise WorkspaceBusy(
                f"a run is active on this machine: end it before {self._home} is removed"
            )
        dismiss_supervisors(self._home)
        dismiss_autosaves(self._home, call)
        self._leaving = self._forget = True
        return Nothing()

    def _finish(self, served: _Served, line: bytes) -> None:
        with self._lock:
            self._running -= 1
            self._quiet_since = time.monotonic()
            listeners, served.listeners = served.listeners, frozenset()
            served.answer = line
            self._kept_bytes += len(line)
            self._requests.move_to_end(served.id)
            self._drop_oldest()
            # Queued under the lock, because the check before leaving looks at the queues once
            # nothing is running.
            for connection in listeners:
                connection.answer(line)
        if self._leaving:
            self._wake()

    def _drop_oldest(self) -> None:
        done = [s for s in self._requests.values() if s.answer is not None]
        while len(done) > 1 and (len(done) > KEPT_RESULTS or self._kept_bytes > MAX_KEPT_BYTES):
            oldest = done.pop(0)
            self._kept_bytes -= len(oldest.answer or b"")
            del self._requests[oldest.id]

    def _translate(self, request: Envelope, error: BaseException) -> TorporError:
        """The error to send. The log gets the traceback; neither holds a secret."""
        if isinstance(error, TorporError):
            return type(error)(scrub(str(error), request.args))
        if isinstance(error, OSError | ImportError) and self._own_home.is_gone:
            return AgentLost(
                f"a program on the machine has removed {self._home}, the folder of torpor, during "
                f"{request.op}: another agent is installed"
            )
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            where = name_of(error.filename) or str(self._home)
            return DiskFull(
                f"{request.op} found no space left for {where} ({error.strerror}): free some "
                "space or take a machine with a larger disk, then run it again"
            )
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        self._log.write(scrub(f"{request.op} ({request.id}) failed\n{trace}", request.args))
        cause = scrub(str(error), request.args) or "no further word"
        if isinstance(error, MemoryError):
            cause = "the machine has not enough memory for it"
        words = os_trouble(error) or f"{type(error).__name__}: {cause[:500]}"
        return MachineError(
            f"{request.op} failed on the machine: {scrub(words, request.args)}; the agent's log "
            f"there is {self._home / LOG_FILE}"
        )

    # -- time to leave

    def _note_busy(self) -> None:
        busy = self._runs.active()
        if busy != self._noted:
            self._noted = busy
            try:
                note_busy(self._home, busy)
            except OSError as error:  # a full disk: the run then counts as the user's work
                self._log.write(f"whether a run is active cannot be noted: {error}")

    def _busy(self) -> bool:
        with self._lock:
            at_work = [s.op for s in self._requests.values() if s.answer is None]
        return any(op not in (Bye.op, Forget.op) for op in at_work) or self._runs.active()

    def _should_leave(self) -> bool:
        self._own_home.mark()
        if self._stopping or self._own_home.is_gone:  # the next attach starts another agent
            return True
        now = time.monotonic()
        with self._lock:
            attached, running = bool(self._connections), self._running
            unanswered = [s for s in self._requests.values() if s.answer is None]
            alone_s, quiet_s = now - self._alone_since, now - self._quiet_since
            abandon = not attached and alone_s >= self._patience.abandon_s and not self._abandoned
            self._abandoned = self._abandoned or abandon
            orphans = self._orphans.take(self._patience.abandon_s)
        for served in unanswered:
            if abandon or served.run in orphans:
                served.call.cancel()
        for run in orphans:
            self._log.write(f"no control side for {self._patience.abandon_s:g} s: run {run} ends")
            self._runs.abandon(
                run, f"its control side was not attached for {self._patience.abandon_s:g} s"
            )
        if running or self._runs.active():
            return False
        return self._leaving or (not attached and quiet_s >= self._patience.leave_s)

    def _leave(self, listener: socket.socket) -> None:
        listener.close()
        with self._lock:
            calls = [s.call for s in self._requests.values() if s.answer is None]
            connections = list(self._connections)
        for call in calls:
            call.cancel()
        self._runs.close()
        for connection in connections:
            connection.flush(FLUSH_S)
            connection.close()
        if self._forget and not self._own_home.is_gone and not was_marked_again(self._home):
            dismiss(self._home)
            shutil.rmtree(self._home)
        else:
            self._log.write("the agent leaves")


class _Served:
    """A request that runs, or its kept answer."""

    def __init__(self, request: Envelope, home: Path) -> None:
        self.id = request.id
        self.op = request.op
        self.run = request.args.get("run")
        self.digest = request.digest
        self.answer: bytes | None = None
        self.listeners: frozenset[Connection] = frozenset()  # replaced, never changed
        self.call = Call(request.id, home, self._emit)

    def _emit(self, event: Event) -> None:
        line = encode_line(Said(id=self.id, event=event))
        for connection in self.listeners:
            connection.event(line)


def _failure(request: str, error: TorporError) -> bytes:
    wire = error.to_wire()
    wire["message"] = wire["message"][: 64 * 1024]
    return encode_line(Said(id=request, error=wire))
