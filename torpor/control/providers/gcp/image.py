"""The images of machines of GCP, and the quotas of a project."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from torpor.control.providers.gcp.client import GcpClient, of_project
from torpor.control.providers.market_client import Refusal
from torpor.shared.errors import InvalidInput

DEFAULT_IMAGE: Final = (
    "projects/deeplearning-platform-release/global/images/family/"
    "common-cu129-ubuntu-2204-nvidia-580"
)
"""Google's own image with NVIDIA's driver, CUDA and Python 3.10."""
DEFAULT_CUDA: Final = (13, 0)  # the CUDA version that its driver supports
IMAGE: Final = re.compile(
    r"projects/([a-z0-9.:-]{1,63})(/global/images/(?:family/)?[a-z0-9-]{1,63})"
)
_ARCHITECTURES: Final = {"X86_64": "x86_64", "ARM64": "aarch64", "": "x86_64"}


class _Image(msgspec.Struct, rename="camel"):
    kind: Literal["compute#image"]
    name: str
    disk_size_gb: str
    status: str
    architecture: str = ""
    licenses: list[str] = []


class _Quota(msgspec.Struct):
    metric: str
    limit: float


class _Region(msgspec.Struct):
    kind: Literal["compute#region"]
    quotas: list[_Quota] = []


class Image(msgspec.Struct, frozen=True):
    """An image. ``gib``: the size of its disk. ``path``: its name in the request for a machine."""

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
