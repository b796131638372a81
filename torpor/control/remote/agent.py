"""A machine, as the control side talks to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, Self, TypeVar

from torpor.control.remote.bundle import Bundle
from torpor.control.remote.probe import Probed
from torpor.control.remote.ssh import Completed, Identity
from torpor.shared.values import Endpoint
from torpor.shared.wire.protocol import Hello
from torpor.shared.wire.request import Event, Request

A = TypeVar("A")


class Agent(Protocol):
    """An agent that serves requests, many at once. Thread-safe."""

    @property
    def hello(self) -> Hello:
        """The agent's newest hello."""

    def call(
        self,
        request: Request[A],
        *,
        request_id: str,
        on_event: Callable[[Event], None] | None = None,
        within_s: float | None = None,
    ) -> A:
        """Ask and wait for the answer; ``on_event`` is called in this thread.

        ``request_id`` names the work: the same id again gets the same answer. Raises the agent's
        error, or AgentLost where the agent stays away, or was attached for ``within_s`` and did not
        answer. Whatever ends the wait without an answer cancels the request.
        """

    def cancel(self, request_id: str) -> None:
        """Ask the agent to end a request; its call then raises RunCancelled. Idempotent."""

    def send_bundle(self, bundle: Bundle) -> str:
        """Install the bundle beside the agent, unless it is there; returns its folder on the
        machine."""


class Session(Agent, Protocol):
    """A machine that torpor is logged in to: its agent, and what runs beside it. Thread-safe."""

    @property
    def machine(self) -> Probed:
        """What the machine said of itself when the agent was attached."""

    def execute(self, argv: Sequence[str], *, timeout_s: float = 60.0) -> Completed:
        """Run a small program on the machine, beside the agent."""

    def run_script(self, script: str, *arguments: str, timeout_s: float = 60.0) -> Completed:
        """Run a script of torpor's on the machine, with the agent's Python. It imports nothing from
        a folder of the user's."""

    def listens(self, port: int) -> bool:
        """Whether a program on the machine accepts connections to ``port`` of 127.0.0.1. Raises
        MachineDenied where its SSH server forwards no ports."""

    def forward(self, port: int) -> AbstractContextManager[int]:
        """A local port from which connections go to ``port`` of the machine's 127.0.0.1, through
        this connection. It does not outlive a dropped connection."""

    def close(self) -> None:
        """Detach. Open calls raise AgentLost. The agent ends the runs a minute later."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None: ...


class LogIn(Protocol):
    """How sessions are opened; ``SshSession.open`` is one."""

    def __call__(
        self,
        endpoint: Endpoint,
        identity: Identity,
        *,
        pin: Callable[[str], None] | None = None,
        sampled: bool = False,
        open_s: float = ...,
        check: Callable[[], None] = ...,
    ) -> Session:
        """Log in, and attach to the agent, within ``open_s``. ``pin`` gets the host key if
        ``endpoint`` has none, and must record it. ``sampled``: a sampler is to run on the machine
        from now on. ``check`` is called before each later try to connect; what it raises, unless
        that is retryable, is raised by the open calls. Raises MachineUnreachable, MachineDenied,
        HostKeyChanged, MachineUnfit, DiskFull or AgentLost."""
