"""What is on a machine and in no snapshot: a walk of its disks that is bounded in time.

It runs in a process of its own: ``python -m torpor.machine.tree.left_behind`` reads a ``Where`` as
JSON, looks until it has seen everything or gets SIGTERM, and writes a ``Found`` as JSON. Thus it
takes no turns of the interpreter from the agent, which reads and encodes meanwhile.
"""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Final

import msgspec

from torpor.machine.tree.absence import GONE
from torpor.machine.tree.disks import Mounts, is_under
from torpor.machine.tree.groups import Groups
from torpor.machine.tree.owned import RECORDS, Owned
from torpor.shared.format.packages import normalized
from torpor.shared.values import learned
from torpor.shared.wire.losses import LeftBehind

MOST_S: Final = 60.0
SENT: Final = 20
"""Names and directories that an answer holds."""
HOMES_CUT: Final = "the look at the homes did not come to its end"
_NICE: Final = 10
"""The nice value of the whole process. A higher one would starve it where the agent itself was
started with a low priority."""
_CHECK_FILES: Final = 2000

_LAST: Final = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""Directories of the system, which are looked at last. Only files whose directory has changed are
looked at: looking at each file of a large image would take minutes on a slow disk."""
_NEVER: Final = frozenset(
    ["/proc", "/sys", "/dev", "/run", "/boot", "/snap", "/lost+found", "/nix/store"]
)
_SERVICES: Final = re.compile(
    r"/var/(log|run|lock|crash|backups|mail|opt/.*/tmp"
    r"|lib/(dpkg|systemd|cloud|dhcp|dhclient|NetworkManager|ucf|pam|dbus|private|polkit-1|plymouth"
    r"|update-notifier|update-manager|ubuntu-\w+|snapd|logrotate|man-db|apparmor|initramfs-tools"
    r"|chrony|ntp|misc|python|sgml-base|shim-signed|grub|usbutils|command-not-found|fwupd"
    r"|containerd|docker/(?!volumes)[^/]+|kubelet|lxcfs|amazon|google|waagent|aptitude|vim|fontconfig))"
)
"""Directories that the services of a system write for themselves. /var/lib/docker/volumes is none
of them."""
CACHES: Final = re.compile(
    r".*/(\.cache/(pip|uv|pypoetry|yarn|pre-commit|mypy|ruff|matplotlib|fontconfig|go-build|bazel|wandb/logs)"
    r"|\.local/share/uv/python|\.npm/_cacache|\.cargo/registry|\.nv/ComputeCache|\.triton/cache"
    r"|\.conda/pkgs|(?:mini|mamba|micromamba|ana)?(?:conda|forge)\d?/pkgs)"
    r"|/var/cache|/var/lib/apt"
)
"""Directories that pip, uv, apt and other programs can fill again."""
_OWN_NOISE: Final = frozenset(
    [
        ".bash_history",
        ".python_history",
        ".zsh_history",
        ".viminfo",
        ".lesshst",
        ".wget-hsts",
        ".selected_editor",
        ".sudo_as_admin_successful",
        ".Xauthority",
        "authorized_keys",
        "known_hosts",
        "known_hosts.old",
        "motd.legal-displayed",
    ]
)
"""Files that a login writes into a home."""
_SETTINGS_NOISE: Final = re.compile(
    r"/etc/(ld\.so\.cache|mtab|resolv\.conf|hostname|hosts|machine-id|adjtime|\.pwd\.lock|\.updated"
    r"|(passwd|group|shadow|gshadow|subuid|subgid)-?|ssl/certs/.*|ca-certificates\.conf|.*\.dpkg-\w+"
    r"|alternatives/.*|ssh/ssh_host_.*|udev/hwdb\.bin|netplan/.*cloud-init.*|cloud/.*|apparmor.*"
    r"|rc\d\.d/.*|\.git/.*|\.etckeeper|python3/debian_config)"
)
_LEAST_SYSTEM_BYTES: Final = 64 << 10
"""Fewer bytes than this in /usr or /var are what a package's own programs write."""
_MADE_AGAIN: Final = frozenset(
    [
        "node_modules",
        "nltk_data",
        "scikit_learn_data",
        "seaborn-data",
        "snap",
        "tensorflow_datasets",
    ]
)
"""Directories in a home that npm, NLTK, scikit-learn and others fill by themselves."""
_ENVIRONMENTS: Final = frozenset(["pyvenv.cfg", "conda-meta"])
"""A directory that holds one of these names is an environment of Python or conda."""


class Where(msgspec.Struct, frozen=True):
    """``top``: the directory that is the whole machine. ``since_ns``: what is older came with the
    machine; ``disks_since_ns``: the same for disks other than the root's, outside of the system.
    ``skipped``: absolute paths that are not looked at. ``recorded``: where the packages of pip are
    that the environment record names. ``volumes``: where disks are mounted that outlive the
    machine. ``home``: of the user that the agent runs as. ``made_again``: directories that are not
    what a user has written. ``kept_apt``, ``kept_pip``: packages that the snapshot names for a wake
    to put back."""

    top: str
    since_ns: int
    disks_since_ns: int
    skipped: list[str]
    recorded: list[str]
    volumes: list[str] = []
    home: str = ""
    made_again: list[str] = []
    kept_apt: list[str] = []
    kept_pip: list[str] = []


class Found(msgspec.Struct):
    """The result of a look, with the fields of ``torpor.shared.wire.losses.Losses``."""

    complete: bool
    total: LeftBehind
    folders: list[LeftBehind]
    caches: list[LeftBehind]
    settings: list[str]
    setting_count: int
    packages: list[str]
    package_count: int
    unseen: list[str]
    user_files: list[LeftBehind]
    user_total: LeftBehind
    user_unseen: list[str]
    user_mark: str = ""
    kept: list[str] = []
    kept_count: int = 0


class UserNames(msgspec.Struct, frozen=True):
    """What counts as a user's own in the homes. ``names``: the absolute paths of the user's own
    files and links in the home of the agent's user; ``bytes``: how much these take; ``elsewhere``:
    names in other homes; ``unseen``: why there may be more."""

    names: list[str]
    bytes: int
    elsewhere: list[str]
    unseen: list[str]


class _Stopped(Exception):
    """Raised when the time of the look is over."""


class Look:
    """One look at one machine. ``prefix`` comes before every path of the machine."""

    def __init__(
        self, where: Where, mounts: Mounts, stop: Callable[[], bool], prefix: str = ""
    ) -> None:
        self._where = where
        self._mounts = mounts
        self._stop = stop
        self._prefix = prefix
        self._skipped = set(where.skipped)
        self._inodes: dict[int, set[int]] = {}
        for path in where.skipped:
            try:
                facts = os.stat(prefix + path)
            except OSError:
                continue
            self._inodes.setdefault(facts.st_ino, set()).add(facts.st_dev)
        self._owned = Owned(prefix, where.since_ns)
        self._homes = {where.top} if where.top != "/" else self._homes_of_users()
        self._user_files: dict[str, tuple[int, int, int]] = {}  # files, bytes, newest
        self._user_unseen = [HOMES_CUT]
        self._user_mark = 0
        self._most_gathered = 0
        self._gathered: list[str] = []
        self._gathered_bytes = 0
        self._later: list[str] = []  # directories of homes that hold nothing of the user's own
        disks = mounts.disks() if where.top == "/" else [where.top]
        self._other_disks = disks[1:]
        self._folders = Groups({*self._homes, *disks})
        self._caches: list[LeftBehind] = []
        self._settings: list[str] = []
        self._unsure: list[tuple[str, str, int, int]] = []  # directory, name, size, changed
        self._unseen = [
            f"{mount.path} ({mount.kind}: it does not end with this machine)"
            for mount in mounts.remote()
        ]
        self._links: set[tuple[int, int]] = set()
        self._since_ns = where.since_ns  # of the place that is walked now

    def run(self) -> Found:
        """Look until everything is seen, or ``stop`` is set."""
        complete = True
        try:
            self._look_at_homes()
            for path in self._later:
                self._since_ns = self._since_of(path)
                self._walk(path)
            for place, since_ns in self._places():
                self._since_ns = since_ns
                if not is_under(place, self._where.skipped) and place not in self._homes:
                    self._walk(place)
        except _Stopped:
            complete = False
        self._sort_unsure()
        packages, kept = self._packages() if self._where.top == "/" else ([], [])
        if self._where.top == "/":
            self._settings += self._users()
        found = self._found(complete, packages)
        found.kept, found.kept_count = [*map(shown, kept[:SENT])], len(kept)
        return found

    def homes(self) -> Found:
        """Look at the homes alone."""
        with suppress(_Stopped):
            self._look_at_homes()
        return self._found(False, [])

    def user_names(self, most: int) -> UserNames:
        """Look at the homes alone, for what counts as a user's own there, and for the links and the
        empty files beside it. Stops after ``most`` names."""
        self._most_gathered = most
        with suppress(_Stopped):
            self._look_at_homes()
        elsewhere = [path for path in self._user_files if not is_under(path, [self._where.home])]
        return UserNames(self._gathered, self._gathered_bytes, elsewhere, self._user_unseen)

    def _found(self, complete: bool, packages: Sequence[str]) -> Found:
        user_files = [
            LeftBehind(shown(path), files, size, newest / 1e9)
            for path, (files, size, newest) in self._user_files.items()
        ]
        return Found(
            complete,
            self._folders.total,
            self._folders.largest(SENT),
            sorted(self._caches, key=lambda folder: -folder.bytes)[:SENT],
            sorted(map(shown, self._settings))[:SENT],
            len(self._settings),
            [*map(shown, packages[:SENT])],
            len(packages),
            [*map(shown, self._unseen[:SENT])],
            sorted(user_files, key=lambda name: -name.bytes)[:SENT],
            LeftBehind(
                "/",
                sum(name.files for name in user_files),
                sum(name.bytes for name in user_files),
                max((name.newest_unix for name in user_files), default=0.0),
            ),
            [*map(shown, self._user_unseen[:SENT])],
            self._mark(),
        )

    def _mark(self) -> str:
        """A hash of what is known of a user's own files in the homes: their names, and what could
        not be looked at. It does not depend on how far an interrupted look came."""
        is_cut = HOMES_CUT in self._user_unseen
        mark = 0 if is_cut else self._user_mark
        for why in [HOMES_CUT] if is_cut else {*self._user_unseen}:
            mark ^= _number(b"\0" + os.fsencode(why))  # no path has a zero byte
        return f"{mark:032x}"

    # -- the homes

    def _look_at_homes(self) -> None:
        """Look at the users' homes before all else, and in them at a user's own files. Hidden names
        of the home, which hold settings and caches, and environments are left out."""
        for home in sorted(self._homes):
            self._since_ns = self._since_of(home)
            if is_under(home, self._where.skipped) or not self._mounts.is_disk(home):
                continue
            pending = [home]
            while pending:
                path = pending.pop()
                if self._stop():
                    raise _Stopped
                pending += self._directory(path, False, home)
        self._user_unseen = self._user_unseen[1:]

    def _since_of(self, path: str) -> int:
        on_other = is_under(path, self._other_disks)
        return self._where.disks_since_ns if on_other else self._where.since_ns

    def _count_user_file(self, home: str, path: str, name: str, size: int, newest_ns: int) -> None:
        """Count a file under the name in its home that it is or lies in."""
        below = path[len(home) + 1 :].partition("/")[0]
        place = f"{home}/{below or name}"
        files, before, newest = self._user_files.get(place, (0, 0, 0))
        self._user_files[place] = files + 1, before + size, max(newest, newest_ns)
        self._user_mark ^= _number(os.fsencode(f"{path}/{name}"))

    # -- the walk

    def _places(self) -> Iterator[tuple[str, int]]:
        """The directories to look at, users' files first, each with the time from which files
        count."""
        since_ns = self._where.since_ns
        if self._where.top != "/":
            yield self._where.top, since_ns
            return
        for disk in self._other_disks:
            if self._is_directory(disk):
                system = disk.split("/")[1] in (*_LAST, "etc")
                yield disk, since_ns if system else self._where.disks_since_ns
        self._since_ns = since_ns
        below = self._directory("/", False)
        last = {f"/{name}" for name in _LAST}
        first = sorted(set(below) - last, key=lambda path: (path == "/var", path))
        for place in (*first, "/usr/local", *sorted(last & set(below))):
            yield place, since_ns

    def _is_directory(self, path: str) -> bool:
        try:
            return stat.S_ISDIR(os.stat(self._prefix + path).st_mode)
        except GONE:
            return False
        except OSError as error:
            self._unseen.append(f"{path}: {error.strerror}")
            return False

    def _homes_of_users(self) -> set[str]:
        homes = {"/root", self._where.home} - {"", "/"}
        try:
            with os.scandir(f"{self._prefix}/home") as names:
                return homes | {f"/home/{one.name}" for one in names if not one.is_symlink()}
        except OSError:
            return homes

    def _walk(self, top: str) -> None:
        system = top.lstrip("/").partition("/")[0] in _LAST and top != "/usr/local"
        pending = [top]
        while pending:
            path = pending.pop()
            if self._stop():
                raise _Stopped
            pending += self._directory(path, system)

    def _directory(self, path: str, system: bool, in_home: str = "") -> list[str]:
        """Look at the files of one directory; returns the directories in it. ``in_home``: the home
        that contains it, if the user's own files are counted there; directories that hold none of
        those come later."""
        since_ns, full = self._since_ns, self._prefix + path
        below: list[str] = []
        count = changed = size = newest = 0
        start = path if path.endswith("/") else f"{path}/"
        mounted = path in self._mounts.parents
        home = path in self._homes or path.endswith(("/.ssh", "/.cache"))
        mine: list[tuple[str, int, int]] = []  # the user's own files among them
        named: list[tuple[str, int]] = []  # and the files that are grouped
        gathers = bool(self._most_gathered) and in_home == self._where.home
        made_again = False
        try:
            as_it_was = system and os.stat(full).st_ctime_ns < since_ns
            with os.scandir(full) as names:
                for entry in names:
                    name = entry.name
                    if mounted and start + name in self._mounts:
                        continue
                    made_again = made_again or name in _ENVIRONMENTS
                    if entry.is_dir(follow_symlinks=False):
                        with suppress(*GONE):
                            if self._goes_into(entry, start + name):
                                below.append(start + name)
                        continue
                    if as_it_was or (home and name in _OWN_NOISE):
                        continue
                    count += 1
                    if count % _CHECK_FILES == 0 and self._stop():
                        raise _Stopped
                    try:
                        facts = entry.stat(follow_symlinks=False)
                    except GONE:
                        continue
                    if facts.st_ctime_ns < since_ns:
                        continue
                    is_users = in_home and not (path == in_home and name.startswith("."))
                    is_file = stat.S_ISREG(facts.st_mode)
                    if is_users and gathers and (is_file or stat.S_ISLNK(facts.st_mode)):
                        again = (facts.st_dev, facts.st_ino) in self._links
                        named.append((start + name, 0 if again else taken_bytes(facts)))
                    if not is_file:
                        continue
                    if facts.st_nlink > 1:
                        if (facts.st_dev, facts.st_ino) in self._links:
                            continue
                        self._links.add((facts.st_dev, facts.st_ino))
                    if start + name in self._skipped:
                        continue
                    taken = taken_bytes(facts)
                    if self._is_apart(path, start + name, system, taken, facts.st_ctime_ns):
                        continue
                    if is_users and facts.st_size:
                        mine.append((name, taken, facts.st_ctime_ns))
                    changed += 1
                    size += taken
                    newest = max(newest, facts.st_ctime_ns)
        except GONE:
            pass
        except OSError as error:
            for_root_alone = isinstance(error, PermissionError)  # no ordinary user's data is there
            if not (for_root_alone and (system or path.startswith("/var/"))):
                self._unseen.append(f"{path}: {error.strerror}")
            if in_home and not (for_root_alone and (path == in_home or self._is_older(path))):
                self._user_unseen.append(f"{path}: {error.strerror}")
        if changed:
            self._folders.add(path, changed, size, newest)
        if not in_home:
            return below
        if made_again:
            self._later += below
            return []
        for name, taken, at_ns in mine:
            self._count_user_file(in_home, path, name, taken, at_ns)
        for name, taken in named:
            if name not in self._skipped:
                self._gathered.append(name)
                self._gathered_bytes += taken
        if gathers and len(self._gathered) > self._most_gathered:
            raise _Stopped
        later = [one for one in below if self._is_made_again(in_home, one)]
        self._later += later
        return [one for one in below if one not in later]

    def _is_made_again(self, home: str, path: str) -> bool:
        name = os.path.basename(path)
        hidden = name.startswith(".") and os.path.dirname(path) == home
        return hidden or name in _MADE_AGAIN or path in self._where.made_again

    def _is_older(self, path: str) -> bool:
        """Whether a directory that only root can read came with the machine."""
        try:
            return os.stat(self._prefix + path).st_ctime_ns < self._since_ns
        except OSError:
            return False

    def _goes_into(self, entry: os.DirEntry[str], path: str) -> bool:
        """Whether to look into a directory of a directory that is looked at."""
        name = entry.name
        if name == "__pycache__" or path in self._skipped or path in _NEVER or path == "/usr/local":
            return False
        if path in self._homes:  # homes were looked at before
            return False
        if name.endswith(RECORDS) and entry.stat(follow_symlinks=False).st_ctime_ns >= (
            self._since_ns
        ):
            place = os.path.dirname(path)
            self._owned.learn(place, name, whole=place.startswith("/usr/"))
        if entry.inode() in self._inodes:  # the directory may be here by another mount
            return entry.stat(follow_symlinks=False).st_dev not in self._inodes[entry.inode()]
        if CACHES.fullmatch(path):
            self._add_cache(path)
            return False
        return not (path.startswith("/var/") and _SERVICES.fullmatch(path))

    def _is_apart(self, path: str, full: str, system: bool, size: int, changed_ns: int) -> bool:
        """Whether a changed file is no user's file, or counts only once the packages are known."""
        if self._where.top != "/":
            return False
        if path.startswith("/etc") and (path == "/etc" or path[4] == "/"):
            if not _SETTINGS_NOISE.fullmatch(full) and not self._owned.is_unchanged(full):
                self._settings.append(full)
            return True
        if path.startswith("/var/spool/cron"):
            self._settings.append(full)
            return True
        if system or path.startswith(("/usr/", "/var/")):
            self._unsure.append((path, full, size, changed_ns))
            return True
        return self._owned.owns(full, size)

    def _sort_unsure(self) -> None:
        """Count files of the system that no package owns, once every record of pip is known."""
        found = Groups(set())
        for path, full, size, changed_ns in self._unsure:
            if not self._owned.owns(full, size) and not full.endswith((".cache", ".pyc")):
                found.add(path, 1, size, changed_ns)
        for directory in found.directories():
            if (
                directory.path.startswith("/usr/local")
                or found.size_near(directory.path) >= _LEAST_SYSTEM_BYTES
            ):
                self._folders.add(
                    directory.path,
                    directory.files,
                    directory.bytes,
                    int(directory.newest_unix * 1e9),
                )

    def _add_cache(self, top: str) -> None:
        """Add the size of a directory that a program can fill again, as long as there is time."""
        files = size = newest = 0
        pending, stopped = [top], False
        while pending:
            if stopped := self._stop():
                break
            path = pending.pop()
            try:
                with os.scandir(self._prefix + path) as names:
                    for entry in names:
                        if entry.is_dir(follow_symlinks=False):
                            pending.append(f"{path}/{entry.name}")
                            continue
                        facts = entry.stat(follow_symlinks=False)
                        if facts.st_ctime_ns >= self._since_ns:
                            files += 1
                            size += taken_bytes(facts)
                            newest = max(newest, facts.st_ctime_ns)
            except OSError:
                continue
        if files:
            self._caches.append(LeftBehind(shown(top), files, size, newest / 1e9))
        if stopped:
            raise _Stopped

    # -- the system

    def _packages(self) -> tuple[list[str], list[str]]:
        """Packages that were added or upgraded: by name as in the environment record, or by place.
        Second, those that a wake can put back."""
        recorded = set(self._where.recorded)
        kept_apt, kept_pip = set(self._where.kept_apt), set(self._where.kept_pip)
        found: list[str] = []
        kept: list[str] = []
        for name in self._owned.apt:
            back = name.partition(" ")[0] in kept_apt
            (kept if back else found).append(f"{name} (apt)")
        others: dict[str, list[str]] = {}
        for place, name in sorted(self._owned.pip):
            if place in recorded:
                back = normalized(name.partition(" ")[0]) in kept_pip
                (kept if back else found).append(f"{name} (pip)")
            else:
                others.setdefault(place, []).append(name)
        for place, names in others.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            found.append(f"{names[0]}{more} (pip in {place}, in no record)")
        return found, kept

    def _users(self) -> list[str]:
        """Users that were added: nothing in the home of such a user is older than the machine."""
        try:
            with open(f"{self._prefix}/etc/passwd", errors="backslashreplace") as file:
                if os.fstat(file.fileno()).st_ctime_ns < self._where.since_ns:
                    return []
                lines = file.read(1 << 20).splitlines()
        except GONE:
            return []
        except OSError as error:
            self._unseen.append(f"/etc/passwd: {error.strerror}")
            return []
        found = []
        for fields in (line.split(":") for line in lines):
            person = len(fields) == 7 and fields[2].isdigit() and 1000 <= int(fields[2]) < 60_000
            if person and self._is_new(fields[5]):
                found.append(f"user {fields[0]}")
        return found

    def _is_new(self, home: str) -> bool:
        try:
            with os.scandir(self._prefix + home) as names:
                changes = [entry.stat(follow_symlinks=False).st_ctime_ns for entry in names]
        except OSError:
            return True
        return all(at >= self._where.since_ns for at in changes)


def taken_bytes(facts: os.stat_result) -> int:
    """The bytes of a file, without the holes of a large one."""
    if facts.st_size < 1 << 20:
        return facts.st_size
    return min(facts.st_size, facts.st_blocks * 512)


def _number(text: bytes) -> int:
    return int.from_bytes(blake2b(text, digest_size=16).digest(), "big")


def shown(path: str) -> str:
    return os.fsencode(path).decode(errors="backslashreplace")


def main() -> int:
    """Look as stdin asks, and print the result."""
    ends_s = time.monotonic() + MOST_S
    stopped = [False]

    def stop(*_: object) -> None:
        stopped[0] = True

    signal.signal(signal.SIGTERM, stop)
    os.nice(max(0, _NICE - os.nice(0)))
    where = msgspec.convert(json.load(sys.stdin), learned(Where))  # names may be any bytes
    mounts = Mounts.of_this_machine(where.volumes)
    look = Look(where, mounts, lambda: stopped[0] or time.monotonic() > ends_s)
    sys.stdout.buffer.write(msgspec.json.encode(look.run()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
