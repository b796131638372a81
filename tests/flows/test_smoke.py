"""The flows that users start first, once each, as Prefect runs them: a real SSH server, S3 server
and Prefect server. What they promise in detail is tested over machines in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest

from deployments.server import Server as PrefectServer
from flows import benchmark, deploy, hibernate, job, replicate, wake
from tests.fixtures.small_stack import small_stack
from tests.fixtures.stores import Server as StoreServer
from tests.fixtures.world import World, make_world

NAME = "every-flow"  # others use the same server at the same time


@pytest.fixture
def standing(prefect_server: PrefectServer, seaweed: StoreServer) -> Iterator[World]:
    with make_world(seaweed, sealed=True) as made:
        access = made.named(NAME).access
        spec = msgspec.structs.replace(access.spec, programs=["sleep 600"], process="try")
        world = replace(made, access=msgspec.structs.replace(access, spec=spec))
        world.access.save_blocks(NAME)
        yield world


def test_a_workspace_sleeps_wakes_works_serves_and_is_measured(standing: World) -> None:
    home = standing.workspace(standing.rent().id)
    home.mkdir()
    (home / "model").write_text("small")

    slept = hibernate(NAME)
    assert slept.destroyed and standing.machines() == []

    woken = wake(NAME)
    assert (standing.workspace(woken.machine) / "model").read_text() == "small"
    assert woken.programs == ["sleep 600: started"]

    done = job(NAME, command=["sh", "-c", "echo worked > result"])
    assert done.job.state == "succeeded" and standing.machines() == []

    copies = replicate(NAME, count=2)
    assert len(copies.ready) == 2
    for machine in standing.machines():
        assert (standing.workspace(machine.id) / "result").read_text() == "worked\n"
    for copy in copies.ready:
        assert hibernate(NAME, machine=copy.machine).destroyed

    small_stack().save(NAME, overwrite=True)
    served = deploy(NAME, stack=NAME)
    assert served.machine in {machine.id for machine in standing.machines()}
    assert hibernate(NAME).destroyed

    measured = benchmark(NAME, rounds=1, minutes=1)
    assert measured is not None and standing.machines() == []
    assert standing.verify_listed() > 0
