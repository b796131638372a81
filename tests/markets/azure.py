"""A fake of Azure: sizes, resource groups with networks and machines, operations, and prices."""

from __future__ import annotations

import base64
import itertools
import math
import secrets
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar, Final
from urllib.parse import parse_qsl, urlencode

from tests.markets.azure_rules import IMAGE_GIB, group_fault, machine_fault, network_fault
from tests.markets.market import Market, Rented, Ware
from tests.markets.policies import Need, azure_rights
from tests.markets.server import Answer, FakeMarket, Request
from torpor.control.providers.azure.client import AzureLogin
from torpor.control.providers.azure.provider import AzureProvider

SUBSCRIPTION: Final = "11111111-2222-3333-4444-555555555555"
TENANT: Final = "99999999-8888-7777-6666-555555555555"
APPLICATION: Final = "77777777-6666-5555-4444-333333333333"
REGIONS: Final = ("eastus", "westeurope")
ADDRESS_USD_H: Final = 0.005
TIERS: Final = {32: ("P4", 5.28), 64: ("P6", 10.21), 128: ("P10", 19.71), 256: ("P15", 38.02),
                512: ("P20", 73.22), 4096: ("P50", 491.52)}  # fmt: skip
_TOKEN: Final = f"/{TENANT}/oauth2/v2.0/token"
_IMAGE: Final = "microsoft-dsvm/artifacttypes/vmimage/offers/ubuntu-hpc/skus/2204/versions"
_VERSIONS: Final = ("22.04.2024102301", "22.04.2026091502", "22.04.202609150")
_GROUP: Final = r"/resource[gG]roups/([\w.-]+)"
_THING: Final = rf"{_GROUP}/providers/Microsoft\.(Network|Compute)/(\w+)/(\w+)"
_MAKES: Final = {
    "resourceGroups": ("Microsoft.Resources/subscriptions/resourceGroups/write",),
    "networkSecurityGroups": ("Microsoft.Network/networkSecurityGroups/write",),
    "virtualNetworks": (
        "Microsoft.Network/virtualNetworks/write",
        "Microsoft.Network/networkSecurityGroups/join/action",
    ),
    "virtualMachines": (
        "Microsoft.Compute/virtualMachines/write",
        "Microsoft.Compute/disks/write",
        "Microsoft.Network/networkInterfaces/write",
        "Microsoft.Network/networkInterfaces/join/action",
        "Microsoft.Network/publicIPAddresses/write",
        "Microsoft.Network/publicIPAddresses/join/action",
        "Microsoft.Network/virtualNetworks/subnets/join/action",
    ),
}
"""What a PUT makes, and what it joins: a machine brings its disk, card and address."""
_KINDS: Final = {"networkSecurityGroups", "virtualNetworks", "virtualMachines"}


def azure_wares() -> list[Ware]:
    """``name`` is the size, ``gpu`` the family."""
    rows: list[tuple[str, int, int, float, str, str, float | None]] = [
        ("Standard NCASv3_T4 Family", 1, 16, 0.526, "eastus", "Standard_NC4as_T4_v3", 0.16),
        ("Standard NCASv3_T4 Family", 1, 16, 0.58, "westeurope", "Standard_NC4as_T4_v3", None),
        ("StandardNCADSA100v4Family", 1, 80, 3.673, "eastus", "Standard_NC24ads_A100_v4", 1.4),
        ("StandardNCadsH100v5Family", 1, 94, 6.98, "eastus", "Standard_NC40ads_H100_v5", None),
        ("StandardNCadsH100v5Family", 2, 94, 13.96, "westeurope", "Standard_NC80adis_H100_v5", 6.0),
        ("StandardNVADSA10v5Family", 1, 4, 0.454, "eastus", "Standard_NV6ads_A10_v5", 0.14),
        ("standardNDISv5MI300XFamily", 0, 0, 62.9, "eastus", "Standard_ND96is_MI300X_v5", None),
        ("standardDSv5Family", 0, 0, 0.192, "eastus", "Standard_D4s_v5", 0.04),
    ]
    return [Ware(*sold, name=name, spot_usd_h=spot) for *sold, name, spot in rows]


def disk_usd_h(gib: float) -> float:
    return next(usd for most, (_, usd) in TIERS.items() if gib <= most) / 730


class FakeAzure(FakeMarket):
    """Its key is an access token, which ``secret`` buys. ``operation_looks`` answers call an
    operation running before it ends, ``deletion_looks`` answers show a group as Deleting."""

    operation_looks: int = 0
    links = "https://management.azure.com"  # where links of answers lead
    deletion_looks: int = 0
    wares = staticmethod(azure_wares)
    rights = partial(azure_rights, "azure.json")
    body = "vm"
    given_port = True
    prefix = f"/subscriptions/{SUBSCRIPTION}"
    routes: ClassVar = {
        r"GET ": ("account", "_subscription"),
        r"GET /providers/Microsoft\.Compute/skus": ("offers", "_skus"),
        r"GET /providers/Microsoft\.Compute/locations/(\w+)/publishers/(.+)": ("account", "_image"),
        r"GET /providers/Microsoft\.Compute/locations/(\w+)/usages": ("account", "_usages"),
        r"GET /providers/Microsoft\.Compute/locations/\w+/operations/(\w+)": (
            "account",
            "_operation",
        ),
        r"GET /operationresults/([\w-]+)": ("account", "_deletion"),
        r"GET /resourcegroups": ("list", "_groups"),
        r"GET /resources": ("account", "_resources"),
        rf"GET {_GROUP}/resources": ("account", "_resources"),
        rf"GET {_GROUP}/providers/Microsoft\.Network/publicIPAddresses": ("account", "_addresses"),
        rf"PUT {_GROUP}": ("account", "_put_group"),
        rf"DELETE {_GROUP}": ("destroy", "_delete_group"),
        rf"GET {_GROUP}": ("find", "_group"),
        rf"PUT {_GROUP}/providers/Microsoft\.Compute/virtualMachines/(\w+)": ("create", "_put_vm"),
        rf"PUT {_THING}": ("account", "_put_network"),
        rf"GET {_GROUP}/providers/Microsoft\.Network/(\w+)/(\w+)": ("account", "_network"),
        rf"GET {_GROUP}/providers/Microsoft\.Compute/virtualMachines/(\w+)": ("find", "_vm"),
        r"\w+ /subscriptions/([\w-]+).*": ("account", "_no_subscription"),
    }
    words: ClassVar = {
        "quota": (409, "OperationNotAllowed", "Operation could not be completed as it results in "
                  "exceeding approved standardNCASv3_T4Family Cores quota. Current Limit: 0."),
        "denied": (403, "AuthorizationFailed", "The client does not have authorization to perform "
                   "action 'Microsoft.Resources/subscriptions/resourcegroups/write'."),
        "no money": (409, "ReadOnlyDisabledSubscription", "The subscription is disabled and "
                     "therefore marked as read only."),
        "wrong key": (401, "InvalidAuthenticationToken", "The access token is invalid."),
        "no route": (404, "InvalidResourceType", "The resource type could not be found."),
        "error body": (500, "InternalServerError", "Try again"),
        "failed": (500, "InternalServerError", "Encountered internal server error."),
    }  # fmt: skip

    @staticmethod
    def error(status: int, code: str, message: str) -> Answer:
        return Answer(status, {"error": {"code": code, "message": message}})

    def __init__(self, market: Market | None = None) -> None:
        self.secret = f"{secrets.token_urlsafe(30)}"
        self.groups: dict[str, dict[str, Any]] = {}
        """By name: what was asked for, and the machine; None until there is one. A machine that
        failed is no ``Rented``: its error."""
        self.operations: dict[str, dict[str, Any]] = {}
        self.exhausted = ("AllocationFailed", "We do not have sufficient capacity for the VM size.")
        self.exhausted_at_once = False  # in the answer, or in the operation that it begins
        self.for_networks: list[Answer] = []  # instead of making the next ones
        self.for_operations: list[Answer] = []  # instead of showing the next ones
        self.restricted: set[str] = set()  # sizes that this subscription may not rent
        self.state = "Enabled"
        self._numbers = itertools.count(1)
        self._looks: dict[str, int] = {}
        super().__init__(market)

    # -- FakeMarket

    def answer(self, request: Request, authorization: str) -> Answer | None:
        if request.path == _TOKEN:
            if (request.body["client_id"], authorization) != (APPLICATION, self.secret):
                told = {"error": "invalid_client", "error_description": "AADSTS7000215: Invalid "
                        "client secret provided.\r\nTrace ID: 1"}  # fmt: skip
                return Answer(401, told)
            return Answer(
                200, {"token_type": "Bearer", "expires_in": 3599, "access_token": self.key}
            )
        if request.path == "/api/retail/prices":
            return self._prices(request)
        return super().answer(request, authorization)

    def login_of(self, request: Request, header: str) -> str:
        """A login has the client secret in its form; no other request has it."""
        if request.path != _TOKEN:
            return header
        request.body = dict(parse_qsl(request.body))
        return str(request.body.pop("client_secret"))

    def settings(self) -> dict[str, Any]:
        """As a provider block states them."""
        return {
            "subscription": SUBSCRIPTION,
            "regions": [*REGIONS],
            "ssh_from": "203.0.113.7/32",
            "url": self.url,
            "prices_url": self.url,
        }

    def login(self) -> dict[str, Any]:
        """The rest of the block."""
        named = {"tenant": TENANT, "application": APPLICATION, "secret": self.secret}
        return {**named, "login_url": self.url}

    def opened(self, key: str, **options: Any) -> AzureProvider:
        login = AzureLogin(lambda: (key, math.inf), "a test")
        return AzureProvider(login, **self.settings() | options)

    def needs(self, request: Request) -> Iterator[Need]:
        """https://learn.microsoft.com/azure/role-based-access-control/resource-provider-operations"""
        path = self.asked(request).partition(" ")[2]
        if request.method == "PUT":
            made = path.strip("/").split("/")[-2]  # Azure takes any case of it
            (needs,) = [needs for kind, needs in _MAKES.items() if kind.lower() == made.lower()]
            yield from map(Need, needs)
        elif request.method == "DELETE":
            yield Need("Microsoft.Resources/subscriptions/resourceGroups/delete")
        else:
            yield Need(_read(path))

    def hand_id(self, number: int) -> str:
        """Of a group from which somebody has removed our tags."""
        return f"torpor-{number:032x}"

    def handle(self, request: Request) -> Answer:
        if not request.has("denied"):
            if "api-version" not in request.query:
                return self.error(400, "MissingApiVersionParameter", "The api-version is required.")
            self._take_in()
        return super().handle(request)

    def _take_in(self) -> None:
        """Machines that a test has rented or ended by its own hand."""
        for machine in self.market.rented:
            if machine.alive:
                empty: dict[str, Any] = {"asked": {"location": machine.ware.region}}
                self.groups.setdefault(machine.id, empty).setdefault("machine", machine)
        for group in self.groups.values():
            machine = group.get("machine")
            if isinstance(machine, Rented) and not machine.alive:
                group["machine"] = None

    def forget(self) -> None:
        super().forget()
        self.operations.clear()

    # -- groups

    def _put_group(self, request: Request, name: str) -> Answer:
        if faulty := group_fault(request.body, name):
            return self.error(400, "InvalidRequestContent", faulty)
        if self._looks.get(name):
            return self.error(
                409, "ResourceGroupBeingDeleted", f"{name} is in deprovisioning state"
            )
        known = self.groups.setdefault(name, {"things": {}})
        status = 200 if "asked" in known else 201
        known["asked"] = request.body
        return Answer(status, self._shown_group(name))

    def _shown_group(self, name: str) -> dict[str, Any]:
        asked = self.groups[name]["asked"]
        deleted = name in self._looks
        return {
            "id": f"{self.prefix}/resourceGroups/{name}",
            "name": name,
            "type": "Microsoft.Resources/resourceGroups",
            "location": asked["location"],
            "tags": asked.get("tags"),
            "properties": {"provisioningState": "Deleting" if deleted else "Succeeded"},
        }

    def _group(self, request: Request, name: str) -> Answer:
        if request.has("not found") or not self._there(name) or self._is_hidden(name):
            return self._no_group(name)
        return Answer(200, self._shown_group(name))

    def _no_group(self, name: str) -> Answer:
        return self.error(
            404, "ResourceGroupNotFound", f"Resource group '{name}' could not be found."
        )

    def _there(self, name: str) -> bool:
        """Whether the group is there; one that is being deleted for so many looks."""
        if name in self._looks:
            if self._looks[name] <= 0:
                del self._looks[name]
                del self.groups[name]
            else:
                self._looks[name] -= 1
        return name in self.groups

    def _is_hidden(self, name: str) -> bool:
        machine = self.groups[name].get("machine")
        return isinstance(machine, Rented) and self.market.hidden(machine)

    def _groups(self, request: Request) -> Answer:
        if request.has("not found"):
            return Answer(200, {"value": []})
        names = [name for name in list(self.groups) if self._there(name)]
        shown = [self._shown_group(name) for name in names if not self._is_hidden(name)]
        return self._page(request, shown)

    def _page(self, request: Request, rows: list[Any]) -> Answer:
        first = int(request.query.get("$skiptoken", 0))
        page = rows[first : first + self.market.page]
        answer: dict[str, Any] = {"value": page}
        if first + len(page) < len(rows):
            asked = {**request.query, "$skiptoken": str(first + len(page))}
            answer["nextLink"] = f"{self.links}{request.path}?{urlencode(asked)}"
        return Answer(200, answer)

    def _delete_group(self, request: Request, name: str) -> Answer:
        if not self._there(name) or request.has("not found"):
            return self._no_group(name)
        if not request.has("lives"):
            machine = self.groups[name].get("machine")
            if isinstance(machine, Rented):
                self.market.end(machine)
            self._looks.setdefault(name, self.deletion_looks)
            if not self.deletion_looks:
                self._there(name)
        link = f"{self.links}{self.prefix}/operationresults/{name}?api-version=2021-04-01"
        return Answer(202, None, headers={"Location": link})

    def _deletion(self, request: Request, name: str) -> Answer:
        return Answer(202 if self._there(name) else 200, None)

    def _resources(self, request: Request, name: str = "") -> Answer:
        rows = []
        for group in [name] if name else list(self.groups):
            if group not in self.groups:
                return self._no_group(group)
            rows += list(self._things(group))
        kind = request.query.get("$filter", "").removeprefix("resourceType eq ").strip("'")
        shown = [row for row in rows if kind in ("", row["type"]) and self._may_read(row["type"])]
        return self._page(request, shown)

    def _may_read(self, kind: str) -> bool:
        """Azure lists to nobody what he may not read."""
        return self.policy is None or self.policy.has(Need(f"{kind}/read"))

    def _things(self, name: str) -> Iterator[dict[str, Any]]:
        group = self.groups[name]
        rows = [(f"Microsoft.Network/{kind}", "torpor") for kind in group.get("things", {})]
        if group.get("machine") is not None:
            rows += [
                ("Microsoft.Compute/virtualMachines", "torpor"),
                ("Microsoft.Compute/disks", "torpor_OsDisk_1"),
                ("Microsoft.Network/networkInterfaces", "torpor-1a2b"),
                ("Microsoft.Network/publicIPAddresses", "torpor-1a2b"),
            ]
        for kind, named in rows + group.get("left", []):
            place = f"{self.prefix}/resourceGroups/{name.upper()}/providers/{kind}/{named}"
            yield {"id": place, "name": named, "type": kind, "location": "eastus"}

    # -- networks and machines

    def _put_network(self, request: Request, group: str, room: str, kind: str, name: str) -> Answer:
        if self.for_networks:
            return self.for_networks.pop(0)
        if group not in self.groups:
            return self._no_group(group)
        things = self.groups[group].setdefault("things", {})
        faulty = network_fault(kind, request.body, things, f"{self.prefix}/resourceGroups/{group}")
        if kind not in _KINDS or faulty:
            return self.error(400, "InvalidRequestFormat", faulty or kind)
        things[kind] = request.body
        body = {**request.body, "name": name, "id": request.path}
        return Answer(201, body, headers=self._began(None))

    def _network(self, request: Request, group: str, kind: str, name: str) -> Answer:
        body = {**self.groups[group]["things"][kind], "name": name, "id": request.path}
        return Answer(200, body)

    def _put_vm(self, request: Request, name: str, named: str) -> Answer:
        asked: dict[str, Any] = request.body or {}
        if name not in self.groups:
            return self._no_group(name)
        if refused := self.refusal(request, "quota", "no money"):
            return refused
        things = self.groups[name].get("things", {})
        if faulty := machine_fault(asked, things, f"{self.prefix}/resourceGroups/{name}"):
            return self.error(400, "InvalidParameter", faulty)
        with self.market.lock:
            known = self.groups[name].get("machine")
            if known is not None:
                if isinstance(known, Rented) and known.request != asked:
                    return self.error(
                        409, "PropertyChangeNotAllowed", "Changing it is not allowed."
                    )
                return Answer(200, self._shown_vm(name))
            ware = self._ware(asked)
            spot = asked["properties"].get("priority") == "Spot"
            if ware is None:
                return self.error(400, "InvalidParameter", "The VM size is not valid.")
            full = request.has("no capacity") or ware.stock <= 0 or (spot and not ware.spot_usd_h)
            if full and self.exhausted_at_once:
                return self.error(409, *self.exhausted)
            if full:
                self.groups[name]["machine"] = self.exhausted
                return Answer(201, self._shown_vm(name), headers=self._began(self.exhausted))
            self.groups[name]["machine"] = self._rent(ware, name, asked, spot)
        if request.has("error that created"):
            return self.failed()
        return Answer(201, self._shown_vm(name), headers=self._began(None))

    def _rent(self, ware: Ware, name: str, asked: dict[str, Any], spot: bool) -> Rented:
        told = asked["properties"]
        disk_gib = told["storageProfile"]["osDisk"]["diskSizeGB"]
        machine = self.market.rent(
            ware,
            name,
            asked,
            id_of=lambda _: name,
            script=base64.b64decode(told["osProfile"]["customData"]).decode(),
            spot=spot,
        )
        machine.usd_h += disk_usd_h(disk_gib) + ADDRESS_USD_H
        return machine

    def _ware(self, asked: dict[str, Any]) -> Ware | None:
        wanted = (asked["properties"]["hardwareProfile"]["vmSize"], asked["location"])
        return next((w for w in self.market.wares if (w.name, w.region) == wanted), None)

    def _vm(self, request: Request, name: str, named: str) -> Answer:
        if not self._there(name):
            return self._no_group(name)
        if self.groups[name].get("machine") is None or request.has("not found"):
            return self.error(404, "ResourceNotFound", f"The Resource '{named}' was not found.")
        return Answer(200, self._shown_vm(name))

    def _shown_vm(self, name: str) -> dict[str, Any]:
        machine = self.groups[name]["machine"]
        view: list[dict[str, str]] = []
        state, power = "Succeeded", "running"
        if isinstance(machine, Rented):
            if machine.stopped:
                power = "deallocated" if machine.no_room else "stopped"
            elif self.market.starting(machine):
                state, power = "Creating", ""
        else:
            state, power = "Failed", ""
            view = [{"code": f"ProvisioningState/failed/{machine[0]}", "message": machine[1]}]
        if power:
            view.append({"code": f"PowerState/{power}", "displayStatus": f"VM {power}"})
        return {
            "id": f"{self.prefix}/resourceGroups/{name}/providers/Microsoft.Compute/...",
            "name": "torpor",
            "location": self.groups[name]["asked"]["location"],
            "properties": {"provisioningState": state, "instanceView": {"statuses": view}},
        }

    def _addresses(self, request: Request, name: str) -> Answer:
        machine = self.groups.get(name, {}).get("machine")
        if not isinstance(machine, Rented):
            return Answer(200, {"value": []})
        row = {"name": "torpor-1a2b", "properties": {"ipAddress": machine.address}}
        return Answer(200, {"value": [row]})

    def _began(self, fault: tuple[str, str] | None) -> dict[str, str]:
        number = f"{next(self._numbers):08x}"
        ended: dict[str, Any] = {"status": "Failed" if fault else "Succeeded"}
        if fault:
            ended["error"] = {"code": fault[0], "message": fault[1]}
        self.operations[number] = ended
        self._looks[number] = self.operation_looks
        place = f"{self.prefix}/providers/Microsoft.Compute/locations/eastus"
        path = f"{place}/operations/{number}?api-version=2024-07-01&t=1"
        return {"Azure-AsyncOperation": f"{self.links}{path}"}

    def _operation(self, request: Request, number: str) -> Answer:
        if self.for_operations:
            return self.for_operations.pop(0)
        left = self._looks[number]
        self._looks[number] = max(0, left - 1)
        return Answer(200, {"status": "InProgress"} if left else self.operations[number])

    # -- what is on sale

    def _subscription(self, request: Request) -> Answer:
        shown = {"subscriptionId": SUBSCRIPTION, "displayName": "Pay-As-You-Go"}
        return Answer(200, {**shown, "state": self.state})

    def _no_subscription(self, request: Request, name: str) -> Answer:
        return self.error(404, "SubscriptionNotFound", f"The subscription '{name}' was not found.")

    def _skus(self, request: Request) -> Answer:
        region = request.query["$filter"].removeprefix("location eq '").removesuffix("'")
        wares = [ware for ware in self.market.wares if ware.region == region]
        disk = {"resourceType": "disks", "name": "Premium_LRS", "locations": [region],
                "family": None, "capabilities": None, "restrictions": None}  # fmt: skip
        return self._page(request, [disk, *map(self._sku, wares)])

    def _sku(self, ware: Ware) -> dict[str, Any]:
        told = {
            "vCPUs": ware.cores,
            "MemoryGB": ware.ram_gib,
            "CpuArchitectureType": "x64",
            "HyperVGenerations": "V1,V2",
            "LowPriorityCapable": ware.spot_usd_h is not None,
            **({"GPUs": ware.gpu_count} if ware.gpu_count else {}),
        }
        no = [{"type": "Location", "values": [ware.region],
               "reasonCode": "NotAvailableForSubscription"}]  # fmt: skip
        zone = [{"type": "Zone", "values": [ware.region], "reasonCode": "QuotaId"}]
        return {
            "resourceType": "virtualMachines",
            "name": ware.name,
            "family": ware.gpu,
            "locations": [ware.region.capitalize()],
            "capabilities": [{"name": key, "value": str(value)} for key, value in told.items()],
            "restrictions": no if ware.name in self.restricted else zone,
        }

    def _usages(self, request: Request, region: str) -> Answer:
        limits = {"cores": 10, "lowPriorityCores": 3, "standardNCASv3_T4Family": 8,
                  "standardNCADSA100v4Family": 0}  # fmt: skip
        rows = [
            {"name": {"value": name}, "unit": "Count", "currentValue": 0, "limit": limit}
            for name, limit in limits.items()
        ]
        return self._page(request, rows)

    def _image(self, request: Request, region: str, path: str) -> Answer:
        if path == _IMAGE:
            return Answer(200, [{"name": version, "location": region} for version in _VERSIONS])
        if path not in (f"{_IMAGE}/{version}" for version in _VERSIONS):
            return self.error(404, "NotFound", "Artifact: VMImage was not found.")
        disk = {"operatingSystem": "Linux", "sizeInGb": IMAGE_GIB}
        told = {"osDiskImage": disk, "architecture": "x64", "hyperVGeneration": "V2"}
        return Answer(200, {"name": path, "location": region, "properties": told})

    def _prices(self, request: Request) -> Answer:
        asked = request.query["$filter"]
        region = asked.partition("armRegionName eq '")[2].partition("'")[0]
        rows = list(
            self._disk_rows(region) if "Managed Disks" in asked else self._size_rows(region)
        )
        rows = [row for row in rows if not row["armSkuName"] or f"'{row['armSkuName']}'" in asked]
        first = int(request.query.get("$skip", 0))
        page = rows[first : first + 5]
        more = first + len(page) < len(rows)
        link = f"{self.url}/api/retail/prices?$filter={asked}&$skip={first + len(page)}"
        return Answer(
            200, {"Items": page, "NextPageLink": link if more else None, "Count": len(page)}
        )

    def _size_rows(self, region: str) -> Iterator[dict[str, Any]]:
        for ware in self.market.wares:
            if ware.region != region:
                continue
            short = ware.name.removeprefix("Standard_").replace("_", " ")
            yield _price(ware.name, ware.usd_h, short, "NC Series", region)
            yield _price(ware.name, ware.usd_h * 2, short, "NC Series Windows", region)
            yield _price(ware.name, ware.usd_h * 3, short, "NC Series Srs Win", region)
            yield _price(ware.name, 0.01, f"{short} Low Priority", "NC Series", region)
            if ware.spot_usd_h is not None:
                yield _price(ware.name, ware.spot_usd_h, f"{short} Spot", "NC Series", region)
                yield _price(ware.name, 9.0, f"{short} Spot", "NC Series Windows", region)

    def _disk_rows(self, region: str) -> Iterator[dict[str, Any]]:
        for name, usd in TIERS.values():
            row = _price("", usd, f"{name} LRS", "Premium SSD Managed Disks", region)
            yield {**row, "meterName": f"{name} LRS Disk", "unitOfMeasure": "1/Month"}
            yield {**row, "meterName": f"{name} LRS Disk Mount", "retailPrice": 0.5}


def _read(path: str) -> str:
    """The action that reads what a path of a subscription names: the kinds in it."""
    words = path.strip("/").split("/") if path.strip("/") else []
    below = "Microsoft.Resources/subscriptions"
    if "providers" in words:
        at = words.index("providers")
        below, words = words[at + 1], words[at + 2 :]
    return "/".join([below, *words[::2], "read"])


def _price(size: str, usd: float, sku: str, product: str, region: str) -> dict[str, Any]:
    return {
        "currencyCode": "USD",
        "retailPrice": usd,
        "unitPrice": usd,
        "armRegionName": region,
        "meterName": sku,
        "productName": product,
        "skuName": sku,
        "serviceName": "Virtual Machines",
        "unitOfMeasure": "1 Hour",
        "type": "Consumption",
        "armSkuName": size,
    }
