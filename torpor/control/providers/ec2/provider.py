"""AWS EC2: virtual machines in one region of one account, on demand and spot.

https://docs.aws.amazon.com/AWSEC2/latest/APIReference. Offers are made in ``ec2_offers``.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import boto3
import msgspec

from torpor.control.providers.checks import to_mark, warranted
from torpor.control.providers.ec2.client import TIMEOUT_S, AwsRefusal, Done, Ec2Client
from torpor.control.providers.ec2.launch import (
    PRICE_TAG,
    PROBE_ALLOWED,
    launch_refused,
    launch_request,
    probe_request,
)
from torpor.control.providers.ec2.offers import Ec2Offers, offer_parts
from torpor.control.providers.ec2.prices import Ec2Prices
from torpor.control.providers.ec2.setup import Ec2Setup
from torpor.control.providers.labels import label_among, label_tags
from torpor.control.providers.offers import Offer
from torpor.control.providers.provider import Abilities, Absent, Account, Order, Residue
from torpor.control.providers.rows import Rows
from torpor.control.safety import Warrant
from torpor.shared.errors import CreateFailed, CreateUncertain, InvalidInput
from torpor.shared.values import Endpoint, Label, Machine, MachineId, Want, learned
from torpor.shared.wire.job import SPOT_NOTICE_S, NoticeSource

METADATA_URL: Final = "http://169.254.169.254"
_SSH_PORT: Final = 22
_ID: Final = re.compile(r"i-[0-9a-f]{8,17}")
_RENTAL_TAG: Final = "torpor-rental"
_STATES: Final = {"": "starting", "pending": "starting", "running": "running", "stopped": "stopped"}
_SHOWN: Final = ("pending", "running", "shutting-down", "stopping", "stopped")
_MOST_TOKENS: Final = 100
_POLL_S: Final = 1.0
"""Seconds between two looks. AWS takes read requests 100 times at once and then 20 times a second,
for each operation, and rents 1,000 machines at once and then 2 a second, in each region of an
account (EC2 developer guide, Request throttling)."""

_QUOTAS: Final = ("L-DB2E81BA", "L-417A185B", "L-3819A6DF", "L-7212CCBC")
"""The quotas of vCPUs of G and of P machines, on demand and spot. They are 0 in a new account."""


class _Tag(msgspec.Struct, rename="pascal"):
    key: str
    value: str


class _State(msgspec.Struct, rename="pascal", frozen=True):
    name: str = ""


class _Reason(msgspec.Struct, rename="pascal"):
    message: str = ""


class _Instance(msgspec.Struct, rename="pascal"):
    instance_id: str = ""
    state: _State = _State()
    tags: list[_Tag] = []
    public_ip_address: str = ""
    private_ip_address: str = ""
    state_reason: _Reason | None = None


class _Made(msgspec.Struct, rename="pascal"):
    instance_id: str


class _Reservation(msgspec.Struct, rename="pascal"):
    instances: list[_Made]


class _Group(msgspec.Struct, rename="pascal"):
    instances: list[Any]


class _Reservations(msgspec.Struct, rename="pascal"):
    reservations: list[_Group]
    next_token: str = ""


class _Change(msgspec.Struct, rename="pascal"):
    instance_id: str


class _Ended(msgspec.Struct, rename="pascal"):
    terminating_instances: list[_Change]


class _Volume(msgspec.Struct, rename="pascal"):
    volume_id: str
    size: float
    tags: list[_Tag] = []


class _Volumes(msgspec.Struct, rename="pascal"):
    volumes: list[_Volume]
    next_token: str = ""


class _Limit(msgspec.Struct, rename="pascal"):
    quota_name: str
    value: float


class _Quota(msgspec.Struct, rename="pascal"):
    quota: _Limit


class Ec2Provider:
    """See ``providers.provider.Provider`` for the contract.

    It makes no network, and no address: a machine's public address is released with it. It makes a
    security group only with ``ssh_from``; see ``Ec2Setup``.
    """

    abilities: Abilities = Abilities(
        kind="vm",
        privileged=True,
        host_key="installed",
        idempotency="token",
        settling_s=300.0,
        forgets_s=3600.0,
        ready_s=900.0,
        poll_s=_POLL_S,
        ends_machines="the market",
        stop_keeps="disk",
        stopped_usd_gib_month=None,  # each region has its own price
        min_disk_gib=0.0,
        billing_s=60.0,
        notice_s=SPOT_NOTICE_S["aws"],
        notices=(NoticeSource("aws", METADATA_URL),),
        adopts="marked",
    )

    def __init__(
        self,
        session: boto3.Session,
        account: str,
        region: str,
        *,
        image: str = "",
        subnets: Sequence[str] = (),
        security_group: str = "",
        ssh_from: str = "",
        ports: Sequence[int] = (),
        private: bool = False,
        instance_profile: str = "",
        types: Sequence[str] = (),
        url: str | None = None,
        metadata_url: str = METADATA_URL,
        ssh_port: int = _SSH_PORT,
        timeout_s: float = TIMEOUT_S,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._client = Ec2Client(
            session, account, region, url=url, timeout_s=timeout_s, sleep=sleep
        )
        self.identity = self._client.identity
        self._setup = Ec2Setup(
            self._client, image, subnets, security_group, ssh_from, ports, private, instance_profile
        )
        self._prices = Ec2Prices(self._client)
        self._offers = Ec2Offers(self._client, self._setup, self._prices, types)
        self._ssh_port = ssh_port
        self._rows = Rows(
            self.identity,
            _Instance,
            id_of=lambda row: row.instance_id,
            label_of=lambda row: _label(row.tags),
            exact=["Tags"],
        )
        self.abilities = msgspec.structs.replace(
            self.abilities, notices=(NoticeSource("aws", metadata_url),)
        )

    def check(self, image: str = "") -> Account:
        """Asks AWS to rent without renting (``DryRun``), and for the quotas of GPUs."""
        self._client.confirm()
        found = self._setup.image(image)
        if found is None:
            raise InvalidInput(
                f"AWS has no Deep Learning Base AMI in {self._client.region}: name an AMI in the "
                "provider block"
            )
        notes = self._setup.check()
        probe = probe_request(self._setup, found)
        answer = self._client.ask(Done, "run_instances", **probe, DryRun=True)
        if isinstance(answer, AwsRefusal) and answer.code not in PROBE_ALLOWED:
            raise self._client.refused(answer, "rent machines")
        self._prices.disk_usd_h(1)
        return Account(name=f"AWS account {self._client.account}", notes=[*self._quotas(), *notes])

    def offers(self, want: Want) -> list[Offer]:
        return self._offers.found(want)

    def create(self, order: Order) -> Machine:
        known = self._listed({f"tag:{_RENTAL_TAG}": [order.label.rental]})
        if own := [machine for machine in known if machine.label == order.label]:
            return own[0]
        request = launch_request(self._setup, self._prices, order)
        for number in range(_MOST_TOKENS):
            # The token of a machine that has ended makes no other one.
            token = f"{order.token}-{number}"
            answer = self._client.rent(_Reservation, **request, ClientToken=token)
            if isinstance(answer, _Reservation):
                if len(answer.instances) != 1:
                    raise CreateUncertain(
                        f"AWS made {len(answer.instances)} machines for {order}: the attempt is "
                        "abandoned; reconcile ends them"
                    )
                made = MachineId(answer.instances[0].instance_id)
                price = order.offer.price_usd_h
                return Machine(made, self.identity, order.label, "starting", None, price)
            if answer.code != "IdempotentInstanceTerminated":
                raise launch_refused(order, answer)
        raise CreateFailed(f"{_MOST_TOKENS} machines of {order} have ended: use another label")

    def find(self, machine: MachineId) -> Machine | Absent:
        """Only the state "terminated" is a proof: AWS does not know a machine in its first seconds
        and an hour after its end."""
        if not _ID.fullmatch(machine):
            return Absent()
        answer = self._client.ask(_Reservations, "describe_instances", InstanceIds=[machine])
        if isinstance(answer, AwsRefusal):
            if answer.code.startswith("InvalidInstanceID"):
                return Absent()
            raise self._client.refused(answer, f"show instance {machine}")
        rows = [row for group in answer.reservations for row in group.instances]
        return self._rows.find(machine, rows, self._seen) or Absent()

    def list_own(self) -> list[Machine]:
        return self._listed({"tag-key": [_RENTAL_TAG]})

    def destroy(self, machine: Machine, warrant: Warrant) -> None:
        live = warranted(self, machine, warrant)
        if live is None:
            self._end_disks(machine.label)
            return
        doing = f"terminate instance {machine.id}"
        answer = self._client.ask(_Ended, "terminate_instances", InstanceIds=[machine.id])
        if isinstance(answer, AwsRefusal) and not answer.code.startswith("InvalidInstanceID"):
            raise self._client.refused(answer, doing)

    def mark(self, machine: Machine, label: Label | None) -> None:
        """See ``providers.provider.Adopts``. Its disks stay unmarked: those that do not
        go with the machine are its user's."""
        if to_mark(self, machine, label) and (ours := label or machine.label) is not None:
            verb = "create_tags" if label else "delete_tags"
            tags = [{"Key": key, "Value": value} for key, value in label_tags(ours).items()]
            answer = self._client.ask(Done, verb, Resources=[machine.id], Tags=tags)
            if isinstance(answer, AwsRefusal):
                raise self._client.refused(answer, f"tag instance {machine.id}")

    def residue(self) -> list[Residue]:
        """Disks that belong to no machine any more. A disk that torpor orders ends with its
        machine, unless somebody changed that."""
        return [
            Residue(
                id=volume.volume_id,
                provider=self.identity,
                kind="disk",
                label=_label(volume.tags),
                price_usd_h=self._prices.disk_usd_h(volume.size),
            )
            for volume in self._disks()
        ]

    def rise_usd_h(self, offer: str, begin_unix: float, end_unix: float) -> float:
        """See ``providers.provider.Prices``. By AWS's history of 90 days."""
        kind, zone, spot = offer_parts(offer)
        return self._prices.rise(kind, zone, begin_unix, end_unix) if spot else 0.0

    def _listed(self, filters: dict[str, list[str]]) -> list[Machine]:
        asked = [{"Name": name, "Values": values} for name, values in filters.items()]
        asked.append({"Name": "instance-state-name", "Values": list(_SHOWN)})
        pages = self._client.pages(_Reservations, "describe_instances", Filters=asked)
        rows = (row for page in pages for group in page.reservations for row in group.instances)
        return self._rows.own(rows, self._seen)

    def _seen(self, row: _Instance) -> Machine | Absent:
        if row.state.name == "terminated":
            return Absent(f"AWS says that instance {row.instance_id} is terminated: {_why(row)}")
        return self._machine(row)

    def _machine(self, row: _Instance) -> Machine:
        state = _STATES.get(row.state.name, "stopping")
        endpoint = None
        address = row.public_ip_address or (row.private_ip_address if self._setup.private else "")
        if address and state == "running":
            endpoint = Endpoint(address, self._ssh_port, "root")
        if state == "running" and endpoint is None:
            state = "starting"  # the address comes a moment later
        tags = {tag.key: tag.value for tag in row.tags}
        return msgspec.convert(
            {
                "id": row.instance_id,
                "provider": self.identity,
                "label": _label(row.tags),
                "state": state,
                "endpoint": endpoint,
                "price_usd_h": _number(tags.get(PRICE_TAG, "")),
                "note": _why(row),
            },
            learned(Machine),
        )

    def _disks(self) -> list[_Volume]:
        asked = [
            {"Name": "tag-key", "Values": [_RENTAL_TAG]},
            {"Name": "status", "Values": ["available"]},  # attached to no machine
        ]
        pages = self._client.pages(_Volumes, "describe_volumes", Filters=asked)
        found = [volume for page in pages for volume in page.volumes]
        return [volume for volume in found if _label(volume.tags) is not None]

    def _end_disks(self, label: Label | None) -> None:
        for volume in self._disks():
            if _label(volume.tags) != label:
                continue
            answer = self._client.ask(Done, "delete_volume", VolumeId=volume.volume_id)
            if isinstance(answer, AwsRefusal) and answer.code != "InvalidVolume.NotFound":
                raise self._client.refused(answer, f"delete volume {volume.volume_id}")

    def _quotas(self) -> list[str]:
        notes: list[str] = []
        for code in _QUOTAS:
            answer = self._client.ask(
                _Quota, "get_service_quota", service="service-quotas",
                ServiceCode="ec2", QuotaCode=code,
            )  # fmt: skip
            if isinstance(answer, AwsRefusal):
                return [*notes, f"AWS does not tell the quotas ({answer.code})"]
            notes.append(f"{answer.quota.quota_name}: {answer.quota.value:.0f} vCPUs")
        return notes


def _label(tags: Sequence[_Tag]) -> Label | None:
    return label_among({tag.key: tag.value for tag in tags})


def _why(row: _Instance) -> str:
    reason = row.state_reason.message if row.state_reason else ""
    return f"AWS says {row.state.name} {reason}".strip()


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
