"""Lambda: virtual machines on demand, with NVIDIA's driver and CUDA in their image.

https://docs.lambda.ai/api/cloud. There is no spot and no stop.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

import httpx
import msgspec

from torpor.control.providers.adopted import Adopted
from torpor.control.providers.checks import warranted
from torpor.control.providers.gpus import parse_gpu
from torpor.control.providers.labels import label_among, label_tags
from torpor.control.providers.market_client import TIMEOUT, MarketClient, Refusal, is_denied
from torpor.control.providers.offers import Offer
from torpor.control.providers.provider import Abilities, Absent, Account, Order, Residue
from torpor.control.providers.rows import Rows, offered
from torpor.control.providers.start_script import start_script
from torpor.control.safety import Warrant
from torpor.shared.errors import (
    CreateFailed,
    InvalidInput,
    NoCapacity,
    ProviderDenied,
    ProviderError,
    QuotaReached,
)
from torpor.shared.values import Endpoint, Label, Machine, MachineId, Want

URL: Final = "https://cloud.lambda.ai"
_API: Final = "/api/v1"
_SSH_PORT: Final = 22
_CUDA: Final = (12, 8)  # the CUDA version that the driver in Lambda's default image supports
_EVERY_S: Final = 1.0
_LAUNCH_EVERY_S: Final = 12.0
"""Seconds between two launches, and in _EVERY_S between two requests: the limits of Lambda's
specification 1.10.0. SkyPilot's client was held to one launch in 10 s."""
_POLL_S: Final = 2.0
_LAUNCH: Final = f"{_API}/instance-operations/launch"
_GONE: Final = "global/object-does-not-exist"
_CAPACITY: Final = "instance-operations/launch/insufficient-capacity"
_DENIED: Final = frozenset(
    {"global/invalid-api-key", "global/account-inactive", "global/invalid-address",
     "global/forbidden"}
)  # fmt: skip

_Shape = TypeVar("_Shape")


class _Region(msgspec.Struct):
    name: str


class _Specs(msgspec.Struct):
    vcpus: int
    memory_gib: float
    storage_gib: float
    gpus: int


class _Type(msgspec.Struct):
    name: str
    gpu_description: str
    price_cents_per_hour: int
    specs: _Specs


class _Stock(msgspec.Struct):
    instance_type: _Type
    regions_with_capacity_available: list[_Region]


class _Tag(msgspec.Struct):
    key: str
    value: str


class _Priced(msgspec.Struct):
    price_cents_per_hour: float


class _Instance(msgspec.Struct):
    id: str = ""
    status: str = ""
    instance_type: _Priced | None = None
    ip: str | None = None
    tags: list[_Tag] | None = None


class _SshKey(msgspec.Struct):
    name: str
    public_key: str


class _Launched(msgspec.Struct):
    instance_ids: list[str]


class _Ended(msgspec.Struct):
    terminated_instances: list[Any]


class _TypesData(msgspec.Struct):
    data: dict[str, Any]


class _InstanceData(msgspec.Struct):
    data: dict[str, Any]


class _InstancesData(msgspec.Struct):
    data: list[Any]


class _SshKeysData(msgspec.Struct):
    data: list[_SshKey]


class _SshKeyData(msgspec.Struct):
    data: _SshKey


class _LaunchedData(msgspec.Struct):
    data: _Launched


class _EndedData(msgspec.Struct):
    data: _Ended


class _Fault(NamedTuple):
    code: str
    message: str


class _Client(MarketClient):
    """Asks Lambda no more often than it allows. ``clock``: monotonic seconds."""

    def __init__(self, *told: Any, clock: Callable[[], float], **more: Any) -> None:
        super().__init__(*told, **more)
        self._clock = clock
        self._lock, self._launches = threading.Lock(), threading.Lock()
        self._next_s = self._next_launch_s = clock()

    def _exchanged(self, method: str, path: str, **sent: Any) -> httpx.Response:
        if path == _LAUNCH:
            # launches wait for each other; other requests do not wait for a launch
            with self._launches:
                self._sleep_until(self._next_launch_s)
                self._next_launch_s = self._take_turn() + _LAUNCH_EVERY_S
        else:
            self._take_turn()
        return super()._exchanged(method, path, **sent)

    def _take_turn(self) -> float:
        """Wait until a request may be sent; returns when that is."""
        with self._lock:
            at_s = max(self._clock(), self._next_s)
            self._next_s = at_s + _EVERY_S
        self._sleep_until(at_s)
        return at_s

    def _sleep_until(self, at_s: float) -> None:
        if (wait_s := at_s - self._clock()) > 0:
            self._sleep(wait_s)


class LambdaProvider:
    """See ``providers.provider.Provider`` for the contract.

    The login key stays in the account, under a name made of its hash: it costs nothing, and other
    machines may use it.
    """

    abilities: Final = Abilities(
        kind="vm",
        privileged=True,
        host_key="installed",
        idempotency="lookup",
        settling_s=300.0,
        forgets_s=3600.0,  # Lambda does not state how long it lists a terminated instance
        ready_s=1200.0,
        poll_s=_POLL_S,
        stop_keeps="nothing",
        stopped_usd_gib_month=None,
        min_disk_gib=0.0,
        billing_s=60.0,
        notice_s=None,
        images=False,
        adopts="by record",  # the specification lets a name be changed, and no tags
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = _Client(
            "lambda",
            url,
            api_key,
            identity=account,
            timeout=timeout,
            sleep=sleep,
            clock=clock,
            denies=_denies,
            is_gone=lambda refusal: _fault(refusal).code == _GONE,
        )
        self.identity, self.claimed = self._client.identity, self._client.claimed
        self._adopted = Adopted()
        self._rows = Rows(
            self.identity,
            _Instance,
            id_of=lambda row: row.id,
            label_of=self._label_of,
            exact=["tags"],
        )
        self.mark = self._adopted.mark
        self._ssh_port = ssh_port

    def check(self, image: str = "") -> Account:
        """The API names neither the account nor its balance."""
        if image:
            raise InvalidInput(
                f"Lambda's machines have Lambda's image, not {image}: leave the image empty"
            )
        self._client.read(_InstancesData, f"{_API}/instances")
        return Account(name=self.identity, notes=["Lambda's API does not state the balance"])

    def offers(self, want: Want) -> list[Offer]:
        if want.spot == "only":
            return []
        stock = self._client.read(_TypesData, f"{_API}/instance-types").data

        def offers(item: _Stock) -> list[Offer]:
            regions = item.regions_with_capacity_available
            return [self._offer(item.instance_type, region.name) for region in regions]

        return offered(self.identity, _Stock, stock.values(), offers)

    def create(self, order: Order) -> Machine:
        if (known := self._of_label(order.label)) is not None:
            return known
        kind, _, region = order.offer.id.partition("/")
        body: dict[str, Any] = {
            "region_name": region,
            "instance_type_name": kind,
            "ssh_key_names": [self._registered(order.public_key)],
            "name": f"torpor-{order.token}",
            "user_data": start_script(order),
            "tags": [{"key": k, "value": v} for k, v in label_tags(order.label).items()],
        }
        answer = self._client.create("POST", _LAUNCH, _LaunchedData, body)
        if isinstance(answer, Refusal):
            raise _refused(order, answer)
        ids = answer.data.instance_ids
        if len(ids) != 1:
            raise self._client.unexpected(f"{len(ids)} instances", "a launch of one")
        return Machine(
            MachineId(ids[0]),
            self.identity,
            order.label,
            "starting",
            None,
            order.offer.price_usd_h,
        )

    def find(self, machine: MachineId) -> Machine | Absent:
        """Only the status "terminated" is a proof: a 404 may come before the first listing."""
        if not machine.isalnum():
            return Absent()
        path = f"{_API}/instances/{machine}"
        found = self._client.seek("GET", path, _InstanceData, f"show instance {machine}")
        if found is not None:
            return self._rows.one(machine, found.data, self._seen)
        return self._rows.find(machine, self._instances(), self._seen) or Absent()

    def list_own(self) -> list[Machine]:
        return self._rows.own(self._instances(), self._seen)

    def destroy(self, machine: Machine, warrant: Warrant) -> None:
        if warranted(self, machine, warrant) is None:
            return
        body = {"instance_ids": [str(machine.id)]}
        path = f"{_API}/instance-operations/terminate"
        answer = self._client.ask("POST", path, _EndedData, body=body)
        if isinstance(answer, Refusal) and _fault(answer).code != _GONE:
            raise self._client.refused(answer, f"terminate instance {machine.id}")

    def residue(self) -> list[Residue]:
        """None: the disk goes with the instance, and torpor makes no file systems here."""
        return []

    def _offer(self, kind: _Type, region: str) -> Offer:
        return Offer(
            id=f"{kind.name}/{region}",
            provider=self.identity,
            gpu=parse_gpu(kind.gpu_description) if kind.specs.gpus else None,
            gpu_count=kind.specs.gpus,
            price_usd_h=kind.price_cents_per_hour / 100,
            region=region,
            disk_gib=kind.specs.storage_gib,
            domain=f"{kind.name} {region}",
            priced_unix=time.time(),
            available=True,
            architecture="aarch64" if "gh200" in kind.name else "x86_64",
            cuda=_CUDA,
            ram_gib=kind.specs.memory_gib,
            cores=kind.specs.vcpus,
        )

    def _registered(self, public_key: str) -> str:
        """The name of the key in the account; a launch must name exactly one."""
        if known := self._key_name(public_key):
            return known
        digest = hashlib.blake2b(_material(public_key).encode(), digest_size=8)
        body = {"name": f"torpor-{digest.hexdigest()}", "public_key": public_key}
        answer = self._client.ask("POST", f"{_API}/ssh-keys", _SshKeyData, body=body)
        if isinstance(answer, Refusal):
            # Another run may have added the key meanwhile, or this one before its answer was lost.
            if known := self._key_name(public_key):
                return known
            raise self._client.refused(answer, "register the SSH key")
        return answer.data.name

    def _key_name(self, public_key: str) -> str:
        """The name under which the account has this key, which may be the user's; else empty."""
        keys = self._client.read(_SshKeysData, f"{_API}/ssh-keys").data
        same = (key.name for key in keys if _material(key.public_key) == _material(public_key))
        return next(same, "")

    def _of_label(self, label: Label) -> Machine | None:
        own = [machine for machine in self.list_own() if machine.label == label]
        return own[0] if own else None

    def _instances(self) -> list[object]:
        return self._client.read(_InstancesData, f"{_API}/instances").data

    def _label_of(self, row: _Instance) -> Label | None:
        tags = {tag.key: tag.value for tag in row.tags or []}
        return label_among(tags) or self._adopted.get(row.id)

    def _seen(self, row: _Instance) -> Machine | Absent:
        if row.status == "terminated":
            return Absent(f"Lambda says that instance {row.id} is terminated")
        return self._machine(row)

    def _machine(self, row: _Instance) -> Machine:
        up = row.status in ("active", "unhealthy") and row.ip is not None
        ends = row.status in ("terminating", "preempted")
        endpoint = Endpoint(row.ip, self._ssh_port, "root") if up and row.ip else None
        return Machine(
            MachineId(row.id),
            self.identity,
            self._label_of(row),
            "stopping" if ends else "running" if up else "starting",
            endpoint,
            row.instance_type.price_cents_per_hour / 100 if row.instance_type else 0.0,
            f"Lambda says {row.status}",
        )


def _material(public_key: str) -> str:
    """A public key without its comment."""
    return " ".join(public_key.split()[:2])


def _refused(order: Order, refusal: Refusal) -> ProviderError:
    fault = _fault(refusal)
    asked = f"Lambda refused {order.offer.id}: {fault.code or refusal.status} {fault.message}"
    if fault.code == _CAPACITY:
        return NoCapacity(asked)
    if "quota" in fault.code:
        return QuotaReached(asked)
    if _denies(refusal):
        return ProviderDenied(f"{asked}. Check the key and the account")
    return CreateFailed(asked)


def _denies(refusal: Refusal) -> bool:
    return is_denied(refusal) or _fault(refusal).code in _DENIED


def _fault(refusal: Refusal) -> _Fault:
    error = refusal.body.get("error") if isinstance(refusal.body, dict) else None
    if not isinstance(error, dict):
        return _Fault("", refusal.text[:200])
    return _Fault(str(error.get("code", "")), str(error.get("message", "")))
