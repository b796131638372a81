"""A fake of HOSTKEY's InvAPI: forms, sessions, presets, orders, servers, cancellations, invoices.

A session knows the servers of its beginning until ``eq/update_servers``. A cancellation is accepted
at once and carried out ``cancel_s`` later.
Its words and shapes are those of HOSTKEY's documentation and of the fixtures of HOSTKEY's own
Terraform provider, where several are possible. There is no specification to check it against.
"""

from __future__ import annotations

import calendar
import hashlib
import itertools
import time
from typing import Any, ClassVar, Final, Literal
from urllib.parse import parse_qsl

from tests.markets.market import Market, Rented, Ware
from tests.markets.server import Answer, FakeMarket, Request
from torpor.control.providers.hostkey.provider import HostkeyProvider

OWN_SERVER: Final = 1001
FIRST_SERVER: Final = 7_700_000
_FIRST_INVOICE: Final = 603_548
_PERIODS: Final = {"hourly", "monthly", "quarterly", "semi-annually", "annually"}
_ORDER: Final = {
    "preset", "location_name", "os_id", "soft_id", "traffic_plan", "root_pass", "hostname",
    "ssh_key", "post_install_script", "deploy_period", "deploy_notify", "root_size", "disk_mirror",
}  # fmt: skip
_PUBLIC: Final = {"/presets.php", "/os.php", "/traffic_plans.php"}
_SYSTEMS: Final = (
    {"id": 187, "name": "Debian 11", "active": 1},
    {"id": 199, "name": "Debian 12", "active": 1},
    {"id": 211, "name": "Ubuntu 22.04", "active": 0},
    {"id": 240, "name": "Ubuntu 22.04 + NVIDIA CUDA", "active": 1},
    {"id": 188, "name": "Windows Server 2022", "active": 1},
)
_PLANS: Final = (
    {"id": 25, "name": "1Gbps unmetered", "active": 1, "price": 99.0, "main_plan": 0},
    {"id": 31, "name": "1Gbps 50TB - FREE", "active": 1, "price": 0, "main_plan": 1},
)


def hostkey_wares() -> list[Ware]:
    """``name`` is the preset, ``region`` a location."""
    return [
        Ware("RTX A5000", 1, 24, 0.42, "NL", name="gpu.v2-a5000", disk_gib=960),
        Ware("RTX A5000", 1, 24, 0.42, "US", name="gpu.v2-a5000", disk_gib=960),
        Ware("H100", 1, 80, 2.40, "NL", name="gpu.h100", disk_gib=1920),
        Ware("H100", 1, 80, 2.40, "US", name="gpu.h100", disk_gib=1920),
        Ware("", 0, 0, 0.01, "DE", name="vm.pico", disk_gib=20, ram_gib=2, cores=1),
    ]


class FakeHostkey(FakeMarket):
    """``own_servers``: those of the account that are not in the market's books; with none at all,
    nobody is let in. ``ended_status``: what is said of a cancelled server; empty: not found.
    ``live_status``: what is said of one that runs. ``takes_names``: what gives a server its name.
    """

    own_servers: int = 1
    listed_as: Literal["records", "numbers", "words"] = "records"
    named_in: Literal["tags", "server_data", "nested"] = "tags"
    takes_names: frozenset[str] = frozenset({"order_instance", "rename_server", "tags"})
    token_in: Literal["result", "answer"] = "result"
    id_in_order: bool = False
    callbacks: Literal["", "order", "update_servers"] = ""  # who tells an order's key
    callback_says: dict[str, Any] | None = None  # of an order's key, whatever became of it
    success: Any = "OK"  # what a good answer has for its result; None: nothing
    takes_unpaid: str = ""  # the status of an order that nobody paid
    invoices_as: Literal["list", "nested", "bare"] = "list"
    cancel_s: float = 0.0
    unnamed_looks: int = 0  # answers that still say hostkey{id} for the host name
    ended_status: str = ""
    live_status: str = "rent"
    unlisted: bool = False  # show answers, the lists do not
    filters: bool = True  # cancellations by server
    late_lists: int = 0  # answers that do not tell the cancellations yet
    order_refusal: dict[str, Any] | None = None
    expired: Answer | None = None  # instead of words about the token
    sessions: int = 0
    told_at_login: Any = None  # instead of a session

    adapter = HostkeyProvider
    wares = staticmethod(hostkey_wares)
    body = "vm"
    given_port = True
    routes: ClassVar = {
        "/auth.php login": ("account", "_login"),
        "/presets.php info": ("offers", "_presets"),
        "/os.php list": ("offers", {"result": "OK", "os_list": _SYSTEMS}),
        "/traffic_plans.php list": ("offers", {"result": "OK", "traffic_plans": _PLANS}),
        "/eq.php order_instance": ("create", "_order"),
        "/eq.php list": ("list", "_list"),
        "/eq.php show": ("find", "_show"),
        "/eq.php update_servers": ("account", "_update"),
        "/eq.php rename_server": ("account", "_rename"),
        "/tags.php add": ("account", "_rename"),
        "/tags.php remove": ("account", "_rename"),
        "/eq_callback.php check": ("account", "_check"),
        "/whmcs.php get_invoice": ("account", "_invoice"),
        "/whmcs.php get_cancellation_requests": ("account", "_cancellations"),
        "/whmcs.php get_client": (
            "account",
            {"result": "OK", "client": {"id": 4711, "credit": "100.00"}},
        ),
        "/whmcs.php get_invoices": ("account", "_invoices"),
        "/whmcs.php request_cancellation": ("destroy", "_cancel"),
    }
    words: ClassVar = {
        "no capacity": ("No available servers for this preset",),
        "quota": ("Server limit is reached for your account, please pass the verification",),
        "denied": ("Permission denied for this key",),
        "no money": ("Insufficient credit balance",),
        "no route": ("Unknown action",),
    }

    @staticmethod
    def error(words: str) -> Answer:
        return Answer(200, {"result": -1, "error": words})

    def __init__(self, market: Market | None = None) -> None:
        super().__init__(market)
        self.invoices: dict[int, dict[str, Any]] = {}
        self.cancellations: dict[str, float] = {}  # server: when it is carried out
        self.cancelled: list[str] = []  # servers, each time one was asked for
        self.instead: dict[str, Answer] = {}  # by action
        self._numbers = itertools.count(_FIRST_INVOICE)
        self._names: dict[str, str] = {}
        self._known: set[str] = set()  # to the session

    # -- FakeMarket

    def login_of(self, request: Request, header: str) -> str:
        """The key and the session are in the form; business requests never have the key."""
        form = dict(parse_qsl(request.body or "")) if isinstance(request.body, str) else {}
        is_order = request.path == "/eq_callback.php"  # its key is that of an order
        key, token = "" if is_order else form.pop("key", ""), form.pop("token", "")
        request.body = form
        if request.path == "/auth.php":
            return f"Bearer {key}"
        assert not key, "only a login has the account's key"
        allowed = request.path in _PUBLIC or token == self._token()
        return f"Bearer {self.key}" if allowed else "Bearer -"

    def asked(self, request: Request) -> str:
        return f"{request.path} {request.body.get('action', '')}"

    def hand_id(self, number: int) -> str:
        return str(7_900_000 + number)

    def handle(self, request: Request) -> Answer:
        told = self.instead.get(request.body.get("action", ""))
        if told and not request.has("denied"):
            return told
        answer = self._handled(request)
        if isinstance(answer.body, dict) and answer.body.get("result") == "OK":
            result = {} if self.success is None else {"result": self.success}
            answer.body = {**result, **{k: v for k, v in answer.body.items() if k != "result"}}
        return answer

    def _handled(self, request: Request) -> Answer:
        for server, due_unix in [*self.cancellations.items()]:
            machine = self._alive(server)
            if machine is not None and due_unix <= self.market.clock.now_unix:
                self.market.end(machine)
            if machine is None or not machine.alive:
                del self.cancellations[server]
        return super().handle(request)

    def unauthorized(self) -> Answer:
        return self.expired or self.error("Invalid token or incorrect API key")

    def error_body(self, request: Request) -> Answer:
        return Answer(200, {"code": -1, "message": "Internal server error"})

    # -- one module each

    def _token(self) -> str:
        return hashlib.sha256(f"{self.key} {self.sessions}".encode()).hexdigest()[:32]

    def _login(self, request: Request) -> Answer:
        assert request.body.get("fix_ip") == "0", "a session is not for one address"
        if self.told_at_login is not None:
            return Answer(200, self.told_at_login)
        if not self.own_servers and not self.market.alive():
            words = {"code": "NO_APPROPRIATE_SERVERS", "message": "No appropriate servers found"}
            return Answer(200, {"result": -1, **words})
        self._known = {m.id for m in self.market.alive() if not m.hidden_looks}
        told = {"token": self._token(), "token_expire": int(time.time()) + 3600, "servers": []}
        return Answer(200, {"result": told} if self.token_in == "result" else told)

    def _presets(self, request: Request) -> Answer:
        now = time.gmtime()
        hours = calendar.monthrange(now.tm_year, now.tm_mon)[1] * 24
        rows: dict[str, dict[str, Any]] = {}
        for number, ware in enumerate(self.market.wares, 101):
            usd = ware.usd_h * hours
            new = {
                "id": number,
                "name": ware.name,
                "cpu": ware.cores,
                "ram": int(ware.ram_gib),
                "hdd": f"2x{ware.disk_gib:.0f}" if ware.gpu else int(ware.disk_gib),
                "gpu": ware.gpu or None,
                "virtual": 0 if ware.gpu else 1,
                "active": 0,
                "description": ware.name,
                "locations": "",
                "price": {"EUR": usd * 0.9, "USD": usd},
            }
            row = rows.setdefault(ware.name, new)
            if ware.stock > 0:
                row["active"] = 1
                row["locations"] = ",".join(filter(None, [row["locations"], ware.region]))
        return _ok(presets=list(rows.values()))

    def _order(self, request: Request) -> Answer:
        asked: dict[str, str] = request.body
        if self.order_refusal is not None:
            return Answer(200, {"result": -1, **self.order_refusal})
        if refused := self.refusal(request):
            return refused
        if fault := _faulty(asked):
            return self.error(f"Wrong parameter: {fault}")
        wanted = (asked["preset"], asked["location_name"])
        placed = [ware for ware in self.market.wares if (ware.name, ware.region) == wanted]
        if not placed or placed[0].stock <= 0:
            return self.error(*self.words["no capacity"])
        invoice = next(self._numbers)
        line = f"{asked['preset']} - {asked['hostname']} (01/11/2026 - 30/11/2026)"
        self.invoices[invoice] = {
            "id": invoice,
            "status": "Unpaid" if self.takes_unpaid else "Paid",
            "server": "",
            "items": [{"description": line}],
        }
        told = {"action": "order_instance", "invoice": invoice}
        if self.takes_unpaid:
            return _ok(**told, status=self.takes_unpaid)
        machine = self.market.rent(
            placed[0],
            asked["hostname"],
            asked,
            id_of=lambda number: str(FIRST_SERVER + number),
            script=asked["post_install_script"],
        )
        self.invoices[invoice]["server"] = machine.id
        if "order_instance" in self.takes_names:
            self._names[machine.id] = asked["hostname"]
        if request.has("error that created"):
            return self.error("Timeout while the order was processed")
        known = {"id": machine.id} if self.id_in_order else {}
        if self.callbacks == "order":
            known["callback"] = f"cb-{invoice}"
        return _ok(**told, **known, status="Paid")

    def _update(self, request: Request) -> Answer:
        """Each is one look at the servers that are listed late."""
        self._known = set() if self.unlisted else {m.id for m in self.market.visible()}
        keys = {str(number): f"cb-{number}" for number in self.invoices}
        return _ok(
            servers=[int(server) for server in sorted(self._known)],
            billing_servers=[],
            deploy_keys=keys if self.callbacks == "update_servers" else [],
        )

    def _check(self, request: Request) -> Answer:
        if self.callback_says is not None:
            return Answer(200, self.callback_says)
        invoice = self.invoices.get(int(request.body["key"].removeprefix("cb-")), {})
        machine = self._alive(invoice.get("server", ""))
        if machine is None:
            return Answer(200, {"code": -1, "message": "AsyncKey not found"})
        if machine.hidden_looks:
            return _ok(action="check", scope={"location": machine.ware.region}, context=[])
        told = {"action": "deploy", "id": int(machine.id), "password": "censored"}
        return _ok(action="check", scope={}, context=told)

    def _rename(self, request: Request) -> Answer:
        asked: dict[str, str] = request.body
        if asked["id"] not in self._known:
            return self.error("Server not found")
        if asked["action"] == "rename_server" and "rename_server" in self.takes_names:
            self._names[asked["id"]] = asked["hostname"]
        if asked["action"] == "add" and "tags" in self.takes_names:
            assert asked["tag"] == "hostname"
            self._names[asked["id"]] = asked["value"]
        if asked["action"] == "remove":
            self._names.pop(asked["id"], None)
        return _ok(action=asked["action"])

    def _list(self, request: Request) -> Answer:
        known = set() if request.has("not found") else self._known
        shown = [machine for machine in self.market.alive() if machine.id in known]
        rows = [
            {
                "id": int(machine.id),
                "status": "rent",
                "hostname": machine.label,
                "location": machine.ware.region,
            }
            for machine in shown
        ]
        own = {"id": OWN_SERVER, "status": "rent", "hostname": "mine", "location": "NL"}
        rows += [own] * min(self.own_servers, 1)
        if self.listed_as == "records":
            return _ok(servers=rows)
        return _ok(servers=[row["id"] if self.listed_as == "numbers" else str(row["id"])
                            for row in rows])  # fmt: skip

    def _show(self, request: Request) -> Answer:
        asked = request.body.get("id", "")
        if asked == str(OWN_SERVER) and self.own_servers:
            return _server("rent", "mine", "192.0.2.1", self.named_in)
        machine = next((m for m in self.market.rented if m.id == asked), None)
        unknown = asked not in self._known and not self.unlisted
        if machine is None or request.has("not found") or (unknown and machine.alive):
            return self.error("Server not found")
        if not machine.alive:
            if not self.ended_status:
                return self.error("Server not found")
            return _server(self.ended_status, machine.label, "", self.named_in)
        name = self._names.get(asked, machine.label)
        if asked not in self._names and "order_instance" not in self.takes_names:
            name = f"hostkey{asked}"
        if self.unnamed_looks > 0:
            self.unnamed_looks -= 1
            name = f"hostkey{machine.id}"
        status = "power_off" if machine.stopped else self.live_status
        address = "" if self.market.starting(machine) else machine.address
        return _server(status, name, address, self.named_in)

    def _invoices(self, request: Request) -> Answer:
        wanted = request.body.get("status")
        rows = [row for row in self.invoices.values() if wanted in (None, row["status"])]
        if self.invoices_as == "list":
            return _ok(invoices=rows)
        bare = [{"id": row["id"], "status": row["status"]} for row in rows]
        nested = rows if self.invoices_as == "nested" else bare
        return _ok(invoices={"invoice": nested})

    def _invoice(self, request: Request) -> Answer:
        return _ok(invoice=self.invoices[int(request.body["invoice_id"])])

    def _cancellations(self, request: Request) -> Answer:
        """The shape of a row is not documented."""
        wanted = request.body.get("id")
        if self.late_lists:
            self.late_lists -= 1
            return _ok(action="get_cancellation_requests", requests=[])
        rows = [
            {"id": number, "server_id": int(server), "type": "Immediate"}
            for number, server in enumerate(self.cancellations, 91)
            if wanted in (None, server) or not self.filters
        ]
        return _ok(action="get_cancellation_requests", requests=rows)

    def _cancel(self, request: Request) -> Answer:
        machine = self._alive(request.body.get("id", ""))
        if machine is None:
            return self.error("Server not found")
        self.cancelled.append(machine.id)
        if machine.id in self.cancellations:
            return self.error("This service is to be closed")
        if request.body.get("cancellation_type") == "1" and not request.has("lives"):
            self.cancellations[machine.id] = self.market.clock.now_unix + self.cancel_s
            if not self.cancel_s:
                self.market.end(machine)
        return _ok(action="request_cancellation")

    def _alive(self, server: str) -> Rented | None:
        return next((m for m in self.market.alive() if m.id == server), None)


def _server(status: str, name: str, address: str, named_in: str) -> Answer:
    data: dict[str, Any] = {"status": status, "preset": {"name": "gpu"}}
    tags = [{"tag": "OS", "value": "Ubuntu"}]
    if named_in == "nested":
        data["os"] = {"name": "Ubuntu", "instance": {"HostName": name}}
    elif named_in == "tags":
        tags.append({"tag": "hostname", "value": name})
    else:
        data["hostname"] = name
    addresses = [{"ip": "198.51.100.9", "main_ip": 0}, {"ip": address, "main_ip": 1}]
    return _ok(server_data=data, tags=tags, IP=addresses if address else [])


def _faulty(asked: dict[str, str]) -> str:
    """What the documentation forbids; empty: nothing."""
    password = asked.get("root_pass", "")
    kinds = (str.isupper, str.islower, str.isdigit, "%-_+".__contains__)
    if set(asked) - _ORDER - {"action"}:
        return f"{set(asked) - _ORDER}"
    if not 8 <= len(password) <= 30 or not all(any(map(kind, password)) for kind in kinds):
        return "root_pass"
    if asked.get("os_id") not in {str(system["id"]) for system in _SYSTEMS if system["active"]}:
        return "os_id"
    if asked.get("traffic_plan") not in {str(plan["id"]) for plan in _PLANS}:
        return "traffic_plan"
    if asked.get("deploy_period") not in _PERIODS:
        return "deploy_period"
    if not 1 <= len(asked.get("hostname", "")) <= 253:
        return "hostname"
    return "" if len(asked.get("post_install_script", "")) <= 32768 else "post_install_script"


def _ok(**told: Any) -> Answer:
    return Answer(200, {"result": "OK", **told})
