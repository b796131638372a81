"""Ports for servers of our own."""

from __future__ import annotations

import random
import socket
from pathlib import Path

import pytest

from torpor.control import ports
from torpor.control.ports import free_ports


def test_they_are_free_and_different() -> None:
    found = free_ports(20)
    assert len(set(found)) == 20
    for port in found:
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_no_outgoing_connection_is_given_one_of_them() -> None:
    """A server that is started again would find its port taken."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(port < first for port in free_ports(50))


@pytest.mark.parametrize("said", ["", "no number", "1024 65535"])
def test_where_there_are_no_others_any_will_do(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "range").write_text(said)
    monkeypatch.setattr(ports, "RANGE", tmp_path / "range")
    assert len(set(free_ports(5))) == 5


def test_a_port_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        offered = iter([port, port, free_ports(1)[0]])

        monkeypatch.setattr(random.SystemRandom, "randrange", lambda *_: next(offered))
        (found,) = free_ports(1)
    assert found != port
