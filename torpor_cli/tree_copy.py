"""Copies files and folders between two hosts over one pair of pipes, without a round trip a file.

The sender lists its entries; the receiver compares them with its disk and names what it wants, from
which byte on; then the bytes follow in one stream. One of the two runs on the machine, where this
file is sent as text: it imports Python's own library alone, and runs on Python 3.8.

A file is written beside its name and renamed when it is whole. What a broken line leaves beside a
big file is gone on with by the next copy of the same version, and removed by a copy of another one.
Nothing is written through a symlink below the target, whatever names the other side sends.

Why no `rsync` and no SFTP: images of markets often lack rsync, and so does Windows; with
`--partial` it goes on with the bytes of another version of a file, and with `--inplace` names one
that is not whole. OpenSSH's SFTP resolves each name again, so that a symlink that somebody makes
meanwhile is followed, has no lock, and needs five requests for each file (open, write, set times,
close, rename): over a line of 50 ms, 10,000 files take minutes unless hundreds are in flight.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from contextlib import suppress
from typing import IO, Any, Callable, Iterable, Iterator, NamedTuple  # noqa: UP035 - Python 3.8

CHUNK_BYTES = 1 << 20
LOCK_WAIT_S = 75.0
"""Seconds to wait for a file that an earlier connection of the same copy may still hold; more than
_STALLED_S."""
KEPT_BYTES = 1 << 20
"""Bytes of an unfinished file from which a copy that ended keeps it; a smaller one is removed."""
MOST_ENTRIES = 2_000_000
MOST_LIST_BYTES = 512 << 20
"""Most bytes of one list of the other side, which is held in memory."""
MOST_NAME = 4096
"""Most characters of a name, and of a symlink's target: Linux opens no longer path."""
_MOST_FRAME_BYTES = 16 << 20
_BATCH = 500
_LONGEST = 4000
_SHOWN = 20
"""Names that a report shows; the others are counted."""
_JUPYTER_S = 60
_ANSWER_S = 3
_QUIET_S = 1800
"""Seconds after which a machine's side that hears nothing ends: as a program of a login, it would
keep an idle machine awake."""
_STALLED_S = 60
"""Seconds after which it ends while the bytes of a file are on their way: the line is broken, and
the next connection wants to continue the file."""
_HEAD = struct.Struct(">cI")
_JSON, _DATA, _END, _ERROR = b"j", b"d", b"e", b"x"
_NO_COPY = "the other side sent what is no part of a copy"
_PART = re.compile(r"(\.torpor-[0-9a-f]{16})-[0-9a-f]{16}\.part")
"""The name of an unfinished file. The first number is a hash of the file's name, the second one of
its version."""
OLD_PART_S = 7 * 24 * 3600
"""Seconds after which unfinished files of earlier copies, of whatever file, are removed by the next
copy into their directory."""
_MODE = 0o777
"""The bits of a mode that a copy keeps. Without the set-user-id bits, no program gets its owner's
rights by being copied."""
_YOUNG = "somebody has changed it meanwhile"


class Refused(Exception):
    """The other side, or this one, has said in words why the copy cannot go on."""


class Broken(Exception):
    """The connection ended."""


class Entry(NamedTuple):
    """A file (f), directory (d) or symlink (l). ``name``: below the target, with slashes."""

    kind: str
    name: str
    mode: int
    size: int
    mtime_ns: int
    target: str


class Report(NamedTuple):
    """What a receiver did. ``newer``: files that were kept because the target's are newer.
    ``kept``: names that were neither replaced nor deleted for other reasons, with the reason.
    ``gone``: names that were deleted, or that a dry run would delete. Of names, the first few."""

    files: int
    bytes: int
    unchanged: int
    newer: list[str]
    newer_count: int
    kept: list[str]
    kept_count: int
    failed: list[str]
    failed_count: int
    gone: list[str]
    gone_count: int
    names: list[str]
    """In a dry run: the names that would be copied."""
    target: str


class Stream:
    """Frames of one kind, each a length and that many bytes. ``quiet_s``: the process ends where
    the other side neither sends nor takes anything for this long; 0: it waits without limit."""

    def __init__(self, reader: IO[bytes], writer: IO[bytes], quiet_s: int = 0) -> None:
        self._reader = reader
        self._writer = writer
        self._quiet_s = self._limit_s = quiet_s

    def write(self, kind: bytes, payload: bytes = b"") -> None:
        self._watch()
        try:
            self._writer.write(_HEAD.pack(kind, len(payload)))
            self._writer.write(payload)
        except (OSError, ValueError):
            raise self._why() from None

    def send(self, value: Any) -> None:
        self.write(_JSON, json.dumps(value).encode())

    def flush(self) -> None:
        self._watch()
        try:
            self._writer.flush()
        except (OSError, ValueError):
            raise self._why() from None

    def read(self) -> tuple[bytes, bytes]:
        kind, size = _HEAD.unpack(self._exactly(_HEAD.size))
        if size > _MOST_FRAME_BYTES or kind not in (_JSON, _DATA, _END, _ERROR):
            raise Refused(_NO_COPY)
        payload = self._exactly(size)
        if kind == _ERROR:
            raise Refused(payload[:_LONGEST].decode(errors="replace"))
        return kind, payload

    def send_list(self, values: list[Any]) -> None:
        for at in range(0, len(values), _BATCH):
            self.send(values[at : at + _BATCH])
        self.send([])

    def expect_list(self) -> list[Any]:
        values: list[Any] = []
        heard = 0
        while True:
            batch, size = self._expect()
            if not batch:
                return values
            if not isinstance(batch, list) or not all(map(_is_small, batch)):
                raise Refused(_NO_COPY)
            values += batch
            heard += size
            if len(values) > MOST_ENTRIES:
                raise Refused(f"more than {MOST_ENTRIES:,} files and directories in one copy")
            if heard > MOST_LIST_BYTES:
                raise Refused(f"the names in one copy have more than {MOST_LIST_BYTES:,} bytes")

    def expect(self) -> Any:
        """The next value. Refused for anything else."""
        return self._expect()[0]

    def _expect(self) -> tuple[Any, int]:
        """The next value, and its bytes."""
        kind, payload = self.read()
        if kind == _JSON:
            with suppress(ValueError, RecursionError):
                return json.loads(payload), len(payload)
        raise Refused(_NO_COPY)

    def refuse(self, why: str) -> None:
        with suppress(Broken, Refused):
            self.write(_ERROR, why.encode(errors="replace")[:_LONGEST])
            self.flush()

    def hurry(self, expected: bool) -> None:
        """Whether bytes of a file are expected now."""
        self._limit_s = min(_STALLED_S, self._quiet_s) if expected else self._quiet_s
        self._watch()

    def _watch(self) -> None:
        if self._limit_s:
            signal.alarm(self._limit_s)

    def _exactly(self, size: int) -> bytes:
        self._watch()
        data = self._reader.read(size)
        if len(data) != size:
            raise Broken("the connection ended")
        return data

    def _why(self) -> Exception:
        """The error of a write that failed: the other side may have said why."""
        try:
            while True:
                self.read()
        except (Broken, Refused) as error:
            return error


# -- the sender


class Source(NamedTuple):
    """What is sent. ``name``: what the path is called at the target; empty for the contents of a
    folder. ``only``: names below the folder, where not all of it is sent."""

    path: str
    name: str
    only: list[str] | None = None


def send(
    stream: Stream,
    sources: list[Source],
    *,
    moved: Callable[[int, int], None] = lambda done, total: None,
    protected: Callable[[list[Entry]], set[str]] = lambda there: set(),
) -> Report:
    """Send what the receiver lacks. ``protected``: which names stay of what the receiver has, and
    would delete, or replace although it is newer."""
    skipped: list[str] = []
    found = [one for source in sources for one in found_in(source, skipped)]
    stream.send_list([entry for _, entry in found])
    stream.send([skipped[:_SHOWN], len(skipped)])
    stream.flush()
    there = [_checked(fields, _MODE) for fields in stream.expect_list()]
    kept = protected(there) if there else set()
    stream.send_list([index for index, entry in enumerate(there) if entry.name not in kept])
    stream.flush()
    wanted = [_wish(one, found) for one in stream.expect_list()]
    total = sum(found[index][1].size - offset for index, offset in wanted)
    done = 0
    for index, offset in wanted:
        path, entry = found[index]
        done = _send_file(stream, path, entry, offset, lambda now: moved(now, total), done)
    stream.flush()
    return _report(stream.expect())


def _wish(value: Any, found: list[tuple[str, Entry]]) -> tuple[int, int]:
    """Which file the receiver wants, and from which byte on."""
    if isinstance(value, list) and [type(one) for one in value] == [int, int]:
        index, offset = value
        if 0 <= index < len(found) and 0 <= offset <= found[index][1].size:
            return index, offset
    raise Refused(_NO_COPY)


def _is_small(value: Any) -> bool:
    """Whether a value may be in a list: a name, a number, or an entry of a few of these."""
    parts = value if isinstance(value, list) else [value]
    return len(parts) <= len(Entry._fields) and all(
        isinstance(one, int) or (isinstance(one, str) and len(one) <= MOST_NAME) for one in parts
    )


def _report(value: Any) -> Report:
    kinds = [int, int, int, *[list, int] * 4, list, str]
    if not isinstance(value, list) or [type(one) for one in value] != kinds:
        raise Refused(_NO_COPY)
    if not all(isinstance(name, str) for one in value if isinstance(one, list) for name in one):
        raise Refused(_NO_COPY)
    short: list[Any] = [_first_few(one) if isinstance(one, list) else one for one in value]
    return Report(*short)


def _first_few(names: list[Any]) -> list[str]:
    """The first few of the names that the other side sent, as many as a report shows."""
    return [str(name)[:_LONGEST] for name in names[:_SHOWN]]


def found_in(source: Source, skipped: list[str]) -> Iterator[tuple[str, Entry]]:
    """The entries of a source with their paths, a directory before what is in it."""
    if source.only is not None:
        for name in sorted(source.only):
            yield from _below(os.path.join(source.path, name), name, skipped)
        return
    if not source.name:
        yield from _in_folder(source.path, "", skipped)
        return
    # A symlink that the user named is followed.
    yield from _below(os.path.realpath(source.path), source.name, skipped)


def _below(path: str, name: str, skipped: list[str]) -> Iterator[tuple[str, Entry]]:
    try:
        info = os.lstat(path)
    except OSError as error:
        # otherwise the entry was deleted meanwhile
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            skipped.append(f"{name} ({error.strerror})")
        return
    mode = stat.S_IMODE(info.st_mode) & _MODE
    if stat.S_ISREG(info.st_mode):
        yield path, Entry("f", name, mode, info.st_size, info.st_mtime_ns, "")
    elif stat.S_ISLNK(info.st_mode):
        yield path, Entry("l", name, mode, 0, info.st_mtime_ns, os.readlink(path))
    elif stat.S_ISDIR(info.st_mode):
        yield path, Entry("d", name, mode, 0, info.st_mtime_ns, "")
        yield from _in_folder(path, f"{name}/", skipped)
    else:
        skipped.append(f"{name} (a device, a pipe or a socket)")


def _in_folder(path: str, prefix: str, skipped: list[str]) -> Iterator[tuple[str, Entry]]:
    """The entries of a folder, without what earlier copies have left beside files."""
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        skipped.append(f"{prefix or path} ({error.strerror})")
        return
    for name in names:
        if not _PART.fullmatch(name):
            yield from _below(os.path.join(path, name), prefix + name, skipped)


def _send_file(
    stream: Stream,
    path: str,
    entry: Entry,
    offset: int,
    moved: Callable[[int], None],
    done: int,
) -> int:
    """Send as many bytes as were listed: a log that grows meanwhile is sent as it was. If the file
    is not whole, the frame at the end says why."""
    left = entry.size - offset
    try:
        # A pipe that took the file's place would block the read.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb", buffering=0) as opened:
            is_file = stat.S_ISREG(os.fstat(fd).st_mode)
            opened.seek(offset if is_file else 0)
            while is_file and left and (data := opened.read(min(left, CHUNK_BYTES))):
                stream.write(_DATA, data)
                left -= len(data)
                done += len(data)
                moved(done)
            changed = os.fstat(fd).st_mtime_ns != entry.mtime_ns
    except OSError as error:
        stream.write(_END, (error.strerror or str(error)).encode())
        return done
    why = "it became shorter while it was read" if left else ""
    if changed and offset and not why:
        why = "it changed since an earlier copy of it was broken off"
    stream.write(_END, why.encode())
    return done


# -- the receiver


class Target(NamedTuple):
    """Where a copy goes: the contents of ``base``, with ``rename`` in place of the first part of
    the entries' names."""

    base: str
    rename: str = ""


def target_for(path: str, count: int, *, contents: bool) -> Target:
    """The target, chosen as `cp` does: below a directory that exists, else under that name.
    ``count``: how many sources there are."""
    if contents or count > 1 or path.endswith("/") or os.path.isdir(path):
        return Target(path)
    above, name = os.path.split(os.path.abspath(path))
    return Target(above, name)


class Wishes(NamedTuple):
    overwrite: bool = False
    delete: bool = False
    dry_run: bool = False
    inner_links: int | None = None
    """Leave out symlinks that lead out of the copied tree: out of the first ``inner_links`` parts
    of their names. None: all links are copied as they are."""
    modes: int = _MODE
    """The bits of a mode that files and directories get."""
    replace: bool = True
    """Whether a file is replaced by another one of its name."""
    before_ns: int = 0
    """Delete a file, and replace a newer one, only if it was last changed before this moment of the
    target's clock: a snapshot that was begun at that moment may lack later changes. 0: at any
    moment."""


def receive(
    stream: Stream,
    target: Target,
    wishes: Wishes,
    *,
    moved: Callable[[int, int], None] = lambda done, total: None,
    ignored: Callable[[list[Entry]], set[str]] = lambda entries: set(),
    protected: Callable[[list[str]], set[str]] = lambda names: set(),
    names: set[str] | None = None,
    confirm: Callable[[list[str]], None] = lambda names: None,
) -> Report:
    """Bring the target to what the sender lists. ``ignored``: which names are not copied.
    ``protected``: which names that only the target has are not deleted. ``names``: what the sender
    was asked for: it may send nothing beside these; None: any names, or any single one where the
    target renames it. ``confirm``: raises where these names are not to be deleted, before anything
    is copied."""
    entries, failed = _listed(stream, target, wishes.modes, names)
    left_out = ignored(entries)
    chosen = _chosen(entries, left_out)
    if wishes.delete and all(entries[index].kind == "d" for index in chosen):
        raise Refused("there is no file to copy, and --delete would delete all of the target")
    if not wishes.dry_run:
        os.makedirs(target.base, exist_ok=True)
    with _Disk(target.base, failed) as disk:
        plan = _Plan(disk, entries, chosen, wishes)
        extra = disk.not_listed({entry.name for entry in entries}) if wishes.delete else []
        spared = protected([entry.name for entry in extra]) if extra else set()
        extra = [entry for entry in extra if entry.name not in spared]
        stream.send_list([*extra, *plan.over.values()])
        stream.flush()
        allowed = {index for index in stream.expect_list() if type(index) is int}
        going = [entry for index, entry in enumerate(extra) if index in allowed]
        at = enumerate(plan.over, len(extra))
        plan.leave({index for position, index in at if position not in allowed})
        if going and not wishes.dry_run:
            confirm([entry.name for entry in going])
        wanted = [] if wishes.dry_run else plan.wanted
        stream.send_list(wanted)
        stream.flush()
        if not wishes.dry_run:
            disk.remove_parts(
                [entries[index] for index in chosen],
                {entries[index].name for index, _ in wanted},
            )
            for entry in plan.folders:
                disk.make(entry)
        total = sum(entries[index].size - offset for index, offset in wanted)
        files = done = 0
        for index, offset in wanted:
            entry = entries[index]
            faults = len(failed)
            whole, done = disk.write(
                stream, entry, offset, plan.before[index], lambda now: moved(now, total), done
            )
            if not whole and disk.holds(entry):  # another copy of the same file was faster
                del failed[faults:]
                whole = True
            files += whole
        gone = [entry.name for entry in going]
        if not wishes.dry_run:
            for index in plan.links:
                faults = len(failed)
                whole = disk.link(entries[index], plan.before[index])
                if not whole and disk.holds(entries[index]):
                    del failed[faults:]
                    whole = True
                files += whole
            for entry in reversed(plan.folders):
                disk.finish(entry)
            gone = [] if failed else disk.delete(going, wishes.before_ns, plan.kept)
        would = [*plan.wanted, *((index, 0) for index in plan.links)] if wishes.dry_run else []
        report = Report(
            files=len(would) or files,
            bytes=sum(entries[index].size for index, _ in would) or done,
            unchanged=plan.unchanged,
            newer=plan.newer[:_SHOWN],
            newer_count=len(plan.newer),
            kept=plan.kept[:_SHOWN],
            kept_count=len(plan.kept),
            failed=failed[:_SHOWN],
            failed_count=len(failed),
            gone=gone[:_SHOWN],
            gone_count=len(gone),
            names=[entries[index].name for index, _ in would[:_SHOWN]],
            target=os.path.join(target.base, target.rename).rstrip("/"),
        )
    stream.send(report)
    stream.flush()
    return report


def _chosen(entries: list[Entry], left_out: set[str]) -> list[int]:
    """The entries without those that are left out, and without directories of which everything is
    left out."""
    hollow = _above(left_out)
    rest = [entry.name for entry in entries if entry.kind != "d" and entry.name not in left_out]
    hollow -= _above(rest)
    return [
        at
        for at, entry in enumerate(entries)
        if entry.name not in left_out and (entry.kind != "d" or entry.name not in hollow)
    ]


def _above(names: Iterable[str]) -> set[str]:
    """The directories that contain these names."""
    found: set[str] = set()
    for name in names:
        while (name := name.rpartition("/")[0]) and name not in found:
            found.add(name)
    return found


def _listed(
    stream: Stream, target: Target, modes: int, names: set[str] | None
) -> tuple[list[Entry], list[str]]:
    entries = [_checked(fields, modes) for fields in stream.expect_list()]
    tops = {entry.name.partition("/")[0] for entry in entries}
    strange = set() if names is None else tops - names
    if target.rename and len(tops) > 1:
        strange = tops
    if strange:
        raise Refused(f"the other side sent what was not asked for: {min(strange)!r}")
    if target.rename:
        (top,) = tops or {""}
        entries = [one._replace(name=target.rename + one.name[len(top) :]) for one in entries]
    said = stream.expect()
    if not isinstance(said, list) or [type(one) for one in said] != [list, int]:
        raise Refused(_NO_COPY)
    failed = _first_few(said[0])
    return entries, failed + ["more"] * min(MOST_ENTRIES, said[1] - len(failed))


def _checked(fields: Any, modes: int) -> Entry:
    """The entry, if its name stays below the target. The other side may be hostile."""
    try:
        entry = Entry(*fields)
        parts = entry.name.split("/")
        fits = (
            entry.kind in ("f", "d", "l")
            and "\0" not in entry.name + entry.target
            and not {"", ".", ".."} & set(parts)
            and isinstance(entry.mode, int)
            and isinstance(entry.mtime_ns, int)
            and abs(entry.mtime_ns) < 1 << 62
            and isinstance(entry.size, int)
            and 0 <= entry.size < 1 << 60
            and (entry.kind != "l" or bool(entry.target))
            and os.fsencode(entry.name + entry.target) is not None
        )
    except (AttributeError, TypeError, ValueError):
        raise Refused(_NO_COPY) from None
    if not fits:
        raise Refused(f"the other side sent a name that leads out of the target: {entry.name!r}")
    return entry._replace(mode=entry.mode & modes & _MODE)


class _Plan:
    """The action for each entry, after a look at the target. ``over``: what stands there and is
    newer, by the number of the entry that would replace it."""

    def __init__(
        self, disk: _Disk, entries: list[Entry], chosen: list[int], wishes: Wishes
    ) -> None:
        self.wanted: list[tuple[int, int]] = []
        self.links: list[int] = []
        self.folders: list[Entry] = []
        self.newer: list[str] = []
        self.kept: list[str] = []
        self.over: dict[int, Entry] = {}
        self.unchanged = 0
        self.before: dict[int, os.stat_result | None] = {}
        for index in chosen:
            entry = entries[index]
            try:
                there = disk.look(entry.name)
            except OSError as error:
                disk.fails(entry.name, error)
                continue
            if entry.kind == "d":
                if there is None:
                    self.folders.append(entry)
                elif not stat.S_ISDIR(there.st_mode):
                    disk.failed.append(f"{entry.name} (there, it is no directory)")
                continue
            if there is not None and stat.S_ISDIR(there.st_mode):
                disk.failed.append(f"{entry.name} (there, it is a directory)")
                continue
            if entry.kind == "l" and leads_out(entry.name, entry.target, wishes.inner_links):
                disk.failed.append(f"{entry.name} (a link out of the copy, to {entry.target})")
                continue
            if there is not None and disk.has(entry, there):
                self.unchanged += 1
                other = (there.st_mode ^ entry.mode) & wishes.modes & _MODE
                if entry.kind == "f" and other and wishes.replace and not wishes.dry_run:
                    disk.finish(entry)
                continue
            if there is not None and not wishes.replace:
                self.kept.append(f"{entry.name} (it is there)")
                continue
            if there is not None and there.st_mtime_ns > entry.mtime_ns:
                if not wishes.overwrite:
                    self.newer.append(entry.name)
                    continue
                if wishes.before_ns and _is_young(there, wishes.before_ns):
                    self.kept.append(f"{entry.name} ({_YOUNG})")
                    continue
                self.over[index] = disk.entry(entry.name, there)
            self.before[index] = there
            if entry.kind == "l":
                self.links.append(index)
            else:
                self.wanted.append((index, disk.begun(entry)))

    def leave(self, numbers: set[int]) -> None:
        """Replace none of these entries."""
        self.wanted = [(index, offset) for index, offset in self.wanted if index not in numbers]
        self.links = [index for index in self.links if index not in numbers]


def leads_out(name: str, target: str, top: int | None = 0) -> bool:
    """Whether a symlink may lead out of the first ``top`` parts of its name. ``..`` after a name
    may: that name may be a symlink itself."""
    if top is None:
        return False
    parts = [part for part in target.split("/") if part not in ("", ".")]
    up = 0
    while up < len(parts) and parts[up] == "..":
        up += 1
    return target.startswith("/") or ".." in parts[up:] or up > name.count("/") - top


class _Disk:
    """The target's files, by names below it. No symlink on the way is followed."""

    def __init__(self, base: str, failed: list[str]) -> None:
        self._base = base
        self._fd = -1
        self._above: str | None = None
        self._above_fd = -1
        self._unlinked: set[tuple[int, int]] = set()
        """Files that lost one of their names here, which changes the time of their other names,
        too."""
        self.failed = failed

    def __enter__(self) -> _Disk:
        with suppress(FileNotFoundError):  # the target of a dry run may not exist
            self._fd = os.open(self._base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return self

    def __exit__(self, *_: object) -> None:
        self._forget()
        if self._fd >= 0:
            os.close(self._fd)

    def fails(self, name: str, error: OSError) -> None:
        """Note a failure. A full disk ends the copy, because each further file would fail, too."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(error.errno, error.strerror, os.path.join(self._base, name)) from error
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            why = "there, a directory above it is a symlink or a file"
        else:
            why = error.strerror or str(error)
        self.failed.append(f"{name} ({why})")

    def look(self, name: str) -> os.stat_result | None:
        try:
            folder, last = self._at(name)
            return os.stat(last, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def has(self, entry: Entry, there: os.stat_result) -> bool:
        """Whether the target has the file already, whatever its mode."""
        folder, last = self._at(entry.name)
        if entry.kind == "l":
            return stat.S_ISLNK(there.st_mode) and os.readlink(last, dir_fd=folder) == entry.target
        same = (there.st_size, there.st_mtime_ns) == (entry.size, entry.mtime_ns)
        return stat.S_ISREG(there.st_mode) and same

    def holds(self, entry: Entry) -> bool:
        """Whether the target has the file by now."""
        try:
            there = self.look(entry.name)
            return there is not None and self.has(entry, there)
        except OSError:
            return False

    def begun(self, entry: Entry) -> int:
        """How many bytes of this version of a file an earlier copy has left at the target."""
        try:
            folder, _ = self._at(entry.name)
            left = os.stat(_part_of(entry), dir_fd=folder, follow_symlinks=False)
        except OSError:
            return 0
        mine = stat.S_ISREG(left.st_mode) and left.st_uid == os.geteuid() and left.st_nlink == 1
        return left.st_size if mine and KEPT_BYTES <= left.st_size <= entry.size else 0

    def remove_parts(self, entries: list[Entry], wanted: set[str]) -> None:
        """Remove what earlier copies have left of other versions of these files, and, in their
        directories, what is older than OLD_PART_S. Files that a running copy holds stay, and so do
        those of the ``wanted`` names."""
        names: dict[str, set[str]] = {}
        keep: dict[str, set[str]] = {}
        for entry in entries:
            if entry.kind == "d":
                names.setdefault(entry.name, set())
                continue
            above, _, last = entry.name.rpartition("/")
            names.setdefault(above, set()).add(f".torpor-{_digest(last)}")
            if entry.name in wanted:
                keep.setdefault(above, set()).add(_part_of(entry))
        for above, mine in names.items():
            with suppress(OSError):  # the directory does not exist yet, or is something else
                folder, _ = self._at(f"{above}/." if above else ".")
                for part in os.listdir(folder):
                    found = _PART.fullmatch(part)
                    if found and part not in keep.get(above, ()):
                        _remove_part(part, folder, always=found[1] in mine)

    def make(self, entry: Entry) -> None:
        try:
            folder, last = self._at(entry.name, make=True)
            os.mkdir(last, entry.mode | stat.S_IRWXU, dir_fd=folder)
        except FileExistsError:
            return
        except OSError as error:
            self.fails(entry.name, error)

    def finish(self, entry: Entry) -> None:
        """Give a file that is there already its mode, and a new directory its mode once everything
        is in it."""
        try:
            folder, last = self._at(entry.name)
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(last, flags, dir_fd=folder)
            try:
                os.fchmod(fd, entry.mode)
            finally:
                os.close(fd)
        except OSError as error:
            self.fails(entry.name, error)

    def write(
        self,
        stream: Stream,
        entry: Entry,
        offset: int,
        before: os.stat_result | None,
        moved: Callable[[int], None],
        done: int,
    ) -> tuple[bool, int]:
        """Write the rest of a file from the stream; returns whether the file is whole under its
        name, and all bytes until now. ``before``: what stood there when it was compared."""
        fd = -1
        written = offset
        whole = False
        try:
            try:
                folder, _ = self._at(entry.name, make=True)
                fd = _opened_part(_part_of(entry), folder, offset)
            except OSError as error:
                self.fails(entry.name, error)
            stream.hurry(True)
            while (frame := stream.read())[0] == _DATA:
                data = frame[1]
                done += len(data)
                if written + len(data) > entry.size:
                    raise Refused("the other side sent more of a file than it had said")
                if fd >= 0:
                    try:
                        _write_all(fd, data)
                    except OSError as error:
                        self.fails(entry.name, error)
                        os.close(fd)
                        fd = -1
                written += len(data)
                moved(done)
            if frame[0] != _END:
                raise Refused(_NO_COPY)
            if fd < 0:
                return False, done
            if frame[1]:
                self.failed.append(f"{entry.name} ({frame[1].decode(errors='replace')})")
                written = 0
            elif written != entry.size:
                raise Refused("the other side sent less of a file than it had said")
            else:
                whole = self._name(entry, fd, before)
                written = 0
            return whole, done
        finally:
            stream.hurry(False)
            if fd >= 0:
                os.close(fd)
                if not whole and written < KEPT_BYTES:
                    with suppress(OSError):
                        folder, _ = self._at(entry.name)
                        os.unlink(_part_of(entry), dir_fd=folder)

    def _name(self, entry: Entry, fd: int, before: os.stat_result | None) -> bool:
        """Give a whole file its name, unless somebody has written there meanwhile."""
        try:
            folder, last = self._at(entry.name)
            if self._changed(entry.name, before):
                self.failed.append(f"{entry.name} (somebody has written there meanwhile)")
                return False
            os.fchmod(fd, entry.mode)
            os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
            self._rename(_part_of(entry), last, folder, before)
        except OSError as error:
            self.fails(entry.name, error)
            return False
        return True

    def _rename(self, part: str, last: str, folder: int, before: os.stat_result | None) -> None:
        os.rename(part, last, src_dir_fd=folder, dst_dir_fd=folder)
        if before is not None:
            self._unlinked.add((before.st_dev, before.st_ino))

    def _changed(self, name: str, before: os.stat_result | None) -> bool:
        now = self.look(name)
        if now is None or before is None:
            return now is not before
        return (now.st_ino, now.st_mtime_ns, now.st_size) != (
            before.st_ino,
            before.st_mtime_ns,
            before.st_size,
        )

    def link(self, entry: Entry, before: os.stat_result | None) -> bool:
        """Make a symlink, after all files, so that no file is written through it."""
        part = _part_of(entry)
        try:
            folder, last = self._at(entry.name, make=True)
            if self._changed(entry.name, before):
                self.failed.append(f"{entry.name} (somebody has written there meanwhile)")
                return False
            with suppress(FileNotFoundError):
                os.unlink(part, dir_fd=folder)
            os.symlink(entry.target, part, dir_fd=folder)
            times = (entry.mtime_ns, entry.mtime_ns)
            os.utime(part, ns=times, dir_fd=folder, follow_symlinks=False)
            self._rename(part, last, folder, before)
        except OSError as error:
            self.fails(entry.name, error)
            return False
        return True

    def entry(self, name: str, there: os.stat_result) -> Entry:
        """What stands at the name, which is no directory."""
        kind, to = "f", ""
        if stat.S_ISLNK(there.st_mode):
            folder, last = self._at(name)
            kind, to = "l", os.readlink(last, dir_fd=folder)
        return Entry(kind, name, there.st_mode & _MODE, there.st_size, there.st_mtime_ns, to)

    def not_listed(self, listed: set[str]) -> list[Entry]:
        """What the target has and the sender has not listed, deepest first, with everything in such
        directories. Parents of listed entries stay."""
        keep = listed | _above(listed)
        if self._fd < 0:
            return []
        here = [entry for _, entry in _in_folder(self._base, "", [])]
        return [entry for entry in reversed(here) if entry.name not in keep]

    def delete(self, entries: list[Entry], before_ns: int, kept: list[str]) -> list[str]:
        """Delete these names; returns the deleted ones. A directory stays if something in it stays.
        Files that were changed since they were listed, or at ``before_ns`` or later, are added to
        ``kept``."""
        gone = []
        for entry in entries:
            name = entry.name
            try:
                folder, last = self._at(name)
                info = os.stat(last, dir_fd=folder, follow_symlinks=False)
                file = (info.st_dev, info.st_ino)
                young = before_ns and file not in self._unlinked and _is_young(info, before_ns)
                if entry.kind != "d" and (young or not self.has(entry, info)):
                    kept.append(f"{name} ({_YOUNG})")
                    continue
                if entry.kind == "d":
                    self._forget()
                    folder, last = self._at(name)
                    os.rmdir(last, dir_fd=folder)
                else:
                    os.unlink(last, dir_fd=folder)
                    self._unlinked.add(file)
                gone.append(name)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
                    self.fails(name, error)
        return gone

    def _at(self, name: str, *, make: bool = False) -> tuple[int, str]:
        """The open directory that contains the name, and the name's last part."""
        above, _, last = name.rpartition("/")
        if self._fd < 0:
            raise FileNotFoundError(errno.ENOENT, "it is not there", self._base)
        if not above:
            return self._fd, last
        if above != self._above:
            self._forget()
            self._above_fd = self._opened(above.split("/"), make)
            self._above = above
        return self._above_fd, last

    def _opened(self, parts: list[str], make: bool) -> int:
        fd = os.dup(self._fd)
        try:
            for part in parts:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(part, dir_fd=fd)
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                below = os.open(part, flags, dir_fd=fd)
                os.close(fd)
                fd = below
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _forget(self) -> None:
        if self._above_fd >= 0:
            os.close(self._above_fd)
        self._above, self._above_fd = None, -1


def _is_young(there: os.stat_result, before_ns: int) -> bool:
    """Whether the file was changed at that moment or later, by the time of its inode's change,
    which nobody can set (`cp -p` sets only the time of the content)."""
    return max(there.st_mtime_ns, there.st_ctime_ns) >= before_ns


def _part_of(entry: Entry) -> str:
    """The name under which a version of a file is written: beside the file's own, so that the next
    copy finds it again."""
    name = entry.name.rpartition("/")[2]
    version = f"{name}\0{entry.size}\0{entry.mtime_ns}\0{entry.target}"
    return f".torpor-{_digest(name)}-{_digest(version)}.part"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]


def _opened_part(part: str, folder: int, offset: int) -> int:
    """The unfinished file, locked by this copy and of ``offset`` bytes."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_APPEND
    fd = os.open(part, flags, 0o600, dir_fd=folder)
    try:
        _lock(fd)
        # Another copy may have renamed or removed the file between the two calls.
        held = os.fstat(fd)
        mine = held.st_nlink == 1 and _is_at(part, folder, held) and held.st_size >= offset
        if mine:
            os.ftruncate(fd, offset)
    except BaseException:
        os.close(fd)
        raise
    if not mine:
        os.close(fd)
        raise OSError(errno.EBUSY, "another copy is writing it")
    return fd


def _remove_part(part: str, folder: int, *, always: bool) -> None:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with suppress(OSError):  # somebody else's file, or one that another copy holds
        fd = os.open(part, flags, dir_fd=folder)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = os.fstat(fd)
            mine = stat.S_ISREG(held.st_mode) and held.st_uid == os.geteuid()
            if mine and (always or time.time() - held.st_mtime > OLD_PART_S):
                os.unlink(part, dir_fd=folder)
        finally:
            os.close(fd)


def _is_at(name: str, folder: int, held: os.stat_result) -> bool:
    with suppress(FileNotFoundError):
        now = os.stat(name, dir_fd=folder, follow_symlinks=False)
        return (now.st_ino, now.st_dev) == (held.st_ino, held.st_dev)
    return False


def _lock(fd: int) -> None:
    """Hold the file alone, where the file system has locks."""
    until = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                raise OSError(errno.EBUSY, "another copy is writing it") from None
            time.sleep(0.2)
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL):
                raise
            return
        else:
            return


def _write_all(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


# -- on the machine


def place(path: str, roots: list[str]) -> str:
    """An absolute path. A relative one is below the workspace's first directory."""
    slash = "/" if path.endswith("/") else ""
    whole = os.path.join(os.path.expanduser(roots[0]), os.path.expanduser(path))
    return os.path.normpath(whole) + (slash if whole != "/" else "")


def is_inside(path: str, roots: list[str]) -> bool:
    """Whether the path is a directory of the workspace or below one, with symlinks followed."""
    real = os.path.realpath(path)
    return any(
        real == root or real.startswith(f"{root.rstrip('/')}/")
        for root in (os.path.realpath(os.path.expanduser(one)) for one in roots)
    )


def serve(stream: Stream) -> None:
    """Do what the first value asks for. Errors are sent as text."""
    asked = stream.expect()
    try:
        _DOES[asked["do"]](stream, asked)
        stream.flush()
    except Refused as error:
        stream.refuse(str(error))
    except OSError as error:
        stream.refuse(f"{error.filename or 'it'}: {error.strerror}")


def _serve_sending(stream: Stream, asked: dict[str, Any]) -> None:
    paths = [place(path, asked["roots"]) for path in asked["paths"]]
    for path in paths:
        if not os.path.exists(path):
            raise Refused(f"{path} is not there")
        if asked["contents"] and not os.path.isdir(path):
            raise Refused(f"{path} is no directory")
    send(stream, [Source(path, "" if asked["contents"] else name_of(path)) for path in paths])


def _serve_receiving(stream: Stream, asked: dict[str, Any]) -> None:
    target, where = _target_of(asked)
    if asked.get("where", where) != where:
        raise Refused(f"{asked['where']} has become {where}: nothing was copied")
    receive(stream, target, Wishes(**asked["wishes"]))


def _serve_looking(stream: Stream, asked: dict[str, Any]) -> None:
    """Send where a copy would go, without symlinks, with the workspace's directories and the
    time."""
    where = _target_of(asked)[1]
    roots = [os.path.realpath(os.path.expanduser(root)) for root in asked["roots"]]
    stream.send([time.time_ns(), where, roots])


def _target_of(asked: dict[str, Any]) -> tuple[Target, str]:
    """The target, and its path without symlinks. Refused for a target to which nothing may be
    copied."""
    roots = asked["roots"]
    path = place(asked["path"], roots)
    target = target_for(path, asked["count"], contents=asked["contents"])
    where = os.path.join(target.base, target.rename)
    inside = is_inside(where, roots)
    if not asked["outside"] and not inside:
        raise Refused(
            f"{where} is in no directory of the workspace ({', '.join(roots)}), so no snapshot "
            "would have it: choose another target, or add --outside"
        )
    delete = asked["wishes"].get("delete")
    if delete and any(is_inside(os.path.expanduser(root), [where]) for root in roots):
        raise Refused(
            f"{where} holds a whole directory of the workspace, and --delete would delete all of "
            "it that is not copied: name a folder below it"
        )
    if delete and not inside:
        raise Refused(
            f"{where} is in no directory of the workspace, so no snapshot has what --delete would "
            "delete there: leave --delete out, and delete it on the machine"
        )
    return target, os.path.realpath(where)


def _serve_place(stream: Stream, asked: dict[str, Any]) -> None:
    stream.send(place(asked["path"], asked["roots"]))


def _serve_jupyter(stream: Stream, asked: dict[str, Any]) -> None:
    stream.send(_jupyter(asked["roots"]))


_DOES: dict[str, Callable[[Stream, dict[str, Any]], None]] = {
    "send": _serve_sending,
    "receive": _serve_receiving,
    "look": _serve_looking,
    "place": _serve_place,
    "jupyter": _serve_jupyter,
}


def name_of(path: str) -> str:
    """The name of a copy of the path."""
    name = os.path.basename(path.rstrip("/"))
    name = name if name not in ("", ".", "..") else os.path.basename(os.path.realpath(path))
    if not name:
        raise Refused("/ cannot be copied as a whole: name a directory")
    return name


def _jupyter(roots: list[str]) -> dict[str, Any]:
    """The running Jupyter server that was started last; starts one where none runs."""
    if found := _running_jupyter():
        return found
    programs = [shutil.which(name) for name in ("jupyter-lab", "jupyter-notebook")]
    program = next(filter(None, programs), None)
    if program is None:
        raise Refused("no Jupyter server runs there, and none is installed in the login's PATH")
    root = os.path.expanduser(roots[0])
    argv = [program, "--no-browser", "--ip=127.0.0.1"]
    argv += ["--allow-root"] if os.geteuid() == 0 else []
    started = subprocess.Popen(
        argv,
        cwd=root if os.path.isdir(root) else os.path.expanduser("~"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    until = time.monotonic() + _JUPYTER_S
    while time.monotonic() < until:
        if found := _running_jupyter():
            return found
        if started.poll() is not None:
            raise Refused(
                f"{program} ended with status {started.returncode}: run it there to see why"
            )
        time.sleep(0.2)
    raise Refused(f"{program} was started, and has not said its port within {_JUPYTER_S} s")


def _running_jupyter() -> dict[str, Any] | None:
    data = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    data = os.environ.get("JUPYTER_DATA_DIR") or os.path.join(data, "jupyter")
    folder = os.environ.get("JUPYTER_RUNTIME_DIR") or os.path.join(data, "runtime")
    found: list[tuple[float, dict[str, Any]]] = []
    for name in os.listdir(folder) if os.path.isdir(folder) else []:
        if not re.fullmatch(r"(jpserver|nbserver)-\d+\.json", name):
            continue
        path = os.path.join(folder, name)
        with suppress(OSError, ValueError, KeyError, TypeError):  # a server that has ended
            with open(path, encoding="utf-8") as opened:
                said = json.load(opened)
            os.kill(said["pid"], 0)
            socket.create_connection(("localhost", said["port"]), _ANSWER_S).close()
            wanted = {"port": said["port"], "token": said["token"], "base_url": said["base_url"]}
            found.append((os.stat(path).st_mtime, wanted))
    return max(found, key=lambda one: one[0])[1] if found else None


def main() -> int:
    """Serve whoever has started this, over standard input and output."""
    try:
        serve(Stream(sys.stdin.buffer, sys.stdout.buffer, _QUIET_S))
    except Broken:  # the other side has gone
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
