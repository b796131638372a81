"""SSH sessions: people are seen, torpor's own connections are not."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from torpor.machine.sampler.sessions import look
from torpor.shared.wire.activity import NOBODY, OWN_COPY
from torpor_cli.copying import begin_argv

NOW = 1_000_000.0
_PTS_3 = 136 << 8 | 3


class Processes:
    """A /proc of our own making."""

    def __init__(self, root: Path, first: str = "init") -> None:
        self.root = root
        (root / "dev/pts").mkdir(parents=True)
        self.add(1, 0, first)
        self.add(10, 1, "sshd")

    def add(
        self,
        pid: int,
        parent: int,
        name: str,
        argv: str = "",
        terminal: int = 0,
        machine: str = "",
    ) -> None:
        folder = self.root / "proc" / str(pid)
        folder.mkdir(parents=True)
        (folder / "stat").write_text(f"{pid} ({name}) S {parent} {pid} {pid} {terminal} -1 0\n")
        (folder / "cmdline").write_bytes(argv.replace(" ", "\0").encode())
        (folder / "environ").write_bytes(f"HOME=/root\0TORPOR_MACHINE={machine}\0".encode())

    def typed(self, ago_s: float) -> None:
        terminal = self.root / "dev/pts/3"
        terminal.touch()
        os.utime(terminal, (NOW - ago_s, NOW))


@pytest.fixture
def processes(tmp_path: Path) -> Processes:
    return Processes(tmp_path)


def _look(processes: Processes) -> tuple[int, bool]:
    return look(processes.root, lambda: NOW)


def test_nobody_is_there(processes: Processes) -> None:
    processes.add(20, 10, "sshd")  # a connection without a program
    processes.add(30, 1, "python3", "python3 train.py", _PTS_3)  # not under an SSH server
    assert _look(processes) == (NOBODY, False)


@pytest.mark.parametrize("server", ["sshd", "sshd-session", "dropbear", "torpor-sshd"])
def test_a_terminal_counts_by_its_last_input(processes: Processes, server: str) -> None:
    processes.add(20, 10, server)
    processes.add(21, 20, "bash", "-bash", _PTS_3)
    processes.typed(500)
    assert _look(processes) == (500, False)
    processes.add(22, 20, "sftp-server")  # and someone copies files
    assert _look(processes) == (0, False)


@pytest.mark.parametrize("command", ["attach", "attach-and-sample"])
def test_torpors_own_connections_are_left_out(processes: Processes, command: str) -> None:
    attach = f"/root/.torpor/bundles/abc {command} --home /root/.torpor"
    processes.add(20, 10, "sshd")
    processes.add(21, 20, "bash", f"bash -c python3 -s -E -X utf8 {attach}")
    processes.add(22, 21, "python3", f"python3 -s -E -X utf8 {attach}")
    processes.add(30, 10, "sshd")
    processes.add(31, 30, "sh", "")
    processes.add(32, 31, "python3", "python3 -s -E -c ...torpor-probe... ~/.torpor")
    processes.add(40, 10, "sshd")
    processes.add(41, 40, "python3", shlex.join([*begin_argv(), OWN_COPY]))  # of `torpor run`
    assert _look(processes) == (NOBODY, False)
    processes.add(33, 31, "bash", "bash")
    assert _look(processes) == (0, False)


def test_of_several_machines_on_a_host_only_the_sessions_of_its_own_server_count(
    processes: Processes,
) -> None:
    """As at the local provider, whose machines are processes of one account."""
    for pid, machine in ((20, "m-1"), (30, "m-2")):
        processes.add(pid, 1, "torpor-sshd", machine=machine)
        processes.add(pid + 1, pid, "torpor-sshd", machine=machine)
    processes.add(40, 10, "sshd")  # a login to the host itself
    processes.add(41, 40, "bash", "-bash")
    processes.add(32, 31, "bash", "-bash", machine="m-2")
    processes.add(33, 32, "jupyter-lab", machine="m-2")
    assert look(processes.root, lambda: NOW, "m-1") == (NOBODY, False)
    assert look(processes.root, lambda: NOW, "m-2") == (0, True)
    assert look(processes.root, lambda: NOW, "") == (0, True)


def test_a_name_in_parentheses_and_a_process_that_ends(processes: Processes) -> None:
    processes.add(20, 10, "sshd")
    processes.add(21, 20, "a) S 1 (b", "x")
    (processes.root / "proc/40").mkdir()  # its stat is gone
    (processes.root / "proc/41").mkdir()
    (processes.root / "proc/41/stat").touch()
    assert _look(processes) == (0, False)


def test_where_the_ssh_server_is_the_first_process_its_orphans_are_no_sessions(
    tmp_path: Path,
) -> None:
    """As in a container whose start script ends in `exec sshd -D`."""
    processes = Processes(tmp_path, first="sshd")
    processes.add(30, 1, "python3", "python3 train.py")
    processes.add(31, 1, "python3", "python3 /root/.torpor/bundles/abc sample --home /root/.torpor")
    assert _look(processes) == (NOBODY, False)
    processes.add(40, 1, "sshd")
    processes.add(41, 40, "bash", "bash")
    assert _look(processes) == (0, False)


def test_a_jupyter_server_is_seen(processes: Processes) -> None:
    processes.add(50, 1, "jupyter-lab")
    assert _look(processes) == (NOBODY, True)
