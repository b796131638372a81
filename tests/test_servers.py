"""Which tests need a server follows from their fixtures, and no other test may start one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.servers import server_in
from tests.fixtures.shared import Known, shared
from tests.fixtures.sshd import make_sshd


@pytest.mark.parametrize(
    ("argv", "server"),
    [
        (["/usr/sbin/sshd", "-D"], "sshd"),
        (["/somewhere/bin/weed", "mini"], "weed"),
        ([b"/usr/bin/chromium", b"--headless"], "chromium"),
        ([sys.executable, "-m", "deployments.up"], "deployments.up"),
        ([sys.executable, "-X", "dev", "-m", "uvicorn"], "uvicorn"),
        ([sys.executable, "/bundles/ab", "daemon", "--home", "/home/me/.torpor"], "daemon"),
        ([sys.executable, "-s", "/torpor/machine/agent", "supervise", "--home", "h"], "supervise"),
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


def test_the_first_user_starts_what_workers_share_and_the_last_one_ends_it(tmp_path: Path) -> None:
    started: list[Known] = []
    ended: list[Known] = []

    def start() -> Known:
        started.append({"number": str(len(started))})
        return started[-1]

    for number in range(2):  # whoever comes after the last one starts it again
        with shared(tmp_path / "it", start, ended.append) as first:
            with shared(tmp_path / "it", start, ended.append) as second:
                assert first == second == {"number": str(number)}
            assert len(ended) == number
        assert ended == started
    assert len(started) == 2


def test_a_start_that_fails_is_tried_by_the_next(tmp_path: Path) -> None:
    def fails() -> Known:
        raise OSError("no port is free")

    with pytest.raises(OSError, match="no port"), shared(tmp_path / "it", fails, dict):
        pass
    with shared(tmp_path / "it", lambda: {"port": "1"}, dict) as known:
        assert known == {"port": "1"}
