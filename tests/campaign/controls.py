"""Starting control sides and seeing how they end."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

import torpor
from tests.campaign.control import Moment, Order, Outcome
from tests.fixtures.short_agent import (
    SMALL_PARTS,
    SOON_ABANDONED,
    Change,
    clock_shifted,
    copy_agent,
)
from tests.fixtures.waiting import until
from tests.fixtures.world import Access
from torpor.control.ports import free_ports

_REPOSITORY = Path(torpor.__file__).resolve().parents[1]
SKEW_S = -3 * 3600
_MARK = "TORPOR_TESTS_CONTROL"
"""In the environment of every process of a control side; machines do not inherit it."""


@dataclass
class Control:
    """One control side under way, or at its end."""

    pid: int
    folder: Path
    process: subprocess.Popen[bytes]  # its own, or the one that it was forked by
    forked: bool

    def phase(self) -> str:
        """The phase that it entered last."""
        with suppress(FileNotFoundError):
            return ((self.folder / "phases").read_text().splitlines() or ["start"])[-1]
        return "start"

    def entered(self, phase: str) -> bool:
        with suppress(FileNotFoundError):
            return phase in (self.folder / "phases").read_text().splitlines()
        return False

    def ended(self) -> bool:
        if not self.forked:
            return self.process.poll() is not None
        return _state(self.pid) in ("", "Z")

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def outcome(self) -> Outcome | None:
        """None where it was killed."""
        if self.forked:
            assert self.process.stdout is not None
            self.process.stdout.readline()
        else:
            self.process.wait()
        with suppress(FileNotFoundError):
            return msgspec.json.decode((self.folder / "out").read_bytes(), type=Outcome)
        return None


class Controls:
    """Makes control sides for one world. ``api_url`` is a Prefect server's, or None."""

    def __init__(self, folder: Path, access: Access, abandoned: Change = SOON_ABANDONED) -> None:
        self._folder = folder
        self._access = folder / "access.json"
        self._source = folder / "source"
        self._api_url: str | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._access.touch(mode=0o600)
        self.know(access)
        # What makes a campaign of hours one of minutes: small parts, a short wait for the lost.
        copy_agent(self._source, SMALL_PARTS, abandoned)
        self._skewed = folder / "skewed"
        copy_agent(self._skewed, SMALL_PARTS, abandoned, clock_shifted(SKEW_S))
        with (folder / "plain.log").open("ab") as log:
            self._zygote = subprocess.Popen(
                [sys.executable, "-m", "tests.campaign.control", "serve"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment(),
                cwd=_REPOSITORY,
            )

    def know(self, access: Access) -> None:
        """The world that the next control sides work in."""
        self._access.write_bytes(msgspec.json.encode(access))
        if self._api_url is not None:
            self._save_blocks()

    def start_prefect(self) -> None:
        """One long-lived Prefect server, so that a real flow costs seconds and not tens."""
        (port,) = free_ports(1)
        self._api_url = f"http://127.0.0.1:{port}/api"
        argv = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1"]
        with (self._folder / "server.log").open("ab") as log:
            self._server = subprocess.Popen(
                [*argv, "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                start_new_session=True,
            )
        until(lambda: _answers(port), "the Prefect server answers", every_s=0.2)
        self._save_blocks()

    def start(
        self,
        flow: str,
        options: dict[str, Any],
        by_prefect: bool = False,
        dies_at: Moment | None = None,
        *,
        skewed: bool = False,
    ) -> Control:
        """A control side that begins now. ``skewed``: machines live SKEW_S in the future."""
        order = self._order(flow, options, dies_at)
        if skewed:
            order = msgspec.structs.replace(order, source=str(self._skewed))
        folder = Path(order.out).parent
        text = msgspec.json.encode(order)
        if by_prefect:
            process = self._run("prefect", text.decode())
            return Control(process.pid, folder, process, forked=False)
        assert self._zygote.stdin is not None
        assert self._zygote.stdout is not None
        self._zygote.stdin.write(text + b"\n")
        self._zygote.stdin.flush()
        pid = json.loads(self._zygote.stdout.readline())["pid"]
        return Control(pid, folder, self._zygote, forked=True)

    def left(self) -> list[int]:
        """The processes that ended control sides left behind; none, while none is under way."""
        own = {self._zygote.pid, *([self._server.pid] if self._server else [])}
        mark = f"{_MARK}={self._folder}".encode()
        return [
            int(path.parent.name)
            for path in Path("/proc").glob("[0-9]*/environ")
            if int(path.parent.name) not in own and mark in _environ(path)
        ]

    def close(self) -> None:
        with self._zygote:  # closes its input, at which it ends
            pass
        if self._server is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()

    def _order(self, flow: str, options: dict[str, Any], dies_at: Moment | None = None) -> Order:
        folder = self._folder / "runs" / secrets.token_hex(6)
        folder.mkdir(parents=True)
        access, source = str(self._access), str(self._source)
        out, phases = str(folder / "out"), str(folder / "phases")
        return Order(flow, options, access, source, out, phases, dies_at)

    def _save_blocks(self) -> None:
        text = msgspec.json.encode(self._order("blocks", {})).decode()
        assert self._run("blocks", text).wait() == 0, f"see {self._folder}/prefect.log"

    def _run(self, command: str, order: str) -> subprocess.Popen[bytes]:
        with (self._folder / "prefect.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.campaign.control", command, order],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                cwd=_REPOSITORY,
            )

    def _environment(self) -> dict[str, str]:
        prefect = {
            "PREFECT_HOME": str(self._folder / "prefect"),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_LOGGING_LEVEL": "WARNING",
        }
        if self._api_url is not None:
            prefect["PREFECT_API_URL"] = self._api_url
        return {**os.environ, **prefect, _MARK: str(self._folder)}


def _answers(port: int) -> bool:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        link.request("GET", "/api/health")
        return link.getresponse().status == 200
    except OSError:
        return False
    finally:
        link.close()


def _environ(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().split(b"\0")
    except OSError:  # it has ended
        return []


def _state(pid: int) -> str:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat[stat.rindex(")") + 2]
