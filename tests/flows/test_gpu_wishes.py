"""A wake, a replicate, a create and a job rent the GPUs that they are told, not the block's."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from flows import create, deploy, job
from tasks.workspace import OpenWorkspace
from tests.fixtures.driver import JOB_FLOW, Story, drive_job, left_job
from tests.fixtures.lab import Lab
from tests.fixtures.market import H100
from tests.fixtures.plain_flows import (
    hibernate_plainly,
    replicate_plainly,
    run_plainly,
    wake_plainly,
)
from torpor.control.providers.gpu_wishes import wishes_of
from torpor.control.providers.gpus import GpuModel
from torpor.control.providers.offers import misfit
from torpor.shared.errors import InvalidInput, NoOffer
from torpor.shared.values import Want, WantChange


@pytest.fixture
def lab_of_gpus(lab: Lab) -> Lab:
    """The workspace wants an H100, which is on sale beside two dearer L40S. It is asleep."""
    sold = msgspec.structs.replace(H100, provider=lab.market.identity)
    card = msgspec.structs.replace(sold, gpu=GpuModel("L40S", "", 48), price_usd_h=9.0)
    lab.market.on_sale = [
        sold,
        msgspec.structs.replace(card, id="here"),
        msgspec.structs.replace(card, id="there", region="EU", price_usd_h=12.0),
    ]
    lab.opened = lab.wanting(want=Want(gpu="H100"))
    place = lab.workspace(lab.rent().id)
    place.mkdir()
    (place / "notes").write_text("0")
    hibernate_plainly(lab.opened)
    lab.market.orders.clear()
    return lab


def _ordered(lab: Lab) -> list[str]:
    return [order.offer.id for order in lab.market.orders]


def test_a_wake_rents_what_it_is_told_and_the_next_one_what_the_block_says(
    lab_of_gpus: Lab,
) -> None:
    wake_plainly(lab_of_gpus.opened, gpu="RTX 4090, L40S", regions=["EU"])
    hibernate_plainly(lab_of_gpus.opened)
    wake_plainly(lab_of_gpus.opened)
    assert _ordered(lab_of_gpus) == ["there", "1"]


def test_a_replicate_and_a_create_rent_what_they_are_told(lab_of_gpus: Lab) -> None:
    replicate_plainly(lab_of_gpus.opened, count=1, gpu="L40S")
    fresh = lab_of_gpus.named("fresh")
    run_plainly(fresh.opened, create, gpu="L40S", regions=["EU"])
    assert _ordered(lab_of_gpus) == ["here", "there"]


def test_replicas_are_rented_on_the_preferred_gpu_while_there_is_one(lab_of_gpus: Lab) -> None:
    """Each begins with another offer, and none with a GPU that is only the second wish."""
    replicate_plainly(lab_of_gpus.opened, count=3, gpu="L40S, H100")
    assert sorted(_ordered(lab_of_gpus)) == ["here", "here", "there"]


def test_what_is_not_understood_or_would_be_ignored_is_refused_before_anything_is_rented(
    lab_of_gpus: Lab,
) -> None:
    opened = lab_of_gpus.opened
    for refused in ({"gpu": "24 potatoes"}, {"gpu": "L40S", "machine": "root@127.0.0.1:22"}):
        with pytest.raises(InvalidInput):
            wake_plainly(opened, **refused)
    with pytest.raises(InvalidInput, match="24 potatoes"):
        run_plainly(opened, job, ["true"], gpu="24 potatoes")
    with pytest.raises(NoOffer):
        wake_plainly(opened, gpu="A10")
    assert _ordered(lab_of_gpus) == []
    assert opened.jobs.open() == []


def test_no_machine_is_dearer_than_what_a_person_agreed_to(lab_of_gpus: Lab) -> None:
    """Before, a price that rose between question and rental was paid."""
    agreed, lab_of_gpus.market.on_sale = (
        4.0,
        [
            msgspec.structs.replace(one, price_usd_h=one.price_usd_h + 0.01)
            for one in lab_of_gpus.market.on_sale
        ],
    )
    fresh = lab_of_gpus.named("fresh")
    for rents in (
        lambda: wake_plainly(lab_of_gpus.opened, agreed_usd_h=agreed),
        lambda: replicate_plainly(lab_of_gpus.opened, agreed_usd_h=agreed),
        lambda: run_plainly(fresh.opened, create, agreed_usd_h=agreed),
    ):
        with pytest.raises(NoOffer, match=r"may come to 4.01 \$/h, and 4 \$/h were agreed to"):
            rents()
    assert _ordered(lab_of_gpus) == []
    wake_plainly(lab_of_gpus.opened, agreed_usd_h=4.01)
    assert _ordered(lab_of_gpus) == ["1"]


def test_a_deploy_rents_nothing_dearer_than_what_a_person_agreed_to(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow, wanted = import_module("flows.deploy"), list[Want]()

    def deployed(opened: OpenWorkspace, *_: Any) -> None:
        wanted.append(opened.spec.want)
        raise InvalidInput("seen")

    stack = SimpleNamespace(check=lambda strategy: None, needs_model_there=False)
    monkeypatch.setattr(flow, "open_stack", lambda name: stack)
    monkeypatch.setattr(flow, "deploy_stack", deployed)
    with pytest.raises(InvalidInput, match="seen"):
        run_plainly(lab.opened, deploy, "vllm", agreed_usd_h=2.0)
    assert [want.agreed_usd_h for want in wanted] == [2.0]


def test_what_a_person_agrees_to_limits_what_an_offer_may_come_to_and_no_bid(lab: Lab) -> None:
    """A bid of what a spot machine costs just now would lose it at the first rise."""
    opened = lab.wanting(want=Want(max_price_usd_h=3.0))
    want = opened.wanting(WantChange(agreed_usd_h=2.0)).spec.want
    assert (want.max_price_usd_h, want.agreed_usd_h) == (3.0, 2.0)
    spot = msgspec.structs.replace(H100, price_usd_h=1.0, most_usd_h=2.5)
    assert "may come to 2.5 $/h, and 2 $/h were agreed to" in misfit(spot, want)
    assert not misfit(msgspec.structs.replace(spot, most_usd_h=2.0), want)


def test_a_job_rents_what_it_is_told_in_place_of_what_its_block_says(
    lab: Lab, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.opened = lab.wanting(want=Want(gpu="H100", image="usual", disk_gib=7.0))
    wanted: list[Want] = []

    def wake(opened: Any, *_: Any, **__: Any) -> None:
        wanted.append(opened.spec.want)
        raise InvalidInput("seen")

    monkeypatch.setattr(JOB_FLOW, "wake_workspace", wake)
    drive_job(lab, left_job(lab))
    drive_job(lab, left_job(lab, "3f2a9c81d04f", gpu="L40S:2", image="own", spot="only"))
    assert wanted == [
        Want(gpu="H100", image="usual", disk_gib=7.0),
        Want(gpu="L40S:2", image="own", spot="only", disk_gib=7.0),
    ]


@pytest.mark.parametrize(
    ("told", "gpus"), [("1x H100", 1), ("2 x H100 80GB", 2), ("H100:4", 4), ("H100", 8)]
)
def test_the_number_that_one_rental_names_holds_whatever_the_block_says(
    lab: Lab, told: str, gpus: int
) -> None:
    opened = lab.wanting(want=Want(gpu="A100", gpu_count=8))
    (wish,) = wishes_of(opened.wanting(WantChange(gpu=told)).spec.want)
    assert (wish.gpu and wish.gpu.model, wish.count) == ("H100", gpus)
