"""Which files the machine's packages own: apt's by its database, pip's by its records."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from functools import cached_property
from typing import Final

_MOST_BYTES: Final = 64 << 20
"""Bytes of the longest package list that is read; a longer one is ignored."""
_MOST_PACKAGES: Final = 20_000
RECORDS: Final = (".dist-info", ".egg-info")


class Owned:
    """What packages have brought since ``since_ns`` to the machine whose files lie below
    ``prefix``."""

    def __init__(self, prefix: str, since_ns: int) -> None:
        self._prefix = prefix
        self._since_ns = since_ns
        self._pip: set[str] = set()
        self.pip: dict[tuple[str, str], None] = {}
        """The packages that pip has added: where each is, and its name and version."""

    def owns(self, path: str, size: int) -> bool:
        """Whether an added package owns this file with its present content."""
        if path in self._apt_files:
            return True
        return f"{path}\0{size}" in self._pip or f"{path}\0" in self._pip

    def is_unchanged(self, path: str) -> bool:
        """Whether a file has the content that apt's database states, if it states one."""
        md5 = self._md5.get(path)
        if md5 is None:
            return path in self._apt_files
        try:
            with open(self._prefix + path, "rb") as file:
                content = file.read(_MOST_BYTES)
        except OSError:
            return False
        return hashlib.md5(content, usedforsecurity=False).hexdigest() == md5

    def learn(self, place: str, name: str, *, whole: bool) -> None:
        """Read a newer record of pip: ``place/NAME-VERSION.dist-info``. ``whole``: also which files
        it owns."""
        if f"{place}/{name}" in self._apt_files:
            return
        words = name.rpartition(".")[0].split("-")
        if len(self.pip) < _MOST_PACKAGES:
            self.pip[place, " ".join(words[:2])] = None
        if not whole:
            return
        for line in _lines(f"{self._prefix}{place}/{name}/RECORD"):
            fields = line.rsplit(",", 2)
            if len(fields) == 3:
                path = os.path.normpath(f"{place}/{fields[0].strip(chr(34))}")
                self._pip.add(f"{path}\0{fields[2]}" if fields[2] else f"{path}\0")

    @cached_property
    def apt(self) -> list[str]:
        """The packages that apt has added or changed, each with its version, without those that
        were only installed as dependencies."""
        asked = sorted(set(self._added) - only_needed(self._prefix))
        return [f"{name} {self._versions.get(name, '')}".strip() for name in asked]

    @cached_property
    def _added(self) -> dict[str, str]:
        """The file list of each added package, by the package's name."""
        info = f"{self._prefix}/var/lib/dpkg/info"
        found = {}
        try:
            with os.scandir(info) as names:
                for entry in names:
                    if entry.name.endswith(".list") and entry.stat().st_ctime_ns >= self._since_ns:
                        found[entry.name[:-5].partition(":")[0]] = entry.path
        except OSError:
            return {}
        return found

    @cached_property
    def _apt_files(self) -> frozenset[str]:
        return frozenset(path for listed in self._added.values() for path in _lines(listed))

    @cached_property
    def _versions(self) -> dict[str, str]:
        return installed_by_apt(self._prefix)

    @cached_property
    def _md5(self) -> dict[str, str]:
        """The MD5 of each configuration file of the system, by apt's database."""
        found = {}
        listed = False
        for line in _lines(f"{self._prefix}/var/lib/dpkg/status"):
            if not line.startswith(" "):
                listed = line == "Conffiles:"
            elif listed:
                path, _, rest = line.strip().partition(" ")
                found[path] = rest.partition(" ")[0]
        return found


def only_needed(prefix: str) -> set[str]:
    """The packages that apt has installed only because others need them."""
    needed, name = set(), ""
    for line in _lines(f"{prefix}/var/lib/apt/extended_states"):
        if line.startswith("Package: "):
            name = line[9:]
        elif line == "Auto-Installed: 1":
            needed.add(name)
    return needed


def installed_by_apt(prefix: str) -> dict[str, str]:
    """The packages that are installed below ``prefix``, with their versions. Of a package that was
    removed, apt's database still has the settings."""
    found: dict[str, str] = {}
    name, installed = "", False
    for line in _lines(f"{prefix}/var/lib/dpkg/status"):
        if line.startswith("Package: "):
            name, installed = line[9:], False
        elif line.startswith("Status: "):
            installed = line.endswith(" installed")
        elif line.startswith("Version: ") and installed:
            found[name] = line[9:]
    return found


def _lines(path: str) -> Iterator[str]:
    try:
        with open(path, "rb") as file:
            content = file.read(_MOST_BYTES)
    except OSError:
        return
    for line in content.splitlines():
        yield os.fsdecode(line)
