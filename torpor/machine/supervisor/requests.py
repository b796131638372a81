"""The requests that a process of its own gets from the agent by its socket, and what else wakes it:
signals and its threads."""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from torpor.shared.errors import InvalidInput, TorporError
from torpor.shared.wire.protocol import MAX_LINE_BYTES, Envelope, Said, encode_line, parse_line

ASKED_S: Final = 5.0
"""Seconds within which a client must send its request: it is the agent, on the same machine."""


class Requests:
    """Receives requests. ``serve`` returns the answer to a request, or raises TorporError. The
    process ignores SIGHUP and SIGINT from now on."""

    def __init__(self, listener: socket.socket, serve: Callable[[Envelope], Any]) -> None:
        self._listener = listener
        self._serve = serve
        self._woken, self._wake = os.pipe()
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def listen(self, listener: socket.socket) -> None:
        """Take requests from another socket from now on."""
        self._listener.close()
        self._listener = listener

    def wait(self, seconds: float) -> None:
        """Wait until a request was answered, something wakes the process, or the time is over."""
        ready, _, _ = select.select([self._listener.fileno(), self._woken], [], [], seconds)
        if self._woken in ready:
            os.read(self._woken, 4096)
        if self._listener.fileno() in ready:
            with suppress(OSError):  # the client is gone, or sends nothing
                self._answer()

    def wake(self) -> None:
        """End a wait, from any thread."""
        with suppress(BlockingIOError):  # the pipe is readable already
            os.write(self._wake, b"w")

    def _answer(self) -> None:
        peer, _ = self._listener.accept()
        with peer:
            peer.settimeout(ASKED_S)
            try:
                said = Said(result=self._serve(_request(_line(peer))))
            except TorporError as error:
                said = Said(error=error.to_wire())
            peer.sendall(encode_line(said))


def _request(line: bytes) -> Envelope:
    asked = parse_line(line)
    if not isinstance(asked, Envelope):
        raise InvalidInput("this is no request")
    return asked


def _line(peer: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n") and len(line) <= MAX_LINE_BYTES:
        data = peer.recv(1 << 16)
        if not data:
            break
        line += data
    return line
