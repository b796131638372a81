"""TensorDock: the contract, and this market's traps."""

from __future__ import annotations

import base64
import inspect
import subprocess
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from tests.control.providers.market_contract import MarketContract, Shop
from tests.markets.server import Answer
from torpor.control.providers.offers import misfit
from torpor.control.providers.provider import Absent
from torpor.control.providers.tensordock import TensorDockProvider
from torpor.shared.errors import (
    CreateFailed,
    CreateUncertain,
    InvalidInput,
    NotOurs,
    ProviderError,
    ProviderUnavailable,
)
from torpor.shared.values import Machine, Want


class TestTensorDock(MarketContract):
    row = "tensordock"
    images = False  # TensorDock's images are no container images
    concludes_nothing: ClassVar[dict[str, type[ProviderError]]] = {
        **MarketContract.concludes_nothing,
        "error body": ProviderUnavailable,  # {"error": ..., "status": 500}
    }

    @pytest.fixture
    def want(self) -> Want:
        return Want(gpu="RTX 4090", disk_gib=20)

    @pytest.mark.parametrize("shape", ["flat", "data", "attributes"])
    def test_every_known_shape_of_an_instance_is_read(self, shop: Shop, shape: str) -> None:
        shop.fake.shape = shape
        shop.fake.statuses_in_capitals = True
        machine = shop.create()
        live = shop.find(machine)
        assert (live.state, live.label) == ("running", shop.order.label)
        assert live.endpoint is not None
        assert shop.plain.list_own() == [live]

    @pytest.mark.parametrize("documented", [False, True])
    def test_the_list_is_flat_or_nested(self, shop: Shop, documented: bool) -> None:
        shop.fake.documented = documented
        shop.plain.check()
        assert shop.plain.list_own() == []
        machine = shop.create()
        assert shop.create().id == machine.id
        assert [live.id for live in shop.plain.list_own()] == [machine.id]

    def test_its_calls_may_take_two_minutes(self) -> None:
        timeouts = inspect.signature(TensorDockProvider).parameters["timeout"].default
        assert (timeouts.read, timeouts.connect) == (120.0, 10.0)

    @pytest.mark.parametrize("works_after", [0, 1, 99])
    def test_a_machine_whose_gpu_has_no_driver_powers_itself_off(
        self, shop: Shop, works_after: int, tmp_path: Path
    ) -> None:
        """Its start script first tries to set the driver's packages up."""
        shop.create()
        assert shop.asked()["image"] == "ubuntu2404_ml_pytorch"
        packed = shop.asked()["cloud_init"]["runcmd"][1].split()[1]
        script = base64.b64decode(packed).decode()
        driver = script[script.index("if ! nvidia-smi") : script.index("if [ -d /run/systemd")]
        for name in ("systemctl", "dpkg", "modprobe"):
            (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" >>{tmp_path}/log\n')
        (tmp_path / "nvidia-smi").write_text(
            f"#!/bin/sh\necho looked >>{tmp_path}/log\n"
            f'[ "$(grep -c looked {tmp_path}/log)" -gt {works_after} ]\n'
        )
        for program in tmp_path.iterdir():
            program.chmod(0o755)
        done = subprocess.run(
            ["sh", "-eu"],
            input=driver.encode(),
            env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
            capture_output=True,
            check=False,
        )
        log = (tmp_path / "log").read_text()
        assert ("dpkg --configure -a" in log) is (works_after > 0)
        assert ("systemctl poweroff" in log) is (works_after == 99)
        assert done.returncode == (1 if works_after == 99 else 0)

    def test_all_parts_are_in_the_price_and_the_sizes_are_those_on_sale(self, shop: Shop) -> None:
        wares = shop.market.wares
        wares[2].cores, wares[2].ram_gib = 5, 24  # times a stock of 8
        (offer,) = shop.plain.offers(Want(gpu="H100", gpu_count=8, disk_gib=120))[-1:]
        assert offer.gpu_count == 8
        assert (offer.cores, offer.ram_gib) == (40, pytest.approx(192e9 / 2**30))
        parts = 8 * 2.25 + 40 * 0.003 + 192 * 0.002 + 150 * 0.00005
        assert offer.price_usd_h == pytest.approx(parts)

    def test_its_hosts_are_of_many_owners_and_state_no_reliability(self, shop: Shop) -> None:
        offers = shop.plain.offers(Want())
        assert {(offer.many_owners, offer.reliability) for offer in offers} == {(True, None)}
        assert all(misfit(offer, Want(min_reliability=0.5)) for offer in offers)

    def test_a_host_without_an_address_of_its_own_is_no_offer(self, shop: Shop) -> None:
        regions = {offer.region for offer in shop.plain.offers(Want(gpu="RTX 4090"))}
        assert "Porto, Portugal" not in regions
        assert "Austin, United States" in regions

    def test_the_disk_is_no_smaller_than_wanted(self, shop: Shop) -> None:
        assert all(misfit(offer, Want(disk_gib=466)) for offer in shop.plain.offers(Want())[:1])
        fits = [o for o in shop.plain.offers(Want(gpu="A100")) if not misfit(o, Want(disk_gib=900))]
        assert [str(offer.gpu) for offer in fits] == ["A100 PCIe"]

    def test_a_gpu_that_is_taken_meanwhile_is_no_offer(self, shop: Shop) -> None:
        shop.market.wares[0].stock = 0
        assert all(str(o.gpu) != "RTX 4090 PCIe" for o in shop.plain.offers(Want(gpu="RTX 4090")))

    def test_an_image_as_tensordock_names_it_may_be_chosen(self, shop: Shop) -> None:
        shop.plain.check("ubuntu2204")
        for image in ("ubuntu2004", "ubuntu1804", "windows10", "nvidia/cuda:12.8-base"):
            with pytest.raises(InvalidInput):
                shop.plain.check(image)

    @pytest.mark.parametrize("documented", [False, True])
    def test_an_unknown_refusal_rents_nothing(self, shop: Shop, documented: bool) -> None:
        """A size that is not on sale: a list, or an answer of the documented kind."""
        shop.fake.documented = documented
        offer = shop.order.offer
        with pytest.raises(CreateFailed, match="vcpu_count"):
            shop.create(offer=msgspec.structs.replace(offer, id=offer.id.replace("/8/", "/7/")))
        assert shop.market.rented == []

    @pytest.mark.rule(5)
    @pytest.mark.parametrize(
        "refusal",
        [
            (400, "Deployment timed out"),
            (408, "Deployment timed out"),
            (400, "The host did not answer within the time limit"),
            (409, "A deployment of this name already exists"),
            (400, "Something went wrong"),
            (400, [{"message": "the node failed"}]),
            (400, [{"code": "late", "message": "timed out", "path": ["node"]}]),
            (400, {"errors": [{"message": "it failed"}]}),
        ],
    )
    def test_a_refusal_in_unknown_words_promises_nothing(
        self, shop: Shop, refusal: tuple[int, Any]
    ) -> None:
        status, told = refusal
        shop.fake.create_error = (
            shop.fake.error(status, told) if isinstance(told, str) else Answer(status, told)
        )
        shop.arm("error that created", "create")
        with pytest.raises(CreateUncertain):
            shop.create()
        assert len(shop.market.rented) == 1

    @pytest.mark.parametrize("status", [429, 500, 503])
    def test_a_busy_market_that_says_so_in_a_200_is_asked_again(
        self, shop: Shop, status: int
    ) -> None:
        machine = shop.create()
        shop.fake.trouble = (status, "Rate limit exceeded")
        for ask in (
            shop.plain.list_own,
            lambda: shop.find(machine),
            lambda: shop.destroy(machine),
        ):
            shop.fake.faults.clear()
            shop.arm("error body", count=100)
            with pytest.raises(ProviderUnavailable):
                ask()
        shop.fake.faults.clear()
        for action in ("list", "find", "destroy"):
            shop.arm("error body", action, count=2)
        assert [live.id for live in shop.plain.list_own()] == [machine.id]
        shop.destroy(machine)
        assert shop.market.alive() == []

    def test_a_create_that_is_limited_in_a_200_is_sent_again(self, shop: Shop) -> None:
        """It is no quota of the account."""
        shop.fake.trouble = (429, "Rate limit exceeded")
        shop.arm("error body", "create", count=100)
        with pytest.raises(ProviderUnavailable):
            shop.create()
        assert shop.market.rented == []
        shop.fake.faults.clear()
        shop.arm("error body", "create", count=2)
        assert [shop.create().id] == [live.id for live in shop.market.alive()]

    @pytest.mark.rule(5)
    def test_a_new_machine_whose_name_was_cut_off_is_nobody_s_to_end(self, shop: Shop) -> None:
        """No run uses it (tests/control/rental/test_renting.py)."""
        shop.fake.named = lambda name: name[:32]
        machine = shop.create()
        assert shop.find(machine).label is None
        with pytest.raises(NotOurs):
            shop.destroy(machine)
        assert len(shop.market.alive()) == 1

    def test_a_machine_that_left_between_the_list_and_the_look_is_not_listed(
        self, shop: Shop
    ) -> None:
        machine = shop.create()
        shop.arm("not found", "find", count=9)
        assert isinstance(shop.find(machine), Machine)  # by the list
        shop.market.end(shop.market.alive()[0])
        assert isinstance(shop.find(machine), Absent)
        assert shop.plain.list_own() == []
