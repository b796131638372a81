"""A store that begins to drip its answers, for ever: who stores a workspace there waits only so
long, and its machine stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from flows import hibernate, job
from tasks.plain_runner import PlainRunner
from tests.fixtures.dripping import Dripping
from tests.fixtures.driver import hurried
from tests.fixtures.lab import Lab
from torpor.control.store.s3 import S3Store

pytestmark = pytest.mark.rule("H8")


@pytest.fixture
def dripping() -> Iterator[Dripping]:
    server = Dripping()
    with hurried():
        yield server
    server.close()


@pytest.mark.parametrize(
    "run",
    [lambda name: hibernate.fn(name), lambda name: job.fn(name, ["true"])],
    ids=["hibernate", "job"],
)
def test_a_flow_ends_where_its_store_drips_and_the_machine_stays(
    lab: Lab, dripping: Dripping, run: Callable[[Any], object]
) -> None:
    machine = lab.rent()
    (lab.workspace(machine.id)).mkdir()

    def runs(store: S3Store) -> None:
        evil = replace(lab.opened, store=store)
        with PlainRunner(evil, retries=0, wait_factor=0.01):
            run(evil.spec.name)

    assert dripping.is_named(runs)
    assert [one.id for one in lab.machines()] == [machine.id]
