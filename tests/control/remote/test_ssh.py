"""Who is let in, and who is believed: keys, host keys, ports, names."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

import asyncssh
import msgspec
import psutil
import pytest

from tests.fixtures.agent_operations import Echo
from tests.fixtures.sshd import Sshd
from tests.fixtures.waiting import until
from torpor.control.remote.session import SshSession
from torpor.control.remote.ssh import Identity
from torpor.shared.errors import HostKeyChanged, InvalidInput, MachineDenied, MachineUnreachable
from torpor.shared.values import Endpoint


def _key(kind: str = "ssh-ed25519", passphrase: str | None = None) -> Identity:
    key = asyncssh.generate_private_key(kind)
    if passphrase is None:
        return Identity(key.export_private_key().decode())
    return Identity(key.export_private_key(passphrase=passphrase, rounds=50).decode(), passphrase)


@pytest.fixture
def agent_files(agent_source: Path, bundle_cache: Path) -> dict[str, Any]:
    return {"source": agent_source, "cache": bundle_cache}


def test_a_refused_key_is_named_with_the_command_that_lets_it_in(
    sshd: Sshd, tmp_path: Path
) -> None:
    stranger = _key()
    with pytest.raises(MachineDenied) as denied:
        SshSession.open(sshd.endpoint, stranger)
    assert stranger.load().get_fingerprint() in str(denied.value)
    command = str(denied.value).partition(f"as user {sshd.endpoint.user}: ")[2]
    tmp_path.chmod(0o777)
    subprocess.run(["sh", "-c", command], env={**os.environ, "HOME": str(tmp_path)}, check=True)
    assert (tmp_path / ".ssh/authorized_keys").read_text() == f"{stranger.public_key()}\n"
    assert tmp_path.stat().st_mode & 0o022 == 0


def test_the_first_host_key_is_pinned_and_reported(sshd: Sshd, agent_files: dict[str, Any]) -> None:
    pinned: list[str] = []
    endpoint = msgspec.structs.replace(sshd.endpoint, host_key=None)
    with SshSession.open(endpoint, sshd.identity, pin=pinned.append, **agent_files):
        assert len(pinned) == 1
    assert pinned[0].split()[:2] == sshd.host_key.split()[:2]
    with SshSession.open(sshd.endpoint, sshd.identity, pin=pinned.append, **agent_files):
        assert len(pinned) == 1


@pytest.mark.rule(8)
def test_a_host_key_is_not_pinned_when_login_fails(sshd: Sshd) -> None:
    pinned: list[str] = []
    endpoint = msgspec.structs.replace(sshd.endpoint, host_key=None)
    with pytest.raises(MachineDenied):
        SshSession.open(endpoint, _key(), pin=pinned.append)
    assert not pinned


@pytest.mark.rule(8)
@pytest.mark.parametrize("kind", ["ssh-ed25519", "ecdsa-sha2-nistp256"])
def test_a_changed_host_key_stops_everything(sshd: Sshd, kind: str) -> None:
    other = asyncssh.generate_private_key(kind)
    endpoint = msgspec.structs.replace(
        sshd.endpoint, host_key=other.export_public_key().decode().strip()
    )
    with pytest.raises(HostKeyChanged, match="Nothing was sent") as changed:
        SshSession.open(endpoint, sshd.identity)
    assert other.get_fingerprint() in str(changed.value)
    if kind == "ssh-ed25519":
        real = asyncssh.import_public_key(sshd.host_key)
        assert real.get_fingerprint() in str(changed.value)
    assert "Accepted" not in sshd.log.read_text()


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"user": "nosuchuser"}, MachineDenied, "nosuchuser@"),
        ({"host_key": "junk"}, InvalidInput, "host key recorded for"),
        ({"port": 9}, MachineUnreachable, "port 9"),
        ({"host": "no-such-host.invalid"}, MachineUnreachable, r"no-such-host\.invalid"),
    ],
)
def test_what_is_wrong_with_an_endpoint_is_named(
    sshd: Sshd, changes: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        SshSession.open(msgspec.structs.replace(sshd.endpoint, **changes), sshd.identity)


def test_a_machine_behind_a_jump_host_is_reached_through_it_alone(
    sshd: Sshd, jump: Sshd, agent_files: dict[str, Any]
) -> None:
    endpoint = msgspec.structs.replace(sshd.endpoint, host_key=None, jump=jump.endpoint)
    pinned: list[str] = []
    with SshSession.open(endpoint, sshd.identity, pin=pinned.append, **agent_files) as session:
        assert pinned[0].split() == sshd.host_key.split()[:2]
        assert session.execute(["echo", "there"]).stdout == b"there\n"
        assert session.listens(sshd.port)
        with (
            session.forward(sshd.port) as port,
            socket.create_connection(("127.0.0.1", port)) as link,
        ):
            assert link.recv(4) == b"SSH-"
        assert jump.drop_connections()
        assert session.call(Echo("after"), request_id="after").words == "after"
    assert jump.process is not None
    host = psutil.Process(jump.process.pid)
    until(lambda: not host.children(), "the connection to the jump host is closed")


@pytest.mark.rule(8)
def test_each_host_key_on_the_way_is_compared(sshd: Sshd, jump: Sshd) -> None:
    other = _key().public_key()
    false_jump = msgspec.structs.replace(jump.endpoint, host_key=other)
    behind = msgspec.structs.replace(sshd.endpoint, jump=false_jump)
    with pytest.raises(HostKeyChanged, match=rf"^the jump host .* port {jump.port} shows host key"):
        SshSession.open(behind, sshd.identity)
    assert "Accepted" not in jump.log.read_text()
    unknown = msgspec.structs.replace(jump.endpoint, host_key=None)
    with pytest.raises(InvalidInput, match=r"the jump host .* has no host key"):
        SshSession.open(msgspec.structs.replace(behind, jump=unknown), sshd.identity)
    machine = msgspec.structs.replace(sshd.endpoint, host_key=other, jump=jump.endpoint)
    way = f"port {sshd.port} through 127.0.0.1 port {jump.port} shows host key"
    with pytest.raises(HostKeyChanged, match=way):
        SshSession.open(machine, sshd.identity)
    assert "Accepted" not in sshd.log.read_text()


@pytest.mark.parametrize("words", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_port_that_does_not_speak_ssh(words: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torpor.control.remote.ssh.CONNECT_S", 2.0)
    monkeypatch.setattr("torpor.control.remote.ssh.LOGIN_S", 2.0)
    with _Speaker(words) as port, pytest.raises(MachineUnreachable, match=f"port {port}"):
        SshSession.open(Endpoint("127.0.0.1", port, "root"), _key())


def test_an_identity_hides_its_secrets_and_checks_them() -> None:
    locked = _key(passphrase="open sesame")
    assert "PRIVATE" not in repr(locked) and "sesame" not in repr(locked)
    assert locked.public_key().startswith("ssh-ed25519 ")
    with pytest.raises(InvalidInput, match="passphrase"):
        Identity(locked.private_key, "wrong").load()
    with pytest.raises(InvalidInput, match="passphrase"):
        Identity(locked.private_key).load()
    with pytest.raises(InvalidInput, match="does not parse") as refused:
        Identity("not a key: hunter2").load()
    assert "hunter2" not in str(refused.value)


class _Speaker:
    """A TCP server that says its words to everybody, or nothing at all."""

    def __init__(self, words: bytes) -> None:
        self._words = words
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._peers: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> int:
        self._thread.start()
        port: int = self._listener.getsockname()[1]
        return port

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for peer in self._peers:
            peer.close()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            self._peers.append(peer)
            if self._words:
                peer.sendall(self._words)
