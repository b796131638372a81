"""A fake of AWS EC2: moto behind a layer that adds what it lacks.

moto keeps the instances, disks, networks and images, and knows AWS's own list of instance types.
The layer adds ClientToken, prices, stock, spot limits, late listings, refusals and lost answers.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
import secrets
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone
from functools import cache, partial
from typing import Any, ClassVar, Final, TypeAlias
from urllib.parse import parse_qsl, urlencode
from xml.etree import ElementTree

import boto3
import botocore.loaders
import botocore.session
import httpx

from tests.markets.ec2_model import unknown_elements
from tests.markets.market import Market, Rented, Ware
from tests.markets.policies import Need, Right, iam_rights
from tests.markets.server import Answer, FakeMarket, Request
from torpor.control.providers.ec2.provider import Ec2Provider

REGION: Final = "us-east-1"
IMAGE_NAME: Final = "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 22.04) 202611"
IMAGE_GIB: Final = 15  # of every image at moto
DISK_USD_GIB_MONTH: Final = 0.08
ADDRESS_USD_H: Final = 0.005
_SPACE: Final = "http://ec2.amazonaws.com/doc/2016-11-15"
_CREDENTIAL: Final = re.compile(r"AWS4-HMAC-SHA256 Credential=([^/]+)/\d{8}/([\w-]+)/([\w-]+)/")
_ADMIN: Final = "AKADMIN"  # the access key of the account's owner, who may do everything
_RESOURCES: Final = {
    "ImageId": "image", "NetworkInterface.1.SubnetId": "subnet",
    "NetworkInterface.1.SecurityGroupId.1": "security-group", "InstanceId.1": "instance",
    "VolumeId": "volume", "ResourceId.1": "instance", "GroupId": "security-group", "VpcId": "vpc",
}  # fmt: skip
"""The kinds of what a request names."""
_MADE: Final = {
    "RunInstances": ("instance", "network-interface", "volume"),
    "CreateSecurityGroup": ("security-group",),
}
_MOST_USER_DATA: Final = 16 << 10
_PRODUCTS_A_PAGE: Final = 2
_Form: TypeAlias = tuple[tuple[str, str], ...]
_TYPES: Final[dict[tuple[_Form, frozenset[str] | None], str]] = {}


def ec2_wares() -> list[Ware]:
    """``name`` is the instance type, ``region`` the zone."""
    t4 = ("T4", 1, 16, 0.526)
    wares = [
        Ware(*t4, f"{REGION}a", name="g4dn.xlarge"),
        Ware(*t4, f"{REGION}b", name="g4dn.xlarge", spot_usd_h=0.21),
        Ware("A10G", 1, 24, 1.006, f"{REGION}a", name="g5.xlarge", spot_usd_h=0.41),
        Ware("H100", 8, 80, 55.04, f"{REGION}b", name="p5.48xlarge"),
        Ware("V100", 1, 16, 3.06, f"{REGION}a", name="p3.2xlarge"),
        Ware("", 0, 0, 0.085, f"{REGION}a", name="c5.large"),
    ]
    return [replace(ware, disk_usd_gib_month=DISK_USD_GIB_MONTH) for ware in wares]


class FakeEc2(FakeMarket):
    """Its key is the id of the access key, ``secret`` the other half of the login.
    ``ending_looks`` answers call a machine shutting down after its end. ``violations``: elements of
    answers that AWS's own model does not have. ``told_gpus``: what AWS says of the GPU of an
    instance type, where that differs from moto's list. ``all_types``: DescribeInstanceTypes names
    all that AWS has, not only what is sold here. ``probe_refusal``: the code of the answer to a
    request that only checks permissions."""

    ending_looks: int = 0
    probe_refusal: str = ""
    all_types: bool = False
    wares = staticmethod(ec2_wares)
    rights = partial(iam_rights, "ec2.json")
    body = "vm"
    given_port = True
    rents_by_hand = False  # its listing comes from moto, which knows instances by their create
    routes: ClassVar = {
        "RunInstances dry": ("account", "_probe"),
        "RunInstances": ("create", "_run"),
        "DescribeInstances one": ("find", "_describe"),
        "DescribeInstances": ("list", "_describe"),
        "TerminateInstances": ("destroy", "_terminate"),
        "DescribeInstanceTypes": ("offers", "_types"),
        "DescribeSpotPriceHistory": ("offers", "_spot_prices"),
        "GetProducts": ("offers", "_products"),
        "GetServiceQuota": ("account", "_quota"),
        "DescribeImages|DescribeInstanceTypeOfferings|DescribeSubnets": ("offers", "_forwarded"),
        ".*": ("account", "_forwarded"),
    }
    words: ClassVar = {
        "no capacity": (500, "InsufficientInstanceCapacity", "We currently do not have sufficient "
                        "capacity in the Availability Zone you requested."),
        "quota": (400, "VcpuLimitExceeded", "You have requested more vCPU capacity than your "
                  "limit."),
        "denied": (403, "UnauthorizedOperation", "You are not authorized to perform this "
                   "operation."),
        "no money": (400, "Blocked", "Your account is currently blocked. Contact AWS Support."),
        "wrong key": (401, "AuthFailure", "AWS was not able to validate the access credentials"),
        "error body": (503, "Unavailable", "The server is overloaded"),
        "failed": (500, "InternalError", "An internal error has occurred"),
        "too many": (503, "RequestLimitExceeded", "Request limit exceeded."),
    }  # fmt: skip

    @staticmethod
    def error(status: int, code: str, message: str) -> Answer:
        inner = f"<Errors><Error><Code>{code}</Code><Message>{message}</Message></Error></Errors>"
        return Answer(status, f"<Response>{inner}<RequestID>r</RequestID></Response>", "text/xml")

    def __init__(self, market: Market | None = None) -> None:
        self.account = str(10**11 + secrets.randbelow(9 * 10**11))
        self.secret = secrets.token_hex(20)
        self.violations: list[str] = []
        self.told_gpus: dict[str, dict[str, str]] = {}
        self.quota_vcpus = 8.0
        self.profiles: set[str] = set()  # names and ARNs of instance profiles
        self.spot_factors: dict[str, float] = {}  # later changes of all spot prices
        self._moto = threading.RLock()  # moto is not thread-safe
        self._tokens: dict[tuple[str, str], tuple[dict[str, str], str, str]] = {}
        self._ending: dict[str, int] = {}
        self._listed: set[str] = set()
        with self._moto:
            self._furnish()
        super().__init__(market)

    def close(self) -> None:
        super().close()
        with self._moto:
            self.backend.reservations.clear()

    @property
    def backend(self) -> Any:
        """moto's EC2 in this account."""
        os.environ["MOTO_EC2_LOAD_DEFAULT_AMIS"] = "false"  # 1,300 images, 1.4 s
        from moto.ec2.models import ec2_backends

        return ec2_backends[self.account][REGION]

    def _furnish(self) -> None:
        """What an account with a default VPC has, and what torpor asks its user to add."""
        backend = self.backend
        network = backend.default_vpc.id
        gateway = backend.create_internet_gateway()
        backend.attach_internet_gateway(gateway.id, network)
        table = backend.describe_route_tables(filters={"vpc-id": network})[0]
        backend.create_route(table.id, "0.0.0.0/0", gateway_id=gateway.id)
        self.group = backend.create_security_group("torpor", "SSH", network).id
        self.open_port(22)
        self.images = [
            self.add_image(
                f"{IMAGE_NAME}{day}", creation_date=datetime(2026, 11, day, tzinfo=timezone.utc)
            )
            for day in (15, 10)
        ]

    def open_port(self, port: int) -> None:
        anybody = [{"CidrIp": "0.0.0.0/0"}]
        self.backend.authorize_security_group_ingress(
            self.group, "tcp", str(port), str(port), anybody
        )

    def add_image(self, name: str, owner: str = "amazon", **changes: Any) -> str:
        image = self.backend.register_image(name)
        known = {"owner_alias": owner, "architecture": "x86_64", "root_device_type": "ebs"}
        for field, value in {**known, **changes}.items():
            setattr(image, field, value)
        return str(image.id)

    # -- FakeMarket

    def answer(self, request: Request, authorization: str) -> Answer | None:
        found = _CREDENTIAL.match(authorization)
        key, region, service = found.groups() if found else ("", "", "")
        request.query = {"authorization": authorization, "service": service, "region": region}
        request.query["key"] = key
        return super().answer(request, f"Bearer {self.key if key == _ADMIN else key}")

    def admin(self) -> Any:
        """A client of EC2 for the account's owner."""
        made = self.session(_ADMIN)
        return made.client("ec2", region_name=REGION, endpoint_url=self.url)

    def session(self, key: str) -> boto3.Session:
        made = botocore.session.Session()
        made.register_component("data_loader", _loader())
        return boto3.Session(key, self.secret, botocore_session=made)

    def may_adopt(self) -> None:
        self.grant(iam_rights("ec2-adopt.json"))

    def needs(self, request: Request) -> Iterator[Need]:
        """https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonec2.html"""
        operation, form = _operation(request), _form(request)
        service = request.query["service"]
        if request.query["key"] == _ADMIN or service == "sts":  # for which nobody needs a right
            return
        if operation.startswith(("Describe", "Get")):
            yield Need(f"{service}:{operation}", "*")
            return
        for kind, number in self._named(form):
            owner = "" if kind == "image" else self.account
            tags = {f"aws:ResourceTag/{k}": v for k, v in self._tags_of(kind, number).items()}
            asked = _changed_tags(form)
            facts = tags | {f"aws:RequestTag/{k}": v for k, v in asked.items()}
            if asked:
                facts["aws:TagKeys"] = [*asked]
            yield Need(f"ec2:{operation}", _arn(owner, f"{kind}/{number}"), facts)
        made = _MADE.get(operation, ())
        if "InstanceMarketOptions.MarketType" in form:
            made += ("spot-instances-request",)
        for kind in made:
            tags = {f"aws:RequestTag/{k}": v for k, v in _tags(form, kind).items()}
            yield Need(f"ec2:{operation}", _arn(self.account, f"{kind}/*"), tags)
            if tags:
                facts = {**tags, "ec2:CreateAction": operation}
                yield Need("ec2:CreateTags", _arn(self.account, f"{kind}/*"), facts)
        for name, value in form.items():
            if name.startswith("IamInstanceProfile."):
                yield Need("iam:PassRole", value)

    def _named(self, form: dict[str, str]) -> Iterator[tuple[str, str]]:
        for name, kind in _RESOURCES.items():
            if name in form:
                yield kind, form[name]

    def _tags_of(self, kind: str, number: str) -> dict[str, str]:
        backend = self.backend
        with self._moto:
            things = {
                "instance": backend.get_instance_by_id,
                "volume": backend.volumes.get,
                "security-group": lambda number: backend.get_security_group_from_id(number),
            }
            found = things[kind](number) if kind in things else None
            return {tag["key"]: tag["value"] for tag in found.get_tags()} if found else {}

    def opened(self, key: str, *, timeout: httpx.Timeout, **options: Any) -> Ec2Provider:
        """The page of EC2 names further rights for some settings of the block."""
        if options.get("ssh_from"):
            self.grant(iam_rights("ec2-ssh-from.json"))
        if profile := options.get("instance_profile"):
            passes = Need("iam:PassRole", profile)
            self.grant([Right(str(passes), passes.__eq__)])
        return Ec2Provider(
            self.session(key),
            self.account,
            REGION,
            url=self.url,
            timeout_s=max(timeout.read or 0.0, 1.0),  # moto takes its time
            **options,
        )

    def asked(self, request: Request) -> str:
        operation, form = _operation(request), _form(request)
        if operation == "RunInstances" and form.get("DryRun") == "true":
            return "RunInstances dry"
        one = operation == "DescribeInstances" and "InstanceId.1" in form
        return f"{operation} one" if one else operation

    def denied(self, request: Request) -> Answer:
        if request.query["service"] == "ec2":
            return super().denied(request)
        body = {"__type": "AccessDeniedException", "Message": self.words["denied"][2]}
        return Answer(400, body, "application/x-amz-json-1.1")

    def handle(self, request: Request) -> Answer:
        answer = super().handle(request)
        if answer.status == 200 and request.query["service"] == "ec2":
            self.violations += unknown_elements(_operation(request), str(answer.body))
        return answer

    def gave_up(self, status: int) -> Answer:
        return self.error(
            status, "RequestTimeout", "Your socket connection was not read from in time"
        )

    def _instead(self, fault: Any, request: Request) -> Answer | None:
        if fault.kind == "too many":
            return self.error(*self.words["too many"])
        return super()._instead(fault, request)

    def forget(self) -> None:
        super().forget()
        with self._moto:
            self.backend.reservations.clear()

    # -- operations

    def _probe(self, request: Request) -> Answer:
        if self.probe_refusal:
            words = "Your requested instance type (g4dn.xlarge) is not supported in your zone"
            return self.error(400, self.probe_refusal, words)
        return self._forwarded(request)

    def _run(self, request: Request) -> Answer:
        form = _form(request)
        if refused := self.refusal(request):
            return refused
        if faulty := self._faulty_launch(form):
            return self.error(400, *faulty)
        kind = form["InstanceType"]
        zone = self._zone(form["NetworkInterface.1.SubnetId"])
        token = form.pop("ClientToken")
        with self._moto:
            if known := self._tokens.get((zone, token)):
                return self._again(known, form)
            spot = "InstanceMarketOptions.MarketType" in form
            ware = next((w for w in self.market.wares if (w.name, w.region) == (kind, zone)), None)
            if ware is None:
                return self.error(400, "Unsupported", f"{kind} is not supported in {zone}.")
            bid = form.get("InstanceMarketOptions.SpotOptions.MaxPrice")
            if ware.stock <= 0 or (spot and ware.spot_usd_h is None):
                return self.error(*self.words["no capacity"])
            if spot and bid is not None and float(bid) < (ware.spot_usd_h or 0):
                return self.error(400, "SpotMaxPriceTooLow", "Your Spot request price is too low.")
            # moto looks for the profile in its own IAM.
            plain = {key: form[key] for key in form if not key.startswith("IamInstanceProfile.")}
            answer = self._forwarded(request, plain)
            number = re.search(r"<instanceId>(i-[0-9a-f]+)</instanceId>", str(answer.body))
            if answer.status != 200 or number is None:
                return answer
            # moto tags no disks.
            tags = _tags(form, "volume")
            for volume in self.backend.describe_volumes():
                if volume.attachment and volume.attachment.instance.id == number[1]:
                    volume.add_tags(tags)
            self._tokens[zone, token] = (form, number[1], str(answer.body))
            self._rent(ware, form, number[1], spot)
        return self.failed() if request.has("error that created") else answer

    def _rent(self, ware: Ware, form: dict[str, str], number: str, spot: bool) -> None:
        script = base64.b64decode(form.get("UserData", "")).decode()
        machine = self.market.rent(
            ware,
            _tags(form, "instance").get("Name", ""),
            {**form, "UserData": script},
            id_of=lambda _: number,
            script=script,
            spot=spot,
            disk_gib=float(form["BlockDeviceMapping.1.Ebs.VolumeSize"]),
        )
        if form.get("NetworkInterface.1.AssociatePublicIpAddress") != "false":
            machine.usd_h += ADDRESS_USD_H

    def _again(self, known: tuple[dict[str, str], str, str], form: dict[str, str]) -> Answer:
        asked, number, answer = known
        if asked != form:
            return self.error(
                400,
                "IdempotentParameterMismatch",
                "Arguments on this idempotent request are inconsistent with arguments used in "
                "previous request(s).",
            )
        machine = self._machine(number)
        if machine is None or not machine.alive:
            return self.error(
                400,
                "IdempotentInstanceTerminated",
                "The client token you have provided is associated with a terminated resource.",
            )
        return Answer(200, answer, "text/xml")

    def _faulty_launch(self, form: dict[str, str]) -> tuple[str, str] | None:
        """moto takes almost everything."""
        image = form.get("ImageId", "")
        if image not in self.backend.amis:
            return "InvalidAMIID.NotFound", f"The image id '[{image}]' does not exist"
        if not 1 <= len(form.get("ClientToken", "")) <= 64:
            return "InvalidParameterValue", "a client token has 1 to 64 characters"
        if len(base64.b64decode(form.get("UserData", ""))) > _MOST_USER_DATA:
            return "InvalidParameterValue", "User data is limited to 16384 bytes"
        if "NetworkInterface.1.SubnetId" not in form or "SubnetId" in form:
            return "InvalidParameterCombination", "a network interface names the subnet"
        if int(form.get("BlockDeviceMapping.1.Ebs.VolumeSize", "0")) < IMAGE_GIB:
            return "InvalidBlockDeviceMapping", f"Volume is smaller than snapshot: {IMAGE_GIB}GiB"
        profile = {form[key] for key in form if key.startswith("IamInstanceProfile.")}
        if not profile <= self.profiles:
            return "InvalidParameterValue", f"Value {profile} for iamInstanceProfile is invalid"
        for name, value in form.items():
            if re.fullmatch(r"TagSpecification\.\d+\.Tag\.\d+\.Value", name) and len(value) > 256:
                return "InvalidParameterValue", "a tag's value has at most 256 characters"
        return None

    def _describe(self, request: Request) -> Answer:
        form = _form(request)
        if named := form.get("InstanceId.1"):
            machine = self._machine(named)
            if request.has("not found") or (machine is not None and self.market.hidden(machine)):
                return self._not_found(named)
        else:
            form.setdefault("MaxResults", "1000")
            form["MaxResults"] = str(min(int(form["MaxResults"]), self.market.page))
            if "NextToken" not in form:
                self._listed = {machine.id for machine in self.market.visible()}
        answer = self._forwarded(request, form)
        if answer.status != 200:
            return answer
        tree = ElementTree.fromstring(str(answer.body))  # noqa: S314 - moto's own
        for group in tree.iter(f"{{{_SPACE}}}instancesSet"):
            for item in list(group):
                machine = self._machine(_text(item, "instanceId"))
                lost = request.has("not found") or (
                    machine is not None and machine.alive and machine.id not in self._listed
                )
                if lost and not named:
                    group.remove(item)
                elif machine is not None:
                    self._show(item, machine)
        return Answer(200, _written(tree), "text/xml")

    def _show(self, item: ElementTree.Element, machine: Rented) -> None:
        state = "running"
        if not machine.alive:
            left = self._ending.get(machine.id, 0)
            self._ending[machine.id] = max(0, left - 1)
            state = "shutting-down" if left else "terminated"
        elif machine.stopped:  # a spot machine that AWS takes back
            state = "shutting-down"
            _set(item, "stateReason/code", "Server.SpotInstanceTermination")
            _set(item, "stateReason/message", "Spot instance termination")
        elif self.market.starting(machine):
            state = "pending"
        _set(item, "instanceState/name", state)
        address = item.find(f"{{{_SPACE}}}ipAddress")
        if address is not None and state != "running":
            item.remove(address)
        elif address is not None:
            address.text = machine.address
        else:
            _set(item, "privateIpAddress", machine.address)

    def _not_found(self, number: str) -> Answer:
        told = f"The instance ID '{number}' does not exist"
        return self.error(400, "InvalidInstanceID.NotFound", told)

    def _terminate(self, request: Request) -> Answer:
        form = _form(request)
        named = form["InstanceId.1"]
        machine = self._machine(named)
        if request.has("not found") or (machine is not None and machine.hidden_looks > 0):
            return self._not_found(named)
        if request.has("lives"):
            row = (
                f"<instanceId>{named}</instanceId>"
                "<currentState><code>32</code><name>shutting-down</name></currentState>"
                "<previousState><code>16</code><name>running</name></previousState>"
            )
            return _xml("TerminateInstances", f"<instancesSet><item>{row}</item></instancesSet>")
        answer = self._forwarded(request, form)
        if answer.status == 200 and machine is not None:
            self._ending.setdefault(named, self.ending_looks)
            self.market.end(machine)
        return answer

    def _spot_prices(self, request: Request) -> Answer:
        """Of each the price that holds and an older, higher one, as AWS lists them."""
        form = _form(request)
        if form.get("ProductDescription.1") != "Linux/UNIX" or "StartTime" not in form:
            return self.error(400, "InvalidParameterValue", "ask for Linux/UNIX since a time")
        types = {value for name, value in form.items() if name.startswith("InstanceType.")}
        rows = [
            f"<item><instanceType>{ware.name}</instanceType><availabilityZone>{ware.region}"
            f"</availabilityZone><productDescription>Linux/UNIX</productDescription>"
            f"<spotPrice>{usd:.6f}</spotPrice><timestamp>{time}</timestamp></item>"
            for ware in self.market.wares
            if ware.spot_usd_h is not None and ware.name in types
            for usd, time in (
                *((ware.spot_usd_h * factor, time) for time, factor in self.spot_factors.items()),
                (ware.spot_usd_h, "2026-11-21T10:00:00.000Z"),
                (ware.spot_usd_h * 2, "2026-11-20T10:00:00.000Z"),
            )
        ]
        inner = f"<spotPriceHistorySet>{''.join(rows)}</spotPriceHistorySet><nextToken/>"
        return _xml("DescribeSpotPriceHistory", inner)

    def _products(self, request: Request) -> Answer:
        wares = {ware.name: ware for ware in self.market.wares}
        listed = [_product("Storage", DISK_USD_GIB_MONTH, "GB-Mo", volumeApiName="gp3")]
        for ware in wares.values():
            attributes = {
                "instanceType": ware.name,
                "instanceFamily": "GPU instance" if ware.gpu else "Compute optimized",
                "operatingSystem": "Linux",
                "tenancy": "Shared",
                "preInstalledSw": "NA",
                "capacitystatus": "Used",
                "locationType": "AWS Region",
            }
            listed.append(_product("Compute Instance", ware.usd_h, "Hrs", **attributes))
            # A reserved block of capacity is listed beside it, for nothing an hour.
            listed.append(_product("Compute Instance", 0.0, "Hrs", **attributes))
            windows = {**attributes, "operatingSystem": "Windows"}
            listed.append(_product("Compute Instance", ware.usd_h * 2, "Hrs", **windows))
        asked = {field["Field"]: field["Value"] for field in request.body["Filters"]}
        fitting = [
            product
            for product in listed
            if all(
                product["product"].get(name, product["product"]["attributes"].get(name)) == value
                for name, value in asked.items()
            )
        ]
        first = int(request.body.get("NextToken", 0))
        answer: dict[str, Any] = {
            "FormatVersion": "aws_v1",
            "PriceList": [json.dumps(p) for p in fitting[first : first + _PRODUCTS_A_PAGE]],
        }
        if first + _PRODUCTS_A_PAGE < len(fitting):
            answer["NextToken"] = str(first + _PRODUCTS_A_PAGE)
        return Answer(200, answer, "application/x-amz-json-1.1")

    def _types(self, request: Request) -> Answer:
        """moto takes seconds to write them, and they never change."""
        asked = tuple(sorted(_form(request).items()))
        sold = None if self.all_types else frozenset(ware.name for ware in self.market.wares)
        if (asked, None) not in _TYPES:
            _TYPES[asked, None] = str(self._forwarded(request).body)
        if (asked, sold) not in _TYPES:
            tree = ElementTree.fromstring(_TYPES[asked, None])  # noqa: S314 - moto's own
            for group in tree.iter(f"{{{_SPACE}}}instanceTypeSet"):
                for item in [item for item in group if _text(item, "instanceType") not in sold]:
                    group.remove(item)
            _TYPES[asked, sold] = _written(tree)
        if not self.told_gpus:
            return Answer(200, _TYPES[asked, sold], "text/xml")
        tree = ElementTree.fromstring(_TYPES[asked, sold])  # noqa: S314 - moto's own
        for item in tree.iter(f"{{{_SPACE}}}item"):
            for name, text in self.told_gpus.get(_text(item, "instanceType"), {}).items():
                _set(item, f"gpuInfo/gpus/item/{name}", text)
        return Answer(200, _written(tree), "text/xml")

    def _quota(self, request: Request) -> Answer:
        code = request.body["QuotaCode"]
        quota = {"QuotaCode": code, "QuotaName": f"GPUs of {code}", "Value": self.quota_vcpus}
        return Answer(200, {"Quota": quota}, "application/x-amz-json-1.1")

    # -- below

    def _forwarded(self, request: Request, form: dict[str, str] | None = None) -> Answer:
        form = _form(request) if form is None else form
        service, region = request.query["service"], request.query["region"]
        with self._moto:
            answered = _moto().post(
                "/",
                data=urlencode(form),
                base_url=f"http://{service}.{region}.amazonaws.com",
                headers={
                    "Authorization": request.query["authorization"],
                    "Content-Type": "application/x-www-form-urlencoded; charset=utf-8",
                    "x-moto-account-id": self.account,
                },
            )
        return Answer(answered.status_code, answered.get_data(as_text=True), "text/xml")

    def _machine(self, number: str) -> Rented | None:
        return next((m for m in self.market.rented if m.id == number), None)

    def _zone(self, subnet: str) -> str:
        with self._moto:
            return str(self.backend.get_subnet(subnet).availability_zone)


@cache
def _loader() -> botocore.loaders.Loader:
    """botocore's description of EC2 takes 0.1 s to read: once, not for each session."""
    return botocore.loaders.create_loader()


@cache
def _moto() -> Any:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.test import Client

    return Client(DomainDispatcherApplication(create_backend_app))


def _operation(request: Request) -> str:
    service = request.query["service"]
    if service == "pricing":
        return "GetProducts"
    return "GetServiceQuota" if service == "servicequotas" else _form(request).get("Action", "")


def _written(tree: ElementTree.Element) -> str:
    ElementTree.register_namespace("", _SPACE)
    return ElementTree.tostring(tree, encoding="unicode")


def _form(request: Request) -> dict[str, str]:
    text = request.body if isinstance(request.body, str) else ""
    return dict(parse_qsl(text, keep_blank_values=True))


def _arn(owner: str, resource: str) -> str:
    return f"arn:aws:ec2:{REGION}:{owner}:{resource}"


def _changed_tags(form: dict[str, str]) -> dict[str, str]:
    """Those of a request that changes the tags of what is there."""
    names = [name for name in form if re.fullmatch(r"Tag\.\d+\.Key", name)]
    return {form[name]: form.get(name.replace("Key", "Value"), "") for name in names}


def _tags(form: dict[str, str], resource: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for number in itertools.count(1):
        where = f"TagSpecification.{number}"
        if f"{where}.ResourceType" not in form:
            return found
        if form[f"{where}.ResourceType"] == resource:
            for tag in itertools.count(1):
                if f"{where}.Tag.{tag}.Key" not in form:
                    break
                found[form[f"{where}.Tag.{tag}.Key"]] = form[f"{where}.Tag.{tag}.Value"]
    raise AssertionError("endless")


def _product(family: str, usd: float, unit: str, **attributes: str) -> dict[str, Any]:
    price = {
        "unit": unit,
        "pricePerUnit": {"USD": f"{usd:.10f}"},
        "description": "",
        "appliesTo": [],
    }
    term = {"priceDimensions": {"SKU.TERM.RATE": price}, "termAttributes": {}}
    return {
        "product": {
            "productFamily": family,
            "attributes": {**attributes, "regionCode": REGION},
            "sku": secrets.token_hex(8),
        },
        "serviceCode": "AmazonEC2",
        "terms": {"OnDemand": {"SKU.TERM": term}},
    }


def _xml(operation: str, inner: str) -> Answer:
    head, tail = f'<{operation}Response xmlns="{_SPACE}">', f"</{operation}Response>"
    return Answer(200, f"{head}<requestId>r</requestId>{inner}{tail}", "text/xml")


def _text(item: ElementTree.Element, name: str) -> str:
    return item.findtext(f"{{{_SPACE}}}{name}") or ""


def _set(item: ElementTree.Element, path: str, text: str) -> None:
    for name in path.split("/"):
        below = item.find(f"{{{_SPACE}}}{name}")
        if below is None:
            below = ElementTree.SubElement(item, f"{{{_SPACE}}}{name}")
        item = below
    item.text = text
