"""Which tests need a server follows from their fixtures, and no other test may start one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.servers import server_in
from tests.fixtures.sshd import make_sshd


@pytest.mark.parametrize(
    ("argv", "server"),
    [
        (["/usr/sbin/sshd", "-D"], "sshd"),
        (["/somewhere/bin/weed", "mini"], "weed"),
        ([b"/usr/bin/chromium", b"--headless"], "chromium"),
        ([sys.executable, "-m", "deployments.up"], "deployments.up"),
        ([sys.executable, "-X", "dev", "-m", "uvicorn"], "uvicorn"),
        ([sys.executable, "-m", "torpor.machine.agent", "daemon"], None),
        (["grep", "sshd"], None),
    ],
)
def test_servers_are_known_by_what_is_started(argv: list[str], server: str | None) -> None:
    assert server_in(argv) == server


def test_a_test_that_does_not_say_so_cannot_start_a_server(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"starts sshd without the fixture needs_server"):
        make_sshd(tmp_path / "machine").start()
    with pytest.raises(AssertionError, match="starts moto_server"):
        subprocess.Popen(["moto_server"])


def test_a_test_without_a_server_is_not_marked(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("server") is None


@pytest.mark.usefixtures("needs_server")
def test_a_test_that_says_so_is_marked(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("server") is not None
