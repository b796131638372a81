"""Sessions over a real OpenSSH server: calls, drops, kills, several at once, no secrets left."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.fixtures.agent_operations import Big, Echo, Fail, Odd, Wait
from tests.fixtures.sshd import Sshd, argv_of
from tests.fixtures.waiting import PATIENCE_S, until
from torpor.control.remote import session as session_module
from torpor.control.remote.link import Link
from torpor.control.remote.session import SshSession
from torpor.shared.errors import (
    AgentLost,
    InvalidInput,
    MachineError,
    MachineUnfit,
    RunCancelled,
    Unforeseen,
    WorkspaceAsleep,
)
from torpor.shared.values import Grant, ObjectKey
from torpor.shared.wire.machine import Bye, Forget
from torpor.shared.wire.protocol import PING_LINE, Hello, Said
from torpor.shared.wire.request import Event, Nothing, Request

Opener = Callable[..., SshSession]


@pytest.fixture
def opened(sshd: Sshd, agent_source: Path, bundle_cache: Path) -> Iterator[Opener]:
    sessions = []

    def open_one(**options: Any) -> SshSession:
        session = SshSession.open(
            sshd.endpoint, sshd.identity, cache=bundle_cache, source=agent_source, **options
        )
        sessions.append(session)
        return session

    yield open_one
    for session in sessions:
        session.close()


@pytest.fixture
def agent_home(sshd: Sshd) -> Path:
    return sshd.home / ".torpor"


@contextmanager
def running(session: SshSession, agent_home: Path) -> Iterator[Future[Any]]:
    """A call that runs on the machine until the file ``go`` is there."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(session.call, Wait("n", "go"), request_id="r")
        until((agent_home / "n").exists, "the request runs")
        yield answer


def test_install_attach_call_and_attach_again(opened: Opener, agent_home: Path) -> None:
    first = opened()
    assert first.hello.protocol == 1
    pid = first.call(Echo({"a": 1}), request_id="r1").pid
    first.close()
    second = opened()
    assert second.call(Echo(), request_id="r2").pid == pid
    assert second.hello.machine == first.hello.machine
    installed = os.listdir(agent_home / "bundles")
    assert installed == [second.hello.agent]
    assert agent_home.stat().st_mode & 0o777 == 0o700


def test_thirty_two_calls_at_once_over_one_connection(
    opened: Opener, agent_home: Path, sshd: Sshd
) -> None:
    session = opened()
    with ThreadPoolExecutor(32) as pool:
        answers = [
            pool.submit(session.call, Wait(f"n{i}", "go"), request_id=f"part-{i}")
            for i in range(32)
        ]
        until(lambda: all((agent_home / f"n{i}").exists() for i in range(32)), "all 32 run")
        (agent_home / "go").touch()
        assert [answer.result(PATIENCE_S).starts for answer in answers] == [1] * 32
    assert sshd.log.read_text().count("Accepted publickey") == 1


def test_events_come_in_the_callers_thread(opened: Opener, agent_home: Path) -> None:
    seen: list[tuple[int, Event]] = []

    def on_event(event: Event) -> None:
        seen.append((threading.get_ident(), event))
        (agent_home / "go").touch()

    opened().call(Wait("n", "go"), request_id="r", on_event=on_event)
    assert seen and {thread for thread, _ in seen} == {threading.get_ident()}


def test_a_dropped_connection_repeats_nothing(opened: Opener, agent_home: Path, sshd: Sshd) -> None:
    with running(opened(), agent_home) as answer:
        assert sshd.drop_connections() >= 1
        until(lambda: sshd.log.read_text().count("Accepted publickey") == 2, "it is back")
        (agent_home / "go").touch()
        assert answer.result(PATIENCE_S).starts == 1


def test_an_answer_that_fell_into_the_drop_is_had_afterwards(
    opened: Opener, agent_home: Path, sshd: Sshd
) -> None:
    with running(opened(), agent_home) as answer:
        sshd.stop()
        (agent_home / "go").touch()
        sshd.start()
        assert answer.result(PATIENCE_S).starts == 1


def test_a_killed_agent_is_started_again_and_asked_again(
    opened: Opener, agent_home: Path, sshd: Sshd
) -> None:
    session = opened()
    before = session.call(Echo(), request_id="e").pid
    with running(session, agent_home) as answer:
        assert sshd.kill_agents() == [before]
        until(lambda: (agent_home / "n").read_text() == "11", "the request runs again")
        (agent_home / "go").touch()
        assert answer.result(PATIENCE_S).starts == 2
        assert answer.result().pid != before


def test_a_request_that_kills_every_agent_is_given_up(
    opened: Opener, agent_home: Path, sshd: Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "MAX_SENDS", 2)
    session = opened()
    with running(session, agent_home) as answer:
        for starts in ("1", "11"):
            until(lambda: (agent_home / "n").read_text() == starts, "a start")  # noqa: B023
            sshd.kill_agents()
        with pytest.raises(AgentLost, match="asked for 2 times"):
            answer.result(PATIENCE_S)
    assert session.call(Echo(), request_id="e").pid


def test_a_server_that_stays_away_ends_in_agent_lost_and_the_session_mends_later(
    opened: Opener, agent_home: Path, sshd: Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "BACKOFF_S", (0.01,) * 5)
    session = opened()
    with running(session, agent_home) as answer:
        sshd.stop()
        with pytest.raises(AgentLost, match=f"port {sshd.port} stays away after 5 attempts"):
            answer.result(PATIENCE_S)
    sshd.start()
    (agent_home / "go").touch()
    again = session.call(Wait("n", "go"), request_id="r")
    assert again.starts == 1


def test_a_reason_not_to_connect_again_ends_the_open_calls(
    opened: Opener, agent_home: Path, sshd: Sshd
) -> None:
    asleep = WorkspaceAsleep("another run hibernated it")
    asleep.snapshot = "20261124T180000Z-00000000"

    def check() -> None:
        raise asleep

    with running(opened(check=check), agent_home) as answer:
        sshd.stop()
        with pytest.raises(WorkspaceAsleep, match="another run") as caught:
            answer.result(PATIENCE_S)
    assert caught.value.snapshot == asleep.snapshot


@pytest.mark.rule("H5")
@pytest.mark.parametrize("told", ['{"version": 5}', "[" * 200_000])
def test_a_machine_that_turns_hostile_before_a_session_connects_again_ends_the_open_calls(
    opened: Opener, agent_home: Path, sshd: Sshd, told: str
) -> None:
    lie, python = sshd.folder / "lie", sshd.folder / "python"
    python.write_text(
        f'#!/bin/sh\nif [ -e {lie} ]; then cat {lie}; else exec {sys.executable} "$@"; fi\n'
    )
    python.chmod(0o755)
    with running(opened(candidates=(str(python),)), agent_home) as answer:
        lie.write_text(f"torpor-probe {told}\n")
        sshd.drop_connections()
        with pytest.raises(MachineUnfit, match="has no Python"):
            answer.result(PATIENCE_S)


def test_an_error_that_is_not_ours_ends_the_open_calls_too(
    opened: Opener, agent_home: Path, sshd: Sshd
) -> None:
    def check() -> None:
        raise TypeError("'int' object is not subscriptable")

    with running(opened(check=check), agent_home) as answer:
        sshd.drop_connections()
        with pytest.raises(Unforeseen, match="TypeError: 'int' object"):
            answer.result(PATIENCE_S)
        (agent_home / "go").touch()


def test_cancel_ends_a_call(opened: Opener, agent_home: Path) -> None:
    session = opened()
    with running(session, agent_home) as answer:
        session.cancel("r")
        with pytest.raises(RunCancelled):
            answer.result(PATIENCE_S)


def test_a_wait_that_is_broken_off_cancels_on_the_machine(opened: Opener) -> None:
    def broken_off(event: Event) -> None:
        raise KeyboardInterrupt

    session = opened()
    args = Wait("n", "go")
    with pytest.raises(KeyboardInterrupt):
        session.call(args, request_id="r", on_event=broken_off)
    with pytest.raises(RunCancelled):  # the kept answer of the very same request
        session.call(args, request_id="r")


def test_a_call_with_a_limit_ends_where_the_agent_does_not_answer(
    opened: Opener, agent_home: Path
) -> None:
    """As one whose disk hangs: the connection is up, and the agent answers pings."""
    session = opened()
    args = Wait("n", "go")
    with pytest.raises(AgentLost, match=r"wait was not answered within 0\.5 s") as lost:
        session.call(args, request_id="r", within_s=0.5)
    assert lost.value.retryable
    with pytest.raises(RunCancelled):  # the kept answer of the very same request
        session.call(args, request_id="r", within_s=PATIENCE_S)


def test_a_limit_begins_again_with_each_connection(
    opened: Opener, agent_home: Path, sshd: Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session bounds the time without a connection itself."""
    opens, limit_s = session_module.open_link, PATIENCE_S
    dropped: list[int] = []
    sends = Link.send

    async def send(self: Link, line: bytes) -> None:
        if line != PING_LINE and not dropped:
            dropped.append(sshd.drop_connections())
        await sends(self, line)

    async def open_late(*way: Any) -> Any:
        """Once it was dropped, the limit is over by the session's clock before it is opened."""
        if dropped:
            loop = asyncio.get_running_loop()
            late_s = loop.time() - time.monotonic() + limit_s + 1
            monkeypatch.setattr(loop, "time", lambda: time.monotonic() + late_s)
            await asyncio.sleep(0.01)  # what is due happens
        return await opens(*way)

    monkeypatch.setattr(Link, "send", send)
    monkeypatch.setattr(session_module, "open_link", open_late)
    session = opened()
    (agent_home / "go").touch()
    assert session.call(Wait("n", "go"), request_id="r", within_s=limit_s).starts == 1
    assert dropped


def test_a_stopped_agent_is_left_and_attached_again_once_it_goes_on(
    opened: Opener, agent_home: Path, sshd: Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "PING_S", 0.1)
    session = opened()
    with running(session, agent_home) as answer:
        with _stopped(sshd):
            until(lambda: sshd.log.read_text().count("Accepted publickey") > 1, "it is left")
        (agent_home / "go").touch()
        assert answer.result(PATIENCE_S).starts == 1


def test_calls_to_an_agent_that_stays_stopped_end_in_agent_lost(
    opened: Opener, agent_home: Path, sshd: Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> None:
        raise AgentLost("an agent lives but does not answer")

    monkeypatch.setattr(session_module, "PING_S", 0.1)
    monkeypatch.setattr(session_module, "BACKOFF_S", (0.01,) * 5)
    session = opened()
    with ThreadPoolExecutor(2) as pool:
        answers = [
            pool.submit(session.call, Wait(f"n{i}", "go"), request_id=f"r{i}") for i in range(2)
        ]
        until(lambda: all((agent_home / f"n{i}").exists() for i in range(2)), "both run")
        monkeypatch.setattr(session_module, "open_link", refuse)  # attach looks for 75 s
        with _stopped(sshd):
            for answer in answers:
                with pytest.raises(AgentLost, match="stays away after 5 attempts: an agent lives"):
                    answer.result(PATIENCE_S)


def test_only_a_silent_link_is_ended(sshd: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pongs alone keep it, however long an operation says nothing."""

    class FakeLink:
        """Answers 50 pings."""

        heard = pings = pings_at_end = 0

        def __init__(self) -> None:
            self.ended = asyncio.Event()

        async def send(self, line: bytes) -> None:
            self.pings += line == PING_LINE
            self.heard += 14 if self.pings <= 50 else 0

        async def messages(self) -> AsyncIterator[Said]:
            yield Said(pong=True)
            await self.ended.wait()
            raise AgentLost("the connection ended")

        async def close(self, graceful: bool = True) -> None:
            self.pings_at_end = self.pings_at_end or self.pings
            self.ended.set()

    links: list[FakeLink] = []

    async def open_fake(*_: object) -> tuple[FakeLink, Hello]:
        links.append(FakeLink())
        return links[-1], Hello(1, "agent", "machine", 0.0, False)

    monkeypatch.setattr(session_module, "PING_S", 0.001)
    monkeypatch.setattr(session_module, "UNANSWERED", 3)
    monkeypatch.setattr(session_module, "open_link", open_fake)
    with SshSession.open(sshd.endpoint, sshd.identity):
        until(lambda: links[0].pings_at_end, "the link is ended")
    assert links[0].pings_at_end == 53


class NoSuch(Request[Nothing], frozen=True):
    op = "no.such"


def test_what_does_not_fit_the_wire_is_refused_here_and_there(opened: Opener) -> None:
    session = opened()
    for request, error, says in (
        (NoSuch(), InvalidInput, "no operation"),
        (Odd(), MachineError, "the answer to odd does not fit"),
        (Echo("x" * (16 << 20)), InvalidInput, "over the limit"),
        (Big(16 << 20), InvalidInput, "over the limit"),
    ):
        with pytest.raises(error, match=says):
            session.call(request, request_id=says)
    assert len(session.call(Big(15 << 20), request_id="r").text) == 15 << 20


def test_a_closed_session_says_so_and_ends_open_calls(opened: Opener, agent_home: Path) -> None:
    session = opened()
    with running(session, agent_home) as answer:
        session.close()
        with pytest.raises(AgentLost, match="closed"):
            answer.result(PATIENCE_S)
    with pytest.raises(AgentLost, match="closed"):
        session.call(Echo(), request_id="e")
    session.cancel("r")
    session.close()


def test_bye_leaves_no_process_and_forget_no_file_and_a_warm_cache_needs_no_network(
    opened: Opener, sshd: Sshd, agent_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for request in (Bye(), Forget()):
        session = opened()
        assert session.call(request, request_id="r") == Nothing()
        session.close()
        until(lambda: not sshd.agents(), "no agent and no attach is left")
    assert not agent_home.exists()
    monkeypatch.setattr("uv.find_uv_bin", Mock(side_effect=AssertionError("the index was asked")))
    assert opened().call(Echo(), request_id="r").pid


def test_a_noisy_login_shell_and_a_home_of_150_characters_do_not_matter(
    opened: Opener, sshd: Sshd
) -> None:
    (sshd.home / ".bashrc").write_text("echo 'Welcome to your GPU!'; echo '{\"hi\": 1}'\n")
    home = sshd.folder / ("h" * (150 - len(str(sshd.folder)) - 1))
    assert opened(home=str(home)).call(Echo(), request_id="r").pid
    assert (home / "agent.sock").is_socket()


@pytest.mark.rule(9)
def test_no_secret_is_in_logs_files_arguments_or_environment(
    opened: Opener, sshd: Sshd, agent_home: Path
) -> None:
    session = opened()
    secrets = ["5ec5e7" * 5, "c0ffee" * 10]
    url = f"https://s3.example/o?X-Amz-Signature={secrets[0]}"
    grant = Grant(ObjectKey("o"), "PUT", url, 1)
    with pytest.raises(MachineError) as failed:
        session.call(Fail("x", secrets[1], grant), request_id="r")
    private = sshd.identity.private_key.splitlines()[2]
    places = {"the error": str(failed.value), "the sshd log": sshd.log.read_text()}
    for path in agent_home.rglob("*"):
        if path.is_file() and "bundles" not in path.parts:
            places[str(path)] = path.read_text(errors="replace")
    assert sshd.agents()
    for pid in sshd.agents():
        places[f"arguments of {pid}"] = " ".join(argv_of(pid))
        places[f"environment of {pid}"] = Path(f"/proc/{pid}/environ").read_text(errors="replace")
    for place, text in places.items():
        for secret in (*secrets, private):
            assert secret not in text, place
    assert "SSH_AUTH_SOCK" not in "".join(places.values())


def test_a_half_installed_bundle_is_installed_again(opened: Opener, agent_home: Path) -> None:
    session = opened()
    bundle = agent_home / "bundles" / session.hello.agent
    session.call(Bye(), request_id="b")
    (bundle / ".complete").unlink()
    shutil.rmtree(bundle / "torpor")
    session.close()
    assert opened().call(Echo(), request_id="r").pid


@contextmanager
def _stopped(sshd: Sshd) -> Iterator[None]:
    """Its agents have SIGSTOP meanwhile; the SSH server answers."""
    agents = [pid for pid in sshd.agents() if argv_of(pid)[-3] == "daemon"]
    for pid in agents:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in agents:
            os.kill(pid, signal.SIGCONT)
