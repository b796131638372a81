"""HOSTKEY: dedicated and virtual servers with GPUs, paid for in advance and billed by the hour.

https://hostkey.com/documentation/apidocs. An order pays a month; a cancellation at once gives back
to the account's credit what was not used, but for up to 12 hours that it takes to carry out. A
cancellation to the end of the period gives nothing back: torpor always cancels at once.
"""

from __future__ import annotations

import calendar
import re
import secrets
import string
import time
from collections.abc import Callable
from typing import Any, Final

import httpx

from torpor.control.providers.ending import warranted
from torpor.control.providers.gpus import Gpu, parse_gpu
from torpor.control.providers.hostkey_client import Body, HostkeyClient, NoServers, is_gone
from torpor.control.providers.labels import label_in, label_name
from torpor.control.providers.market_client import TIMEOUT, Refusal
from torpor.control.providers.offers import Offer
from torpor.control.providers.seam import Abilities, Absent, Account, Order, Residue
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
from torpor.shared.values import GIB, Endpoint, Label, Machine, MachineId, Want

URL: Final = "https://invapi.hostkey.com"
_SSH_PORT: Final = 22
_GB: Final = 1e9
_ID_LOOKS: Final = 40  # for the id of a server that was ordered
_ID_WAIT_S: Final = 15.0
_AT_ONCE: Final = "1"  # of request_cancellation; "0" is the end of the period
_LIVE: Final = frozenset({"rent", "power_off", "poweroff", "off", "stopped"})
_SYSTEM: Final = re.compile(r"(?:Ubuntu 2[24]\.04|Debian 1[23])(?!\d)")
_PREPARED: Final = re.compile(r"cuda|nvidia|gpu", re.IGNORECASE)
_MONEY: Final = re.compile(r"credit|balance|funds|unpaid|payment", re.IGNORECASE)
_CAPACITY: Final = re.compile(r"no (?:free|available|suitable)|out of stock|not available", re.I)
_QUOTA: Final = re.compile(r"quota|limit|verif", re.IGNORECASE)
_DENIED: Final = re.compile(r"permission|denied|authori[sz]ed|access|blocked", re.IGNORECASE)


class HostkeyProvider:
    """See ``torpor.control.providers.seam.Provider`` for the contract.

    The label is the host name, which is unique and goes with the order. A machine is its server's
    id, which HOSTKEY may tell only a while after it took the order: ``create`` waits for it.
    HOSTKEY gives no session to an account without servers, so keep one that is not torpor's.
    """

    abilities: Final = Abilities(
        kind="vm",
        privileged=True,
        host_key="installed",
        idempotency="lookup",
        settling_s=3600.0,
        ready_s=3600.0,
        stop_keeps="disk",  # and the whole rent runs on
        stopped_usd_gib_month=None,
        min_disk_gib=0.0,
        billing_s=3600.0,
        ending_s=43_200.0,
        notice_s=None,
    )

    def __init__(
        self,
        api_key: str,
        *,
        url: str = URL,
        ssh_port: int = _SSH_PORT,
        timeout: httpx.Timeout = TIMEOUT,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._client = HostkeyClient(url, api_key, timeout=timeout, sleep=sleep)
        self._ssh_port = ssh_port
        self._sleep = sleep

    @property
    def identity(self) -> str:
        return self._client.identity

    def check(self, image: str = "") -> Account:
        """NoServers, with what to do, for an account without servers."""
        if image and not _SYSTEM.match(image):
            raise InvalidInput(
                f"{image} is no system of HOSTKEY that torpor can use: leave the image empty, or "
                "write one of Ubuntu 22.04, Debian 12 or newer as HOSTKEY does"
            )
        told = self._client.read("whmcs", "get_client")
        client = told.get("client")
        if not isinstance(client, dict) or "id" not in client:
            raise self._client.unexpected(sorted(told), "whmcs/get_client")
        servers = len(self._ids())
        notes = [
            "HOSTKEY refuses the login of an account without servers: keep one that is not "
            f"torpor's. There are {servers} now",
            "an order pays a month in advance; the cancellation at once gives the unused part back "
            "to the credit, but for up to 12 hours",
        ]
        return Account(name=f"client {client['id']}", notes=notes)

    def offers(self, want: Want) -> list[Offer]:
        if want.spot == "only":
            return []
        told = self._client.public("presets", "info", currencies="USD")
        try:
            return [
                self._offer(row, place)
                for row in told["presets"]
                if int(row["active"]) == 1
                for place in str(row["locations"]).split(",")
            ]
        except (KeyError, TypeError, ValueError) as cause:
            raise self._client.unexpected(f"{cause!r} in {told}", "presets/info") from cause

    def create(self, order: Order) -> Machine:
        if (known := self._of_label(order.label)) is not None:
            return known
        preset, number, place = _offer_parts(order.offer.id)
        form = {
            "preset": preset,
            "location_name": place,
            "os_id": self._system(order, number, place),
            "traffic_plan": self._traffic(order, number, place),
            "hostname": label_name(order.label),
            "root_pass": _password(),
            "ssh_key": order.public_key,
            "post_install_script": start_script(order),
            "deploy_period": "hourly",
            "deploy_notify": "false",
        }
        answer = self._client.order(form)
        if isinstance(answer, Refusal):
            raise self._refused(order, answer)
        if str(answer.get("status", "Paid")).lower() == "unpaid":
            raise ProviderDenied(
                f"HOSTKEY took the order of {order.offer.id} with invoice {answer.get('invoice')} "
                "that the account's credit does not pay: cancel the invoice in HOSTKEY's panel, or "
                "a payment will start the server"
            )
        server = self._server_of(order, answer)
        price = order.offer.price_usd_h
        return Machine(MachineId(server), self.identity, order.label, "starting", None, price)

    def find(self, machine: MachineId) -> Machine | Absent:
        """Proof is that the account does not have the server any more, by two questions, or that it
        has no servers at all: a key that could not see them could not have ordered this one."""
        if not machine.isdecimal():
            return Absent()
        try:
            answer = self._client.ask("eq", "show", id=machine)
            listed = isinstance(answer, dict) or machine in self._ids()
        except NoServers:
            return Absent(f"HOSTKEY says that the account of server {machine} has no servers")
        if isinstance(answer, Refusal):
            if not is_gone(answer):
                raise self._client.failed(answer, f"show server {machine}")
            if listed:
                return Absent()
            return Absent(f"HOSTKEY has no server {machine} and does not list it")
        seen = self._machine(machine, answer)
        status = _status(answer)
        if status not in _LIVE and status and machine not in self._ids():
            return Absent(f"HOSTKEY says {status} of server {machine} and does not list it")
        return seen

    def list_own(self) -> list[Machine]:
        try:
            found = [self.find(MachineId(server)) for server in self._ids()]
        except NoServers:
            return []
        return [one for one in found if isinstance(one, Machine) and one.label is not None]

    def destroy(self, machine: Machine, warrant: Warrant) -> None:
        """Cancels at once; what is given back, HOSTKEY reckons."""
        if warranted(self, machine, warrant) is None:
            return
        answer = self._client.ask(
            "whmcs",
            "request_cancellation",
            id=machine.id,
            cancellation_type=_AT_ONCE,
            cancellation_reason="torpor",
        )
        if isinstance(answer, Refusal) and not is_gone(answer):
            raise self._client.failed(answer, f"cancel server {machine.id}")

    def residue(self) -> list[Residue]:
        """Unpaid invoices of our orders: a payment would start the server. An account without
        servers cannot be asked."""
        try:
            told = self._client.read("whmcs", "get_invoices", status="Unpaid")
        except NoServers:
            return []
        rows = told.get("invoices")
        if not isinstance(rows, list):
            raise self._client.unexpected(sorted(told), "whmcs/get_invoices")
        found = []
        for row in rows:
            labels = [label_in(word) for word in re.findall(r"torpor\.[\w.-]*\w", str(row))]
            label = next((one for one in labels if one is not None), None)
            if label is not None and isinstance(row, dict):
                found.append(
                    Residue(
                        id=str(row.get("id")), provider=self.identity, kind="invoice", label=label
                    )
                )
        return found

    def _offer(self, row: dict[str, Any], place: str) -> Offer:
        gpu, count = _gpu(row)
        now = time.gmtime()
        hours = calendar.monthrange(now.tm_year, now.tm_mon)[1] * 24
        memory = float(row["ram"])
        return Offer(
            id=f"{row['name']}/{row['id']}/{place.strip()}",
            provider=self.identity,
            gpu=gpu,
            gpu_count=count,
            price_usd_h=float(row["price"]["USD"]) / hours,
            region=place.strip(),
            disk_gib=_disk_gb(str(row["hdd"])) * _GB / GIB,
            domain=f"{row['name']} {place.strip()}",
            priced_unix=time.time(),
            ram_gib=memory / 1024 if memory > 4096 else memory,  # of both, there are examples
            cores=float(row["cpu"]),
        )

    def _system(self, order: Order, number: str, place: str) -> str:
        """The id of the system to install: as ordered, or the best prepared one."""
        fields = {"instance_id": number, "location": place}
        rows = self._rows("os", "os_list", fields)
        fits = [
            row
            for row in rows
            if (row["name"] == order.image if order.image else _SYSTEM.match(str(row["name"])))
        ]
        if not fits:
            wanted = order.image or "Ubuntu 22.04, Debian 12 or newer"
            raise CreateFailed(f"HOSTKEY has no {wanted} for {order.offer.id}")
        fits.sort(key=lambda row: not _PREPARED.search(str(row["name"])))
        return str(fits[0]["id"])

    def _traffic(self, order: Order, number: str, place: str) -> str:
        """A plan that costs nothing, so that the offer's price is that of everything."""
        fields = {"instance": number, "location": place}
        rows = self._rows("traffic_plans", "traffic_plans", fields)
        free = [row for row in rows if float(row.get("price") or 0) == 0]
        if not free:
            raise CreateFailed(f"HOSTKEY has no free traffic plan for {order.offer.id}")
        return str(free[0]["id"])

    def _rows(self, module: str, field: str, fields: dict[str, str]) -> list[dict[str, Any]]:
        told = self._client.public(module, "list", **fields)
        rows = told.get(field)
        if not isinstance(rows, list) or not all("id" in row and "name" in row for row in rows):
            raise self._client.unexpected(told, f"{module}/list")
        return [row for row in rows if row.get("active", 1)]

    def _server_of(self, order: Order, answer: Body) -> str:
        """The id of the ordered server; CreateUncertain when HOSTKEY does not tell it in time."""
        if re.fullmatch(r"[1-9]\d*", str(answer.get("id", ""))):
            return str(answer["id"])
        for look in range(_ID_LOOKS):
            if look:
                self._sleep(_ID_WAIT_S)
            try:
                known = self._of_label(order.label)
            except ProviderError as cause:
                raise self._client.uncertain(cause) from cause
            if known is not None:
                return str(known.id)
        raise self._client.uncertain(f"invoice {answer.get('invoice')} has no server yet")

    def _of_label(self, label: Label) -> Machine | None:
        own = [machine for machine in self.list_own() if machine.label == label]
        return own[0] if own else None

    def _ids(self) -> list[str]:
        """Of every server of the account, which HOSTKEY lists as numbers, words or records."""
        told = self._client.read("eq", "list")
        rows = told.get("servers")
        if not isinstance(rows, list):
            raise self._client.unexpected(told, "eq/list")
        ids = [str(row.get("id") if isinstance(row, dict) else row) for row in rows]
        if not all(one.isdecimal() for one in ids):
            raise self._client.unexpected(told, "eq/list")
        return ids

    def _machine(self, server: str, answer: Body) -> Machine:
        status, addresses = _status(answer), answer.get("IP") or []
        if not isinstance(answer.get("server_data"), dict) or not isinstance(addresses, list):
            raise self._client.unexpected(answer, "eq/show")
        main = sorted(addresses, key=lambda row: str(row.get("main_ip")) != "1")
        up = status == "rent" and bool(main)
        stopped = status in _LIVE and status != "rent"
        ends = bool(status) and "cancel" in status
        return Machine(
            MachineId(server),
            self.identity,
            label_in(_host_name(answer)),
            "stopping" if ends else "stopped" if stopped else "running" if up else "starting",
            Endpoint(str(main[0]["ip"]), self._ssh_port, "root") if up else None,
            0.0,  # not stated
            f"HOSTKEY says {status or 'nothing'}",
        )

    def _refused(self, order: Order, refusal: Refusal) -> ProviderError:
        """Only words that are known to mean so promise that nothing was ordered."""
        asked = f"HOSTKEY refused {order.offer.id}: {refusal.text[:200]}"
        if _MONEY.search(refusal.text):
            return ProviderDenied(f"{asked}. Add funds in HOSTKEY's panel: it sells in advance")
        if _CAPACITY.search(refusal.text):
            return NoCapacity(asked)
        if _QUOTA.search(refusal.text):
            return QuotaReached(asked)
        if refusal.status in (401, 403) or _DENIED.search(refusal.text):
            return ProviderDenied(f"{asked}. Check the key and its permissions")
        return self._client.uncertain(refusal)


def _status(answer: Body) -> str:
    data = answer.get("server_data")
    return str(data.get("status") or "").lower() if isinstance(data, dict) else ""


def _host_name(answer: Body) -> str:
    """In server_data, or in the tags, where it stands mostly."""
    data = answer.get("server_data")
    if isinstance(data, dict) and isinstance(data.get("hostname"), str) and data["hostname"]:
        return str(data["hostname"])
    tags = answer.get("tags")
    rows = [row for row in tags if isinstance(row, dict)] if isinstance(tags, list) else []
    names = [row.get("value") for row in rows if row.get("tag") == "hostname"]
    return str(names[0]) if names else ""


def _gpu(row: dict[str, Any]) -> tuple[Gpu | None, int]:
    """In ``gpu`` where it stands, else in the preset's name: gpu.v2-2xa5000."""
    name = str(row["name"])
    text = str(row.get("gpu") or "")
    if not text:
        if not re.match(r"v?gpu\.", name):
            return None, 0
        text = name.rpartition("-")[2]
    counted = re.match(r"\s*(\d+) ?x ?(.*)", text)
    gpu = parse_gpu(counted[2] if counted else text)
    return gpu, (int(counted[1]) if counted else 1) if gpu else 0


def _disk_gb(text: str) -> float:
    """Of one disk: "2x960" is 960, on which the system is."""
    found = re.search(r"(?:\d+x)?(\d+(?:\.\d+)?)\s*(t?)", text.lower())
    return float(found[1]) * (1000 if found[2] else 1) if found else 0.0


def _offer_parts(offer: str) -> tuple[str, str, str]:
    parts = offer.split("/")
    if len(parts) != 3 or not parts[1].isdecimal():
        raise CreateFailed(f"{offer!r} is no offer of HOSTKEY")
    return parts[0], parts[1], parts[2]


def _password() -> str:
    """HOSTKEY demands one of 8 to 30 characters of four kinds. Nobody keeps it, and sshd, once the
    start script ran, takes none."""
    kinds = (string.ascii_uppercase, string.ascii_lowercase, string.digits, "%-_+")
    return "".join(secrets.choice(kind) for kind in kinds * 6)
