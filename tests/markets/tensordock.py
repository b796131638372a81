"""A fake of TensorDock's API, version 2: locations with the parts they sell, and instances.

It answers as the documentation and the Terraform provider of others show. ``shape`` chooses how it
wraps an instance: "flat" as documented, "data" as that provider's tests have it, "attributes" as
the specification that others made.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, Literal

from tests.markets.faults import Action
from tests.markets.market import Rented, Ware
from tests.markets.server import Answer, FakeMarket, Request

API: Final = "/api/v2"
_CREATE = {
    "name", "type", "image", "resources", "location_id", "hostnode_id", "useDedicatedIp", "ssh_key",
    "ssh_key_id", "port_forwards", "cloud_init",
}  # fmt: skip
_CLOUD_INIT = {"runcmd", "packages", "package_update", "package_upgrade", "write_files"}
_RAM_GB = {2, 4, 6, 8, 10, *range(16, 257, 16), 512}
VCPU_USD_H: Final = 0.003
RAM_USD_GB_H: Final = 0.002
DISK_USD_GB_H: Final = 0.00005


def tensordock_wares() -> list[Ware]:
    """``gpu`` is TensorDock's v0Name; ``usd_h`` the price of one GPU alone."""
    return [
        Ware("geforcertx4090-pcie-24gb", 1, 24, 0.35, "Austin, United States", stock=4),
        Ware("geforcertx4090-pcie-24gb", 1, 24, 0.31, "Porto, Portugal", stock=2, name="NO IP"),
        Ware("h100-sxm5-80gb", 1, 80, 2.25, "Manassas, United States", stock=8),
        Ware("a100-pcie-80gb", 1, 80, 1.27, "Austin, United States", stock=2, disk_gib=1000),
        Ware("h100-sxm5-80gb", 1, 80, 2.45, "Austin, United States", stock=2),
    ]


class FakeTensorDock(FakeMarket):
    """``ware.stock`` is the most GPUs of one machine; ``ware.name`` "NO IP" has no addresses."""

    shape: Literal["flat", "data", "attributes"] = "flat"
    statuses_in_capitals: bool = False
    error: tuple[str, int] = ("Internal error", 500)  # in a 200 that refuses
    create_error: tuple[str, int] = ("The deployment timed out", 500)  # of one that was made
    named: Callable[[str], str] = staticmethod(lambda name: name)  # what becomes of a name

    def action_of(self, request: Request) -> Action:
        path = request.path.removeprefix(API)
        if path == "/locations":
            return "offers"
        if path == "/instances":
            return "create" if request.method == "POST" else "list"
        if path.startswith("/instances/"):
            return "destroy" if request.method == "DELETE" else "find"
        return "account"

    def handle(self, request: Request) -> Answer:
        if request.has("denied"):
            return _errors(403, "Forbidden", "This token may not do that")
        route = (request.method, request.path.removeprefix(API))
        if route == ("GET", "/locations"):
            return Answer(200, {"data": {"locations": self._locations()}})
        if route == ("POST", "/instances"):
            return self._create(request)
        if route == ("GET", "/instances"):
            shown = [] if request.has("not found") else self.market.visible()
            rows = [
                {
                    "type": "virtualmachine",
                    "id": one.id,
                    "attributes": {"name": one.label, "status": self._status(one)},
                }
                for one in shown
            ]
            return Answer(200, {"data": {"instances": rows}})
        if found := re.fullmatch(r"/instances/([\w-]+)", route[1]):
            return self._one(found[1], request)
        return _errors(404, "Not Found", "no such route")

    def unauthorized(self) -> Answer:
        return _errors(401, "Unauthorized", "Invalid token")

    def error_body(self, request: Request) -> Answer:
        return _refusal(*self.error)

    def _locations(self) -> list[dict[str, Any]]:
        places: dict[str, dict[str, Any]] = {}
        for ware in self.market.wares:
            city, country = ware.region.split(", ")
            place = places.setdefault(
                ware.region,
                {
                    "id": _location(ware),
                    "city": city,
                    "stateprovince": "",
                    "country": country,
                    "tier": 3,
                    "gpus": [],
                },
            )
            if ware.stock > 0:
                place["gpus"].append(
                    {
                        "v0Name": ware.gpu,
                        "displayName": f"NVIDIA {ware.gpu}",
                        "max_count": ware.stock,
                        "price_per_hr": ware.usd_h,
                        "resources": {
                            "max_vcpus": ware.cores * ware.stock,
                            "max_ram_gb": int(ware.ram_gib) * ware.stock,
                            "max_storage_gb": int(ware.disk_gib),
                        },
                        "pricing": {
                            "per_vcpu_hr": VCPU_USD_H,
                            "per_gb_ram_hr": RAM_USD_GB_H,
                            "per_gb_storage_hr": DISK_USD_GB_H,
                        },
                        "network_features": {
                            "dedicated_ip_available": ware.name != "NO IP",
                            "port_forwarding_available": True,
                            "network_storage_available": False,
                        },
                    }
                )
        return list(places.values())

    def _create(self, request: Request) -> Answer:
        data = (request.body or {}).get("data") or {}
        asked: dict[str, Any] = data.get("attributes") or {}
        if fault := _faulty(data, asked):
            return _errors(400, "Bad Request", fault)
        if request.has("no money") or self.market.balance_usd < 1:
            return _refusal("A minimum balance of $1 is required", 400)
        if request.has("quota"):
            return _refusal("You have reached your instance limit", 400)
        resources = asked["resources"]
        ((gpu, wanted),) = resources["gpus"].items()
        count = int(wanted["count"])
        placed = [
            ware
            for ware in self.market.wares
            if (ware.gpu, _location(ware)) == (gpu, asked["location_id"])
            and ware.stock >= count
            and ware.disk_gib >= resources["storage_gb"]
            and (ware.name != "NO IP" or not asked.get("useDedicatedIp"))
        ]
        if not placed or request.has("no capacity"):
            return _refusal("Hostnode unavailable", 400)
        machine = self.market.rent(
            placed[0],
            self.named(asked["name"]),
            asked,
            id_of=lambda number: f"7d000000-0000-4000-8000-{number:012x}",
            command=["/bin/sh", "-c", "\n".join(asked.get("cloud_init", {}).get("runcmd", []))],
        )
        machine.usd_h = (
            placed[0].usd_h * count
            + VCPU_USD_H * resources["vcpu_count"]
            + RAM_USD_GB_H * resources["ram_gb"]
            + DISK_USD_GB_H * resources["storage_gb"]
        )
        if request.has("error that created"):
            return _refusal(*self.create_error)
        made = {"type": "virtualmachine", "id": machine.id, "name": machine.label}
        return Answer(201, {"data": {**made, "status": "running"}})

    def _one(self, wanted: str, request: Request) -> Answer:
        machine = next((one for one in self.market.alive() if one.id == wanted), None)
        if machine is None or request.has("not found") or machine.hidden_looks > 0:
            return _errors(404, "Not Found", "Instance not found")
        if request.method == "DELETE":
            if not request.has("lives"):
                self.market.end(machine)
            said = {"message": "Instance deleted successfully"}
            return Answer(200, {"data": {"type": "success", "attributes": said}})
        return Answer(200, self._shown(machine))

    def _shown(self, machine: Rented) -> dict[str, Any]:
        status = self._status(machine)
        facts = {
            "name": machine.label,
            "status": status,
            "ipAddress": "" if status.lower() == "starting" else machine.address,
            "portForwards": [],
            "rateHourly": machine.usd_h,
            "resources": machine.request.get("resources", {}),
        }
        if self.shape == "attributes":
            return {"data": {"type": "virtualmachine", "id": machine.id, "attributes": facts}}
        if self.shape == "data":
            return {"data": {"id": machine.id, **facts}}
        return {"type": "instance", "id": machine.id, **facts}

    def _status(self, machine: Rented) -> str:
        starting = not machine.stopped and self.market.starting(machine)
        status = "stopped" if machine.stopped else "starting" if starting else "running"
        return status.capitalize() if self.statuses_in_capitals else status


def _location(ware: Ware) -> str:
    return "loc-" + re.sub(r"\W+", "-", ware.region.lower())


def _faulty(data: dict[str, Any], asked: dict[str, Any]) -> str:
    """What TensorDock's documentation forbids; empty: nothing."""
    resources = asked.get("resources", {})
    if data.get("type") != "virtualmachine" or set(asked) - _CREATE:
        return f"unknown: {set(asked) - _CREATE}"
    if ("location_id" in asked) == ("hostnode_id" in asked):
        return "exactly one of location_id and hostnode_id"
    if ("ssh_key" in asked) == ("ssh_key_id" in asked):
        return "exactly one of ssh_key and ssh_key_id"
    if set(asked.get("cloud_init", {})) - _CLOUD_INIT:
        return "unknown part of cloud_init"
    if resources.get("storage_gb", 0) < 100 or resources["storage_gb"] % 50:
        return "storage_gb: steps of 50, at least 100"
    if resources.get("vcpu_count", 0) < 2 or resources["vcpu_count"] % 2:
        return "vcpu_count: steps of 2"
    if resources.get("ram_gb") not in _RAM_GB:
        return "ram_gb: not a size on sale"
    if len(resources.get("gpus", {})) != 1:
        return "at least one GPU is required"
    return "" if re.fullmatch(r"[a-z]+\d+(_\w+)?", asked.get("image", "")) else "unknown image"


def _refusal(words: str, status: int) -> Answer:
    return Answer(200, {"error": words, "status": status})


def _errors(status: int, title: str, detail: str) -> Answer:
    error = {"status": str(status), "title": title, "detail": detail}
    return Answer(status, {"errors": [error]})
