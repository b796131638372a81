"""Microsoft's clients as judges of the adapter's requests and of the fake's answers.

    python -P azure_models.py URL SUBSCRIPTION TOKEN <exchanges.json

Run by the Python of the oracles, which has them and not torpor; with -P, for ``azure`` is also a
file of this folder. The exchanges are lists of method,
path, request and answer. Prints JSON: what the clients' models do not know, and what the clients
themselves got of the fake at URL, where they rent a machine, fail to, and end it.
"""

from __future__ import annotations

import json
import re
import sys
import typing
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Final

from azure.core.exceptions import HttpResponseError
from azure.core.pipeline.policies import SansIOHTTPPolicy
from azure.mgmt.compute import ComputeManagementClient
from azure.mgmt.compute import models as compute
from azure.mgmt.network import NetworkManagementClient
from azure.mgmt.network import models as network
from azure.mgmt.resource.resources import ResourceManagementClient
from azure.mgmt.resource.resources import models as resources

MODELS: Final = {
    r".*/virtualMachines/\w+": (compute, "VirtualMachine"),
    r".*/networkSecurityGroups/\w+": (network, "NetworkSecurityGroup"),
    r".*/virtualNetworks/\w+": (network, "VirtualNetwork"),
    r".*/publicIPAddresses": (network, "PublicIPAddress"),
    r".*/skus": (compute, "ResourceSku"),
    r".*/usages": (compute, "Usage"),
    r".*/versions": (compute, "VirtualMachineImageResource"),
    r".*/versions/[\w.]+": (compute, "VirtualMachineImage"),
    r".*/resource[gG]roups(?:/[\w-]+)?": (resources, "ResourceGroup"),
    r".*/resources": (resources, "GenericResourceExpanded"),
}
NOT_IN_THE_MODEL: Final = ("properties.osDiskImage.sizeInGb",)
"""What Azure answers beyond its specification (SkyPilot's azure.py, get_image_size)."""


class Login(SansIOHTTPPolicy):  # type: ignore[misc]
    """Without TLS, the clients' own policy sends no token."""

    def __init__(self, token: str) -> None:
        self._token = token

    def on_request(self, request: Any) -> None:
        request.http_request.headers["Authorization"] = f"Bearer {self._token}"


def unknown(room: Any, kind: type, told: Any, path: str, *, sent: bool) -> Iterator[str]:
    """Paths of fields that the model lacks, or that only Azure may write where we ``sent`` them."""
    kind({})  # it learns its fields where it is made first
    fields = {field._rest_name: (name, field) for name, field in kind._attr_to_rest_field.items()}  # type: ignore[attr-defined]
    module = vars(sys.modules[kind.__module__])
    hints = typing.get_type_hints(kind, {**module, "_models": room})
    for key, value in told.items():
        where = f"{path}.{key}".strip(".")
        if key not in fields:
            yield where
            continue
        name, field = fields[key]
        if sent and field._visibility == ["read"]:
            yield f"{where} is read-only"
        inner = _model(hints[name])
        for row in value if isinstance(value, list) else [value]:
            if inner is not None and isinstance(row, dict):
                yield from unknown(room, inner, row, where, sent=sent)


def _model(hint: Any) -> type | None:
    """The model in ``Optional[list[Model]]``."""
    while args := typing.get_args(hint):
        hint = args[0] if typing.get_origin(hint) is not dict else None
    return hint if isinstance(hint, type) and hasattr(hint, "as_dict") else None


def judge(exchanges: list[tuple[str, str, Any, Any]]) -> Iterator[str]:
    for method, path, asked, answer in exchanges:
        found = next((m for p, m in MODELS.items() if re.fullmatch(p, path)), None)
        if found is None:
            continue
        room, name = found
        rows = answer.get("value", [answer]) if isinstance(answer, dict) else answer or []
        judged = [(row, False) for row in rows if "error" not in row]
        judged += [(asked, True)] if method == "PUT" else []
        for row, sent in judged:
            for where in unknown(room, getattr(room, name), row, "", sent=sent):
                if where not in NOT_IN_THE_MODEL:
                    yield f"{method} {name} {'sent' if sent else 'answered'}: {where}"


def use(url: str, subscription: str, token: str, bodies: dict[str, Any]) -> dict[str, Any]:
    """Rent and end a machine as the clients do, with the adapter's bodies; then fail to."""
    options = {"base_url": url, "authentication_policy": Login(token), "polling_interval": 0}
    login: Any = SimpleNamespace(get_token=None)
    machines = ComputeManagementClient(login, subscription, **options)
    networks = NetworkManagementClient(login, subscription, **options)
    groups = ResourceManagementClient(login, subscription, **options)

    def rent(name: str) -> Any:
        groups.resource_groups.create_or_update(name, bodies["ResourceGroup"])
        wall = bodies["NetworkSecurityGroup"]
        networks.network_security_groups.begin_create_or_update(name, "torpor", wall).result()
        networks.virtual_networks.begin_create_or_update(
            name, "torpor", json.loads(json.dumps(bodies["VirtualNetwork"]).replace("NAME", name))
        ).result()
        body = json.loads(json.dumps(bodies["VirtualMachine"]).replace("NAME", name))
        return machines.virtual_machines.begin_create_or_update(name, "torpor", body).result()

    first, second = "torpor-" + "a" * 32, "torpor-" + "b" * 32
    made = rent(first)
    shown = machines.virtual_machines.get(first, "torpor", expand="instanceView")
    addresses = [row.properties.ip_address for row in networks.public_ip_addresses.list(first)]
    region = bodies["ResourceGroup"]["location"]
    skus = machines.resource_skus.list(filter=f"location eq '{region}'")
    told = {
        "state": made.properties.provisioning_state,
        "power": [status.code for status in shown.properties.instance_view.statuses],
        "addresses": addresses,
        "skus": [sku.name for sku in skus],
        "quotas": [usage.name.value for usage in machines.usage.list(region)],
        "groups": [group.name for group in groups.resource_groups.list()],
    }
    groups.resource_groups.begin_delete(first).result()
    told["left"] = [group.name for group in groups.resource_groups.list()]
    try:
        rent(second)
    except HttpResponseError as error:
        told["failed"] = error.error.code
    return told


def main() -> None:
    url, subscription, token = sys.argv[1:]
    given = json.load(sys.stdin)
    found: dict[str, Any] = {"unknown": list(judge(given["exchanges"]))}
    if bodies := given.get("bodies"):
        found["used"] = use(url, subscription, token, bodies)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
