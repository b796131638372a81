"""A fake of Google's Compute Engine: machine types, instances, disks, operations of a project."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
import secrets
from collections.abc import Iterator
from datetime import datetime, timezone
from functools import partial
from typing import Any, ClassVar, Final
from urllib.parse import parse_qsl

import google.auth.jwt
import google.oauth2.credentials

from tests.markets.gcp_rules import IMAGE_GIB, firewall_fault, fits, instance_fault
from tests.markets.market import Market, Rented, Ware
from tests.markets.policies import Need, google_rights
from tests.markets.server import Answer, FakeMarket, Request
from tests.markets.service_key import new_key, service_key
from torpor.control.providers.gcp.client import GoogleLogin
from torpor.control.providers.gcp.provider import GcpProvider

PROJECT: Final = "my-project-42"
ZONES: Final = ("us-central1-a", "us-central1-b", "europe-west4-a")
DISK_USD_GIB_MONTH: Final = 0.10
ADDRESS_USD_H: Final = 0.005
_PLACE: Final = rf"{PROJECT}/zones/([a-z0-9-]+)"
_LINK: Final = "https://www.googleapis.com/compute/v1"
_TOKENS: Final = "https://oauth2.googleapis.com/token"  # to whom a login is addressed
_FAMILY: Final = "common-cu129-ubuntu-2204-nvidia-580"
_ASKED: Final = re.compile(
    rf"\w+ {PROJECT}(?:/(?P<where>aggregated|global|(?:zones|regions)/[^/]+))?"
    r"(?:/(?P<kind>(?!global|images)\w+)(?:/(?P<name>[^/]+)(?:/(?P<act>\w+))?)?)?"
)
_SET: Final = {"labels": "setLabels", "metadata": "setMetadata", "tags": "setTags"}
_TYPES: Final = {"instances": "Instance", "disks": "Disk"}
_EXHAUSTED: Final = {
    "code": "ZONE_RESOURCE_POOL_EXHAUSTED",
    "message": "The zone does not have enough resources available to fulfill the request.",
}


def gcp_wares() -> list[Ware]:
    """``name`` is the machine type, with what is attached to it; ``region`` the zone."""
    rows: list[tuple[str, int, int, float, str, str, float | None]] = [
        ("nvidia-l4", 1, 24, 0.71, ZONES[0], "g2-standard-4", 0.28),
        ("nvidia-l4", 1, 24, 0.71, ZONES[1], "g2-standard-4", None),
        ("nvidia-tesla-t4", 1, 16, 0.73, ZONES[0], "n1-standard-8+nvidia-tesla-t4x1", None),
        ("nvidia-tesla-a100", 1, 40, 3.67, ZONES[2], "a2-highgpu-1g", 1.8),
        ("nvidia-h100-80gb", 1, 80, 11.06, ZONES[0], "a3-highgpu-1g", 4.4),
        ("nvidia-h100-80gb", 8, 80, 88.0, ZONES[1], "a3-highgpu-8g", None),
    ]
    disk = {"disk_usd_gib_month": DISK_USD_GIB_MONTH}
    return [Ware(*sold, name=name, spot_usd_h=spot, **disk) for *sold, name, spot in rows]


def gcp_prices(wares: list[Ware]) -> dict[str, float]:
    """As a provider block states them."""
    spot = {f"{w.name}/{w.region}/spot": w.spot_usd_h for w in wares if w.spot_usd_h is not None}
    return {f"{w.name}/{w.region}": w.usd_h for w in wares} | spot


class FakeGcp(FakeMarket):
    """Its key is an access token, which ``service_account`` gets. ``operation_looks`` answers call
    an operation running before it is done. ``deletion_looks`` answers show a machine as STOPPING
    after its deletion began."""

    operation_looks: int = 0
    deletion_looks: int = 0
    wares = staticmethod(gcp_wares)
    rights = partial(google_rights, "gcp.yaml", "gcp-condition.yaml")
    body = "vm"
    given_port = True
    prefix = "/compute/v1/projects/"
    routes: ClassVar = {
        r"GET ([^/]+)/global/images/(?:family/)?([a-z0-9-]+)": ("offers", "_image"),
        rf"GET {PROJECT}": ("account", {"kind": "compute#project", "name": PROJECT, "id": "42"}),
        rf"GET {PROJECT}/aggregated/(instances)": ("list", "_aggregated"),
        rf"GET {PROJECT}/aggregated/(machineTypes|acceleratorTypes)": ("offers", "_aggregated"),
        rf"GET {PROJECT}/aggregated/(\w+)": ("account", "_aggregated"),
        rf"GET {PROJECT}/global/firewalls": ("account", "_firewalls"),
        rf"POST {PROJECT}/global/firewalls": ("account", "_open"),
        rf"GET {PROJECT}/(global)/operations/([a-z0-9-]+)": ("account", "_operation"),
        rf"GET {PROJECT}/regions/([a-z0-9-]+)": ("account", "_region"),
        rf"POST {_PLACE}/instances": ("create", "_insert"),
        rf"DELETE {_PLACE}/instances/([a-z0-9-]+)": ("destroy", "_instance"),
        rf"GET {_PLACE}/instances/([a-z0-9-]+)": ("find", "_instance"),
        rf"POST {_PLACE}/instances/([a-z0-9-]+)/set(Metadata|Labels)": ("account", "_set"),
        rf"POST {_PLACE}/instances/([a-z0-9-]+)/(start|resume)": ("account", "_start"),
        rf"GET {_PLACE}/operations/([a-z0-9-]+)": ("account", "_operation"),
        rf"GET {_PLACE}/operations": ("account", "_operations"),
        rf"DELETE {PROJECT}/(?:zones|regions)/([a-z0-9-]+)/(disks|addresses)/(.+)": (
            "account",
            "_delete_left",
        ),
        rf"\w+ (?!{PROJECT}(?:/|$))([^/]+).*": ("account", "_no_project"),
    }
    words: ClassVar = {
        "quota": (403, "quotaExceeded", "Quota 'NVIDIA_L4_GPUS' exceeded. Limit: 0.0 in region."),
        "denied": (403, "forbidden", "Required 'compute.instances.create' permission for "
                   "'projects/x'"),
        "no money": (403, "accountDisabled", "This API method requires billing to be enabled."),
        "wrong key": (401, "authError", "Request had invalid authentication credentials."),
        "no route": (404, "notFound", "The resource was not found"),
        "error body": (503, "backendError", "Try again"),
        "failed": (503, "backendError", "Internal error. Please try again."),
    }  # fmt: skip

    @staticmethod
    def error(status: int, reason: str, message: str) -> Answer:
        errors = [{"message": message, "domain": "global", "reason": reason}]
        return Answer(status, {"error": {"code": status, "message": message, "errors": errors}})

    def __init__(self, market: Market | None = None) -> None:
        self.operations: dict[str, dict[str, Any]] = {}
        self.disks: dict[str, dict[str, Any]] = {}
        self.addresses: dict[str, dict[str, Any]] = {}
        ssh = {"IPProtocol": "tcp", "ports": ["22"]}
        self.firewalls = [
            _rule(name="default-allow-ssh", sourceRanges=["0.0.0.0/0"], allowed=[ssh])
        ]
        self.words = dict(type(self).words)  # type: ignore[misc]
        self.exhausted = dict(_EXHAUSTED)  # why an insert with "no capacity" fails
        self.unreachable = ""  # a zone that no listing can ask
        self.image: dict[str, Any] = {
            "kind": "compute#image",
            "name": f"{_FAMILY}-v20261101",
            "diskSizeGb": str(IMAGE_GIB),
            "status": "READY",
            "architecture": "X86_64",
            "licenses": [f"{_LINK}/projects/ubuntu-os-cloud/global/licenses/ubuntu-2204-lts"],
        }
        self._numbers = itertools.count(1)
        self._looks: dict[str, int] = {}
        self._by_request: dict[str, dict[str, Any]] = {}
        self._reaped: set[str] = set()
        super().__init__(market)
        self._take_service_key(service_key())

    # -- FakeMarket

    def answer(self, request: Request, authorization: str) -> Answer | None:
        if request.path != "/token":
            return super().answer(request, authorization)
        signed = dict(parse_qsl(request.body))["assertion"]
        try:
            google.auth.jwt.decode(signed, self._public_key, audience=_TOKENS)
        except ValueError:
            return Answer(400, {"error": "invalid_grant", "error_description": "Bad signature"})
        token = {"access_token": self.key, "expires_in": 3600, "token_type": "Bearer"}
        return Answer(200, token)

    def new_service_account(self) -> None:
        """Another key; Google takes the old one no more."""
        self._take_service_key(new_key())

    def _take_service_key(self, halves: tuple[str, bytes]) -> None:
        self.private_key, self._public_key = halves
        told = {
            "type": "service_account",
            "project_id": PROJECT,
            "private_key_id": "1",
            "private_key": self.private_key,
            "client_email": f"torpor@{PROJECT}.iam.gserviceaccount.com",
            "token_uri": f"{self.url}/token",
        }
        self.service_account = json.dumps(told)

    def settings(self) -> dict[str, Any]:
        """As a provider block states them."""
        return {
            "service_account": self.service_account,
            "project": PROJECT,
            "zones": [*ZONES],
            "prices": gcp_prices(self.market.wares),
            "disk_usd_gib_month": DISK_USD_GIB_MONTH,
            "url": self.url,
        }

    def opened(self, key: str, **options: Any) -> GcpProvider:
        if options.get("ssh_from"):
            self.grant(google_rights("gcp-ssh-from.yaml"))
        login = GoogleLogin(google.oauth2.credentials.Credentials(key))
        settings = self.settings() | options
        del settings["service_account"]
        return GcpProvider(login, **settings)

    def may_adopt(self) -> None:
        """The role without its condition: a machine of one's own has another name."""
        self.grant(google_rights("gcp.yaml"))

    def needs(self, request: Request) -> Iterator[Need]:
        """https://cloud.google.com/compute/docs/reference/rest/v1, IAM permissions of each method.
        Whoever owns an image's project says who may use it."""
        found = _ASKED.fullmatch(self.asked(request))
        if found is None:
            return
        where, kind, name, act = found.group("where", "kind", "name", "act")
        if kind == "operations":
            of = "globalOperations" if where == "global" else "zoneOperations"
            yield _need(f"{of}.{'get' if name else 'list'}")
        elif kind is None:
            yield _need("regions.get" if where else "projects.get")
        elif request.method == "POST" and kind == "firewalls":
            yield _need("firewalls.create")
            yield _need("networks.updatePolicy")
        elif request.method == "POST" and not act:
            yield from self._needs_of_insert(request.body or {}, where)
        else:
            verb = act or {"GET": "get" if name else "list", "DELETE": "delete"}[request.method]
            yield _need(f"{kind}.{verb}", f"{where}/{kind}/{name}" if name else "")

    def _needs_of_insert(self, asked: dict[str, Any], where: str) -> Iterator[Need]:
        machine, disk = f"{where}/instances/{asked['name']}", f"{where}/disks/{asked['name']}"
        yield _need("instances.create", machine)
        yield _need("disks.create", disk)
        for field, verb in _SET.items():
            if asked.get(field):
                yield _need(f"instances.{verb}", machine)
        if asked["disks"][0]["initializeParams"].get("labels"):
            yield _need("disks.setLabels", disk)
        yield _need("subnetworks.use")
        if asked["networkInterfaces"][0].get("accessConfigs"):
            yield _need("subnetworks.useExternalIp")

    def hand_id(self, number: int) -> str:
        return f"by-hand-{number}.{ZONES[0]}"

    def handle(self, request: Request) -> Answer:
        if not request.has("denied"):
            self._reap()
        return super().handle(request)

    # -- machines

    def _insert(self, request: Request, zone: str) -> Answer:
        asked: dict[str, Any] = request.body or {}
        if refused := self.refusal(request, "quota", "no money"):
            return refused
        token = request.query.get("requestId", "")
        if known := self._by_request.get(token):
            return Answer(200, known)
        if faulty := instance_fault(asked, zone, token):
            return self.error(400, "invalid", f"Invalid value for field 'resource.{faulty}'")
        with self.market.lock:
            if any(m.alive and _place(m) == (zone, asked["name"]) for m in self.market.rented):
                return self.error(409, "alreadyExists", f"'{asked['name']}' already exists")
            ware = self._ware(zone, asked)
            if ware is None:
                return self.error(400, "invalid", f"Machine type does not exist in zone '{zone}'.")
            spot = asked["scheduling"]["provisioningModel"] == "SPOT"
            operation = self._began("insert", zone, asked["name"], token)
            if request.has("no capacity") or ware.stock <= 0 or (spot and not ware.spot_usd_h):
                operation["error"] = {"errors": [self.exhausted]}
                return Answer(200, operation)
            machine = self._rent(ware, zone, asked, spot)
        if request.has("error that created"):
            return self.failed()
        operation["targetId"] = str(machine.number)
        return Answer(200, operation)

    def _rent(self, ware: Ware, zone: str, asked: dict[str, Any], spot: bool) -> Rented:
        items = asked["metadata"]["items"]
        script = next((i["value"] for i in items if i["key"] == "startup-script"), "")
        disk = asked["disks"][0]["initializeParams"]
        machine = self.market.rent(
            ware,
            asked["name"],
            asked,
            id_of=lambda _: f"{asked['name']}.{zone}",
            script=script,
            spot=spot,
            disk_gib=float(disk["diskSizeGb"]),
        )
        machine.usd_h += ADDRESS_USD_H
        self.disks[asked["name"]] = {
            "kind": "compute#disk",
            "name": asked["name"],
            "zone": f"{_LINK}/projects/{PROJECT}/zones/{zone}",
            "sizeGb": disk["diskSizeGb"],
            "status": "READY",
            "labels": disk.get("labels", {}),
            "users": [_target(zone, asked["name"])],
        }
        return machine

    def _ware(self, zone: str, asked: dict[str, Any]) -> Ware | None:
        name = asked["machineType"].rsplit("/", 1)[1]
        for accelerator in asked.get("guestAccelerators", []):
            kind = accelerator["acceleratorType"].rsplit("/", 1)[1]
            name += f"+{kind}x{accelerator['acceleratorCount']}"
        return next((w for w in self.market.wares if (w.name, w.region) == (name, zone)), None)

    def _instance(self, request: Request, zone: str, name: str) -> Answer:
        machine = self._machine(zone, name)
        if machine is None or request.has("not found"):
            return self._not_found(zone, name)
        if request.method == "DELETE":
            if request.has("lives"):
                lost = self._began("delete", zone, name, "")
                told = {"code": "INTERNAL_ERROR", "message": "Internal error."}
                lost["error"] = {"errors": [told]}  # in the end
                return Answer(200, lost)
            operation = self._began("delete", zone, name, request.query["requestId"])
            self.market.end(machine)
            self._looks[machine.id] = self.deletion_looks
            self._reap()
            return Answer(200, operation)
        return Answer(200, self._shown(machine))

    def _not_found(self, zone: str, name: str) -> Answer:
        told = f"The resource 'projects/{PROJECT}/{zone}/{name}' was not found"
        return self.error(404, "notFound", told)

    def _set(self, request: Request, zone: str, name: str, what: str) -> Answer:
        machine, body = self._machine(zone, name), request.body
        if machine is None:
            return self._not_found(zone, name)
        of_labels, of = what == "Labels", what.lower()
        shown = body["labelFingerprint" if of_labels else "fingerprint"]
        if shown != self._fingerprint(machine, of):
            return self.error(412, "conditionNotMet", "The fingerprint is not the current one.")
        machine.request[of] = body["labels"] if of_labels else {"items": body["items"]}
        return Answer(200, self._began(f"set{what}", zone, name, request.query["requestId"]))

    def _start(self, request: Request, zone: str, name: str, word: str) -> Answer:
        machine = self._machine(zone, name)
        if machine is None:
            return self._not_found(zone, name)
        if (word == "resume") != machine.suspended:
            return self.error(400, "resourceNotReady", f"The resource '{name}' is not ready")
        operation = self._began(word, zone, name, request.query["requestId"])
        if machine.no_room:
            operation["error"] = {"errors": [self.exhausted]}
        else:
            machine.stopped = machine.suspended = False
        return Answer(200, operation)

    def _fingerprint(self, machine: Rented, of: str = "metadata") -> str:
        items = json.dumps(machine.request.get(of, {})).encode()
        return base64.b64encode(hashlib.blake2b(items, digest_size=6).digest()).decode()

    def _reap(self) -> None:
        """What belongs to machines that have ended, also by a test's own hand; and machines whose
        own program has powered them off at their deadline."""
        for machine in self.market.rented:
            until = _metadata(machine).get("torpor-deadline")
            if until is not None and float(until) <= self.market.clock.now_unix:
                machine.stopped = True
            if machine.alive or machine.id in self._reaped:
                continue
            self._reaped.add(machine.id)
            zone, name = _place(machine)
            if not any(_deletes(operation, zone, name) for operation in self.operations.values()):
                self._began("delete", zone, name, "")
            if name in self.disks:
                self.disks[name]["users"] = []
                if machine.request["disks"][0]["autoDelete"]:
                    del self.disks[name]

    def _machine(self, zone: str, name: str) -> Rented | None:
        """Also one whose deletion began and has not ended."""
        for machine in self.market.rented:
            if _place(machine) != (zone, name):
                continue
            if not machine.alive and self._looks.get(machine.id, 0) > 0:
                self._looks[machine.id] -= 1
                return machine
            if machine.alive and not self.market.hidden(machine):
                return machine
        return None

    def _shown(self, machine: Rented) -> dict[str, Any]:
        zone, name = _place(machine)
        asked = machine.request
        status = "RUNNING"
        if not machine.alive:
            status = "STOPPING"
        elif machine.stopped:
            status = "SUSPENDED" if machine.suspended else "TERMINATED"
        elif self.market.starting(machine):
            status = "STAGING"
        card = {"type": "ONE_TO_ONE_NAT", "name": "External NAT", "kind": "compute#accessConfig"}
        if status == "RUNNING":
            card["natIP"] = machine.address
        disks = asked.get("disks", [])
        return {
            "kind": "compute#instance",
            "id": str(10**18 + machine.number),
            "name": name,
            "zone": f"{_LINK}/projects/{PROJECT}/zones/{zone}",
            "machineType": f"{_LINK}/projects/{PROJECT}/{asked.get('machineType', '')}",
            "status": status,
            "labels": asked.get("labels", {}),
            "labelFingerprint": self._fingerprint(machine, "labels"),
            "metadata": {
                "kind": "compute#metadata",
                "items": asked.get("metadata", {}).get("items", []),
                "fingerprint": self._fingerprint(machine),
            },
            "scheduling": asked.get("scheduling", {}),
            "networkInterfaces": [{"name": "nic0", "accessConfigs": [card]}],
            "disks": [
                {
                    "kind": "compute#attachedDisk",
                    "boot": True,
                    "autoDelete": disk["autoDelete"],
                    "diskSizeGb": disk["initializeParams"]["diskSizeGb"],
                }
                for disk in disks
            ],
        }

    def forget(self) -> None:
        self._reap()
        super().forget()
        self.operations.clear()

    # -- operations

    def _began(self, kind: str, zone: str, name: str, token: str) -> dict[str, Any]:
        number = next(self._numbers)
        operation = {
            "kind": "compute#operation",
            "id": str(10**17 + number),
            "name": f"operation-{number}-{secrets.token_hex(4)}",
            "operationType": kind,
            "status": "RUNNING",
            "insertTime": _time(self.market.clock.now_unix + number / 1000),
            "targetLink": _target(zone, name) if zone else f"{_LINK}/projects/{PROJECT}/{name}",
            **({"zone": f"{_LINK}/projects/{PROJECT}/zones/{zone}"} if zone else {}),
        }
        self.operations[operation["name"]] = operation
        self._looks[operation["name"]] = self.operation_looks
        if token:
            self._by_request[token] = operation
        return operation

    def _operation(self, request: Request, zone: str, name: str) -> Answer:
        operation = self.operations.get(name)
        if operation is None:
            return self.error(404, "notFound", f"The resource 'operations/{name}' was not found")
        left = self._looks[name]
        self._looks[name] = max(0, left - 1)
        if not left:
            operation["status"] = "DONE"
        return Answer(200, operation)

    # -- listings

    def _aggregated(self, request: Request, word: str) -> Answer:
        rows = self._rows(word, request)
        asked = request.query.get("filter", "")
        fitting = [row for row in rows if fits(row, asked)]
        first = int(request.query.get("pageToken", 0))
        page = fitting[first : first + self.market.page]
        parts: dict[str, dict[str, Any]] = {f"zones/{zone}": _empty(zone) for zone in ZONES}
        if self.unreachable:
            warning = {"code": "UNREACHABLE", "message": "The zone does not answer."}
            parts[f"zones/{self.unreachable}"] = {"warning": warning}
        for row in page:
            where = "/".join(row.get("zone", row.get("region", "")).rsplit("/", 2)[1:])
            parts[where] = {word: [*parts.get(where, {}).get(word, []), row]}
        answer: dict[str, Any] = {
            "kind": f"compute#{_SINGULAR[word]}AggregatedList",
            "items": parts,
        }
        if first + len(page) < len(fitting):
            answer["nextPageToken"] = str(first + len(page))
        return Answer(200, answer)

    def _rows(self, word: str, request: Request) -> list[dict[str, Any]]:
        if word == "instances":
            return [self._shown(machine) for machine in self.listed(request)]
        if word == "machineTypes":
            return list(self._types())
        if word == "acceleratorTypes":
            return list(self._accelerators())
        return list({"disks": self.disks, "addresses": self.addresses}[word].values())

    def _types(self) -> Iterator[dict[str, Any]]:
        for ware in self.market.wares:
            kind: dict[str, Any] = {
                "kind": "compute#machineType",
                "name": ware.name.partition("+")[0],
                "zone": ware.region,
                "guestCpus": ware.cores,
                "memoryMb": int(ware.ram_gib * 1024),
                "architecture": "X86_64",
            }
            if "+" not in ware.name and ware.gpu:
                kind["accelerators"] = [
                    {"guestAcceleratorType": ware.gpu, "guestAcceleratorCount": ware.gpu_count}
                ]
            yield {**kind, "zone": f"{_LINK}/projects/{PROJECT}/zones/{ware.region}"}

    def _accelerators(self) -> Iterator[dict[str, Any]]:
        for ware in self.market.wares:
            if "+" in ware.name:
                yield {
                    "kind": "compute#acceleratorType",
                    "name": ware.gpu,
                    "zone": f"{_LINK}/projects/{PROJECT}/zones/{ware.region}",
                    "maximumCardsPerInstance": 4,
                }

    def _firewalls(self, request: Request) -> Answer:
        return self._listing("firewall", self.firewalls, request)

    def _open(self, request: Request) -> Answer:
        asked: dict[str, Any] = request.body or {}
        if faulty := firewall_fault(asked):
            return self.error(400, "invalid", f"Invalid value for field 'resource.{faulty}'")
        if any(rule["name"] == asked["name"] for rule in self.firewalls):
            return self.error(409, "alreadyExists", f"'{asked['name']}' already exists")
        self.firewalls.append(_rule(**asked))
        return Answer(200, self._began("insert", "", asked["name"], request.query["requestId"]))

    def _operations(self, request: Request, zone: str) -> Answer:
        return self._listing("operation", list(self.operations.values()), request)

    def _listing(self, word: str, rows: list[dict[str, Any]], request: Request) -> Answer:
        asked = request.query.get("filter", "")
        fitting = [row for row in rows if fits(row, asked)]
        for row in fitting:
            if word == "operation" and not self._looks[row["name"]]:
                row["status"] = "DONE"
        return Answer(200, {"kind": f"compute#{word}List", "items": fitting})

    # -- the rest

    def _no_project(self, request: Request, project: str) -> Answer:
        return self.error(404, "notFound", f"The resource 'projects/{project}' was not found")

    def _region(self, request: Request, name: str) -> Answer:
        limits = {"CPUS": 72.0, "NVIDIA_L4_GPUS": 1.0}
        limits |= {"COMMITTED_NVIDIA_L4_GPUS": 0.0, "NVIDIA_T4_GPUS": 0.0}
        quotas = [{"metric": of, "limit": most, "usage": 0.0} for of, most in limits.items()]
        return Answer(200, {"kind": "compute#region", "name": name, "quotas": quotas})

    def _image(self, request: Request, project: str, name: str) -> Answer:
        known = name in (self.image["name"], _FAMILY) and project == "deeplearning-platform-release"
        if known or name == "mine":
            return Answer(200, self.image)
        return self.error(404, "notFound", f"The resource 'projects/{project}/...' was not found")

    def _delete_left(self, request: Request, where: str, kind: str, name: str) -> Answer:
        rows: dict[str, dict[str, Any]] = getattr(self, kind)
        if name not in rows:
            return self._not_found(where, name)
        if rows[name]["users"]:
            return self.error(400, "resourceInUseByAnotherResource", f"{name} is in use")
        del rows[name]
        return Answer(200, self._began("delete", where, name, ""))


_SINGULAR: Final = {
    "instances": "instance", "disks": "disk", "addresses": "address",
    "machineTypes": "machineType", "acceleratorTypes": "acceleratorType",
}  # fmt: skip


def _need(permission: str, path: str = "") -> Need:
    """On a thing of the project, or on the project."""
    kind = path.split("/")[2] if path else ""
    of = f"compute.googleapis.com/{_TYPES.get(kind, kind)}"
    place = f"{of} projects/{PROJECT}/{path}"
    project = f"cloudresourcemanager.googleapis.com/Project projects/{PROJECT}"
    return Need(f"compute.{permission}", place if path else project)


def _place(machine: Rented) -> tuple[str, str]:
    """Zone and name."""
    name, _, zone = machine.id.partition(".")
    return zone, name


def _metadata(machine: Rented) -> dict[str, str]:
    items = machine.request.get("metadata", {}).get("items", [])
    return {item["key"]: item["value"] for item in items}


def _deletes(operation: dict[str, Any], zone: str, name: str) -> bool:
    target = (operation["operationType"], operation["targetLink"])
    return target == ("delete", _target(zone, name)) and "error" not in operation


def _target(zone: str, name: str) -> str:
    return f"{_LINK}/projects/{PROJECT}/zones/{zone}/instances/{name}"


def _time(unix: float) -> str:
    return datetime.fromtimestamp(unix, timezone.utc).isoformat(timespec="milliseconds")


def _rule(network: str = "global/networks/default", **asked: Any) -> dict[str, Any]:
    link = f"{_LINK}/projects/{PROJECT}/{network}"
    return {"direction": "INGRESS", **asked, "kind": "compute#firewall", "network": link}


def _empty(zone: str) -> dict[str, Any]:
    message = f"There are no results for scope 'zones/{zone}' on this page."
    return {"warning": {"code": "NO_RESULTS_ON_PAGE", "message": message}}
