"""Example: virtual machines on demand.

https://docs.example.com/api. There is no spot and no stop.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, Final

import httpx
import msgspec

from torpor.control.providers.checks import warranted
from torpor.control.providers.gpus import parse_gpu
from torpor.control.providers.labels import label_in, label_name
from torpor.control.providers.market_client import TIMEOUT, MarketClient, Refusal, is_denied
from torpor.control.providers.offers import Offer
from torpor.control.providers.provider import Abilities, Absent, Account, Order, Residue
from torpor.control.providers.refusals import create_refused
from torpor.control.providers.rows import Rows, offered
from torpor.control.providers.start_script import start_script
from torpor.control.safety import Warrant
from torpor.shared.errors import InvalidInput
from torpor.shared.values import Endpoint, Machine, MachineId, MachineState, Want

URL: Final = "https://api.example.com"
_STATES: Final[dict[str, MachineState]] = {"booting": "starting", "active": "running"}


class _Account(msgspec.Struct):
    name: str
    balance_usd: float


class _Ware(msgspec.Struct):
    id: str
    gpu: str
    gpus: int
    usd_h: float
    region: str
    disk_gib: float
    stock: int


class _Instance(msgspec.Struct):
    id: str = ""
    name: str | None = None
    status: str = ""
    usd_h: float = 0.0
    ip: str | None = None


class _Made(msgspec.Struct):
    id: str


class ExampleProvider:
    """See ``providers.provider.Provider`` for the contract."""

    abilities: Final = Abilities(
        kind="vm",
        privileged=True,
        host_key="installed",
        idempotency="lookup",
        settling_s=300.0,
        forgets_s=3600.0,  # how long an ended machine is shown is not stated
        ready_s=1200.0,
        stop_keeps="nothing",
        stopped_usd_gib_month=None,
        min_disk_gib=0.0,
        billing_s=60.0,
        notice_s=None,
        images=False,
    )

    def __init__(
        self,
        api_key: str,
        *,
        account: str = "",
        url: str = URL,
        ssh_port: int = 22,
        timeout: httpx.Timeout = TIMEOUT,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._client = MarketClient(
            "example", url, api_key, identity=account, timeout=timeout, sleep=sleep
        )
        self.identity, self.claimed = self._client.identity, self._client.claimed
        self._rows = Rows(
            self.identity,
            _Instance,
            id_of=lambda row: row.id,
            label_of=lambda row: label_in(row.name or ""),
            exact=["name"],
        )
        self._ssh_port = ssh_port

    def check(self, image: str = "") -> Account:
        if image:
            raise InvalidInput(f"Example's machines have its own image, not {image}: name none")
        self._instances()
        account = self._client.read(_Account, "/account")
        return Account(name=account.name, balance_usd=account.balance_usd)

    def offers(self, want: Want) -> list[Offer]:
        if want.spot == "only":
            return []
        wares = self._client.read(list[Any], "/offers")
        return offered(self.identity, _Ware, wares, lambda ware: [self._offer(ware)])

    def create(self, order: Order) -> Machine:
        if own := [machine for machine in self.list_own() if machine.label == order.label]:
            return own[0]
        body: dict[str, Any] = {
            "offer": order.offer.id,
            "name": label_name(order.label),
            "ssh_key": order.public_key,
            "user_data": start_script(order),
        }
        answer = self._client.create("POST", "/instances", _Made, body)
        if isinstance(answer, Refusal):
            raise create_refused("Example", order, answer, denied=is_denied(answer))
        price = order.offer.price_usd_h
        return Machine(MachineId(answer.id), self.identity, order.label, "starting", None, price)

    def find(self, machine: MachineId) -> Machine | Absent:
        """Only the status "ended" is a proof: an id that is not known may be known later."""
        if not re.fullmatch(r"[a-z0-9-]+", machine):
            return Absent()
        told = self._client.seek("GET", f"/instances/{machine}", dict[str, Any], f"show {machine}")
        return Absent() if told is None else self._rows.one(machine, told, self._seen)

    def list_own(self) -> list[Machine]:
        return self._rows.own(self._instances(), self._seen)

    def destroy(self, machine: Machine, warrant: Warrant) -> None:
        if warranted(self, machine, warrant) is not None:
            path = f"/instances/{machine.id}"
            self._client.seek("DELETE", path, type(None), f"end instance {machine.id}")

    def residue(self) -> list[Residue]:
        """None: disk and address go with the instance, and torpor stores nothing else there."""
        return []

    def _offer(self, ware: _Ware) -> Offer:
        return Offer(
            id=ware.id,
            provider=self.identity,
            gpu=parse_gpu(ware.gpu) if ware.gpus else None,
            gpu_count=ware.gpus,
            price_usd_h=ware.usd_h,
            region=ware.region,
            disk_gib=ware.disk_gib,
            domain=f"{ware.gpu} {ware.region}",
            priced_unix=time.time(),
            available=ware.stock > 0,
        )

    def _instances(self) -> list[Any]:
        return self._client.read(list[Any], "/instances")

    def _seen(self, row: _Instance) -> Machine | Absent:
        if row.status == "ended":
            return Absent(f"Example says that instance {row.id} has ended")
        endpoint = Endpoint(row.ip, self._ssh_port, "root") if row.ip else None
        state = _STATES.get(row.status, "stopping")
        note = f"Example says {row.status}"
        number, label = MachineId(row.id), label_in(row.name or "")
        return Machine(number, self.identity, label, state, endpoint, row.usd_h, note)
