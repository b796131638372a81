"""Keep-alive HTTP connections to stores, shared by the threads of one process."""

from __future__ import annotations

import http.client
import re
import select
import socket
import ssl
import threading
from typing import NamedTuple
from urllib.parse import urlsplit

import certifi

from torpor.shared.errors import InvalidInput, StoreError, StoreUnavailable, StoreUnreachable

_PRINTABLE = re.compile(r"[!-~]+")  # urlsplit would drop a newline without a word

NAME_AUTHORITY = (
    "for a certificate authority of your own, name its file in AWS_CA_BUNDLE on the control side, "
    "or as verify_cert_path, with verify on, in the client parameters of the credentials block"
)
# connections for each host: of those whose request has ended, any above this number are closed
KEPT_IDLE = 32


class Target(NamedTuple):
    """A URL taken apart. ``path`` holds the query, so it is a secret: never print it."""

    scheme: str
    netloc: str
    host: str
    port: int
    path: str

    @property
    def place(self) -> tuple[str, str, int]:
        return (self.scheme, self.host, self.port)


def target_of(url: str, what: str) -> Target:
    """Take a grant's URL apart; ``what`` names it in the error, which leaves the URL out."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port, parts = None, None, urlsplit("")
    if parts.scheme not in ("http", "https") or not host or not _PRINTABLE.fullmatch(url):
        raise InvalidInput(f"{what} has no http or https URL with a host")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    default = 443 if parts.scheme == "https" else 80
    return Target(parts.scheme, parts.netloc, host, port or default, path)


class Connections:
    """Lends connections, one request at a time each; those given back are used again.

    A failed connect raises StoreUnavailable for a host that was reached before, and
    StoreUnreachable for one that never was.
    """

    def __init__(self, *, timeout_s: float, tls: ssl.SSLContext | None = None) -> None:
        self._timeout_s = timeout_s
        self._tls = tls
        self._authority = ""
        self._lock = threading.Lock()
        self._idle: dict[tuple[str, str, int], list[http.client.HTTPConnection]] = {}
        self._reached: set[tuple[str, str, int]] = set()
        self._closed = False

    def trust(self, authority: str) -> None:
        """Trust these certificate authorities (PEM), too. Call it before the first connection is
        made."""
        self._authority = authority

    def take(self, target: Target) -> http.client.HTTPConnection:
        """An open connection to the target's host: an idle one that still lives, or a new one."""
        while True:
            with self._lock:
                idle = self._idle.get(target.place)
                connection = idle.pop() if idle else None
            if connection is None:
                return self._connect(target)
            if _still_open(connection):
                return connection
            connection.close()

    def give(self, target: Target, connection: http.client.HTTPConnection) -> None:
        """Take back a connection whose answer was read to its end."""
        with self._lock:
            idle = self._idle.setdefault(target.place, [])
            if not self._closed and len(idle) < KEPT_IDLE:
                idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Close what is idle; what is lent is closed when it comes back."""
        with self._lock:
            self._closed = True
            idle = [connection for kept in self._idle.values() for connection in kept]
            self._idle.clear()
        for connection in idle:
            connection.close()

    def _connect(self, target: Target) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection
        if target.scheme == "https":
            connection = http.client.HTTPSConnection(
                target.host, target.port, timeout=self._timeout_s, context=self._context()
            )
        else:
            connection = http.client.HTTPConnection(
                target.host, target.port, timeout=self._timeout_s
            )
        at = f"{target.host}:{target.port}"
        away = StoreUnavailable if target.place in self._reached else StoreUnreachable
        try:
            connection.connect()
        except ssl.SSLCertVerificationError as error:
            raise StoreError(
                f"the certificate of {at} is not trusted: {error.verify_message}; check the "
                f"endpoint's name and the machine's clock; {NAME_AUTHORITY}"
            ) from None
        except ssl.SSLError as error:
            raise StoreError(
                f"no TLS with {at}: {error.reason or error}; check whether the endpoint is http "
                "or https, and its port"
            ) from None
        except socket.gaierror as error:
            raise away(
                f"the name {target.host} cannot be resolved here: {error.strerror}; check the "
                "endpoint and this machine's DNS"
            ) from None
        except TimeoutError:
            raise away(f"{at} did not accept a connection within {self._timeout_s:g} s") from None
        except OSError as error:
            raise away(
                f"no connection to {at}: {error.strerror or error}; is the store running, and "
                "reachable from this machine?"
            ) from None
        self._reached.add(target.place)
        return connection

    def _context(self) -> ssl.SSLContext:
        with self._lock:
            if self._tls is None:
                # The system's certificate authorities and certifi's: minimal images often come
                # without any. Passed as data, because the agent's bundle may be a zip file, in
                # which certifi has no path.
                tls = ssl.create_default_context()
                tls.load_verify_locations(cadata=certifi.contents())
                if self._authority:
                    tls.load_verify_locations(cadata=self._authority)
                    # As botocore does on the control side: Python 3.13 by default demands a
                    # critical constraint and key identifiers, which certificates of many private
                    # authorities lack.
                    tls.verify_flags &= ~ssl.VERIFY_X509_STRICT
                self._tls = tls
            return self._tls


def _still_open(connection: http.client.HTTPConnection) -> bool:
    """False where the server has closed an idle connection (or, against HTTP, spoken on it)."""
    if connection.sock is None:
        return False
    poll = select.poll()  # select() cannot watch descriptors above 1023
    poll.register(connection.sock, select.POLLIN)
    return not poll.poll(0)
