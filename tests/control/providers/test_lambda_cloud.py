"""Lambda: the contract, and this market's traps."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.control.providers.market_contract import MarketContract, Shop, label
from torpor.control.providers.provider import Absent
from torpor.shared.values import MachineId, Want


class TestLambda(MarketContract):
    row = "lambda"
    images = False

    @pytest.fixture
    def want(self) -> Want:
        return Want(gpu="A10", disk_gib=20)

    def test_the_login_key_is_registered_once(self, shop: Shop) -> None:
        shop.create()
        shop.create(label=label())
        keys = [key["public_key"] for key in shop.fake.ssh_keys.values()]
        assert keys == [shop.order.public_key]

    def test_a_login_key_that_the_account_has_under_another_name_is_used(self, shop: Shop) -> None:
        kind, material = shop.order.public_key.split()[:2]
        other = {"id": "1", "name": "other", "public_key": f"{kind} AAAA{material[4:-8]} me@home"}
        same = {"id": "2", "name": "laptop", "public_key": f"{kind} {material} me@laptop\n"}
        shop.fake.ssh_keys = {"1": other, "2": same}
        shop.create()
        assert shop.asked()["ssh_key_names"] == ["laptop"]
        assert len(shop.fake.ssh_keys) == 2

    def test_requests_and_launches_are_as_far_apart_as_lambda_demands(self, shop: Shop) -> None:
        now, asked = 0.0, []

        def sleep(seconds: float) -> None:
            nonlocal now
            now += seconds

        def step() -> bool:
            asked.append((now, shop.fake.calls[-1][1].endswith("/launch")))
            return True

        shop.fake.step = step
        provider = shop.connect(sleep=sleep, clock=lambda: now)
        for _ in range(3):
            provider.create(shop.changed(label=label()))
        times = asked[::2]  # the fake steps twice a request
        launches = [at for at, is_launch in times if is_launch]
        assert len(launches) == 3
        assert all(late - soon >= 1 for (soon, _), (late, _) in pairwise(times))
        assert all(late - soon >= 12 for soon, late in pairwise(launches))
        assert provider.abilities.poll_s >= 1

    def test_a_launch_that_waits_holds_up_nothing_else(self, shop: Shop) -> None:
        now, naps, looks = 0.0, [], 0

        def sleep(seconds: float) -> None:
            nonlocal now, looks
            naps.append(seconds)
            if seconds > 2 and not looks:  # the second launch: another thread looks meanwhile
                looks += 1
                provider.list_own()
            now += seconds

        provider = shop.connect(sleep=sleep, clock=lambda: now)
        for _ in range(2):
            provider.create(shop.changed(label=label()))
        assert looks == 1
        assert len([nap for nap in naps if nap > 2]) == 1

    def test_only_the_status_terminated_is_a_proof(self, shop: Shop) -> None:
        shop.fake.ending_looks = 2
        machine = shop.create()
        shop.destroy(machine)
        assert shop.find(machine).state == "stopping"
        assert shop.find(machine).proof
        assert shop.plain.find(MachineId("0" * 32)) == Absent()

    def test_form_factors_are_told_apart(self, shop: Shop) -> None:
        found = {(str(offer.gpu), offer.region) for offer in shop.plain.offers(Want())}
        assert {("H100 PCIe", "us-west-3"), ("H100 SXM", "us-south-2")} <= found
