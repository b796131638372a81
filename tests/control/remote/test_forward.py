"""Programs beside the agent, and connections through SSH to what listens on the machine."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from tests.fixtures.sshd import Sshd
from tests.fixtures.waiting import PATIENCE_S
from torpor.control.remote.session import SshSession
from torpor.shared.errors import AgentLost


@pytest.fixture
def session(sshd: Sshd, agent_source: Path, bundle_cache: Path) -> SshSession:
    return SshSession.open(sshd.endpoint, sshd.identity, source=agent_source, cache=bundle_cache)


def test_a_connection_goes_through_and_ends_with_the_forward(session: SshSession) -> None:
    with session, socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert session.listens(port)
        server.accept()[0].close()

        def echo() -> None:
            peer, _ = server.accept()
            with peer:
                peer.sendall(peer.recv(100).upper())

        thread = threading.Thread(target=echo)
        thread.start()
        with (
            session.forward(port) as local,
            socket.create_connection(("127.0.0.1", local), timeout=PATIENCE_S) as peer,
        ):
            assert local != port
            peer.sendall(b"hello")
            assert peer.recv(100) == b"HELLO"
        thread.join()
    with pytest.raises(AgentLost, match="the connection is down"):
        session.listens(port)


def test_nothing_listens_on_a_closed_port(session: SshSession) -> None:
    with session, socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert not session.listens(unused.getsockname()[1])


def test_a_machine_says_what_it_is_and_runs_programs(session: SshSession) -> None:
    with session:
        machine = session.machine
        assert machine.glibc.count(".") == 1 and machine.cuda >= 0
        assert machine.home == f"{machine.user_home}/.torpor"
        done = session.execute(["printf", "%s", "a b;$(c)"])
        assert (done.exit, done.stdout) == (0, b"a b;$(c)")
        assert session.execute(["false"]).exit == 1
