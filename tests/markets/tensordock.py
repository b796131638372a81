"""A fake of TensorDock's API, version 2: locations with the parts they sell, and instances.

It answers as the live service did to others. ``shape`` chooses how it wraps an instance: "flat" as
documented, "data" as the tests of a Terraform provider have it, "attributes" as the specification
that others made.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar, Final, Literal

from tests.markets.market import Rented, Ware
from tests.markets.server import Answer, FakeMarket, Request
from torpor.control.providers.tensordock import TensorDockProvider

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
    documented: bool = False  # lists and refusals are as in the documentation
    trouble: tuple[int, str] = (500, "Internal error")  # in a 200 that refuses
    create_error: Answer | None = None  # of one that was made
    named: Callable[[str], str] = staticmethod(lambda name: name)  # what becomes of a name

    adapter = TensorDockProvider
    wares = staticmethod(tensordock_wares)
    body = "vm"
    given_port = True
    prefix = "/api/v2"
    routes: ClassVar = {
        r"GET /locations": ("offers", "_locations"),
        r"POST /instances": ("create", "_create"),
        r"GET /instances": ("list", "_list"),
        r"DELETE /instances/([\w-]+)": ("destroy", "_show"),
        r"\w+ /instances/([\w-]+)": ("find", "_show"),
    }
    words: ClassVar = {
        "no capacity": (400, "Hostnode unavailable"),
        "quota": (400, "You have reached your instance limit"),
        "no money": (400, "A minimum balance of $1 is required"),
        "denied": (403, "Forbidden", "This token may not do that"),
        "wrong key": (401, "Unauthorized", "Invalid token"),
        "no route": (404, "Not Found", "no such route"),
    }

    @staticmethod
    def error(status: int, title: str, detail: str = "") -> Answer:
        """Without a detail it is a 200 that refuses."""
        if not detail:
            return Answer(200, {"error": title, "status": status})
        error = {"status": str(status), "title": title, "detail": detail}
        return Answer(status, {"errors": [error]})

    def error_body(self, request: Request) -> Answer:
        return self.error(*self.trouble)

    def _list(self, request: Request) -> Answer:
        machines = self.listed(request)
        if self.documented:
            rows = [
                {
                    "type": "virtualmachine",
                    "id": machine.id,
                    "attributes": {"name": machine.label, "status": self._status(machine)},
                }
                for machine in machines
            ]
            return Answer(200, {"data": {"instances": rows}})
        flat = [
            {"id": m.id, "name": m.label, "status": self._status(m), "ipAddress": m.address}
            for m in machines
        ]
        return Answer(200, {"data": flat})

    def _locations(self, request: Request) -> Answer:
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
        return Answer(200, {"data": {"locations": list(places.values())}})

    def _create(self, request: Request) -> Answer:
        data = (request.body or {}).get("data") or {}
        asked: dict[str, Any] = data.get("attributes") or {}
        if fault := _faulty(data, asked):
            if self.documented:
                return self.error(400, "Bad Request", fault)
            path = ["data", "attributes"]
            return Answer(400, [{"code": "custom", "message": fault, "path": path}])
        if refused := self.refusal(request):
            return refused
        if self.market.balance_usd < 1:
            return self.error(*self.words["no money"])
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
        if not placed:
            return self.error(*self.words["no capacity"])
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
            return self.create_error or self.error(500, "The deployment timed out")
        made = {"type": "virtualmachine", "id": machine.id, "name": machine.label}
        return Answer(201, {"data": {**made, "status": "running"}})

    def _show(self, request: Request, wanted: str) -> Answer:
        machine = self.found(request, wanted)
        if machine is None:
            return self.error(404, "Not Found", "Instance not found")
        if request.method == "DELETE":
            self.end(request, machine)
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
    if any(re.search(r"[\"'$`]", line) for line in asked.get("cloud_init", {}).get("runcmd", [])):
        return "cloud_init: a line that may not be kept as it is"
    if resources.get("storage_gb", 0) < 100 or resources["storage_gb"] % 50:
        return "storage_gb: steps of 50, at least 100"
    if resources.get("vcpu_count", 0) < 2 or resources["vcpu_count"] % 2:
        return "vcpu_count: steps of 2"
    if resources.get("ram_gb") not in _RAM_GB:
        return "ram_gb: not a size on sale"
    if len(resources.get("gpus", {})) != 1:
        return "at least one GPU is required"
    return "" if re.fullmatch(r"[a-z]+\d+(_\w+)?", asked.get("image", "")) else "unknown image"
