"""Connects standard input and output to the agent, starting or replacing it where needed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

from torpor.machine.agent.home import SOCKET, agent_alive, enter_home, start_lock
from torpor.machine.agent.log import LOG_FILE, Log
from torpor.machine.agent.memory_trouble import MemoryTrouble
from torpor.machine.sampler.process import ensure_sampler
from torpor.shared.errors import AgentLost, MachineUnfit
from torpor.shared.values import KIB

START_S: Final = 30.0  # an agent on a slow, busy machine answers within this time
REPLACE_S: Final = 15.0  # an agent that got `bye` is gone within this time
_HELLO_BYTES: Final = 64 * KIB
_PUMP_BYTES: Final = 256 * KIB


def attach(home: Path, agent: str, start: list[str], sampler: list[str] | None = None) -> None:
    """Pump bytes between this process's stdin and stdout and the agent until either side ends.

    ``agent`` is the version that must answer; ``start`` is the argv that starts it, and ``sampler``
    that of the sampler, where one is wanted. Without it nothing but its verdict is missing.
    """
    home = enter_home(home)
    peer, hello = _connect_or_start(home, agent, start)
    if sampler is not None:
        try:
            ensure_sampler(home, agent, sampler, LOG_FILE)
        except OSError as error:
            Log(home / LOG_FILE).write(f"the sampler cannot be started: {error}")
    _write_all(1, hello)
    threading.Thread(target=_pump_in, args=(peer,), name="attach-in", daemon=True).start()
    _pump_out(peer)


def _connect_or_start(home: Path, agent: str, start: list[str]) -> tuple[socket.socket, bytes]:
    found = _connect()
    if found is not None and _version(found[1]) == agent:
        return found
    if found is not None:
        found[0].close()
    with start_lock(home, START_S + REPLACE_S):
        found = _connect()  # another attach may have started the agent meanwhile
        if found is not None and _version(found[1]) == agent:
            return found
        if found is not None:
            _dismiss(home, *found)
        _await_gone(home)
        return _start(home, agent, start)


def _connect() -> tuple[socket.socket, bytes] | None:
    """A connection and the hello line, or None if no agent answers."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.settimeout(START_S)
    try:
        peer.connect(SOCKET)
        hello = b""
        while not hello.endswith(b"\n") and len(hello) < _HELLO_BYTES:
            data = peer.recv(_HELLO_BYTES)
            if not data:
                break
            hello += data
    except OSError:  # no socket, a stale one, or an agent that hangs
        peer.close()
        return None
    if not hello.endswith(b"\n"):
        peer.close()
        return None
    peer.settimeout(None)
    return peer, hello


def _dismiss(home: Path, peer: socket.socket, hello: bytes) -> None:
    """Ask an agent of another version to leave; MachineUnfit while it has an active run."""
    with peer:
        if _facts(hello).get("busy"):
            raise MachineUnfit(
                f"an agent of another version ({_version(hello)[:12]}) serves a run in {home}: "
                "wait until that run has ended, or use the torpor that started it"
            )
        peer.settimeout(REPLACE_S)
        peer.sendall(b'{"id":"replaced","op":"bye","args":{}}\n')
        try:
            while peer.recv(_HELLO_BYTES):
                pass
        except OSError:  # a slow agent: _await_gone decides
            return


def _await_gone(home: Path) -> None:
    give_up = time.monotonic() + REPLACE_S
    while agent_alive(home):
        if time.monotonic() >= give_up:
            raise AgentLost(
                f"an agent in {home} lives but does not answer; its log is {home / LOG_FILE}"
            )
        time.sleep(0.02)


def _start(home: Path, agent: str, start: list[str]) -> tuple[socket.socket, bytes]:
    trouble = MemoryTrouble(home)
    trouble.check()
    log = os.open(LOG_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        began = os.fstat(log).st_size
        daemon = subprocess.Popen(
            start,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=home,
            start_new_session=True,
        )
    finally:
        os.close(log)
    give_up = time.monotonic() + START_S
    while time.monotonic() < give_up:
        found = _connect()
        if found is not None and _version(found[1]) == agent:
            return found
        if found is not None:
            found[0].close()
        ended = daemon.poll()
        if ended is not None and ended < 0:
            trouble.check()
            raise AgentLost(
                f"the agent was ended by signal {-ended} as it started in {home}: "
                f"{_last_words(began)}; where that happens again, look for memory that runs out"
            )
        if ended is not None:
            raise MachineUnfit(
                f"the agent did not start in {home} (exit {ended}): {_last_words(began)}"
            )
        time.sleep(0.01)
    daemon.kill()
    raise AgentLost(
        f"the agent in {home} did not answer within {START_S:g} s of its start; its log is "
        f"{home / LOG_FILE}"
    )


def _last_words(began: int) -> str:
    with open(LOG_FILE, "rb") as log:
        log.seek(began)
        words = log.read(64 * KIB).decode("utf-8", "replace").strip().splitlines()
    return " | ".join(words[-3:])[-500:] or "it said nothing"


def _pump_in(peer: socket.socket) -> None:
    try:
        while data := os.read(0, _PUMP_BYTES):
            peer.sendall(data)
    except OSError:  # one side is gone; the other pump notices
        pass
    try:
        peer.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


def _pump_out(peer: socket.socket) -> None:
    try:
        while data := peer.recv(_PUMP_BYTES):
            _write_all(1, data)
    except OSError:  # the agent or the SSH channel is gone
        return


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _version(hello: bytes) -> str:
    return str(_facts(hello).get("agent", ""))


def _facts(hello: bytes) -> dict[str, Any]:
    try:
        message = json.loads(hello)
    except ValueError:
        return {}
    facts = message.get("hello") if isinstance(message, dict) else None
    return facts if isinstance(facts, dict) else {}


def own_command(bundle: Path, home: Path, command: str) -> list[str]:
    """The argv that starts ``command`` of ``bundle``, with the Python that runs this process."""
    return [sys.executable, "-I", "-X", "utf8", str(bundle), command, "--home", str(home)]
