"""What Azure refuses in a request."""

from __future__ import annotations

import re
from ipaddress import ip_network
from typing import Any, Final

IMAGE_GIB: Final = 64
_TAG: Final = re.compile(r"[^<>%&\\?/]{1,512}")
_KEY: Final = re.compile(r"(?:ssh-rsa|ssh-ed25519) [A-Za-z0-9+/=]+(?: .*)?")
_CUSTOM_DATA: Final = 87_380  # characters: 64 KiB in base64


def group_fault(asked: dict[str, Any], name: str) -> str:
    """Why Azure would refuse a resource group."""
    if set(asked) != {"location", "tags"} or len(name) > 90:
        return "name"
    tags = asked["tags"]
    if len(tags) > 50 or not all(map(_TAG.fullmatch, tags)):
        return "tags"
    return "tags" if any(len(value) > 256 for value in tags.values()) else ""


def network_fault(kind: str, asked: dict[str, Any], things: dict[str, Any], group: str) -> str:
    """The same of a security group, or of a network with its subnet."""
    if set(asked) != {"location", "properties"}:
        return str(sorted(asked))
    told = asked["properties"]
    if kind == "networkSecurityGroups":
        (rule,) = (rule["properties"] for rule in told["securityRules"])
        if not all(re.fullmatch(r"\d+(-\d+)?", port) for port in rule["destinationPortRanges"]):
            return "destinationPortRanges"
        ip_network(rule["sourceAddressPrefix"])
        return "" if 100 <= rule["priority"] <= 4096 else "priority"
    (subnet,) = (subnet["properties"] for subnet in told["subnets"])
    (space,) = told["addressSpace"]["addressPrefixes"]
    if not ip_network(subnet["addressPrefix"]).subnet_of(ip_network(space)):  # type: ignore[arg-type]
        return "addressPrefix"
    wall = f"{group}/providers/Microsoft.Network/networkSecurityGroups/torpor"
    known = "networkSecurityGroups" in things and subnet["networkSecurityGroup"]["id"] == wall
    return "" if known else "networkSecurityGroup"


def machine_fault(asked: dict[str, Any], things: dict[str, Any], group: str) -> str:
    """The same of a machine."""
    told = asked["properties"]
    known = {"hardwareProfile", "storageProfile", "osProfile", "networkProfile", "priority",
             "evictionPolicy", "billingProfile"}  # fmt: skip
    if unknown := set(told) - known:
        return str(sorted(unknown))
    system = told["osProfile"]
    linux = system["linuxConfiguration"]
    (key,) = linux["ssh"]["publicKeys"]
    if system["adminUsername"] in ("root", "admin") or not linux["disablePasswordAuthentication"]:
        return "adminUsername"
    if key["path"] != f"/home/{system['adminUsername']}/.ssh/authorized_keys":
        return "linuxConfiguration.ssh.publicKeys.path"
    if not _KEY.fullmatch(key["keyData"]) or len(system["customData"]) > _CUSTOM_DATA:
        return "linuxConfiguration.ssh.publicKeys.keyData"
    disk = told["storageProfile"]["osDisk"]
    if not IMAGE_GIB <= disk["diskSizeGB"] <= 4095 or disk["deleteOption"] != "Delete":
        return "osDisk.diskSizeGB"
    (card,) = told["networkProfile"]["networkInterfaceConfigurations"]
    (place,) = card["properties"]["ipConfigurations"]
    subnet = f"{group}/providers/Microsoft.Network/virtualNetworks/torpor/subnets/torpor"
    if place["properties"]["subnet"]["id"] != subnet or "virtualNetworks" not in things:
        return "subnet"
    if told["networkProfile"]["networkApiVersion"] not in ("2020-11-01", "2022-11-01"):
        return "networkApiVersion"
    spot = told.get("priority") == "Spot"
    if spot is not ("evictionPolicy" in told) or spot is not ("billingProfile" in told):
        return "priority"
    most = told.get("billingProfile", {}).get("maxPrice", -1)
    return "" if most == -1 or most > 0 else "billingProfile.maxPrice"
