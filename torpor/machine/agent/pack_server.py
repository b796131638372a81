"""Passing kept packs on: a small HTTPS server that lives as long as one restore.

Its certificate is made for this run; the control side gives it only to the machines of the run.
Every path begins with an unguessable token. The server answers only GET of ranges of kept packs.
The machine that fetches checks every chunk against its name, so it need not trust the server.
"""

from __future__ import annotations

import datetime
import hmac
import ipaddress
import os
import re
import secrets
import socket
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from torpor.machine.agent.kept_packs import KeptPacks
from torpor.shared.errors import StoreError
from torpor.shared.values import KIB

MOST_CONNECTIONS: Final = 128
IDLE_S: Final = 30.0
_SLICE_BYTES: Final = 256 * KIB
_PATH: Final = re.compile(r"/([0-9a-f]{64})/([0-9a-f]{32})")
_RANGE: Final = re.compile(r"bytes=(\d{1,15})-(\d{1,15})")


class PackServer:
    """Serves from its creation until ``close``. Another machine needs ``port``, ``token`` and
    ``certificate`` (PEM)."""

    def __init__(self, kept: KeptPacks, host: str, folder: Path) -> None:
        self.token = secrets.token_hex(32)
        self.certificate, context = _identity(folder)
        self._server = _Server(_bound(host), kept, self.token, context)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.5,), name="agent-packs", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop accepting connections, and close the open ones."""
        self._server.shutdown()
        self._server.server_close()
        self._server.drop_all()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(
        self, address: tuple[str, int], kept: KeptPacks, token: str, context: ssl.SSLContext
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)
        self.kept = kept
        self.token = token
        self._context = context
        self._open: set[socket.socket] = set()
        self._dropped = False
        self._lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            full = len(self._open) >= MOST_CONNECTIONS
            if not full:
                self._open.add(request)
        if full:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Do the handshake in the connection's own thread, because it may be slow."""
        try:
            request.settimeout(IDLE_S)
            request = self._secured(request)
            request.do_handshake()
            self.finish_request(request, client_address)
        except OSError:  # the client has disconnected, or is not ours
            pass
        finally:
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """End a connection, also one for which no thread could be started."""
        with self._lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def drop_all(self) -> None:
        with self._lock:
            self._dropped = True
            left = list(self._open)
        for connection in left:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def _secured(self, request: socket.socket) -> ssl.SSLSocket:
        """The connection with its handshake still to come, so that the connection can be dropped
        during the handshake."""
        with self._lock:
            if self._dropped:
                raise ConnectionAbortedError
            secured = self._context.wrap_socket(
                request, server_side=True, do_handshake_on_connect=False
            )
            self._open.remove(request)
            self._open.add(secured)
            return secured


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a path holds the token."""

    def do_GET(self) -> None:
        path, wanted = _PATH.fullmatch(self.path), _RANGE.fullmatch(self.headers.get("Range", ""))
        if (
            path is None
            or wanted is None
            or not hmac.compare_digest(path.group(1), self.server.token)
        ):
            self._refuse()
            return
        start, end = int(wanted.group(1)), int(wanted.group(2)) + 1
        fd = self.server.kept.open(bytes.fromhex(path.group(2)), start, end)
        if fd is None:
            self._refuse()
            return
        try:
            self.send_response_only(206)
            self.send_header("Content-Length", str(end - start))
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/*")
            self.end_headers()
            self._send(fd, start, end)
        finally:
            os.close(fd)

    def _send(self, fd: int, start: int, end: int) -> None:
        while start < end:
            data = os.pread(fd, min(_SLICE_BYTES, end - start), start)
            if not data:  # the pack was removed meanwhile
                self.close_connection = True
                return
            self.wfile.write(data)
            start += len(data)

    def _refuse(self) -> None:
        self.close_connection = True
        self.send_response_only(404)
        self.send_header("Content-Length", "0")
        self.send_header("Connection", "close")
        self.end_headers()


def trusting(certificate: str) -> ssl.SSLContext:
    """A TLS context that trusts the one server with this certificate, whatever the server's name;
    StoreError for text that is no certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate itself is the identity
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(cadata=certificate)
    except (ssl.SSLError, ValueError) as error:
        raise StoreError(f"the other machine sent no certificate: {error}") from None
    return context


def _bound(host: str) -> tuple[str, int]:
    """The address to listen on: loopback if the machine is reached there; otherwise every
    interface, because a machine often does not have the address at which others reach it."""
    if host == "localhost":
        return "127.0.0.1", 0
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return "0.0.0.0", 0  # noqa: S104 - see above
    if address.is_loopback:
        return host, 0
    return ("::" if address.version == 6 else "0.0.0.0"), 0  # noqa: S104 - see above


def _identity(folder: Path) -> tuple[str, ssl.SSLContext]:
    """A fresh key and its certificate, valid for ever: the clocks of rented hosts are wrong."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "torpor")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime(2000, 1, 1, tzinfo=datetime.timezone.utc))
        .not_valid_after(datetime.datetime(9999, 12, 31, tzinfo=datetime.timezone.utc))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    path = folder / "packs.pem"  # ssl reads it from a file only
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(private + pem)
        context.load_cert_chain(path)
    finally:
        path.unlink(missing_ok=True)
    return pem.decode("ascii"), context
