"""A fake of Vast.ai: offers ("bundles"), creates ("asks"), instances in pages, accounts."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar, Final

from tests.markets.market import Rented, Ware
from tests.markets.policies import Need, vast_rights
from tests.markets.server import Answer, FakeMarket, Request
from torpor.control.providers.vast import VastProvider

FIRST_OFFER: Final = 1000
FIRST_INSTANCE: Final = 500_000
MONTH_H: Final = 730
MOST_ONSTART: Final = 4048
MOST_OFFERS: Final = 64
_SEARCH = {"limit", "type", "order", "allocated_storage"}
_OPERATORS = {
    "eq": lambda a, b: a == b,
    "neq": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "lt": lambda a, b: a < b,
    "gte": lambda a, b: a >= b,
    "lte": lambda a, b: a <= b,
    "in": lambda a, b: a in b,
    "notin": lambda a, b: a not in b,
}
_CREATE = {
    "client_id", "image", "template_hash_id", "label", "disk", "runtype", "target_state", "price",
    "env", "cancel_unavail", "vm", "onstart", "args", "args_str", "use_jupyter_lab", "jupyter_dir",
    "python_utf8", "lang_utf8", "force", "user", "image_login", "volume_info", "extra",
}  # fmt: skip


def vast_wares() -> list[Ware]:
    return [
        Ware("RTX 4090", 1, 24, 0.40, "Texas, US", spot_usd_h=0.20, disk_usd_gib_month=0.15),
        Ware("H100 SXM", 1, 80, 2.10, "Norway, NO", spot_usd_h=1.10, disk_usd_gib_month=0.20),
        Ware("H100 PCIE", 2, 80, 3.90, "France, FR", cuda="12.4", disk_usd_gib_month=0.10),
        Ware("RTX 4090", 1, 24, 0.31, "Vietnam, VN", reliability=0.71, disk_usd_gib_month=0.10),
    ]


class FakeVast(FakeMarket):
    """Machine ids are whole numbers. What a create makes is shown by the v1 list only."""

    account: int = 4242
    unknown_is_null: bool = False  # their own client expects it of GET; of DELETE a 404 is written
    refuses_without_reason: bool = False  # what "error that created" says
    says: str = ""  # the status of every instance, where it is not of the instance itself
    status_msg: str = ""  # likewise
    intended: str = ""  # likewise, what the instance is to become
    entrypoint: tuple[str, ...] = ()  # of every image
    image_user: str = "root"
    volumes: ClassVar[dict[int, int]] = {12345: 71}  # the hosts of the account's volumes
    direct_ports: int = 40
    knows_centres: bool = True  # in a search
    homes: frozenset[str] = frozenset({"Vietnam, VN"})  # the regions without data centres
    image_login: str = ""  # that all images ask for
    repeats: bool = False  # a refusal quotes the request
    last_page_is_silent: bool = False  # it says nothing of a next one

    adapter = VastProvider
    wares = staticmethod(vast_wares)
    rights = partial(vast_rights, "vast.json")
    routes: ClassVar = {
        r"POST /api/v0/bundles": ("offers", "_search"),
        r"\w+ /api/v0/asks/(\d+)": ("create", "_create"),
        r"GET /api/v1/instances by id": ("find", "_list"),
        r"GET /api/v1/instances": ("list", "_list"),
        r"DELETE /api/v0/instances/(\d+)": ("destroy", "_instance"),
        r"\w+ /api/v0/instances/(\d+)": ("find", "_instance"),
        r"\w+ /api/v0/instances": ("account", {"instances": []}),  # retired, whatever there is
        r"GET /api/v0/volumes": ("account", "_volumes"),
        r"GET /api/v0/users/current": ("account", "_user"),
    }
    words: ClassVar = {
        "no capacity": (410, "no_such_ask", "Instance type is no longer available"),
        "quota": (400, "quota_exceeded", "you may not rent more GPUs of this kind"),
        "no money": (400, "insufficient_credit", "Your account lacks credit; see billing page"),
        "denied": (403, "forbidden", "your account is not allowed to do this"),
        "wrong key": (401, "auth_error", "Invalid user key"),
        "no route": (404, "not_found", "no such route"),
        "error body": (200, "invalid_request", "something went wrong inside"),
    }

    @staticmethod
    def error(status: int, error: str, msg: str, ask_id: int | None = None) -> Answer:
        body: dict[str, Any] = {"success": False, "error": error, "msg": msg}
        return Answer(status, body if ask_id is None else {**body, "ask_id": ask_id})

    def variables_of(self, machine: str) -> dict[str, str]:
        return {"CONTAINER_ID": machine, "CONTAINER_API_KEY": f"of-{machine}"}

    def needs(self, request: Request) -> Iterator[Need]:
        """https://docs.vast.ai/api-reference/permissions"""
        kind = request.path.split("/")[3]
        reads = "instance_read" if request.method == "GET" else "instance_write"
        yield Need({"bundles": "misc", "users": "user_read"}.get(kind, reads))

    def asked(self, request: Request) -> str:
        by_id = " by id" if '"id"' in request.query.get("select_filters", "") else ""
        return f"{request.method} {request.path.rstrip('/')}{by_id}"

    def hand_id(self, number: int) -> str:
        return str(FIRST_INSTANCE + number)

    def _user(self, request: Request) -> Answer:
        usd = self.market.balance_usd
        user = {"id": self.account, "email": "me@example.com", "balance": usd, "credit": usd}
        return Answer(200, {**user, "ssh_key": "", "sid": "s"})

    def _volumes(self, request: Request) -> Answer:
        rows = [{"id": id, "machine_id": machine} for id, machine in self.volumes.items()]
        return Answer(200, {"volumes": [{**row, "status": "created"} for row in rows]})

    def _search(self, request: Request) -> Answer:
        query: dict[str, Any] = request.body or {}
        bid = query.get("type") == "bid"
        disk_gb = float(query.get("allocated_storage", 8.0))
        found = [
            self._offer(number, ware, disk_gb, bid)
            for number, ware in enumerate(self.market.wares, FIRST_OFFER)
            if ware.stock > 0 and (ware.spot_usd_h is not None or not bid)
        ]
        for column, rule in query.items():
            if column in _SEARCH:
                continue
            if column == "datacenter" and not self.knows_centres:
                continue
            if column == "datacenter":  # offers show it as a number
                wanted = int(rule["eq"])
                found = [offer for offer in found if offer["hosting_type"] == wanted]
                continue
            if found and column not in found[0]:
                return self.error(400, "invalid_request", f"{column} is not a valid search key")
            shown = _driver if column == "driver_version" else lambda cell: cell
            for operator, value in rule.items():
                passes = _OPERATORS[operator]
                found = [offer for offer in found if passes(shown(offer[column]), value)]
        for column, direction in reversed(query.get("order", [])):
            found.sort(key=lambda offer: offer[column], reverse=direction == "desc")
        limit = min(int(query.get("limit", MOST_OFFERS)), MOST_OFFERS)
        return Answer(200, {"offers": found[:limit]})

    def _offer(self, number: int, ware: Ware, disk_gb: float, bid: bool) -> dict[str, Any]:
        base = (ware.spot_usd_h if bid else None) or ware.usd_h
        storage = disk_gb * ware.disk_usd_gib_month / MONTH_H
        return {
            "id": number,
            "ask_contract_id": number,
            "machine_id": number - FIRST_OFFER + 70,
            "host_id": number - FIRST_OFFER + 90,
            "hosting_type": int(ware.region not in self.homes),
            "gpu_name": ware.gpu,
            "num_gpus": ware.gpu_count,
            "gpu_ram": ware.vram_gib * 1024,
            "gpu_total_ram": ware.vram_gib * ware.gpu_count * 1024,
            "gpu_arch": "nvidia",
            "gpu_frac": 1.0,
            "cpu_arch": "amd64",
            "cpu_cores": ware.cores,
            "cpu_cores_effective": float(ware.cores),
            "cpu_ram": int(ware.ram_gib * 1024),
            "disk_space": ware.disk_gib,
            "storage_cost": ware.disk_usd_gib_month,
            "storage_total_cost": storage,
            "dph_base": base,
            "dph_total": base + storage,
            "min_bid": ware.spot_usd_h or ware.usd_h,
            "is_bid": bid,
            "cuda_max_good": float(ware.cuda),
            "driver_version": ware.driver,
            "reliability": ware.reliability,
            "reliability2": ware.reliability,
            "score": ware.reliability * 100,
            "geolocation": ware.region,
            "inet_down": 900.0,
            "inet_up": 800.0,
            "inet_down_cost": 0.001,
            "inet_up_cost": 0.002,
            "direct_port_count": self.direct_ports,
            "public_ipaddr": "203.0.113.7",
            "static_ip": True,
            "duration": 2_000_000.0,
            "rentable": True,
            "rented": False,
            "verification": "verified",
            "verified": True,
            "vms_enabled": False,
            "external": False,
        }

    def _create(self, request: Request, ask: str) -> Answer:
        number = int(ask)
        # Vast.ai's own client sends null for what is not given.
        asked = {key: value for key, value in (request.body or {}).items() if value is not None}
        if unknown := set(asked) - _CREATE:
            return self.error(
                400, "invalid_args", f"error 400/3467: unknown {sorted(unknown)}", number
            )
        if refused := self.refusal(request):
            if self.repeats:
                refused.body["msg"] += f" {asked.get('env')} {asked.get('image_login')}"
            return refused
        if self.market.balance_usd <= 0:
            return self.error(*self.words["no money"])
        index = number - FIRST_OFFER
        if not 0 <= index < len(self.market.wares) or self.market.wares[index].stock <= 0:
            # As the live market says it; the documentation has 404 and no_such_ask.
            text = f"error 404/3603: no_such_ask  Instance type by id {number} is not available."
            return self.error(400, "invalid_args", text, number)
        ware = self.market.wares[index]
        info = asked.get("volume_info", {})
        if info and (info["create_new"] or self.volumes.get(info["volume_id"]) != index + 70):
            return self.error(400, "invalid_args", "the volume is at another host", number)
        price = asked.get("price")
        if price is not None and price < (ware.spot_usd_h or ware.usd_h):
            return self.error(400, "invalid_price", "the bid is below min_bid", number)
        if len(asked.get("onstart", "")) > MOST_ONSTART:
            return self.error(400, "invalid_args", "onstart is too long", number)
        env = asked.get("env") or {}
        variables = {key: value for key, value in env.items() if not key.startswith("-p ")}
        ports = [key for key in env if key not in variables]
        if not all(re.fullmatch(r"-p \d+:\d+(/udp)?", port) for port in ports):
            return self.error(400, "invalid_args", f"ports {ports}", number)
        if not all(isinstance(value, str) for value in env.values()):
            return self.error(400, "invalid_args", "env is of texts", number)
        onstart = asked.get("onstart", "")
        program = [onstart] if onstart else list(self.entrypoint)
        command = program + list(asked.get("args", [])) if asked.get("runtype") == "args" else []
        if asked.get("user", self.image_user) != "root":
            command = []  # which writes to /root and runs sshd
        if variables:
            command = ["env", *(f"{key}={value}" for key, value in variables.items()), *command]
        failed = request.has("error that created")
        machine = self.market.rent(
            ware,
            str(asked.get("label", "")),
            asked,
            id_of=lambda number: str(FIRST_INSTANCE + number),
            command=command if "-p 22:22" in ports else None,
            variables_of=self.variables_of,
            spot=price is not None,
            bid_usd_h=price,
            disk_gib=float(asked.get("disk", 8.0)),
            stopped=failed or asked.get("target_state") == "stopped",
        )
        contract = int(machine.id)
        if failed and self.refuses_without_reason:
            return Answer(200, {"success": False, "msg": "timed out"})
        if failed:
            said = self.error(*self.words["no capacity"])
            said.body["new_contract"] = contract
            return said
        return Answer(200, {"success": True, "new_contract": contract})

    def _list(self, request: Request) -> Answer:
        limit = min(int(request.query.get("limit", 25)), 25, self.market.page)
        shown = sorted(self.listed(request), key=lambda machine: int(machine.id))
        rows = [self._row(machine) for machine in shown]
        filters: dict[str, dict[str, Any]] = json.loads(request.query.get("select_filters", "{}"))
        for column, rule in filters.items():
            if column not in ("id", "label", "actual_status"):
                return self.error(400, "invalid_request", f"{column} is not a valid search key")
            for operator, value in rule.items():
                passes = _OPERATORS[operator]
                rows = [row for row in rows if passes(row[column], value)]
        total = len(rows)
        after = request.query.get("after_token")
        if after is not None:
            last = json.loads(base64.b64decode(after))["values"]["id"]
            rows = [row for row in rows if row["id"] > last]
        page, rest = rows[:limit], rows[limit:]
        token = None
        if rest:
            token = base64.b64encode(json.dumps({"values": {"id": page[-1]["id"]}}).encode())
        said = {
            "success": True,
            "instances_found": len(page),
            "total_instances": total,
            "next_token": token and token.decode(),
            "instances": page,
        }
        if token is None and self.last_page_is_silent:
            del said["next_token"]
        return Answer(200, said)

    def _instance(self, request: Request, number: str) -> Answer:
        machine = self.found(request, number)
        if machine is None:
            if self.unknown_is_null and request.method == "GET":
                return Answer(200, {"instances": None})
            return self.error(404, "not_found", "Instance not found")
        if request.method == "DELETE":
            self.end(request, machine)
            return Answer(200, {"success": True, "msg": "Instance destroyed successfully"})
        if request.method == "PUT":
            asked = request.body or {}
            machine.label = asked.get("label", machine.label)
            taken = machine.stopped and machine.no_room  # it waits for its GPU
            machine.stopped = taken or asked.get("state") == "stopped"
            return Answer(200, {"success": True})
        return Answer(200, {"instances": self._row(machine)})

    def _row(self, machine: Rented) -> dict[str, Any]:
        status = "exited" if machine.stopped else "running"
        if not machine.stopped and self.market.starting(machine):
            status = "loading"
        ware, running = machine.ware, status == "running"
        mapped = [key for key in machine.request.get("env", {}) if key.startswith("-p ")]
        inner = [key.rpartition(":")[2] for key in mapped] or ["22"]
        ports = {
            f"{port}/tcp": [{"HostIp": "0.0.0.0", "HostPort": str(machine.port + n)}]  # noqa: S104
            for n, port in enumerate(inner)
        }
        words = self.status_msg or f"{status} {machine.request.get('image')}"
        private = self.image_login != machine.request.get("image_login", "")
        if private:
            status, running = "loading", False
            words = f"pull access denied, login {machine.request.get('image_login')}"
        return {
            "id": int(machine.id),
            "actual_status": self.says or status,
            "cur_state": "stopped" if machine.stopped else "running",
            "intended_status": self.intended or ("stopped" if machine.stopped else "running"),
            "next_state": self.intended or ("stopped" if machine.stopped else "running"),
            "status_msg": words,
            "label": machine.label or None,
            "image_uuid": str(machine.request.get("image")),
            "image_runtype": str(machine.request.get("runtype", "ssh")),
            "onstart": str(machine.request.get("onstart", "")),
            "extra_env": [list(pair) for pair in machine.request.get("env", {}).items()],
            "machine_id": 70 + self.market.wares.index(ware),
            "public_ipaddr": machine.address,
            "ports": ports if running else None,
            "ssh_host": "ssh1.vast.ai",
            "ssh_port": 10_000 + machine.number,
            "gpu_name": ware.gpu,
            "num_gpus": ware.gpu_count,
            "gpu_ram": ware.vram_gib * 1024,
            "disk_space": machine.disk_gib,
            "is_bid": machine.spot,
            "min_bid": ware.spot_usd_h or ware.usd_h,
            "dph_base": machine.usd_h,
            "dph_total": machine.usd_h,
            "geolocation": ware.region,
            "start_date": machine.created_unix,
        }


def _driver(version: str) -> int:
    """What a search compares: 535.86.05 is 535086005 (vast-cli, vastai/api/query.py)."""
    return int("".join(part.zfill(3) for part in version.split(".")))
