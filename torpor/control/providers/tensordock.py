"""TensorDock: virtual machines on hosts of many owners, on demand, priced by their parts.

https://dashboard.tensordock.com/api/docs. The documentation, the specification that others made of
it and the Terraform provider show three shapes of an instance; all are read, one is written.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import httpx
import msgspec

from torpor.control.providers.checks import warranted
from torpor.control.providers.gpus import parse_gpu
from torpor.control.providers.labels import label_in, label_name
from torpor.control.providers.market_client import MarketClient, Refusal, is_denied
from torpor.control.providers.offers import Offer
from torpor.control.providers.provider import Abilities, Absent, Account, Order, Residue
from torpor.control.providers.rows import Rows, offered
from torpor.control.providers.start_script import start_lines
from torpor.control.safety import Warrant
from torpor.shared.errors import (
    CreateFailed,
    InvalidInput,
    NoCapacity,
    ProviderDenied,
    ProviderError,
    QuotaReached,
)
from torpor.shared.values import GIB, Endpoint, Label, Machine, MachineId, Want, learned

URL: Final = "https://dashboard.tensordock.com"
IMAGE: Final = "ubuntu2404_ml_pytorch"
"""The default image, which has the GPU's driver: ``ubuntu2404`` has none (cloud-gpu-shopper,
LIVE_BUG_LOG.md BUG-009). The images ``*_nvidia_*`` of the documentation are not at every host."""
TIMEOUT: Final = httpx.Timeout(120.0, connect=10.0)
"""Timeouts in seconds: calls take more than 60 s (cloud-gpu-shopper, LIVE_BUG_LOG.md)."""
_POLL_S: Final = 5.0  # 100 requests a minute are allowed for one organization
_API: Final = "/api/v2"
_SSH_PORT: Final = 22
_GB: Final = 1e9
_LEAST_DISK_GB: Final = 100
_DISK_STEP_GB: Final = 50
_CORES_A_GPU: Final = 8
_RAM_GB_A_GPU: Final = 32
_RAM_STEP_GB: Final = 16
_DRIVER: Final = """if ! nvidia-smi -L; then
    systemctl stop unattended-upgrades || :
    DEBIAN_FRONTEND=noninteractive dpkg --configure -a || :
    modprobe nvidia || :
    if ! nvidia-smi -L; then
        echo 'no GPU driver works here: this machine powers itself off' >&2
        systemctl poweroff || :
        exit 1
    fi
fi
"""
"""Images may have a driver whose packages were never set up (cloud-gpu-shopper, BUG-013)."""
_IMAGE: Final = re.compile(r"(?:ubuntu(?!1|20)|debian(?!1?[01]\b|9))\d{2,4}(?:_\w+)?")
_UNDECIDED: Final = re.compile(r"time[ds]?[ -]?out|time limit|in progress|pending|already exists")
_CAPACITY: Final = re.compile(r"unavailable|not available|no available|capacity|no .*hostnode")
_MONEY: Final = re.compile(r"balance|funds|payment|deposit")
_QUOTA: Final = re.compile(r"quota|limit")


class _Limits(msgspec.Struct):
    max_vcpus: int
    max_ram_gb: float
    max_storage_gb: float


class _Rates(msgspec.Struct):
    per_vcpu_hr: float
    per_gb_ram_hr: float
    per_gb_storage_hr: float


class _Network(msgspec.Struct):
    dedicated_ip_available: bool


class _Gpu(msgspec.Struct):
    name: str = msgspec.field(name="v0Name")
    max_count: int
    price_per_hr: float
    resources: _Limits
    pricing: _Rates
    network_features: _Network


class _Location(msgspec.Struct):
    id: str
    city: str
    country: str
    gpus: list[Any]


class _Locations(msgspec.Struct):
    locations: list[Any]


class _LocationsData(msgspec.Struct):
    data: _Locations


class _Forward(msgspec.Struct):
    internal_port: int
    external_port: int


class _Instance(msgspec.Struct):
    name: str | None
    id: str = ""
    status: str = ""
    address: str | None = msgspec.field(name="ipAddress", default=None)
    forwards: list[_Forward] = msgspec.field(name="portForwards", default_factory=list)
    usd_h: float | None = msgspec.field(name="rateHourly", default=None)

    @property
    def state(self) -> str:
        """ "stopped_disassociated" and "StoppedDisassociated" are the same."""
        return re.sub(r"[^a-z]", "", self.status.lower())


class _Listed(msgspec.Struct):
    instances: list[Any]


class _ListedData(msgspec.Struct):
    """The live service answers a list (cloud-gpu-shopper, client.go), the documentation has
    ``instances``."""

    data: list[Any] | _Listed


class _Shape(NamedTuple):
    """What to order at one location. TensorDock sells parts; torpor takes them in proportion to the
    GPUs."""

    gpu: str
    gpus: int
    cores: int
    ram_gb: int
    location: str

    def __str__(self) -> str:
        return "/".join(str(part) for part in self)


class TensorDockProvider:
    """See ``providers.provider.Provider`` for the contract.

    Only hosts that give an address of its own to each machine are used. The label is the machine's
    name. A list of instances has neither addresses nor prices, so each of ours is asked for alone.
    """

    abilities: Final = Abilities(
        kind="vm",
        privileged=True,
        host_key="installed",
        idempotency="lookup",
        settling_s=300.0,
        ready_s=1200.0,
        poll_s=_POLL_S,
        stop_keeps="disk",
        stopped_usd_gib_month=None,  # each host has its own price
        min_disk_gib=round(_LEAST_DISK_GB * _GB / GIB, 1),
        billing_s=60.0,
        notice_s=None,
        not_adopted="its API changes neither the name nor a label of a machine that exists, so "
        "nothing there would say that the machine is torpor's",
        many_owners=True,
    )

    def __init__(
        self,
        api_key: str,
        *,
        account: str = "",
        url: str = URL,
        ssh_port: int = _SSH_PORT,
        timeout: httpx.Timeout = TIMEOUT,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._client = MarketClient(
            "tensordock",
            url,
            api_key,
            identity=account,
            timeout=timeout,
            sleep=sleep,
            refusal_in=_refusal_in,
        )
        self.identity, self.claimed = self._client.identity, self._client.claimed
        self._ssh_port = ssh_port
        self._rows = Rows(
            self.identity,
            _Instance,
            id_of=lambda row: row.id,
            label_of=lambda row: label_in(row.name),
        )

    def check(self, image: str = "") -> Account:
        """The API names neither the account nor its balance."""
        if not _IMAGE.fullmatch(image or IMAGE):
            raise InvalidInput(
                f"{image} is no image of TensorDock that torpor can use: leave it empty, or name "
                f"one of Ubuntu 22.04, Debian 12 or newer as TensorDock does, such as {IMAGE}"
            )
        self._listed()
        return Account(
            name=self.identity,
            notes=["TensorDock's API does not state the balance; it rents from 1 $ on"],
        )

    def offers(self, want: Want) -> list[Offer]:
        if want.spot == "only":
            return []
        count = want.gpu_count if want.gpu else 1
        found = self._client.read(_LocationsData, f"{_API}/locations").data.locations
        disk_gb = _disk_gb(want.disk_gib)

        def offers(place: _Location) -> list[Offer]:
            def offer(gpu: _Gpu) -> list[Offer]:
                fits = gpu.network_features.dedicated_ip_available and gpu.max_count >= count
                return [self._offer(place, gpu, count, disk_gb)] if fits else []

            return offered(self.identity, _Gpu, place.gpus, offer)

        return offered(self.identity, _Location, found, offers)

    def create(self, order: Order) -> Machine:
        if (known := self._of_label(order.label)) is not None:
            return known
        shape = _shape_in(order.offer.id)
        attributes = {
            "name": label_name(order.label),
            "type": "virtualmachine",
            "image": order.image or IMAGE,
            "resources": {
                "vcpu_count": shape.cores,
                "ram_gb": shape.ram_gb,
                "storage_gb": _disk_gb(order.disk_gib),
                "gpus": {shape.gpu: {"count": shape.gpus}},
            },
            "location_id": shape.location,
            "useDedicatedIp": True,
            "ssh_key": order.public_key,
            "cloud_init": {"runcmd": start_lines(order, _DRIVER)},
        }
        body = {"data": {"type": "virtualmachine", "attributes": attributes}}
        doing = f"POST {_API}/instances"
        answer = self._client.create("POST", f"{_API}/instances", dict[str, Any], body)
        if isinstance(answer, Refusal):
            raise _refused(order, answer) or self._client.uncertain(answer, doing)
        made = _instance_in(answer)
        if made is None or not made.id or not made.status:
            raise self._client.uncertain(answer, doing)
        return Machine(
            MachineId(made.id),
            self.identity,
            order.label,
            "starting",  # TensorDock says "running" at once
            None,
            order.offer.price_usd_h,
        )

    def find(self, machine: MachineId) -> Machine | Absent:
        if not re.fullmatch(r"[A-Za-z0-9-]+", machine):
            return Absent()
        path = f"{_API}/instances/{machine}"
        answer = self._client.seek("GET", path, dict[str, Any], f"show instance {machine}")
        if answer is not None:
            return self._rows.one(machine, _flat(answer), self._seen)
        return self._rows.find(machine, self._listed(), self._seen) or Absent(
            f"TensorDock answers 404 for instance {machine} and does not list it"
        )

    def list_own(self) -> list[Machine]:
        return self._rows.own(self._listed(), lambda row: self.find(MachineId(row.id)))

    def destroy(self, machine: Machine, warrant: Warrant) -> None:
        if warranted(self, machine, warrant) is None:
            return
        path = f"{_API}/instances/{machine.id}"
        self._client.seek("DELETE", path, dict[str, Any], f"delete instance {machine.id}")

    def residue(self) -> list[Residue]:
        """None: disk and address go with the instance, and torpor stores no secrets here."""
        return []

    def _offer(self, place: _Location, gpu: _Gpu, count: int, disk_gb: int) -> Offer:
        limits, rates = gpu.resources, gpu.pricing
        cores = min(_CORES_A_GPU * count, limits.max_vcpus) // 2 * 2
        ram_gb = int(min(_RAM_GB_A_GPU * count, limits.max_ram_gb)) // _RAM_STEP_GB * _RAM_STEP_GB
        return Offer(
            id=str(_Shape(gpu.name, count, cores, ram_gb, place.id)),
            provider=self.identity,
            gpu=parse_gpu(gpu.name),
            gpu_count=count,
            price_usd_h=gpu.price_per_hr * count
            + rates.per_vcpu_hr * cores
            + rates.per_gb_ram_hr * ram_gb
            + rates.per_gb_storage_hr * disk_gb,
            region=f"{place.city}, {place.country}",
            disk_gib=limits.max_storage_gb // _DISK_STEP_GB * _DISK_STEP_GB * _GB / GIB,
            domain=f"{gpu.name} {place.id}",
            priced_unix=time.time(),
            available=cores > 0 and ram_gb > 0,
            many_owners=True,
            ram_gib=ram_gb * _GB / GIB,
            cores=cores,
        )

    def _of_label(self, label: Label) -> Machine | None:
        return next((own for own in self.list_own() if own.label == label), None)

    def _listed(self) -> list[object]:
        data = self._client.read(_ListedData, f"{_API}/instances").data
        return [_flat(row) for row in (data.instances if isinstance(data, _Listed) else data)]

    def _seen(self, row: _Instance) -> Machine | Absent:
        if row.state in ("deleted", "terminated"):
            return Absent(f"TensorDock says that instance {row.id} is {row.status}")
        return self._machine(row)

    def _machine(self, row: _Instance) -> Machine:
        way = next(
            (forward.external_port for forward in row.forwards if forward.internal_port == 22), None
        )
        up = row.state == "running" and bool(row.address)
        ends = row.state in ("stopping", "deleting")
        stopped = row.state.startswith("stopped") or row.state == "error"
        endpoint = Endpoint(row.address, way or self._ssh_port, "root") if row.address else None
        return Machine(
            MachineId(row.id),
            self.identity,
            label_in(row.name),
            "stopping" if ends else "stopped" if stopped else "running" if up else "starting",
            endpoint if up else None,
            row.usd_h or 0.0,
            f"TensorDock says {row.status}",
        )


def _refusal_in(body: object) -> Refusal | None:
    """TensorDock also refuses in an answer that is 2xx: {"error": words, "status": number}."""
    if not isinstance(body, dict) or "id" in body:
        return None
    words = body.get("error") or body.get("message")
    status = str(body.get("status"))
    if not words or not re.fullmatch(r"[45]\d\d", status):
        return None
    return Refusal(int(status), str(words), body)


def _flat(body: object) -> object:
    """The instance in {"data": {...}}, in {"attributes": {...}}, or flat."""
    if isinstance(body, dict) and isinstance(body.get("data"), dict):
        body = body["data"]
    if isinstance(body, dict) and isinstance(body.get("attributes"), dict):
        body = {**body["attributes"], "id": body.get("id")}
    return body


def _instance_in(body: object) -> _Instance | None:
    """The instance; None where there is none."""
    try:
        return msgspec.convert(_flat(body), learned(_Instance))
    except msgspec.ValidationError:
        return None


def _refused(order: Order, refusal: Refusal) -> ProviderError | None:
    """None: nothing in the answer promises that no machine was rented."""
    asked = f"TensorDock refused {order.offer.id}: {refusal}"
    words = refusal.text.lower()
    if _UNDECIDED.search(words):
        return None
    if isinstance(refusal.body, list) and _is_validation(refusal.body):
        return CreateFailed(asked)
    if is_denied(refusal) or _MONEY.search(words):
        return ProviderDenied(f"{asked}. Check the key, its permissions and the account's balance")
    if _CAPACITY.search(words):
        return NoCapacity(asked)
    if _QUOTA.search(words):
        return QuotaReached(asked)
    return CreateFailed(asked) if _is_validation(refusal.body) else None


def _is_validation(body: object) -> bool:
    """Whether the body has the documented shape: {"errors": [{"status": ..., "title": ...,
    "detail": ...}]}, or that of the live service: [{"code": ..., "message": ..., "path": [...]}]
    (cloud-gpu-shopper, client.go)."""
    flat = isinstance(body, list)
    errors = body.get("errors") if isinstance(body, dict) else body
    return (
        bool(errors)
        and isinstance(errors, list)
        and all(
            isinstance(error, dict)
            and (
                {"code", "message", "path"} <= error.keys()
                if flat
                else {"title", "detail"} & error.keys()
            )
            for error in errors
        )
    )


def _shape_in(offer: str) -> _Shape:
    parts = offer.split("/")
    if len(parts) != 5 or not all(part.isdecimal() for part in parts[1:4]):
        raise CreateFailed(f"{offer!r} is no offer of TensorDock")
    return _Shape(parts[0], int(parts[1]), int(parts[2]), int(parts[3]), parts[4])


def _disk_gb(disk_gib: float) -> int:
    steps = math.ceil(disk_gib * GIB / _GB / _DISK_STEP_GB)
    return max(_LEAST_DISK_GB, steps * _DISK_STEP_GB)
