"""A benchmark of deploys measures real starts, and leaves nothing of the user's changed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prefect.flows import Flow
from prefect.utilities.callables import parameter_schema

from flows import benchmark, deploy
from flows.procedures import measurement as of_stores
from flows.procedures.deploy import measurement
from tasks.measure import MeasuredStore
from tasks.plain_runner import PlainRunner
from tests.fixtures.lab import Lab
from tests.fixtures.plain_flows import hibernate_plainly, run_plainly
from tests.fixtures.small_stack import small_stack
from tests.fixtures.world import World
from torpor.control.deploy.stack import Stack as StackValue
from torpor.control.measure.scratch import scratch_name
from torpor.control.reports import BenchmarkReport
from torpor.control.store.manifests import snapshot_ids
from torpor.control.upkeep.pins import pinned
from torpor.shared.errors import DeployFailed, InvalidInput, StoreError
from torpor.shared.values import BASE, WorkspaceName


def test_starts_are_measured_and_their_machines_and_environments_go(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = world.workspace(world.rent().id)
    place.mkdir()
    (place / "model").write_text("a word")
    hibernate_plainly(world.opened, destroy=False)  # the user works on
    (mine,), snapshots = world.machines(), world.snapshots()
    stacks = {"good": small_stack(), "bad": small_stack(server=["false"])}

    def opens(name: str) -> StackValue:
        return msgspec.structs.replace(stacks[name].value(), name=name)

    monkeypatch.setattr(measurement, "open_stack", opens)
    pages: list[str] = []
    monkeypatch.setattr(PlainRunner, "page", lambda _, **page: pages.append(page["markdown"]))
    report: BenchmarkReport = run_plainly(
        world.opened, benchmark, ["good", "bad"], strategies=["stored", "official"],
        rounds=1, folder=str(tmp_path),
    )  # fmt: skip
    (about,) = report.advice
    assert about.startswith("good at local:")
    assert report.advice[about].startswith("stored, warm: the first completion comes ")
    kept = json.loads((Path(report.folder) / "benchmark.json").read_text())
    found = {(one["data"], one["phase"]): one for one in kept["figures"] if one["unit"] == "s"}
    for kind in ("stored, cold", "stored, warm"):
        whole = found[kind, "from rental"]
        assert whole["n"] == 1 and whole["p95"] == whole["median"]
        assert found[kind, "from SSH"]["median"] < whole["median"]
    assert "environment: setup" in {phase for kind, phase in found if kind == "stored, cold"}
    assert "environment: restore" in {phase for kind, phase in found if kind == "stored, warm"}
    notes = "\n".join(report.notes)
    assert "stack good has no image" in notes and "a start of bad by stored" in notes
    assert "| good | stored, warm | local:" in pages[-1]

    assert world.machines() == [mine] and world.snapshots() == snapshots
    names = {one.key.split("/")[1] for one in world.direct.list(f"workspaces/{BASE}")}
    assert all(not snapshot_ids(world.direct, WorkspaceName(name)) for name in names)
    assert not [*world.direct.list(f"workspaces/{scratch_name(world.opened.spec.name)}/")]


def test_stores_and_encodings_are_measured_and_a_store_that_fails_is_noted(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a machine of its own, which goes, as all that was stored does."""
    refuses = SimpleNamespace(name="far", store=_Refuses(), price=None)
    near = MeasuredStore("near", world.direct, None)
    monkeypatch.setattr(of_stores, "open_stores", lambda *_: [near, refuses])
    report: BenchmarkReport = run_plainly(
        world.opened, benchmark, rounds=1, minutes=0.01, folder=str(tmp_path)
    )
    assert report.advice["store"].startswith("near: raw random bytes come back at ")
    assert report.advice["encoding of random bytes"] == "raw: no encoding saves 3 % of it"
    assert report.notes == ["store far was not measured: it does not answer"]
    kept = json.loads((Path(report.folder) / "benchmark.json").read_text())
    assert {one["name"] for one in kept["figures"] if one["what"] == "line"} == {"near"}
    assert kept["host"]["GPU"].startswith("not measured: this machine has no NVIDIA GPU")
    by_content = {row.pop("content"): row for row in kept["fastest_by_line"]}
    assert by_content["BF16 weights"]["0.2 Gbit/s"].startswith("planes, ")
    assert all(best.startswith("raw, ") for best in by_content["random bytes"].values())
    assert world.machines() == []
    scratch = scratch_name(world.opened.spec.name)
    assert not [*world.direct.list(f"workspaces/{scratch}/")]


class _Refuses:
    def probe(self) -> None:
        raise StoreError("it does not answer")


def test_the_environment_of_a_start_that_fails_goes(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server ends after it was stored. What cannot be deleted at once goes with the scratch
    name, by which the next benchmark also finds what a killed one left."""
    fetch = ["sh", "-euc", 'echo fetched > "$1"', "sh", "{model_path}"]
    stack = msgspec.structs.replace(small_stack(fetch=fetch).value(), name="good")
    monkeypatch.setattr(measurement, "open_stack", lambda _: stack)
    seen: list[list[str]] = []

    def kept() -> list[str]:
        names = {one.key.split("/")[1] for one in world.direct.list(f"workspaces/{BASE}")}
        return [why for name in names for why in pinned(world.direct, WorkspaceName(name)).values()]

    def ended(_: object) -> None:
        seen.append(kept())
        if len(seen) > 1:  # the first look is before it is pinned
            raise DeployFailed("the server has ended")

    def fails(_: object) -> None:
        raise StoreError("the store does not answer")

    monkeypatch.setattr("flows.procedures.deploy.server.Serving.check_serving", ended)
    monkeypatch.setattr(measurement, "forget_base", fails)
    with pytest.raises(InvalidInput, match=r"has ended.*may still be in the store"):
        run_plainly(world.opened, benchmark, ["good"], rounds=1, folder=str(tmp_path))
    scratch = scratch_name(world.opened.spec.name)
    assert [why.startswith(f"{scratch}: ") for why in seen[1]] == [True]
    assert kept() == []


def test_a_benchmark_without_a_way_is_refused(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blocks.Stack.of", lambda name: small_stack())
    with pytest.raises(InvalidInput, match="has no own image"):
        run_plainly(lab.opened, benchmark, ["good"], strategies=["own"])
    with pytest.raises(InvalidInput, match="'D' is not a strategy"):
        run_plainly(lab.opened, benchmark, ["good"], strategies=["D"])
    with pytest.raises(InvalidInput, match="name at least one stack and one strategy"):
        run_plainly(lab.opened, benchmark, ["good"], strategies=[])


def test_parameters_of_the_other_benchmark_are_refused(lab: Lab) -> None:
    with pytest.raises(InvalidInput, match=r"`stores`, `machine` belong to .* of stores"):
        run_plainly(lab.opened, benchmark, ["good"], stores=["*"], machine="me@host")
    with pytest.raises(InvalidInput, match=r"`providers` belong to .* deploys: name `stacks`"):
        run_plainly(lab.opened, benchmark, providers=["local-provider/default"])
    assert not lab.machines()


@pytest.mark.parametrize(("flow", "field"), [(deploy, "strategy"), (benchmark, "strategies")])
def test_the_form_offers_the_four_strategies(flow: Flow[..., Any], field: str) -> None:
    form = json.dumps(parameter_schema(flow).model_dump()["properties"][field])
    assert '["official", "setup", "own", "stored"]' in form
