"""The images of machines of GCP, and the network and quotas that a project must have."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from torpor.control.providers.gcp.client import GcpClient, of_project
from torpor.control.providers.market_client import Refusal
from torpor.shared.errors import InvalidInput, ProviderDenied

DEFAULT_IMAGE: Final = (
    "projects/deeplearning-platform-release/global/images/family/"
    "common-cu129-ubuntu-2204-nvidia-580"
)
"""Google's own image with NVIDIA's driver, CUDA and Python 3.10."""
DEFAULT_CUDA: Final = (13, 0)  # what its driver supports
TAG: Final = "torpor"
"""The network tag of machines, which a firewall rule may name."""
IMAGE: Final = re.compile(
    r"projects/([a-z0-9.:-]{1,63})(/global/images/(?:family/)?[a-z0-9-]{1,63})"
)
_ARCHITECTURES: Final = {"X86_64": "x86_64", "ARM64": "aarch64", "": "x86_64"}
_SSH: Final = 22


class _Image(msgspec.Struct, rename="camel"):
    kind: Literal["compute#image"]
    name: str
    disk_size_gb: str
    status: str
    architecture: str = ""
    licenses: list[str] = []


class _Allowed(msgspec.Struct):
    protocol: str = msgspec.field(name="IPProtocol")
    ports: list[str] = []


class _Firewall(msgspec.Struct, rename="camel"):
    name: str
    network: str
    direction: str = "INGRESS"
    disabled: bool = False
    allowed: list[_Allowed] = []
    source_ranges: list[str] = []
    target_tags: list[str] = []
    target_service_accounts: list[str] = []


class _Quota(msgspec.Struct):
    metric: str
    limit: float


class _Region(msgspec.Struct):
    kind: Literal["compute#region"]
    quotas: list[_Quota] = []


class Image(msgspec.Struct, frozen=True):
    """An image. ``gib``: the size of its disk. ``path``: as a create names it."""

    path: str
    gib: int
    architecture: str  # as ``uname -m`` says it


class GcpImages:
    """``named``: the image of the provider block; empty: Google's Deep Learning VM."""

    def __init__(self, client: GcpClient, named: str = "") -> None:
        self._client, self._named = client, named

    def is_default(self, image: str) -> bool:
        return (image or self._named or DEFAULT_IMAGE) == DEFAULT_IMAGE

    def image(self, image: str = "") -> Image:
        """``image``, else the block's, else Google's. InvalidInput for one that does not exist or
        cannot become a machine of ours."""
        named = image or self._named or DEFAULT_IMAGE
        found = IMAGE.fullmatch(named)
        if found is None:
            raise InvalidInput(
                f"{named!r} is not an image of Compute Engine: GCP rents virtual machines, so the "
                "image is like projects/PROJECT/global/images/NAME or .../images/family/FAMILY, "
                "or empty for Google's Deep Learning VM"
            )
        answer = self._client.ask("GET", of_project(found[1], found[2]), _Image)
        if isinstance(answer, Refusal):
            if answer.status == 404:
                raise InvalidInput(f"GCP has no image {named}: correct it in the block")
            raise self._client.refused(answer, f"show the image {named}")
        architecture = _ARCHITECTURES.get(answer.architecture, answer.architecture)
        if any("windows" in url for url in answer.licenses) or answer.status != "READY":
            raise InvalidInput(
                f"image {named} is {answer.status} and cannot become a machine: torpor needs Linux"
            )
        path = f"projects/{found[1]}/global/images/{answer.name}"
        return Image(path, int(answer.disk_size_gb), architecture)


def check_network(client: GcpClient, network: str) -> None:
    """ProviderDenied unless a rule of ``network`` opens port 22 to somebody."""
    rules = client.listed(_Firewall, "/global/firewalls", f'network eq ".*/networks/{network}"')
    if not any(map(_opens_ssh, rules)):
        raise ProviderDenied(
            f"project {client.project} cannot rent: no firewall rule of the network {network} "
            f"opens port 22 to machines with the tag {TAG}. What is needed: gcloud compute "
            f"firewall-rules create {TAG} --network {network} --allow tcp:22 --target-tags {TAG} "
            "--source-ranges ADDRESS/32, with the address of the host of the flows"
        )


def gpu_quotas(client: GcpClient, regions: Sequence[str]) -> list[str]:
    """The quotas of GPUs that are not 0, by region. They are 0 in a new project."""
    notes = []
    for region in regions:
        found = client.read(_Region, f"/regions/{region}").quotas
        gpus = [f"{quota.metric} {quota.limit:.0f}" for quota in found if _is_of_gpus(quota)]
        notes.append(f"quotas in {region}: {', '.join(gpus) or 'no GPU'}")
    return notes


def _is_of_gpus(quota: _Quota) -> bool:
    return "GPUS" in quota.metric and "COMMITTED" not in quota.metric and quota.limit > 0


def _opens_ssh(rule: _Firewall) -> bool:
    reached = not rule.target_service_accounts and (not rule.target_tags or TAG in rule.target_tags)
    covers = any(
        allowed.protocol in ("all", "tcp", "6")
        and (not allowed.ports or any(map(_has_ssh, allowed.ports)))
        for allowed in rule.allowed
    )
    return (
        rule.direction == "INGRESS" and not rule.disabled and reached and covers
        and bool(rule.source_ranges)
    )  # fmt: skip


def _has_ssh(ports: str) -> bool:
    first, _, last = ports.partition("-")
    return first.isdigit() and int(first) <= _SSH <= int(last or first)
