"""RunPod: the contract, and this market's traps."""

from __future__ import annotations

import pytest

from tests.control.providers.container_contract import MarketOfHosts
from tests.control.providers.market_contract import Shop
from torpor.control.providers.container import Container, Volume
from torpor.control.providers.offers import misfit
from torpor.control.providers.provider import Absent, MountsVolumes
from torpor.control.rental.waiting import wait_until_reachable
from torpor.shared.errors import (
    CreateFailed,
    NoCapacity,
    ProviderDenied,
    ProviderUnavailable,
    QuotaReached,
    UnexpectedAnswer,
)
from torpor.shared.values import Machine, MachineId, Want


class TestRunPod(MarketOfHosts):
    row = "runpod"
    login = "reg_abc"

    def ask_for_login(self, shop: Shop) -> None:
        shop.fake.registry = self.login

    def open_ports(self, shop: Shop) -> set[int]:
        return {int(port.removesuffix("/tcp")) for port in shop.asked()["ports"]}

    price_slack = 0.02  # the pod's cost leaves the disk out

    @pytest.fixture
    def want(self) -> Want:
        return Want(gpu="RTX 4090", disk_gib=20)

    def test_both_clouds_and_each_data_centre_are_offers(self, shop: Shop) -> None:
        """The community's hosts are those of many owners."""
        offers = shop.plain.offers(Want(gpu="RTX 4090"))
        assert {(str(o.gpu), o.region) for o in offers if o.available} == {
            ("RTX 4090", "US-KS-2"),
            ("RTX 4090", "EU-RO-1"),
            ("H100 SXM", "EU-NL-1"),
            ("H100 PCIe", "CA-MTL-1"),
        }
        owners = {(offer.region, offer.many_owners) for offer in offers}
        assert {("US-KS-2", False), ("EU-RO-1", True)} <= owners

    def test_the_secure_cloud_alone_is_shown_where_that_is_asked_for(self, shop: Shop) -> None:
        found = shop.connect(data_centres_only=True).offers(Want(gpu="RTX 4090"))
        assert not any(offer.many_owners for offer in found)
        assert {offer.region for offer in found} >= {"US-KS-2", "EU-NL-1"}
        assert "EU-RO-1" not in {offer.region for offer in found}

    def test_a_pod_s_host_has_the_driver_as_far_as_its_cuda_says_so(self, shop: Shop) -> None:
        """The API has no drivers: the H100 PCIe states CUDA 12.4, which is driver 550."""
        for driver, fits in (((550, 54), True), ((555,), False)):
            want = Want(gpu="H100 PCIe", driver=driver)
            found = [offer for offer in shop.plain.offers(want) if not misfit(offer, want)]
            assert bool(found) is fits
        want = Want(gpu="RTX 4090", driver=(570,))
        shop.fake.market.wares[0].cuda = "12.7"  # since the offer was shown
        with pytest.raises(NoCapacity):
            shop.create(cuda=want.least_cuda)

    def test_a_network_volume_is_mounted_in_its_data_centre_and_left_alone(
        self, shop: Shop
    ) -> None:
        other = shop.another(container=Container(volumes=(Volume("vol1", "/data"),)))
        assert isinstance(other.plain, MountsVolumes)
        assert (other.plain.volumes, shop.plain.volumes) == (["/data"], [])
        offers = other.plain.offers(Want(gpu="RTX 4090"))
        assert {(offer.region, offer.many_owners) for offer in offers} == {("US-KS-2", False)}
        machine = other.create()
        assert shop.asked()["mounts"] == {"network": [{"volumeId": "vol1", "path": "/data"}]}
        other.destroy(machine)
        assert not any(
            method != "GET" for method, path in shop.fake.calls if "network-volumes" in path
        )

    def test_the_account_s_ssh_keys_stay_as_they_are(self, shop: Shop) -> None:
        """A PUT replaces all of them."""
        shop.plain.check()
        shop.create()
        assert ("PUT", "/v2/account/ssh-keys") not in shop.fake.calls

    def test_a_pod_on_any_page_is_known_found_and_listed(self, shop: Shop) -> None:
        shop.market.page = 2
        for _ in range(5):
            self.foreign(shop)
        machine = shop.create()
        assert shop.create().id == machine.id
        assert [live.id for live in shop.plain.list_own()] == [machine.id]
        shop.arm("not found", "find")
        assert isinstance(shop.find(machine), Machine)

    def test_a_list_without_pages_is_one_page(self, shop: Shop) -> None:
        """As before October 2026, when a cursor was unknown."""
        shop.fake.pages = False
        for _ in range(30):
            self.foreign(shop)
        assert [shop.create().id] == [live.id for live in shop.plain.list_own()]

    def test_a_page_that_is_missing_proves_no_absence(self, shop: Shop) -> None:
        shop.market.page = 2
        for _ in range(5):
            self.foreign(shop)
        shop.arm("unavailable", "list", count=100, skip=2)
        with pytest.raises(ProviderUnavailable):
            shop.plain.find(MachineId("pod9999999"))
        with pytest.raises(ProviderUnavailable):
            shop.create()
        assert len(shop.market.rented) == 5

    @pytest.mark.parametrize("cursor", [None, "MTAw"])
    def test_pages_without_an_end_are_no_list(self, shop: Shop, cursor: str | None) -> None:
        shop.fake.pagination = {"nextCursor": cursor, "hasNextPage": True}
        with pytest.raises(UnexpectedAnswer, match="without an end"):
            shop.plain.list_own()

    def test_null_is_neither_a_pod_nor_a_proof_that_it_is_gone(self, shop: Shop) -> None:
        """RunPod answers so while it ends a pod."""
        machine = shop.create()
        shop.fake.shows_null = True
        assert isinstance(shop.find(machine), Machine)
        shop.market.end(shop.market.rented[0])
        found = shop.find(machine)
        assert isinstance(found, Absent)
        assert not found.proof

    def test_a_pod_without_a_public_address_is_given_up(self, shop: Shop) -> None:
        """It runs, and is billed, and nobody can ever log in."""
        machine = shop.create()
        shop.fake.addresses = False
        now = 0.0

        def sleep(seconds: float) -> None:
            nonlocal now
            now += seconds

        with pytest.raises(CreateFailed, match="without an address"):
            wait_until_reachable(
                shop.plain, machine.id, timeout_s=900, sleep=sleep, clock=lambda: now
            )
        assert 90 <= now <= 105
        looks = [path for _, path in shop.fake.calls if path.endswith(machine.id)]
        assert len(looks) <= 13

    def test_a_pod_whose_container_ends_again_and_again_is_given_up(self, shop: Shop) -> None:
        """It stays RUNNING with an address, and is billed."""
        machine = shop.create()
        now = 0.0

        def sleep(seconds: float) -> None:
            nonlocal now
            now += seconds

        shop.fake.uptime = lambda: int(now % 25)
        with pytest.raises(CreateFailed, match="its container ends, and is started, again and"):
            wait_until_reachable(
                shop.plain,
                machine.id,
                timeout_s=900,
                sleep=sleep,
                clock=lambda: now,
                greets=lambda _: "refused",
            )
        assert now <= 240
        shop.fake.uptime = lambda: 3600  # a machine that is used again after some restarts
        found = shop.plain.find(machine.id)
        assert isinstance(found, Machine)
        assert found.endpoint is not None

    @pytest.mark.parametrize(
        ("words", "error"),
        [
            ("your account cannot access the requested pool", QuotaReached),
            ("access denied", ProviderDenied),
        ],
    )
    def test_a_403_is_about_one_pool_or_about_the_key(
        self, shop: Shop, words: str, error: type[Exception]
    ) -> None:
        shop.fake.words = {**shop.fake.words, "quota": (403, "Forbidden", words)}
        shop.arm("quota", "create")
        with pytest.raises(error):
            shop.create()

    def test_no_destroy_follows_a_long_wait(self, shop: Shop) -> None:
        """A warrant holds for a minute after the last look at the disk."""
        machine = shop.create()
        shop.arm("too many", "destroy", retry_after_s=1724)
        with pytest.raises(ProviderUnavailable):
            shop.destroy(machine)
        assert max(shop.slept, default=0.0) < 60
        assert len(shop.market.alive()) == 1
