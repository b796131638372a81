"""Serving: the commands of a stack on a machine, and the proof that its server works."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Final, Literal

from tasks.jobs import look_at_command, start_command, stop_command
from tasks.phases import phase
from tasks.progress import doing
from torpor.control.deploy.http_check import ask, check
from torpor.control.deploy.last_lines import LastLines
from torpor.control.deploy.stack import StackPaths
from torpor.control.remote.agent import Session
from torpor.shared.errors import DeployFailed
from torpor.shared.values import KIB, WorkspaceName
from torpor.shared.wire.job import JobState, StartJob

POLL_S: Final = 0.1
"""Seconds between two looks at a command or a server."""
CHECK_S: Final = 10.0
"""Seconds between two checks that the machine still belongs to this deploy."""
HEALTH_S: Final = 10.0
"""Seconds for one answer of the server about its health."""
_LOOK_BYTES: Final = 256 * KIB
_LOGS: Final = "~/.torpor/deploy"
_HOLDS: Final = """\
import os, sys
port, mark, sockets = int(sys.argv[1]), b"TORPOR_JOB=" + sys.argv[2].encode(), set()
for name in ("tcp", "tcp6"):
    if os.path.exists("/proc/net/" + name):
        for line in open("/proc/net/" + name).readlines()[1:]:
            facts = line.split()
            if facts[3] == "0A" and int(facts[1].rpartition(":")[2], 16) == port:
                sockets.add("socket:[" + facts[9] + "]")
for pid in filter(str.isdigit, os.listdir("/proc")):
    place = "/proc/" + pid
    try:
        if mark in open(place + "/environ", "rb").read().split(b"\\0"):
            if any(os.readlink(place + "/fd/" + fd) in sockets for fd in os.listdir(place + "/fd")):
                sys.exit(0)
    except OSError:
        continue
sys.exit(3)
"""
_NOT_HELD: Final = 3

Kind = Literal["setup", "fetch", "server"]
KINDS: Final[tuple[Kind, ...]] = ("setup", "fetch", "server")


class Serving:
    """The commands of one workspace's deploy. Supervisors keep the commands running on the machine,
    where a later deploy finds them. ``still_mine`` is called while a server is waited for, and may
    raise."""

    def __init__(
        self,
        session: Session,
        workspace: WorkspaceName,
        place: StackPaths,
        still_mine: Callable[[], None] = lambda: None,
    ) -> None:
        self._still_mine = still_mine
        self._session = session
        self._workspace = workspace
        self._place = place
        self._lines: dict[Kind, LastLines] = {}
        self._offsets: dict[Kind, int] = {}
        self._attempts: dict[Kind, int] = {}

    def log(self, kind: Kind) -> str:
        """Where the output of a command is on the machine."""
        return f"{_LOGS}/{self._workspace}-{kind}.log"

    def stop(self) -> None:
        """End the commands that an earlier deploy of the workspace has started here."""
        for kind in KINDS:
            stop_command(self._session, self._id(kind))

    def check_port(self) -> None:
        """DeployFailed where the server's port is used by a program that ``stop`` does not end."""
        port = self._place.stack.port
        if self._session.listens(port):
            held = self._session.run_script(_HOLDS, str(port), self._id("server"))
            if held.exit == _NOT_HELD:  # otherwise ``serve`` asks again
                raise self._taken()

    def run(self, kind: Kind, argv: list[str], folder: str) -> None:
        """Run a command to its end; DeployFailed with its last lines if it fails."""
        until = time.monotonic() + self._place.stack.setup_timeout_s
        with doing(f"running the {kind} command of stack {self._place.stack.name}"):
            self._start(kind, argv, folder)
            while (state := self._look(kind)).state == "running":
                if time.monotonic() > until:
                    stop_command(self._session, self._id(kind))
                    limit = _limit(self._place.stack.setup_timeout_s, "setup_minutes")
                    raise self._failed(kind, f"did not end within {limit}")
                time.sleep(POLL_S)
        if state.state != "ended" or state.status:
            raise self._failed(kind, _words(state))

    def serve(self) -> None:
        """Start the server, wait until it is ready, and have it answer one request."""
        stack, place = self._place.stack, self._place
        if self._session.listens(stack.port):
            raise self._taken()
        with phase("server"), doing(f"starting the server of stack {stack.name}"):
            folder = place.absolute(place.workspace)
            self._start("server", place.filled(stack.server), folder)
        with self._session.forward(stack.port) as port:
            with phase("health"), doing("waiting until the server is ready"):
                self._wait_until_ready(port)
            with phase("completion"), doing("asking the server for a first answer"):
                body = place.body(stack.proof.body)
                proof = stack.proof
                token = stack.secrets.token
                answer = ask(port, proof.method, proof.path, body, stack.ready_timeout_s, token)
                try:
                    check(proof, answer, stack.secrets)
                except DeployFailed as error:
                    self._look("server")
                    raise self._failed("server", str(error)) from error
        state = self._look("server")
        if state.state != "running":  # another program has answered
            raise self._failed("server", _words(state))

    def check_serving(self) -> None:
        """DeployFailed unless the server that this deploy started runs: another deploy of the
        workspace may have ended the server, and may work in its directories."""
        state = self._look("server")
        if state.state != "running" or state.attempt != self._attempts["server"]:
            raise self._failed("server", f"after its first answer, {_words(state)}")

    def _wait_until_ready(self, port: int) -> None:
        stack = self._place.stack
        until, next_check = time.monotonic() + stack.ready_timeout_s, 0.0
        while True:
            if time.monotonic() >= next_check:
                self._still_mine()
                next_check = time.monotonic() + CHECK_S
            state = self._look("server")
            if state.state != "running":
                raise self._failed("server", _words(state))
            answer = ask(port, "GET", stack.health, None, HEALTH_S, stack.secrets.token)
            if answer is not None and answer.status == 200:
                return
            if time.monotonic() > until:
                said = "nothing" if answer is None else f"status {answer.status}"
                limit = _limit(stack.ready_timeout_s, "ready_minutes")
                raise self._failed("server", f"{stack.health} gave {said} for {limit}")
            time.sleep(POLL_S)

    def _start(self, kind: Kind, argv: list[str], folder: str) -> None:
        job = self._id(kind)
        before = look_at_command(self._session, job, 0, 0).state
        request = StartJob(
            job,
            before.attempt + 1,
            argv,
            folder,
            self.log(kind),
            [],
            environment=dict(self._place.stack.secrets.variables),
            serves=kind == "server",
        )
        state = start_command(self._session, request)
        if state.attempt != request.attempt:  # the agent starts no command beside one that runs
            raise DeployFailed(
                f"another deploy of workspace {self._workspace} runs its {kind} command on the "
                "machine: wait until it is done, and deploy again"
            )
        self._attempts[kind] = state.attempt
        self._offsets[kind] = state.log_from
        self._lines[kind] = LastLines(self._place.stack.secrets)

    def _look(self, kind: Kind) -> JobState:
        """The state of the command; keeps the last lines of its log."""
        look = look_at_command(self._session, self._id(kind), self._offsets[kind], _LOOK_BYTES)
        # the command writes faster than its log can be read
        if look.bytes - look.offset > _LOOK_BYTES:
            begin = look.bytes - _LOOK_BYTES
            look = look_at_command(self._session, self._id(kind), begin, _LOOK_BYTES)
            self._lines[kind].skip()
        self._lines[kind].add(look.text)
        self._offsets[kind] = look.offset
        return look.state

    def _failed(self, kind: Kind, words: str) -> DeployFailed:
        stack = self._place.stack
        return DeployFailed(
            f"the {kind} command of stack {stack.name}: {stack.secrets.hidden_in(words)}. The last "
            f"lines of {self.log(kind)} on the machine:\n{self._lines[kind].text()}"
        )

    def _taken(self) -> DeployFailed:
        return DeployFailed(
            "another program on the machine listens on port "
            f"{self._place.stack.port}: end it, or choose another port in the stack"
        )

    def _id(self, kind: Kind) -> str:
        return hashlib.sha256(f"{self._workspace} {kind}".encode()).hexdigest()[:12]


def _limit(seconds: float, field: str) -> str:
    return f"{seconds / 60:g} minutes, the limit in `{field}` of the stack"


def _words(state: JobState) -> str:
    if state.error:
        return f"it could not be started: {state.error}"
    if state.state == "ended":
        return f"it ended with status {state.status}"
    return "another deploy started it again" if state.state == "running" else "it was lost"
