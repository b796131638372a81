"""Verda, formerly DataCrunch: virtual machines with root, on demand and spot.

https://api.verda.com/v1/docs. Where the vendor's Python client (1.25), its Go client and dstack's
backend differ, what any of them reads is read here, too."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import httpx
import msgspec

from torpor.control.providers.adopted import Adopted
from torpor.control.providers.checks import warranted
from torpor.control.providers.client_credentials import CredentialsClient
from torpor.control.providers.gpus import parse_gpu
from torpor.control.providers.labels import label_in, label_name
from torpor.control.providers.market_client import TIMEOUT, Refusal, is_decided, is_denied
from torpor.control.providers.offers import Offer
from torpor.control.providers.provider import Abilities, Absent, Account, LeftKind, Order, Residue
from torpor.control.providers.refusals import create_refused
from torpor.control.providers.rows import Rows, offer_rows
from torpor.control.providers.start_script import start_script
from torpor.control.safety import Warrant
from torpor.shared.errors import (
    CreateFailed,
    InvalidInput,
    MachineUnread,
    ProviderError,
    ProviderUnavailable,
)
from torpor.shared.values import GIB, Endpoint, Label, Machine, MachineId, MachineState, Want

URL: Final = "https://api.verda.com"  # https://api.datacrunch.io answers alike
_GB: Final = 1e9  # the Python client calls a disk's unit GB, the command line GiB: the smaller one
_LEAST_DISK_GB: Final = 50
_MOST_DISK_GB: Final = 2000  # what torpor asks for at most; the API states no limit
_STOPPED: Final = re.compile(r"offline|error|installation_failed|no_capacity|\w*hibernat\w+")
_IMAGE: Final = re.compile(r"ubuntu-2[2-9]\.04(?:-cuda-(\d+)\.(\d+)(?:-open)?(?:-docker)?)?")
_ID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_GONE: Final = re.compile(r"invalid [\w ]+ id|not.found|discontinue a discontinued", re.IGNORECASE)
"""Error texts for a thing that is gone, as dstack meets them: "Invalid instance id", "Can't
discontinue a discontinued instance"."""
_NOT_NOW: Final = re.compile(r"forbidden_action|can't discontinue", re.IGNORECASE)
_SCRIPTS, _KEYS = "/scripts", "/sshkeys"
_THINGS: Final[dict[LeftKind, str]] = {"disk": "/volumes", "script": _SCRIPTS, "key": _KEYS}


class _Balance(msgspec.Struct):
    amount: float
    currency: str


class _Part(msgspec.Struct):
    number_of_cores: float = 0
    number_of_gpus: int = 0
    size_in_gigabytes: float = 0
    description: str = ""


class _Type(msgspec.Struct):
    instance_type: str
    price_per_hour: float | str  # the Python client reads words, the Go client either
    spot_price: float | str
    cpu: _Part
    gpu: _Part
    memory: _Part
    gpu_memory: _Part


class _Place(msgspec.Struct):
    location_code: str
    availabilities: list[str]


class _DiskType(msgspec.Struct):
    type: str
    price: dict[str, float | str]


class _Instance(msgspec.Struct):
    id: str = ""
    status: str = ""
    description: str | None = None
    price_per_hour: float | str | None = None
    ip: str | None = None
    os_volume_id: str | None = None


class _Thing(msgspec.Struct):
    """A disk, a start script or an SSH key."""

    id: str
    name: str | None = None
    status: str = ""
    base_hourly_cost: float | None = None
    created_at: str = ""  # the Python client knows none of a script


class VerdaProvider:
    """See ``providers.provider.Provider`` for the contract.

    The label is an instance's description, and the name of its disk, its start script, which holds
    its host key, and its SSH key: things of their own in the account.
    """

    abilities: Final = Abilities(
        kind="vm", privileged=True, images=False, host_key="installed", idempotency="lookup",
        settling_s=300.0,
        forgets_s=3600.0,  # how long an ended instance is shown is not stated
        ready_s=1200.0,
        poll_s=5.0,  # as often as the vendor's command line asks; no limit is stated
        stop_keeps="nothing",  # a spot machine's disk goes with it; a stop is billed in full
        stopped_usd_gib_month=None, notice_s=None,
        min_disk_gib=round(_LEAST_DISK_GB * _GB / GIB, 1),
        billing_s=600.0,  # as others found; the API does not state it
        adopts="by record",  # the API changes no description
    )  # fmt: skip

    def __init__(
        self,
        client_secret: str,
        *,
        client_id: str,
        account: str = "",
        url: str = URL,
        ssh_port: int = 22,
        timeout: httpx.Timeout = TIMEOUT,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._client = CredentialsClient(
            "verda", f"{url}/v1", client_id, client_secret, "/oauth2/token", identity=account,
            timeout=timeout, sleep=sleep, lines=True, denies=_denies, is_gone=_is_gone,
            decides=_decides, unquoted={_SCRIPTS},
        )  # fmt: skip
        self.identity, self.claimed = self._client.identity, self._client.claimed
        self._ssh_port, self._adopted = ssh_port, Adopted()
        self.mark = self._adopted.mark
        self._rows = Rows(
            self.identity,
            _Instance,
            id_of=lambda row: row.id,
            label_of=lambda row: label_in(row.description) or self._adopted.get(row.id),
            exact=["description"],
        )
        self._disks_usd_h: dict[str, float] = {}

    def check(self, image: str = "") -> Account:
        if image:
            raise InvalidInput(f"Verda's machines have its own images, not {image}: leave it empty")
        self.list_own()
        balance = self._client.read(_Balance, "/balance")
        usd = balance.amount if balance.currency.lower() == "usd" else None
        return Account(name=self.identity, balance_usd=usd)

    def offers(self, want: Want) -> list[Offer]:
        read, found = self._client.read, []
        rows = read(list[Any], "/instance-types", {"currency": "usd"})
        types, odd = offer_rows(self.identity, _Type, rows)
        kinds = {row.instance_type: row for row in types}
        disks, more = offer_rows(self.identity, _DiskType, read(list[Any], "/volume-types"))
        odd += more
        prices = [row.price.get("price_per_month_per_gb") for row in disks if row.type == "NVMe"]
        if not (gb_usd := max(map(_usd, prices), default=0.0)):
            raise self._client.unexpected("no price of NVMe", "GET /volume-types")
        disk_usd_h = gb_usd * _disk_gb(want.disk_gib) / 730  # hours of a month, as Verda counts
        for spot in {"never": (False,), "allowed": (False, True), "only": (True,)}[want.spot]:
            word = str(spot).lower()  # the Python client asks by isSpot, the Go client by is_spot
            asked = {"isSpot": word, "is_spot": word}
            rows = read(list[Any], "/instance-availability", asked)
            places, more = offer_rows(self.identity, _Place, rows)
            odd += more
            for at in places:
                on_sale = [kinds[name] for name in at.availabilities if name in kinds]
                found += [self._offer(k, at.location_code, spot, disk_usd_h) for k in on_sale]
        # The others name no price.
        return odd + [offer for offer in found if offer.price_usd_h > disk_usd_h]

    def create(self, order: Order) -> Machine:
        own = [machine for machine in self.list_own() if machine.label == order.label]
        if own:
            return own[0]
        parts = order.offer.id.split("/")
        if len(parts) != 3:
            raise CreateFailed(f"{order.offer.id!r} is no offer of Verda")
        kind, place, term = parts
        spot, name = term == "spot", label_name(order.label)
        # The API takes a fate of the disk of spot machines alone.
        fate = {"on_spot_discontinue": "delete_permanently"} if spot else {}
        body = {
            "instance_type": kind, "location_code": place, "image": self._image(order, kind),
            "is_spot": spot, "pricing": "FIXED_PRICE", "hostname": f"torpor-{order.token}",
            "os_volume": {"name": name, "size": _disk_gb(order.disk_gib), **fate},
            "description": name, "ssh_key_ids": [self._have(order, _KEYS, key=order.public_key)],
            "startup_script_id": self._have(order, _SCRIPTS, script=start_script(order)),
        }  # fmt: skip
        answer = self._client.create("POST", "/instances", Any, body)
        if isinstance(answer, Refusal):
            raise self._create_refused(order, answer)
        if not _ID.fullmatch(number := _id_in(answer)):
            raise self._client.uncertain(answer, "POST /instances")
        price = order.offer.price_usd_h
        return Machine(MachineId(number), self.identity, order.label, "starting", None, price)

    def find(self, machine: MachineId) -> Machine | Absent:
        """Only the status "discontinued" is a proof: an id that is not known may be known later."""
        told = self._shown(machine)
        return Absent() if told is None else self._rows.one(machine, told, self._seen)

    def list_own(self) -> list[Machine]:
        return self._rows.own(self._client.read(list[Any], "/instances"), self._seen)

    def destroy(self, machine: Machine, warrant: Warrant) -> None:
        live = warranted(self, machine, warrant)
        with suppress(ProviderError):  # first: who finds the instance gone destroys nothing more
            self._tidy(machine.label, self._labels_beside(machine))
        if live is not None and (told := self._shown(machine.id)):
            row = self._rows.row(machine.id, told)
            # A disk that is not named may be kept, and billed. That of an adopted machine goes to
            # the trash, where its user finds it for 96 h.
            ours, disk = label_in(row.description) is not None, row.os_volume_id
            more = {"volume_ids": [disk], "delete_permanently": ours} if disk else {}
            body = {"id": [machine.id], "action": "delete", **more}
            self._end("/instances", f"delete instance {machine.id}", body)
        others = self._labels_beside(machine)
        if machine.label in others:
            return  # the rest is of another machine of this label
        for left in self._things("/volumes") if live is None else ():
            if label_in(left.name) == machine.label:
                body = {"id": left.id, "action": "delete", "is_permanent": True}
                self._end("/volumes", f"delete volume {left.id}", body)
        self._tidy(machine.label, others)

    def residue(self) -> list[Residue]:
        """Disks, start scripts and SSH keys of ours without an instance. Only disks cost."""
        things = [(kind, row) for kind, path in _THINGS.items() for row in self._things(path)]
        live = {machine.label for machine in self._readable()}
        return [
            Residue(
                id=row.id, provider=self.identity, kind=kind, label=label_in(row.name),
                price_usd_h=row.base_hourly_cost if kind == "disk" else 0.0,
            )
            for kind, row in things
            if label_in(row.name) not in live
        ]  # fmt: skip

    def _offer(self, kind: _Type, place: str, spot: bool, disk_usd_h: float) -> Offer:
        count = kind.gpu.number_of_gpus
        vram_gib = kind.gpu_memory.size_in_gigabytes / (count or 1)
        return Offer(
            id=f"{kind.instance_type}/{place}/{'spot' if spot else 'demand'}",
            provider=self.identity, region=place, domain=f"{kind.instance_type} {place} {spot}",
            gpu=parse_gpu(kind.gpu.description, vram_gib) if count else None, gpu_count=count,
            price_usd_h=_usd(kind.spot_price if spot else kind.price_per_hour) + disk_usd_h,
            on_demand_usd_h=_usd(kind.price_per_hour) + disk_usd_h if spot else None,
            priced_unix=time.time(), spot=spot, available=True, disk_gib=_MOST_DISK_GB * _GB / GIB,
            architecture="aarch64" if "GB" in kind.instance_type else "x86_64",
            ram_gib=kind.memory.size_in_gigabytes * _GB / GIB, cores=kind.cpu.number_of_cores,
        )  # fmt: skip

    def _image(self, order: Order, kind: str) -> str:
        """The newest for this type, with the CUDA that is wanted. Older GPUs take older images."""
        rows = self._client.read(list[dict[str, Any]], "/images", {"instance_type": kind})
        found = filter(None, (_IMAGE.fullmatch(str(row.get("image_type"))) for row in rows))
        least = order.cuda or (1 if order.offer.gpu_count else 0, 0)
        fits = [image[0] for image in found if (int(image[1] or 0), int(image[2] or 0)) >= least]
        if not fits:
            raise CreateFailed(f"Verda has no Ubuntu with CUDA {least[0]}.{least[1]} for {kind}")
        return max(fits)

    def _have(self, order: Order, path: str, **more: str) -> str:
        """The id of the label's start script or SSH key, which a killed create may have made."""
        name = label_name(order.label)
        if known := [row.id for row in self._things(path) if row.name == name]:
            return known[0]
        answer = self._client.ask("POST", path, Any, body={"name": name, **more})
        if isinstance(answer, Refusal):
            raise self._create_refused(order, answer)
        if not (number := _id_in(answer)):
            raise self._client.unexpected(answer, f"POST {path}")
        return number

    def _create_refused(self, order: Order, refusal: Refusal) -> ProviderError:
        """The error, once what was stored for the order is deleted. What stays is residue."""
        with suppress(ProviderError):
            self._tidy(order.label, {machine.label for machine in self._readable()})
        return create_refused("Verda", order, refusal, denied=_denies(refusal))

    def _labels_beside(self, machine: Machine) -> set[Label | None]:
        return {own.label for own in self._readable() if own.id != machine.id}

    def _readable(self) -> list[Machine]:
        """The machines of ours that can be read. What belongs to another one is still attached to
        it, which Verda deletes nothing of."""
        try:
            return self.list_own()
        except MachineUnread as error:
            return [*error.machines]

    def _shown(self, machine: MachineId) -> dict[str, Any] | None:
        path, known = f"/instances/{machine}", _ID.fullmatch(machine)
        return self._client.seek("GET", path, dict[str, Any], f"show {machine}") if known else None

    def _end(self, path: str, doing: str, body: Any = None) -> None:
        """Tell Verda to end something. It refuses while an instance is provisioned."""
        answer: Any = self._client.ask("PUT" if body else "DELETE", path, Any, body=body)
        if isinstance(answer, list):  # a 207 has a word on each instance
            errors = [row for row in answer if isinstance(row, dict) and row.get("error")]
            answer = Refusal(400, str(errors[0]["error"]), errors[0]) if errors else None
        if not isinstance(answer, Refusal) or _is_gone(answer):
            return
        if _NOT_NOW.search(answer.text):
            raise ProviderUnavailable(f"{self.identity} does not {doing} yet: {answer}")
        raise self._client.refused(answer, doing)

    def _tidy(self, label: Label | None, others: set[Label | None]) -> None:
        """Delete this label's start script and SSH key, and its owner's of a day ago, which a spot
        machine leaves that was taken. ``others``: the labels of the machines that stay."""
        old = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time.time() - 86_400))
        for path in (_SCRIPTS, _KEYS):
            for row in self._things(path):
                named, stale = label_in(row.name), "" < row.created_at < old
                owned = label and named and named.owner == label.owner
                if named not in others and (named == label or (stale and owned)):
                    self._end(f"{path}/{row.id}", f"delete {path}/{row.id}")

    def _things(self, path: str) -> list[_Thing]:
        """Those that carry a label and are not deleted yet."""
        rows = self._client.read(list[_Thing], path)
        return [row for row in rows if label_in(row.name) and not row.status.startswith("delet")]

    def _seen(self, row: _Instance) -> Machine | Absent:
        if row.status == "discontinued":
            return Absent(f"Verda says that instance {row.id} is discontinued")
        return self._machine(row)

    def _machine(self, row: _Instance) -> Machine:
        label, disk = label_in(row.description) or self._adopted.get(row.id), row.os_volume_id
        if disk is not None and disk not in self._disks_usd_h:
            found = self._client.seek("GET", f"/volumes/{disk}", _Thing, f"show volume {disk}")
            if found and found.base_hourly_cost is not None:
                self._disks_usd_h[disk] = found.base_hourly_cost
        address = row.ip if row.status == "running" else None
        ends, stopped = row.status in ("deleting", "deleted"), _STOPPED.fullmatch(row.status)
        up: MachineState = "running" if address else "starting"
        state: MachineState = "stopping" if ends else "stopped" if stopped else up
        endpoint = Endpoint(address, self._ssh_port, "root") if address else None
        usd_h, note = self._disks_usd_h.get(disk or "", 0.0), f"Verda says {row.status}"
        usd_h += _usd(row.price_per_hour)
        return Machine(MachineId(row.id), self.identity, label, state, endpoint, usd_h, note)


def _decides(refusal: Refusal) -> bool:
    """Verda itself says in a 503 that it has no capacity. Any other 503 decides nothing."""
    said = refusal.text.lower()
    return is_decided(refusal) or ("service_unavailable" in said and "no capacity" in said)


def _denies(refusal: Refusal) -> bool:
    """Whether the login is denied. A "forbidden action" is not that: the state of an instance
    forbids it."""
    return is_denied(refusal) and "forbidden_action" not in refusal.text


def _is_gone(refusal: Refusal) -> bool:
    """No word on the login, which may not be found either."""
    return refusal.status == 404 or bool(_GONE.search(refusal.text) and not _denies(refusal))


def _id_in(answer: Any) -> str:
    return str(answer.get("id", "") if isinstance(answer, dict) else answer)


def _usd(told: float | str | None) -> float:
    """A price in USD; 0: none is stated."""
    with suppress(ValueError):
        return float(told or 0)
    return 0.0


def _disk_gb(disk_gib: float) -> int:
    return max(_LEAST_DISK_GB, math.ceil(disk_gib * GIB / _GB))
