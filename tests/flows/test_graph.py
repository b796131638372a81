"""What the UI's graph of a run shows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from deployments.server import Server as PrefectServer
from flows import hibernate, replicate
from tests.fixtures.prefect_api import ask
from tests.fixtures.stores import Server as StoreServer
from tests.fixtures.waiting import until
from tests.fixtures.world import World, make_world

NAME = "graph"  # others use the same server at the same time
STEPS = (
    "open session",
    "begin restore",
    "restore share 1",
    "finish restore",
    "check restore",
    "make paths",
    "hand over machine",
)


@pytest.fixture
def stored(prefect_server: PrefectServer, seaweed: StoreServer) -> Iterator[World]:
    with make_world(seaweed) as made:
        world = made.named(NAME)
        world.access.save_blocks(NAME)
        home = world.workspace(world.rent().id)
        home.mkdir()
        (home / "model").write_text("small")
        assert hibernate(NAME).destroyed
        yield world


def test_the_steps_of_each_machine_of_a_replicate_are_one_named_branch(
    stored: World, prefect_server: PrefectServer
) -> None:
    state = replicate(NAME, count=2, peers="never", return_state=True)
    machines = {replica.machine for replica in state.result().ready}
    assert len(machines) == 2
    run = state.state_details.flow_run_id

    def whole() -> dict[str, Any] | None:
        """Prefect's server learns of task runs by events, after their ends."""
        graph = ask("GET", f"{prefect_server.api_url}/flow_runs/{run}/graph-v2")
        nodes = {node["id"]: node for _, node in graph["nodes"]}
        ends = [one for one in nodes.values() if one["label"].endswith("hand over machine")]
        return nodes if len(ends) == 2 and all(one["end_time"] for one in ends) else None

    nodes = until(whole, "the graph has both machines", every_s=0.5)
    assert nodes is not None

    def parents(node: dict[str, Any]) -> set[str]:
        return {str(nodes[edge["id"]]["label"]) for edge in node["parents"]}

    of = {str(node["label"]): parents(node) for node in nodes.values()}
    assert of["probe store"] == set()
    assert "probe store" in of["pick snapshot"]
    assert "pick snapshot" in of["find what was left"]
    assert "find what was left" in of["find offers"]
    assert [label for label, above in of.items() if not above] == ["probe store"]
    assert {label for label in of if label.startswith("machine ")} == {
        "machine 1: create machine",
        "machine 2: create machine",
    }
    for machine in machines:
        steps = {label: above for label, above in of.items() if label.startswith(f"{machine}: ")}
        (created,) = [
            one for one in steps[f"{machine}: open session"] if one.startswith("machine ")
        ]
        assert "find offers" in of[created]
        way = [created, *(f"{machine}: {step}" for step in STEPS)]
        for step, above in pairwise(way[::-1]):
            assert above in steps[step]
        others = {other for other in of if other.split(":")[0] in machines - {machine}}
        assert not others & set().union(*steps.values())
