"""The agent as one file to send: our packages and the wheels they need for a machine's Python."""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import io
import os
import struct
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import uv

from gpu_kernels.batch import KERNELS
from gpu_kernels.native import library_path
from torpor.shared.errors import InvalidInput, MachineUnfit

PYTHONS: Final = tuple((3, minor) for minor in range(10, 15))
MACHINES: Final = ("x86_64", "aarch64")
OLDEST_GLIBC: Final = (2, 17)
KEPT_BUNDLES: Final = 8  # newest archives that the cache keeps; each is about 7 MB
GATHER_S: Final = 300.0  # seconds for uv to fetch about 15 MB of wheels

SOURCE: Final = Path(__file__).resolve().parents[3]
"""The folder that holds our packages, of which a bundle gets some, and in an image the wheels."""
_SENT: Final = ("torpor/shared", "torpor/machine", "gpu_kernels")
"""The folders that a bundle holds whole, except files of other kinds."""
_MAIN: Final = b"""import sys

from torpor.machine.agent.__main__ import main

sys.exit(main(sys.argv))
"""
_SENT_KINDS: Final = (".py", ".typed")
"""Kinds of our own files that a machine needs, besides its kernels."""
_LEFT_OUT: Final = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json")
_LEFT_OUT_FOLDERS: Final = frozenset({"__pycache__", "tests", "bin"})
_NOT_USED: Final = ("zstandard/_cffi.", "lz4/frame/", "pycparser", "cffi/")
"""Parts of wheels that are left out: zstandard's second backend of 12 MB, another format of LZ4,
and what compiles C."""


@dataclass(frozen=True)
class Platform:
    """What a bundle runs on: a CPython version on Linux with glibc, an architecture, and perhaps an
    NVIDIA GPU."""

    python: tuple[int, int]
    machine: str
    gpu: bool = False

    def __post_init__(self) -> None:
        if self.python not in PYTHONS:
            raise MachineUnfit(
                f"Python {self.python[0]}.{self.python[1]} has no wheels for the agent: it runs "
                f"on CPython {_dotted(PYTHONS[0])} to {_dotted(PYTHONS[-1])}; install one of them "
                "on the machine, or take another image"
            )
        if self.machine not in MACHINES:
            raise MachineUnfit(
                f"there are no wheels for {self.machine!r}: the agent runs on "
                f"{' and '.join(MACHINES)}"
            )


@dataclass(frozen=True)
class Bundle:
    """One archive in the cache. ``hash`` names the content, ``sha256`` the archive's bytes."""

    hash: str
    archive: Path
    sha256: str


def make_bundle(
    platform: Platform, *, cache: Path | None = None, source: Path | None = None
) -> Bundle:
    """The bundle for ``platform``. No network is needed if its wheels are in the cache or in
    ``source``.

    ``source`` is the folder that holds the packages ``torpor`` and ``gpu_kernels``.
    """
    cache = cache or default_cache()
    source = source or SOURCE
    wheels = _gather(platform, source, cache)
    files = {**_wheel_files(wheels), **_source_files(source, platform), "__main__.py": _MAIN}
    name = content_hash(files)
    archive = cache / "bundles" / f"{name}-{_tag(platform)}.tar.gz"
    if not archive.is_file():
        archive.parent.mkdir(parents=True, exist_ok=True)
        _write_archive(archive, files)
        _drop_old(archive.parent)
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    return Bundle(name, archive, sha256)


def ship_wheels(machine: str) -> None:
    """Fetch the wheels for each Python on ``machine``, 50 MB each, to stay beside our packages;
    raises InvalidInput."""
    for python in PYTHONS:
        _gather(Platform(python, machine), SOURCE, SOURCE)


def default_cache() -> Path:
    """``$XDG_CACHE_HOME/torpor``, or ``~/.cache/torpor``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torpor"


def content_hash(files: Mapping[str, bytes]) -> str:
    """SHA-256 over the sorted names and contents with their lengths, so it is unambiguous."""
    total = hashlib.sha256(b"torpor-bundle-1\n")
    for name, content in sorted(files.items()):
        total.update(f"{len(name.encode())}:{name}:{len(content)}:".encode())
        total.update(content)
    return total.hexdigest()


def _gather(platform: Platform, source: Path, cache: Path) -> Path:
    """The folder with the unpacked wheels. One process at a time fills it, once."""
    pins = (source / "torpor" / "machine" / "wheels.txt").read_bytes()
    digest = hashlib.sha256(pins).hexdigest()[:16]
    shipped, folder = (place / "wheels" / f"{_tag(platform)}-{digest}" for place in (source, cache))
    for kept in (folder, shipped):
        if kept.is_dir():
            return kept
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone(folder.with_suffix(".lock")):
        if folder.is_dir():
            return folder
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".gather-") as scratch:
            fresh = Path(scratch) / "wheels"
            _fetch(platform, pins, fresh)
            os.rename(fresh, folder)
    return folder


def _fetch(platform: Platform, pins: bytes, into: Path) -> None:
    pinned = into.with_name("wheels.txt")
    pinned.write_bytes(pins)
    oldest = f"{OLDEST_GLIBC[0]}_{OLDEST_GLIBC[1]}"
    argv = [uv.find_uv_bin(), "pip", "install", "--quiet", "--python", sys.executable]
    argv += ["--target", str(into), "--python-version", _dotted(platform.python)]
    argv += ["--python-platform", f"{platform.machine}-manylinux_{oldest}", "--link-mode", "copy"]
    argv += ["--only-binary", ":all:", "--no-deps", "--require-hashes"]
    argv += ["--requirement", str(pinned)]
    try:
        done = subprocess.run(argv, capture_output=True, timeout=GATHER_S, check=False)
    except subprocess.TimeoutExpired:
        raise InvalidInput(
            f"the agent's wheels for {_tag(platform)} could not be fetched within {GATHER_S:g} s: "
            "is the package index reachable from here?"
        ) from None
    if done.returncode != 0:
        words = " ".join(done.stderr.decode("utf-8", "replace").split())[:500]
        raise InvalidInput(
            f"the agent's wheels for {_tag(platform)} could not be fetched on the control side "
            f"(uv exit {done.returncode}): {words}; check the package index and the connection"
        )


def _wheel_files(wheels: Path) -> dict[str, bytes]:
    files = {}
    for path in sorted(wheels.rglob("*")):
        name = path.relative_to(wheels)
        if not path.is_file() or path.name in _LEFT_OUT or path.name.startswith("."):
            continue
        if _LEFT_OUT_FOLDERS & set(name.parts[:-1]):
            continue
        if name.as_posix().startswith(_NOT_USED):
            continue
        content = path.read_bytes()
        files[name.as_posix()] = loaded(content) if path.suffix == ".so" else content
    return files


def loaded(library: bytes) -> bytes:
    """A shared library cut behind everything that is loaded: without its symbols and debug
    sections, which are nine tenths of zstandard's. By elf(5), for 64 bits, the lower byte first."""
    if library[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"no library for {' or '.join(MACHINES)}: it begins {library[:6]!r}")
    (table,) = struct.unpack_from("<Q", library, 32)
    size, number = struct.unpack_from("<HH", library, 54)
    starts = range(table, table + size * number, size)
    segments = [struct.unpack_from("<Q16xQ", library, start + 8) for start in starts]
    end = max(table + size * number, *(offset + length for offset, length in segments))
    return b"".join(
        (library[:40], bytes(8), library[48:60], bytes(4), library[64:end])  # no table of sections
    )


def _source_files(source: Path, platform: Platform) -> dict[str, bytes]:
    files = {}
    kernels = {library_path(platform.machine).name}
    if platform.gpu:
        kernels |= {f"{room}.fatbin" for room in KERNELS}
    files["torpor/__init__.py"] = (source / "torpor" / "__init__.py").read_bytes()
    for folder in _SENT:
        for path in sorted((source / folder).rglob("*")):
            name = path.relative_to(source)
            if not path.is_file() or _LEFT_OUT_FOLDERS & set(name.parts[:-1]):
                continue
            if path.suffix in _SENT_KINDS or path.name in kernels:
                files[name.as_posix()] = path.read_bytes()
    return files


def _write_archive(archive: Path, files: Mapping[str, bytes]) -> None:
    handle, name = tempfile.mkstemp(dir=archive.parent, prefix=".archive-")
    try:
        with (
            os.fdopen(handle, "wb") as raw,
            gzip.GzipFile(filename="", mode="wb", compresslevel=1, fileobj=raw, mtime=0) as packed,
            tarfile.open(mode="w", fileobj=packed, format=tarfile.PAX_FORMAT) as tar,
        ):
            for path, content in sorted(files.items()):
                member = tarfile.TarInfo(path)
                member.size, member.mode = len(content), 0o644
                tar.addfile(member, io.BytesIO(content))
        os.rename(name, archive)
    except BaseException:
        os.unlink(name)
        raise


def _drop_old(folder: Path) -> None:
    archives = sorted(folder.glob("*.tar.gz"), key=lambda path: path.stat().st_mtime)
    for old in archives[:-KEPT_BUNDLES]:
        old.unlink(missing_ok=True)


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    with open(lock, "wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # its holder releases the lock within GATHER_S
        yield


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _tag(platform: Platform) -> str:
    return f"cp{platform.python[0]}{platform.python[1]}-{platform.machine}"
