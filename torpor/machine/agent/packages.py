"""Packages of apt and pip outside of the workspace: which were added to this machine, and how those
that a snapshot names come back.

Names and versions come from a snapshot, which another machine wrote: each is checked, and given to
apt-get and pip as an argument of its own. No shell runs.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from torpor.machine.agent.environment import package_places
from torpor.machine.agent.losses import machine_began_ns
from torpor.machine.tree.owned import RECORDS, Owned, installed_by_apt
from torpor.shared.format.packages import Packages, normalized
from torpor.shared.values import learned
from torpor.shared.wire.activity import MACHINE_VARIABLE
from torpor.shared.wire.packages import NotBack, PackagesBack

INSTALL_S: Final = 600.0
"""How long apt-get and pip may take together; apt-get may take two thirds of it."""
_LOOK_S: Final = 30.0
_POLL_S: Final = 0.1
_TAIL_BYTES: Final = 4096
_SHOWN: Final = 100
"""The most names in an answer."""
_RECORD: Final = "packages.json"
_OWN: Final = "torpor installs nothing on a machine of your own"
_SHARED: Final = "this machine is a folder of its host, and torpor installs nothing there"
_LATE: Final = f"the {INSTALL_S:.0f} s that torpor takes for packages were over"


class System(NamedTuple):
    """A machine's packages. ``prefix``: below which its files lie. ``python``: its own Python, and
    the ``places`` of that one's packages. ``since_ns``: what is older came with the image; 0 where
    that is not known. ``why_not``: why nothing is installed here; empty where it may be."""

    prefix: str
    python: str
    places: Sequence[str]
    since_ns: int
    why_not: str = ""

    def apt(self) -> dict[str, str]:
        """The packages of apt that are installed, with their versions."""
        return installed_by_apt(self.prefix)

    def pip(self) -> dict[str, str]:
        """The packages of its Python, with their versions, whoever installed them."""
        found: dict[str, str] = {}
        for package in importlib.metadata.distributions(path=list(self.places)):
            named = getattr(package, "name", None)
            if named:
                found.setdefault(normalized(named), package.version)
        return found

    def added(self) -> Packages:
        """What was added since the machine began."""
        if not self.since_ns:
            return Packages()
        owned = Owned(self.prefix, self.since_ns)
        pip: dict[str, str] = {}
        files: dict[str, str] = {}
        for place, entry in self._new_records():
            before = len(owned.pip)
            owned.learn(place, entry.name, whole=False)
            if len(owned.pip) > before:
                name, _, version = next(reversed(owned.pip))[1].partition(" ")
                by_file = os.path.lexists(f"{entry.path}/direct_url.json")
                (files if by_file else pip)[normalized(name)] = version
        there, asked = self.apt(), (words.partition(" ")[0] for words in owned.apt)
        return Packages({n: there[n] for n in asked if n in there}, pip, files).checked()

    def _new_records(self) -> Iterable[tuple[str, os.DirEntry[str]]]:
        for place in self.places:
            with suppress(OSError), os.scandir(place) as names:
                for entry in names:
                    if entry.name.endswith(RECORDS) and _changed_ns(entry) >= self.since_ns:
                        yield place, entry


class _Kept(msgspec.Struct, frozen=True):
    """What the snapshot that was woken here ``wanted``, and what of that is ``missing`` since: a
    later snapshot names it, too."""

    wanted: Packages = Packages()
    missing: Packages = Packages()


def this_system(home: Path, *, rented: bool = True) -> System:
    """This machine."""
    why_not = "" if rented else _OWN
    if MACHINE_VARIABLE in os.environ:
        return System("", sys.executable, [], 0, _SHARED)
    return System("", sys.executable, package_places(), machine_began_ns(home), why_not)


def packages_to_record(home: Path, system: System) -> Packages:
    """What a snapshot of this machine names: what was added here, and what an earlier machine had,
    unless somebody has removed it here."""
    added, kept = system.added(), _kept(home)
    if kept == _Kept():
        return added
    pip = system.pip()
    return Packages(
        _with_wanted(added.apt, kept.wanted.apt, kept.missing.apt, system.apt()),
        _with_wanted(added.pip, kept.wanted.pip, kept.missing.pip, pip),
        _with_wanted(added.files, kept.wanted.files, kept.missing.files, pip),
    ).checked()


def note_wanted(home: Path, system: System, wanted: Packages) -> None:
    """Remember what a snapshot names, and what of it this machine lacks: a wake that is killed
    before all is back loses no name."""
    apt, pip = system.apt(), system.pip()
    missing = Packages(
        {n: v for n, v in wanted.apt.items() if n not in apt},
        {n: v for n, v in wanted.pip.items() if pip.get(n) != v},
        {n: v for n, v in wanted.files.items() if pip.get(n) != v},
    )
    unfinished = home / f"{_RECORD}.new"
    unfinished.write_bytes(msgspec.json.encode(_Kept(wanted, missing)))
    unfinished.rename(home / _RECORD)


def put_back(
    system: System, wanted: Packages, check: Callable[[], None], within_s: float = INSTALL_S
) -> PackagesBack:
    """Install what this machine lacks. ``check`` may raise, which ends the program that runs."""
    began_s = time.monotonic()
    apt = _Apt(system, wanted.apt, began_s + within_s * 2 / 3, check).put_back()
    pip = _Pip(system, wanted, began_s + within_s, check).put_back()
    back, other = apt.back + pip.back, apt.other + pip.other
    return PackagesBack(
        back[:_SHOWN], len(back), other[:_SHOWN], len(other), [*apt.not_back(), *pip.not_back()]
    )


class _Outcome(NamedTuple):
    """``missing``: why each is."""

    kind: str
    back: list[str]
    other: list[str]
    missing: dict[str, str]

    def not_back(self) -> list[NotBack]:
        """Those that are missing for one reason together."""
        found: dict[str, list[str]] = {}
        for name, why in self.missing.items():
            found.setdefault(why, []).append(name)
        whole = list(found.items())[: _SHOWN // 2]
        return [NotBack(self.kind, why, names[:_SHOWN], len(names)) for why, names in whole]


class _Ran(NamedTuple):
    status: int
    tail: str

    def why(self, word: str) -> str:
        """The last line that begins with ``word``, or else the last one."""
        lines = [" ".join(line.split()) for line in self.tail.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith(word)] or lines
        return errors[-1][:300] if errors else f"it ended with status {self.status}"

    def says(self, *words: str) -> bool:
        return any(word in self.tail.lower() for word in words)


class _Installer:
    """What apt's and pip's have in common. ``ends_s``: by the monotonic clock."""

    kind = ""
    error = ""
    """How a line that says why begins."""
    for_all: tuple[str, ...] = ()
    """Words of a fault that no other choice of packages mends."""

    def __init__(
        self,
        system: System,
        wanted: dict[str, str],
        ends_s: float,
        check: Callable[[], None],
    ) -> None:
        self._system = system
        self._wanted = wanted
        self._ends_s = ends_s
        self._check = check
        self._why: dict[str, str] = {}

    def there(self) -> dict[str, str]:
        """What is installed now."""
        raise NotImplementedError

    def lacking(self) -> list[str]:
        raise NotImplementedError

    def install(self, names: Sequence[str]) -> _Ran:
        raise NotImplementedError

    def prepare(self, names: Sequence[str]) -> str:
        """Why nothing can be installed; empty where it can be."""
        raise NotImplementedError

    def put_back(self) -> _Outcome:
        lacked = self.lacking()
        if lacked:
            why_not = self._system.why_not or self.prepare(lacked)
            if why_not:
                self._why.update(dict.fromkeys(lacked, why_not))
            self._install([name for name in lacked if name not in self._why])
        there = self.there()
        back = [f"{n} {v} ({self.kind})" for n in lacked if (v := self._wanted[n]) == there.get(n)]
        other = [
            f"{n} {there[n]} instead of {v} ({self.kind}){self._because(n)}"
            for n, v in self._wanted.items()
            if n in there and there[n] != v
        ]
        gone = [n for n in lacked if n not in there]
        return _Outcome(self.kind, back, other, {n: self._why.get(n, _LATE) for n in gone})

    def _because(self, name: str) -> str:
        why = self._why.get(name)
        return f": {why}" if why else ""

    def _install(self, names: Sequence[str]) -> None:
        """All at once, or else one after another, so that one that fails keeps no other away."""
        if not names:
            return
        ran = self.install(names)
        if ran.status == 0 or ran.says(*self.for_all):
            words = ran.why(self.error) if ran.status else ""
            self._why.update(dict.fromkeys(names, words))
            return
        lacked = {*self.lacking()}
        for name in [name for name in names if name in lacked]:
            if time.monotonic() >= self._ends_s:
                return
            ran = self.install([name])
            if ran.status:
                self._why[name] = ran.why(self.error)

    def run(self, argv: Sequence[str]) -> _Ran:
        """Run a program until the time is over, and return the end of what it printed."""
        with tempfile.TemporaryFile() as output:
            try:
                process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd="/",  # Python looks for modules in the folder that it starts in
                    env=_variables(),
                    start_new_session=True,
                )
            except OSError as error:
                return _Ran(127, f"{argv[0]}: {error.strerror}")
            try:
                late = self._wait(process)
            finally:
                _end(process)
            size = output.seek(0, os.SEEK_END)
            output.seek(max(0, size - _TAIL_BYTES))
            tail = output.read().decode(errors="replace")
        return _Ran(124, f"{tail}\n{self.error}{_LATE}") if late else _Ran(process.wait(), tail)

    def _wait(self, process: subprocess.Popen[bytes]) -> bool:
        """Whether it had not ended when the time was over."""
        while process.poll() is None:
            self._check()
            if time.monotonic() >= self._ends_s:
                return True
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)
        return False


class _Apt(_Installer):
    kind = "apt"
    error = "E: "
    for_all = ("could not get lock", "unable to acquire", "dpkg was interrupted", _LATE.lower())

    def __init__(
        self,
        system: System,
        wanted: dict[str, str],
        ends_s: float,
        check: Callable[[], None],
    ) -> None:
        super().__init__(system, wanted, ends_s, check)
        self._asked: dict[str, str] = {}

    def there(self) -> dict[str, str]:
        return self._system.apt()

    def lacking(self) -> list[str]:
        there = self.there()
        return [name for name in self._wanted if name not in there]

    def prepare(self, names: Sequence[str]) -> str:
        if shutil.which("apt-get") is None:
            return "this machine has no apt-get"
        if not _is_root() and self.run(["sudo", "-n", "true"]).status:
            return "its user is not root and may not use sudo without a password"
        updated = self.run([*self._apt_get(), "update"])
        offered = self._offered(names)
        more = f", and apt-get update says: {updated.why(self.error)}" if updated.status else ""
        for name in names:
            versions = offered.get(name, set())
            if not versions:
                self._why[name] = f"no package source of this machine has it{more}"
            exact = self._wanted[name] in versions
            self._asked[name] = f"{name}={self._wanted[name]}" if exact else name
        return ""

    def install(self, names: Sequence[str]) -> _Ran:
        argv = [*self._apt_get(), "install", "-y", "--no-remove"]
        argv += ["-o", "Dpkg::Options::=--force-confdef", "-o", "Dpkg::Options::=--force-confold"]
        return self.run([*argv, "--", *(self._asked[name] for name in names)])

    def _offered(self, names: Sequence[str]) -> dict[str, set[str]]:
        """The versions that the sources have of each. apt-get takes a name that it does not know
        for an expression, and would install what matches it."""
        found: dict[str, set[str]] = {}
        with tempfile.TemporaryFile() as output:
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(
                    ["apt-cache", "madison", "--", *names],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.DEVNULL,
                    env=_variables(),
                    timeout=_LOOK_S,
                    check=False,
                )
            output.seek(0)
            for line in output:
                fields = [field.strip() for field in line.decode(errors="replace").split("|")]
                if len(fields) > 1:
                    found.setdefault(fields[0], set()).add(fields[1])
        return found

    def _apt_get(self) -> list[str]:
        """``timeout`` also ends an apt-get of root's, which its user may not."""
        sudo = [] if _is_root() else ["sudo", "-n"]
        left_s = max(1, int(self._ends_s - time.monotonic()))
        argv = [*sudo, "env", "DEBIAN_FRONTEND=noninteractive", "timeout", "-k", "10", str(left_s)]
        return [*argv, "apt-get", "-o", "Acquire::Retries=3", "-o", "DPkg::Lock::Timeout=60"]


class _Pip(_Installer):
    kind = "pip"
    error = "ERROR: "
    for_all = ("connection", "name resolution", "timed out", "no space left", _LATE.lower())

    def __init__(
        self, system: System, wanted: Packages, ends_s: float, check: Callable[[], None]
    ) -> None:
        super().__init__(system, {**wanted.files, **wanted.pip}, ends_s, check)
        self._files = wanted.files.keys() - wanted.pip.keys()

    def there(self) -> dict[str, str]:
        return self._system.pip()

    def lacking(self) -> list[str]:
        there = self.there()
        return [name for name, version in self._wanted.items() if there.get(name) != version]

    def prepare(self, names: Sequence[str]) -> str:
        by_file = [name for name in names if name in self._files]
        why = "pip had it from a file, a folder or an address, which no index has to have"
        self._why.update(dict.fromkeys(by_file, why))
        if len(by_file) == len(names) or self.run([*self._argv(), "--version"]).status == 0:
            return ""
        return f"the machine's Python, {self._system.python}, has no pip"

    def install(self, names: Sequence[str]) -> _Ran:
        argv = [*self._argv(), "install", "--no-input", "--disable-pip-version-check"]
        argv += ["--retries", "1", "--progress-bar", "off"]
        if self._is_managed():
            argv.append("--break-system-packages")
        return self.run([*argv, "--", *(f"{name}=={self._wanted[name]}" for name in names)])

    def _argv(self) -> list[str]:
        return [self._system.python, "-E", "-m", "pip"]

    def _is_managed(self) -> bool:
        """Whether its Python is the system's by PEP 668, whose pip wants to be told."""
        code = "import sysconfig; print(sysconfig.get_path('stdlib'))"
        ran = self.run([self._system.python, "-I", "-c", code])
        return Path(ran.tail.strip(), "EXTERNALLY-MANAGED").exists() and _in_no_venv(self._system)


def _in_no_venv(system: System) -> bool:
    return not Path(system.python).parent.with_name("pyvenv.cfg").exists()


def _with_wanted(
    added: dict[str, str],
    wanted: dict[str, str],
    missing: dict[str, str],
    there: dict[str, str],
) -> dict[str, str]:
    found = {
        n: v if n in missing else there[n] for n, v in wanted.items() if n in there or n in missing
    }
    return {**found, **added}


def _kept(home: Path) -> _Kept:
    try:
        return msgspec.json.decode((home / _RECORD).read_bytes(), type=learned(_Kept))
    except (OSError, msgspec.DecodeError):
        return _Kept()


def _changed_ns(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_ctime_ns
    except OSError:
        return 0


def _is_root() -> bool:
    return os.geteuid() == 0


def _variables() -> dict[str, str]:
    """The agent's, without those that break what is not the image's own program."""
    kept = {n: v for n, v in os.environ.items() if n not in ("LD_LIBRARY_PATH", "LD_PRELOAD")}
    return {**kept, "LC_ALL": "C"}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it with its children. One of root's ends by its own limit."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(10.0)
