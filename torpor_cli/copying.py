"""Copies between this host and a workspace's machine: `torpor cp`, `push` and `pull`.

The bytes go through OpenSSH, which tree_copy.py is sent through, too. Of a sleeping workspace, the
newest snapshot is read; nothing is written into it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import IO, TYPE_CHECKING, Annotated, Any, Final, NamedTuple, TypeVar, cast

from cyclopts import Parameter

from deployments.terminal import say
from torpor.shared.errors import (
    InvalidInput,
    MachineError,
    MachineUnreachable,
    TorporError,
    WorkspaceAsleep,
    WorkspaceAwake,
    WorkspaceBusy,
)
from torpor.shared.format.git_names import is_head, is_of_git
from torpor.shared.plain_text import plain
from torpor.shared.values import MachineId
from torpor.shared.wire.activity import OWN_COPY
from torpor_cli import git_rules, machines, programs, tree_copy
from torpor_cli.exit_codes import FAILED, REFUSED
from torpor_cli.output import quiet, shown_progress
from torpor_cli.question import confirm
from torpor_cli.server import connected
from torpor_cli.tree_copy import Broken, Entry, Refused, Report, Source, Stream, Target, Wishes

if TYPE_CHECKING:
    from torpor.control.upkeep.differences import ListedEntry

Flag = Annotated[bool, Parameter(negative=())]
AnswerT = TypeVar("AnswerT")

TRIES: Final = 6
"""How often in a row a connection may break without having moved a byte."""
_PAUSE_S: Final = 2.0
"""Seconds before the second try. Each further wait is twice as long."""
_SHOWN_S: Final = 0.2
_END_S: Final = 10.0
_BUFFER_BYTES: Final = 256 * 1024
_LOGIN_BYTES: Final = 1 << 20
"""Bytes that a login's files (such as .bashrc) may print before the machine's side of a copy
begins."""
_WORDS: Final = 300
_KEPT_BYTES: Final = 64 * 1024
"""Bytes kept of what `ssh` writes to standard error."""
_SAID_S: Final = 0.5
"""Seconds to wait for the last words of `ssh`."""
_NAMED: Final = 5
_MARK: Final = b"torpor-begins\n"
_TO_READ: Final = b"\n" * 64
"""Input that a login's files may read. Python skips the empty lines that are left."""
_BEGIN: Final = (
    "cd /; echo; echo torpor-begins; for python in python3 /usr/bin/python3 python3.14 python3.13 "
    'python3.12 python3.11 python3.10; do command -v "$python" >/dev/null 2>&1 && exec "$python" '
    '"$@"; done; exit 127'
)
_SCRIPTED: Final = (
    "import sys; exec(bytes.fromhex(next(filter(bytes.strip, sys.stdin.buffer)).decode()))"
)
_THERE: Final = re.compile(r"([a-z0-9][a-z0-9-]*):(.*)", re.DOTALL)
_OURS: Final = ".torpor-"
"""How names of files begin that torpor leaves beside others."""


@dataclass(frozen=True)
class Folder:
    """What a push of a folder of this host would carry. ``names``: the sorted paths of its files
    and symlinks, below the folder."""

    path: Path
    files: int
    bytes: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class Copied:
    """``unchanged``: files that were there already. ``newer``: the first few that were kept, as the
    machine's are younger."""

    files: int
    bytes: int
    unchanged: int
    newer: tuple[str, ...]
    newer_count: int


@dataclass(frozen=True)
class Side:
    """The other side of a copy. ``argv`` starts a shell command on the other side; ``roots``: the
    directories of the workspace."""

    who: str
    argv: list[str]
    roots: list[str]


def cp(
    *paths: str,
    machine: str = "",
    overwrite: Flag = False,
    outside: Flag = False,
) -> int:
    """Copy files and directories to a workspace, or from it, as they are.

    torpor cp data.csv mywork:data/

    torpor cp mywork:outputs .

    The path of a workspace is below its first directory, or begins with / or ~/. Of a sleeping
    workspace, the newest snapshot is read. A copy that was broken off goes on where it stopped.
    While a job runs on the machine, no file there is replaced.

    Args:
        paths: The sources, then the target. WORKSPACE:PATH names what is in a workspace.
        machine: The machine's id, where there are several.
        overwrite: Replace also files that are newer at the target.
        outside: Copy also into a directory that no snapshot of the workspace has.
    """
    if len(paths) < 2:
        raise InvalidInput("name a source and a target: `torpor cp data.csv mywork:data/`")
    *sources, target = paths
    there, into = [_in_workspace(path) for path in sources], _in_workspace(target)
    names = {found[0] for found in (*there, into) if found}
    if into and not any(there):
        side = _writable(into[0], machine)
        with connected():
            from tasks.jobs import job_at
            from tasks.workspace_blocks import open_workspace

            at = MachineId(machine) if machine else None
            job = job_at(open_workspace(into[0]), at)
        wishes = Wishes(overwrite=overwrite, replace=job is None)
        asked = {"do": "receive", "path": into[1], "count": len(sources), "contents": False}
        asked |= {"outside": outside, "wishes": wishes._asdict()}
        report = _put(side, [_source(path) for path in sources], asked)
        if job is not None and report.kept_count:
            why = f"job {job.id} of workspace {into[0]} is {job.state}, and `torpor cp` replaces no"
            say(f"torpor: {why} file under it", sys.stderr)
        return _told(report, side.who)
    if into or not all(there) or len(names) != 1:
        raise InvalidInput(
            "a copy goes from this host to a workspace or from one workspace to this host: name "
            "what is in the workspace as WORKSPACE:PATH, such as mywork:data/"
        )
    to = tree_copy.target_for(os.path.expanduser(target), len(sources), contents=False)
    wishes = Wishes(overwrite=overwrite, inner_links=1, modes=_modes())
    with _readable(names.pop(), [found[1] for found in there if found], to, machine) as (
        side,
        found,
    ):
        asked = {"do": "send", "paths": found, "contents": False}
        called = _called(found, side.roots[0], to)
        report = _get(side, to, wishes, asked, lambda entries: _never_below(to, entries), called)
        return _told(report)


def push(
    workspace: str,
    folder: Path = Path(),
    *,
    to: str = "",
    everything: Flag = False,
    delete: Flag = False,
    overwrite: Flag = False,
    dry_run: Flag = False,
    outside: Flag = False,
    machine: str = "",
) -> int:
    """Copy the files of a folder here that differ into the folder of the same name in a workspace.

    What the folder's .gitignore files name stays here, and .git. Nothing is copied to a machine
    while a job runs there.

    Args:
        workspace: The workspace.
        folder: The folder; the current one unless it is named.
        to: The directory to copy into, below the workspace's first one, or from / or ~/ on.
        everything: Copy also what .gitignore names.
        delete: Delete there what is not here, but for what .gitignore names. A snapshot is taken
            before, and what it lacks stays.
        overwrite: Replace also files that are newer there. A snapshot is taken before, and what it
            lacks stays.
        dry_run: Only say what would be copied and deleted.
        outside: Copy also into a directory that no snapshot of the workspace has.
        machine: The machine's id, where there are several.
    """
    from torpor_cli.folder_workspace import checked_folder

    path = checked_folder(folder.expanduser())
    name = path.name
    names = _names(path, everything=everything)
    side = _writable(workspace, machine)
    wishes = Wishes(overwrite=overwrite, delete=delete, dry_run=dry_run)
    asked = {"do": "receive", "path": to or name, "count": 1, "contents": True}
    asked |= {"outside": outside, "wishes": wishes._asdict()}
    stored = None
    if not dry_run:
        with connected():
            check_no_job(workspace, machine)
            if delete or overwrite:
                look = _look(side, asked)
                stored = _Stored(back_up(workspace, machine=machine), workspace, side, look)
                check_no_job(workspace, machine)  # a job may have begun meanwhile
                wishes = wishes._replace(before_ns=look.now_ns)
                asked |= {"wishes": wishes._asdict(), "where": look.where}

    def protected(there: list[Entry]) -> set[str]:
        extra = [entry.name for entry in there if entry.name not in sent]
        spared = _left_out(path, extra, everything=everything)
        rest = [entry for entry in there if entry.name not in spared]
        return spared if stored is None else spared | stored.lacks(rest)

    sent = set(names)
    report = _put(side, [Source(str(path), "", names)], asked, protected=protected)
    code = _told(report, side.who, dry_run=dry_run, delete=delete)
    kept = 0 if stored is None else stored.told(sent)
    return code or kept


def pull(
    workspace: str,
    folder: Path = Path(),
    *,
    source: Annotated[str, Parameter(name="--from")] = "",
    everything: Flag = False,
    delete: Flag = False,
    overwrite: Flag = False,
    dry_run: Flag = False,
    machine: str = "",
    yes: Flag = False,
) -> int:
    """Copy the files that differ from a workspace's folder of the same name into a folder here.

    What .gitignore files here name stays there, and .git: `torpor cp` brings results. Of a sleeping
    workspace, the newest snapshot is read.

    Args:
        workspace: The workspace.
        folder: The folder here; the current one unless it is named.
        source: The directory to copy, below the workspace's first one, or from / or ~/ on.
        everything: Copy also what .gitignore names.
        delete: Delete here what is not there, but for what .gitignore names. Asks before.
        overwrite: Replace also files that are newer here.
        dry_run: Only say what would be copied and deleted.
        machine: The machine's id, where there are several.
        yes: Do not ask before files are deleted here.
    """
    from torpor_cli.folder_workspace import checked_folder

    path = checked_folder(folder.expanduser())
    to = Target(str(path))
    wishes = Wishes(overwrite, delete, dry_run, inner_links=0, modes=_modes())
    agreed: set[str] = set()

    def agree(names: list[str]) -> None:
        # after a connection has broken, the same question is not asked again
        if not yes and not agreed.issuperset(names):
            _ask_to_delete(path, names, workspace)
            agreed.update(names)

    with _readable(workspace, [source or path.name], to, machine) as (side, found):
        asked = {"do": "send", "paths": found, "contents": True}
        report = _get(
            side,
            to,
            wishes,
            asked,
            lambda entries: _not_taken(path, entries, everything=everything),
            protected=lambda names: _left_out(path, names, everything=everything),
            confirm=agree,
        )
    return _told(report, dry_run=dry_run)


def look_at(folder: Path, exclude: Sequence[str] = ()) -> Folder:
    """What a push of the folder would carry. ``exclude``: further patterns, as in .gitignore.
    InvalidInput for entries that cannot be sent, or that would mean something else on a machine."""
    path = folder.expanduser().resolve()
    names = _names(path, exclude=exclude)
    files = size = 0
    for name in names:
        file = path / name
        try:
            name.encode()
        except UnicodeEncodeError:
            raise InvalidInput(f"{file} has a name that is no UTF-8: rename it") from None
        if file.is_symlink():
            target = os.readlink(file)
            if tree_copy.leads_out(name, target):
                raise InvalidInput(
                    f"{file} is a symlink that leads out of {path}, to {target}: a machine has "
                    "nothing there. Name it in .gitignore to leave it here"
                )
        elif not os.access(file, os.R_OK):
            raise InvalidInput(f"{file} cannot be read: name it in .gitignore to leave it here")
        else:
            files += 1
            size += file.stat().st_size
    return Folder(path, files, size, tuple(names))


def send(folder: Folder, workspace: str, into: str, *, machine: str = "") -> Copied:
    """Send what differs of the folder into a directory of the workspace, where nothing is deleted,
    and where a file that is newer stays. Call it inside ``connected``."""
    side = machine_side(workspace, machine, OWN_COPY)
    asked = {"do": "receive", "path": into, "count": 1, "contents": True, "outside": False}
    asked["wishes"] = Wishes()._asdict()
    report = _put(side, [Source(str(folder.path), "", list(folder.names))], asked)
    if report.failed_count:
        named = _some(report.failed, report.failed_count)
        raise MachineError(f"{side.who}: not copied: {named}. The same command tries these again")
    newer = tuple(map(plain, report.newer))
    return Copied(report.files, report.bytes, report.unchanged, newer, report.newer_count)


def back_up(workspace: str, *, machine: str = "", as_json: bool = False) -> str:
    """Take a snapshot of the machine before files on it are replaced or deleted; returns the
    snapshot's id. Call it inside ``connected``."""
    import flows
    from torpor.control.upkeep.reports import BackupReport

    with quiet(as_json):
        report = flows.backup(workspace=workspace, machine=machine)
    if not isinstance(report, BackupReport):
        raise WorkspaceAwake(
            f"the machine of workspace {workspace} has ended meanwhile: give the command again"
        )
    return str(report.snapshot)


def check_no_job(workspace: str, machine: str = "") -> None:
    """WorkspaceBusy while a job of the workspace has not ended: its files would change under it.
    One that waits for its turn counts, too. With ``machine``, one that runs on others does not.
    Call it inside ``connected``."""
    from tasks.jobs import job_at
    from tasks.workspace_blocks import open_workspace

    at = MachineId(machine) if machine else None
    if (job := job_at(open_workspace(workspace), at, queued=True)) is not None:
        raise WorkspaceBusy(
            f"job {job.id} of workspace {workspace} is {job.state}, and its files would change "
            f"under it: `torpor job log {job.id} -f` shows what it prints, `torpor job cancel "
            f"{job.id}` ends it"
        )


# -- what a push may delete and replace


class _Look(NamedTuple):
    """What a look at the machine showed: the time of its clock, the real path of the copy, and the
    real paths of the workspace's directories, in their order."""

    now_ns: int
    where: str
    roots: list[str]


def _look(side: Side, asked: dict[str, Any]) -> _Look:
    said = ask(side, {**asked, "do": "look"})
    fits = isinstance(said, list) and [type(one) for one in said] == [int, str, list]
    if not fits or not all(isinstance(root, str) for root in said[2]) or said[0] <= 0:
        raise MachineError(f"{side.who}: the machine sent what is no part of a copy")
    return _Look(*said)


class _Stored:
    """What a snapshot has of the directory that a folder is copied into, and what was kept because
    the snapshot lacks it: files that `exclude` of the workspace names, and what is younger."""

    def __init__(self, snapshot: str, workspace: str, side: Side, look: _Look) -> None:
        from flows.procedures.listing import list_entries

        self._snapshot = snapshot
        # a directory of the workspace, and the target's place below it
        self._tops: list[tuple[str, str]] = []
        for name, root in zip(side.roots, look.roots, strict=False):
            below = os.path.relpath(look.where, root)
            if below.partition("/")[0] != "..":
                self._tops.append((name, os.path.normpath(os.path.join(name, below))))
        self._entries = {
            os.path.normpath(entry.path): entry for entry in list_entries(workspace, snapshot)
        }
        self._absent: set[str] = set()
        self._other: set[str] = set()

    def lacks(self, there: list[Entry]) -> set[str]:
        """The names of a machine that the snapshot does not have as they are now."""
        self._absent.clear()
        self._other.clear()
        for entry in there:
            paths = [(root, os.path.join(top, entry.name)) for root, top in self._tops]
            found = [(root, self._entries[path]) for root, path in paths if path in self._entries]
            if not found:
                self._absent.add(entry.name)
            elif not any(self._is_same(entry, *one) for one in found):
                self._other.add(entry.name)
        return self._absent | self._other

    def told(self, sent: set[str]) -> int:
        """Print what was kept; returns the exit code. ``sent``: names that were to be replaced."""
        for names, why in (
            (self._absent, "does not have it: `exclude` of the workspace names it, or it is new"),
            (self._other, "has another version of it"),
        ):
            if tops := _tops(names):
                named = _some(tops[:_NAMED], len(tops))
                words = f"kept, as snapshot {self._snapshot}, which was taken before, {why}"
                say(plain(f"torpor: {words}: {named}"), sys.stderr)
        return REFUSED if self._other or self._absent & sent else 0

    def _is_same(self, entry: Entry, root: str, stored: ListedEntry) -> bool:
        if stored.kind == "directory":
            return entry.kind == "d"
        if stored.kind == "symlink":
            return (entry.kind, entry.target) == ("l", stored.target)
        # the link leads to a file of the same directory of the workspace
        if stored.kind == "hard link":
            first = self._entries.get(os.path.normpath(os.path.join(root, stored.target)))
            if first is None:
                return False
            stored = first
        same = (entry.kind, entry.size, entry.mtime_ns) == ("f", stored.bytes, stored.mtime_ns)
        return same and not stored.changed_while_read


# -- what is copied


def _in_workspace(path: str) -> tuple[str, str] | None:
    """The workspace and the path in it; None for a path of this host."""
    found = _THERE.fullmatch(path)
    return (found[1], found[2] or "./") if found else None


def _source(path: str) -> Source:
    here = os.path.expanduser(path)
    if not os.path.exists(here):
        raise InvalidInput(f"{here} is not there")
    try:
        return Source(here, tree_copy.name_of(here))
    except Refused as error:
        raise InvalidInput(str(error)) from None


def _called(paths: list[str], root: str, to: Target) -> set[str] | None:
    """The names here of the copies of these paths of a workspace. A machine that sends another name
    is hostile. None where the target has a name for the only one."""
    names: set[str] = set()
    for path in paths:
        whole = os.path.normpath(path if path.startswith("~") else os.path.join(root, path))
        name = os.path.basename(whole)
        # the machine knows the name
        if name in (".", "..") or (name == whole and name.startswith("~")):
            if to.rename:
                return None
            raise InvalidInput(
                f"{path} has no name of its own: name its copy here, such as "
                "`torpor cp mywork:~ ./home`"
            )
        names.add(name)
    return names


def _names(path: Path, *, everything: bool = False, exclude: Sequence[str] = ()) -> list[str]:
    """The files and symlinks of a folder that are sent."""
    if not path.is_dir():
        raise InvalidInput(f"{path} is no directory")
    skipped: list[str] = []
    only = None if everything else git_rules.not_ignored(path, exclude, skipped)
    found = [entry for _, entry in tree_copy.found_in(Source(str(path), "", only), skipped)]
    names = [entry.name for entry in found if entry.kind != "d" and not _is_never(entry.name)]
    within = _within(path, names, _is_git_directory)
    skipped += [f"{top or '.'} (a git directory)" for top in sorted(set(within.values()))]
    for words in skipped:
        say(f"torpor: warning: left out: {plain(words)}", sys.stderr)
    return sorted(name for name in names if name not in within)


def _left_out(path: Path, names: list[str], *, everything: bool) -> set[str]:
    """The names below a folder that are neither sent nor deleted."""
    within = _within(path, names, _is_git_directory)
    never = {name for name in names if _is_never(name)} | {*within, *within.values()}
    return never | _ignored(path, names, never, everything=everything)


def _not_taken(path: Path, entries: list[Entry], *, everything: bool) -> set[str]:
    """The names of a machine that are not copied into a folder here. Names that could make
    programs run here are reported."""
    never = _of_git(path, entries)
    _say_never(never, "`torpor cp` with its name copies it all the same")
    names = [entry.name for entry in entries]
    return never | _ignored(path, names, never, everything=everything)


def _ignored(path: Path, names: list[str], never: set[str], *, everything: bool) -> set[str]:
    rest = [name for name in names if name not in never]
    if everything or not rest or not path.is_dir():
        return set()
    unread: set[str] = set()
    ignored = git_rules.ignored(path, rest, unread)
    if unread:
        named = plain(_some(sorted(unread)[:_NAMED], len(unread)))
        say(
            f"torpor: warning: left out: what the machine has below {named}: here, that is a "
            "symlink, or a submodule that git has not fetched",
            sys.stderr,
        )
    return ignored


def _modes() -> int:
    """The bits of a mode that this process gives files: the umask also applies to a mode 0777 that
    a machine sends."""
    mask = os.umask(0o077)
    os.umask(mask)
    return 0o777 & ~mask


def _never_below(to: Target, entries: list[Entry]) -> set[str]:
    """The names of a copy to this host that are left out and reported: those through which a
    machine could have programs run here, unless the user has named them."""
    tops = {entry.name.partition("/")[0] for entry in entries}
    never: set[str] = set()
    for top in tops:
        mine = [entry for entry in entries if entry.name.startswith(f"{top}/")]
        below = [entry._replace(name=entry.name[len(top) + 1 :]) for entry in mine]
        found = _of_git(Path(to.base, top), below, whole=is_of_git(top))
        never |= {f"{top}/{name}" for name in found}
    _say_never(never, "name it as a source to copy it all the same")
    return never


def _of_git(folder: Path, entries: list[Entry], *, whole: bool = False) -> set[str]:
    """The names of a machine that would have git run what it writes into the folder: each
    `.git`, and each file `HEAD`, without which git takes no other directory for a repository; and
    all names in a directory that has a `HEAD` here. ``whole``: the folder is a `.git` that the user
    named."""
    never = {entry.name for entry in entries if _is_never(entry.name)}
    if not whole:
        never |= {entry.name for entry in entries if entry.kind != "d" and is_head(entry.name)}
        never |= _within(folder, [entry.name for entry in entries], _has_head).keys()
    return never


def _within(folder: Path, names: list[str], is_one: Callable[[str], bool]) -> dict[str, str]:
    """The names that are in a directory for which ``is_one`` holds here, each with that directory,
    which is empty for the folder itself."""
    known: dict[str, str | None] = {}

    def looked_up(parts: list[str]) -> str | None:
        for end in range(len(parts) + 1):
            if is_one(os.path.join(folder, above := "/".join(parts[:end]))):
                return above
        return None

    found: dict[str, str] = {}
    for name in names:
        above, _, _ = name.rpartition("/")
        if above not in known:
            known[above] = looked_up(above.split("/") if above else [])
        if (top := known[above]) is not None:
            found[name] = top
    return found


def _has_head(folder: str) -> bool:
    head = os.path.join(folder, "HEAD")
    return os.path.lexists(head) and (os.path.islink(head) or not os.path.isdir(head))


def _is_git_directory(folder: str) -> bool:
    """Whether git takes the directory for a git directory, whatever its name: `git init
    --separate-git-dir` makes some."""
    if not _has_head(folder):
        return False
    there = [os.path.lexists(os.path.join(folder, x)) for x in ("commondir", "objects", "refs")]
    return there[0] or all(there[1:])


def _say_never(never: set[str], advice: str) -> None:
    if tops := _tops(never):
        named = plain(_some(tops[:_NAMED], len(tops)))
        say(
            f"torpor: warning: left out: {named}. What a machine writes there may run here: "
            f"{advice}",
            sys.stderr,
        )


def _tops(names: set[str]) -> list[str]:
    """The names that are below no other one, sorted."""
    return sorted(name for name in names if name.rpartition("/")[0] not in names)


def _ask_to_delete(folder: Path, names: list[str], workspace: str) -> None:
    """Ask the person at the terminal. Directories without deleted files are not mentioned."""
    files = [name for name in names if (folder / name).is_symlink() or not (folder / name).is_dir()]
    if files:
        what = "1 file" if len(files) == 1 else f"{len(files):,} files"
        named = _some(files[:_NAMED], len(files))
        asked = f"Delete {what} in {folder} that {workspace} does not have: {named}?"
        confirm(plain(asked), "nothing was copied or deleted")


def _is_never(name: str) -> bool:
    """Whether no such name is copied in a push or pull, nor below what `cp` brings here. A machine
    that could write ``.git`` here would run programs here."""
    return is_of_git(name) or any(part.lower().startswith(_OURS) for part in name.split("/"))


# -- the other side


def _writable(workspace: str, machine: str) -> Side:
    """The workspace's machine. A person at a terminal is asked whether to wake the workspace."""
    with connected():
        try:
            return machine_side(workspace, machine)
        except WorkspaceAsleep:
            _check_asleep(workspace)
            asleep = (
                f"workspace {workspace} is asleep, and nothing is written into a sleeping workspace"
            )
    if not sys.stdin.isatty():
        raise WorkspaceAsleep(f"{asleep}: `torpor wake {workspace}` first")
    say(asleep, sys.stderr)
    machines.wake(workspace)
    with connected():
        return machine_side(workspace, machine)


@contextmanager
def _readable(
    workspace: str, paths: list[str], to: Target, machine: str
) -> Iterator[tuple[Side, list[str]]]:
    """The workspace's machine, or, while it is asleep, files out of its newest snapshot, which
    exist here as long as this context; and the paths on that side."""
    with connected():
        try:
            side = machine_side(workspace, machine)
        except WorkspaceAsleep:
            pass
        else:
            yield side, paths
            return
        from flows import restore_path
        from tasks.workspace_blocks import open_stored

        _check_asleep(workspace)
        first = open_stored(workspace).spec.paths[0]
        say(f"workspace {workspace} is asleep: its newest snapshot is read", sys.stderr)
        above = Path(to.base).absolute()
        while not above.is_dir():
            above = above.parent
        if not os.access(above, os.W_OK | os.X_OK):
            raise InvalidInput(f"nothing can be written into {above}")
        with tempfile.TemporaryDirectory(prefix=".torpor-", dir=above) as kept:
            found = []
            for number, path in enumerate(paths):
                wanted = os.path.normpath(path)
                wanted = first if wanted == "." else wanted
                with quiet(as_json=False):
                    restored = restore_path(
                        workspace,
                        wanted,
                        os.path.join(kept, str(number)),
                        machine="here",
                        leave_git=True,  # a command that is killed leaves these files on this host
                    )
                for words in restored.warnings:
                    say(f"torpor: warning: {plain(words)}", sys.stderr)
                found.append(str(restored.restored_to))
            yield Side("the snapshot", begin_argv(), [kept]), found


def _check_asleep(workspace: str) -> None:
    """InvalidInput where a machine with newer work may still exist."""
    from tasks.sleep import check_not_asleep
    from tasks.workspace_blocks import open_workspace

    with suppress(WorkspaceAsleep):
        check_not_asleep(open_workspace(workspace))


def machine_side(workspace: str, machine: str, mark: str = "") -> Side:
    """The workspace's machine; WorkspaceAsleep where it has none. ``mark``: in the command line on
    the machine, whose sampler takes a copy for its user's. Call it inside ``connected``."""
    from tasks.workspace_blocks import open_workspace
    from torpor_cli import logins

    if (ssh := programs.found("ssh")) is None:
        raise InvalidInput(logins.NO_SSH)
    file = None if machine else logins.current(workspace)
    file = file or logins.refresh(workspace, machine)
    options = ["-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=30"]
    options += ["-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3"]
    command = [*begin_argv(), mark] if mark else begin_argv()
    argv = [ssh, "-F", str(file), *options, workspace, shlex.join(command)]
    return Side(workspace, argv, list(open_workspace(workspace).spec.paths))


def begin_argv() -> list[str]:
    """The command that begins the other side of a copy; tree_copy.py is then sent to it."""
    return ["/bin/sh", "-c", _BEGIN, "torpor", "-I", "-c", _SCRIPTED]


def ask(side: Side, asked: dict[str, Any]) -> Any:
    """The one value that the other side answers."""
    return _done(side, asked, lambda stream, moved: stream.expect(), "")


def _put(
    side: Side,
    sources: list[Source],
    asked: dict[str, Any],
    protected: Callable[[list[Entry]], set[str]] = lambda there: set(),
) -> Report:
    return _copied(
        side,
        asked,
        lambda stream, moved: tree_copy.send(stream, sources, moved=moved, protected=protected),
        f"copying to {side.who}",
    )


def _get(
    side: Side,
    to: Target,
    wishes: Wishes,
    asked: dict[str, Any],
    ignored: Callable[[list[Entry]], set[str]],
    names: set[str] | None = None,
    *,
    protected: Callable[[list[str]], set[str]] = lambda names: set(),
    confirm: Callable[[list[str]], None] = lambda names: None,
) -> Report:
    return _copied(
        side,
        asked,
        lambda stream, moved: tree_copy.receive(
            stream,
            to,
            wishes,
            moved=moved,
            ignored=ignored,
            protected=protected,
            names=names,
            confirm=confirm,
        ),
        f"copying from {side.who}",
    )


def _copied(
    side: Side,
    asked: dict[str, Any],
    does: Callable[[Stream, Callable[[int, int], None]], Report],
    words: str,
) -> Report:
    from tasks.progress import following

    if following() is not None:
        return _done(side, asked, does, words)
    with shown_progress(asks=True):
        return _done(side, asked, does, words)


def _done(
    side: Side,
    asked: dict[str, Any],
    does: Callable[[Stream, Callable[[int, int], None]], AnswerT],
    words: str,
) -> AnswerT:
    """Run the copy over a new connection, and again if a working connection breaks: what was copied
    is not copied again."""
    shown = _Shown(words)
    shown.begins()
    tries, begun = 1, False
    while True:
        before = shown.calls
        try:
            with _connected_to(side) as stream:
                begun = True
                stream.send({**asked, "roots": side.roots})
                stream.flush()
                done = does(stream, shown)
        except Refused as error:
            raise MachineError(f"{side.who}: {error}") from None
        except OSError as error:
            raise TorporError(f"this host: {error.filename or 'it'}: {error.strerror}") from error
        except _Lost as error:
            if not begun or tries >= TRIES:
                again = ". The same command goes on where it stopped" if begun else ""
                raise MachineUnreachable(f"{side.who}: {error}{again}") from None
            tries = 1 if shown.calls > before else tries + 1
            shown.ends()
            say(f"torpor: warning: {side.who}: {error}: connecting again", sys.stderr)
            sleep(_PAUSE_S * 2 ** (tries - 1))
        else:
            shown.ends()
            return done


class _Lost(Exception):
    """A connection that broke, with the last words of `ssh`."""


class _LastWords(threading.Thread):
    """Reads a program's standard error until it is closed, and keeps the last of it: a machine may
    say more than a disk holds. A shared connection may keep the pipe open, so that the thread
    outlives the program."""

    def __init__(self, said: IO[bytes]) -> None:
        super().__init__(name="last words", daemon=True)
        self._said = said
        self.last = b""

    def run(self) -> None:
        with self._said:
            while data := os.read(self._said.fileno(), _KEPT_BYTES):
                self.last = (self.last + data)[-_KEPT_BYTES:]


class _Shown:
    """Reports the bytes to the follower of the command, a few times a second."""

    def __init__(self, words: str) -> None:
        from tasks.progress import following

        self.calls = 0
        self._words = words
        self._follower = following()
        self._next_s = 0.0

    def __call__(self, done: int, total: int) -> None:
        self.calls += 1
        now_s = monotonic()
        if self._follower and total and self.calls == 1:
            self.ends()
            self._follower.moves(self._words, 0, total)
        if self._follower and total and (now_s >= self._next_s or done >= total):
            self._next_s = now_s + _SHOWN_S
            self._follower.moves(self._words, done, total)

    def begins(self) -> None:
        if self._follower and self._words:
            self._follower.begins(self._words, f"{self._words}: comparing")

    def ends(self) -> None:
        if self._follower:
            self._follower.ends(self._words)


@contextmanager
def _connected_to(side: Side) -> Iterator[Stream]:
    """A running tree_copy.py at the other side."""
    process = subprocess.Popen(
        side.argv,
        bufsize=_BUFFER_BYTES,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    stdin, stdout = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
    said = _LastWords(cast(IO[bytes], process.stderr))
    said.start()
    whole = False
    try:
        _begin(stdin, stdout)
        yield Stream(stdout, stdin)
        whole = True
    except Broken as error:
        process.kill()
        process.wait()
        said.join(_SAID_S)
        words = " ".join(said.last.decode(errors="replace").split())
        raise _Lost(plain(words[-_WORDS:]) or str(error)) from None
    finally:
        if not whole:
            process.kill()  # otherwise the rest of the buffer would wait for the process
        with suppress(OSError):
            stdin.close()
        stdout.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        process.kill()
        process.wait()
        said.join(_SAID_S)


def _begin(stdin: IO[bytes], stdout: IO[bytes]) -> None:
    """Have the other side run tree_copy.py, whatever its login's files read and print before."""
    script = Path(tree_copy.__file__).read_bytes().hex().encode()
    try:
        stdin.write(_TO_READ)
        stdin.flush()
        heard = 0
        while (line := stdout.readline(_LOGIN_BYTES)) != _MARK and line and heard < _LOGIN_BYTES:
            heard += len(line)
        stdin.write(script + b"\n")
        stdin.flush()
    except OSError:
        line = b""
    if line != _MARK:
        raise Broken("no program was begun there")


# -- what is said


def _told(report: Report, who: str = "", *, dry_run: bool = False, delete: bool = False) -> int:
    """Print what was copied; returns the exit code."""
    where = f"{who}:{report.target}" if who else report.target
    does = "would copy" if dry_run else "copied"
    files = "1 file" if report.files == 1 else f"{report.files:,} files"
    line = f"{does} {files}, {report.bytes:,} bytes, to {where}"
    if report.unchanged:
        line += f"; {report.unchanged:,} are there already"
    say(plain(line))
    if dry_run and report.names:
        say(plain(f"would copy {_some(report.names, report.files)}"))
    if report.gone_count:
        deletes = "would delete" if dry_run else "deleted"
        first = ", as far as the snapshot that is taken before has it" if dry_run and delete else ""
        say(plain(f"{deletes} {_some(report.gone, report.gone_count)}{first}"))
    if report.newer_count:
        named = _some(report.newer, report.newer_count)
        say(
            plain(f"torpor: kept, as it is newer at the target: {named}. --overwrite replaces it"),
            sys.stderr,
        )
    if report.kept_count:
        named = _some(report.kept, report.kept_count)
        say(plain(f"torpor: kept, and neither replaced nor deleted: {named}"), sys.stderr)
    if report.failed_count:
        named = _some(report.failed, report.failed_count)
        say(plain(f"torpor: not copied: {named}. The same command tries these again"), sys.stderr)
        return FAILED
    return REFUSED if report.newer_count or report.kept_count else 0


def _some(names: list[str], count: int) -> str:
    left = count - len(names)
    return ", ".join(names) + (f" and {left:,} more" if left > 0 else "")
