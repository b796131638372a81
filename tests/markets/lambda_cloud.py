"""A fake of Lambda's Cloud API: instance types by region, launches, instances, SSH keys."""

from __future__ import annotations

import re
from typing import Any, Final

from tests.markets.faults import Action
from tests.markets.market import Rented, Ware
from tests.markets.server import Answer, FakeMarket, Request

API: Final = "/api/v1"
_LAUNCH = {
    "region_name", "instance_type_name", "ssh_key_names", "file_system_names", "image", "tags",
    "file_system_mounts", "hostname", "name", "user_data", "firewall_rulesets",
}  # fmt: skip
_TAG_KEY = re.compile(r"[a-z][a-z0-9-:]+")
_WORDS = {
    "no capacity": (400, "instance-operations/launch/insufficient-capacity", "Not enough capacity"),
    "quota": (400, "global/quota-exceeded", "Quota exceeded."),
    "denied": (403, "global/account-inactive", "Your account is inactive."),
    "no money": (403, "global/account-inactive", "Your account is inactive."),
}


class FakeLambda(FakeMarket):
    """``ware.name`` is the instance type. A machine that ended is found as terminated and is in no
    listing; ``ending_looks`` answers call it terminating before."""

    ending_looks: int = 0

    def __init__(self, market: Any) -> None:
        super().__init__(market)
        self.ssh_keys: dict[str, dict[str, str]] = {}
        self._ending: dict[str, int] = {}

    def action_of(self, request: Request) -> Action:
        path = request.path.removeprefix(API)
        if path == "/instance-types":
            return "offers"
        if path == "/instance-operations/launch":
            return "create"
        if path == "/instance-operations/terminate":
            return "destroy"
        if path == "/instances":
            return "list"
        return "find" if path.startswith("/instances/") else "account"

    def handle(self, request: Request) -> Answer:
        if request.has("denied"):
            return _refused("denied")
        route = (request.method, request.path.removeprefix(API))
        if route == ("GET", "/instance-types"):
            return Answer(200, {"data": self._types()})
        if route == ("POST", "/instance-operations/launch"):
            return self._launch(request)
        if route == ("POST", "/instance-operations/terminate"):
            return self._terminate(request)
        if route == ("GET", "/instances"):
            shown = [] if request.has("not found") else self.market.visible()
            return Answer(200, {"data": [self._instance(machine) for machine in shown]})
        if found := re.fullmatch(r"/instances/([0-9a-f]+)", route[1]):
            machine = self._machine(found[1])
            if machine is None or request.has("not found"):
                return _gone()
            return Answer(200, {"data": self._instance(machine)})
        if route[1] == "/ssh-keys" or route[1].startswith("/ssh-keys/"):
            return self._ssh_key(request)
        if route == ("GET", "/file-systems"):
            return Answer(200, {"data": []})
        return _error(404, "global/not-found", "The requested resource was not found.")

    def unauthorized(self) -> Answer:
        return _error(401, "global/invalid-api-key", "API key was invalid.", "Check your API key.")

    def error_body(self, request: Request) -> Answer:
        code = "provider/internal-unavailable"
        return _error(200, code, "Provider unavailable", "Try again shortly")

    def failed(self) -> Answer:
        return _error(500, "global/internal-error", "An internal server error occurred.", "Wait.")

    def _types(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for ware in self.market.wares:
            empty = {"instance_type": _type(ware), "regions_with_capacity_available": []}
            item = found.setdefault(ware.name, empty)
            if ware.stock > 0:
                item["regions_with_capacity_available"].append(_region(ware.region))
        return found

    def _launch(self, request: Request) -> Answer:
        asked: dict[str, Any] = request.body or {}
        for kind in _WORDS:
            if request.has(kind):
                return _refused(kind)
        tags = asked.get("tags", [])
        faulty = (
            set(asked) - _LAUNCH
            or len(asked.get("ssh_key_names", [])) != 1
            or len(asked.get("name", "")) > 64
            or any(not _TAG_KEY.fullmatch(t["key"]) or len(t["key"]) > 55 for t in tags)
            or any(len(tag["value"]) > 128 for tag in tags)
        )
        if faulty:
            return _error(400, "global/invalid-parameters", f"Invalid request data: {faulty}")
        if asked["ssh_key_names"][0] not in {key["name"] for key in self.ssh_keys.values()}:
            return _error(404, "global/object-does-not-exist", "no such SSH key", "Add it.")
        asked_for = (asked.get("instance_type_name"), asked.get("region_name"))
        wares = [ware for ware in self.market.wares if (ware.name, ware.region) == asked_for]
        if not wares:
            return _error(404, "global/object-does-not-exist", "no such type or region", "Look.")
        if wares[0].stock <= 0:
            return _refused("no capacity")
        script = asked.get("user_data", "")
        machine = self.market.rent(
            wares[0],
            asked.get("name", ""),
            asked,
            id_of=lambda number: f"{number:032x}",
            command=["/bin/sh", "-c", script] if script.startswith("#!") else None,
        )
        if request.has("error that created"):
            return _error(500, "provider/internal-unknown", "the launch did not answer")
        return Answer(200, {"data": {"instance_ids": [machine.id]}})

    def _terminate(self, request: Request) -> Answer:
        machines = [self._machine(one) for one in (request.body or {}).get("instance_ids", [])]
        found = [machine for machine in machines if machine is not None]
        if not found or len(found) < len(machines):
            return _gone()
        if request.has("not found"):
            return _gone()
        for machine in found:
            if not request.has("lives"):
                self._ending.setdefault(machine.id, self.ending_looks)
                self.market.end(machine)
        data = {"terminated_instances": [self._instance(machine) for machine in found]}
        return Answer(200, {"data": data})

    def _machine(self, named: str) -> Rented | None:
        found = (machine for machine in self.market.rented if machine.id == named)
        return next((machine for machine in found if machine.hidden_looks == 0), None)

    def _instance(self, machine: Rented) -> dict[str, Any]:
        if not machine.alive:
            left = self._ending.get(machine.id, 0)  # Lambda itself ends machines at once
            self._ending[machine.id] = max(0, left - 1)
            status = "terminating" if left else "terminated"
        elif machine.stopped:  # Lambda stops no machine, it takes it away
            status = "preempted"
        else:
            status = "booting" if self.market.starting(machine) else "active"
        asked = machine.request
        shown = {
            "id": machine.id,
            "name": machine.label,
            "status": status,
            "ssh_key_names": asked.get("ssh_key_names", []),
            "file_system_names": [],
            "region": _region(machine.ware.region),
            "instance_type": _type(machine.ware),
            "hostname": f"host-{machine.number}",
            "is_reserved": False,
            "actions": {
                name: {"available": status == "active"}
                for name in ("migrate", "rebuild", "restart", "cold_reboot", "terminate")
            },
            "tags": asked.get("tags", []),
        }
        if status == "active":
            shown["ip"] = machine.address
        return shown

    def _ssh_key(self, request: Request) -> Answer:
        asked = request.body or {}
        if request.method == "GET":
            return Answer(200, {"data": list(self.ssh_keys.values())})
        if request.method == "DELETE":
            key = self.ssh_keys.pop(request.path.rsplit("/", 1)[1], None)
            return Answer(200, {"data": {}}) if key else _gone()
        name = str(asked.get("name", ""))
        if not 1 <= len(name) <= 64 or name in {key["name"] for key in self.ssh_keys.values()}:
            return _error(400, "global/invalid-parameters", "Invalid or duplicate name.")
        number = f"{len(self.ssh_keys) + 1:032x}"
        self.ssh_keys[number] = {"id": number, "name": name, "public_key": asked["public_key"]}
        return Answer(200, {"data": self.ssh_keys[number]})


def _type(ware: Ware) -> dict[str, Any]:
    return {
        "name": ware.name,
        "description": f"{ware.gpu_count}x {ware.gpu}",
        "gpu_description": ware.gpu,
        "price_cents_per_hour": round(ware.usd_h * 100),
        "specs": {
            "vcpus": ware.cores,
            "memory_gib": int(ware.ram_gib),
            "storage_gib": int(ware.disk_gib),
            "gpus": ware.gpu_count,
        },
    }


def _region(name: str) -> dict[str, str]:
    return {"name": name, "description": f"{name} somewhere"}


def _refused(kind: str) -> Answer:
    status, code, message = _WORDS[kind]
    return _error(status, code, message, "Contact Support.")


def _gone() -> Answer:
    return _error(404, "global/object-does-not-exist", "Specified instance does not exist.")


def _error(status: int, code: str, message: str, suggestion: str | None = None) -> Answer:
    error = {"code": code, "message": message}
    if suggestion is not None:
        error["suggestion"] = suggestion
    return Answer(status, {"error": error})
