"""A benchmark's machine and objects: gone with it, and with the next one where it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from flows.procedures.scratch_machine import held_and_cleared, scratch_machine
from tasks.machines import end_scratch_machines
from tasks.workspace import OpenWorkspace
from tests.fixtures.lab import FolderMarket, Lab
from tests.fixtures.plain_flows import plain
from tests.fixtures.records import put_record
from tests.fixtures.rentals import handed_over, standing
from tests.fixtures.waiting import PATIENCE_S
from tests.fixtures.world import WORKSPACE, Access, World
from torpor.control.measure.scratch import Claim, machines_name, scratch_name
from torpor.control.processes import ProcessRecord
from torpor.control.providers.provider import Order
from torpor.control.remote.agent import Session
from torpor.control.safety import Warrant
from torpor.shared.errors import ProviderError, WorkspaceBusy
from torpor.shared.values import Machine, ObjectKey

ROOT = Path(__file__).resolve().parents[2]
NAME = scratch_name(WORKSPACE)


def _named(opened: OpenWorkspace) -> OpenWorkspace:
    return replace(opened, spec=msgspec.structs.replace(opened.spec, name=NAME))


def _begin(stack: ExitStack, opened: OpenWorkspace) -> Session:
    """A benchmark that has its machine, and something in the store."""
    opened = _named(opened)
    stack.enter_context(plain(opened))
    stack.enter_context(held_and_cleared(opened, WORKSPACE, f"run-{os.getpid()}"))
    session = stack.enter_context(scratch_machine(opened, WORKSPACE, ""))
    opened.store.put(ObjectKey(f"workspaces/{NAME}/storage/left"), b"left")
    return session


def _left(world: World | Lab) -> list[str]:
    """What is in the store, without the history of what was spent."""
    found = [one.key for one in world.opened.store.list("workspaces/benchmark")]
    return [key for key in found if "/rentals/ended/" not in key]


def test_the_machine_and_objects_go_with_the_benchmark(lab: Lab) -> None:
    mine = lab.rent()
    with ExitStack() as stack:
        _begin(stack, lab.opened)
        assert len(lab.machines()) == 2
    assert [machine.id for machine in lab.machines()] == [mine.id]
    assert _left(lab) == []


def test_a_failure_leaves_nothing_either(lab: Lab) -> None:
    with pytest.raises(KeyError), ExitStack() as stack:
        _begin(stack, lab.opened)
        raise KeyError("a measurement failed")
    assert lab.machines() == []
    assert _left(lab) == []


@pytest.mark.rule(5)
def test_a_machine_whose_request_is_interrupted_is_gone_too(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is cancelled when the market has the order and has not answered."""
    create = FolderMarket.create

    def interrupted(self: FolderMarket, order: Order) -> Machine:
        create(self, order)
        raise KeyboardInterrupt

    monkeypatch.setattr(FolderMarket, "create", interrupted)
    with pytest.raises(KeyboardInterrupt), ExitStack() as stack:
        _begin(stack, lab.opened)
    assert lab.machines() == []
    assert _left(lab) == []


@pytest.mark.rule(5)
def test_a_machine_at_another_provider_is_not_forgotten(lab: Lab) -> None:
    """A killed benchmark left it; then one ran with a provider that does not know it."""
    opened = _named(lab.opened)
    mine = opened.under(machines_name(WORKSPACE))
    _, rental = standing(mine)
    elsewhere = replace(opened, providers=(FolderMarket(lab.folder / "elsewhere", "vast:2"),))
    with plain(elsewhere), held_and_cleared(elsewhere, WORKSPACE, "run-1"):
        pass
    assert mine.rentals.of(rental.label) == rental
    assert len(lab.machines()) == 1
    with plain(opened), held_and_cleared(opened, WORKSPACE, "run-2"):
        pass
    assert lab.machines() == []
    assert _left(lab) == []


@pytest.mark.rule(5)
def test_a_scratch_machine_that_cannot_be_ended_does_not_stop_the_others(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = _named(lab.opened)
    mine = opened.under(machines_name(WORKSPACE))
    first = standing(mine)[1].label
    standing(mine)
    destroy = FolderMarket.destroy

    def stuck(self: FolderMarket, machine: Machine, warrant: Warrant) -> None:
        if machine.label == first:
            raise ProviderError("it does not go")
        destroy(self, machine, warrant)

    with monkeypatch.context() as patched, plain(mine):
        patched.setattr(FolderMarket, "destroy", stuck)
        with pytest.raises(ProviderError, match="it does not go"):
            end_scratch_machines(mine)
    assert [machine.label for machine in lab.machines()] == [first]
    assert [rental.state for rental in mine.rentals.open()] == ["abandoned"]  # which watch ends
    with plain(mine):
        end_scratch_machines(mine)
    assert lab.machines() == []
    assert _left(lab) == []


@pytest.mark.rule(5)
def test_work_from_before_a_name_was_reserved_is_left(lab: Lab) -> None:
    mine = lab.opened.under(machines_name(WORKSPACE))
    machine, _ = handed_over(mine)
    with plain(mine):
        end_scratch_machines(mine)
    assert [one.id for one in lab.machines()] == [machine.id]


def test_what_another_run_has_taken_over_is_left_to_it(lab: Lab) -> None:
    opened = _named(lab.opened)
    claim = ObjectKey(f"workspaces/{NAME}/claim")
    with plain(opened), held_and_cleared(opened, WORKSPACE, "run-1"):
        other = Claim("run-2", "another", ProcessRecord(1, 1), time.time())
        put_record(opened.store, claim, other)
        opened.store.put(ObjectKey(f"workspaces/{NAME}/packs/aa/theirs"), b"theirs")
    assert len(_left(lab)) == 2


@pytest.mark.rule(5)
def test_the_next_benchmark_clears_what_a_killed_one_left(world: World, tmp_path: Path) -> None:
    mine = world.rent()
    access = tmp_path / "access.json"
    access.write_bytes(msgspec.json.encode(world.access))
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.flows.test_scratch_machine", str(access)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        assert len(world.machines()) == 2
        with pytest.raises(WorkspaceBusy), ExitStack() as stack:
            _begin(stack, world.opened)
        assert len(world.machines()) == 2, "a benchmark ended the machines of a live one"
        child.send_signal(signal.SIGKILL)
        child.wait(PATIENCE_S)
    finally:
        child.kill()
        child.communicate()
    assert any(key.endswith("storage/left") for key in _left(world))
    with ExitStack() as stack:
        _begin(stack, world.opened)
        assert len(world.machines()) == 2
    assert [machine.id for machine in world.machines()] == [mine.id]
    assert _left(world) == []


def _main(access: str) -> None:
    with ExitStack() as stack:
        found = msgspec.json.decode(Path(access).read_bytes(), type=Access)
        _begin(stack, found.opened())
        print("ready", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    _main(sys.argv[1])
