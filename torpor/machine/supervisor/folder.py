"""What a machine keeps about one process that outlives the agent: a folder of HOME (mode 0700).

A supervisor has ``HOME/jobs/JOB``, an autosave process ``HOME/autosaves/WORKSPACE``. ``alive`` is
locked as long as the process lives; whoever starts one takes the lock first and passes it on, so
that there are never two. ``state`` says what the process knows; only the holder of the lock writes
it. ``socket`` is the process's. A job's command may remove the folder, or all of HOME: the
processes of the job make both again.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from torpor.machine.supervisor.freezing import Freeze
from torpor.machine.supervisor.marker import MARKER, mark_home
from torpor.machine.supervisor.processes import ProcessId, of_job, own_processes
from torpor.shared.errors import InvalidInput, MachineError
from torpor.shared.values import WorkspaceName, learned
from torpor.shared.wire.job import JobState, Notice, NoticeSource, OwnSave
from torpor.shared.wire.protocol import encode_line

JOBS: Final = "jobs"
AUTOSAVES: Final = "autosaves"
CONNECT_S: Final = 1.0
_ID: Final = re.compile(r"[0-9a-f]{12}")


class Kept(msgspec.Struct, frozen=True):
    """The file ``state``. ``state.state`` is running or ended; ``bundle`` is what the supervisor
    was started from. ``serves``: the command is a server. ``root``: for processes that went on in a
    namespace of their own, the id of their root there; ``command`` is then the namespace's first
    process. ``freeze``: how the command is frozen when the machine is taken away; None if it is not
    frozen then."""

    state: JobState
    supervisor: ProcessId
    command: ProcessId
    log: str
    bundle: str
    serves: bool = False
    root: int | None = None
    freeze: Freeze | None = None

    @property
    def runs(self) -> bool:
        """Whether the command runs, as far as its supervisor has said."""
        return self.state.state == "running"

    @property
    def at_work(self) -> bool:
        """Whether the command runs, or its supervisor is lost and it may run."""
        return self.runs and (self.command.lives or self.supervisor.lives)


class AutosaveRecord(msgspec.Struct, frozen=True):
    """What an autosave process says of the newest ``attempt`` of a ``job`` that it heard notices
    for, in the fields of JobState; and what a process that replaces it needs: ``notices``, the
    services to ask, whether the job is ``over`` because somebody has stopped it, and ``taken``, the
    requests that have brought a book."""

    job: str = ""
    attempt: int = 0
    notice: Notice | None = None
    saved: OwnSave | None = None
    save_error: str = ""
    not_frozen: str = ""
    saves_until_unix: float = 0.0
    notices: list[NoticeSource] = []
    over: bool = False
    taken: list[str] = []


class ProcessFolder:
    """The folder of one process, of which at most one lives."""

    def __init__(self, home: Path, path: Path) -> None:
        self.path: Final = path
        self._home: Final = home
        self._state: Final = path / "state"

    def make(self) -> None:
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        self.path.mkdir(mode=0o700, exist_ok=True)

    def take(self) -> int | None:
        """The lock; None while the folder's process holds it, or somebody who is starting one."""
        return self._locked("alive")

    @property
    def is_locked(self) -> bool:
        """Whether the folder's process lives, or is being started. Whoever takes the lock at the
        same moment has to try again. OSError where that is unknown."""
        try:
            lock = self.take()
        except FileNotFoundError:  # somebody has removed the folder
            return False
        if lock is not None:
            os.close(lock)
        return lock is None

    def listen(self) -> socket.socket:
        """The process's socket; only the holder of the lock may call this."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with self._opened() as folder:
            # sun_path holds 108 bytes, and HOME's path may be longer
            name = f"/proc/self/fd/{folder}/socket"
            if os.path.lexists(name):
                os.unlink(name)
            listener.bind(name)
            os.chmod(name, 0o600)
        listener.listen(8)
        return listener

    def connect(self) -> socket.socket:
        """A connection to the process; OSError where none listens, or where a process has left
        earlier connections unanswered."""
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # otherwise it would wait for room in the queue of a process that hangs
        peer.settimeout(CONNECT_S)
        try:
            with self._opened() as folder:
                peer.connect(f"/proc/self/fd/{folder}/socket")
        except OSError:
            peer.close()
            raise
        return peer

    def identity(self) -> tuple[int, int] | None:
        """The identity of the folder; None once it is gone. OSError where that is unknown."""
        try:
            facts = self.path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return facts.st_dev, facts.st_ino

    def is_locked_by(self, lock: int) -> bool:
        """Whether the file ``alive`` is the one that ``lock`` holds. OSError where that is
        unknown."""
        try:
            return os.path.samestat(os.stat(self.path / "alive"), os.fstat(lock))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def is_whole(self, lock: int) -> bool:
        """Whether everything is there that the process which holds ``lock`` keeps in the folder.
        OSError where that is unknown."""
        files = (self._home / MARKER, self.path / "socket", self._state)
        return self.is_locked_by(lock) and all(_is_there(path) for path in files)

    @property
    def has_place(self) -> bool:
        """Whether the directory that contains HOME exists. OSError where that is unknown."""
        return _is_there(self._home.parent)

    def make_again(self, lock: int) -> int | None:
        """Make HOME again, and in it the folder of the process that holds ``lock``, but not the
        directory that contains HOME. Returns the lock that the process is to hold from now on; None
        while somebody else holds that."""
        mark_home(self._home, again=True)
        self.make()
        return lock if self.is_locked_by(lock) else self.take()

    def write(self, kept: msgspec.Struct) -> None:
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

    def _locked(self, name: str) -> int | None:
        fd = os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if isinstance(error, BlockingIOError):
                return None
            raise
        return fd

    @contextmanager
    def _opened(self) -> Iterator[int]:
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)


class JobFolder(ProcessFolder):
    """The folder of one job. InvalidInput for text that is no job's id."""

    def __init__(self, home: Path, job: str) -> None:
        if not _ID.fullmatch(job):
            raise InvalidInput(f"{job[:80]!r} is not a job's id: they look like 3f2a9c81d04e")
        super().__init__(home, home / JOBS / job)
        self.job: Final = job

    def take_log(self) -> int | None:
        """The lock of the command's log and of its end: a supervisor holds it while it looks at
        both, and the save that freezes the command until the save is over. None while another
        process holds it."""
        return self._locked("log")

    @property
    def has_supervisor(self) -> bool:
        """Whether a supervisor of the job lives, even if the folder is gone."""
        return bool(own_processes(self.path))

    def read(self) -> Kept | None:
        """What the newest supervisor wrote; None where none has written anything."""
        try:
            text = self._state.read_bytes()
        except FileNotFoundError:
            return None
        try:
            return msgspec.convert(json.loads(text), learned(Kept))
        except ValueError as error:  # a ValidationError is a ValueError
            raise MachineError(
                f"{self._state} is not what torpor wrote ({error}): end the job's processes on the "
                "machine and remove that file"
            ) from None

    def look(self) -> tuple[JobState, Kept | None]:
        """The state of the command, with what the autosave process says of this attempt, and what
        the supervisor wrote; none where somebody has removed that file."""
        kept = self.read()
        if kept is None:
            return JobState(self.job, 0, "none"), None
        if kept.runs and not kept.supervisor.lives:
            # the supervisor may have written the command's end just before it ended
            kept = self.read() or kept
            if kept.runs and not kept.supervisor.lives:
                return self._told(msgspec.structs.replace(kept.state, state="lost")), kept
        return self._told(kept.state), kept

    def _told(self, state: JobState) -> JobState:
        for folder in autosave_folders(self._home):
            told = folder.read()
            if (told.job, told.attempt) == (state.job, state.attempt):
                holds_book = told.saves_until_unix > 0 and folder.is_locked
                return msgspec.structs.replace(
                    state,
                    notice=told.notice,
                    saved=told.saved or state.saved,  # set by a supervisor of an older bundle
                    save_error=told.save_error,
                    # set by a supervisor of an older bundle
                    not_frozen=told.not_frozen or state.not_frozen,
                    saves_until_unix=told.saves_until_unix if holds_book else 0.0,
                )
        return state

    def processes(self, kept: Kept | None) -> list[int]:
        """The live processes of the job: those of its command, and those that the command left in
        the background."""
        if kept is None:
            return of_job(self.path, None, None)
        return of_job(self.path, kept.command, kept.supervisor)


class AutosaveFolder(ProcessFolder):
    """The folder of the process that saves one workspace by itself. ``alive`` names its bundle."""

    def __init__(self, home: Path, workspace: WorkspaceName) -> None:
        super().__init__(home, home / AUTOSAVES / workspace)
        self.workspace: Final = workspace

    def bundle(self) -> str:
        """The bundle from which the newest process was started."""
        try:
            return (self.path / "alive").read_text("utf-8").strip()
        except FileNotFoundError:
            return ""

    @property
    def has_told(self) -> bool:
        """Whether an autosave process has written anything."""
        return _is_there(self._state)

    def read(self) -> AutosaveRecord:
        """What the newest process wrote, whether the process lives or not; empty where the file is
        not of that form."""
        try:
            return msgspec.convert(json.loads(self._state.read_bytes()), learned(AutosaveRecord))
        except (OSError, ValueError):
            return AutosaveRecord()


def autosave_folders(home: Path) -> list[AutosaveFolder]:
    """The folders of all workspaces that were ever saved by an autosave process."""
    try:
        return [AutosaveFolder(home, WorkspaceName(n)) for n in os.listdir(home / AUTOSAVES)]
    except FileNotFoundError:
        return []


def _is_there(path: Path) -> bool:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def job_folders(home: Path) -> list[JobFolder]:
    """The folders of all jobs that were ever started on this machine."""
    try:
        names = sorted(os.listdir(home / JOBS))
    except FileNotFoundError:
        return []
    return [JobFolder(home, name) for name in names if _ID.fullmatch(name)]


def all_kept(home: Path) -> list[tuple[JobFolder, Kept]]:
    """What the supervisors of all jobs wrote. MachineError where a file cannot be read."""
    folders = job_folders(home)
    return [(folder, kept) for folder in folders if (kept := folder.read()) is not None]
