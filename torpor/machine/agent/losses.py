"""The agent's look for what a snapshot lacks: a process beside the run, and where links lead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from torpor.machine.agent.brought import made_again, own_profile
from torpor.machine.agent.call import Call
from torpor.machine.agent.environment import package_places
from torpor.machine.agent.packages import is_of_the_image, packages_to_record, this_system
from torpor.machine.supervisor.marker import MARKER
from torpor.machine.tree.disks import Mounts
from torpor.machine.tree.left_behind import HOMES_CUT, SENT, Found, Look, Where
from torpor.machine.tree.links_out import LinksOut
from torpor.machine.tree.walk import absolute_root
from torpor.shared.format.manifest import Entry
from torpor.shared.format.packages import Packages
from torpor.shared.values import learned
from torpor.shared.wire.activity import MACHINE_VARIABLE
from torpor.shared.wire.losses import LeftBehind, LinkOut, LookAtHomes, LookForLosses, Losses
from torpor.shared.wire.snapshot import UserFiles

LINKS_S: Final = 10.0
"""Seconds for the look where links lead. A link whose data was not looked at by then keeps the
machine."""
HOMES_S: Final = 20.0
"""Seconds for one look at the homes alone. After that, what is in them counts as unknown."""
_STOP_S: Final = 2.0
_POLL_S: Final = 0.2
_SOON_NS: Final = 900 * 10**9
"""Nanoseconds from the start of a rented machine within which it has the agent."""
_NOTHING: Final = LeftBehind("/", 0, 0, 0.0)


class LookBehind:
    """The look of one run. Its process ends with ``close``."""

    def __init__(self, home: Path, roots: Sequence[bytes]) -> None:
        self._home = home
        self._roots = list(roots)
        # then only the machine's home belongs to the machine
        shares_host = MACHINE_VARIABLE in os.environ
        self._top = os.path.realpath(os.path.expanduser("~")) if shares_host else "/"
        self._since_ns = 0 if shares_host else machine_began_ns(home)
        self._first_ns = 0 if shares_host else first_start_ns(self._since_ns)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._found: Found | None = None

    def begin(self, request: LookForLosses) -> None:
        """Start the process, once."""
        with self._lock:
            if self._process is not None or self._found is not None:
                return
            try:
                self._process = _started(self.where(request))
            except OSError as error:
                self._found = _unknown(f"its process did not start: {error}")

    def where(self, request: LookForLosses | LookAtHomes | UserFiles) -> Where:
        """What to look at on this machine."""
        kept = Packages()
        if isinstance(request, LookForLosses):
            kept = packages_to_record(self._home, this_system(self._home))
        return Where(
            top=self._top,
            since_ns=self._since_ns if request.rented else self._first_ns,
            disks_since_ns=self._since_ns if request.rented else 0,
            skipped=[*map(os.fsdecode, self._roots), *self._left_out(request)],
            recorded=package_places(),
            volumes=request.volumes,
            home=os.path.realpath(os.path.expanduser("~")),
            made_again=made_again(self._home),
            kept_apt=[name for name in kept.apt if not is_of_the_image(name)],
            kept_pip=[*kept.pip],
        )

    def links_from(
        self,
        tops: Iterable[str],
        links: Iterable[tuple[str, str]],
        request: UserFiles,
        stop: Callable[[], bool],
    ) -> list[LinkOut]:
        """Links, by their paths and what they say, that lead to data outside of the roots and of
        ``tops``."""
        roots = [*self._roots, *map(os.fsencode, tops)]
        since_ns = self._since_ns if request.rented else self._first_ns
        mounts, left_out = Mounts.of_this_machine(request.volumes), self._left_out(request)
        older = not request.rented
        found, _ = LinksOut(roots, left_out, since_ns, mounts, stop, self._top, older).behind(links)
        return found

    def losses(self, request: LookForLosses, entries: Sequence[Entry] | None, call: Call) -> Losses:
        """The losses found. ``entries``: those of the last pass, for their links. The homes are
        looked at separately, because the process begins with the first pass and may not come to its
        end."""
        if request.whole:
            self.begin(request)
        if request.wait_s == 0:
            return _answer(_unknown(""), [], 0)
        ends_s = time.monotonic() + max(request.wait_s, LINKS_S)

        def stop() -> bool:
            call.check()
            return time.monotonic() > ends_s

        since_ns = self._since_ns if request.rented else self._first_ns if request.whole else None
        mounts = Mounts.of_this_machine(request.volumes)
        # disks of a machine that its user rents outlive a restart
        older = request.whole and not request.rented
        left_out = self._left_out(request)
        looks = LinksOut(self._roots, left_out, since_ns, mounts, stop, self._top, older)
        links, count = looks.find(entries or [])
        if not request.whole:
            return _answer(_found(True), links, count)
        found = self._wait(request.wait_s, call)
        return _answer(_with_user_files(found, self._homes(request, call)), links, count)

    def homes(self, request: LookAtHomes, call: Call) -> Losses:
        """What a user has written in a home until now."""
        return _answer(_with_user_files(_found(True), self._homes(request, call)), [], 0)

    def close(self) -> None:
        """End the process."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _homes(self, request: LookForLosses | LookAtHomes, call: Call) -> Found:
        ends_s = time.monotonic() + HOMES_S

        def stop() -> bool:
            call.check()
            return time.monotonic() > ends_s

        mounts = Mounts.of_this_machine(request.volumes)
        return Look(self.where(request), mounts, stop).homes()

    def _wait(self, wait_s: float, call: Call) -> Found:
        with self._lock:
            if self._found is None and self._process is not None:
                self._found = _heard(self._process, wait_s, call)
                self._process = None
            return self._found or _unknown("the run has ended")

    def _left_out(self, request: LookForLosses | LookAtHomes | UserFiles) -> list[str]:
        places = [absolute_root(place) for place in request.accepted]
        left_out = [str(self._home), *own_profile(self._home), *places]
        return [*map(os.path.realpath, left_out), *map(os.path.normpath, places)]


def machine_began_ns(home: Path) -> int:
    """The time from which a file that came or changed is the user's. The agent's folder is made
    after the image of a rented machine is unpacked and before the user gets the machine. If the
    machine started long before the folder was made, the start counts: the clock was set since, or
    the folder was made again. The start also counts where the folder's marker is gone, or says that
    it was made again. If neither time is known, every file counts."""
    started_ns = _started_ns()
    try:
        facts = os.stat(home / MARKER)
    except FileNotFoundError:
        return started_ns or 0
    if facts.st_size:
        return started_ns or 0
    marked_ns = facts.st_ctime_ns
    if started_ns is None or started_ns >= marked_ns - _SOON_NS:
        return marked_ns
    return started_ns


def first_start_ns(began_ns: int, keys: Path = Path("/etc/ssh")) -> int:
    """The time from which a file may be the user's on a machine that torpor did not rent: its user
    worked there before the agent came, and may have restarted it since. It is the time of the SSH
    host keys, which are made at the first start. If the keys came with the image, the time is too
    early, and too many files are named."""
    known = [began_ns, _started_ns()]
    for key in keys.glob("ssh_host_*_key"):
        try:
            known.append(os.stat(key).st_mtime_ns)
        except FileNotFoundError:
            continue
        except OSError:
            known.append(0)
    return min(time_ns for time_ns in known if time_ns is not None)


def _started_ns() -> int | None:
    """When the machine's first process started; None where that is hidden."""
    try:
        with open("/proc/1/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
    up_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return time.time_ns() - up_ns + ticks * 10**9 // os.sysconf("SC_CLK_TCK")


def _started(where: Where) -> subprocess.Popen[bytes]:
    bundle = Path(__file__).parents[3]  # the folder of torpor's packages, also outside of a bundle
    process = subprocess.Popen(
        [sys.executable, "-s", "-E", "-X", "utf8", "-m", "torpor.machine.tree.left_behind"],
        cwd=bundle,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    stdin, process.stdin = process.stdin, None  # so that a later `communicate` only reads
    if stdin is not None:
        with suppress(BrokenPipeError), stdin:
            stdin.write(json.dumps(msgspec.to_builtins(where)).encode())  # names may be any bytes
    return process


def _heard(process: subprocess.Popen[bytes], wait_s: float, call: Call) -> Found:
    ends_s = time.monotonic() + wait_s
    stopped = False
    while True:
        try:
            output, _ = process.communicate(timeout=_POLL_S)
            break
        except subprocess.TimeoutExpired:
            call.check()
        if time.monotonic() < ends_s:
            continue
        if stopped:
            process.kill()
            process.communicate()
            return _unknown("it did not answer, as on a disk that hangs")
        process.terminate()
        stopped, ends_s = True, time.monotonic() + _STOP_S
    try:
        return msgspec.json.decode(output, type=learned(Found))
    except msgspec.DecodeError:
        return _unknown(f"its process ended with status {process.returncode}")


def _unknown(why: str) -> Found:
    unseen = [f"the machine: {why}"] if why else []
    return _found(False, unseen)


def _found(complete: bool, unseen: Sequence[str] = ()) -> Found:
    """An answer without losses, as far as is known."""
    user_unseen = [] if complete else [HOMES_CUT]
    return Found(complete, _NOTHING, [], [], [], 0, [], 0, [*unseen], [], _NOTHING, user_unseen)


def _with_user_files(found: Found, homes: Found) -> Found:
    """``found``, with what a user has written in a home from ``homes``."""
    return msgspec.structs.replace(
        found,
        user_files=homes.user_files,
        user_total=homes.user_total,
        user_unseen=homes.user_unseen,
        user_mark=homes.user_mark,
    )


def _answer(found: Found, links: Sequence[LinkOut], count: int) -> Losses:
    return Losses(**msgspec.structs.asdict(found), links=list(links[:SENT]), link_count=count)
