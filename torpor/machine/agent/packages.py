"""Packages of apt and pip outside of the workspace: which were added to this machine, and how those
that a snapshot names come back.

Names and versions come from a snapshot, which another machine wrote: each is checked, and given to
apt-get and pip as an argument of its own. No shell runs.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Final, NamedTuple, TypeVar

import msgspec

from torpor.machine.agent.environment import package_places, packages_of_python
from torpor.machine.agent.goal import SPARE_BYTES
from torpor.machine.tree.owned import installed_by_apt, only_needed
from torpor.shared.format.packages import Packages, normalized
from torpor.shared.values import MIB, learned
from torpor.shared.wire.activity import MACHINE_VARIABLE
from torpor.shared.wire.packages import INSTALL_S, SETTLE_S, NotBack, PackagesBack

R = TypeVar("R")

_LOOK_S: Final = 30.0
_POLL_S: Final = 0.1
_LOCK_S: Final = 0.5
_LATE: Final = 124
_REFUSED: Final = 125
_FAILED: Final = ("W: Failed to fetch", "E: Failed to fetch")
_TAIL_BYTES: Final = 1 << 20
_SHOWN: Final = 100
"""The most names in an answer."""
_MOST_REASONS: Final = 20
_RECORD: Final = "packages.json"
_IMAGE: Final = "image-packages.json"
_OWN: Final = "torpor installs nothing on a machine of your own"
_SHARED: Final = "this machine is a folder of its host, and torpor installs nothing there"
_OF_THE_IMAGE: Final = "belongs to the image of a machine, and torpor never installs it"
_NEVER: Final = re.compile(
    r"linux-(image|modules|headers|objects|signed|firmware|generic|virtual|lowlatency|kvm|hwe|oem"
    r"|aws|azure|gcp|gke|oracle|ibm|cloud)(-.*)?"
    r"|.*-dkms|dkms|initramfs-tools.*|dracut.*|grub.*|shim-.*|systemd-(boot|resolved).*"
    r"|(lib)?nvidia-.*|cuda-drivers.*|xserver-xorg-video-nvidia.*|amdgpu.*|rocm-dkms"
    r"|.*guest-agent.*|google-(guest|osconfig|compute-engine|startup|cloud-ops).*|gce-.*"
    r"|walinuxagent|cloud-init.*|ec2-(instance-connect|hibinit-agent|net-utils)"
    r"|amazon-(ssm-agent|cloudwatch-agent|ec2-.*)|open-vm-tools.*"
    r"|openssh-server|dropbear.*|ufw|firewalld|netplan.*|network-manager.*"
    r"|ifupdown.*|isc-dhcp-.*|dhcpcd.*|resolvconf|openresolv|wpasupplicant"
)
"""Kernels, drivers, what a machine boots by, and what its cloud, SSH and network need: those of one
market can cut the machine of another off."""
_NEVER_CHANGED: Final = re.compile(r"linux-.*|systemd.*|udev|dbus.*|iptables.*|nftables")
"""What a machine may run by: added where it lacks it, as a container's image lacks the headers of
the kernel that each compiler needs."""


class System(NamedTuple):
    """A machine's packages. ``prefix``: below which its files lie. ``python``: its own Python, and
    the ``places`` of that one's packages. ``image``: what was there when the agent first started;
    None where that is not known. ``why_not``: why nothing is installed here; empty where it may
    be."""

    prefix: str
    python: str
    places: Sequence[str]
    image: Packages | None
    why_not: str = ""

    def apt(self) -> dict[str, str]:
        """The packages of apt that are installed, with their versions."""
        return installed_by_apt(self.prefix)

    def pip(self) -> dict[str, str]:
        """The packages of its Python, with their versions, whoever installed them."""
        return {normalized(one.name): one.version for one in packages_of_python(self.places)}

    def added(self) -> Packages:
        """What pip was asked for or has brought, and what apt was asked for, by names that were not
        there when the agent first started: not what was upgraded."""
        if self.image is None:
            return Packages()
        pip: dict[str, str] = {}
        files: dict[str, str] = {}
        for one in packages_of_python(self.places):
            if one.installer in ("pip", "uv") and normalized(one.name) not in self.image.pip:
                by_file = os.path.lexists(f"{one.record}/direct_url.json")
                (files if by_file else pip)[normalized(one.name)] = one.version
        left_out = self.image.apt.keys() | only_needed(self.prefix)
        return Packages({n: v for n, v in self.apt().items() if n not in left_out}, pip, files)


class _Kept(msgspec.Struct, frozen=True):
    """What the snapshot that was woken here ``wanted``, and what of that is ``missing`` since: a
    later snapshot names it, too."""

    wanted: Packages = Packages()
    missing: Packages = Packages()


def is_of_the_image(name: str) -> bool:
    """Whether torpor never installs this package of apt."""
    return _NEVER.fullmatch(name) is not None


def this_system(home: Path, *, rented: bool = True) -> System:
    """This machine."""
    why_not = "" if rented else _OWN
    if MACHINE_VARIABLE in os.environ:
        return System(str(home), sys.executable, [], None, _SHARED)
    return System("", sys.executable, package_places(), _read(home / _IMAGE, Packages), why_not)


def note_image(home: Path) -> None:
    """Keep what is installed, once: when the agent first starts. It came with the image."""
    if MACHINE_VARIABLE in os.environ or (home / _IMAGE).exists():
        return
    system = this_system(home)
    with suppress(OSError, ValueError):  # then no snapshot names packages
        _write(home / _IMAGE, Packages(system.apt(), system.pip()))


def packages_to_record(home: Path, system: System) -> Packages:
    """What a snapshot of this machine names: what was added here, and what an earlier machine had,
    unless somebody has removed it here."""
    added, kept = system.added().checked(), _read(home / _RECORD, _Kept)
    if kept is None:
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
        {n: v for n, v in wanted.pip.items() if n not in pip},
        {n: v for n, v in wanted.files.items() if n not in pip},
    )
    _write(home / _RECORD, _Kept(wanted, missing))


def put_back(
    system: System, wanted: Packages, check: Callable[[], None], within_s: float = INSTALL_S
) -> PackagesBack:
    """Install what this machine lacks: by apt in two thirds of the time, and then by pip in one,
    however long apt took to change the system. ``check`` may raise, which ends the program that
    runs; one that changes the system by then comes to its end before."""
    apt = _Apt(system, wanted.apt, within_s * 2 / 3, check).put_back()
    had = system.pip()
    pip = _Pip(system, wanted, within_s / 3, check).put_back()
    replaced = [
        f"{n} {v} instead of the machine's {had[n]} (pip)"
        for n, v in system.pip().items()
        if had.get(n, v) != v and n not in {*wanted.pip, *wanted.files}
    ]
    back, other = apt.back + pip.back, apt.other + pip.other + replaced
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
        whole = list(found.items())
        if len(whole) > _MOST_REASONS:
            rest = [name for _, names in whole[_MOST_REASONS - 1 :] for name in names]
            whole = [*whole[: _MOST_REASONS - 1], ("for other reasons each", rest)]
        return [NotBack(self.kind, why, names[:_SHOWN], len(names)) for why, names in whole]


class _Ran(NamedTuple):
    status: int
    tail: str = ""

    @property
    def is_late(self) -> bool:
        """Whether its time was over, as also the program `timeout` says."""
        return self.status == _LATE

    def why(self, word: str) -> str:
        """What follows ``word`` in the last line that begins with it, or else the last line."""
        lines = [" ".join(line.split()) for line in self.tail.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith(word)] or lines
        if self.status == 0 or not errors:
            return f"it ended with status {self.status}, and the package is not there"
        return errors[-1].removeprefix(word)[:300]

    def says(self, *words: str) -> bool:
        return any(word in self.tail.lower() for word in words)


class _Installer(ABC):
    """What apt's and pip's have in common. Its time begins now."""

    kind = ""
    error = ""
    """How a line that says why begins."""

    def __init__(
        self,
        system: System,
        wanted: dict[str, str],
        within_s: float,
        check: Callable[[], None],
    ) -> None:
        self._system = system
        self._wanted = wanted
        self._ends_s = time.monotonic() + within_s
        self._late = f"the {within_s:.0f} s that torpor takes for packages of {self.kind} were over"
        self._check = check
        self._why: dict[str, str] = {}
        self._asked: dict[str, str] = {}

    @abstractmethod
    def there(self) -> dict[str, str]:
        """What is installed now."""

    @abstractmethod
    def prepare(self, names: Sequence[str]) -> str:
        """Why nothing can be installed; empty where it can be."""

    @abstractmethod
    def install(self, names: Sequence[str]) -> _Ran: ...

    @abstractmethod
    def is_for_all(self, ran: _Ran) -> bool:
        """Whether no other choice of packages mends what went wrong."""

    def why(self, ran: _Ran) -> str:
        return self._late if ran.is_late else ran.why(self.error)

    def lacking(self) -> list[str]:
        there = self.there()
        return [name for name in self._wanted if name not in there]

    def put_back(self) -> _Outcome:
        lacked = self.lacking()
        if lacked:
            why_not = self._system.why_not or self._no_room() or self.prepare(lacked)
            if why_not:
                self._why = {**dict.fromkeys(lacked, why_not), **self._why}
            self._install([name for name in lacked if name not in self._why])
        there = self.there()
        back = [f"{n} {v} ({self.kind})" for n in lacked if (v := self._wanted[n]) == there.get(n)]
        other = [
            f"{n} {there[n]} instead of {v} ({self.kind})"
            for n, v in self._wanted.items()
            if n in there and there[n] != v
        ]
        gone = [n for n in lacked if n not in there]
        return _Outcome(self.kind, back, other, {n: self._why.get(n, self._late) for n in gone})

    def _install(self, names: Sequence[str]) -> None:
        """All at once, or else one after another, so that one that fails keeps no other away."""
        if not names:
            return
        ran = self.install(names)
        if ran.status == 0 or self.is_for_all(ran):
            self._why.update(dict.fromkeys(names, self.why(ran)))
            return
        lacked = {*self.lacking()}
        for name in [name for name in names if name in lacked]:
            if time.monotonic() >= self._ends_s:
                return
            if no_room := self._no_room():
                self._why[name] = no_room
                continue
            ran = self.install([name])
            self._why[name] = self.why(ran)

    def _no_room(self) -> str:
        """Why nothing more may be written: the next save needs some room."""
        if shutil.disk_usage(self._system.prefix or "/").free >= SPARE_BYTES:
            return ""
        return f"less than {SPARE_BYTES // MIB} MiB are free on the machine's disk"

    def run(self, argv: Sequence[str], changes_after: str | None = None) -> _Ran:
        """Run a program until the time is over, and return the end of what it printed. None is
        begun after that. One that has
        printed ``changes_after`` changes the system, and is not ended: half of a package would keep
        apt and Python from working."""
        if time.monotonic() >= self._ends_s:
            return _Ran(_LATE)
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
            late = False
            try:
                late = self._is_late(process)
            finally:
                if changes_after is not None and changes_after in _printed(output):
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(SETTLE_S)
                else:
                    _end(process)
            printed, status = _printed(output), process.poll()
        return _Ran(_LATE if status is None or (status and late) else status, printed)

    def _is_late(self, process: subprocess.Popen[bytes]) -> bool:
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

    def there(self) -> dict[str, str]:
        return self._system.apt()

    def is_for_all(self, ran: _Ran) -> bool:
        return ran.is_late or ran.says(
            "could not get lock", "unable to acquire", "dpkg was interrupted"
        )

    def prepare(self, names: Sequence[str]) -> str:
        if shutil.which("apt-get") is None:
            return "this machine has no apt-get"
        if not _is_root():
            sudo = self.run(["sudo", "-n", "true"])
            if sudo.status:
                no_sudo = "its user is not root and may not use sudo without a password"
                return self._late if sudo.is_late else no_sudo
        self._why.update((n, _OF_THE_IMAGE) for n in names if is_of_the_image(n))
        names = [name for name in names if name not in self._why]
        if not names:
            return ""
        if self._was_interrupted():
            self.run([*self._root(), "dpkg", "--configure", "-a"], "")
        updated = self._update()
        if updated.is_late:
            return self._late
        offered = self._offered(names)
        unknown = self._unread(updated)
        if offered is None:
            unknown = unknown or "apt-cache did not answer"
        for name in names:
            versions = (offered or {}).get(name, set())
            if not versions:
                self._why[name] = (
                    f"whether a package source of this machine has it is not known: {unknown}"
                    if unknown
                    else "no package source of this machine has it"
                )
            exact = self._wanted[name] in versions
            self._asked[name] = f"{name}={self._wanted[name]}" if exact else name
        return ""

    def install(self, names: Sequence[str]) -> _Ran:
        asked = [self._asked[name] for name in names]
        ran = self._installed(asked)
        if ran.status and len(names) == 1 and asked != [*names] and not self.is_for_all(ran):
            # an older version may not fit to what the image has in a newer one
            ran = self._installed(names)
        return ran

    def _installed(self, asked: Sequence[str]) -> _Ran:
        """Look what apt-get would install, download that, and install it. One package that would
        bring what is refused is looked at again without what it only recommends."""
        argv = ["install", "-y", "--no-remove"]
        argv += ["-o", "Dpkg::Options::=--force-confdef", "-o", "Dpkg::Options::=--force-confold"]
        ran = self._planned(argv, asked)
        if ran.status == _REFUSED and len(asked) == 1:
            argv.append("--no-install-recommends")
            ran = self._planned(argv, asked)
        if ran.status:
            return ran
        ran = self.run([*self._apt_get(), *argv, "--download-only", "--", *asked])
        if ran.status:
            return ran
        return self.run([*self._apt_get(ends=False), *argv, "--", *asked], "")

    def _planned(self, argv: Sequence[str], asked: Sequence[str]) -> _Ran:
        """What apt-get would do. An upgrade has the version that is there in brackets."""
        ran = self.run([*self._apt_get(), *argv, "--simulate", "--", *asked])
        for line in ran.tail.splitlines():
            action, name, version = [*line.split(maxsplit=2), "", "", ""][:3]
            if action != "Inst" or ran.status:
                continue
            if is_of_the_image(name):
                return _Ran(_REFUSED, f"it needs {name}, which {_OF_THE_IMAGE}")
            if version.startswith("[") and _NEVER_CHANGED.fullmatch(name):
                return _Ran(_REFUSED, f"it needs another version of {name} than the image has")
        return ran

    def _was_interrupted(self) -> bool:
        """Whether dpkg was ended in the middle, and wants to go on first."""
        with suppress(OSError), os.scandir(f"{self._system.prefix}/var/lib/dpkg/updates") as names:
            return any(entry.name.isdigit() for entry in names)
        return False

    def _unread(self, updated: _Ran) -> str:
        """Why not all package sources are known. Where one does not answer, apt-get only warns, and
        ends with status 0."""
        if updated.status == 0 and not updated.says("some index files failed to download"):
            return ""
        failed = [line for line in updated.tail.splitlines() if line.startswith(_FAILED)]
        why = " ".join(failed[-1][3:].split())[:300] if failed else self.why(updated)
        return f"apt-get update says: {why}"

    def _update(self) -> _Ran:
        """Again while another apt-get, such as the one of a first boot, holds the lock of the
        lists, for which apt-get does not wait."""
        ran = self.run([*self._apt_get(), "update"])
        while ran.status and ran.says("could not get lock", "unable to lock"):
            if time.monotonic() + _LOCK_S >= self._ends_s:
                break
            self._check()
            time.sleep(_LOCK_S)
            ran = self.run([*self._apt_get(), "update"])
        return ran

    def _offered(self, names: Sequence[str]) -> dict[str, set[str]] | None:
        """The versions that the sources have of each; None where apt-cache does not say. apt-get
        takes a name that it does not know for an expression, and would install what matches it."""
        found: dict[str, set[str]] = {}
        with tempfile.TemporaryFile() as output:
            try:
                subprocess.run(
                    ["apt-cache", "madison", "--", *names],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.DEVNULL,
                    env=_variables(),
                    timeout=_LOOK_S,
                    check=True,
                )
            except (OSError, subprocess.SubprocessError):
                return None
            output.seek(0)
            for line in output:
                fields = [field.strip() for field in line.decode(errors="replace").split("|")]
                if len(fields) > 1:
                    found.setdefault(fields[0], set()).add(fields[1])
        return found

    def _apt_get(self, *, ends: bool = True) -> list[str]:
        """``timeout`` also ends an apt-get of root's, which its user may not."""
        left_s = max(1, int(self._ends_s - time.monotonic()))
        timeout = ["timeout", "-k", "10", str(left_s)] if ends else []
        argv = [*self._root(), *timeout, "apt-get", "-o", "Acquire::Retries=3"]
        return [*argv, "-o", f"DPkg::Lock::Timeout={left_s}"]

    def _root(self) -> list[str]:
        sudo = [] if _is_root() else ["sudo", "-n"]
        return [*sudo, "env", "DEBIAN_FRONTEND=noninteractive", "NEEDRESTART_SUSPEND=1"]


class _Pip(_Installer):
    kind = "pip"
    error = "ERROR: "

    def __init__(
        self, system: System, wanted: Packages, within_s: float, check: Callable[[], None]
    ) -> None:
        super().__init__(system, {**wanted.files, **wanted.pip}, within_s, check)
        self._files = wanted.files.keys() - wanted.pip.keys()

    def there(self) -> dict[str, str]:
        return self._system.pip()

    def is_for_all(self, ran: _Ran) -> bool:
        return ran.is_late or self._is_away(ran) or ran.says("no space left")

    def why(self, ran: _Ran) -> str:
        if self._is_away(ran):
            return "pip did not reach its index"
        if ran.says("no matching distribution found for"):
            return "pip's index has no wheel of this version for this machine"
        return super().why(ran)

    def prepare(self, names: Sequence[str]) -> str:
        by_file = [name for name in names if name in self._files]
        why = (
            "pip had it from a file, a folder or an address, and no index has to have it; install "
            "it from there"
        )
        self._why.update(dict.fromkeys(by_file, why))
        if len(by_file) == len(names):
            return ""
        ran = self.run([*self._argv(), "--version"])
        if ran.status == 0 or ran.is_late:
            return self._late if ran.is_late else ""
        return f"the machine's Python, {self._system.python}, has no pip"

    def install(self, names: Sequence[str]) -> _Ran:
        """Wheels alone: building from source runs any project's code, and may take hours."""
        argv = [*self._argv(), "install", "--no-input", "--disable-pip-version-check"]
        argv += ["--retries", "1", "--progress-bar", "off", "--no-cache-dir"]
        argv += ["--only-binary", ":all:"]
        if self._is_managed():
            argv.append("--break-system-packages")
        argv += ["--", *(f"{name}=={self._wanted[name]}" for name in names)]
        return self.run(argv, "Installing collected packages")

    def _is_away(self, ran: _Ran) -> bool:
        lines = ran.tail.splitlines()
        return any(line.startswith("WARNING: Retrying (") for line in lines) and any(
            line.startswith(self.error) and line.endswith("(from versions: none)") for line in lines
        )

    def _argv(self) -> list[str]:
        return [self._system.python, "-E", "-m", "pip"]

    def _is_managed(self) -> bool:
        """Whether its Python is the system's by PEP 668, whose pip wants to be told."""
        code = (
            "import os, sys, sysconfig; print(sys.prefix == sys.base_prefix and "
            "os.path.exists(sysconfig.get_path('stdlib') + '/EXTERNALLY-MANAGED'))"
        )
        return self.run([self._system.python, "-I", "-c", code]).tail.strip() == "True"


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


def _read(path: Path, kind: type[R]) -> R | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=learned(kind))
    except (OSError, msgspec.DecodeError):
        return None


def _write(path: Path, record: Packages | _Kept) -> None:
    unfinished = path.with_suffix(".new")
    unfinished.write_bytes(msgspec.json.encode(record))
    unfinished.rename(path)


def _printed(output: IO[bytes]) -> str:
    size = os.fstat(output.fileno()).st_size
    start = max(0, size - _TAIL_BYTES)
    return os.pread(output.fileno(), size - start, start).decode(errors="replace")


def _is_root() -> bool:
    return os.geteuid() == 0


def _variables() -> dict[str, str]:
    """The agent's, without those that break what is not the image's own program."""
    kept = {n: v for n, v in os.environ.items() if n not in ("LD_LIBRARY_PATH", "LD_PRELOAD")}
    return {**kept, "LC_ALL": "C"}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it with its children. One of root's ends by its own limit."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(10.0)
