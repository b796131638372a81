"""A machine passes on what it fetched: believed never, left at once, gone at the end."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPSConnection
from pathlib import Path

import msgspec
import pytest

from tests.fixtures.engine import WORKSPACE, Engine
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.snapshots import Machines, Waking
from tests.fixtures.waiting import PATIENCE_S, until
from torpor.machine.agent import pack_server
from torpor.machine.agent.kept_packs import KeptPacks
from torpor.machine.agent.pack_server import PackServer, trusting
from torpor.shared.errors import AgentLost, RunCancelled
from torpor.shared.transfer.transfer import GAP_BYTES
from torpor.shared.values import MIB, ObjectKey
from torpor.shared.wire.restore import FetchPart, Peer, RestoredPart, ServePacks

pytestmark = pytest.mark.rule("H16")

KEY = bytes(range(32))
PLENTY = 1 << 40


class Counting(MemoryStore):
    """``asked``: the packs that anybody has read."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[ObjectKey] = []

    def get(self, key: ObjectKey, *, max_bytes: int) -> bytes:
        if "/packs/" in key:
            self.asked.append(key)
        return super().get(key, max_bytes=max_bytes)


class Pair:
    """A machine that holds every pack of a snapshot and one that lacks them all."""

    def __init__(self, machines: Machines, store: Counting, was: Path) -> None:
        source, self.holder, other = (
            machines(store, was.with_name(name), KEY) for name in ("source", "holder", "other")
        )
        self.store, self.snapshot = store, source.snapshot([was])
        self.held_in = self.holder.home / "workspaces" / WORKSPACE / "passing"
        self.run, plan = self.holder.begin_restore(self.snapshot, [was.with_name("held")])
        self.peer = self.run.serve("127.0.0.1", PLENTY)
        (self.part,) = plan.parts
        self.other = Waking(other, self.snapshot, was, was.with_name("back"))
        self.other.begin()

    def hold(self) -> None:
        assert self.run.restore_part(self.part).kept
        self.store.asked.clear()

    def fetch(self, floor_bytes_s: float = 0.0, **changes: str) -> RestoredPart:
        peer = msgspec.structs.replace(self.peer, **changes)
        return self.other.run.restore_part(self.part, peer=peer, floor_bytes_s=floor_bytes_s)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer on a busy host is no silent one."""
    monkeypatch.setattr("torpor.machine.agent.passing.PEER_S", PATIENCE_S)


@pytest.fixture
def pair(machines: Machines, was: Path) -> Iterator[Pair]:
    with closing(Counting()) as store:
        yield Pair(machines, store, was)


def test_what_a_peer_holds_is_not_asked_of_the_store(pair: Pair) -> None:
    pair.hold()
    report = pair.fetch()
    assert report.peer_bytes == report.stored_bytes > 5 * MIB
    assert pair.store.asked == []
    pair.other.complete()


def test_a_peer_that_lies_is_found_out_and_its_bytes_are_never_written(pair: Pair) -> None:
    pair.hold()
    (file,) = pair.held_in.iterdir()
    with file.open("r+b") as pack:
        pack.seek(1000)
        byte = pack.read(1)
        pack.seek(1000)
        pack.write(bytes([byte[0] ^ 1]))
    report = pair.fetch()
    assert report.peer_bytes < report.stored_bytes
    assert pair.store.asked
    pair.other.complete()


@pytest.mark.parametrize(
    "fault", ["holds nothing", "gone", "another certificate", "wrong token", "no address"]
)
def test_a_peer_that_cannot_be_used_is_left_for_the_store(pair: Pair, fault: str) -> None:
    """It costs one question."""
    if fault != "holds nothing":
        pair.hold()
    if fault == "gone":
        pair.run.end()
    changes: dict[str, str] = {}
    if fault == "another certificate":
        changes["certificate"] = pair.other.run.serve("127.0.0.1", PLENTY).certificate
    elif fault == "wrong token":
        changes["url"] = f"https://{pair.peer.url.split('/')[2]}/{'0' * 64}/"
    elif fault == "no address":
        changes["url"] = "https://no.such.host.invalid:1/x/"
    assert pair.fetch(**changes).peer_bytes == 0
    assert len(pair.store.asked) == 1
    pair.other.complete()


def test_a_peer_below_its_floor_is_left(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.hold()
    monkeypatch.setattr("torpor.machine.agent.passing.PEER_S", 1e-3)
    report = pair.fetch(floor_bytes_s=1e12)
    assert report.peer_bytes < report.stored_bytes
    assert len(pair.store.asked) == 1
    pair.other.complete()


def test_a_peer_that_is_silent_is_left(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torpor.machine.agent.passing.PEER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        report = pair.fetch(url=f"https://127.0.0.1:{silent.getsockname()[1]}/x/")
    assert report.peer_bytes == 0
    pair.other.complete()


def test_nothing_is_left_at_the_end(pair: Pair) -> None:
    pair.hold()
    port = int(pair.peer.url.split(":")[2].split("/")[0])
    assert [os.stat(path).st_mode & 0o777 for path in pair.held_in.iterdir()] == [0o600]
    assert not list(pair.held_in.parent.glob("*.pem"))  # the private key was on disk for a moment
    pair.run.end()
    assert not pair.held_in.exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 1)
    with pytest.raises(AgentLost):
        pair.holder.call(ServePacks(pair.run.run, "127.0.0.1", PLENTY))


def test_no_more_is_kept_than_was_allowed(engine: Engine, was: Path, tmp_path: Path) -> None:
    run, plan = engine.begin_restore(engine.snapshot([was]), [tmp_path / "back"])
    run.serve("127.0.0.1", 2 * MIB)
    (part,) = plan.parts
    assert not run.restore_part(part).kept
    folder = engine.home / "workspaces" / WORKSPACE / "passing"
    assert sum(path.stat().st_blocks * 512 for path in folder.iterdir()) <= 2 * MIB + 8192


def test_a_killed_agent_s_leavings_go_with_the_next_run(pair: Pair, tmp_path: Path) -> None:
    pair.hold()
    stale = pair.held_in.with_name("passing-was")
    pair.held_in.rename(stale)
    pair.holder.runs.close()
    stale.rename(pair.held_in)  # as after kill -9
    pair.holder.begin_restore(pair.snapshot, [tmp_path / "two"])
    assert not pair.held_in.exists()


def test_the_server_answers_ranges_of_what_is_kept_and_nothing_else(pair: Pair) -> None:
    pair.hold()
    _, _, place, token, _ = pair.peer.url.split("/")
    (pack,) = [path.name for path in pair.held_in.iterdir()]
    context = trusting(pair.peer.certificate)

    def asked(method: str, path: str, wanted: str = "bytes=0-99") -> int:
        with closing(HTTPSConnection(place, context=context, timeout=PATIENCE_S)) as connection:
            connection.request(method, path, headers={"Range": wanted} if wanted else {})
            answer = connection.getresponse()
            answer.read()
            return answer.status

    assert asked("GET", f"/{token}/{pack}") == 206
    for wanted in ("", "bytes=5-1", f"bytes=0-{1 << 40}"):
        assert asked("GET", f"/{token}/{pack}", wanted) == 404
    for path in (f"/{token}/{'0' * 32}", f"/{'0' * 64}/{pack}", f"/{token}/../{pack}", "/"):
        assert asked("GET", path) == 404
    for method in ("PUT", "DELETE"):
        assert asked(method, f"/{token}/{pack}") == 501
    with pytest.raises(ssl.SSLCertVerificationError):
        HTTPSConnection(place, context=ssl.create_default_context(), timeout=PATIENCE_S).connect()


def test_a_client_that_does_not_speak_tls_blocks_no_other(pair: Pair) -> None:
    pair.hold()
    host, port = pair.peer.url.split("/")[2].split(":")
    with socket.create_connection((host, int(port))) as rude:
        rude.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert pair.fetch().peer_bytes > 0


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PackServer]:
    """It holds nothing, and has room for two connections."""
    monkeypatch.setattr(pack_server, "MOST_CONNECTIONS", 2)
    made = PackServer(KeptPacks(tmp_path / "held", 1 << 20), "127.0.0.1", tmp_path)
    yield made
    made.close()


def _secured(server: PackServer) -> ssl.SSLSocket:
    link = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)
    try:
        return trusting(server.certificate).wrap_socket(link)
    except OSError:
        link.close()
        raise


def _until_known(server: PackServer) -> None:
    known = server._server._open
    until(lambda: any(isinstance(link, ssl.SSLSocket) for link in known), "its peer is known")


def test_a_client_in_its_handshake_is_disconnected_at_the_end(server: PackServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as silent:
        _until_known(server)
        server._server.drop_all()
        assert silent.recv(1) == b""


def test_a_connection_counts_once(server: PackServer) -> None:
    with _secured(server):
        _until_known(server)
        with _secured(server), pytest.raises(OSError):
            _secured(server)


def test_a_connection_without_a_thread_takes_no_room(
    server: PackServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as now:
        now.setattr(threading.Thread, "start", refused)
        for _ in range(3):
            with pytest.raises(OSError):
                _secured(server)
    _secured(server).close()


def test_a_cancelled_request_does_not_go_on_with_the_store(pair: Pair) -> None:
    pair.hold()
    pair.other.run.end()
    grants = [pair.other.engine.grant("GET", key) for key in pair.part.packs]
    with pytest.raises((RunCancelled, AgentLost)):
        pair.other.engine.call(FetchPart(pair.other.run.run, grants, pair.peer))
    assert pair.store.asked == []


def test_a_grant_for_a_peer_shows_no_secret() -> None:
    assert "secret" not in repr(Peer("https://h:1/secret/", "pem"))


def test_ranges_count_as_kept_with_the_small_holes_that_a_reader_reads_through(
    tmp_path: Path,
) -> None:
    packs = KeptPacks(tmp_path / "kept", 1 << 20)
    pack = bytes(16)
    packs.keep(pack, 0, b"a" * 100)
    packs.keep(pack, 100 + GAP_BYTES, b"b" * 100)
    packs.keep(pack, 100 + GAP_BYTES, b"b" * 100)  # once more: it takes no more room

    def held(start: int, end: int) -> bool:
        fd = packs.open(pack, start, end)
        if fd is not None:
            os.close(fd)
        return fd is not None

    assert held(0, 100)
    assert held(0, 200 + GAP_BYTES)
    assert not held(0, 201 + GAP_BYTES)
    assert not held(50, 50)
    packs.remove()
    packs.remove()
    assert not held(0, 100)
