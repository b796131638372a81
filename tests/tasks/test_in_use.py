"""What a workspace has that its block is needed for; whatever is not known counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tasks.in_use import in_use
from tests.fixtures.clocked_agent import ClockedStore
from tests.fixtures.lab import DEMO, Lab
from tests.fixtures.market import H100, Market
from tests.fixtures.plain_flows import hibernate_plainly, plain
from tests.fixtures.rentals import handed_over
from torpor.control.jobs.records import Job, new_job_id
from torpor.control.providers.provider import Order
from torpor.shared.errors import ProviderUnavailable, StoreError
from torpor.shared.values import DRILL, object_key, reserved_name


def _found(lab: Lab) -> list[str]:
    with plain(lab.opened):
        return in_use(lab.opened)


def test_its_machines_count_until_they_are_ended_and_those_of_its_drills_too(lab: Lab) -> None:
    assert _found(lab) == []
    machine = lab.rent()
    lab.named("another").record(name="another", state="handed over")
    assert _found(lab) == [f"machine {machine.id} at vast:1 (handed over)"]
    drill, _ = handed_over(lab.opened.under(reserved_name(DRILL, DEMO)))
    assert f"machine {drill.id} at vast:1 (handed over)" in _found(lab)
    lab.workspace(machine.id).mkdir()
    (lab.workspace(machine.id) / "work").write_bytes(b"mine")
    hibernate_plainly(lab.opened, machine=machine.id)
    assert _found(lab) == [f"machine {drill.id} at vast:1 (handed over)"]


def test_a_request_whose_machine_is_not_known_counts(lab: Lab) -> None:
    lab.record(state="abandoned")
    assert _found(lab) == ["machine not named yet at vast:1 (abandoned)"]


def test_a_machine_counts_whose_record_somebody_has_deleted(lab: Lab) -> None:
    machine = lab.rent()
    lab.store.delete([one.key for one in lab.store.list("workspaces/demo/rentals/")])
    (found,) = _found(lab)
    assert found == f"machine {machine.id} at vast:1 (running), which no open rental names"


def test_an_open_job_counts(lab: Lab) -> None:
    job = Job(
        id=new_job_id("a run"), workspace=lab.opened.spec.name, block=DEMO, command=["true"],
        created_unix=0.0,
    )  # fmt: skip
    lab.opened.jobs.take(job, "a run")
    assert _found(lab) == [f"job {job.id} (waiting)"]


def test_a_record_that_cannot_be_believed_and_a_silent_market_count(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    forged = object_key(f"workspaces/{DEMO}/rentals/open/{'f' * 16}")
    lab.store.put(forged, b"{}")
    (found,) = _found(lab)
    assert found.startswith("records that cannot be believed")
    assert forged in found
    lab.store.delete([forged])

    def silent() -> None:
        raise ProviderUnavailable("down for maintenance")

    monkeypatch.setattr(lab.market, "list_own", silent)
    assert _found(lab) == ["machines at vast:1, perhaps: it does not answer (down for maintenance)"]


def test_another_market_of_the_installation_is_asked_too_and_may_be_silent(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    former = Market("runpod:2")
    label = lab.opened.rentals.new_label("me")
    order = Order(offer=H100, label=label, public_key="", host_key="", jump_host_key="")
    machine = former.create(order)
    opened = replace(lab.opened, others=lambda: (lab.market, former))
    with plain(opened):
        assert in_use(opened) == [
            f"machine {machine.id} at runpod:2 (running), which no open rental names"
        ]
    former.away = ProviderUnavailable("down for maintenance")
    with plain(opened):
        assert in_use(opened) == []
    assert "runpod:2 was left out: down for maintenance" in caplog.text


def test_a_store_that_does_not_answer_is_an_error(lab: Lab) -> None:
    class Away(ClockedStore):
        def list(self, prefix: str) -> object:  # type: ignore[override]
            raise StoreError("the store is away")

    with pytest.raises(StoreError, match="the store is away"):
        in_use(replace(lab.opened, store=Away(lab.store)))
