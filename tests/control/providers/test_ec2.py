"""AWS EC2: the contract, and this market's traps."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any
from xml.etree import ElementTree

import boto3
import msgspec
import pytest
from botocore.exceptions import ClientError

from tests.control.providers.market_contract import MarketContract, Shop, label, of_model
from tests.markets.ec2 import ADDRESS_USD_H, DISK_USD_GIB_MONTH, IMAGE_GIB, REGION
from tests.markets.market import Ware
from torpor.control.providers.ec2.provider import Ec2Provider
from torpor.control.providers.provider import Absent
from torpor.shared.errors import (
    CreateFailed,
    CreateUncertain,
    InvalidInput,
    NoCapacity,
    ProviderDenied,
    UnexpectedAnswer,
)
from torpor.shared.values import Machine, MachineId, Want

BID = "InstanceMarketOptions.SpotOptions.MaxPrice"
SPOT = Want(spot="only", disk_gib=20)


class TestEc2(MarketContract):
    row = "ec2"
    sells_spot = True
    states_on_demand = True
    names_waits = False

    @pytest.fixture
    def want(self) -> Want:
        return Want(gpu="T4", disk_gib=20)

    def with_an_odd_offer(self, body: Any) -> Any:
        """The first of several rows, in each list that offers are made of."""
        if isinstance(body, dict):
            listed = body.get("PriceList", [])
            return {**body, "PriceList": ["{}", *listed[1:]]} if len(listed) > 1 else body
        tree = ElementTree.fromstring(body)  # noqa: S314 - the fake's own
        for rows in tree.iter():
            name = rows.tag.rpartition("}")[2]
            lists = ("instanceTypeSet", "instanceTypeOfferingSet", "spotPriceHistorySet")
            if name in lists and len(rows) > 1:
                rows[0].clear()
        return ElementTree.tostring(tree, encoding="unicode")

    def foreign(self, shop: Shop) -> MachineId:
        """Of moto, which knows instances only by their create."""
        aws = shop.fake.admin()
        zones = {subnet["AvailabilityZone"]: subnet for subnet in aws.describe_subnets()["Subnets"]}
        made = aws.run_instances(
            ImageId=shop.fake.images[0],
            InstanceType="g4dn.xlarge",
            MinCount=1,
            MaxCount=1,
            ClientToken=label().rental,
            BlockDeviceMappings=[{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 20}}],
            NetworkInterfaces=[{"DeviceIndex": 0, "SubnetId": zones[f"{REGION}a"]["SubnetId"]}],
        )
        return MachineId(made["Instances"][0]["InstanceId"])

    def ask_for_everything(self, shop: Shop) -> None:
        super().ask_for_everything(shop)
        spot = shop.create(offer=of_model(shop.plain.offers(SPOT), "T4")[0])
        self._keep_the_disk(shop, spot)
        shop.destroy(spot)
        shop.destroy(spot)
        shop.fake.admin().delete_security_group(GroupId=shop.fake.group)
        home = shop.connect(ssh_from="203.0.113.7/32")
        home.create(shop.changed(label=label()))

    def test_the_policy_ends_no_machine_or_disk_without_a_label_and_rents_none(
        self, shop: Shop
    ) -> None:
        """Whoever has the key asks by himself."""
        mine = self.foreign(shop)
        thief = shop.fake.session(shop.fake.key).client(
            "ec2", region_name=REGION, endpoint_url=shop.fake.url
        )
        (disk,) = shop.fake.admin().describe_volumes()["Volumes"]
        group = shop.fake.group
        rule = {"IpProtocol": "tcp", "FromPort": 5432, "ToPort": 5432}
        anybody = [{**rule, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}]
        shop.connect(ssh_from="203.0.113.7/32")  # with the policy that this setting needs
        for verb, asked in (
            ("terminate_instances", {"InstanceIds": [mine]}),
            ("delete_volume", {"VolumeId": disk["VolumeId"]}),
            (
                "create_tags",
                {"Resources": [mine], "Tags": [{"Key": "torpor-rental", "Value": "a"}]},
            ),
            ("authorize_security_group_ingress", {"GroupId": group, "IpPermissions": anybody}),
            ("run_instances", {"MinCount": 1, "MaxCount": 1, "ImageId": shop.fake.images[0]}),
        ):
            with pytest.raises(ClientError, match="UnauthorizedOperation"):
                getattr(thief, verb)(**asked)
        shop.fake.policy.lacks.clear()

    @staticmethod
    def _keep_the_disk(shop: Shop, machine: Machine) -> None:
        kept = [{"DeviceName": "/dev/sda1", "Ebs": {"DeleteOnTermination": False}}]
        aws = shop.fake.admin()
        aws.modify_instance_attribute(InstanceId=machine.id, BlockDeviceMappings=kept)

    def test_a_label_makes_one_machine_though_no_listing_shows_it_yet(self, shop: Shop) -> None:
        shop.market.next_hidden_looks = 5
        first = shop.create()
        assert shop.plain.list_own() == []
        assert shop.create().id == first.id
        assert len(shop.market.rented) == 1

    def test_a_label_is_not_used_for_another_machine(self, shop: Shop) -> None:
        shop.market.next_hidden_looks = 5
        shop.create()
        with pytest.raises(CreateUncertain, match="IdempotentParameterMismatch"):
            shop.create(disk_gib=shop.order.disk_gib + 1, label=shop.order.label)
        assert len(shop.market.rented) == 1

    def test_only_the_state_terminated_is_a_proof(self, shop: Shop) -> None:
        shop.fake.ending_looks = 2
        machine = shop.create()
        shop.destroy(machine)
        assert shop.find(machine).state == shop.find(machine).state == "stopping"
        assert "terminated" in shop.find(machine).proof
        assert shop.plain.find(MachineId("i-0123456789abcdef0")) == Absent()

    def test_a_spot_machine_that_aws_takes_back_says_so(self, shop: Shop) -> None:
        machine = shop.create()
        shop.market.rented[0].stopped = True
        found = shop.find(machine)
        assert (found.state, found.endpoint) == ("stopping", None)
        assert "Spot instance termination" in found.note

    def test_spot_has_a_limit_only_where_the_user_set_one(self, shop: Shop) -> None:
        offers = shop.plain.offers(SPOT)
        assert {offer.id: round(offer.price_usd_h - _beside(20), 6) for offer in offers} == {
            "g4dn.xlarge/us-east-1b/spot": 0.21,
            "g5.xlarge/us-east-1a/spot": 0.41,
        }
        (spot,) = of_model(offers, "T4")
        with pytest.raises(NoCapacity, match="SpotMaxPriceTooLow"):
            shop.create(offer=spot, bid_usd_h=0.2)
        with pytest.raises(CreateFailed, match="disk and address"):
            shop.create(offer=spot, bid_usd_h=0.001)
        shop.create(offer=spot)
        shop.create(offer=spot, bid_usd_h=0.5)
        asked = [machine.request.get(BID) for machine in shop.market.rented]
        assert asked == [None, f"{0.5 - _beside(20):.6f}"]
        assert all(machine.spot for machine in shop.market.rented)

    def test_an_account_without_the_role_of_spot_machines_is_told_the_command(
        self, shop: Shop
    ) -> None:
        code = "AuthFailure.ServiceLinkedRoleCreationNotPermitted"
        shop.fake.words = {**shop.fake.words, "denied": (403, code, "No permission to create it.")}
        shop.arm("denied", "create")
        with pytest.raises(
            CreateFailed, match=r"create-service-linked-role .* spot\.amazonaws\.com"
        ):
            shop.create(offer=of_model(shop.plain.offers(SPOT), "T4")[0])

    def test_spot_costs_at_most_the_price_on_demand_and_the_users_limit(self, shop: Shop) -> None:
        """AWS changes the price while the machine runs."""

        def most(limit: float | None) -> float | None:
            want = msgspec.structs.replace(SPOT, max_price_usd_h=limit)
            return of_model(shop.plain.offers(want), "T4")[0].most_usd_h

        on_demand = pytest.approx(0.526 + _beside(20))
        assert [most(None), most(9.0), most(0.3)] == [on_demand, on_demand, 0.3]
        assert shop.plain.offers(Want(disk_gib=20))[0].most_usd_h is None
        shop.create(offer=of_model(shop.plain.offers(SPOT), "T4")[0], bid_usd_h=9.0)
        assert float(shop.asked()[BID]) == pytest.approx(0.526)

    def test_the_history_of_spot_prices_says_how_much_more_was_billed(self, shop: Shop) -> None:
        shop.fake.spot_factors = {"2026-11-22T01:00:00.000Z": 2.0, "2026-11-22T03:00:00.000Z": 0.5}
        begin = datetime(2026, 11, 22, tzinfo=timezone.utc).timestamp()
        of = "g4dn.xlarge/us-east-1b"

        def rise(hours: float) -> float:
            return shop.plain.rise_usd_h(f"{of}/spot", begin, begin + 3600 * hours)

        assert [rise(hours) for hours in (0.5, 2, 4)] == pytest.approx(
            [0.0, 0.21 * 0.5, 0.21 * (2 * 1 - 0.5) / 4]
        )
        assert shop.plain.rise_usd_h(of, begin, begin + 3600) == 0.0
        with pytest.raises(UnexpectedAnswer):
            shop.plain.rise_usd_h("g4dn.xlarge/us-east-1a/spot", begin, begin + 3600)

    def test_gpus_have_form_and_memory_and_unusable_ones_are_not_offered(self, shop: Shop) -> None:
        """AWS's image has no driver for a V100, and what has no NVIDIA GPU was not asked for."""
        shop.fake.all_types = True
        offers = shop.plain.offers(Want())
        found = {str(o.gpu): (o.gpu_count, o.gpu.vram_gib) for o in offers if o.gpu is not None}
        assert found == {"T4": (1, 16), "A10G": (1, 22888 / 1024), "H100 SXM": (8, 80)}
        named = shop.connect(types=["c5.large", "p3.2xlarge"])
        assert {(o.id.split("/")[0], o.gpu, o.cuda) for o in named.offers(Want())} == {
            ("c5.large", None, None)
        }

    def test_a_part_of_a_gpu_is_not_sold_as_a_whole_one(self, shop: Shop) -> None:
        """AWS has counted 1 and 0 GPUs of these types: an eighth of an L4 with 2.8 GiB."""
        place = f"{REGION}a"
        for name, usd_h in (("g6f.xlarge", 0.3), ("gr6f.4xlarge", 0.8), ("g6.xlarge", 0.9)):
            shop.market.wares.append(Ware("L4", 1, 24, usd_h, place, name=name))
        shop.fake.told_gpus = {"g6f.xlarge": {"count": "1"}, "gr6f.4xlarge": {"count": "1"}}
        found = of_model(shop.connect().offers(Want()), "L4")
        assert {offer.id.partition("/")[0] for offer in found} == {"g6.xlarge"}

    @pytest.mark.parametrize("name", ["NVIDIA", "H200"])
    def test_a_gpu_that_aws_names_after_its_maker_is_known_by_its_type(
        self, shop: Shop, name: str
    ) -> None:
        kind = "p5en.48xlarge"
        shop.market.wares.append(Ware("H200", 8, 141, 63.3, f"{REGION}a", name=kind))
        shop.fake.told_gpus = {kind: {"name": name}}
        offer = of_model(shop.connect().offers(Want(gpu="H200")), "H200")[0]
        assert (str(offer.gpu), offer.gpu_count) == ("H200 SXM", 8)
        assert offer.gpu is not None and offer.gpu.vram_gib == 141

    def test_the_disk_has_the_wanted_room_beside_the_image_and_ends_with_the_machine(
        self, shop: Shop
    ) -> None:
        shop.create(disk_gib=20.5)
        asked = shop.asked()
        disk = "BlockDeviceMapping.1.Ebs"
        assert asked[f"{disk}.VolumeSize"] == str(IMAGE_GIB + 21)
        assert asked[f"{disk}.DeleteOnTermination"] == "true"
        assert asked["ImageId"] == shop.fake.images[0]  # the newest

    def test_a_disk_that_outlived_its_machine_is_residue_and_ends_with_its_label(
        self, shop: Shop
    ) -> None:
        machine = shop.create()
        other = shop.create(label=label())
        for made in (machine, other):
            self._keep_the_disk(shop, made)
            shop.destroy(made)
        left = shop.plain.residue()
        assert {(disk.kind, disk.label) for disk in left} == {
            ("disk", machine.label),
            ("disk", other.label),
        }
        assert left[0].price_usd_h == pytest.approx(_beside(20) - ADDRESS_USD_H)
        shop.destroy(machine)
        assert [disk.label for disk in shop.plain.residue()] == [other.label]

    def test_a_login_of_another_account_is_refused_before_anything_is_asked(
        self, shop: Shop
    ) -> None:
        """Its listing would be empty, and everything of ours absent."""
        session = boto3.Session(shop.fake.key, shop.fake.secret)
        wrong = Ec2Provider(session, "210987654321", REGION, url=shop.fake.url)
        shop.fake.calls.clear()
        for ask in (wrong.check, wrong.list_own, wrong.residue, lambda: wrong.create(shop.order)):
            with pytest.raises(ProviderDenied, match="210987654321"):
                ask()
        assert len(shop.fake.calls) == 4

    def test_check_says_what_the_account_lacks(self, shop: Shop) -> None:
        assert any("8 vCPUs" in note for note in shop.connect().check().notes)
        aws, group = shop.fake.admin(), shop.fake.group
        (rules,) = aws.describe_security_groups(GroupIds=[group])["SecurityGroups"]
        aws.revoke_security_group_ingress(GroupId=group, IpPermissions=rules["IpPermissions"])
        shop.fake.open_port(443)
        with pytest.raises(ProviderDenied, match="authorize-security-group-ingress"):
            shop.connect().check()
        network = aws.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
        subnet = aws.create_subnet(VpcId=network, CidrBlock="10.9.1.0/24")["Subnet"]
        lonely = shop.connect(subnets=[subnet["SubnetId"]])
        with pytest.raises(ProviderDenied, match="create-security-group"):
            lonely.check()
        group = shop.fake.backend.create_security_group("torpor", "SSH", network).id
        anybody = [{"CidrIp": "0.0.0.0/0"}]
        shop.fake.backend.authorize_security_group_ingress(group, "-1", "-1", "-1", anybody)
        with pytest.raises(ProviderDenied, match="no route to the internet"):
            lonely.check()

    @pytest.mark.parametrize(
        "code", ["Unsupported", "InsufficientInstanceCapacity", "VcpuLimitExceeded"]
    )
    def test_a_zone_without_the_type_that_check_asks_for_denies_nothing(
        self, shop: Shop, code: str
    ) -> None:
        """AWS checks permissions first."""
        shop.fake.probe_refusal = code
        assert shop.connect().check().name

    def test_a_probe_that_is_refused_for_another_reason_is_denied(self, shop: Shop) -> None:
        shop.fake.probe_refusal = "UnauthorizedOperation"
        with pytest.raises(ProviderDenied, match="may not rent machines"):
            shop.connect().check()

    def test_the_first_rental_makes_the_security_group_for_whom_the_block_says(
        self, shop: Shop
    ) -> None:
        """And opens the ports; a look changes nothing, and says what a rental will change."""
        aws, group = shop.fake.admin(), shop.fake.group
        aws.delete_security_group(GroupId=group)
        with pytest.raises(ProviderDenied, match="create-security-group"):
            shop.connect().check()
        home, office = "203.0.113.7/32", "198.51.100.0/24"
        seen: list[tuple[int, str]] = []
        for host, ports, opens in (
            (home, (), "22"),
            (home, (), ""),
            (office, (), "22"),
            (office, (8000, 6006), "8000, 6006"),
        ):
            provider = shop.connect(ssh_from=host, ports=ports)
            notes = [note for note in provider.check().notes if "the first rental" in note]
            assert [f"opens port {opens} to {host}" in note for note in notes] == [True] * bool(
                opens
            )
            provider.offers(Want(gpu="T4"))
            assert self._opened(aws) == seen
            provider.create(shop.changed(label=label()))
            shop.market.rented.clear()
            seen = self._opened(aws)
        assert seen == [(22, office), (22, home), (6006, office), (8000, office)]
        assert shop.connect().check().name

    @staticmethod
    def _opened(aws: Any) -> list[tuple[int, str]]:
        """Ports that the group torpor opens, and to whom."""
        groups = aws.describe_security_groups(
            Filters=[{"Name": "group-name", "Values": ["torpor"]}]
        )["SecurityGroups"]
        return sorted(
            (rule["FromPort"], host["CidrIp"])
            for group in groups
            for rule in group["IpPermissions"]
            for host in rule["IpRanges"]
        )

    def test_a_private_machine_is_reached_at_its_own_address_and_pays_for_no_other(
        self, shop: Shop
    ) -> None:
        """Its subnet needs no internet gateway."""
        aws = shop.fake.admin()
        network = aws.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
        made = aws.create_subnet(
            VpcId=network, CidrBlock="10.9.1.0/24", AvailabilityZone=f"{REGION}a"
        )
        own = {"subnets": [made["Subnet"]["SubnetId"]], "ssh_from": "10.0.0.0/8"}
        with pytest.raises(ProviderDenied, match="no route to the internet"):
            shop.connect(**own).check()
        private = shop.connect(**own, private=True)
        assert private.check().name
        (offer,) = of_model(private.offers(Want(gpu="T4", disk_gib=20)), "T4")
        assert offer.price_usd_h == pytest.approx(0.526 + _beside(20) - ADDRESS_USD_H)
        machine = private.create(shop.changed(offer=offer))
        shop.market.clock.advance(3600)
        assert shop.market.spent_usd() == pytest.approx(offer.price_usd_h, rel=0.01)
        endpoint = private.find(machine.id).endpoint
        assert endpoint is not None and endpoint.host == shop.market.rented[0].address
        assert shop.find(machine).endpoint is None

    @pytest.mark.parametrize(
        "profile", ["reader", "arn:aws:iam::123456789012:instance-profile/team/reader"]
    )
    def test_a_machine_gets_the_instance_profile_of_the_block_alone(
        self, shop: Shop, profile: str
    ) -> None:
        shop.create()
        assert not any(key.startswith("Iam") for key in shop.asked())
        shop.market.rented.clear()
        of_profile = shop.connect(instance_profile=profile)
        with pytest.raises(CreateFailed, match="iamInstanceProfile"):
            of_profile.create(shop.changed(label=label()))
        shop.fake.profiles.add(profile)
        of_profile.create(shop.changed(label=label()))
        kind = "Arn" if ":" in profile else "Name"
        assert shop.asked()[f"IamInstanceProfile.{kind}"] == profile

    def test_a_security_group_of_the_user_is_not_changed(self, shop: Shop) -> None:
        mine = shop.fake.backend.create_security_group(
            "mine", "mine", shop.fake.backend.default_vpc.id
        ).id
        named = shop.connect(security_group=mine, ssh_from="203.0.113.7/32")
        with pytest.raises(ProviderDenied, match="authorize-security-group-ingress"):
            named.check()

    def test_an_image_must_be_one_that_can_become_a_machine(self, shop: Shop) -> None:
        mine = shop.fake.add_image("mine", "self")
        assert shop.plain.check(mine).name
        offers = shop.plain.offers(Want(gpu="T4", image=mine))
        assert {(offer.cuda, offer.architecture) for offer in offers} == {(None, "x86_64")}
        for refused in (
            "ami-0123456789abcdef0",
            shop.fake.add_image("windows", platform="windows"),
            shop.fake.add_image("instance store", root_device_type="instance-store"),
        ):
            with pytest.raises(InvalidInput):
                shop.plain.check(refused)


def _beside(disk_gib: float) -> float:
    """What disk and address of a machine cost an hour."""
    return (IMAGE_GIB + disk_gib) * DISK_USD_GIB_MONTH / 730 + ADDRESS_USD_H
