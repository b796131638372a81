"""One installation of torpor on this host: its folder, and the lock on it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from torpor.control.own_server import (
    FOLDER_VARIABLE,
    LOGIN_FILE,
    PORT_FILE,
    recorded_port,
    state_folder,
)
from torpor.shared.errors import InvalidInput, TorporError

CHECKOUT: Final = Path(__file__).resolve().parent.parent
"""The folder with the flows: the clone, or the packages of an installed wheel."""
BELIEVE: Final = "--believe-records"
BELIEVE_HELP: Final = "sign every record of every store, whoever wrote it: after a key was lost"
_PACKAGES: Final = ("blocks", "deployments", "flows", "gpu_kernels", "tasks", "torpor")
"""The packages whose code the server, the workers and the flows run."""
_POLL_S: Final = 0.2


def prefect_file() -> Path:
    """The file of the deployments: in the clone, or among the packages of a wheel."""
    beside = CHECKOUT / "prefect.yaml"
    return beside if beside.exists() else Path(__file__).with_name("prefect.yaml")


def code_digest(checkout: Path) -> str:
    """A digest of every Python file of torpor's packages in that checkout. A `git pull` changes it,
    and so does another wheel of the same version."""
    found = hashlib.sha256()
    for package in _PACKAGES:
        files = [
            Path(folder) / name
            for folder, _, names in os.walk(checkout / package)
            for name in names
            # leaves out an editor's lock, which is no file
            if name.endswith(".py") and (Path(folder) / name).is_file()
        ]
        for file in sorted(files):
            try:
                code = file.read_bytes()
            except OSError as error:
                raise TorporError(f"{file} of torpor's own code cannot be read: {error}") from None
            found.update(os.fsencode(file.relative_to(checkout)) + b"\0" + code)
    return found.hexdigest()


def code_version(checkout: Path = CHECKOUT) -> str:
    """The version of this code, as a deployment has it. The number stays the same from commit to
    commit, so a digest of the code is part of it."""
    return f"{metadata.version('torpor')} (code {code_digest(checkout)[:12]})"


@dataclass(frozen=True)
class Installation:
    """The files of an installation. All are below ``folder``, which only this user can read."""

    folder: Path

    @classmethod
    def here(cls) -> Installation:
        """The installation of this user. Not in the checkout, where ``git clean`` would delete the
        embedded store."""
        return cls(state_folder())

    @property
    def prefect_home(self) -> Path:
        return self.folder / "prefect"

    @property
    def store(self) -> Path:
        return self.folder / "store"

    @property
    def machines(self) -> Path:
        return self.folder / "machines"

    @property
    def metrics(self) -> Path:
        """The file that `watch` writes for Prometheus; node_exporter reads its folder."""
        return self.folder / "metrics" / "torpor.prom"

    @property
    def port_file(self) -> Path:
        """The file with the server's port, kept so that bookmarks of the UI stay valid."""
        return self.folder / PORT_FILE

    @property
    def login_file(self) -> Path:
        """The file with the server's password, which only this user can read."""
        return self.folder / LOGIN_FILE

    def login(self) -> str:
        """The password of the installation's server, as `user:password`. Made at the first use."""
        return secret_file(self.login_file, lambda: f"torpor:{secrets.token_urlsafe(24)}")

    @property
    def block_key_file(self) -> Path:
        """The file with the key of blocks' secrets. A copy of the database does not contain the
        key."""
        return self.folder / "block-key"

    @property
    def store_key_file(self) -> Path:
        """The key that seals snapshots in the embedded store, as the first store block has it."""
        return self.folder / "store-key"

    @property
    def identity_file(self) -> Path:
        """The file with the private key of the first SSH identity: the only identity that awake
        machines let in."""
        return self.folder / "ssh-identity"

    @property
    def database(self) -> Path:
        """The SQLite database of the installation's own Prefect server."""
        return self.prefect_home / "prefect.db"

    @property
    def database_file(self) -> Path:
        """The file with the address of the PostgreSQL that the own Prefect server uses instead of
        SQLite."""
        return self.folder / "database"

    def note_port(self, port: int) -> None:
        """Keep the port of the own server. TorporError where it cannot be written."""
        if port != recorded_port(self.folder):
            write_whole(self.port_file, f"{port}\n")

    @property
    def registered_file(self) -> Path:
        """The file with the address of the server at which everything was registered, by which
        workers find their pools."""
        return self.folder / "registered"

    def is_registered(self, api_url: str) -> bool:
        try:
            return self.registered_file.read_text() == api_url
        except OSError:
            return False

    def note_registered(self, api_url: str) -> None:
        """Note that everything is registered at this server. TorporError where it cannot be
        written: the earlier note then stays."""
        if not self.is_registered(api_url):
            write_whole(self.registered_file, api_url)

    @property
    def temporary(self) -> Path:
        """The folder for temporary files of the worker and its runs."""
        return self.folder / "tmp"

    def log(self, role: str) -> Path:
        return self.folder / f"{role}.log"

    @contextlib.contextmanager
    def locked(
        self,
        name: str = "lock",
        holder: str = "another `torpor up` or `torpor down` uses",
        wait_s: float = 0.0,
    ) -> Iterator[None]:
        """Hold the lock of that name exclusively. It ends with its process. InvalidInput if it is
        still held after ``wait_s``, or where this account cannot write in the folder."""
        deadline = time.monotonic() + wait_s
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.folder.stat().st_mode & 0o077:
                self.folder.chmod(0o700)  # somebody else has made the folder
            fd = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidInput(
                f"{error.filename or self.folder} cannot be written: {error.strerror}. Make room, "
                f"give this account the right to write there, or name another folder in "
                f"{FOLDER_VARIABLE}"
            ) from error
        try:
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        said = f"{holder} {self.folder}: wait until it has ended"
                        raise InvalidInput(said) from None
                time.sleep(_POLL_S)
            yield
        finally:
            os.close(fd)


def secret_file(file: Path, make: Callable[[], str]) -> str:
    """The line in a file that only this user can read. Made at the first use, and safe on disk."""
    with contextlib.suppress(FileNotFoundError):
        return file.read_text().strip()
    write_whole(file, f"{make()}\n")  # an empty login would protect nothing
    return file.read_text().strip()


def write_whole(file: Path, text: str, mode: int = 0o600) -> None:
    """Replace a file: it holds all of the old text or all of the new one, also after
    a crash of the host. TorporError names the file where it cannot be written."""
    unfinished = file.with_name(f"{file.name}.new")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        with open(fd, "w") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(fd)
        unfinished.rename(file)
        folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise unwritten(file, error) from error


def unwritten(file: Path, error: OSError) -> TorporError:
    """The error that a file cannot be written, and what to do."""
    return TorporError(
        f"{file} cannot be written: {error.strerror}. Make room on its disk, or give this account "
        "the right to write there"
    )


def cache_folder(otherwise: Path) -> Path:
    """The folder of the agent's wheels: beside torpor's own packages, so that they are fetched
    once, or ``otherwise`` if this user may not write there."""
    kept = Path(sys.prefix) / "cache"
    try:
        kept.mkdir(exist_ok=True)
    except OSError:
        return otherwise
    return kept if os.access(kept, os.W_OK) else otherwise
