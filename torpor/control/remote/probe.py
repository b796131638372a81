"""Asks a machine over plain SSH what it is, before anything is sent to it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import asyncssh
import msgspec

from torpor.control.remote.bundle import OLDEST_GLIBC, PYTHONS, Platform
from torpor.control.remote.ssh import Completed, execute, last_words, passes, scripted
from torpor.shared.errors import AgentLost, DiskFull, InvalidInput, MachineUnfit
from torpor.shared.values import MIB, learned
from torpor.shared.wire.protocol import parse_json
from torpor.shared.wire.request import Count

PYTHON_CANDIDATES: Final = (
    "python3",
    *(f"python{major}.{minor}" for major, minor in reversed(PYTHONS)),
    "/usr/bin/python3",
)
PROBE_S: Final = 30.0
_KILLED: Final = "ended by a signal"
_LONGEST: Final = 2000  # most characters of what a message says of the machine's Pythons
_NOT_FOUND: Final = 127  # a shell's exit status for a missing command
NEEDED_BYTES: Final = 128 * MIB  # the bundle unpacked, its archive, journals and the log
DEFAULT_HOME: Final = "~/.torpor"
_MARK: Final = b"torpor-probe "  # printed before the facts, because a login shell may print more
_GLIBC: Final = re.compile(r"glibc (\d{1,4})\.(\d{1,4})(?:\.\S*)?", re.ASCII)

# A constant, so no text is ever formatted into it. Runs on any Python since 3.4, so that it can
# report an old one.
SCRIPT: Final = r"""
import ctypes, json, os, platform, struct, sys
home = os.path.expanduser(sys.argv[1])
facts = {"version": list(sys.version_info[:3]), "home": home, "executable": sys.executable,
         "implementation": platform.python_implementation(), "system": platform.system(),
         "machine": platform.machine(), "bits": struct.calcsize("P") * 8, "missing": [],
         "user_home": os.path.expanduser("~"), "cuda": 0}
try:
    facts["libc"] = os.confstr("CS_GNU_LIBC_VERSION") or ""
except (AttributeError, ValueError, OSError):
    facts["libc"] = ""
try:  # what the driver supports, as 12040; starts nothing on the GPU
    version = ctypes.c_int(0)
    if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0:
        facts["cuda"] = version.value // 1000
except (OSError, AttributeError):
    pass
for name in ("fcntl", "hashlib", "lzma", "socket", "ssl", "tarfile", "zlib"):
    try:
        __import__(name)
    except ImportError:
        facts["missing"].append(name)
above = home
while not os.path.isdir(above) and os.path.dirname(above) != above:
    above = os.path.dirname(above)
facts["nvidia"] = os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/dxg")
room = os.statvfs(above)
facts["free_bytes"] = room.f_bavail * room.f_frsize
facts["noexec"] = bool(room.f_flag & os.ST_NOEXEC)
facts["writable"] = os.access(above, os.W_OK | os.X_OK)
facts["in_the_way"] = os.path.lexists(above) and not os.path.isdir(above)
folder = os.path.join(home, "bundles")
facts["bundles"] = [n for n in (os.listdir(folder) if os.path.isdir(folder) else [])
                    if os.path.isfile(os.path.join(folder, n, ".complete"))][:100]
sys.stdout.write("\ntorpor-probe " + json.dumps(facts) + "\n")
"""


_Word = Annotated[str, msgspec.Meta(max_length=4096)]


class MachineFacts(msgspec.Struct, frozen=True):
    """What the script prints. It comes from a machine: what does not fit is no answer."""

    version: Annotated[list[Count], msgspec.Meta(min_length=2, max_length=3)]
    home: _Word
    implementation: _Word
    system: _Word
    machine: _Word
    bits: Count
    missing: Annotated[list[_Word], msgspec.Meta(max_length=100)]
    libc: Annotated[str, msgspec.Meta(max_length=100)]
    free_bytes: Annotated[int, msgspec.Meta(ge=0)]  # some network file systems report 2^63
    writable: bool
    in_the_way: bool
    noexec: bool
    nvidia: bool
    bundles: Annotated[list[_Word], msgspec.Meta(max_length=100)]
    user_home: _Word
    cuda: Count


@dataclass(frozen=True)
class Probed:
    """A machine where the agent can run."""

    python: str  # the argv[0] that starts it
    platform: Platform
    home: str  # absolute
    free_bytes: int
    bundles: frozenset[str]  # content hashes of the bundles that are installed completely
    glibc: str
    cuda: int  # major CUDA version that the driver supports; 0 without a driver
    user_home: str


async def probe(
    connection: asyncssh.SSHClientConnection,
    where: str,
    home: str,
    candidates: Sequence[str] = PYTHON_CANDIDATES,
) -> Probed:
    """Find a Python that can run the agent; MachineUnfit or DiskFull say what is missing."""
    if not home.startswith(("/", "~/")) or "\0" in home or "\n" in home:
        raise InvalidInput(f"the agent's folder {home!r} must begin with / or ~/")
    lacks: dict[str, list[str]] = {}
    for python in candidates:
        argv = scripted(python, home)
        done = await execute(connection, where, argv, timeout_s=PROBE_S, script=SCRIPT)
        facts = _facts(done)
        lack = _no_answer(done) if facts is None else _lack(facts)
        if facts is not None and not lack:
            return check(facts, python, where)
        lacks.setdefault(lack, []).append(python)
    each = "; ".join(f"{', '.join(pythons)}: {lack}" for lack, pythons in lacks.items())
    each = each[:_LONGEST]
    if _KILLED in lacks or passes(each):
        raise AgentLost(
            f"{where} ran no Python that the agent can run on: {each}. It may be short of memory "
            "or of processes (ulimit -u): try again when it has some"
        )
    uname = await execute(connection, where, ["uname", "-s", "-m"], timeout_s=PROBE_S)
    words = uname.stdout.decode("utf-8", "replace").split()[-2:]
    system = " ".join(words) if uname.exit == 0 and words else "no Unix (uname does not run)"
    raise MachineUnfit(
        f"{where} ({system}) has no Python that the agent can run on, which is 64-bit CPython "
        f"{PYTHONS[0][0]}.{PYTHONS[0][1]} to {PYTHONS[-1][0]}.{PYTHONS[-1][1]} on Linux, whole, "
        f"with glibc {OLDEST_GLIBC[0]}.{OLDEST_GLIBC[1]} or later. It has {each}. Install python3 "
        "there, or take a Debian, Ubuntu or similar image. Nothing was sent"
    )


def _facts(done: Completed) -> MachineFacts | None:
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            try:
                return msgspec.convert(parse_json(line[len(_MARK) :]), learned(MachineFacts))
            except ValueError:
                return None
    return None


def _no_answer(done: Completed) -> str:
    if done.exit == _NOT_FOUND:
        return "not found"
    if done.exit < 0:
        return _KILLED
    return f"no answer (exit {done.exit}), and it printed: {last_words(done.stdout + done.stderr)}"


def _lack(facts: MachineFacts) -> str:
    """Why the agent cannot run on this Python; empty if it can."""
    version = ".".join(map(str, facts.version))
    if facts.system != "Linux" or facts.implementation != "CPython" or facts.bits != 64:
        return f"{facts.bits}-bit {facts.implementation} {version} on {facts.system}"
    if tuple(facts.version[:2]) not in PYTHONS:
        return f"Python {version}"
    libc = facts.libc.strip()
    if _glibc(facts) < OLDEST_GLIBC:
        return f"Python {version} with {libc or 'no glibc (musl?)'}"
    if facts.missing:
        return f"Python {version} without the modules {', '.join(facts.missing)}"
    return ""


def _glibc(facts: MachineFacts) -> tuple[int, ...]:
    named = _GLIBC.fullmatch(facts.libc.strip())
    return tuple(map(int, named.groups())) if named else ()


def check(facts: MachineFacts, python: str, where: str) -> Probed:
    """The result of the script as a machine with a Python that can run the agent, if its folder can
    be there."""
    home = facts.home
    if facts.in_the_way or not facts.writable or not home.startswith("/"):
        raise MachineUnfit(f"{where}: the agent's folder {home} cannot be written there")
    if facts.noexec:
        raise MachineUnfit(
            f"{where}: the agent's folder {home} is on a file system that is mounted noexec, from "
            "which no library can be loaded: mount it with exec (mount -o remount,exec), or take "
            "a user whose home is elsewhere"
        )
    if facts.free_bytes < NEEDED_BYTES:
        raise DiskFull(
            f"{where}: {facts.free_bytes // MIB} MiB are free for {home}, the agent needs "
            f"{NEEDED_BYTES // MIB} MiB: free some space or take a machine with a larger disk"
        )
    return Probed(
        python=python,
        platform=Platform((facts.version[0], facts.version[1]), facts.machine, facts.nvidia),
        home=home,
        free_bytes=facts.free_bytes,
        bundles=frozenset(facts.bundles),
        glibc=".".join(map(str, _glibc(facts))),
        cuda=facts.cuda,
        user_home=facts.user_home,
    )
