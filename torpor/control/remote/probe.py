"""Ask a machine over plain SSH what it is, before anything is sent to it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import asyncssh
import msgspec

from torpor.control.remote.bundle import OLDEST_GLIBC, PYTHONS, Platform
from torpor.control.remote.ssh import execute
from torpor.shared.errors import DiskFull, InvalidInput, MachineUnfit
from torpor.shared.plain_text import plain
from torpor.shared.values import MIB, learned
from torpor.shared.wire.protocol import parse_json
from torpor.shared.wire.request import Count

PYTHON_CANDIDATES: Final = (
    "python3",
    *(f"python{major}.{minor}" for major, minor in reversed(PYTHONS)),
    "/usr/bin/python3",
)
PROBE_S: Final = 30.0
NEEDED_BYTES: Final = 128 * MIB  # the bundle unpacked, its archive, journals and the log
DEFAULT_HOME: Final = "~/.torpor"
_MARK: Final = b"torpor-probe "  # a login shell may print more
_GLIBC: Final = re.compile(r"glibc (\d{1,4})\.(\d{1,4})(?:\.\S*)?", re.ASCII)

# Constant, never formatted. Runs on any Python since 2.7, so that it can report an old one.
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
facts["writable"] = os.access(above, os.W_OK | os.X_OK)
facts["in_the_way"] = os.path.lexists(above) and not os.path.isdir(above)
folder = os.path.join(home, "bundles")
facts["bundles"] = [n for n in (os.listdir(folder) if os.path.isdir(folder) else [])
                    if os.path.isfile(os.path.join(folder, n, ".complete"))][:100]
sys.stdout.write("\ntorpor-probe " + json.dumps(facts) + "\n")
"""


_Word = Annotated[str, msgspec.Meta(max_length=4096)]


class Facts(msgspec.Struct, frozen=True):
    """What the script writes. A machine writes it: what does not fit is no answer."""

    version: Annotated[list[Count], msgspec.Meta(min_length=2, max_length=3)]
    home: _Word
    implementation: _Word
    system: _Word
    machine: _Word
    bits: Count
    missing: Annotated[list[_Word], msgspec.Meta(max_length=100)]
    libc: Annotated[str, msgspec.Meta(max_length=100)]
    free_bytes: Annotated[int, msgspec.Meta(ge=0)]  # of some network file systems: 2^63
    writable: bool
    in_the_way: bool
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
    bundles: frozenset[str]  # content hashes that are installed completely
    glibc: str
    cuda: int  # the major version that the driver supports; 0 without one
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
    found = []
    for python in candidates:
        facts = await _ask(connection, python, home)
        if facts is None:
            continue
        found.append(facts)
        if tuple(facts.version[:2]) in PYTHONS:
            return check(facts, python, where)
    uname = await execute(connection, ["uname", "-s", "-m"], timeout_s=PROBE_S)
    words = uname.stdout.decode("utf-8", "replace").split()[-2:]
    system = plain(" ".join(words)) if uname.exit == 0 and words else "no Unix (uname does not run)"
    versions = sorted({".".join(map(str, facts.version)) for facts in found})
    there = f"only Python {', '.join(versions)}" if versions else "no Python"
    raise MachineUnfit(
        f"{where} ({system}) has {there}: the agent needs CPython {PYTHONS[0][0]}.{PYTHONS[0][1]} "
        f"to {PYTHONS[-1][0]}.{PYTHONS[-1][1]} on Linux; install it there (python3), or take "
        "another image. Nothing was sent"
    )


async def _ask(connection: asyncssh.SSHClientConnection, python: str, home: str) -> Facts | None:
    argv = [python, "-s", "-E", "-c", SCRIPT, home]
    done = await execute(connection, argv, timeout_s=PROBE_S)
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            try:
                return msgspec.convert(parse_json(line[len(_MARK) :]), learned(Facts))
            except ValueError:
                return None
    return None


def check(facts: Facts, python: str, where: str) -> Probed:
    """What the script found, if the agent can run there."""
    if facts.system != "Linux" or facts.implementation != "CPython" or facts.bits != 64:
        raise MachineUnfit(
            f"{where} runs {facts.bits}-bit {facts.implementation} on {facts.system}: the "
            "agent needs 64-bit CPython on Linux"
        )
    libc = facts.libc.strip()
    named = _GLIBC.fullmatch(libc)
    glibc = tuple(map(int, named.groups())) if named else ()
    if glibc < OLDEST_GLIBC:
        raise MachineUnfit(
            f"{where} has {libc or 'no glibc (musl?)'}: the agent's wheels need glibc "
            f"{OLDEST_GLIBC[0]}.{OLDEST_GLIBC[1]} or later; take a Debian, Ubuntu or similar image"
        )
    if facts.missing:
        raise MachineUnfit(
            f"{where}: its {python} lacks the modules {', '.join(facts.missing)}: install the "
            "whole Python there"
        )
    home = facts.home
    if facts.in_the_way or not facts.writable or not home.startswith("/"):
        raise MachineUnfit(f"{where}: the agent's folder {home} cannot be written there")
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
        glibc=".".join(map(str, glibc)),
        cuda=facts.cuda,
        user_home=facts.user_home,
    )
