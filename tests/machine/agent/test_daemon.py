"""The daemon over a real Unix socket: requests, repeats, faults, and when it leaves."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.fixtures.agent_operations import RunRegistry, operations
from tests.fixtures.waiting import PATIENCE_S, until
from torpor.machine.agent import daemon, orphans
from torpor.machine.agent.daemon import KEPT_RESULTS, Daemon, Patience
from torpor.machine.agent.resume import PendingResume
from torpor.machine.agent.state import WorkspaceState
from torpor.machine.sampler.ring import boot_id
from torpor.machine.supervisor.marker import mark_home
from torpor.shared.values import WorkspaceName
from torpor.shared.wire.protocol import MAX_LINE_BYTES, encode_line


class Agent:
    """A daemon in a thread of this process."""

    def __init__(self, home: Path, patience: Patience) -> None:
        self.home = home
        self.runs = RunRegistry(home)
        self.attached: list[Peer] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.address = str(home / "s")
        self._listener.bind(self.address)
        self._listener.listen(8)
        self.daemon = Daemon(home, "test", operations(self.runs), self.runs, patience)
        self.thread = threading.Thread(target=self.daemon.serve, args=(self._listener,))
        self.thread.start()

    def attach(self) -> Peer:
        """A connection that ends with the agent, where its test has not closed it before."""
        peer = Peer(self.address)
        self.attached.append(peer)
        peer.hello = peer.read()["hello"]
        return peer

    def left(self, timeout_s: float = PATIENCE_S) -> bool:
        self.thread.join(timeout_s)
        return not self.thread.is_alive()


class Clock:
    """The clock of an agent in this process, which stands still until a test moves it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.looks = 0

    def monotonic(self) -> float:
        self.looks += 1
        return self.now_s

    def passes(self, seconds: float) -> None:
        """Returns once the agent has looked at the clock again and again."""
        self.now_s += seconds
        seen = self.looks
        until(lambda: self.looks > seen + 10, "the agent has seen that time has passed")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (daemon, orphans):
        monkeypatch.setattr(module, "time", made)
    return made


class Peer:
    """A control side by hand: lines in, lines out."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(address)
        self._lines = self.socket.makefile("rb")
        self.hello: dict[str, Any] = {}

    def say(self, **message: Any) -> None:
        self.socket.sendall(encode_line(message))

    def read(self) -> dict[str, Any]:
        line = self._lines.readline()
        if not line:
            raise EOFError
        message: dict[str, Any] = json.loads(line)
        return message

    def answer(self, request: str) -> dict[str, Any]:
        while True:
            message = self.read()
            if message.get("id") == request and "event" not in message:
                return message

    def ask(self, request: str, op: str, **args: Any) -> dict[str, Any]:
        self.say(id=request, op=op, args=args)
        return self.answer(request)

    def close(self) -> None:
        self._lines.close()
        self.socket.close()


@contextmanager
def agent_in(home: Path, tick_s: float = 0.01, **patience: float) -> Iterator[Agent]:
    agent = Agent(home, Patience(tick_s=tick_s, **patience))
    try:
        yield agent
    finally:
        agent.daemon.stop()
        for peer in agent.attached:
            peer.close()
        assert agent.left()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    with agent_in(tmp_path) as running:
        yield running


@pytest.fixture
def peer(agent: Agent) -> Peer:
    return agent.attach()


def test_it_says_hello_and_answers(peer: Peer) -> None:
    assert (peer.hello["protocol"], peer.hello["agent"], peer.hello["busy"]) == (1, "test", False)
    assert peer.ask("r1", "echo", words={"a": 1})["result"]["words"] == {"a": 1}
    peer.say(ping=True)
    assert peer.read() == {"pong": True}


def test_its_start_resumes_what_a_killed_run_paused(tmp_path: Path) -> None:
    """Everything of the account was killed, also the process that waits for that."""
    folder, said = WorkspaceState(tmp_path, WorkspaceName("mywork")).folder, tmp_path / "said"
    owed = PendingResume(["sh", "-c", f"echo resumed >> {said}"], 10.0, boot_id())
    (folder / "resume").write_bytes(msgspec.json.encode(owed))
    with agent_in(tmp_path, resume_s=0.0):
        until(lambda: not (folder / "resume").exists(), "what was owed is settled")
    assert said.read_text() == "resumed\n"


def test_the_same_id_attaches_while_it_runs_and_gets_the_kept_answer_later(
    agent: Agent, peer: Peer
) -> None:
    peer.say(id="r", op="wait", args={"count": "n", "until": "go"})
    assert "event" in peer.read()
    second = agent.attach()
    assert second.hello["busy"]
    second.say(id="r", op="wait", args={"count": "n", "until": "go"})
    (agent.home / "go").touch()
    assert peer.answer("r")["result"]["starts"] == second.answer("r")["result"]["starts"] == 1
    assert second.ask("r", "wait", count="n", until="go")["result"]["starts"] == 1


def test_cancel_ends_the_request(peer: Peer) -> None:
    peer.say(id="r", op="wait", args={"count": "n", "until": "never"})
    peer.say(cancel="unknown")
    peer.say(cancel="r")
    assert peer.answer("r")["error"]["type"] == "RunCancelled"


@pytest.mark.parametrize(
    ("op", "args", "kind", "words"),
    [
        ("destroy", {}, "InvalidInput", "destroy"),
        ("echo", {"words": 2}, "InvalidInput", "used before"),
        ("fail", {"how": "full"}, "DiskFull", "/data/model.bin"),
        (
            "fail",
            {"how": "renamed"},
            "MachineError",
            r"/data/a\xff to /data/b: Operation not permitted (EPERM); let the login's user do",
        ),
        ("fail", {"how": "threads"}, "MachineError", "raise `ulimit -u`"),
        ("fail", {"how": "memory"}, "MachineError", "not enough memory"),
        ("big", {"bytes": MAX_LINE_BYTES}, "InvalidInput", "over the limit"),
    ],
)
def test_an_error_has_its_kind_and_the_agent_goes_on(
    peer: Peer, op: str, args: dict[str, Any], kind: str, words: str
) -> None:
    used = "r" if op == "echo" else "other"
    assert peer.ask(used, "echo", words=1)["result"]
    error = peer.ask("r", op, **args)["error"]
    assert error["type"] == kind and words in error["message"]
    assert peer.ask("r2", "echo")["result"]


@pytest.mark.rule(9)
def test_other_errors_say_what_failed_and_neither_answer_nor_log_holds_a_secret(
    agent: Agent, peer: Peer
) -> None:
    url = "https://s3.example/b/o?X-Amz-Signature=5ec5e7"
    grant = {"url": url, "key": "o", "verb": "PUT", "expires_unix": 1}
    error = peer.ask("r", "fail", how="else", key="c0ffee" * 10, grant=grant)["error"]
    assert error["type"] == "MachineError"
    assert "fail" in error["message"] and str(agent.home / "agent.log") in error["message"]
    log = (agent.home / "agent.log").read_text()
    assert "Traceback" in log and "agent_operations.py" in log
    for text in (log, error["message"]):
        assert "5ec5e7" not in text and "c0ffee" not in text


@pytest.mark.parametrize(
    ("line", "words"), [(b"hello?\n", ""), (b"x" * (MAX_LINE_BYTES + 1), "over the limit")]
)
def test_a_line_that_is_no_message_ends_the_connection_with_a_word(
    agent: Agent, line: bytes, words: str
) -> None:
    peer = agent.attach()
    sender = threading.Thread(target=_send_all, args=(peer.socket, line))
    sender.start()
    error = peer.read()["error"]
    assert error["type"] == "InvalidInput" and words in error["message"]
    with pytest.raises((EOFError, ConnectionError)):
        peer.read()
    sender.join(PATIENCE_S)


def test_a_reader_that_does_not_read_blocks_no_other(agent: Agent, peer: Peer) -> None:
    deaf = agent.attach()
    for number in range(8):  # 5 answers of 15 MiB are past what may wait
        deaf.say(id=f"d{number}", op="big", args={"bytes": 15 << 20})
    for number in range(8):  # all were served, whatever the deaf one reads
        answer = peer.ask(f"d{number}", "big", bytes=15 << 20)
        assert len(answer["result"]["text"]) == 15 << 20


def test_kept_answers_are_bounded(agent: Agent, peer: Peer) -> None:
    for number in range(KEPT_RESULTS + 20):
        peer.ask(f"r{number}", "echo")
    assert len(agent.daemon._requests) == KEPT_RESULTS


def test_bye_waits_for_the_run(agent: Agent, peer: Peer) -> None:
    (agent.home / "run-is-active").touch()
    assert peer.ask("b", "bye")["result"] == {}
    assert peer.ask("r", "echo")["result"]
    assert not agent.left(0.05)
    (agent.home / "run-is-active").unlink()
    assert agent.left()
    assert (agent.home / "closed").exists()


@pytest.mark.parametrize("by", ["bye", "a signal"])
def test_it_leaves_at_once(tmp_path: Path, by: str) -> None:
    with agent_in(tmp_path, tick_s=3600.0) as agent:
        peer = agent.attach()
        if by == "bye":
            peer.ask("b", "bye")
        else:
            agent.daemon.stop()
        assert agent.left()


def test_forget_leaves_a_home_that_was_marked_again(tmp_path: Path) -> None:
    """Its user removed it, and may have put files of their own there."""
    home = tmp_path / "home"
    mark_home(home, again=True)
    (home / "thesis.tex").touch()
    with agent_in(home) as agent:
        peer = agent.attach()
        assert peer.ask("f", "forget")["result"] == {}
        assert agent.left()
    assert (home / "thesis.tex").exists()


def test_forget_is_refused_during_a_run_and_then_removes_home(tmp_path: Path) -> None:
    home = tmp_path / "home"
    mark_home(home)
    with agent_in(home) as agent:
        peer = agent.attach()
        (home / "run-is-active").touch()
        assert peer.ask("f", "forget")["error"]["type"] == "WorkspaceBusy"
        (home / "run-is-active").unlink()
        assert peer.ask("f2", "forget")["result"] == {}
        assert agent.left()
    assert not home.exists()


@pytest.mark.rule(6)
def test_a_run_ends_without_its_own_control_side_though_another_is_attached(
    tmp_path: Path,
) -> None:
    with agent_in(tmp_path, abandon_s=0.1) as agent:
        killed, waiting = agent.attach(), agent.attach()
        (tmp_path / "run-is-active").touch()
        killed.say(id="r1", op="wait", args={"run": "run-1", "count": "n", "until": "never"})
        waiting.ask("r2", "echo", run="run-2")
        until((tmp_path / "n").exists, "the request runs")
        killed.close()
        until((tmp_path / "abandoned").exists, "the lost one's run was abandoned")
        ended = waiting.ask("r1", "wait", run="run-1", count="n", until="never")
        assert ended["error"]["type"] == "RunCancelled"
        assert (tmp_path / "abandoned").read_text().startswith("run-1: ")
        assert waiting.ask("r3", "echo", run="run-2")["result"]


def test_a_run_goes_on_with_a_control_side_that_came_back(tmp_path: Path, clock: Clock) -> None:
    with agent_in(tmp_path) as agent:
        first = agent.attach()
        (tmp_path / "run-is-active").touch()
        first.ask("r1", "echo", run="run-1")
        second = agent.attach()
        first.close()
        second.ask("r2", "echo", run="run-1")
        clock.passes(1000)
        assert not agent.left(0)
        assert not (tmp_path / "abandoned").exists()
        (tmp_path / "run-is-active").unlink()


def test_it_leaves_when_it_has_neither_connection_nor_run(tmp_path: Path, clock: Clock) -> None:
    with agent_in(tmp_path) as agent:
        peer = agent.attach()
        clock.passes(1000)
        assert not agent.left(0)
        (tmp_path / "run-is-active").touch()
        peer.close()
        clock.passes(1000)
        assert not agent.left(0)
        (tmp_path / "run-is-active").unlink()

        def left() -> bool:
            clock.now_s += 1000
            return agent.left(0)

        until(left, "it has left")


def _send_all(peer: socket.socket, data: bytes) -> None:
    try:
        peer.sendall(data)
    except OSError:  # the daemon closed: that is the point
        return
