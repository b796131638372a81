"""Verda: the contract, and this market's traps."""

from __future__ import annotations

import msgspec
import pytest

from tests.control.providers.market_contract import MarketContract, Shop, label
from tests.markets.verda import IMAGE, OLD_IMAGE
from torpor.control.providers.labels import label_in, label_name
from torpor.control.providers.provider import Absent
from torpor.control.rental.ending import residue_of
from torpor.shared.errors import (
    CreateFailed,
    CreateUncertain,
    NoCapacity,
    ProviderDenied,
    ProviderUnavailable,
    TorporError,
    UnexpectedAnswer,
)
from torpor.shared.values import Machine, Want


class TestVerda(MarketContract):
    row = "verda"
    images = False
    sells_spot = True
    states_on_demand = True

    @pytest.fixture
    def want(self) -> Want:
        return Want(gpu="H100", disk_gib=20)

    @pytest.mark.parametrize("newer", [False, True])
    def test_ids_and_prices_are_read_as_words_and_as_json(self, shop: Shop, newer: bool) -> None:
        shop.fake.newer = newer
        machine = shop.create()
        live = shop.find(machine)
        assert (live.state, live.label) == ("running", shop.order.label)
        assert live.price_usd_h == pytest.approx(2.29 + 50 * 0.2 / 730)
        assert shop.plain.list_own() == [live]

    def test_one_login_serves_all_requests_until_its_token_is_revoked(self, shop: Shop) -> None:
        shop.create()
        assert shop.fake.logins == 1
        shop.fake.token = "another"
        shop.create(label=label())
        assert shop.fake.logins == 2
        assert len(shop.market.rented) == 2

    def test_the_disk_is_in_the_price_and_no_smaller_than_verda_s_least(self, shop: Shop) -> None:
        shop.create()
        assert shop.asked()["os_volume"] == {"name": label_name(shop.order.label), "size": 50}
        (small, *_), (large, *_) = (shop.plain.offers(Want(disk_gib=gib)) for gib in (20, 500))
        assert large.price_usd_h - small.price_usd_h == pytest.approx((537 - 50) * 0.2 / 730)

    def test_an_older_gpu_has_an_older_image_and_a_cpu_none_with_cuda(self, shop: Shop) -> None:
        on_sale = {offer.id.split("/")[0]: offer for offer in shop.plain.offers(Want())}
        for kind, image in (
            ("1H100.80S.32V", IMAGE),
            ("1A6000.10V", OLD_IMAGE),
            ("CPU.4V.16G", "ubuntu-24.04"),
        ):
            shop.create(offer=on_sale[kind])
            assert shop.asked()["image"] == image
        with pytest.raises(CreateFailed, match=r"no Ubuntu with CUDA 12\.8 for 1A6000"):
            shop.create(offer=on_sale["1A6000.10V"], cuda=(12, 8))
        assert len(shop.market.rented) == 3

    def test_each_gpu_of_several_has_its_part_of_the_memory(self, shop: Shop) -> None:
        gpus = [o.gpu for o in shop.plain.offers(Want(gpu="H100", gpu_count=8)) if o.gpu_count == 8]
        assert [(gpu.form, gpu.vram_gib) for gpu in gpus] == [("SXM", 80)]

    def test_a_spot_machine_that_is_taken_is_gone_with_its_disk(self, shop: Shop) -> None:
        (spot, *_) = shop.plain.offers(Want(gpu="H100", spot="only"))
        machine = shop.create(offer=spot)
        assert shop.asked()["os_volume"]["on_spot_discontinue"] == "delete_permanently"
        shop.market.take(shop.market.rented[0])
        assert shop.find(machine).proof
        assert shop.plain.list_own() == []
        assert [left.kind for left in shop.plain.residue()] == ["script", "key"]
        assert residue_of(shop.plain, machine.label) == []  # so its rental can be closed

    def test_what_a_taken_machine_left_goes_a_day_later(self, shop: Shop) -> None:
        (spot, *_) = shop.plain.offers(Want(gpu="H100", spot="only"))
        taken, running = shop.create(offer=spot), shop.create(label=label())
        shop.market.take(shop.market.rented[0])
        kept = shop.fake.kept["scripts"]
        theirs = label_name(msgspec.structs.replace(taken.label, owner="another"))
        kept.append({"id": "s-1", "name": theirs})
        for row in kept:
            row["created_at"] = "2020-01-01T00:00:00.000Z"
        shop.destroy(shop.create(label=label()))
        assert [row["name"] for row in kept] == [label_name(running.label), theirs]
        left = [(left.kind, left.label) for left in shop.plain.residue()]
        assert left == [("script", label_in(theirs)), ("key", taken.label)]

    def test_nothing_of_a_rental_stays_in_the_account(self, shop: Shop) -> None:
        machine = shop.create()
        other = shop.create(label=label())
        assert [len(rows) for rows in shop.fake.kept.values()] == [2, 2]
        shop.destroy(machine)
        names = [row["name"] for rows in shop.fake.kept.values() for row in rows]
        assert names == [label_name(other.label)] * 2
        assert (shop.plain.residue(), shop.fake.detached, shop.fake.trash) == ([], {}, [])

    def test_a_disk_that_outlived_its_instance_is_residue_until_it_is_deleted(
        self, shop: Shop
    ) -> None:
        machine = shop.create()
        (rented,) = shop.market.rented
        shop.market.end(rented)
        shop.fake.detached["d15c-left-behind"] = rented
        left = {residue.kind: residue for residue in shop.plain.residue()}
        assert left.keys() == {"disk", "script", "key"}
        assert left["disk"].price_usd_h == pytest.approx(50 * 0.2 / 730)
        assert residue_of(shop.plain, machine.label) == ["d15c-left-behind"]
        shop.destroy(machine)
        assert shop.plain.residue() == []

    def test_a_refused_create_leaves_no_key_and_no_script(self, shop: Shop) -> None:
        shop.arm("no capacity", "create")
        with pytest.raises(NoCapacity):
            shop.create()
        assert shop.fake.kept == {"sshkeys": [], "scripts": []}

    def test_a_503_of_a_gateway_is_no_word_on_the_capacity(self, shop: Shop) -> None:
        shop.arm("error after", "create", status=503)
        with pytest.raises(CreateUncertain):
            shop.create()
        assert len(shop.market.rented) == 1

    def test_a_503_of_verda_is_no_refusal_unless_it_names_the_capacity(self, shop: Shop) -> None:
        words = (503, "service_unavailable", "Service is not available")
        shop.fake.words = {**shop.fake.words, "no capacity": words}
        shop.arm("no capacity", "create")
        with pytest.raises(CreateUncertain):
            shop.create()

    def test_two_machines_of_one_label_end_one_by_one(self, shop: Shop) -> None:
        first = shop.create()
        shop.arm("not found", "list")
        second = shop.create(label=shop.order.label)
        assert second.id != first.id
        shop.destroy(first)
        shop.destroy(first)
        assert [m.id for m in shop.plain.list_own()] == [second.id]
        assert [len(rows) for rows in shop.fake.kept.values()] == [1, 1]
        shop.destroy(second)
        assert shop.fake.kept == {"sshkeys": [], "scripts": []}
        assert (shop.fake.detached, shop.fake.trash) == ({}, [])

    def test_the_disk_of_an_adopted_machine_goes_to_the_trash(self, shop: Shop) -> None:
        mine = shop.find(Machine(self.foreign(shop), shop.plain.identity, None, "running", None))
        shop.plain.mark(mine, adopted := label())
        shop.destroy(msgspec.structs.replace(mine, label=adopted))
        assert (len(shop.fake.trash), shop.fake.detached) == (1, {})

    def test_scripts_of_others_are_neither_read_for_ours_nor_repeated(self, shop: Shop) -> None:
        theirs = {"id": "s-1", "name": None, "script": "#!/bin/sh\nexport KEY=hunter2"}
        shop.fake.kept["scripts"].append(theirs)
        shop.destroy(shop.create())
        assert shop.fake.kept["scripts"] == [theirs]
        theirs["id"] = 1
        with pytest.raises(UnexpectedAnswer) as told:
            shop.plain.residue()
        assert "hunter2" not in str(told.value)

    def test_a_login_that_is_not_found_is_no_absence(self, shop: Shop) -> None:
        machine = shop.create()
        words = (401, "unauthorized_request", "Client not found")
        shop.fake.words = {**shop.fake.words, "wrong key": words}
        shop.fake.key = "has-changed"
        with pytest.raises(ProviderDenied):
            shop.find(machine)

    def test_a_login_is_tried_as_often_as_its_request(self, shop: Shop) -> None:
        provider = shop.connect()
        shop.arm("unavailable", "account", count=100)
        with pytest.raises(ProviderUnavailable):
            provider.list_own()
        assert len(shop.slept) == 3

    @pytest.mark.parametrize("told", ["", "0.0000", "on request"])
    def test_what_names_no_price_is_not_offered(self, shop: Shop, told: str) -> None:
        machine = shop.create()
        shop.fake.price = told
        assert shop.plain.offers(Want(spot="allowed")) == []
        assert shop.find(machine).state == "running"

    def test_a_destroy_that_ends_after_the_instance_leaves_no_key(self, shop: Shop) -> None:
        """Nobody comes back for it: the next look proves that the instance is gone."""
        machine = shop.create()
        shop.arm("error after", "destroy", count=100)
        with pytest.raises(TorporError):
            shop.destroy(machine)
        assert shop.find(machine).proof
        assert shop.fake.kept == {"sshkeys": [], "scripts": []}

    @pytest.mark.parametrize("in_207", [False, True])
    def test_what_is_provisioned_is_told_to_end_later(self, shop: Shop, in_207: bool) -> None:
        shop.fake.refuses_in_207 = in_207
        shop.market.next_starting_looks = 4
        machine = shop.create()
        with pytest.raises(ProviderUnavailable, match=r"not delete instance .* yet"):
            shop.destroy(machine)
        for _ in range(3):
            shop.find(machine)
        shop.destroy(machine)
        assert shop.find(machine).proof
        shop.destroy(machine)

    @pytest.mark.parametrize(
        ("status", "state"),
        [
            ("validating", "starting"),
            ("unknown", "starting"),
            ("installation_failed", "stopped"),
            ("no_capacity", "stopped"),
            ("hibernating", "stopped"),
            ("deleting", "stopping"),
        ],
    )
    def test_every_status_has_a_state(self, shop: Shop, status: str, state: str) -> None:
        shop.fake.status = status
        live = shop.find(shop.create())
        assert isinstance(live, Machine)
        assert (live.state, live.endpoint) == (state, None)

    def test_an_unknown_id_is_no_proof(self, shop: Shop) -> None:
        assert shop.plain.find("de000000-0000-4000-8000-000000000099") == Absent()

    def test_the_balance_counts_in_dollars_alone(self, shop: Shop) -> None:
        assert shop.plain.check().balance_usd == 100
        shop.fake.currency = "eur"
        assert shop.plain.check().balance_usd is None

    def test_a_type_that_is_not_on_sale_is_no_rental(self, shop: Shop) -> None:
        offer = msgspec.structs.replace(shop.order.offer, id="1X.1V/FIN-01/demand")
        with pytest.raises(CreateFailed):
            shop.create(offer=offer)
