"""What a machine keeps about one job: the folder ``HOME/jobs/JOB`` (mode 0700).

``alive`` is locked as long as a supervisor of the job lives; whoever starts one takes the lock
first and passes it on, so that there are never two. ``state`` says how the command stands; only the
holder of the lock writes it. ``socket`` is the supervisor's. A command may remove the folder, or
all of HOME: its supervisor, which knows how the command stands, makes both again.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from torpor.machine.supervisor.marker import MARKER, mark_home
from torpor.machine.supervisor.processes import ProcessId, of_job, own_processes
from torpor.shared.errors import InvalidInput, MachineError
from torpor.shared.values import WorkspaceName, learned
from torpor.shared.wire.job import JobState
from torpor.shared.wire.protocol import encode_line

JOBS: Final = "jobs"
_ID: Final = re.compile(r"[0-9a-f]{12}")


class Kept(msgspec.Struct, frozen=True):
    """The file ``state``. ``state.state`` is running or ended; ``bundle`` is what the supervisor
    was started from. ``serves``: the command is a server. ``root``: of processes that went on in a
    namespace of their own, the id of their root there; ``command`` is then its first process.
    ``saves``: the workspace that the supervisor has got grants to save; empty without any.
    ``saves_until_unix``: when they end; None where an older supervisor does not say."""

    state: JobState
    supervisor: ProcessId
    command: ProcessId
    log: str
    bundle: str
    serves: bool = False
    root: int | None = None
    saves: str = ""
    saves_until_unix: float | None = None

    @property
    def runs(self) -> bool:
        """Whether the command runs, as far as its supervisor has said."""
        return self.state.state == "running"

    @property
    def at_work(self) -> bool:
        """Whether the command runs, also where its supervisor is lost."""
        return self.runs and (self.command.lives or self.supervisor.lives)

    def can_save(self, workspace: WorkspaceName) -> bool:
        """Whether the supervisor saves the workspace by itself; also where it is not known whether
        its grants have ended."""
        over = self.saves_until_unix is not None and time.time() >= self.saves_until_unix
        return self.saves == workspace and self.supervisor.lives and not over


class ProcessFolder:
    """The folder of one process, of which at most one lives."""

    def __init__(self, path: Path) -> None:
        self.path: Final = path

    def make(self) -> None:
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        self.path.mkdir(mode=0o700, exist_ok=True)

    def take(self) -> int | None:
        """The lock; None while its process holds it, or someone who starts one."""
        fd = os.open(self.path / "alive", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return fd

    def listen(self) -> socket.socket:
        """The process's socket; only the holder of the lock may call this."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with self._opened() as folder:
            name = f"/proc/self/fd/{folder}/socket"  # sun_path holds 108 bytes, HOME may have more
            if os.path.lexists(name):
                os.unlink(name)
            listener.bind(name)
            os.chmod(name, 0o600)
        listener.listen(8)
        return listener

    def connect(self) -> socket.socket:
        """A connection to the process; OSError where none listens."""
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with self._opened() as folder:
                peer.connect(f"/proc/self/fd/{folder}/socket")
        except OSError:
            peer.close()
            raise
        return peer

    @property
    def listens(self) -> bool:
        """Whether its process lives and can be asked."""
        with suppress(OSError):
            self.connect().close()
            return True
        return False

    def identity(self) -> tuple[int, int] | None:
        """Which folder it is; None once it is gone. OSError where that is unknown."""
        try:
            facts = self.path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return facts.st_dev, facts.st_ino

    def is_gone(self, identity: tuple[int, int] | None) -> bool:
        """Whether it is surely not that folder any more."""
        try:
            return self.identity() != identity
        except OSError:
            return False

    def is_locked_by(self, lock: int) -> bool:
        """Whether the file ``alive`` is the one that ``lock`` holds. OSError where that is
        unknown."""
        try:
            return os.path.samestat(os.stat(self.path / "alive"), os.fstat(lock))
        except (FileNotFoundError, NotADirectoryError):
            return False

    @contextmanager
    def _opened(self) -> Iterator[int]:
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)


class JobFolder(ProcessFolder):
    """The folder of one job. InvalidInput for an id that is none."""

    def __init__(self, home: Path, job: str) -> None:
        if not _ID.fullmatch(job):
            raise InvalidInput(f"{job[:80]!r} is not a job's id: they look like 3f2a9c81d04e")
        super().__init__(home / JOBS / job)
        self.job: Final = job
        self._home: Final = home
        self._state: Final = self.path / "state"

    def is_whole(self, lock: int) -> bool:
        """Whether all is there that the supervisor which holds ``lock`` keeps here. OSError where
        that is unknown."""
        files = (self._home / MARKER, self.path / "socket", self._state)
        return self.is_locked_by(lock) and all(_is_there(path) for path in files)

    @property
    def has_place(self) -> bool:
        """Whether what HOME stands in is there. OSError where that is unknown."""
        return _is_there(self._home.parent)

    def make_again(self, lock: int) -> int | None:
        """Make again the folder of the supervisor that holds ``lock``, and HOME: not what HOME
        stands in. The lock that it is to hold from now on; None while somebody else holds it."""
        mark_home(self._home, again=True)
        self.make()
        return lock if self.is_locked_by(lock) else self.take()

    @property
    def has_supervisor(self) -> bool:
        """Whether a supervisor of the job lives, or a save that one began; the folder need not
        be there."""
        return bool(own_processes(self.path))

    def read(self) -> Kept | None:
        """What the newest supervisor wrote; None where none has written anything."""
        try:
            text = self._state.read_bytes()
        except FileNotFoundError:
            return None
        try:
            return msgspec.convert(json.loads(text), learned(Kept))
        except ValueError as error:  # a ValidationError is one
            raise MachineError(
                f"{self._state} is not what torpor wrote ({error}): end the job's processes on the "
                "machine and remove that file"
            ) from None

    def write(self, kept: Kept) -> None:
        """Replace ``state`` in one step that outlives a crash of the machine."""
        fresh = self.path / ".state"
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(encode_line(msgspec.to_builtins(kept)))
            file.flush()
            os.fsync(fd)
        os.replace(fresh, self._state)
        with self._opened() as folder:
            os.fsync(folder)

    def look(self) -> tuple[JobState, Kept | None]:
        """How the command stands now, and what its supervisor wrote; none where somebody has
        removed that."""
        kept = self.read()
        if kept is None:
            return JobState(self.job, 0, "none"), None
        if kept.runs and not kept.supervisor.lives:
            kept = self.read() or kept  # it may have written how the command ended, and then ended
            if kept.runs and not kept.supervisor.lives:
                return msgspec.structs.replace(kept.state, state="lost"), kept
        return kept.state, kept

    def processes(self, kept: Kept | None) -> list[int]:
        """The live processes of the job: of its command, and what that left in the background."""
        if kept is None:
            return of_job(self.path, None, None)
        return of_job(self.path, kept.command, kept.supervisor)


def _is_there(path: Path) -> bool:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def all_kept(home: Path) -> list[tuple[JobFolder, Kept]]:
    """What the supervisors of every job that was ever started here wrote."""
    try:
        names = sorted(os.listdir(home / JOBS))
    except FileNotFoundError:
        return []
    folders = [JobFolder(home, name) for name in names if _ID.fullmatch(name)]
    return [(folder, kept) for folder in folders if (kept := folder.look()[1]) is not None]


def job_that_saves(home: Path, workspace: WorkspaceName) -> str:
    """The job whose supervisor lives and has grants, which have not ended, to save the workspace by
    itself; empty without one."""
    saving = (folder.job for folder, kept in all_kept(home) if kept.can_save(workspace))
    return next(saving, "")
