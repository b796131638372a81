"""The request that rents a machine of GCP, and what a refusal of it means."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from torpor.control.providers.gcp.client import Fault, GcpClient, denied
from torpor.control.providers.gcp.image import Image
from torpor.control.providers.gcp.network import TAG
from torpor.control.providers.gcp.offers import offer_parts, region_of
from torpor.control.providers.labels import label_tags
from torpor.control.providers.provider import Order
from torpor.control.providers.start_script import start_script
from torpor.shared.errors import (
    CreateFailed,
    NoCapacity,
    ProviderError,
    QuotaReached,
)

PRICE_KEY: Final = "torpor-usd-h"  # GCP does not say what a machine costs
_HYPERDISK: Final = ("a3-ultragpu", "a4", "c4", "g4", "h3", "h4d", "m4", "n4", "x4")
"""Machine types that take no persistent disk (dstack's gcp/resources.py for most of them;
nextflow-io/nextflow #6614 for c4a, c4d, n4a and n4d)."""
_MOVES: Final = "e2-"
"""Machine types that refuse ``TERMINATE`` on demand (skypilot-org/skypilot #1006, #1462). None of
them has a GPU."""
_EXHAUSTED: Final = ("RESOURCE_POOL_EXHAUSTED", "STOCKOUT", "UNSUPPORTED_OPERATION",
                     "insufficientCapacity")  # fmt: skip
"""Parts of codes that mean a full zone, or a spot machine that was taken while it was made
(SkyPilot's cloud_vm_ray_backend.py, for the last two)."""
_QUOTA: Final = frozenset({"quotaExceeded", "QUOTA_EXCEEDED", "limitExceeded", "LIMIT_EXCEEDED"})
_NOT_ALLOWED: Final = frozenset(
    {"PERMISSIONS_ERROR", "FORBIDDEN", "ACCESS_NOT_CONFIGURED", "BILLING_NOT_ENABLED"}
)


def launch_request(
    image: Image,
    order: Order,
    *,
    network: str,
    subnetwork: str,
    default_image: bool,
    more_script: str,
    more_metadata: Mapping[str, str],
) -> dict[str, Any]:
    """The instance that a create asks for. It has no service account, so no process on the machine
    has a login at Google. CreateFailed where the offer cannot be ordered."""
    ware, zone, spot = offer_parts(order.offer.id)
    if spot and order.bid_usd_h is not None and order.bid_usd_h < order.offer.price_usd_h:
        raise CreateFailed(
            f"GCP takes no bids: {order.offer.id} costs {order.offer.price_usd_h:.4f} $/h, the "
            f"most to pay is {order.bid_usd_h:.4f} $/h"
        )
    labels = label_tags(order.label)
    metadata = {
        "startup-script": start_script(order, more_script),
        "block-project-ssh-keys": "TRUE",  # nobody else's keys of the project may log in
        PRICE_KEY: f"{order.offer.price_usd_h:.6f}",
        **more_metadata,
    }
    if default_image:
        metadata["install-nvidia-driver"] = "True"
    card: dict[str, Any] = {
        "network": f"global/networks/{network}",
        "accessConfigs": [{"type": "ONE_TO_ONE_NAT", "name": "External NAT"}],
    }
    if subnetwork:
        card["subnetwork"] = f"regions/{region_of(zone)}/subnetworks/{subnetwork}"
    return {
        "name": instance_name(order),
        "machineType": f"zones/{zone}/machineTypes/{ware.type}",
        "labels": labels,
        "tags": {"items": [TAG]},
        "metadata": {"items": [{"key": k, "value": v} for k, v in metadata.items()]},
        "disks": [_disk(image, order, ware.type, zone, labels)],
        "networkInterfaces": [card],
        "scheduling": _scheduling(ware.type, spot) | _lifetime(order.lifetime_s),
        "guestAccelerators": [
            {
                "acceleratorType": f"zones/{zone}/acceleratorTypes/{ware.accelerator}",
                "acceleratorCount": ware.cards,
            }
        ]
        if ware.cards
        else [],
    }


def instance_name(order: Order) -> str:
    """The instance's name, one for each attempt: a second create in the zone finds it taken."""
    return f"torpor-{order.token}"


def launch_refused(client: GcpClient, order: Order, fault: Fault, status: int = 0) -> ProviderError:
    """The error for a refused launch. ``status``: of the answer; 0 where the operation failed
    later."""
    asked = f"GCP refused {order.offer.id}: {fault}"
    if _is_exhausted(fault):
        return NoCapacity(asked)
    if fault.code in _QUOTA:
        return QuotaReached(
            f"{asked} Ask for more on the page Quotas of project {client.project}, for "
            f"{order.offer.region} and for GPUS_ALL_REGIONS"
        )
    if status in (401, 403) or fault.code in _NOT_ALLOWED:
        return denied(client.identity, client.account, fault, f"create {order.offer.id}")
    return CreateFailed(asked)


def start_refused(client: GcpClient, machine: str, fault: Fault) -> ProviderError:
    """The error for a refused start of a stopped machine."""
    asked = f"GCP did not start {machine}: {fault}"
    if _is_exhausted(fault):
        return NoCapacity(asked)
    if fault.code in _QUOTA:
        return QuotaReached(asked)
    return ProviderError(asked)


def _is_exhausted(fault: Fault) -> bool:
    return any(code in fault.code for code in _EXHAUSTED)


def _disk(
    image: Image, order: Order, kind: str, zone: str, labels: dict[str, str]
) -> dict[str, Any]:
    """The boot disk: ``disk_gib`` beside what the image takes. It is deleted with the machine."""
    family = "hyperdisk-balanced" if kind.startswith(_HYPERDISK) else "pd-balanced"
    return {
        "boot": True,
        "autoDelete": True,
        "initializeParams": {
            "sourceImage": image.path,
            "diskSizeGb": str(image.gib + math.ceil(order.disk_gib)),
            "diskType": f"zones/{zone}/diskTypes/{family}",
            "labels": labels,
        },
    }


def _scheduling(kind: str, spot: bool) -> dict[str, Any]:
    """The scheduling options. A machine with a GPU cannot move to another host. A spot machine that
    Google takes is stopped and not deleted, because its disk holds what was not saved yet."""
    if not spot:
        return {
            "provisioningModel": "STANDARD",
            "onHostMaintenance": "MIGRATE" if kind.startswith(_MOVES) else "TERMINATE",
            "automaticRestart": True,
        }
    return {
        "provisioningModel": "SPOT",
        "instanceTerminationAction": "STOP",
        "onHostMaintenance": "TERMINATE",
        "automaticRestart": False,
    }


def _lifetime(seconds: float | None) -> dict[str, Any]:
    """The limit of the run time. A machine whose run time Google limits is not started again."""
    if seconds is None:
        return {}
    return {
        "maxRunDuration": {"seconds": str(round(seconds))},
        "instanceTerminationAction": "DELETE",
        "automaticRestart": False,
    }
