"""A fake of Verda's API: a login, instance types and where they are, instances and their actions,
start scripts, SSH keys and volumes, which outlive an instance whose end does not name them.

Ids are plain text, prices words, and a refusal is {"code": ..., "message": ...}, as the vendor's
Python client reads them. ``newer``: ids are JSON and prices numbers, which its Go client reads.
"""

from __future__ import annotations

import re
import secrets
import time
from typing import Any, ClassVar, Final

from tests.markets.market import Market, Rented, Ware
from tests.markets.server import Answer, FakeMarket, Request
from torpor.control.providers.verda import VerdaProvider

CLIENT_ID: Final = "fake-client-id"
IMAGE: Final = "ubuntu-24.04-cuda-12.8-open-docker"
OLD_IMAGE: Final = "ubuntu-22.04-cuda-12.0-docker"
_CREATE: Final = {
    "instance_type", "image", "hostname", "description", "ssh_key_ids", "location_code", "contract",
    "pricing", "startup_script_id", "volumes", "existing_volumes", "os_volume", "is_spot", "coupon",
    "tags",
}  # fmt: skip
_DISK_USD_GB_MONTH: Final = 0.2
_FATES: Final = {"keep_detached", "move_to_trash", "delete_permanently"}


def verda_wares() -> list[Ware]:
    """``name`` is the instance type, ``gpu`` its description without the count."""
    wares = [
        Ware("H100 SXM5 80GB", 1, 80, 2.29, "FIN-01", name="1H100.80S.32V", spot_usd_h=0.80),
        Ware("H100 SXM5 80GB", 1, 80, 2.29, "FIN-03", name="1H100.80S.32V", spot_usd_h=0.80),
        Ware("H100 SXM5 80GB", 8, 80, 18.32, "ICE-01", name="8H100.80S.176V", spot_usd_h=6.40),
        Ware("RTX A6000 48GB", 1, 48, 0.55, "FIN-01", name="1A6000.10V", spot_usd_h=0.20),
        Ware("", 0, 0, 0.03, "FIN-03", name="CPU.4V.16G", spot_usd_h=0.01),
    ]
    for ware in wares:
        ware.disk_usd_gib_month = _DISK_USD_GB_MONTH
    return wares


class FakeVerda(FakeMarket):
    """An instance that ended is found as "discontinued" and is in no listing. Each instance has one
    volume, whose id is the instance's with another beginning."""

    newer: bool = False
    currency: str = "usd"
    status: str = "running"  # of an instance that is up
    price: str | None = None  # what is shown in place of each price
    supported: ClassVar = {"1A6000.10V": [OLD_IMAGE], "CPU.4V.16G": ["ubuntu-24.04"]}
    refuses_in_207: bool = False  # an action on an instance, where it does not answer 403

    adapter = VerdaProvider
    wares = staticmethod(verda_wares)
    body = "vm"
    given_port = True
    prefix = "/v1"
    routes: ClassVar = {
        r"POST /oauth2/token": ("account", "_login"),
        r"GET /balance": ("account", "_balance"),
        r"GET /instance-types": ("offers", "_types"),
        r"GET /images": ("account", "_images"),
        r"GET /instance-availability": ("offers", "_availability"),
        r"GET /volume-types": ("offers", "_volume_types"),
        r"POST /instances": ("create", "_create"),
        r"GET /instances": ("list", "_list"),
        r"PUT /instances": ("destroy", "_act"),
        r"GET /instances/([\w-]+)": ("find", "_show"),
        r"GET /volumes(?:/([\w-]+))?": ("account", "_volumes"),
        r"PUT /volumes": ("account", "_act_on_volume"),
        r"\w+ /(sshkeys|scripts)(?:/([\w-]+))?": ("account", "_things"),
    }
    words: ClassVar = {
        "no capacity": (503, "service_unavailable", "No capacity available"),
        "quota": (400, "invalid_request", "You have reached the limit of instances"),
        "no money": (402, "insufficient_funds", "Insufficient funds"),
        "denied": (403, "unauthorized_request", "You may not do this"),
        "wrong key": (401, "unauthorized_request", "Access token is invalid"),
        "no route": (404, "not_found", "Not found"),
        "gone": (400, "invalid_request", "Invalid instance id"),
        "error body": (200, "server_error", "Something went wrong"),
        "failed": (500, "server_error", "Something went wrong"),
    }

    def hand_id(self, number: int) -> str:
        return f"de000000-0000-4000-8000-{number:012x}"

    @staticmethod
    def error(status: int, code: str, message: str) -> Answer:
        return Answer(status, {"code": code, "message": message})

    def __init__(self, market: Market | None = None) -> None:
        super().__init__(market)
        self.token = secrets.token_hex(20)
        self.logins = 0
        self.kept: dict[str, list[dict[str, Any]]] = {"sshkeys": [], "scripts": []}
        self.detached: dict[str, Rented] = {}
        self.trash: list[str] = []

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "client_id": CLIENT_ID}

    def opened(self, key: str, **options: Any) -> Any:
        return VerdaProvider(key, url=self.url, **{"client_id": CLIENT_ID, **options})

    def disown(self, machine: Rented) -> None:
        super().disown(machine)
        for rows in self.kept.values():
            rows.clear()

    def login_of(self, request: Request, header: str) -> str:
        """The secret buys a token, which is of that secret alone. No other request has it."""
        if self.asked(request) == "POST /oauth2/token":
            secret = request.body.pop("client_secret")
            known = request.body == {"grant_type": "client_credentials", "client_id": CLIENT_ID}
            return f"Bearer {secret}" if known else ""
        known = header == f"Bearer {self.token}.{self.key}"
        return f"Bearer {self.key}" if known else ""

    def _login(self, request: Request) -> Answer:
        self.logins += 1
        token = {"access_token": f"{self.token}.{self.key}", "refresh_token": "r", "scope": "all"}
        return Answer(200, {**token, "token_type": "Bearer", "expires_in": 3600})

    def _balance(self, request: Request) -> Answer:
        return Answer(200, {"amount": self.market.balance_usd, "currency": self.currency})

    def _types(self, request: Request) -> Answer:
        assert request.query == {"currency": "usd"}
        kinds = {ware.name: ware for ware in self.market.wares}
        return Answer(200, [self._type(ware) for ware in kinds.values()])

    def _type(self, ware: Ware) -> dict[str, Any]:
        words = ("best_for", "description", "display_name", "manufacturer", "name", "p2p")
        return {
            **dict.fromkeys(words, ""),
            "id": f"type-{ware.name}",
            "instance_type": ware.name,
            "price_per_hour": self._price(ware.usd_h),
            "spot_price": self._price(ware.spot_usd_h or 0),
            **_parts_of(ware),
            "model": ware.gpu.partition(" ")[0],
            "currency": "usd",
            "supported_os": ["ubuntu-22.04", "ubuntu-24.04"],
        }

    def _images(self, request: Request) -> Answer:
        names = self._images_of(request.query["instance_type"])
        rows = [{"id": f"image-{n}", "image_type": n, "name": n, "details": []} for n in names]
        return Answer(200, rows)

    def _images_of(self, kind: str) -> list[str]:
        newest = [OLD_IMAGE, "ubuntu-24.04", IMAGE, "ubuntu-24.04-cuda-13.0-cluster"]
        return self.supported.get(kind, newest)

    def _availability(self, request: Request) -> Answer:
        spots = {request.query[name] for name in ("isSpot", "is_spot") if name in request.query}
        assert spots in ({"true"}, {"false"})
        places: dict[str, list[str]] = {}
        for ware in self.market.wares:
            names = places.setdefault(ware.region, [])
            if ware.stock > 0 and (spots == {"false"} or ware.spot_usd_h):
                names.append(ware.name)
        rows = [{"location_code": code, "availabilities": names} for code, names in places.items()]
        return Answer(200, rows)

    def _volume_types(self, request: Request) -> Answer:
        price = {"price_per_month_per_gb": _DISK_USD_GB_MONTH, "currency": "usd"}
        hdd = {"type": "HDD", "price": {**price, "price_per_month_per_gb": 0.05}}
        return Answer(200, [hdd, {"type": "NVMe", "price": price}])

    def _create(self, request: Request) -> Answer:
        asked: dict[str, Any] = request.body or {}
        if refused := self.refusal(request):
            return refused
        named = asked["startup_script_id"]
        script = next((s for s in self.kept["scripts"] if s["id"] == named), None)
        if fault := self._fault_of(asked, script):
            return self.error(400, "invalid_request", fault)
        wanted = (asked["instance_type"], asked["location_code"])
        wares = [ware for ware in self.market.wares if (ware.name, ware.region) == wanted]
        if not wares or wares[0].stock <= 0:
            return self.error(*self.words["no capacity"])
        machine = self.market.rent(
            wares[0],
            asked["description"],
            asked,
            id_of=self.hand_id,
            script=script["script"] if script else "",
            spot=asked["is_spot"],
            disk_gib=asked["os_volume"]["size"],
        )
        if request.has("error that created"):
            return self.failed()
        return self._id(machine.id, 202)

    def _fault_of(self, asked: dict[str, Any], script: dict[str, Any] | None) -> str:
        """What the API forbids; empty: nothing."""
        disk = asked.get("os_volume") or {}
        kind = next((w for w in self.market.wares if w.name == asked.get("instance_type")), None)
        if kind is None or set(asked) - _CREATE:
            return f"unknown: {set(asked) - _CREATE or asked.get('instance_type')}"
        if asked["image"] not in self._images_of(kind.name):
            return "Operating system is not valid for this instance type"
        if not re.fullmatch(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,58}[A-Za-z0-9])", asked["hostname"]):
            return "hostname is not valid"
        if not asked["description"] or disk.get("size", 0) < 50:
            return "description and os_volume are required"
        fate = disk.get("on_spot_discontinue")
        if fate is not None and (not asked["is_spot"] or fate not in _FATES):
            return "on_spot_discontinue is not valid"
        keys = {key["id"] for key in self.kept["sshkeys"]}
        if script is None or not asked["ssh_key_ids"] or set(asked["ssh_key_ids"]) - keys:
            return "Invalid ssh key or startup script id"
        return ""

    def _list(self, request: Request) -> Answer:
        rows = [machine for machine in self.listed(request) if not self._taken(machine)]
        return Answer(200, [self._instance(machine) for machine in rows])

    def _show(self, request: Request, number: str) -> Answer:
        machine = next((m for m in self.market.rented if m.id == number), None)
        if machine is None or request.has("not found") or self.market.hidden(machine):
            return self.error(*self.words["gone"])
        return Answer(200, self._instance(machine))

    def _act(self, request: Request) -> Answer:
        asked = request.body
        assert asked["action"] == "delete"
        (number,) = asked["id"]
        machine = next((m for m in self.market.rented if m.id == number), None)
        if machine is None:
            return self.error(*self.words["gone"])
        if not machine.alive or self._taken(machine):
            return self._forbidden(number, "Can't discontinue a discontinued instance")
        if machine.starting_looks > 0:
            return self._forbidden(number, "Can't discontinue a provisioning instance")
        if not request.has("lives"):
            self.market.end(machine)
            if asked.get("volume_ids", []) != [_volume_of(machine)]:
                self.detached[_volume_of(machine)] = machine
            elif not asked.get("delete_permanently"):
                self.trash.append(_volume_of(machine))
        return Answer(202, [{"action": "delete", "instanceId": number, "status": "success"}])

    def _forbidden(self, number: str, words: str) -> Answer:
        if not self.refuses_in_207:
            return self.error(403, "forbidden_action", words)
        row = {"action": "delete", "instanceId": number, "status": "error", "error": words}
        return Answer(207, [{**row, "statusCode": 403}])

    def _volumes(self, request: Request, number: str | None) -> Answer:
        attached = {_volume_of(m): m for m in self.market.alive() if not self._taken(m)}
        rows = [self._volume(key, m, "attached") for key, m in attached.items()]
        rows += [self._volume(key, m, "detached") for key, m in self.detached.items()]
        if number is None:
            return Answer(200, rows)
        found = [row for row in rows if row["id"] == number]
        gone = self.error(400, "invalid_request", "Invalid volume id")
        return Answer(200, found[0]) if found else gone

    def _volume(self, key: str, machine: Rented, status: str) -> dict[str, Any]:
        return {
            "id": key,
            "status": status,
            "name": machine.label,  # which torpor gives it
            "size": machine.disk_gib,
            "type": "NVMe",
            "is_os_volume": True,
            "created_at": _time(machine.created_unix),
            "instance_id": machine.id if status == "attached" else None,
            "base_hourly_cost": machine.disk_gib * machine.ware.disk_usd_gib_month / 730,
        }

    def _act_on_volume(self, request: Request) -> Answer:
        assert (request.body["action"], request.body["is_permanent"]) == ("delete", True)
        self.detached.pop(request.body["id"])
        return Answer(202)

    def _things(self, request: Request, kind: str, number: str | None) -> Answer:
        rows = self.kept[kind]
        if request.method == "GET":
            return Answer(200, rows)
        if request.method == "DELETE":
            left = [row for row in rows if row["id"] != number]
            found, rows[:] = len(left) < len(rows), left
            gone = self.error(400, "invalid_request", f"Invalid {kind[:-1]} id")
            return Answer(200) if found else gone
        made = {"id": f"{kind}-{secrets.token_hex(8)}", **request.body}
        rows.append({**made, "created_at": _time(time.time())})
        return self._id(made["id"], 201)

    def _instance(self, machine: Rented) -> dict[str, Any]:
        starting = machine.alive and self.market.starting(machine)
        status = "provisioning" if starting else "offline" if machine.stopped else self.status
        if not machine.alive or self._taken(machine):
            status = "discontinued"
        asked, ware = machine.request, machine.ware
        usd_h = (ware.spot_usd_h if machine.spot else None) or ware.usd_h
        return {
            **_parts_of(ware),
            "id": machine.id,
            "created_at": _time(machine.created_unix),
            "ip": machine.address if status == "running" else None,
            "status": status,
            "hostname": asked.get("hostname", machine.label),
            "description": machine.label,
            "location": ware.region,
            "instance_type": ware.name,
            "price_per_hour": self._price(usd_h),
            "is_spot": machine.spot,
            "image": asked.get("image", IMAGE),
            "ssh_key_ids": asked.get("ssh_key_ids", []),
            "startup_script_id": asked.get("startup_script_id"),
            "os_volume_id": None if starting else _volume_of(machine),
        }

    def _taken(self, machine: Rented) -> bool:
        """For somebody who pays more."""
        return machine.spot and machine.stopped

    def _price(self, usd: float) -> float | str:
        return self.price if self.price is not None else usd if self.newer else f"{usd:.4f}"

    def _id(self, number: str, status: int) -> Answer:
        return Answer(status, f'"{number}"') if self.newer else Answer(status, number, "text/html")


def _time(unix: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(unix))


def _parts_of(ware: Ware) -> dict[str, Any]:
    """Of an instance and its type."""
    count = ware.gpu_count
    return {
        "cpu": {"description": f"{ware.cores} CPU", "number_of_cores": ware.cores},
        "gpu": {"description": f"{count}x {ware.gpu}", "number_of_gpus": count},
        "gpu_memory": {"description": "", "size_in_gigabytes": ware.vram_gib * count},
        "memory": {"description": "", "size_in_gigabytes": int(ware.ram_gib)},
        "storage": {"description": "dynamic"},
    }


def _volume_of(machine: Rented) -> str:
    return f"d15c{machine.id[4:]}"
