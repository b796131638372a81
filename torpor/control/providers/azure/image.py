"""The images of machines of Azure: those of its marketplace that need no purchase plan."""

from __future__ import annotations

import math
import re
from typing import Any, Final

import msgspec

from torpor.control.providers.azure.client import DENIED, AzureClient, fault_of
from torpor.control.providers.market_client import Refusal
from torpor.shared.errors import InvalidInput
from torpor.shared.values import GIB

DEFAULT_IMAGE: Final = "microsoft-dsvm:ubuntu-hpc:2204:latest"
"""Microsoft's own image with NVIDIA's driver, CUDA and Python 3.10."""
IMAGE: Final = re.compile(r"([\w.-]{1,80}):([\w.-]{1,80}):([\w.-]{1,80}):([\w.-]{1,40})")
_API: Final = "2024-07-01"
_DEFAULT_GIB: Final = 64
"""GiB of an image whose size Azure does not state."""


class _Version(msgspec.Struct):
    name: str


class _Disk(msgspec.Struct, rename="camel"):
    operating_system: str
    size_in_gb: float | None = None
    size_in_bytes: float | None = None

    @property
    def gib(self) -> int:
        stated = self.size_in_gb or (self.size_in_bytes or 0.0) / GIB
        return math.ceil(stated) or _DEFAULT_GIB


class _Details(msgspec.Struct, rename="camel"):
    os_disk_image: _Disk
    architecture: str = "x64"
    plan: dict[str, Any] | None = None


class _Shown(msgspec.Struct):
    properties: _Details


class Image(msgspec.Struct, frozen=True):
    """An image. ``gib``: the size of its disk. ``reference``: its name in the request for a
    machine."""

    reference: dict[str, str]
    gib: int


class AzureImages:
    """``named``: the image of the provider block; empty: Microsoft's HPC image."""

    def __init__(self, client: AzureClient, named: str = "") -> None:
        self._client, self._named = client, named

    def image(self, region: str, image: str = "") -> Image:
        """``image``, else the block's, else Microsoft's, as the region has it. InvalidInput for one
        that does not exist or cannot become a machine of ours."""
        named = image or self._named or DEFAULT_IMAGE
        found = IMAGE.fullmatch(named)
        if found is None:
            raise InvalidInput(
                f"{named!r} is not an image of Azure's marketplace: Azure rents virtual machines, "
                "so the image is PUBLISHER:OFFER:SKU:VERSION, or empty for Microsoft's HPC image"
            )
        publisher, offer, sku, version = found.groups()
        path = (
            f"/providers/Microsoft.Compute/locations/{region}/publishers/{publisher}/artifacttypes/"
            f"vmimage/offers/{offer}/skus/{sku}/versions"
        )
        number = self._newest(path, named) if version == "latest" else version
        shown = self._asked(f"{path}/{number}", named, _Shown).properties
        disk = shown.os_disk_image
        if (disk.operating_system, shown.architecture) != ("Linux", "x64") or shown.plan:
            raise InvalidInput(
                f"image {named} cannot become a machine: torpor needs Linux for x64, and an image "
                "without a purchase plan"
            )
        reference = {"publisher": publisher, "offer": offer, "sku": sku, "version": number}
        return Image(reference, disk.gib)

    def _newest(self, path: str, named: str) -> str:
        rows: list[_Version] = self._asked(path, named, list[_Version])
        if not rows:
            raise InvalidInput(f"Azure has no version of the image {named}: correct it")
        return max((row.name for row in rows), key=_numbers)

    def _asked(self, path: str, named: str, shape: Any) -> Any:
        answer = self._client.ask("GET", self._client.at(path, _API), shape)
        if isinstance(answer, Refusal):
            if answer.status == 404 and fault_of(answer).code not in DENIED:
                raise InvalidInput(f"Azure has no image {named}: correct it")
            raise self._client.refused(answer, f"show the image {named}")
        return answer


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]
