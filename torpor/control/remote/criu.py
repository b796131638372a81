"""CRIU for a machine: pinned Debian packages, fetched here, and made one archive to send.

Machines' own packages are mostly too old (Debian 12 has 3.17, Ubuntu 24.04 none). The archive has
the program with all its libraries, also libc, and is unpacked into a folder of the agent.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import httpx

from torpor.control.remote.bundle import Bundle, default_cache
from torpor.shared.errors import MachineUnfit
from torpor.shared.wire.job import CRIU

MIRRORS: Final = (
    "http://deb.debian.org/debian",
    "http://snapshot.debian.org/archive/debian/20261120T000000Z",  # keeps what Debian replaces
)
FETCH_S: Final = 120.0
"""Seconds for fetching all packages."""
_ANSWER_S: Final = 15.0
_MOST_BYTES: Final = 16 << 20
PINS: Final = Path(__file__).with_name("criu.txt")
_LIBRARIES: Final = "usr/lib/x86_64-linux-gnu/"


def criu_bundle(cache: Path | None = None) -> Bundle:
    """A gzipped tar of the program and its libraries in one folder, from the cache if it is there.

    MachineUnfit where no mirror has a package, or has another one.
    """
    pins = PINS.read_bytes()
    name = f"{CRIU}{hashlib.sha256(pins).hexdigest()[:16]}"
    archive = (cache or default_cache()) / "criu" / f"{name}.tar.gz"
    try:
        if not archive.is_file():
            _make(archive, pins.decode())
        return Bundle(name, archive, hashlib.sha256(archive.read_bytes()).hexdigest())
    except OSError as error:
        raise MachineUnfit(
            f"CRIU cannot be kept in {archive.parent} of this host: {error}"
        ) from error


def _make(archive: Path, pins: str) -> None:
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=archive.parent, delete=False) as scratch:
        try:
            _fill(scratch.name, pins)
            os.replace(scratch.name, archive)
        except BaseException:
            os.unlink(scratch.name)
            raise


def _fill(name: str, pins: str) -> None:
    files: dict[str, bytes] = {}
    until_s = time.monotonic() + FETCH_S
    with httpx.Client(timeout=_ANSWER_S, follow_redirects=True) as client:
        for line in pins.splitlines():
            if not line.startswith("#"):
                sha256, path = line.split()
                files |= dict(_unpacked(_fetched(client, path, sha256, until_s)))
    with tarfile.open(name, "w:gz") as tar:
        for file, content in sorted(files.items()):
            member = tarfile.TarInfo(file)
            member.size, member.mode = len(content), 0o755
            tar.addfile(member, io.BytesIO(content))


def _fetched(client: httpx.Client, path: str, sha256: str, until_s: float) -> bytes:
    faults = []
    for mirror in MIRRORS:
        try:
            with client.stream("GET", f"{mirror}/{path}") as answer:
                content = b"".join(_limited(answer.iter_raw(), until_s))
        except httpx.HTTPError as error:
            faults.append(f"{mirror}: {error}")
            continue
        if answer.status_code != httpx.codes.OK:
            faults.append(f"{mirror} answered {answer.status_code}")
        elif hashlib.sha256(content).hexdigest() != sha256:
            faults.append(f"{mirror} has another one")
        else:
            return content
    raise MachineUnfit(
        f"the Debian package {path}, which CRIU needs, cannot be had ({'; '.join(faults)}): "
        "processes are not kept; let this host reach one of these"
    )


def _limited(pieces: Iterator[bytes], until_s: float) -> Iterator[bytes]:
    """A download with a limit on its bytes, and on the time of all downloads together."""
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > _MOST_BYTES or time.monotonic() > until_s:
            raise httpx.ReadTimeout("it sends too much, or too slowly")
        yield piece


def _unpacked(package: bytes) -> Iterator[tuple[str, bytes]]:
    """The program and the libraries of a Debian package, without their folders. Symlinks are
    followed within the package, as the loader looks for the short names."""
    data = next(content for name, content in _members(package) if name.startswith("data.tar"))
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:*") as tar:
        for member in tar:
            path = member.name.removeprefix("./")
            wanted = path == "usr/sbin/criu" or (
                path.startswith(_LIBRARIES) and ".so" in path and "/" not in path[len(_LIBRARIES) :]
            )
            if wanted and (member.isfile() or member.issym()):
                content = tar.extractfile(member)
                if content is not None:
                    yield path.rpartition("/")[2], content.read()


def _members(archive: bytes) -> Iterator[tuple[str, bytes]]:
    """The files of an ``ar`` archive, which a Debian package is (deb(5))."""
    at = 8  # behind "!<arch>\n"
    while at + 60 <= len(archive):
        name = archive[at : at + 16].decode().strip().rstrip("/")
        size = int(archive[at + 48 : at + 58])
        yield name, archive[at + 60 : at + 60 + size]
        at += 60 + size + size % 2
