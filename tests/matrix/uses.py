"""What users start of a workspace: each flow, from which state, with which parameters."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from tests.fixtures.small_stack import small_stack
from tests.matrix.bench import Bench
from torpor.control.jobs.records import Job

Parameters = Callable[[Bench], dict[str, Any]]


@dataclass(frozen=True)
class Use:
    """``deployment`` begins from a machine that is awake, or from snapshots alone. ``changes``: it
    also pairs with every other that does."""

    deployment: str
    begins: Literal["awake", "asleep"] = "awake"
    parameters: Parameters = lambda bench: {}
    changes: bool = True

    @property
    def flow(self) -> str:
        return self.deployment.partition("/")[0]


def _job(bench: Bench, **changes: Any) -> Job:
    """A job on record, which nobody drives."""
    jobs = bench.world.opened.jobs
    made = Job(
        id=secrets.token_hex(6),
        workspace=jobs.workspace,
        block=bench.name,
        command=["true"],
        created_unix=time.time(),
    )
    return msgspec.structs.replace(jobs.take(made, "a run that is gone"), **changes)


def _ended_job(bench: Bench) -> dict[str, Any]:
    return {"job": bench.world.opened.jobs.end(_job(bench, state="succeeded")).id}


def _stack(bench: Bench) -> dict[str, Any]:
    made = small_stack()
    if bench.saved:
        made.save(bench.name, overwrite=True)
    return {"stack": bench.name if bench.saved else made}


USES: Final = (
    Use("create", "asleep"),
    Use("wake", "asleep"),
    Use("replicate", "asleep", lambda bench: {"count": 2}),
    Use("deploy", "asleep", _stack),
    Use("job", "asleep", lambda bench: {"command": ["true"]}),
    Use("hibernate"),
    Use("backup", parameters=lambda bench: {"keep_last": 1}),
    Use("sync", parameters=lambda bench: {"snapshot": bench.oldest()}),
    Use("restore-path", parameters=lambda bench: {"path": "lib", "into": "~/recovered"}),
    Use("verify", parameters=lambda bench: {"depth": "full"}),
    Use("cancel-job", parameters=lambda bench: {"job": _job(bench).id}),
    Use("delete-snapshots", parameters=lambda bench: {"snapshots": [bench.oldest()]}),
    Use("prune", parameters=lambda bench: {"dry_run": False}),
    Use("pin", parameters=lambda bench: {"snapshot": bench.oldest(), "reason": "a test"}),
    Use("reconcile"),
    Use("diff", changes=False),
    Use("snapshots", parameters=lambda bench: {"find": "*.py"}, changes=False),
    Use("job-status", parameters=_ended_job, changes=False),
)
"""All of prefect.yaml that take one workspace, but benchmarks: they leave the workspace alone."""
