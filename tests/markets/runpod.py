"""A fake of RunPod's REST API, version 2: the catalog of GPUs, and pods."""

from __future__ import annotations

import base64
import json
import re
import shlex
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any, ClassVar, Final

from tests.markets.market import Rented, Ware
from tests.markets.server import Answer, FakeMarket, Request
from torpor.control.providers.runpod import RunpodProvider

MONTH_H: Final = 730
LONGEST_NAME: Final = 191
_CREATE = {
    "name", "image", "args", "cmd", "entrypoint", "disk", "ports", "env", "registry", "cloud",
    "cpu", "dataCenterIds", "globalNetworking", "gpu", "mounts", "startJupyter", "startSsh",
    "templateId", "locked",
}  # fmt: skip
_ACTIONS = {
    "STARTING": ["stop", "terminate"],
    "RUNNING": ["stop", "restart", "terminate"],
    "EXITED": ["start", "terminate"],
}


def runpod_wares() -> list[Ware]:
    return [
        Ware("NVIDIA GeForce RTX 4090", 1, 24, 0.59, "US-KS-2"),
        Ware("NVIDIA GeForce RTX 4090", 1, 24, 0.34, "EU-RO-1", name="COMMUNITY"),
        Ware("NVIDIA H100 80GB HBM3", 1, 80, 2.69, "EU-NL-1"),
        Ware("NVIDIA H100 PCIe", 1, 80, 1.99, "CA-MTL-1", cuda="12.4"),
    ]


class FakeRunPod(FakeMarket):
    """``ware.region`` is a data centre; ``ware.name`` is SECURE (also where empty) or COMMUNITY."""

    entrypoint: tuple[str, ...] = ()  # of every image
    image_user: str = "root"
    addresses: bool = True  # hosts have public ones
    uptime: Callable[[], int] = staticmethod(lambda: 5)
    shows_null: bool = False  # a look at a pod answers 200 and null
    volumes: ClassVar[dict[str, str]] = {"vol1": "US-KS-2", "vol2": "EU-RO-1"}
    """The data centres of network volumes."""
    registry: str = ""  # the id of the login that is stored and that all images ask for
    repeats: bool = False  # a refusal quotes the request
    pages: bool = True  # as since October 2026
    pagination: ClassVar[dict[str, Any]] = {}  # that of every page, where it is not the true one

    adapter = RunpodProvider
    wares = staticmethod(runpod_wares)
    prefix = "/v2"
    routes: ClassVar = {
        r"GET /catalog/gpus": ("offers", "_catalog"),
        r"POST /pods": ("create", "_create"),
        r"GET /pods": ("list", "_list"),
        r"DELETE /pods/([\w-]+)": ("destroy", "_show"),
        r"\w+ /pods/([\w-]+)": ("find", "_show"),
        r"GET /account/ssh-keys": ("account", {"keys": []}),
        r"GET /network-volumes/(\w+)": ("account", "_volume"),
        r"GET /network-volumes": ("account", {"networkVolumes": []}),
    }
    words: ClassVar = {
        "no capacity": (400, "Bad Request", "There are no longer any instances available with the "
                        "requested specifications."),
        "quota": (403, "Forbidden", "your account cannot access the requested pool"),
        "no money": (402, "Payment Required", "insufficient balance"),
        "denied": (403, "Forbidden", "access denied"),
        "wrong key": (401, "Unauthorized", "invalid bearer token"),
        "no route": (404, "Not Found", "no such route"),
        "error body": (502, "Bad Gateway", "upstream said nothing"),
        "failed": (500, "Internal Server Error", "it broke"),
    }  # fmt: skip

    @staticmethod
    def error(status: int, title: str, detail: str) -> Answer:
        body = {"title": title, "status": status, "detail": detail}
        return Answer(status, body, "application/problem+json")

    def variables_of(self, machine: str) -> dict[str, str]:
        return {"RUNPOD_POD_ID": machine, "RUNPOD_API_KEY": f"of-{machine}"}

    def _list(self, request: Request) -> Answer:
        if unknown := set(request.query) - ({"cursor", "limit"} if self.pages else set()):
            return self.error(422, "Unprocessable Entity", f"unknown {sorted(unknown)}")
        pods = [self._pod(machine) for machine in self.listed(request)]
        if not self.pages:
            return Answer(200, {"pods": pods})
        begin = int(base64.b64decode(request.query.get("cursor", "")) or 0)
        end = begin + min(int(request.query.get("limit", 1000)), self.market.page)
        cursor = base64.b64encode(str(end).encode()).decode() if end < len(pods) else None
        pagination = {"nextCursor": cursor, "hasNextPage": cursor is not None}
        return Answer(200, {"pods": pods[begin:end], "pagination": self.pagination or pagination})

    def _volume(self, request: Request, volume: str) -> Answer:
        if volume not in self.volumes:
            return self.error(404, "Not Found", "network volume not found")
        centre = {"id": volume, "name": "mine", "size": 50, "dataCenter": self.volumes[volume]}
        return Answer(200, {**centre, "type": "STANDARD"})

    def _catalog(self, request: Request) -> Answer:
        query = request.query
        availability = query.get("include") == "AVAILABILITY"
        if availability != ("product" in query):
            return self.error(400, "Bad Request", "include=AVAILABILITY and product go together")
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
        for entry in types.values():
            if availability:
                entry.setdefault("availability", "NONE")
            else:
                del entry["dataCenters"], entry["cudaVersions"]
        return Answer(200, {"gpus": list(types.values())})

    def _create(self, request: Request) -> Answer:
        asked: dict[str, Any] = request.body or {}
        faults = [f"$: additional properties '{key}' not allowed" for key in set(asked) - _CREATE]
        if not 1 <= len(asked.get("name", "")) <= LONGEST_NAME:
            faults.append("$.name: wrong length")
        if not all(re.fullmatch(r"\d+/(?:tcp|http)", port) for port in asked.get("ports", [])):
            faults.append("$.ports: wrong format")
        if not all(isinstance(value, str) for value in asked.get("env", {}).values()):
            faults.append("$.env: not a string")
        if faults:
            said = self.error(422, "Unprocessable Entity", "Request validation failed.")
            said.body["errors"] = faults
            return said
        if refused := self.refusal(request):
            if self.repeats:
                refused.body["detail"] += f" {asked.get('env')}"
            return refused
        if asked.get("registry", "") != self.registry:
            return self.error(400, "Bad Request", "the image cannot be pulled")
        if self.market.balance_usd <= 0:
            return self.error(*self.words["no money"])
        for mount in asked.get("mounts", {}).get("network", []):
            centre = self.volumes.get(mount["volumeId"])
            if mount.keys() != {"volumeId", "path"} or asked.get("dataCenterIds") != [centre]:
                return self.error(400, "Bad Request", "the volume is in another data center")
            if asked.get("cloud") != "SECURE":
                return self.error(400, "Bad Request", "the community cloud has no volumes")
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
        if not placed:
            return self.error(*self.words["no capacity"])
        machine = self.market.rent(
            placed[0],
            asked["name"],
            asked,
            id_of=lambda number: f"pod{number:07d}",
            command=self._command(asked) if "22/tcp" in asked.get("ports", []) else None,
            variables_of=self.variables_of,
            disk_gib=float(asked.get("disk", 10)),
        )
        if request.has("error that created"):
            return self.error(500, "Internal Server Error", "timed out waiting for the host")
        return Answer(201, self._pod(machine))

    def _command(self, asked: dict[str, Any]) -> list[str]:
        """``args`` is {"entrypoint": [...], "cmd": [...]} as JSON, or CMD as a shell writes it."""
        args = asked.get("args", "")
        start = json.loads(args) if args.startswith("{") else {"cmd": shlex.split(args)}
        start |= {key: asked[key] for key in ("entrypoint", "cmd") if key in asked}
        if asked.get("env", {}).get("RUNPOD_POD_USER", self.image_user) not in ("0", "root"):
            return []  # which writes to /root and runs sshd
        command = [*(start.get("entrypoint") or self.entrypoint), *start.get("cmd", [])]
        variables = {**asked.get("env", {})}
        variables.pop("RUNPOD_POD_USER", None)
        given = [f"{key}={value}" for key, value in variables.items()]
        return ["env", *given, *command] if given else command

    def _show(self, request: Request, pod: str) -> Answer:
        if self.shows_null and request.method == "GET":
            return Answer(200, "null")
        machine = self.found(request, pod)
        if machine is None:
            return self.error(404, "Not Found", "pod not found")
        if request.method == "DELETE":
            self.end(request, machine)
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
                "direct": _ssh(machine.address, machine.port, "root")
                if running and self.addresses
                else None,
            },
            "template": None,
            "cost": 0.0 if machine.stopped else machine.usd_h,
            "locked": False,
            "globalNetworking": {"enabled": False},
            "runtime": {"uptime": self.uptime(), "ports": []} if running else None,
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
