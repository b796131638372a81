"""Fake machines that really boot: each in a root of its own, with OpenSSH's sshd on loopback."""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

import pytest

from tests.fixtures.programs import programs
from tests.fixtures.waiting import until

_IMAGE: Final = Path(__file__).with_name("image.sh")

_PROGRAMS: Final = {
    "sshd": "openssh-server",
    "ssh-keygen": "openssh-client",
    "unshare": "util-linux",
}

Kind = Literal["container", "bare", "stale", "conda", "libraries", "vm"]


class BootedMachine:
    """One machine. Its processes are in a namespace of their own and end with it."""

    def __init__(self, folder: Path, address: str, port: int, image: list[str], command: list[str]):
        script, *more = image
        self.address, self.port = address, port
        self.log = folder.with_suffix(".log")
        self._folder = folder
        folder.mkdir()
        # In a container that ends, the market shows what it said; so does the test that fails.
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *("unshare", "--mount", "--propagation", "private", "--pid", "--fork"),
                    *("--kill-child", "sh", script, str(folder), address, str(port)),
                    *(*more, *command),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def status(self) -> int | None:
        """What its first process ended with; None while it runs."""
        return self._process.poll()

    @property
    def begun(self) -> bool:
        """Whether a script of ``boot_image`` has made ``begins`` in the machine's folder."""
        return Path(f"/proc/{self._process.pid}/root{self._folder}/begins").exists()

    @property
    def root(self) -> Path:
        """The machine's / as this host sees it, from the start command on."""
        return Path(f"/proc/{self.first()}/root")

    def end(self) -> None:
        """Idempotent. Every process of the machine is gone when this returns."""
        if self._process.poll() is None:
            # The group: a process that has just started is not bound to its parent's life yet.
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            until(lambda: not self._answers(), f"{self.address}:{self.port} is silent")
        with suppress(FileNotFoundError):  # it may end itself meanwhile
            self._folder.rmdir()

    def _answers(self) -> bool:
        with socket.socket() as link:
            return link.connect_ex((self.address, self.port)) == 0

    def first(self) -> int:
        """The machine's first process. Its root is the machine's from the start command on."""
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children")
        until(lambda: children.read_text() or not self.running, "the first process has begun")
        return int(children.read_text())


def unfit() -> str:
    """Why no machine can boot on this host, and what to do; empty if one can."""
    if os.geteuid() != 0:
        return "only root may mount the root of a fake machine: run this as root"
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin"
    missing = [name for name in _PROGRAMS if shutil.which(name, path=path) is None]
    if not missing:
        return ""
    packages = " ".join(_PROGRAMS[name] for name in missing)
    return (
        f"no fake machine can boot on this host: {', '.join(missing)} is missing. Run "
        f"`sh deployments/system_packages.sh campaign`, or apt-get install {packages}"
    )


class Machines:
    """Boots machines below ``folder``. Each has a loopback address; all have one port."""

    def __init__(self, folder: Path) -> None:
        programs("sshd", "unshare")
        self.folder = folder
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._booted: list[BootedMachine] = []
        # 127.0.0.0/8 is this host's: a net for these machines, one address each.
        self._net = f"127.{secrets.randbelow(250) + 2}"
        with socket.socket() as free:
            free.bind(("0.0.0.0", 0))  # noqa: S104 - a port that is free on every address
            self.port = int(free.getsockname()[1])

    def boot(self, command: list[str], kind: Kind = "container") -> BootedMachine:
        return self.boot_image([str(_IMAGE), kind, os.path.realpath(sys.executable)], command)

    def boot_image(self, image: list[str], command: list[str]) -> BootedMachine:
        """``image``: a script of sh that becomes the machine, and what it gets between the
        machine's folder, address and port and the command."""
        with self._lock:
            number = next(self._numbers)
            address = f"{self._net}.{number // 250}.{number % 250 + 1}"
            folder = self.folder / f"machine-{number}"
            machine = BootedMachine(folder, address, self.port, image, command)
            self._booted.append(machine)
        return machine

    def end(self) -> None:
        for machine in self._booted:
            machine.end()


@pytest.fixture
def booted_machines(needs_server: None) -> Iterator[Machines]:
    if os.geteuid() != 0:
        pytest.skip("only root may mount the root of a fake machine")
    folder = Path(tempfile.mkdtemp(prefix="torpor-market-"))
    machines = Machines(folder)
    yield machines
    machines.end()
    shutil.rmtree(folder)
