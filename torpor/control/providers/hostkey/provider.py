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
import msgspec

from torpor.control.providers.checks import to_mark, warranted
from torpor.control.providers.hostkey.answers import (
    concerns,
    deploy_fault,
    disk_gb,
    gpu_of,
    label_among,
    label_of,
    rows_in,
    status_of,
)
from torpor.control.providers.hostkey.client import Body, HostkeyClient, NoServers, is_gone
from torpor.control.providers.labels import label_name
from torpor.control.providers.market_client import TIMEOUT, Refusal
from torpor.control.providers.offers import Offer
from torpor.control.providers.provider import Abilities, Absent, Account, Order, Residue
from torpor.control.providers.rows import unread_machines, unread_offer
from torpor.control.providers.start_script import start_script
from torpor.control.safety import Warrant
from torpor.shared.errors import (
    CreateFailed,
    CreateUncertain,
    InvalidInput,
    NoCapacity,
    OrderUnpaid,
    ProviderDenied,
    ProviderError,
    QuotaReached,
    UnexpectedAnswer,
)
from torpor.shared.values import GIB, Endpoint, Label, Machine, MachineId, Want

URL: Final = "https://invapi.hostkey.com"
_SSH_PORT: Final = 22
_GB: Final = 1e9
ID_LOOKS: Final = 360  # looks for the id of an ordered server, and for its name: 90 minutes in all
_ID_WAIT_S: Final = 15.0
_POLL_S: Final = 10.0
"""Seconds between two looks, each of which is two requests. HOSTKEY states no limit; its own client
looks every 15 s (its Terraform provider 0.1.9, invapi/callback.go), and a server takes minutes to
be installed."""
_TAG_LOOK: Final = 3  # looks after which the name is also written as a tag
# seconds between two refused logins that together prove an account without servers
_EMPTY_S: Final = 60.0
_AT_ONCE: Final = "1"  # of request_cancellation; "0" is the end of the period
_LIVE: Final = frozenset({"rent", "power_off", "poweroff", "off", "stopped"})
_ENDED: Final = re.compile(r"cancel|terminat|delet|presale")  # statuses of an ended server
_SYSTEM: Final = re.compile(r"(?:Ubuntu 2[24]\.04|Debian 1[23])(?!\d)")
_PREPARED: Final = re.compile(r"cuda|nvidia|gpu", re.IGNORECASE)
_UNPAID: Final = re.compile(
    r"unpaid|not ?paid|(?:await|wait)\w* (?:for )?payment|payment pending|pending payment",
    re.IGNORECASE,
)
_INVOICED: Final = re.compile(r"invoice|unpaid|payment", re.IGNORECASE)
_REQUESTS: Final = re.compile(r"cancel|request")  # a key for their list, which is not documented
# statuses of a settled invoice
_SETTLED: Final = re.compile(r"^(?:paid|cancel|refund|draft)", re.IGNORECASE)
_MONEY: Final = re.compile(r"credit|balance|funds", re.IGNORECASE)
_ASKED: Final = re.compile(r"already|exists|pending|duplicate", re.IGNORECASE)
_CAPACITY: Final = re.compile(r"no (?:free|available|suitable)|out of stock|not available", re.I)
_QUOTA: Final = re.compile(r"quota|limit|verif", re.IGNORECASE)
_DENIED: Final = re.compile(r"permission|denied|authori[sz]ed|access|blocked", re.IGNORECASE)


class HostkeyProvider:
    """See ``providers.provider.Provider`` for the contract.

    The label is the host name, which is unique and goes with the order. A machine is its server's
    id, which HOSTKEY may tell only a while after it took the order: ``create`` waits for it.
    HOSTKEY gives no session to an account without servers, so keep one that is not torpor's. Its
    refused login proves nothing of a server that this object did not cancel.
    """

    abilities: Final = Abilities(
        kind="vm",
        privileged=True,
        host_key="installed",
        idempotency="lookup",
        settling_s=7200.0,  # HOSTKEY's own client waits 90 minutes for a new server
        ready_s=3600.0,
        poll_s=_POLL_S,
        stop_keeps="disk",  # the whole rent is billed on
        stopped_usd_gib_month=None,
        min_disk_gib=0.0,
        billing_s=3600.0,
        ending_s=43_200.0,
        notice_s=None,
        adopts="marked",
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
        self._client = HostkeyClient(url, api_key, account=account, timeout=timeout, sleep=sleep)
        self.identity, self.claimed = self._client.identity, self._client.claimed
        self._ssh_port = ssh_port
        self._sleep = sleep
        self._clock = clock
        self._cancelled: set[MachineId] = set()  # machines whose cancellation HOSTKEY has accepted

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
        servers = len(self._client.servers()[0])
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
        rows = told.get("presets")
        if not isinstance(rows, list):
            raise self._client.unexpected(told, "presets/info")
        return [offer for row in rows for offer in self._of_preset(row)]

    def create(self, order: Order) -> Machine:
        before, _ = self._client.servers()
        if (known := self._of_label(order.label, before)) is not None:
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
        if _UNPAID.search(str(answer.get("status") or "")):
            raise self._unpaid(order, f"invoice {answer.get('invoice')}")
        live = self._server_of(order, answer, before)
        return msgspec.structs.replace(live, price_usd_h=order.offer.price_usd_h)

    def find(self, machine: MachineId) -> Machine | Absent:
        """Proof is that the account does not have the server any more, by two questions after its
        session was told of new servers; or, after a cancellation that HOSTKEY accepted from this
        object, that two logins some time apart were refused because there are no servers."""
        if not machine.isdecimal():
            return Absent()
        try:
            return self._look(machine)
        except NoServers:
            if machine in self._cancelled and self._is_empty():
                return Absent(f"HOSTKEY says that the account of server {machine} has no servers")
            return Absent()

    def list_own(self) -> list[Machine]:
        """NoServers for an account without servers: see ``HostkeyProvider``."""
        return self._own(self._client.servers()[0])

    def destroy(self, machine: Machine, warrant: Warrant) -> None:
        """Cancels at once, unless a cancellation is under way; what is given back, HOSTKEY
        reckons."""
        live = warranted(self, machine, warrant)
        if live is None or live.state == "stopping":
            return
        answer = self._client.ask(
            "whmcs",
            "request_cancellation",
            id=machine.id,
            cancellation_type=_AT_ONCE,
            cancellation_reason="torpor",
        )
        if isinstance(answer, Refusal) and not is_gone(answer):
            asked = _ASKED.search(answer.text) or self._is_cancelled(machine.id)
            if not asked:
                raise self._client.failed(answer, f"cancel server {machine.id}")
        self._cancelled.add(machine.id)

    def mark(self, machine: Machine, label: Label | None) -> None:
        """See ``providers.provider.Adopts``. The label is a tag: the host name, which
        programs on the server may use, stays."""
        if to_mark(self, machine, label) and (ours := label or machine.label) is not None:
            fields = {"id": machine.id, "tag": "hostname", "value": label_name(ours)}
            answer = self._client.ask("tags", "add" if label else "remove", **fields)
            if isinstance(answer, Refusal):
                raise self._client.failed(answer, f"tag server {machine.id}")

    def residue(self) -> list[Residue]:
        """Unpaid invoices of our orders: a payment would start the server."""
        try:
            told = self._client.read("whmcs", "get_invoices", status="Unpaid")
        except NoServers:
            if self._is_empty():
                return []  # without servers, nobody can ask
            raise
        rows = told.get("invoices")
        if isinstance(rows, dict) and "invoice" in rows:  # as WHMCS nests them
            rows = rows["invoice"] if isinstance(rows["invoice"], list) else [rows["invoice"]]
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise self._client.unexpected(told, "whmcs/get_invoices")
        found = []
        for row in rows:
            label = None
            if not _SETTLED.search(str(row.get("status") or "")):
                label = label_among(row) or self._label_of_invoice(str(row.get("id")))
            if label is not None:
                found.append(
                    Residue(
                        id=str(row.get("id")), provider=self.identity, kind="invoice", label=label
                    )
                )
        return found

    def _label_of_invoice(self, invoice: str) -> Label | None:
        """A list of invoices may not say what they are for."""
        answer = self._client.ask("whmcs", "get_invoice", invoice_id=invoice)
        if isinstance(answer, Refusal) and not is_gone(answer):
            raise self._client.failed(answer, f"show invoice {invoice}")
        return None if isinstance(answer, Refusal) else label_among(answer)

    def _offer(self, row: dict[str, Any], place: str) -> Offer:
        gpu, count = gpu_of(row)
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
            disk_gib=disk_gb(str(row["hdd"])) * _GB / GIB,
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

    def _server_of(self, order: Order, answer: Body, before: set[str]) -> Machine:
        """The ordered server once it carries the order's name; CreateUncertain when HOSTKEY does
        not tell it in time, or says that there will be none. ``before``: the servers before the
        order, which are others."""
        server, callback = str(answer.get("id", "")), str(answer.get("callback") or "")
        invoice, named_late, over = str(answer.get("invoice")), 0, ""
        for look in range(ID_LOOKS):
            if look:
                self._sleep(_ID_WAIT_S)
            try:
                ids, updated = self._client.servers()
                keys = updated.get("deploy_keys")
                if not callback and isinstance(keys, dict):
                    callback = str(keys.get(invoice) or "")
                if not server.isdecimal() and callback:
                    server, over = self._deployed(callback, order.label)
                if over:  # a server that came with the last words is on a newer list
                    ids, _ = self._client.servers()
                known = self._of_label(order.label, ids - before)
                if known is not None:
                    return known
                if over:
                    raise self._client.uncertain(f"invoice {invoice} will have no server: {over}")
                if server in before:
                    raise self._client.uncertain(f"server {server} is older than the order")
                if server.isdecimal():
                    named_late += 1
                    self._name(MachineId(server), order.label, named_late)
            except CreateUncertain:
                raise
            except ProviderError as cause:
                raise self._client.uncertain(cause) from cause
        raise self._client.uncertain(
            f"server {server} of invoice {invoice} does not carry the order's name"
            if server.isdecimal()
            else f"invoice {invoice} has no server yet"
        )

    def _deployed(self, callback: str, label: Label) -> tuple[str, str]:
        """The id of the server that an order makes, empty while HOSTKEY does not say it; and why
        there will be none, empty while there may be one."""
        answer = self._client.ask("eq_callback", "check", key=callback)
        if isinstance(answer, Refusal):
            body = answer.body if isinstance(answer.body, dict) else {}
            # The key of an order that was deployed is gone, too: that alone says nothing.
            return "", "" if is_gone(answer) else deploy_fault(body, label)
        context = answer.get("context")
        server = str(context.get("id") or "") if isinstance(context, dict) else ""
        return server, "" if server else deploy_fault(answer, label)

    def _name(self, server: MachineId, label: Label, look: int) -> None:
        """Give a server of ours its name, which HOSTKEY does not always take from the order. What
        came of it, the next look at the server says."""
        live = self.find(server)
        if not isinstance(live, Machine) or live.label is not None:
            return
        self._client.ask("eq", "rename_server", id=server, hostname=label_name(label))
        if look == _TAG_LOOK:
            self._client.ask("tags", "add", id=server, tag="hostname", value=label_name(label))

    def _of_label(self, label: Label, ids: set[str]) -> Machine | None:
        return next((own for own in self._own(ids) if own.label == label), None)

    def _own(self, ids: set[str]) -> list[Machine]:
        """Those of these servers that carry a label of ours. MachineUnread, with these, where a
        server may carry one that cannot be read."""
        machines, unread = [], []
        for server in sorted(ids):
            if not server:
                unread.append("a server whose id cannot be read")
                continue
            try:
                found = self.find(MachineId(server))
            except UnexpectedAnswer as error:
                unread.append(f"server {server}: {error}")
                continue
            if isinstance(found, Machine) and found.label is not None:
                machines.append(found)
        if unread:
            raise unread_machines(self.identity, machines, unread)
        return machines

    def _of_preset(self, row: Any) -> list[Offer]:
        try:
            if int(row["active"]) != 1:
                return []
            return [self._offer(row, place) for place in str(row["locations"]).split(",")]
        except (KeyError, TypeError, ValueError) as cause:
            name = str(row.get("name") or "") if isinstance(row, dict) else ""
            return [unread_offer(self.identity, name, f"{type(cause).__name__} {cause}")]

    def _look(self, machine: MachineId) -> Machine | Absent:
        answer = self._client.ask("eq", "show", id=machine)
        if isinstance(answer, Refusal) and is_gone(answer):
            listed = self._may_list(machine)
            answer = self._client.ask("eq", "show", id=machine)
            if isinstance(answer, Refusal) and is_gone(answer):
                words = f"HOSTKEY has no server {machine} and does not list it"
                return Absent("" if listed else words)
        if isinstance(answer, Refusal):
            raise self._client.failed(answer, f"show server {machine}")
        seen, status = self._machine(machine, answer), status_of(answer)
        if status and status not in _LIVE and not self._may_list(machine):
            ended = f"HOSTKEY says {status} of server {machine} and does not list it"
            return Absent(ended if _ENDED.search(status) else "")
        if seen.label is not None and self._is_cancelled(machine):
            note = f"{seen.note}, and that its cancellation was requested"
            return msgspec.structs.replace(seen, state="stopping", note=note)
        return seen

    def _may_list(self, machine: MachineId) -> bool:
        """Whether HOSTKEY lists the server, or one whose id cannot be read."""
        return not {machine, ""}.isdisjoint(self._client.servers()[0])

    def _is_cancelled(self, machine: MachineId) -> bool:
        """Whether HOSTKEY has been asked to end the server and has not done so yet."""
        told = self._client.read("whmcs", "get_cancellation_requests", id=machine)
        held = {key: value for key, value in told.items() if isinstance(value, (list, dict))}
        lists = [value for key, value in held.items() if _REQUESTS.search(key)] or [*held.values()]
        if not lists:
            raise self._client.unexpected(told, "whmcs/get_cancellation_requests")
        return any(concerns(row, machine) for answer in lists for row in rows_in(answer))

    def _is_empty(self) -> bool:
        since = self._client.empty_since
        return since is not None and self._clock() - since >= _EMPTY_S

    def _machine(self, server: str, answer: Body) -> Machine:
        label, status, told = label_of(answer), status_of(answer), answer.get("IP")
        if label is None and not isinstance(answer.get("server_data"), dict):
            raise self._client.unexpected(answer, "eq/show")
        rows = told if isinstance(told, list) else []
        addresses = [
            row for row in rows if isinstance(row, dict) and isinstance(row.get("ip"), str)
        ]
        main = sorted(addresses, key=lambda row: str(row.get("main_ip")) != "1")
        up = status == "rent" and bool(main)
        stopped = status in _LIVE and status != "rent"
        ends = "cancel" in status
        return Machine(
            MachineId(server),
            self.identity,
            label,
            "stopping" if ends else "stopped" if stopped else "running" if up else "starting",
            Endpoint(str(main[0]["ip"]), self._ssh_port, "root") if up else None,
            0.0,  # not stated
            f"HOSTKEY says {status or 'nothing'}",
        )

    def _refused(self, order: Order, refusal: Refusal) -> ProviderError:
        """The error for a refused order. Only words that are known to mean so promise that nothing
        was ordered."""
        asked = f"HOSTKEY refused {order.offer.id}: {refusal.text[:200]}"
        body = refusal.body if isinstance(refusal.body, dict) else {}
        if body.get("invoice") or _INVOICED.search(refusal.text):
            return self._unpaid(order, f"invoice {body.get('invoice') or refusal.text[:200]}")
        if _MONEY.search(refusal.text):
            return ProviderDenied(f"{asked}. Add funds in HOSTKEY's panel: it sells in advance")
        if _CAPACITY.search(refusal.text):
            return NoCapacity(asked)
        if _QUOTA.search(refusal.text):
            return QuotaReached(asked)
        if refusal.status in (401, 403) or _DENIED.search(refusal.text):
            return ProviderDenied(f"{asked}. Check the key and its permissions")
        return self._client.uncertain(refusal)

    def _unpaid(self, order: Order, what: str) -> ProviderError:
        return OrderUnpaid(
            f"HOSTKEY took the order of {order.offer.id}, which the account's credit does not pay "
            f"({what}): cancel the invoice in HOSTKEY's panel, or a payment will start the server. "
            "The attempt is abandoned; reconcile ends the server if it appears"
        )


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
