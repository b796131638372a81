"""The request that rents a machine of EC2, and what a refusal of it means."""

from __future__ import annotations

import math
from typing import Any, Final

from torpor.control.providers.ec2.client import DENIED, AwsRefusal
from torpor.control.providers.ec2.offers import offer_parts
from torpor.control.providers.ec2.prices import Ec2Prices
from torpor.control.providers.ec2.setup import Ec2Setup, Image, Network, tagged
from torpor.control.providers.labels import label_tags
from torpor.control.providers.provider import Order
from torpor.control.providers.start_script import start_script
from torpor.shared.errors import (
    CreateFailed,
    CreateUncertain,
    NoCapacity,
    ProviderDenied,
    ProviderError,
    QuotaReached,
)
from torpor.shared.values import Label, WorkspaceName

PRICE_TAG: Final = "torpor-usd-h"  # EC2 does not say what a machine costs
_PROBED: Final = "g4dn.xlarge"  # the instance type of the request that only checks permissions
_PROBE: Final = Label("torpor", WorkspaceName("probe"), "0" * 16)

_NO_CAPACITY: Final = frozenset(
    {"InsufficientInstanceCapacity", "InsufficientCapacity", "InsufficientHostCapacity",
     "InsufficientReservedInstanceCapacity", "InsufficientFreeAddressesInSubnet",
     "InsufficientVolumeCapacity", "SpotMaxPriceTooLow", "Unsupported"}
)  # fmt: skip
_QUOTA: Final = frozenset(
    {"VcpuLimitExceeded", "InstanceLimitExceeded", "MaxSpotInstanceCountExceeded",
     "VolumeLimitExceeded", "MaxIOPSLimitExceeded"}
)  # fmt: skip

_NO_SPOT_ROLE: Final = "AuthFailure.ServiceLinkedRoleCreationNotPermitted"
"""The error of a login that may not make the role for spot requests. AWS makes the role with the
first spot request of a login that may do so."""

PROBE_ALLOWED: Final = _NO_CAPACITY | _QUOTA | {"DryRunOperation"}
"""Answers to a probe that do not speak against the account: AWS checks permissions first, and the
probe's zone may lack its type (awslabs/engineering-development-hub #77)."""


def launch_request(setup: Ec2Setup, prices: Ec2Prices, order: Order) -> dict[str, Any]:
    """The request for one machine. Equal orders give equal requests, or AWS refuses the token.
    CreateFailed where the offer cannot be ordered."""
    kind, zone, spot = offer_parts(order.offer.id)
    network = setup.opened_network()
    if zone not in network.subnets:
        raise CreateFailed(f"the provider block has no subnet in {zone}")
    image = setup.image(order.image, order.offer.architecture)
    if image is None:
        raise CreateFailed(f"there is no image for the {order.offer.architecture} of {kind}")
    label = label_tags(order.label)
    named = {"Name": f"torpor {order.label.workspace}", **label}
    machine = {**named, PRICE_TAG: f"{order.offer.price_usd_h:.6f}"}
    tags = {"instance": machine, "volume": named, "network-interface": label}
    request: dict[str, Any] = {
        **_placed(setup, kind, image, network, zone, order.disk_gib),
        "UserData": start_script(order),
        "MetadataOptions": {"HttpTokens": "required", "HttpEndpoint": "enabled"},
    }
    if order.lifetime_s is not None:
        off = f"shutdown -P +{math.ceil(order.lifetime_s / 60)}\n"
        request["UserData"] = start_script(order, off)
        request["InstanceInitiatedShutdownBehavior"] = "terminate"
    if spot:
        tags["spot-instances-request"] = label
        options = _spot_options(setup, prices, order, image)
        request["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": options}
    return request | tagged(tags)


def probe_request(setup: Ec2Setup, image: Image) -> dict[str, Any]:
    """A request with ``DryRun``, which rents nothing. It has a label, because a policy may forbid
    machines without one."""
    network, label = setup.network(), label_tags(_PROBE)
    tags = dict.fromkeys(("instance", "volume", "network-interface"), label)
    zone = next(iter(network.subnets))
    return _placed(setup, _PROBED, image, network, zone, 0) | tagged(tags)


def launch_refused(order: Order, refusal: AwsRefusal) -> ProviderError:
    asked = f"AWS refused {order.offer.id}: {refusal}"
    if refusal.code in _NO_CAPACITY:
        return NoCapacity(asked)
    if refusal.code in _QUOTA:
        return QuotaReached(f"{asked} Ask for more in Service Quotas of {order.offer.region}")
    if refusal.code == "IdempotentParameterMismatch":
        return CreateUncertain(
            f"{asked} An earlier attempt with this label asked for another machine, which may "
            "exist. The attempt is abandoned; reconcile ends the machine if it appears"
        )
    if refusal.code in DENIED:
        return ProviderDenied(f"{asked}. Check the credentials block and its permissions")
    if refusal.code == _NO_SPOT_ROLE:
        return CreateFailed(
            f"{asked} Once in the account, run aws iam create-service-linked-role "
            "--aws-service-name spot.amazonaws.com"
        )
    return CreateFailed(asked)


def _placed(
    setup: Ec2Setup, kind: str, image: Image, network: Network, zone: str, disk_gib: float
) -> dict[str, Any]:
    """The part of a request that describes one machine. Its disk has ``disk_gib`` beside what the
    image takes."""
    disk = {
        "VolumeSize": image.gib + math.ceil(disk_gib),
        "VolumeType": "gp3",
        "DeleteOnTermination": True,
    }
    card = {
        "DeviceIndex": 0,
        "SubnetId": network.subnets[zone],
        **({"Groups": [network.group]} if network.group else {}),
        "AssociatePublicIpAddress": not setup.private,
        "DeleteOnTermination": True,
    }
    profile = {"Arn" if ":" in setup.instance_profile else "Name": setup.instance_profile}
    return {
        **({"IamInstanceProfile": profile} if setup.instance_profile else {}),
        "InstanceType": kind,
        "MinCount": 1,
        "MaxCount": 1,
        "ImageId": image.id,
        "BlockDeviceMappings": [{"DeviceName": image.root_device, "Ebs": disk}],
        "NetworkInterfaces": [card],
    }


def _spot_options(setup: Ec2Setup, prices: Ec2Prices, order: Order, image: Image) -> dict[str, str]:
    """The options of a spot request. Without a limit of the user, AWS limits the price to that on
    demand."""
    options = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
    if order.bid_usd_h is None:
        return options
    beside = prices.disk_usd_h(image.gib + order.disk_gib) + setup.address_usd_h
    most_usd_h = min(order.bid_usd_h, order.offer.most_usd_h or order.bid_usd_h)
    if most_usd_h <= beside:
        raise CreateFailed(
            f"a bid of {order.bid_usd_h:.4f} $/h is less than disk and address of "
            f"{order.offer.id} cost, {beside:.4f} $/h"
        )
    return {**options, "MaxPrice": f"{most_usd_h - beside:.6f}"}
