"""One control side's connection: lines in, lines out, and no request ever waits for it."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Iterator
from typing import Final

from torpor.shared.errors import InvalidInput
from torpor.shared.values import KIB, MIB
from torpor.shared.wire.protocol import MAX_LINE_BYTES, SILENCE_S

MAX_WAITING_EVENTS: Final = 256
# bytes of answers; a reader that is further behind is disconnected
MAX_WAITING_BYTES: Final = 64 * MIB
_READ_BYTES: Final = 256 * KIB


class Connection:
    """Lines over a stream socket. ``answer`` and ``event`` never block; ``lines`` is the reader.

    Events are dropped when MAX_WAITING_EVENTS wait. Answers are never dropped: a peer that
    leaves more than MAX_WAITING_BYTES of them unread is disconnected, and gets them again when
    it repeats its requests.
    """

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self._peer.settimeout(SILENCE_S)
        self._wake = threading.Condition()
        self._answers: deque[bytes] = deque()
        self._answer_bytes = 0
        self._events: deque[bytes] = deque(maxlen=MAX_WAITING_EVENTS)
        self._writing = False
        self._closed = False
        self._writer = threading.Thread(target=self._write, name="agent-writer", daemon=True)
        self._writer.start()

    def answer(self, line: bytes) -> None:
        with self._wake:
            if self._closed:
                return
            self._answers.append(line)
            self._answer_bytes += len(line)
            behind = self._answer_bytes > MAX_WAITING_BYTES and len(self._answers) > 1
            self._wake.notify_all()
        if behind:
            self.close()

    def event(self, line: bytes) -> None:
        with self._wake:
            if not self._closed:
                self._events.append(line)
                self._wake.notify_all()

    def lines(self) -> Iterator[bytes]:
        """Every whole line until the peer is gone, silent for SILENCE_S, or ``close``.

        Raises InvalidInput for a line over MAX_LINE_BYTES: nothing after it can be trusted.
        """
        waiting = bytearray()
        searched = 0
        while True:
            try:
                data = self._peer.recv(_READ_BYTES)
            except OSError:  # a reset, or TimeoutError after SILENCE_S
                return
            if not data:
                return
            waiting += data
            while (end := waiting.find(b"\n", searched)) >= 0:
                line = bytes(waiting[:end])
                del waiting[: end + 1]
                searched = 0
                if len(line) >= MAX_LINE_BYTES:
                    raise _too_long()
                yield line
            searched = len(waiting)
            if searched >= MAX_LINE_BYTES:
                raise _too_long()

    def flush(self, timeout_s: float) -> None:
        """Wait until the answers are written, at most ``timeout_s``."""
        with self._wake:
            self._wake.wait_for(
                lambda: self._closed or not (self._answers or self._writing), timeout_s
            )

    def close(self) -> None:
        """Disconnect the peer. Idempotent; safe from every thread, also the writer's."""
        with self._wake:
            if self._closed:
                return
            self._closed = True
            self._answers.clear()
            self._events.clear()
            self._wake.notify_all()
        try:
            self._peer.shutdown(socket.SHUT_RDWR)
        except OSError:  # the peer has closed it
            return

    def release(self) -> None:
        """Close the connection, and its socket once the writer has ended. The reader calls this."""
        self.close()
        self._writer.join()
        self._peer.close()

    def _write(self) -> None:
        while True:
            with self._wake:
                self._writing = False
                self._wake.notify_all()
                self._wake.wait_for(lambda: self._closed or self._answers or self._events)
                if self._closed:
                    return
                line = self._next()
                self._writing = True
            try:
                self._peer.sendall(line)
            except OSError:  # the peer is gone, or has not read for SILENCE_S
                self.close()
                return

    def _next(self) -> bytes:
        # Events first: they are few, and an answer ends the request that they belong to.
        if self._events:
            return self._events.popleft()
        line = self._answers.popleft()
        self._answer_bytes -= len(line)
        return line


def _too_long() -> InvalidInput:
    return InvalidInput(f"a line is over the limit of {MAX_LINE_BYTES} bytes; connection closed")
