"""The sampler's process: one for each HOME, apart from the agent and from every connection.

``HOME/sampler.alive`` is locked as long as a sampler lives, and holds its process id and version.
Whoever starts one takes the lock first and passes it on, so that there are never two.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time
from collections import deque
from pathlib import Path
from typing import Final

from torpor.machine.sampler import sessions
from torpor.machine.sampler.gpu_table import write_gpu_table
from torpor.machine.sampler.gpus import Gpus
from torpor.machine.sampler.host import HostSampler
from torpor.machine.sampler.jupyter import Jupyter
from torpor.machine.sampler.ring import Ring, boot_clock_s, boot_id
from torpor.machine.sampler.save_lock import is_saving
from torpor.shared.wire.activity import (
    JUPYTER_SILENT,
    NOBODY,
    OWN_RUN,
    OWN_SAVE,
    PERSON,
    UNKNOWN,
    GpuTable,
    Sample,
)

ALIVE: Final = "sampler.alive"
EVERY_S: Final = 1.0
SESSIONS_S: Final = 10.0
"""Seconds between two lists of the machine's processes. A list takes 1 ms for each hundred
processes."""
GONE_S: Final = 5.0
"""Seconds within which a sampler that was asked to leave is gone."""
PEAK_SAMPLES: Final = 60


def ensure_sampler(
    home: Path, version: str, start: list[str], log: str
) -> subprocess.Popen[bytes] | None:
    """Start a sampler unless one of this version lives; replace one of another version. Returns
    what was started: its parent may wait for its end."""
    fd = _take(home)
    if fd is None and _alive(home)[1] not in ("", version):
        dismiss(home)
        fd = _take(home)
    if fd is None:
        return None
    try:
        os.ftruncate(fd, 0)  # the text is of a sampler that has ended
        with open(home / log, "ab") as words:
            return subprocess.Popen(
                [*start, "--lock", str(fd)],
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
                cwd=home,
                start_new_session=True,
                pass_fds=(fd,),
            )
    finally:
        os.close(fd)  # the sampler holds the lock by its own copy


def dismiss(home: Path) -> None:
    """End the sampler, if there is one, and wait until it is gone."""
    give_up = time.monotonic() + GONE_S
    while (fd := _take(home)) is None and time.monotonic() < give_up:
        pid = _alive(home)[0]  # 0: it has just been started
        if pid:
            try:
                os.kill(pid, signal.SIGTERM)
            except ProcessLookupError:
                continue
        time.sleep(0.02)
    if fd is not None:
        os.close(fd)


def sample(home: Path, version: str, lock: int, marker: str, agent: str) -> None:
    """Write a sample a second until a signal comes or HOME is gone. ``marker`` is the file that
    says that HOME is torpor's; ``agent`` the file that says whether a run is active."""
    os.pwrite(lock, f"{os.getpid()} {version}\n".encode("ascii"), 0)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    leave = {signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, leave)
    ours = _identity(home / marker)
    ring = Ring(home)
    sampler = Sampler(ring.newest, home / agent)
    due = time.monotonic()
    while ours is not None and _identity(home / marker) == ours:
        ring.append(sampler.next())
        if (table := sampler.gpu_table()) is not None:
            write_gpu_table(home, table)
        due = max(due + EVERY_S, time.monotonic())
        if signal.sigtimedwait(leave, max(0.0, due - time.monotonic())):
            break
    ring.close()


class Sampler:
    """Makes the samples; ``newest`` is the last sample of an earlier sampler."""

    def __init__(self, newest: Sample | None, agent: Path) -> None:
        self._newest = newest
        self._agent = agent
        self._boot = boot_id()
        self._gpus, self._host, self._jupyter = Gpus(), HostSampler(), Jupyter()
        self._sessions = sessions.SessionLook(NOBODY, False)
        self._sessions_s = -SESSIONS_S
        self._gpu_minute: deque[int] = deque(maxlen=PEAK_SAMPLES)
        self._cpu_minute: deque[int] = deque(maxlen=PEAK_SAMPLES)

    def next(self) -> Sample:
        now_s = boot_clock_s()
        if now_s - self._sessions_s >= SESSIONS_S:
            self._sessions, self._sessions_s = sessions.look(), now_s
        gpu, host, before = self._gpus.look(), self._host.look(), self._newest
        ssh_s, jupyter_s = self._sessions.ssh_s, self._jupyter.quiet_s
        own = _run_active(self._agent)
        saves = is_saving(self._agent.parent)
        silent = self._sessions.jupyter and not self._jupyter.answered
        person = (ssh_s, jupyter_s) != (NOBODY, NOBODY) or (before and before.flags & PERSON)
        self._gpu_minute.append(gpu.percent)
        self._cpu_minute.append(UNKNOWN if own or saves else host.cpu)
        self._newest = Sample(
            number=before.number + 1 if before else 1,
            at_s=now_s,
            boot=self._boot,
            gpus=gpu.number,
            gpu_state=gpu.state,
            gpu=gpu.percent,
            cpu=host.cpu,
            network=host.network,
            disk=host.disk,
            ssh_s=ssh_s,
            jupyter_s=jupyter_s,
            flags=own * OWN_RUN
            | silent * JUPYTER_SILENT
            | bool(person) * PERSON
            | saves * OWN_SAVE,
            gpu_peak=max(before.gpu_peak if before else 0, _mean(self._gpu_minute)),
            cpu_peak=max(before.cpu_peak if before else 0, _mean(self._cpu_minute)),
        )
        return self._newest

    def gpu_table(self) -> GpuTable | None:
        """The figures of each GPU, if this second has read the last of them."""
        figures = self._gpus.figures()
        return GpuTable(boot_clock_s(), self._boot, figures) if figures else None


def _mean(minute: deque[int]) -> int:
    """The mean of a whole minute; 0 while it is unknown."""
    if len(minute) < PEAK_SAMPLES or UNKNOWN in minute:
        return 0
    return sum(minute) // len(minute)


def _run_active(agent: Path) -> bool:
    """Whether the agent works on a workspace, as its file says."""
    try:
        pid, *words = agent.read_text("ascii").split()
        return "busy" in words and os.path.exists(f"/proc/{int(pid)}")
    except (OSError, ValueError):
        return False


def _take(home: Path) -> int | None:
    """The sampler's lock; None while a sampler holds it."""
    fd = os.open(home / ALIVE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def _alive(home: Path) -> tuple[int, str]:
    """The process and version of the sampler that holds the lock; 0 until it has written them."""
    words = (home / ALIVE).read_text("ascii").split()
    return (int(words[0]), words[1]) if len(words) == 2 else (0, "")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_dev, facts.st_ino
