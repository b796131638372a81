"""What Google refuses in a request, and which rows its filters mean."""

from __future__ import annotations

import re
import uuid
from ipaddress import ip_network
from typing import Any, Final
from urllib.parse import unquote

IMAGE_GIB: Final = 15
_NAME: Final = re.compile(r"[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?")
_LABEL: Final = re.compile(r"[a-z0-9_-]{0,63}")
_INSTANCE: Final = {
    "name", "machineType", "labels", "tags", "metadata", "disks", "networkInterfaces",
    "scheduling", "guestAccelerators",
}  # fmt: skip
_ONLY_HYPERDISK: Final = re.compile(r"(?:a3-ultragpu|a4x?|c4[ad]?|g4|h3|h4d|m4n?|n4[ad]?|x4)-")
_FIREWALL: Final = {
    "name",
    "description",
    "network",
    "direction",
    "sourceRanges",
    "targetTags",
    "allowed",
}


def instance_fault(asked: dict[str, Any], zone: str, token: str) -> str:
    """The field that Google would refuse."""
    if unknown := set(asked) - _INSTANCE:
        return str(sorted(unknown))
    labels = [*asked["labels"].items()]
    for disk in asked["disks"]:
        labels += disk["initializeParams"].get("labels", {}).items()
        if int(disk["initializeParams"]["diskSizeGb"]) < IMAGE_GIB:
            return "disks[0].initializeParams.diskSizeGb"
    if any(not _LABEL.fullmatch(k) or not _LABEL.fullmatch(v) for k, v in labels):
        return "labels"
    try:
        uuid.UUID(token)
    except ValueError:
        return "requestId"
    scheduling = asked["scheduling"]
    spot = scheduling["provisioningModel"] == "SPOT"
    if spot and (scheduling["automaticRestart"] or "instanceTerminationAction" not in scheduling):
        return "scheduling"
    places = [asked["machineType"], asked["disks"][0]["initializeParams"]["diskType"]]
    kind, disk = (place.rsplit("/", 1)[1] for place in places)
    moves = kind.startswith("e2-") and not spot  # a machine with a GPU cannot move
    if scheduling["onHostMaintenance"] != ("MIGRATE" if moves else "TERMINATE"):
        return "scheduling.onHostMaintenance"
    if disk != ("hyperdisk-balanced" if _ONLY_HYPERDISK.match(kind) else "pd-balanced"):
        return f"disks[0].initializeParams.diskType: [{disk}] is not compatible with {kind}"
    if any(not place.startswith(f"zones/{zone}/") for place in places):
        return "machineType"
    return "" if _NAME.fullmatch(asked["name"]) else "name"


def fits(row: dict[str, Any], asked: str) -> bool:
    """The filters that the adapter writes."""
    asked = unquote(asked)
    if found := re.fullmatch(r'(\w+) eq "(.+)"', asked):
        return re.fullmatch(found[2], str(row.get(found[1], ""))) is not None
    if found := re.fullmatch(r"labels\.([\w-]+)(:\*| = (\S+))", asked):
        value = row.get("labels", {}).get(found[1])
        return value is not None and found[3] in (None, value)
    names = re.findall(r'\(name = "([a-z0-9-]+)"\)', asked)
    assert " OR ".join(f'(name = "{name}")' for name in names) == asked, asked
    return row["name"] in names


def firewall_fault(asked: dict[str, Any]) -> str:
    """The same of a firewall rule."""
    if unknown := set(asked) - _FIREWALL:
        return str(sorted(unknown))
    if not re.fullmatch(r"global/networks/[a-z0-9-]+", asked["network"]):
        return "network"
    try:
        all(map(ip_network, asked["sourceRanges"]))
    except ValueError:
        return "sourceRanges"
    ports = [port for rule in asked["allowed"] for port in rule["ports"]]
    if not all(re.fullmatch(r"\d+(-\d+)?", port) for port in ports):
        return "allowed[0].ports"
    named = [asked["name"], *asked["targetTags"]]
    return "" if all(map(_NAME.fullmatch, named)) else "name"
