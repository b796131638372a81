"""What a rental of Azure consists of, and what a refusal of it means.

Each rental has a resource group of its own: a security group, a network, and the machine with its
disk, card and address. The group and all in it have fixed names, so a repeated request makes
nothing twice, and the end of the group is the end of everything.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any, Final

from torpor.control.providers.azure.client import DENIED, AzureClient, Fault
from torpor.control.providers.azure.image import Image
from torpor.control.providers.azure.offers import offer_parts
from torpor.control.providers.labels import label_tags
from torpor.control.providers.provider import Order
from torpor.control.providers.start_script import start_script
from torpor.shared.errors import (
    CreateFailed,
    CreateUncertain,
    NoCapacity,
    ProviderError,
    QuotaReached,
)

NAME: Final = "torpor"  # the name of every resource in a group
PRICE_TAG: Final = "torpor-usd-h"  # Azure does not say what a machine costs
SINCE_TAG: Final = "torpor-since"  # Unix time of the create
_USER: Final = "torpor"  # Azure does not take root here; the start script lets root log in
_SSH: Final = 22
_NETWORK_API: Final = "2022-11-01"  # of the card and the address that a machine brings
_NO_CAPACITY: Final = frozenset(
    {"SkuNotAvailable", "NotAvailableForSubscription", "AllocationFailed",
     "OverconstrainedAllocationRequest", "ZonalAllocationFailed",
     "OverconstrainedZonalAllocationRequest", "OperationPreempted"}
)  # fmt: skip
"""``OperationPreempted``: a spot machine that was taken while it was made."""
ABANDONED: Final = "The attempt is abandoned; reconcile ends the machine if it appears"


def group_name(order: Order) -> str:
    """The name of a rental's resource group, different for each attempt."""
    return f"torpor-{order.token}"


def group_request(order: Order, now_unix: float) -> dict[str, Any]:
    tags = {PRICE_TAG: f"{order.offer.price_usd_h:.6f}", SINCE_TAG: f"{now_unix:.0f}"}
    return {"location": _region(order), "tags": label_tags(order.label) | tags}


def firewall_request(order: Order, ssh_from: str, ports: Sequence[int]) -> dict[str, Any]:
    rule = {
        "priority": 100,
        "direction": "Inbound",
        "access": "Allow",
        "protocol": "Tcp",
        "sourceAddressPrefix": ssh_from,
        "sourcePortRange": "*",
        "destinationAddressPrefix": "*",
        "destinationPortRanges": [str(port) for port in (_SSH, *ports)],
    }
    rules = [{"name": NAME, "properties": rule}]
    return {"location": _region(order), "properties": {"securityRules": rules}}


def network_request(order: Order, group: str) -> dict[str, Any]:
    """The request for a rental's network. ``group``: the id of the resource group."""
    subnet = {
        "addressPrefix": "10.0.0.0/24",
        "networkSecurityGroup": {"id": f"{group}/{FIREWALL}"},
    }
    return {
        "location": _region(order),
        "properties": {
            "addressSpace": {"addressPrefixes": ["10.0.0.0/24"]},
            "subnets": [{"name": NAME, "properties": subnet}],
        },
    }


FIREWALL: Final = f"providers/Microsoft.Network/networkSecurityGroups/{NAME}"
NETWORK: Final = f"providers/Microsoft.Network/virtualNetworks/{NAME}"
MACHINE: Final = f"providers/Microsoft.Compute/virtualMachines/{NAME}"


def machine_request(order: Order, group: str, image: Image, beside_usd_h: float) -> dict[str, Any]:
    """The request for the machine. Its disk, card and address are deleted with it. Its disk has
    ``disk_gib`` beside what the image takes. ``beside_usd_h``: what disk and address cost."""
    size, region, spot = offer_parts(order.offer.id)
    key = {"path": f"/home/{_USER}/.ssh/authorized_keys", "keyData": order.public_key.strip()}
    address = {
        "name": NAME,
        "sku": {"name": "Standard", "tier": "Regional"},
        "properties": {"publicIPAllocationMethod": "Static", "deleteOption": "Delete"},
    }
    place = {
        "primary": True,
        "subnet": {"id": f"{group}/{NETWORK}/subnets/{NAME}"},
        "publicIPAddressConfiguration": address,
    }
    card = {
        "primary": True,
        "deleteOption": "Delete",
        "ipConfigurations": [{"name": NAME, "properties": place}],
    }
    disk = {
        "createOption": "FromImage",
        "diskSizeGB": image.gib + math.ceil(order.disk_gib),
        "deleteOption": "Delete",
        "managedDisk": {"storageAccountType": "Premium_LRS"},
    }
    return {
        "location": region,
        "properties": {
            "hardwareProfile": {"vmSize": size},
            "storageProfile": {"imageReference": image.reference, "osDisk": disk},
            "osProfile": {
                "computerName": NAME,
                "adminUsername": _USER,
                "customData": base64.b64encode(start_script(order).encode()).decode(),
                "linuxConfiguration": {
                    "disablePasswordAuthentication": True,
                    "ssh": {"publicKeys": [key]},
                },
            },
            "networkProfile": {
                "networkApiVersion": _NETWORK_API,
                "networkInterfaceConfigurations": [{"name": NAME, "properties": card}],
            },
            **(_spot(order, beside_usd_h) if spot else {}),
        },
    }


def launch_refused(
    client: AzureClient, order: Order, fault: Fault, *, conflict: bool = False
) -> ProviderError:
    """The error for a fault of one of these requests, or of the operation that it began, which
    Azure reports in the same words; only the code says what the fault concerns. ``conflict``:
    something else may have the same name."""
    asked = f"Azure refused {order.offer.id}: {fault}"
    if fault.code in _NO_CAPACITY:
        return NoCapacity(asked)
    if fault.is_quota:
        return QuotaReached(
            f"{asked} Ask for more on the page Quotas of subscription {client.subscription}, for "
            f"{order.offer.region}"
        )
    if fault.code in DENIED or fault.code in ("401", "403"):
        return client.not_allowed(fault, f"create {order.offer.id}")
    if conflict or fault.code == "PropertyChangeNotAllowed":
        return CreateUncertain(f"{asked}. Another machine may have this name. {ABANDONED}")
    return CreateFailed(asked)


def _region(order: Order) -> str:
    return offer_parts(order.offer.id)[1]


def _spot(order: Order, beside_usd_h: float) -> dict[str, Any]:
    """The spot options. Azure deletes a machine that it takes. Without a limit of the user, only
    capacity makes Azure take it, and Azure limits its price to that on demand."""
    most_usd_h = -1.0
    if order.bid_usd_h is not None:
        most_usd_h = round(order.bid_usd_h - beside_usd_h, 5)
        if most_usd_h <= 0:
            raise CreateFailed(
                f"a limit of {order.bid_usd_h:.4f} $/h is less than disk and address of "
                f"{order.offer.id} cost, {beside_usd_h:.4f} $/h"
            )
    return {
        "priority": "Spot",
        "evictionPolicy": "Delete",
        "billingProfile": {"maxPrice": most_usd_h},
    }
