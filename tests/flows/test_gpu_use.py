"""A job's record says what it used of the GPUs, and spend shows it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flows import job, spend
from flows.procedures.job import gpu_use
from tasks.plain_runner import PlainRunner
from tests.fixtures.activity import sample
from tests.fixtures.driver import hurried
from tests.fixtures.lab import DEMO, Lab
from tests.fixtures.plain_flows import Shows
from tests.fixtures.waiting import background, until
from torpor.control.jobs import gpu_advice
from torpor.control.jobs.records import Jobs
from torpor.machine.sampler.ring import Ring, boot_clock_s, boot_id

pytestmark = pytest.mark.usefixtures("needs_server")


@pytest.fixture(autouse=True)
def _hurried(short_agent: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gpu_use, "LOOK_S", 1.0)
    monkeypatch.setattr(gpu_advice, "LEAST_S", 1)
    with hurried():
        yield


def test_a_job_records_its_gpus_and_spend_shows_them(lab: Lab, tmp_path: Path) -> None:
    machine = lab.rent().id
    lab.workspace(machine).mkdir()
    go = tmp_path / "go"
    command = ["sh", "-c", f"until test -e {go}; do sleep 0.1; done"]
    jobs = Jobs(lab.direct, DEMO)

    def run() -> None:
        with PlainRunner(lab.opened, wait_factor=0.1):
            job.fn(DEMO, command)

    ring, number = Ring(lab.market.near[machine].home), 0

    def measured() -> int:
        nonlocal number
        number += 1
        facts = {"at_s": boot_clock_s(), "boot": boot_id(), "gpu": 97, "gpu_mib": 60 * 1024}
        ring.append(sample(number, **facts))
        return sum(begun.attempts[-1].gpu_s for begun in jobs.open() if begun.attempts)

    with background(run) as ended:
        try:
            until(measured, "its record says what it used", every_s=0.2)
        finally:
            go.touch()
        ended()
    ring.close()
    (attempt,) = jobs.ended()[0].attempts
    assert (attempt.gpu_percent, attempt.gpu_mib) == (97.0, 60 * 1024)
    with Shows(lab.opened) as shows:
        spend.fn(DEMO)
    assert "## What jobs used of their GPUs" in shows.markdown
    assert "| 97 % | 60.0 of 80 GiB | a faster one may pay |" in shows.markdown
