"""What the file system of a target can hold, tried out before anything is written."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from torpor.machine.tree.naming import NO_LINKS
from torpor.shared.errors import MachineUnfit
from torpor.shared.format.manifest import HARDLINK, SYMLINK, Entries, Entry, described
from torpor.shared.format.rows import NotPlain

_PLAIN_WORDS: Final = "nothing was written. Wake on a machine whose disk has ext4 or XFS"
_TRIAL: Final = b".torpor-probe-"
_ODD: Final = re.compile(rb'[\x01-\x1f"*:<>?\\|\x7f]|[^\x00-\x7f]+|[ .](?=/|\Z)')
_TRIED_NS: Final = 1_700_000_001_987_654_321
"""An odd number of seconds, and nanoseconds that are rounded to another value by each step
below."""
_STEPS_NS: Final = (1, 100, 1000, 10**6, 10**7, 10**9, 2 * 10**9)
"""Steps in nanoseconds to which file systems round times, from ext4 to FAT: SMB has 100 ns, exFAT
10 ms, ext4 with small inodes and Lustre 1 s."""
_EARLIEST_NS: Final = -(1 << 63)
_LATEST_NS: Final = (1 << 64) - 1


class FilesystemAbilities(NamedTuple):
    """``step_ns``: mtimes are whole multiples of it; earlier and later mtimes become
    ``earliest_ns`` and ``latest_ns``. ``links``: whether a file can have several names. ``cases``:
    whether names differ that have the same letters in upper and lower case. ``modes``: whether a
    file keeps the mode that it is given."""

    step_ns: int = 1
    earliest_ns: int = _EARLIEST_NS
    latest_ns: int = _LATEST_NS
    links: bool = True
    cases: bool = True
    modes: bool = True

    def held_ns(self, mtime_ns: int) -> int:
        """The time that this file system keeps of ``mtime_ns``."""
        within = max(self.earliest_ns, min(mtime_ns, self.latest_ns))
        return within - within % self.step_ns


EVERYTHING: Final = FilesystemAbilities()


class Needs(NamedTuple):
    """What one root of a snapshot needs of a file system. ``largest``: its largest file; ``names``:
    the longest name, and one with each kind of odd character. All are given by their paths."""

    largest: tuple[int, bytes] = (0, b"")
    links: bool = False
    symlink: bytes | None = None
    names: Sequence[bytes] = ()


def needs_of(entries: Sequence[Entry], roots: int) -> list[Needs]:
    """The needs of each root."""
    what = described(entries)
    largest: list[tuple[int, int]] = [(0, -1)] * roots
    for number, (root, size) in enumerate(zip(what.roots, what.sizes, strict=True)):
        if size > largest[root][0]:  # the size of anything but a file is 0
            largest[root] = (size, number)
    symlinks: dict[int, int] = {}
    for number in what.of_kind(SYMLINK):
        symlinks.setdefault(what.roots[number], number)
    linked = {what.roots[number] for number in what.of_kind(HARDLINK)}
    odd: list[dict[bytes, bytes]] = [{} for _ in range(roots)]
    longest = [b""] * roots
    for root, directory, names in _runs(entries):
        name = max(names, key=len)
        if len(name) > len(longest[root].rpartition(b"/")[2]):
            longest[root] = os.path.join(directory, name)
        if _ODD.search(b"/".join(names)):
            for name in names:
                for found in _ODD.findall(name):
                    odd[root].setdefault(_kind_of(found), os.path.join(directory, name))
    return [
        Needs(
            (size, entries[number].path if number >= 0 else b""),
            root in linked,
            entries[symlinks[root]].path if root in symlinks else None,
            [path for path in (longest[root], *odd[root].values()) if path],
        )
        for root, (size, number) in enumerate(largest)
    ]


def probe(target: bytes, place: bytes, needs: Needs, note: Path) -> FilesystemAbilities:
    """Try in ``place``, a directory on the file system where ``target`` is or will be, and remove
    what was made. Meanwhile the file ``note`` names what was made, for ``remove_left`` after a
    kill. MachineUnfit names what cannot be restored here at all. If nothing can be tried or noted,
    nothing is known, and refusals show during the restore."""
    trial = os.path.join(place, _TRIAL + secrets.token_hex(8).encode())
    with suppress(OSError):
        before = os.stat(place)
        note.write_bytes(trial)
        os.mkdir(trial, 0o700)
        try:
            return _probed(target, trial, needs)
        finally:
            shutil.rmtree(trial, ignore_errors=True)
            with suppress(OSError):  # torpor's folder may be gone
                note.unlink()
            with suppress(OSError):  # the file is somebody else's
                os.utime(place, ns=(before.st_atime_ns, before.st_mtime_ns))
    return EVERYTHING


def remove_left(note: Path) -> None:
    """Remove what a killed ``probe`` has left."""
    with suppress(OSError):
        trial = note.read_bytes()
        if os.path.basename(trial).startswith(_TRIAL):
            shutil.rmtree(trial, ignore_errors=True)
        note.unlink()


def check_cases(
    entries: Sequence[Entry], targets: Sequence[bytes], able: Sequence[FilesystemAbilities]
) -> None:
    """MachineUnfit where two names of a directory would be one file."""
    if all(one.cases for one in able):
        return
    seen: dict[tuple[int, bytes, str], bytes] = {}
    each = ((root, within, name) for root, within, names in _runs(entries) for name in names)
    for root, directory, name in each:
        other = seen.setdefault((root, directory, os.fsdecode(name).casefold()), name)
        if other != name and not able[root].cases:
            both = [repr(os.fsdecode(os.path.join(directory, one))) for one in (other, name)]
            raise MachineUnfit(
                f"{' and '.join(both)} would be one file in {os.fsdecode(targets[root])}, where "
                f"upper and lower case are the same: {_PLAIN_WORDS}"
            )


def _probed(target: bytes, trial: bytes, needs: Needs) -> FilesystemAbilities:
    file = os.path.join(trial, b"file")
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        _check_size(fd, target, *needs.largest)
        modes = all(_keeps_mode(fd, mode) for mode in (0o604, 0o751))
        times = [_kept_ns(fd, wanted) for wanted in (_TRIED_NS, _EARLIEST_NS, _LATEST_NS)]
    finally:
        os.close(fd)
    for path in needs.names:
        _check_name(trial, target, path)
    if needs.symlink is not None:
        try:
            os.symlink(b"file", os.path.join(trial, b"symlink"))
        except OSError as exc:
            raise _unfit(needs.symlink, "is a symlink", target, exc) from None
    links = True
    if needs.links:
        try:
            os.link(file, os.path.join(trial, b"link"))
        except OSError as exc:
            links = exc.errno not in NO_LINKS
    os.mkdir(os.path.join(trial, b"a"))
    cases = not os.path.lexists(os.path.join(trial, b"A"))
    tried, earliest, latest = times
    step = next((step for step in _STEPS_NS if _TRIED_NS - _TRIED_NS % step == tried), 1)
    return FilesystemAbilities(
        step,
        _EARLIEST_NS if earliest is None else earliest,
        _LATEST_NS if latest is None else latest,
        links,
        cases,
        modes,
    )


def _keeps_mode(fd: int, mode: int) -> bool:
    with suppress(OSError):
        os.fchmod(fd, mode)
        return stat.S_IMODE(os.fstat(fd).st_mode) == mode
    return False


def _kept_ns(fd: int, wanted_ns: int) -> int | None:
    """The time that a file has once it was given one; None where it is refused."""
    try:
        os.utime(fd, ns=(wanted_ns, wanted_ns))
    except (OSError, OverflowError):
        return None
    return os.fstat(fd).st_mtime_ns


def _check_size(fd: int, target: bytes, size: int, path: bytes) -> None:
    """Check a file size by a seek, which reserves no space: the kernel refuses a seek beyond the
    largest size."""
    try:
        os.lseek(fd, size, os.SEEK_SET)
    except OSError as exc:
        raise _unfit(path, f"has {size:,} bytes", target, exc) from None


def _check_name(trial: bytes, target: bytes, path: bytes) -> None:
    name = path.rpartition(b"/")[2]
    folder = os.path.join(trial, b"names-" + secrets.token_hex(4).encode())
    os.mkdir(folder, 0o700)
    within = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # relative to a descriptor: a whole path has a length limit of its own
        os.mkdir(name, 0o700, dir_fd=within)
        is_kept = [os.fsencode(there) for there in os.listdir(within)] == [name]
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise _unfit(path, "has a name", target, exc) from None
    finally:
        os.close(within)
    if not is_kept:
        raise MachineUnfit(
            f"{os.fsdecode(path)!r} would get another name in {os.fsdecode(target)}, whose file "
            f"system has no such names: {_PLAIN_WORDS}"
        )


def _unfit(path: bytes, has: str, target: bytes, exc: OSError) -> MachineUnfit:
    return MachineUnfit(
        f"{os.fsdecode(path)!r} {has}, which the file system of {os.fsdecode(target)} cannot hold "
        f"({exc.strerror}): {_PLAIN_WORDS}"
    )


def _kind_of(odd: bytes) -> bytes:
    """The kind of a name: the file system keeps all names of one kind, or none."""
    if odd[0] < 0x80:
        return odd
    try:
        odd.decode()
    except UnicodeDecodeError:
        return b"not UTF-8"
    return b"UTF-8"


def _runs(entries: Sequence[Entry]) -> Iterator[tuple[int, bytes, list[bytes]]]:
    """Root, directory and names of all entries except the roots; a directory may come more than
    once."""
    try:
        rows = [*Entries.of(entries).listed(bytearray(len(entries)))]
    except NotPlain:
        for entry in entries:
            directory, _, name = entry.path.rpartition(b"/")
            if name:
                yield entry.root, directory, [name]
        return
    for row in rows:
        if row.is_run:
            yield row.root, row.path, row.names.split(b"\0")
