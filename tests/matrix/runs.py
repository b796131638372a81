"""Runs that can be stopped: processes that call a flow plainly, and runs of a worker."""

from __future__ import annotations

import itertools
import logging
import os
import re
import signal
import time
from typing import Any, Final, Protocol

import flows
from tasks.plain_runner import PlainRunner
from tasks.workspace import OpenWorkspace
from tests.fixtures.deployed import ENDED, Deployed
from tests.fixtures.kill_points import Child, Say

POLL_S: Final = 0.01
HANGS_S: Final = 300.0
"""A run that has not ended by then counts as one that never will."""


class Run(Protocol):
    """One run of a flow, from its start."""

    def steps(self) -> list[str]:
        """The steps that it has begun, in order, without their numbers."""

    def stop(self) -> None: ...

    def ended(self) -> str:
        """How it ended; empty while it goes on."""

    def read(self) -> str:
        """What its user reads last."""


class PlainRun:
    """A process that calls the flow; ``by``: the signal that stops it."""

    def __init__(
        self,
        opened: OpenWorkspace,
        flow: str,
        by: signal.Signals = signal.SIGKILL,
        **parameters: Any,
    ) -> None:
        self._by = by

        def work(say: Say) -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            log = logging.getLogger("torpor.plain")
            log.setLevel(logging.INFO)
            log.addHandler(_Says(say))
            with PlainRunner(opened, before=lambda label: say(f"step {step_of(label)}")):
                getattr(flows, flow.replace("-", "_")).fn(opened.spec.name, **parameters)

        self._child = Child(work)

    def steps(self) -> list[str]:
        return self._said("step ")

    def stop(self) -> None:
        if not self._child.ended():
            os.kill(self._child.pid, self._by)

    def ended(self) -> str:
        if not self._child.ended():
            return ""
        told = self._child.told()
        return "killed" if told.killed else told.error or "completed"

    def read(self) -> str:
        message = self._child.told().message if self._child.ended() else ""
        return message or next(iter(self._said("log ")[::-1]), "")

    def kill(self) -> None:
        self._child.kill()

    def _said(self, kind: str) -> list[str]:
        lines = self._child.said()
        return [line.removeprefix(kind) for line in lines if line.startswith(kind)]


class UiRun:
    """A run of a deployment, which the UI cancels."""

    def __init__(self, deployed: Deployed, deployment: str, **parameters: Any) -> None:
        self._deployed = deployed
        self._run = deployed.start(deployment, parameters)

    def steps(self) -> list[str]:
        wanted = {"flow_runs": {"id": {"any_": [self._run]}}, "sort": "EXPECTED_START_TIME_ASC"}
        tasks = self._deployed.ask("task_runs/filter", wanted)
        # A step without a name for its runs gets one of Prefect's, which ends with three letters.
        return [step_of(re.sub(r"-\w{3}$", "", task["name"])) for task in tasks]

    def stop(self) -> None:
        wanted = {"state": {"type": "CANCELLING", "name": "Cancelling"}}
        self._deployed.ask(f"flow_runs/{self._run}/set_state", wanted)  # refused, if it has ended

    def ended(self) -> str:
        found = self._deployed.run(self._run)
        return str(found["state_name"]) if found["state_type"] in ENDED else ""

    def read(self) -> str:
        wanted = {"logs": {"flow_run_id": {"any_": [self._run]}}, "sort": "TIMESTAMP_DESC"}
        logs = self._deployed.ask("logs/filter", {**wanted, "limit": 1})
        state = self._deployed.run(self._run)["state"]["message"]
        return str(state or next((log["message"] for log in logs), ""))


class _Says(logging.Handler):
    def __init__(self, say: Say) -> None:
        super().__init__(logging.INFO)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say("log " + record.getMessage().replace("\n", " "))


def step_of(label: str) -> str:
    """The words of a label before its first number or machine: ``restore part`` of 3."""
    words = itertools.takewhile(lambda word: not re.search(r"\d", word), label.split())
    return " ".join(words)


def wait_for(run: Run) -> tuple[str, float]:
    """How it ended and after how many seconds from now; ``hangs`` where it never does."""
    began = time.monotonic()
    while not (ended := run.ended()):
        if time.monotonic() - began > HANGS_S:
            return "hangs", HANGS_S
        time.sleep(POLL_S)
    return ended, time.monotonic() - began


def undisturbed(opened: OpenWorkspace, flow: str, **parameters: Any) -> str:
    """Run a flow plainly; how it ended, with its message."""
    run = PlainRun(opened, flow, **parameters)
    ended, _ = wait_for(run)
    run.kill()
    return ended if ended == "completed" else f"{ended}: {run.read()}"
