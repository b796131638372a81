"""What torpor brings to a rented machine beside snapshots: the workspace's directories, and a line
with which a user who logs in begins in the first of them.

A line in the profile of the user's login shell goes there. Only login shells read a profile, and in
one that is not interactive the line does nothing. A command that is given to ssh, scp, rsync and
the servers of editors begin in the home, as on any other machine. A RemoteCommand in the
configuration of ssh would break them.
"""

from __future__ import annotations

import os
import pwd
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from torpor.machine.agent.call import Call
from torpor.machine.sampler.ring import boot_id
from torpor.machine.tree.walk import absolute_root, is_inside
from torpor.shared.errors import WorkspaceInvalid
from torpor.shared.values import learned
from torpor.shared.wire.brought import MakePaths, NoteMadeAgain, PathsMade
from torpor.shared.wire.request import Nothing

_MARK: Final = b"# torpor: an interactive shell begins in the workspace"
_LINE: Final = (
    'case $- in *i*) [ ! "$PWD" -ef "$HOME" ] || [ "${{SHLVL:-1}}" -gt 1 ] || '
    "cd -- {} 2>/dev/null || : ;; esac"
)
_PROFILES: Final = {
    "bash": (".bash_profile", ".bash_login", ".profile"),
    "sh": (".profile",),
    "dash": (".profile",),
    "zsh": (".zprofile",),
}
"""The profiles that a login shell reads in the home. bash reads only the first one that exists."""
_RECORD: Final = "made.json"
FIRST_PROCESS: Final = Path("/proc/1/stat")


class _Made(msgspec.Struct, frozen=True):
    """What torpor has brought: the ``profile`` with its line, as it was written; the directories
    that were ``empty``: the inode of each, by its path in hex; the ``start`` of the machine in
    which torpor began; and those that a deploy fills."""

    empty: dict[str, int]
    profile: str = ""
    ctime_ns: int = 0
    made_again: list[str] = []
    start: str = ""


def make_paths(request: MakePaths, call: Call) -> PathsMade:
    """Make the directories, and add the line to the profile."""
    roots = [absolute_root(path) for path in request.paths]
    empty: dict[str, int] = {}
    for path, root in zip(request.paths, roots, strict=True):
        try:
            os.makedirs(root, exist_ok=True)
            if not os.listdir(root):
                empty[os.path.realpath(os.fsencode(root)).hex()] = os.stat(root).st_ino
        except OSError as error:
            raise WorkspaceInvalid(
                f"workspace path {path} cannot be made on the machine ({root}: {error.strerror}): "
                "name a directory that its user can make"
            ) from None
    made = _made(call.home)
    start = made.start if made.empty else machine_start()  # an unknown start stays unknown
    made = replace(made, empty={**made.empty, **empty}, start=start)
    try:
        made = _with_profile(made, roots)
        return PathsMade("")
    except _NoProfile as error:
        return PathsMade(str(error))
    except OSError as error:
        return PathsMade(f"{error.filename or 'its profile'}: {error.strerror}")
    finally:
        _keep(call.home, made)


def note_made_again(request: NoteMadeAgain, call: Call) -> Nothing:
    """Remember the directories that a deploy fills."""
    made = _made(call.home)
    places = {os.path.realpath(absolute_root(path)) for path in request.paths}
    _keep(call.home, replace(made, made_again=sorted({*made.made_again, *places})))
    return Nothing()


def made_again(home: Path) -> list[str]:
    """The directories that deploys have filled on this machine."""
    return _made(home).made_again


def own_profile(home: Path) -> list[str]:
    """The profile to which torpor has added its line, unless somebody has changed it since."""
    made = _made(home)
    try:
        as_left = os.stat(made.profile).st_ctime_ns == made.ctime_ns
    except OSError:
        return []
    return [made.profile] if as_left else []


def new_directories(home: Path) -> set[bytes]:
    """The directories of a workspace that were empty when torpor brought them here."""
    found = set()
    for path, inode in _made(home).empty.items():
        with suppress(OSError, ValueError):
            place = bytes.fromhex(path)
            if os.stat(place).st_ino == inode:
                found.add(place)
    return found


def has_started_again(home: Path) -> bool:
    """Whether the machine has started again since torpor brought the directories: a disk that was
    mounted over one may not have come back. True also where that is not known."""
    start = machine_start()
    return not start or _made(home).start != start


def machine_start() -> str:
    """Which start of the machine this is: the kernel's boot and the moment at which the first
    process began, in clock ticks since the boot. A container that starts again keeps the boot of
    its host. Empty where that cannot be read."""
    try:
        begun = FIRST_PROCESS.read_text("ascii", "replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
    boot = boot_id()
    return f"{boot}-{begun}" if boot.strip("0") else ""


class _NoProfile(Exception):
    """Why no line was added."""


def _made(home: Path) -> _Made:
    try:
        return msgspec.json.decode((home / _RECORD).read_bytes(), type=learned(_Made))
    except (OSError, msgspec.DecodeError):
        return _Made({})


def _keep(home: Path, made: _Made) -> None:
    unfinished = home / f"{_RECORD}.new"
    unfinished.write_bytes(msgspec.json.encode(made))
    unfinished.rename(home / _RECORD)


def _with_profile(made: _Made, roots: Sequence[str]) -> _Made:
    """Add the line to the profile, where it is missing."""
    user_home = os.path.expanduser("~")
    held = [os.path.realpath(os.fsencode(root)) for root in roots]
    shell = os.path.basename(pwd.getpwuid(os.geteuid()).pw_shell)
    names = _PROFILES.get(shell)
    if names is None:
        raise _NoProfile(f"torpor knows no profile of the login shell {shell or 'of its user'}")
    there = [name for name in names if os.path.lexists(os.path.join(user_home, name))]
    profile = os.path.join(user_home, (there or [names[-1]])[0])
    if os.path.islink(profile):
        raise _NoProfile(f"{profile} is a link to a file of the user's")
    if is_inside(os.path.realpath(os.fsencode(profile)), held):
        raise _NoProfile(f"{profile} is in the workspace")
    with open(profile, "a+b") as file:
        file.seek(0)
        before = file.read()
        if _MARK in before.splitlines():
            return made
        gap = b"" if before.endswith(b"\n") or not before else b"\n"
        line = os.fsencode(_LINE.format(shlex.quote(roots[0])))
        file.write(b"%b%b\n%b\n" % (gap, _MARK, line))
    return replace(made, profile=profile, ctime_ns=os.stat(profile).st_ctime_ns)
