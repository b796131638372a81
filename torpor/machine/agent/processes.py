"""Starts processes for the agent, and asks them through their sockets."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from torpor.machine.agent.call import Call
from torpor.machine.agent.log import LOG_FILE
from torpor.shared.errors import from_wire
from torpor.shared.wire.protocol import MAX_LINE_BYTES, Said, parse_said

ANSWER_S: Final = 20.0
_ANSWER_MS: Final = 200


def start_process(
    argv: Sequence[str], lock: int, line: bytes, call: Call, environment: Mapping[str, str] = {}
) -> None:
    """Start a process with a request, and wait until it closes its stdout; raises the error that it
    prints. The process holds ``lock`` by a copy of its own."""
    said, say = os.pipe()
    wanted, want = os.pipe()
    with open(said, "rb") as answer, open(want, "wb") as asked:
        try:
            with open(call.home / LOG_FILE, "ab") as words:
                process = subprocess.Popen(
                    [*argv, "--lock", str(lock)],
                    stdin=wanted,
                    stdout=say,
                    stderr=words,
                    cwd=call.home,
                    env={**os.environ, **environment},
                    start_new_session=True,
                    pass_fds=(lock,),
                )
        finally:
            os.close(wanted)
            os.close(say)
        threading.Thread(target=process.wait, name="agent-process", daemon=True).start()
        with suppress(BrokenPipeError), asked:  # the process has ended
            asked.write(line)
        poll = select.poll()
        poll.register(answer, select.POLLIN)
        while not poll.poll(_ANSWER_MS):
            call.check()
        told = parse_said(answer.read())
    if told is not None and told.error is not None:
        raise from_wire(told.error)


def ask(peer: socket.socket, line: bytes) -> Said | None:
    """The process's answer; None if it ended instead."""
    peer.settimeout(ANSWER_S)
    peer.sendall(line)
    with peer.makefile("rb") as answer:
        return parse_said(answer.readline(MAX_LINE_BYTES))
