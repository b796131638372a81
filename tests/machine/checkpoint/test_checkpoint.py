"""Real CRIU: processes that stop on one machine and go on elsewhere, and those that cannot."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.fixtures.near_agent import NearAgent
from tests.fixtures.waiting import PATIENCE_S, until
from torpor.control.processes import identify
from torpor.machine.agent.programs import Programs, end_frozen, let_go_on
from torpor.machine.checkpoint.criu import CheckpointFailed, Criu
from torpor.machine.supervisor.folder import JobFolder
from torpor.machine.tree.walk import compile_excludes
from torpor.shared.values import PROGRAMS
from torpor.shared.wire.job import (
    JobState,
    LookAtJob,
    StartJob,
    StopJob,
    TryFreezing,
)
from torpor.shared.wire.snapshot import Froze, Program

pytestmark = pytest.mark.usefixtures("needs_server")

JOB = "3f2a9c81d04e"
_CHAIN = """
import hashlib, os, sys, time
link = os.urandom(8).hex()  # in memory alone
kept = open("kept")
with open("chain", "a") as chain:
    while not os.path.exists("stop"):
        print(link, file=chain, flush=True)
        link = hashlib.sha256(link.encode()).hexdigest()[:16]
        time.sleep(0.01)
sys.exit(7)
"""

_STRAY = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
os.wait()
"""


_CANARY = """
import sys
from pathlib import Path
from torpor.machine.checkpoint import canary
from torpor.machine.checkpoint.criu import CheckpointFailed
from torpor.machine.checkpoint.tree import program, why_not
print(why_not())
canary._ANSWER_S = canary.DUMP_S = canary.RESTORE_S = 300.0  # a busy host takes its time
try:
    canary.run_canary(program(Path(sys.argv[1])), Path(sys.argv[2]))
    print("flew")
except CheckpointFailed as error:
    print("did not fly")
"""
CONTAINER = (
    "+chown,+dac_override,+fowner,+fsetid,+kill,+setgid,+setuid,+setpcap,+net_bind_service,+net_raw,"
    "+sys_chroot,+mknod,+audit_write,+setfcap"
)
"""What Docker gives by default."""
KILLED = 'timeout -s KILL 0.03 "${0%/*}/loader" "$@"; exit 9'
"""CRIU is killed in the middle: a dump or a restore takes longer than that."""


class Chain:
    """A job whose every line is the hash of the line before."""

    def __init__(self, folder: Path, criu: Path) -> None:
        self.agent = NearAgent(folder / "home")
        self.place = folder / "workspace"
        self.place.mkdir()
        (self.place / "kept").touch()
        self.images = self.place / PROGRAMS / JOB
        self.criu = criu
        self.exclude: list[str] = []
        self.code = _CHAIN
        self._attempts = 0

    def start(self, images: Path | None = None) -> JobState:
        self._attempts += 1
        argv = [sys.executable, "-c", self.code]
        log = str(self.place / "log")
        state = self.agent.call(
            StartJob(
                *(JOB, self._attempts, argv, str(self.place), log, []),
                images=str(images or ""),
                criu=str(self.criu),
            )
        )
        grown = len(self.lines())
        if state.state == "running":
            until(lambda: len(self.lines()) > grown + 3, "it works")
        return state

    @property
    def program(self) -> Program:
        return Program(JOB, str(self.images))

    def programs(self) -> Programs:
        return Programs(self.agent.home, os.fsencode(self.place), compile_excludes(self.exclude))

    def freeze(self) -> Froze:
        said = self.programs().freeze([self.program], str(self.criu), PATIENCE_S, lambda: None)
        return next(said)

    def look(self) -> Froze:
        (found,) = self.agent.call(TryFreezing("", [JOB])).programs
        return found

    def vanish(self) -> None:
        """As a machine that was destroyed: the processes are gone, and the files are elsewhere."""
        folder = JobFolder(self.agent.home, JOB)
        kept = folder.look()[1]
        assert kept is not None
        for pid in [*folder.processes(kept), kept.supervisor.pid]:
            with suppress(ProcessLookupError):  # a namespace ends with its first process
                os.kill(pid, signal.SIGKILL)
        until(lambda: not kept.supervisor.lives and not folder.processes(kept), "all are gone")

    def spoil(self, action: str, how: str) -> None:
        """From now on CRIU does ``action`` as the shell does ``how``, of ``"$@"``."""
        spoiled = self.place.parent / "spoiled"
        shutil.copytree(self.criu, spoiled, copy_function=os.link)
        loader = spoiled / "ld-linux-x86-64.so.2"
        loader.rename(spoiled / "loader")
        loader.write_text(
            f'#!/bin/sh\ncase "$4$5" in {action}*) {how};; esac\nexec {spoiled}/loader "$@"\n'
        )
        self.criu = spoiled

    def take_pid(self) -> subprocess.Popen[bytes]:
        """Let a process of this host have the number of the frozen one: this, or whichever was
        begun first."""
        pid = json.loads((self.images / "tree.json").read_text())["pid"]
        for _ in range(100):
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
            other = subprocess.Popen(["sleep", "600"])
            if Path(f"/proc/{pid}").exists():
                return other
            other.kill()
            other.wait()
        raise AssertionError(f"process {pid} cannot be made")

    def better_processor(self) -> None:
        """As on a machine with a processor that can more than this one."""
        image = self.images / "cpuinfo.img"
        every = b"\x30\xff\xff\xff\xff\x0f"  # a capability word of CRIU's cpuinfo_x86_entry
        words = re.compile(b"\x30[\x80-\xff]{4}[\x01-\x0f]")
        image.write_bytes(words.sub(every, image.read_bytes()))

    def older_kernel(self) -> None:
        """As on a machine with a newer kernel than this one."""
        facts = json.loads((self.images / "tree.json").read_text())
        (self.images / "tree.json").write_text(json.dumps({**facts, "kernel": "99.1"}))

    def goes_on(self) -> None:
        seen = len(self.lines())
        until(lambda: len(self.lines()) > seen, "it goes on")
        assert not self.images.exists()

    def lines(self) -> list[str]:
        chain = self.place / "chain"
        return chain.read_text().split() if chain.exists() else []

    def is_whole(self) -> bool:
        """Whether no line is missing or stands twice."""
        lines = self.lines()
        made = [hashlib.sha256(line.encode()).hexdigest()[:16] for line in lines[:-1]]
        return made == lines[1:]


@pytest.fixture
def chain(tmp_path: Path, criu: Path) -> Iterator[Chain]:
    chain = Chain(tmp_path, criu)
    yield chain
    chain.agent.call(StopJob(JOB, 0.0))
    chain.agent.runs.close()


def test_a_command_goes_on_where_it_was_also_a_second_time(chain: Chain) -> None:
    assert chain.look() == Froze(JOB)
    assert not chain.start().went_on
    assert chain.look().bytes > 0
    for _ in range(2):
        assert chain.freeze().bytes > 0
        chain.vanish()
        state = chain.start(chain.images)
        assert (state.went_on, state.afresh) == (True, "")
        assert not chain.images.exists()
    assert chain.is_whole()
    (chain.place / "stop").touch()

    def ended() -> JobState | None:
        state = chain.agent.call(LookAtJob(JOB, 0, 1000)).state
        return state if state.state == "ended" else None

    assert until(ended, "it has ended").status == 7


def test_a_command_that_was_frozen_in_vain_goes_on_here(chain: Chain) -> None:
    chain.start()
    chain.freeze()
    stopped = len(chain.lines())
    let_go_on(chain.agent.home, [chain.program])
    until(lambda: len(chain.lines()) > stopped, "it goes on")
    assert chain.is_whole()
    assert not chain.images.exists()


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (lambda chain: (chain.place / "chain").unlink(), "chain"),
        (lambda chain: (chain.images / "tree.json").write_text("{}"), "holds no process tree"),
        (lambda chain: next(chain.images.glob("pages-*.img")).unlink(), ""),
        (lambda chain: (chain.place / "kept").write_text("other"), "kept"),
        (lambda chain: chain.older_kernel(), "this machine has the older"),
        (lambda chain: chain.better_processor(), "this machine's processor lacks what"),
        (lambda chain: chain.spoil("cpuinfo", "kill -9 $$"), "CRIU cpuinfo ended with -9"),
        (lambda chain: chain.spoil("restore", "kill -9 $$"), "CRIU restore ended with -9"),
        (lambda chain: chain.spoil("restore", KILLED), "CRIU restore ended with"),
    ],
    ids=["a file is gone", "no facts", "no memory", "a file has another size", "an older kernel",
         "a lesser processor", "killed at the check", "killed at once", "killed while it restores"],
)  # fmt: skip
def test_where_they_cannot_go_on_the_command_starts_afresh_and_says_why(
    chain: Chain, harm: Callable[[Chain], object], why: str
) -> None:
    chain.start()
    chain.freeze()
    chain.vanish()
    harm(chain)
    state = chain.start(chain.images)
    assert not state.went_on
    assert state.afresh
    assert why in state.afresh
    assert not chain.images.exists()


def test_a_number_that_is_taken_on_the_machine_keeps_nobody_from_going_on(chain: Chain) -> None:
    chain.start()
    chain.freeze()
    chain.vanish()
    with chain.take_pid() as other:
        state = chain.start(chain.images)
        other.kill()
    assert (state.went_on, state.afresh) == (True, "")
    assert chain.is_whole()


@pytest.mark.parametrize(
    ("action", "how"),
    [("dump", "kill -9 $$"), ("dump", KILLED), ("cpuinfo", "kill -9 $$")],
    ids=["as the dump begins", "while it dumps", "after the dump"],
)
def test_where_criu_is_killed_the_command_runs_on_or_its_end_is_known(
    chain: Chain, action: str, how: str
) -> None:
    chain.start()
    chain.spoil(action, how)
    assert f"CRIU {action} ended with" in chain.freeze().why_not
    assert not chain.images.exists()
    seen = len(chain.lines())

    def known() -> bool:
        ended = chain.agent.call(LookAtJob(JOB, 0, 1000)).state.state == "ended"
        return ended or len(chain.lines()) > seen

    until(known, "it runs on, or has ended")
    assert chain.is_whole()


@pytest.mark.parametrize("action", ["dump", "restore"])
def test_one_that_hangs_is_ended_with_all_that_it_began(tmp_path: Path, action: str) -> None:
    hangs = Criu(
        ["sh", "-c", 'sleep 600 & echo $! > "$0/new"; mv "$0/new" "$0/began"; wait', str(tmp_path)]
    )
    for most_s in (1.0, 20.0, PATIENCE_S):  # on a busy host it may be ended before it has begun
        with pytest.raises(CheckpointFailed, match=f"CRIU {action} took over {most_s:g} s"):
            if action == "dump":
                hangs.dump(os.getpid(), tmp_path, most_s)
            else:
                hangs.restore(tmp_path, most_s)
        if (tmp_path / "began").exists():
            break
    began = int((tmp_path / "began").read_text())
    until(lambda: identify(began) is None, "what it began is gone")


def test_a_machine_that_ends_kills_what_is_frozen_and_nothing_else(chain: Chain) -> None:
    chain.start()
    end_frozen(chain.agent.home, [chain.program])
    assert chain.agent.call(LookAtJob(JOB, 0, 1000)).state.state == "running"
    chain.freeze()
    end_frozen(chain.agent.home, [chain.program])

    def killed() -> bool:
        return chain.agent.call(LookAtJob(JOB, 0, 1000)).state.status == -signal.SIGKILL

    assert until(killed, "it is killed")


def test_what_no_snapshot_would_hold_is_not_frozen(chain: Chain) -> None:
    chain.start()
    chain.exclude = ["*.img"]
    assert "the workspace's `exclude` leaves out .torpor-process/" in chain.freeze().why_not
    chain.goes_on()


def test_one_that_is_frozen_already_stays_so(chain: Chain) -> None:
    chain.start()
    frozen = chain.freeze()
    assert chain.freeze().bytes == frozen.bytes
    chain.vanish()
    assert chain.start(chain.images).went_on
    assert chain.is_whole()


def test_what_no_run_has_frozen_now_is_forgotten(chain: Chain, tmp_path: Path) -> None:
    """Else old memory might go on beside newer files. Nothing else is touched."""
    chain.start()
    chain.freeze()
    programs = Programs(chain.agent.home, os.fsencode(chain.place), None)
    programs.forget([chain.program])
    assert chain.images.is_dir()
    programs.forget([])
    assert not chain.images.exists()
    (tmp_path / "elsewhere" / JOB).mkdir(parents=True)
    chain.images.parent.rmdir()
    chain.images.parent.symlink_to(tmp_path / "elsewhere")
    programs.forget([])
    assert (tmp_path / "elsewhere" / JOB).is_dir()
    let_go_on(chain.agent.home, [chain.program])


def test_one_that_somebody_lets_go_on_is_not_frozen_any_more(chain: Chain) -> None:
    """Its memory is older than its files then."""
    chain.start()
    programs = chain.programs()
    next(programs.freeze([chain.program], str(chain.criu), PATIENCE_S, lambda: None))
    assert programs.awake() == []
    _, kept = JobFolder(chain.agent.home, JOB).look()
    assert kept is not None
    os.kill(kept.command.pid, signal.SIGCONT)
    assert programs.awake() == [f"{PROGRAMS}/{JOB}"]
    os.kill(kept.command.pid, signal.SIGKILL)
    until(lambda: not kept.command.lives, "it is gone")
    assert (
        next(programs.freeze([chain.program], str(chain.criu), PATIENCE_S, lambda: None)).bytes == 0
    )
    assert not chain.images.exists()


def test_where_the_folder_of_images_is_a_link_nothing_is_frozen(chain: Chain) -> None:
    chain.start()
    (chain.place / "elsewhere").mkdir()
    chain.images.parent.symlink_to(chain.place / "elsewhere")
    assert "is a link, and no snapshot follows it" in chain.freeze().why_not


def test_what_goes_wrong_with_one_keeps_none_of_the_others_stopped(chain: Chain) -> None:
    chain.start()
    chain.freeze()
    broken = JobFolder(chain.agent.home, "1" * 12)
    broken.make()
    (broken.path / "state").write_text("{")
    images = chain.place / PROGRAMS / broken.job
    images.mkdir()
    faults = let_go_on(chain.agent.home, [Program(broken.job, str(images)), chain.program])
    assert [fault.partition(" was frozen")[0] for fault in faults] == [f"program {broken.job}"]
    chain.goes_on()


def test_what_runs_outside_of_the_tree_is_named(chain: Chain) -> None:
    chain.code = "import os\nif os.fork() and os.fork(): pass\nelse: os.setsid()\n" + _CHAIN
    chain.code = _STRAY + _CHAIN
    chain.start()
    assert chain.look().why_not == chain.freeze().why_not
    assert "run in the background, outside of its tree" in chain.look().why_not
    chain.goes_on()


def test_one_whose_supervisor_was_killed_goes_on_in_its_namespace(chain: Chain) -> None:
    """Also where its environment names the folder of another machine."""
    chain.start()
    chain.freeze()
    chain.vanish()
    folder = chain.agent.home / "jobs"
    folder.rename(chain.agent.home / "other")
    assert chain.start(chain.images).went_on
    kept = JobFolder(chain.agent.home, JOB).look()[1]
    assert kept is not None
    os.kill(kept.supervisor.pid, signal.SIGKILL)
    until(lambda: not kept.supervisor.lives, "it is gone")
    assert chain.freeze().bytes > 0
    let_go_on(chain.agent.home, [chain.program])
    chain.goes_on()


def test_what_cannot_be_frozen_goes_on(chain: Chain, tmp_path: Path) -> None:
    chain.start()
    chain.criu = tmp_path / "none"
    assert chain.freeze().why_not.startswith("CRIU cannot be started")
    chain.goes_on()


def test_a_disk_that_is_full_in_the_middle_of_the_dump_lets_it_go_on(chain: Chain) -> None:
    chain.start()
    folder = chain.images.parent
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    subprocess.run(mount, check=True)
    try:
        assert chain.freeze().why_not
        chain.goes_on()
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
    assert chain.is_whole()


def test_a_disk_that_is_full_after_the_dump_lets_it_go_on(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(criu: Criu, images: Path, within_s: float) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Criu, "write_cpu", full)
    chain.start()
    assert "No space left on device" in chain.freeze().why_not
    chain.goes_on()
    assert chain.is_whole()


def test_the_canary_is_a_proof(chain: Chain) -> None:
    assert chain.agent.call(TryFreezing(str(chain.criu))).why_not == ""
    chain.criu = chain.place
    assert "CRIU cannot be started" in chain.agent.call(TryFreezing(str(chain.criu))).why_not


@pytest.mark.parametrize(
    ("more", "lacks"),
    [
        ("", "NET_ADMIN, SYS_ADMIN, SYS_TIME"),
        (",+checkpoint_restore,+sys_ptrace", "NET_ADMIN, SYS_ADMIN, SYS_TIME"),
        (",+sys_admin,+sys_ptrace", "NET_ADMIN, SYS_TIME"),
        (",+sys_admin,+sys_ptrace,+net_admin", "SYS_TIME"),
        (",+sys_ptrace,+sys_time,+net_admin", "SYS_ADMIN"),
        (",+sys_admin,+sys_ptrace,+sys_time,+net_admin", ""),
    ],
)
def test_without_a_capability_it_says_so_and_with_all_the_canary_flies(
    criu: Path, tmp_path: Path, more: str, lacks: str
) -> None:
    """From what a container has by default. The canary agrees with what is said for nothing."""
    argv = ["setpriv", f"--bounding-set=-all,{CONTAINER}{more}", sys.executable, "-c", _CANARY]
    done = subprocess.run([*argv, str(criu), str(tmp_path)], capture_output=True, text=True)
    said, flew = done.stdout.splitlines()
    assert flew == ("flew" if not lacks else "did not fly"), done.stdout + done.stderr
    assert said == "" if not lacks else f"lacks the capabilities {lacks}, as in containers" in said
