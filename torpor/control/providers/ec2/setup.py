"""What an AWS account must have before it can rent: an image, a network, and port 22 open."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from torpor.control.providers.ec2.client import AwsRefusal, Done, Ec2Client
from torpor.control.providers.ec2.prices import ADDRESS_USD_H
from torpor.shared.errors import InvalidInput, ProviderDenied

GROUP: Final = "torpor"
"""The security group that is used where the provider block names none."""
_GROUP_TAG: Final = "torpor-group"
"""A tag of the group that torpor makes. The policy in docs/guide/markets/policies lets torpor open
ports in no other."""

_DLAMI: Final = {
    "x86_64": "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 22.04) ????????",
    "arm64": "Deep Learning ARM64 Base OSS Nvidia Driver GPU AMI (Ubuntu 22.04) ????????",
}
"""AWS's own images with NVIDIA's driver, CUDA, Python 3.10 and sshd."""
DLAMI_CUDA: Final = (13, 0)  # the CUDA version that the driver in those of 2026 supports
_AMI: Final = re.compile(r"ami-[0-9a-f]{8,17}")
_SSH: Final = 22
_ARCHITECTURES: Final = {"x86_64": "x86_64", "arm64": "aarch64"}
_ITS_OWN: Final = {architecture: ami for ami, architecture in _ARCHITECTURES.items()}


class _Ebs(msgspec.Struct, rename="pascal"):
    volume_size: int = 0


class _Mapping(msgspec.Struct, rename="pascal"):
    device_name: str = ""
    ebs: _Ebs | None = None


class _Image(msgspec.Struct, rename="pascal"):
    image_id: str
    architecture: str
    creation_date: str
    state: str
    root_device_name: str = ""
    root_device_type: str = "ebs"
    platform: str = ""
    block_device_mappings: list[_Mapping] = []


class _Images(msgspec.Struct, rename="pascal"):
    images: list[_Image]
    next_token: str = ""


class _Subnet(msgspec.Struct, rename="pascal"):
    subnet_id: str
    vpc_id: str
    availability_zone: str


class _Subnets(msgspec.Struct, rename="pascal"):
    subnets: list[_Subnet]
    next_token: str = ""


class _Range(msgspec.Struct, rename={"cidr": "CidrIp"}):
    cidr: str


class _Permission(msgspec.Struct, rename="pascal"):
    ip_protocol: str
    from_port: int = 0
    to_port: int = 65535
    ip_ranges: list[_Range] = []
    prefix_list_ids: list[Any] = []


class _Group(msgspec.Struct, rename="pascal"):
    group_id: str
    vpc_id: str
    ip_permissions: list[_Permission] = []


class _NewGroup(msgspec.Struct, rename="pascal"):
    group_id: str


class _Groups(msgspec.Struct, rename="pascal"):
    security_groups: list[_Group]
    next_token: str = ""


class _Route(msgspec.Struct, rename="pascal"):
    gateway_id: str = ""
    destination_cidr_block: str = ""


class _Association(msgspec.Struct, rename="pascal"):
    main: bool = False
    subnet_id: str = ""


class _Table(msgspec.Struct, rename="pascal"):
    vpc_id: str
    routes: list[_Route] = []
    associations: list[_Association] = []


class _Tables(msgspec.Struct, rename="pascal"):
    route_tables: list[_Table]
    next_token: str = ""


class Image(msgspec.Struct, frozen=True):
    """An AMI (image of a machine). ``gib``: the size of its root disk."""

    id: str
    architecture: str  # as ``uname -m`` says it
    root_device: str
    gib: int


class Network(msgspec.Struct, frozen=True):
    """Where machines are placed: one subnet a zone, and the security group."""

    subnets: dict[str, str]
    group: str


class Ec2Setup:
    """Looks up what the provider block names, or AWS's defaults.

    It creates nothing without ``ssh_from``: the addresses, as a CIDR, for which it opens port 22 in
    the security group ``GROUP``, which it makes where the VPC has none. One that the block names is
    the user's, and is not changed. ``ports``: opened as port 22 is. ``private``: machines have no
    public address. ``instance_profile``: the name or ARN of the profile of machines.
    """

    def __init__(
        self,
        client: Ec2Client,
        image: str = "",
        subnets: Sequence[str] = (),
        group: str = "",
        ssh_from: str = "",
        ports: Sequence[int] = (),
        private: bool = False,
        instance_profile: str = "",
    ) -> None:
        self.private, self.instance_profile = private, instance_profile
        self._ports = (_SSH, *ports)
        self._client = client
        self._image, self._subnets, self._group = image, list(subnets), group
        self._ssh_from = "" if group else ssh_from

    @property
    def address_usd_h(self) -> float:
        return 0.0 if self.private else ADDRESS_USD_H

    def is_default(self, image: str) -> bool:
        return not (image or self._image)

    def image(self, image: str = "", architecture: str = "") -> Image | None:
        """The AMI ``image``, else the block's, else AWS's newest for ``architecture``.

        None where AWS has no such image for machines of ``architecture``. InvalidInput for one that
        does not exist or cannot become a machine of ours.
        """
        named = image or self._image
        if not named:
            return self._newest(architecture or "x86_64")
        if not _AMI.fullmatch(named):
            raise InvalidInput(
                f"{named!r} is not an AMI: EC2 rents virtual machines, so the image is like "
                "ami-0123456789abcdef0, or empty for AWS's Deep Learning Base AMI"
            )
        answer = self._client.ask(_Images, "describe_images", ImageIds=[named])
        if isinstance(answer, AwsRefusal):
            if answer.code.startswith("InvalidAMIID"):
                raise self._no_image(named)
            raise self._client.refused(answer, "describe images")
        if not answer.images:
            raise self._no_image(named)
        row = answer.images[0]
        if row.platform or row.root_device_type != "ebs" or row.state != "available":
            raise InvalidInput(
                f"image {named} is {row.state}, its platform is {row.platform or 'Linux'} and its "
                f"root device {row.root_device_type}: choose an available Linux image on EBS, with "
                "cloud-init and Python 3.10 or newer"
            )
        found = _image(row)
        return found if architecture in ("", found.architecture) else None

    def network(self) -> Network:
        """The network that exists; changes nothing. ProviderDenied says what is missing and how to
        make it. The group is empty where ``opened_network`` would make it."""
        subnets = self._found_subnets()
        return _network(subnets, self._found_group(subnets[0].vpc_id))

    def opened_network(self) -> Network:
        """The network, after making the group and opening the ports that ``ssh_from`` asks for."""
        subnets = self._found_subnets()
        group = self._found_group(subnets[0].vpc_id) or self._made_group(subnets[0].vpc_id)
        self._open(group)
        return _network(subnets, group)

    def check(self) -> list[str]:
        """Check the network as ``network`` does, and that SSH can reach a machine there. Returns
        what the first rental changes."""
        subnets = self._found_subnets()
        group = self._found_group(subnets[0].vpc_id)
        opened = [] if group is None else group.ip_permissions
        if group and not self._ssh_from and not any(_opens(rule, _SSH) for rule in opened):
            raise self._missing(
                f"security group {group.group_id} does not open port 22 to this host",
                f"aws ec2 authorize-security-group-ingress --group-id {group.group_id} "
                "--protocol tcp --port 22 --cidr THIS_HOST/32",
            )
        without = [] if self.private else self._without_internet(subnets)
        if without:
            raise self._missing(
                f"subnet {', '.join(without)} has no route to the internet",
                "a route of 0.0.0.0/0 to an internet gateway in its route table, or other subnets "
                "in the provider block",
            )
        if not (closed := self._closed(opened)):
            return []
        ports = ", ".join(map(str, closed))
        where = f"security group {GROUP}{'' if group else ', which it makes'}"
        return [f"the first rental opens port {ports} to {self._ssh_from} in {where}"]

    def _newest(self, architecture: str) -> Image | None:
        kind = _ITS_OWN.get(architecture, architecture)
        if kind not in _DLAMI:
            return None
        asked = {"name": _DLAMI[kind], "state": "available", "architecture": kind}
        pages = self._client.pages(
            _Images, "describe_images", Owners=["amazon"], Filters=_filters(asked)
        )
        rows = [row for page in pages for row in page.images]
        return _image(max(rows, key=lambda row: row.creation_date)) if rows else None

    def _found_subnets(self) -> list[_Subnet]:
        asked: dict[str, Any] = (
            {"SubnetIds": self._subnets}
            if self._subnets
            else {"Filters": _filters({"default-for-az": "true"})}
        )
        answer = self._client.ask(_Subnets, "describe_subnets", **asked)
        if isinstance(answer, AwsRefusal):
            if not answer.code.startswith("InvalidSubnet"):
                raise self._client.refused(answer, "describe subnets")
            raise self._missing(str(answer), "other subnets in the provider block")
        if not answer.subnets:
            raise self._missing(
                "it has no default VPC",
                "aws ec2 create-default-vpc, or subnets of your own in the provider block",
            )
        networks = {subnet.vpc_id for subnet in answer.subnets}
        if len(networks) > 1:
            raise self._missing(
                f"the subnets are in {len(networks)} VPCs, and a security group is in one",
                "subnets of one VPC in the provider block",
            )
        return answer.subnets

    def _found_group(self, vpc: str) -> _Group | None:
        """The security group; None where there is none, and ``ssh_from`` says that it is to be
        made."""
        asked: dict[str, Any] = (
            {"GroupIds": [self._group]}
            if self._group
            else {"Filters": _filters({"group-name": GROUP, "vpc-id": vpc})}
        )
        answer = self._client.ask(_Groups, "describe_security_groups", **asked)
        if isinstance(answer, AwsRefusal):
            if not answer.code.startswith("InvalidGroup"):
                raise self._client.refused(answer, "describe security groups")
            raise self._missing(str(answer), "another security group in the provider block")
        for group in answer.security_groups:
            if group.vpc_id == vpc:
                return group
        if self._ssh_from:
            return None
        raise self._missing(
            f"VPC {vpc} has no security group {self._group or GROUP}",
            f"aws ec2 create-security-group --group-name {GROUP} --description SSH --vpc-id {vpc}, "
            "then open port 22 in it; or let torpor do both: write in the provider block who may "
            "reach port 22",
        )

    def _made_group(self, vpc: str) -> _Group:
        asked = {"GroupName": GROUP, "Description": "SSH to machines of torpor", "VpcId": vpc}
        tags = tagged({"security-group": {_GROUP_TAG: GROUP}})
        answer = self._client.ask(_NewGroup, "create_security_group", **asked, **tags)
        if isinstance(answer, AwsRefusal):
            theirs = self._found_group(vpc) if answer.code == "InvalidGroup.Duplicate" else None
            if theirs is None:  # otherwise another run made it meanwhile
                raise self._client.refused(answer, f"create the security group {GROUP}")
            return theirs
        return _Group(answer.group_id, vpc)

    def _closed(self, opened: Sequence[_Permission]) -> list[int]:
        """The ports that are still to be opened for ``ssh_from``."""
        places = {self._ssh_from, "0.0.0.0/0"}
        return [
            port
            for port in (self._ports if self._ssh_from else ())
            if not any(
                _opens(rule, port) and places & {place.cidr for place in rule.ip_ranges}
                for rule in opened
            )
        ]

    def _open(self, group: _Group) -> None:
        for port in self._closed(group.ip_permissions):
            places = [{"CidrIp": self._ssh_from, "Description": "torpor"}]
            rule = {"IpProtocol": "tcp", "FromPort": port, "ToPort": port, "IpRanges": places}
            answer = self._client.ask(
                Done,
                "authorize_security_group_ingress",
                GroupId=group.group_id,
                IpPermissions=[rule],
            )
            if isinstance(answer, AwsRefusal) and answer.code != "InvalidPermission.Duplicate":
                raise self._client.refused(answer, f"open port {port} in {group.group_id}")

    def _without_internet(self, subnets: Sequence[_Subnet]) -> list[str]:
        asked = _filters({"vpc-id": subnets[0].vpc_id})
        pages = self._client.pages(_Tables, "describe_route_tables", Filters=asked)
        tables = [table for page in pages for table in page.route_tables]

        def table_of(subnet: _Subnet) -> _Table | None:
            own = (t for t in tables for a in t.associations if a.subnet_id == subnet.subnet_id)
            main = (t for t in tables for a in t.associations if a.main)
            return next(own, None) or next(main, None)

        return [s.subnet_id for s in subnets if not _reaches_internet(table_of(s))]

    def _missing(self, what: str, remedy: str) -> ProviderDenied:
        return ProviderDenied(
            f"AWS account {self._client.account} cannot rent in {self._client.region}: {what}. "
            f"What is needed: {remedy}"
        )

    def _no_image(self, named: str) -> InvalidInput:
        return InvalidInput(
            f"{self._client.region} has no image {named}: each region has AMIs of its own"
        )


def tagged(tags: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """The part of a request that tags what it makes, by kinds."""
    rows = {
        kind: [{"Key": k, "Value": v} for k, v in words.items()] for kind, words in tags.items()
    }
    named = [{"ResourceType": kind, "Tags": words} for kind, words in rows.items()]
    return {"TagSpecifications": named}


def _filters(asked: dict[str, str]) -> list[dict[str, Any]]:
    return [{"Name": name, "Values": [value]} for name, value in asked.items()]


def _network(subnets: Sequence[_Subnet], group: _Group | None) -> Network:
    by_zone = {subnet.availability_zone: subnet.subnet_id for subnet in reversed(subnets)}
    return Network(by_zone, "" if group is None else group.group_id)


def _image(row: _Image) -> Image:
    sizes = [m.ebs.volume_size for m in row.block_device_mappings
             if m.ebs is not None and m.device_name == row.root_device_name]  # fmt: skip
    architecture = _ARCHITECTURES.get(row.architecture, row.architecture)
    return Image(row.image_id, architecture, row.root_device_name, max(sizes, default=8))


def _opens(permission: _Permission, port: int) -> bool:
    covers = permission.ip_protocol == "-1" or (
        permission.ip_protocol == "tcp" and permission.from_port <= port <= permission.to_port
    )
    return covers and bool(permission.ip_ranges or permission.prefix_list_ids)


def _reaches_internet(table: _Table | None) -> bool:
    return table is not None and any(
        route.destination_cidr_block == "0.0.0.0/0" and route.gateway_id.startswith("igw-")
        for route in table.routes
    )
