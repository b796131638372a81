"""A fake of RunPod's REST API, version 2: the catalog of GPUs, and pods."""

from __future__ import annotations

import re
import shlex
from datetime import datetime, timezone
from typing import Any, Final

from tests.markets.faults import Action
from tests.markets.market import Rented, Ware
from tests.markets.server import Answer, FakeMarket, Request

MONTH_H: Final = 730
LONGEST_NAME: Final = 191
_CREATE = {
    "name", "image", "args", "disk", "ports", "env", "registry", "cloud", "cpu", "dataCenterIds",
    "globalNetworking", "gpu", "mounts", "startJupyter", "startSsh", "templateId", "locked",
}  # fmt: skip
_ACTIONS = {
    "STARTING": ["stop", "terminate"],
    "RUNNING": ["stop", "restart", "terminate"],
    "EXITED": ["start", "terminate"],
}


class FakeRunPod(FakeMarket):
    """``ware.region`` is a data centre; ``ware.name`` is SECURE (also where empty) or COMMUNITY."""

    def action_of(self, request: Request) -> Action:
        path = request.path
        if path.startswith("/v2/catalog/"):
            return "offers"
        if path == "/v2/pods":
            return "create" if request.method == "POST" else "list"
        if path.startswith("/v2/pods/"):
            return "destroy" if request.method == "DELETE" else "find"
        return "account"

    def handle(self, request: Request) -> Answer:
        if request.has("denied"):
            return _problem(403, "Forbidden", "access denied")
        route = (request.method, request.path)
        if route == ("GET", "/v2/catalog/gpus"):
            return self._catalog(request.query)
        if route == ("POST", "/v2/pods"):
            return self._create(request)
        if route == ("GET", "/v2/pods"):
            pods = [] if request.has("not found") else self.market.visible()
            return Answer(200, {"pods": [self._pod(machine) for machine in pods]})
        if route == ("GET", "/v2/account/ssh-keys"):
            return Answer(200, {"keys": []})
        if route == ("GET", "/v2/network-volumes"):
            return Answer(200, {"networkVolumes": []})
        if found := re.fullmatch(r"/v2/pods/([\w-]+)", request.path):
            return self._one(found[1], request)
        return _problem(404, "Not Found", "no such route")

    def unauthorized(self) -> Answer:
        return _problem(401, "Unauthorized", "invalid bearer token")

    def error_body(self, request: Request) -> Answer:
        body = {"title": "Bad Gateway", "status": 502, "detail": "upstream said nothing"}
        return Answer(200, body)

    def failed(self) -> Answer:
        return _problem(500, "Internal Server Error", "it broke")

    def _catalog(self, query: dict[str, str]) -> Answer:
        availability = query.get("include") == "AVAILABILITY"
        if availability != ("product" in query):
            return _problem(400, "Bad Request", "include=AVAILABILITY and product go together")
        count, cloud = int(query.get("count", 1)), query.get("cloud", "SECURE")
        types: dict[str, dict[str, Any]] = {}
        for ware in self.market.wares:
            entry = types.setdefault(ware.gpu, _gpu_type(ware))
            tier = _tier(ware).lower()
            entry[tier] = True
            entry["price"][tier] = ware.usd_h / ware.gpu_count
            entry["maxCount"][tier] = max(entry["maxCount"][tier], ware.gpu_count)
            if availability and _tier(ware) == cloud and ware.gpu_count >= count:
                level = "HIGH" if ware.stock > 0 else "NONE"
                if ware.stock > 0:
                    entry["availability"] = "HIGH"
                entry.setdefault("availability", "NONE")
                centre = {"id": ware.region, "name": ware.region, "availability": level}
                entry["dataCenters"].append(centre)
                version = {"version": ware.cuda, "available": ware.stock > 0}
                if version not in entry["cudaVersions"]:
                    entry["cudaVersions"].append(version)
        if not availability:
            for entry in types.values():
                del entry["dataCenters"], entry["cudaVersions"]
        else:
            for entry in types.values():
                entry.setdefault("availability", "NONE")
        return Answer(200, {"gpus": list(types.values())})

    def _create(self, request: Request) -> Answer:
        asked: dict[str, Any] = request.body or {}
        faults = [f"$: additional properties '{key}' not allowed" for key in set(asked) - _CREATE]
        if not 1 <= len(asked.get("name", "")) <= LONGEST_NAME:
            faults.append("$.name: wrong length")
        if faults:
            said = _problem(422, "Unprocessable Entity", "Request validation failed.")
            said.body["errors"] = faults
            return said
        if request.has("no money") or self.market.balance_usd <= 0:
            return _problem(402, "Payment Required", "insufficient balance")
        if request.has("quota"):
            return _problem(403, "Forbidden", "your account cannot access the requested pool")
        gpu = asked.get("gpu") or {}
        count = int(gpu.get("count", 1))
        placed = [
            ware
            for ware in self.market.wares
            if (ware.gpu, ware.gpu_count, _tier(ware))
            == (gpu.get("id"), count, asked.get("cloud", "SECURE"))
            and ware.region in (asked.get("dataCenterIds") or [ware.region])
            and _version(ware.cuda) >= _version(gpu.get("minCudaVersion", "0.0"))
            and ware.stock > 0
        ]
        if not placed or request.has("no capacity"):
            text = "There are no longer any instances available with the requested specifications."
            return _problem(400, "Bad Request", text)
        machine = self.market.rent(
            placed[0],
            asked["name"],
            asked,
            id_of=lambda number: f"pod{number:07d}",
            command=shlex.split(asked.get("args", ""))
            if "22/tcp" in asked.get("ports", [])
            else None,
            disk_gib=float(asked.get("disk", 10)),
        )
        if request.has("error that created"):
            return _problem(500, "Internal Server Error", "timed out waiting for the host")
        return Answer(201, self._pod(machine))

    def _one(self, pod: str, request: Request) -> Answer:
        machine = next((m for m in self.market.alive() if m.id == pod), None)
        if machine is None or request.has("not found") or machine.hidden_looks > 0:
            return _problem(404, "Not Found", "pod not found")
        if request.method == "DELETE":
            if not request.has("lives"):
                self.market.end(machine)
            return Answer(204)
        return Answer(200, self._pod(machine))

    def _pod(self, machine: Rented) -> dict[str, Any]:
        asked = machine.request
        status = "EXITED" if machine.stopped else "RUNNING"
        if not machine.stopped and self.market.starting(machine):
            status = "STARTING"
        running = status == "RUNNING"
        since = datetime.fromtimestamp(machine.created_unix, timezone.utc).isoformat()
        proxy_user = f"{machine.id}-64411eb2"
        return {
            "id": machine.id,
            "name": machine.label,
            "image": asked.get("image", ""),
            "args": asked.get("args", ""),
            "disk": int(machine.disk_gib) or 10,
            "ports": asked.get("ports", []),
            "env": asked.get("env", {}),
            "registry": None,
            "status": status,
            "actions": _ACTIONS[status],
            "mounts": {},
            "gpu": {"id": machine.ware.gpu, "count": machine.ware.gpu_count},
            "cloud": _tier(machine.ware),
            "dataCenterId": machine.ware.region,
            "cudaVersion": machine.ware.cuda,
            "ssh": {
                "proxy": _ssh("ssh.runpod.io", 22, proxy_user),
                "direct": _ssh(machine.address, machine.port, "root") if running else None,
            },
            "template": None,
            "cost": 0.0 if machine.stopped else machine.usd_h,
            "locked": False,
            "globalNetworking": {"enabled": False},
            "runtime": {"uptime": 5, "ports": []} if running else None,
            "createdAt": since,
            "startedAt": since if running else None,
        }


def _gpu_type(ware: Ware) -> dict[str, Any]:
    return {
        "id": ware.gpu,
        "name": ware.gpu.removeprefix("NVIDIA ").removeprefix("GeForce "),
        "pool": None,
        "manufacturer": "NVIDIA",
        "memory": ware.vram_gib,
        "secure": False,
        "community": False,
        "price": {"secure": 0.0, "community": 0.0},
        "maxCount": {"secure": 0, "community": 0},
        "dataCenters": [],
        "cudaVersions": [],
    }


def _tier(ware: Ware) -> str:
    return ware.name or "SECURE"


def _ssh(host: str, port: int, user: str) -> dict[str, Any]:
    command = f"ssh {user}@{host} -p {port}"
    return {"host": host, "port": port, "username": user, "command": command}


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _problem(status: int, title: str, detail: str) -> Answer:
    body = {"title": title, "status": status, "detail": detail}
    return Answer(status, body, "application/problem+json")
