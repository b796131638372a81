"""A fake of Lambda's Cloud API: instance types by region, launches, instances, SSH keys."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from tests.markets.market import Market, Rented, Ware
from tests.markets.server import Answer, FakeMarket, Request
from torpor.control.providers.lambda_cloud import LambdaProvider

_LAUNCH = {
    "region_name", "instance_type_name", "ssh_key_names", "file_system_names", "image", "tags",
    "file_system_mounts", "hostname", "name", "user_data", "firewall_rulesets",
}  # fmt: skip
_TAG_KEY = re.compile(r"[a-z][a-z0-9-:]+")


def lambda_wares() -> list[Ware]:
    sxm = ("H100 (80 GB SXM5)", 1, 80, 3.29)
    return [
        Ware("A10 (24 GB PCIe)", 1, 24, 0.75, "us-west-1", name="gpu_1x_a10", disk_gib=1400),
        Ware("H100 (80 GB PCIe)", 1, 80, 2.49, "us-west-3", name="gpu_1x_h100_pcie"),
        Ware(*sxm, "us-south-2", name="gpu_1x_h100_sxm5"),
        Ware(*sxm, "us-south-3", name="gpu_1x_h100_sxm5"),
    ]


class FakeLambda(FakeMarket):
    """``ware.name`` is the instance type. A machine that ended is found as terminated and is in no
    listing; ``ending_looks`` answers call it terminating before."""

    ending_looks: int = 0

    adapter = LambdaProvider
    wares = staticmethod(lambda_wares)
    body = "vm"
    given_port = True
    prefix = "/api/v1"
    routes: ClassVar = {
        r"GET /instance-types": ("offers", "_types"),
        r"POST /instance-operations/launch": ("create", "_launch"),
        r"POST /instance-operations/terminate": ("destroy", "_terminate"),
        r"GET /instances": ("list", "_list"),
        r"GET /instances/([0-9a-f]+)": ("find", "_show"),
        r"\w+ /ssh-keys(?:/(.*))?": ("account", "_ssh_key"),
        r"GET /file-systems": ("account", {"data": []}),
    }
    words: ClassVar = {
        "no capacity": (400, "instance-operations/launch/insufficient-capacity",
                        "Not enough capacity", "Contact Support."),
        "quota": (400, "global/quota-exceeded", "Quota exceeded.", "Contact Support."),
        "denied": (403, "global/account-inactive", "Your account is inactive.", "Contact Support."),
        "no money": (403, "global/account-inactive", "Your account is inactive.",
                     "Contact Support."),
        "wrong key": (401, "global/invalid-api-key", "API key was invalid.", "Check your API key."),
        "no route": (404, "global/not-found", "The requested resource was not found."),
        "gone": (404, "global/object-does-not-exist", "Specified instance does not exist."),
        "error body": (200, "provider/internal-unavailable", "Provider unavailable",
                       "Try again shortly"),
        "failed": (500, "global/internal-error", "An internal server error occurred.", "Wait."),
    }  # fmt: skip

    @staticmethod
    def error(status: int, code: str, message: str, suggestion: str | None = None) -> Answer:
        error = {"code": code, "message": message}
        if suggestion is not None:
            error["suggestion"] = suggestion
        return Answer(status, {"error": error})

    def __init__(self, market: Market | None = None) -> None:
        super().__init__(market)
        self.ssh_keys: dict[str, dict[str, str]] = {}
        self._ending: dict[str, int] = {}

    def disown(self, machine: Rented) -> None:
        super().disown(machine)
        machine.request = {**machine.request, "tags": []}

    def _list(self, request: Request) -> Answer:
        return Answer(200, {"data": [self._instance(machine) for machine in self.listed(request)]})

    def _show(self, request: Request, number: str) -> Answer:
        machine = self._machine(number)
        if machine is None or request.has("not found"):
            return self.error(*self.words["gone"])
        return Answer(200, {"data": self._instance(machine)})

    def _types(self, request: Request) -> Answer:
        found: dict[str, Any] = {}
        for ware in self.market.wares:
            empty = {"instance_type": _type(ware), "regions_with_capacity_available": []}
            item = found.setdefault(ware.name, empty)
            if ware.stock > 0:
                item["regions_with_capacity_available"].append(_region(ware.region))
        return Answer(200, {"data": found})

    def _launch(self, request: Request) -> Answer:
        asked: dict[str, Any] = request.body or {}
        if refused := self.refusal(request):
            return refused
        tags = asked.get("tags", [])
        faulty = (
            set(asked) - _LAUNCH
            or len(asked.get("ssh_key_names", [])) != 1
            or len(asked.get("name", "")) > 64
            or any(not _TAG_KEY.fullmatch(t["key"]) or len(t["key"]) > 55 for t in tags)
            or any(len(tag["value"]) > 128 for tag in tags)
        )
        if faulty:
            return self.error(400, "global/invalid-parameters", f"Invalid request data: {faulty}")
        if asked["ssh_key_names"][0] not in {key["name"] for key in self.ssh_keys.values()}:
            return self.error(404, "global/object-does-not-exist", "no such SSH key", "Add it.")
        asked_for = (asked.get("instance_type_name"), asked.get("region_name"))
        wares = [ware for ware in self.market.wares if (ware.name, ware.region) == asked_for]
        if not wares:
            return self.error(
                404, "global/object-does-not-exist", "no such type or region", "Look."
            )
        if wares[0].stock <= 0:
            return self.error(*self.words["no capacity"])
        machine = self.market.rent(
            wares[0],
            asked.get("name", ""),
            asked,
            id_of=lambda number: f"{number:032x}",
            script=asked.get("user_data", ""),
        )
        if request.has("error that created"):
            return self.error(500, "provider/internal-unknown", "the launch did not answer")
        return Answer(200, {"data": {"instance_ids": [machine.id]}})

    def _terminate(self, request: Request) -> Answer:
        machines = [
            self._machine(number) for number in (request.body or {}).get("instance_ids", [])
        ]
        found = [machine for machine in machines if machine is not None]
        if not found or len(found) < len(machines) or request.has("not found"):
            return self.error(*self.words["gone"])
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

    def _ssh_key(self, request: Request, named: str | None) -> Answer:
        asked = request.body or {}
        if request.method == "GET":
            return Answer(200, {"data": list(self.ssh_keys.values())})
        if request.method == "DELETE":
            key = self.ssh_keys.pop(named, None)
            return Answer(200, {"data": {}}) if key else self.error(*self.words["gone"])
        name = str(asked.get("name", ""))
        if not 1 <= len(name) <= 64 or name in {key["name"] for key in self.ssh_keys.values()}:
            return self.error(400, "global/invalid-parameters", "Invalid or duplicate name.")
        material = asked["public_key"].split()[:2]
        if any(key["public_key"].split()[:2] == material for key in self.ssh_keys.values()):
            return self.error(400, "global/duplicate", "This SSH key is registered already.")
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
