"""AWS EC2: the contract, and this market's traps."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

import boto3
import msgspec
import pytest

from tests.control.providers.market_contract import MarketContract, label, of_model
from tests.markets.ec2 import (
    ADDRESS_USD_H,
    DISK_USD_GIB_MONTH,
    IMAGE_GIB,
    REGION,
    FakeEc2,
    ec2_wares,
)
from tests.markets.faults import Fault
from tests.markets.market import Market
from tests.markets.server import FakeMarket
from torpor.control.providers.ec2.provider import Ec2Provider
from torpor.control.providers.seam import Absent, Order, Provider
from torpor.control.safety import never_handed_over
from torpor.shared.errors import (
    CreateFailed,
    CreateUncertain,
    InvalidInput,
    NoCapacity,
    ProviderDenied,
    ProviderUnavailable,
    UnexpectedAnswer,
)
from torpor.shared.values import Machine, MachineId, Want

_SECRET = "fake-secret-key"


class TestEc2(MarketContract):
    body = "vm"

    @pytest.fixture
    def want(self) -> Want:
        return Want(gpu="T4", disk_gib=20)

    @pytest.fixture
    def fake(self) -> Iterator[FakeMarket]:
        fake = self.new_fake()
        yield fake
        fake.close()
        assert fake.violations == []

    def new_fake(self) -> FakeEc2:
        return FakeEc2(Market(wares=ec2_wares()))

    def connect(
        self, fake: FakeMarket, key: str = "", timeout_s: float = 30.0, **options: Any
    ) -> Ec2Provider:
        assert isinstance(fake, FakeEc2)
        self.slept = []
        session = boto3.Session(key or fake.key, _SECRET)
        return Ec2Provider(
            session,
            fake.account,
            REGION,
            url=fake.url,
            ssh_port=self.ssh_port,
            timeout_s=max(timeout_s, 1.0),  # moto takes its time
            sleep=self.slept.append,
            **options,
        )

    def foreign(self, fake: FakeMarket) -> MachineId:
        assert isinstance(fake, FakeEc2)
        made = _boto(fake).run_instances(
            ImageId=fake.images[0],
            InstanceType="g4dn.xlarge",
            MinCount=1,
            MaxCount=1,
            ClientToken=label().rental,
            BlockDeviceMappings=[{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 20}}],
            NetworkInterfaces=[{"DeviceIndex": 0, "SubnetId": _subnet(fake)}],
        )
        return MachineId(made["Instances"][0]["InstanceId"])

    def test_a_busy_market_is_asked_again(
        self, plain: Provider, fake: FakeMarket, order: Order
    ) -> None:
        """AWS names no time to wait."""
        fake.faults.arm(Fault("too many", count=2))
        machine = plain.create(order)
        fake.faults.arm(Fault("unavailable", count=2))
        assert isinstance(plain.find(machine.id), Machine)
        assert len(self.slept) == 4
        fake.faults.arm(Fault("too many", "create", count=100))
        with pytest.raises(ProviderUnavailable):
            plain.create(msgspec.structs.replace(order, label=label()))
        assert len(fake.market.rented) == 1

    def test_a_label_makes_one_machine_though_no_listing_shows_it_yet(
        self, plain: Provider, fake: FakeMarket, order: Order
    ) -> None:
        fake.market.next_hidden_looks = 5
        first = plain.create(order)
        assert plain.list_own() == []
        assert plain.create(order).id == first.id
        assert len(fake.market.rented) == 1

    def test_a_label_is_not_used_for_another_machine(
        self, plain: Provider, fake: FakeMarket, order: Order
    ) -> None:
        fake.market.next_hidden_looks = 5
        plain.create(order)
        with pytest.raises(CreateUncertain, match="IdempotentParameterMismatch"):
            plain.create(msgspec.structs.replace(order, disk_gib=order.disk_gib + 1))
        assert len(fake.market.rented) == 1

    def test_only_the_state_terminated_is_a_proof(
        self, plain: Provider, fake: FakeMarket, order: Order
    ) -> None:
        assert isinstance(fake, FakeEc2)
        fake.ending_looks = 2
        machine = plain.create(order)
        plain.destroy(machine, never_handed_over(machine, order.label))
        ending = plain.find(machine.id)
        assert isinstance(ending, Machine)
        assert ending.state == "stopping"
        plain.find(machine.id)
        ended = plain.find(machine.id)
        assert isinstance(ended, Absent)
        assert "terminated" in ended.proof
        assert plain.find(MachineId("i-0123456789abcdef0")) == Absent()

    def test_a_spot_machine_that_aws_takes_back_says_so(
        self, plain: Provider, fake: FakeMarket, order: Order
    ) -> None:
        machine = plain.create(order)
        fake.market.rented[0].stopped = True
        found = plain.find(machine.id)
        assert isinstance(found, Machine)
        assert (found.state, found.endpoint) == ("stopping", None)
        assert "Spot instance termination" in found.note

    def test_spot_has_a_limit_only_where_the_user_set_one(
        self, plain: Provider, fake: FakeMarket, order: Order
    ) -> None:
        want = Want(spot="only", disk_gib=20)
        offers = plain.offers(want)
        assert {offer.id: round(offer.price_usd_h - _beside(20), 6) for offer in offers} == {
            "g4dn.xlarge/us-east-1b/spot": 0.21,
            "g5.xlarge/us-east-1a/spot": 0.41,
        }
        spot = msgspec.structs.replace(order, offer=of_model(offers, "T4")[0])
        cheap = msgspec.structs.replace(spot, bid_usd_h=0.2)
        with pytest.raises(NoCapacity, match="SpotMaxPriceTooLow"):
            plain.create(cheap)
        with pytest.raises(CreateFailed, match="disk and address"):
            plain.create(msgspec.structs.replace(spot, bid_usd_h=0.001))
        plain.create(spot)
        plain.create(msgspec.structs.replace(spot, label=label(), bid_usd_h=0.5))
        bid = "InstanceMarketOptions.SpotOptions.MaxPrice"
        asked = [machine.request.get(bid) for machine in fake.market.rented]
        assert asked == [None, f"{0.5 - _beside(20):.6f}"]
        assert all(machine.spot for machine in fake.market.rented)

    def test_spot_costs_at_most_the_price_on_demand_and_the_users_limit(
        self, plain: Provider, fake: FakeMarket, order: Order
    ) -> None:
        """AWS changes the price while the machine runs."""

        def most(limit: float | None) -> float | None:
            want = Want(spot="only", disk_gib=20, max_price_usd_h=limit)
            return of_model(plain.offers(want), "T4")[0].most_usd_h

        on_demand = pytest.approx(0.526 + _beside(20))
        assert [most(None), most(9.0), most(0.3)] == [on_demand, on_demand, 0.3]
        assert plain.offers(Want(disk_gib=20))[0].most_usd_h is None
        offer = of_model(plain.offers(Want(spot="only", disk_gib=20)), "T4")[0]
        plain.create(msgspec.structs.replace(order, offer=offer, bid_usd_h=9.0))
        (machine,) = fake.market.rented
        asked = machine.request["InstanceMarketOptions.SpotOptions.MaxPrice"]
        assert float(asked) == pytest.approx(0.526)

    def test_the_history_of_spot_prices_says_how_much_more_was_billed(
        self, plain: Ec2Provider, fake: FakeMarket
    ) -> None:
        assert isinstance(fake, FakeEc2)
        fake.spot_factors = {"2026-11-22T01:00:00.000Z": 2.0, "2026-11-22T03:00:00.000Z": 0.5}
        begin = datetime(2026, 11, 22, tzinfo=timezone.utc).timestamp()
        of = "g4dn.xlarge/us-east-1b"

        def rise(hours: float) -> float:
            return plain.rise_usd_h(f"{of}/spot", begin, begin + 3600 * hours)

        assert [rise(hours) for hours in (0.5, 2, 4)] == pytest.approx(
            [0.0, 0.21 * 0.5, 0.21 * (2 * 1 - 0.5) / 4]
        )
        assert plain.rise_usd_h(of, begin, begin + 3600) == 0.0
        with pytest.raises(UnexpectedAnswer):
            plain.rise_usd_h("g4dn.xlarge/us-east-1a/spot", begin, begin + 3600)

    def test_gpus_have_form_and_memory_and_unusable_ones_are_not_offered(
        self, plain: Provider, fake: FakeMarket
    ) -> None:
        """AWS's image has no driver for a V100, and what has no NVIDIA GPU was not asked for."""
        offers = plain.offers(Want())
        found = {str(o.gpu): (o.gpu_count, o.gpu.vram_gib) for o in offers if o.gpu is not None}
        assert found == {"T4": (1, 16), "A10G": (1, 22888 / 1024), "H100 SXM": (8, 80)}
        named = self.connect(fake, types=["c5.large", "p3.2xlarge"])
        assert {(o.id.split("/")[0], o.gpu, o.cuda) for o in named.offers(Want())} == {
            ("c5.large", None, None)
        }

    def test_the_disk_has_the_wanted_room_beside_the_image_and_ends_with_the_machine(
        self, plain: Provider, fake: FakeMarket, order: Order
    ) -> None:
        assert isinstance(fake, FakeEc2)
        plain.create(msgspec.structs.replace(order, disk_gib=20.5))
        asked = fake.market.rented[0].request
        disk = "BlockDeviceMapping.1.Ebs"
        assert asked[f"{disk}.VolumeSize"] == str(IMAGE_GIB + 21)
        assert asked[f"{disk}.DeleteOnTermination"] == "true"
        assert asked["ImageId"] == fake.images[0]  # the newest

    def test_a_disk_that_outlived_its_machine_is_residue_and_ends_with_its_label(
        self, plain: Provider, fake: FakeMarket, order: Order
    ) -> None:
        assert isinstance(fake, FakeEc2)
        machine = plain.create(order)
        other = plain.create(msgspec.structs.replace(order, label=label()))
        aws = _boto(fake)
        for one in (machine, other):
            kept = [{"DeviceName": "/dev/sda1", "Ebs": {"DeleteOnTermination": False}}]
            aws.modify_instance_attribute(InstanceId=one.id, BlockDeviceMappings=kept)
            assert one.label is not None
            plain.destroy(one, never_handed_over(one, one.label))
        left = plain.residue()
        assert {(one.kind, one.label) for one in left} == {
            ("disk", machine.label),
            ("disk", other.label),
        }
        assert left[0].price_usd_h == pytest.approx(_beside(20) - ADDRESS_USD_H)
        plain.destroy(machine, never_handed_over(machine, order.label))
        assert [one.label for one in plain.residue()] == [other.label]

    def test_a_login_of_another_account_is_refused_before_anything_is_asked(
        self, fake: FakeMarket, order: Order
    ) -> None:
        """Its listing would be empty, and everything of ours absent."""
        wrong = Ec2Provider(boto3.Session(fake.key, _SECRET), "210987654321", REGION, url=fake.url)
        fake.calls.clear()
        for ask in (wrong.check, wrong.list_own, wrong.residue, lambda: wrong.create(order)):
            with pytest.raises(ProviderDenied, match="210987654321"):
                ask()
        assert len(fake.calls) == 4

    def test_check_says_what_the_account_lacks(self, fake: FakeMarket) -> None:
        assert isinstance(fake, FakeEc2)
        notes = self.connect(fake).check().notes
        assert any("8 vCPUs" in note for note in notes)
        rules = _boto(fake).describe_security_groups(GroupIds=[fake.group])["SecurityGroups"][0]
        _boto(fake).revoke_security_group_ingress(
            GroupId=fake.group, IpPermissions=rules["IpPermissions"]
        )
        fake.open_port(443)
        with pytest.raises(ProviderDenied, match="authorize-security-group-ingress"):
            self.connect(fake).check()
        network = _boto(fake).create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
        subnet = _boto(fake).create_subnet(VpcId=network, CidrBlock="10.9.1.0/24")["Subnet"]
        lonely = self.connect(fake, subnets=[subnet["SubnetId"]])
        with pytest.raises(ProviderDenied, match="create-security-group"):
            lonely.check()
        group = fake.backend.create_security_group("torpor", "SSH", network).id
        anybody = [{"CidrIp": "0.0.0.0/0"}]
        fake.backend.authorize_security_group_ingress(group, "-1", "-1", "-1", anybody)
        with pytest.raises(ProviderDenied, match="no route to the internet"):
            lonely.check()

    def test_an_image_must_be_one_that_can_become_a_machine(
        self, plain: Provider, fake: FakeMarket
    ) -> None:
        assert isinstance(fake, FakeEc2)
        mine = fake.add_image("mine", "self")
        assert plain.check(mine).name
        offers = plain.offers(Want(gpu="T4", image=mine))
        assert {(offer.cuda, offer.architecture) for offer in offers} == {(None, "x86_64")}
        for refused in (
            "ami-0123456789abcdef0",
            fake.add_image("windows", platform="windows"),
            fake.add_image("instance store", root_device_type="instance-store"),
        ):
            with pytest.raises(InvalidInput):
                plain.check(refused)


def _beside(disk_gib: float) -> float:
    """What disk and address of a machine cost an hour."""
    return (IMAGE_GIB + disk_gib) * DISK_USD_GIB_MONTH / 730 + ADDRESS_USD_H


def _boto(fake: FakeEc2) -> Any:
    session = boto3.Session(fake.key, _SECRET)
    return session.client("ec2", region_name=REGION, endpoint_url=fake.url)


def _subnet(fake: FakeEc2, zone: str = f"{REGION}a") -> str:
    found = _boto(fake).describe_subnets()["Subnets"]
    return str(next(s["SubnetId"] for s in found if s["AvailabilityZone"] == zone))
