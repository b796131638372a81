"""attach: starts one agent, survives its death, replaces others, refuses foreign folders."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.sshd import argv_of
from tests.fixtures.waiting import PATIENCE_S, until
from torpor.machine.agent.packages import this_system
from torpor.machine.sampler.process import ALIVE, dismiss
from torpor.machine.sampler.ring import RING, read
from torpor.machine.supervisor.marker import MARKER

pytestmark = pytest.mark.usefixtures("needs_server")


class Attached:
    """One attach process, spoken to over its pipes."""

    def __init__(self, bundle: Path, home: Path, command: str = "attach") -> None:
        argv = [sys.executable, "-s", str(bundle), command, "--home", str(home)]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    @cached_property
    def first(self) -> dict[str, Any]:
        """What it says at once."""
        return self.read()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        message: dict[str, Any] = json.loads(self.process.stdout.readline() or b"{}")
        return message

    def ask(self, request: str, op: str, **args: Any) -> dict[str, Any]:
        assert "hello" in self.first and self.process.stdin is not None, self.first
        line = json.dumps({"id": request, "op": op, "args": args}) + "\n"
        self.process.stdin.write(line.encode())
        self.process.stdin.flush()
        return self.read()

    def close(self) -> int:
        assert self.first
        self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode


@pytest.fixture
def bundle(agent_source: Path, tmp_path: Path) -> Path:
    return make_bundle(agent_source, tmp_path / "bundles" / "one", "1" * 64)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "home"
    yield folder
    pid = agent_of(folder)
    if pid:
        os.kill(pid, signal.SIGKILL)
        until(lambda: not argv_of(pid), "the agent is gone")


def make_bundle(source: Path, folder: Path, version: str) -> Path:
    shutil.copytree(source, folder)
    (folder / "__main__.py").write_text(
        "import sys\nfrom torpor.machine.agent.__main__ import main\nsys.exit(main(sys.argv))\n"
    )
    (folder / ".complete").write_text(version + "\n")
    return folder


def agent_of(home: Path) -> int | None:
    try:
        pid = int((home / "agent.alive").read_text().split()[0])  # it may be busy
    except (FileNotFoundError, IndexError):
        return None
    return pid if "daemon" in argv_of(pid) else None


def test_many_at_once_start_one_agent(bundle: Path, home: Path) -> None:
    peers = [Attached(bundle, home) for _ in range(6)]
    pids = {peer.ask("r", "echo")["result"]["pid"] for peer in peers}
    assert pids == {agent_of(home)}
    assert {peer.close() for peer in peers} == {0}


def test_home_is_private_and_the_agent_is_detached(bundle: Path, home: Path) -> None:
    peer = Attached(bundle, home)
    pid = peer.ask("r", "echo")["result"]["pid"]
    assert home.stat().st_mode & 0o777 == 0o700
    assert (home / "agent.sock").stat().st_mode & 0o777 == 0o600
    came_with = this_system(home).image  # kept at the first start
    assert came_with is not None and came_with.pip
    assert os.getsid(pid) == pid != os.getsid(0)
    assert os.readlink(f"/proc/{pid}/cwd") == str(home)
    assert os.readlink(f"/proc/{pid}/fd/0") == "/dev/null"
    peer.process.kill()
    peer.close()
    assert agent_of(home) == pid


def test_only_where_it_is_wanted_a_sampler_stays(bundle: Path, home: Path) -> None:
    Attached(bundle, home).close()
    assert not (home / ALIVE).exists()
    Attached(bundle, home, "attach-and-sample").close()
    until(lambda: read(home / RING), "it samples")
    dismiss(home)


def test_a_killed_agent_is_followed_by_a_new_one(bundle: Path, home: Path) -> None:
    peer = Attached(bundle, home)
    pid = peer.ask("r", "echo")["result"]["pid"]
    os.kill(pid, signal.SIGKILL)
    assert peer.close() == 0
    assert (home / "agent.sock").exists()  # stale
    again = Attached(bundle, home)
    assert again.ask("r", "echo")["result"]["pid"] == agent_of(home) != pid
    again.close()


def test_an_agent_whose_folder_is_removed_leaves_and_another_one_takes_its_place(
    bundle: Path, home: Path
) -> None:
    """Two agents in one HOME would know nothing of each other's runs."""
    peer = Attached(bundle, home)
    pid = peer.ask("r", "echo")["result"]["pid"]
    shutil.rmtree(home)
    assert peer.close() == 0
    until(lambda: not argv_of(pid), "the agent has left")
    again = Attached(bundle, home)
    assert again.ask("r", "echo")["result"]["pid"] == agent_of(home) != pid
    again.close()


def test_an_agent_whose_marker_is_removed_can_be_attached_to(bundle: Path, home: Path) -> None:
    peer = Attached(bundle, home)
    pid = peer.ask("r", "echo")["result"]["pid"]
    (home / MARKER).unlink()
    until((home / MARKER).exists, "it is made again")
    again = Attached(bundle, home)
    assert again.ask("s", "echo")["result"]["pid"] == pid
    assert (again.close(), peer.close()) == (0, 0)


@pytest.mark.parametrize("op", ["", "forget"])
def test_a_folder_that_took_the_name_of_torpors_stays_its_users(
    bundle: Path, home: Path, op: str
) -> None:
    """The agent, whose own folder was removed, neither marks it nor removes it."""
    peer = Attached(bundle, home)
    pid = peer.ask("r", "echo")["result"]["pid"]
    other = home.parent / "other"
    other.mkdir()
    (other / "thesis.tex").touch()
    home.rename(home.parent / "was")
    other.rename(home)
    if op:
        assert peer.ask("s", op) == {"id": "s", "result": {}}
    peer.close()
    until(lambda: not argv_of(pid), "the agent has left")
    assert (home / "thesis.tex").exists() and not (home / MARKER).exists()
    again = Attached(bundle, home)
    assert "holds files that are not torpor's" in again.first["error"]["message"]
    again.close()


def test_a_second_agent_that_the_kernel_ends_for_want_of_memory_is_the_last(
    bundle: Path, home: Path, tmp_path: Path
) -> None:
    """The kernel's files are a folder, in which the test counts what it kills."""
    group = tmp_path / "kernel/sys/fs/cgroup"
    main = bundle / "__main__.py"
    main.write_text(
        "from pathlib import Path\n"
        "from torpor.machine.agent.memory_trouble import MemoryTrouble\n"
        f"MemoryTrouble.root = Path({str(tmp_path / 'kernel')!r})\n" + main.read_text()
    )
    for name, text in {
        "memory.max": f"{256 << 20}\n",
        "memory.current": f"{40 << 20}\n",
        "memory.peak": f"{255 << 20}\n",
        "memory.stat": "anon 1\n",
        "memory.events": "oom_kill 0\n",
        "../../../proc/self/cgroup": "0::/\n",
    }.items():
        (group / name).resolve().parent.mkdir(parents=True, exist_ok=True)
        (group / name).resolve().write_text(text)

    def killed(counted: int) -> None:
        peer = Attached(bundle, home)
        pid = peer.ask("r", "echo")["result"]["pid"]
        (group / "memory.events").write_text(f"oom_kill {counted}\n")
        os.kill(pid, signal.SIGKILL)
        peer.close()

    killed(0)  # by somebody else
    killed(1)
    peer = Attached(bundle, home)  # with one part at a time
    peer.ask("r", "bye")
    peer.close()
    until(lambda: agent_of(home) is None, "it has left by itself: all is forgotten")
    killed(2)
    killed(3)
    refused = Attached(bundle, home)
    said = refused.first["error"]
    refused.close()
    assert said["type"] == "MachineUnfit"
    assert "the kernel ended the agent 2 times" in said["message"]
    assert "has 256 MiB; at most 255 MiB were in use, and 40 MiB" in said["message"]
    assert "docker run --memory" in said["message"]
    last = Attached(bundle, home)  # it says so once: there may be more memory now
    assert last.ask("r", "echo")["result"]["pid"] == agent_of(home)
    last.close()


def test_another_version_without_a_run_is_replaced(
    bundle: Path, home: Path, agent_source: Path, tmp_path: Path
) -> None:
    old = Attached(bundle, home)
    pid = old.ask("r", "echo")["result"]["pid"]
    newer = make_bundle(agent_source, tmp_path / "bundles" / "two", "2" * 64)
    new = Attached(newer, home)
    assert new.first["hello"]["agent"] == "2" * 64
    assert old.close() == 0
    assert not argv_of(pid)
    new.close()
    assert not bundle.exists()  # only the running bundle stays


def test_another_version_with_a_run_is_left_alone(
    bundle: Path, home: Path, agent_source: Path, tmp_path: Path
) -> None:
    old = Attached(bundle, home)
    assert old.ask("r", "echo")["result"]
    (home / "run-is-active").touch()
    new = Attached(make_bundle(agent_source, tmp_path / "bundles" / "two", "2" * 64), home)
    assert new.first["error"]["type"] == "MachineUnfit"
    assert "another version" in new.first["error"]["message"]
    assert new.close() == 1
    assert old.ask("s", "echo")["result"]
    old.close()
    assert bundle.exists()


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("import no_such_module\n", "MachineUnfit", "no_such_module"),
        ("import os\nos.kill(os.getpid(), 9)\n", "AgentLost", "signal 9"),
    ],
)
def test_an_agent_that_cannot_start_says_why_and_may_be_asked_for_again(
    bundle: Path, home: Path, fault: str, kind: str, words: str
) -> None:
    operations = bundle / "torpor" / "machine" / "agent" / "operations.py"
    working = operations.read_text()
    operations.write_text(fault)
    peer = Attached(bundle, home)
    assert peer.first["error"]["type"] == kind
    assert words in peer.first["error"]["message"]
    assert peer.close() == 1
    assert agent_of(home) is None
    operations.write_text(working)
    again = Attached(bundle, home)
    assert again.ask("r", "echo")["result"]
    again.close()


def test_a_folder_that_is_not_ours_is_refused_and_untouched(bundle: Path, home: Path) -> None:
    home.mkdir(mode=0o755)
    (home / "thesis.txt").write_text("the only copy")
    peer = Attached(bundle, home)
    assert peer.first["error"]["type"] == "MachineUnfit"
    peer.close()
    assert os.listdir(home) == ["thesis.txt"]
    assert home.stat().st_mode & 0o777 == 0o755
