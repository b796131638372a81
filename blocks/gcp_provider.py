"""The block of Google Cloud: a project, its zones, and what its machines cost."""

from __future__ import annotations

import re
from typing import Final, Self

from prefect.blocks.core import Block
from pydantic import Field, HttpUrl, SecretStr, ValidationInfo, field_validator, model_validator

from blocks.container import Ports, SshFrom
from blocks.markets import ApiUrl
from blocks.reference import LOGOS
from torpor.control.providers.gcp import provider as gcp
from torpor.control.providers.gcp.client import URL, GoogleLogin
from torpor.control.providers.gcp.image import IMAGE
from torpor.control.providers.gcp.network import TAG
from torpor.control.providers.gcp.offers import priced
from torpor.shared.errors import InvalidInput

_IDS: Final = {
    "project": r"(?:[a-z][a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]",
    "zones": r"[a-z]+-[a-z]+\d+-[a-z0-9]+",
    "network": r"[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?",
    "subnetwork": r"(?:[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?)?",
    "image": rf"(?:{IMAGE.pattern})?",
}


class GcpProvider(Block):
    """One project of Google Cloud: Compute Engine machines with NVIDIA GPUs, on demand and spot.

    The project needs a network with a firewall rule that opens port 22 to the host of the flows.
    torpor creates neither, unless the block says from where SSH may come: then the first rental
    makes the rule. It needs the extra gcp, which `make setup` installs.

    Example:
        List what is on sale:
        ```python
        from blocks import GcpProvider
        from torpor.shared.values import Want

        provider = GcpProvider.load("BLOCK_NAME").open()
        print(provider.check(), provider.offers(Want(gpu="L4", spot="allowed")))
        ```
    """

    _block_type_name = "GCP Provider"
    _block_type_slug = "gcp-provider"
    _logo_url = HttpUrl(f"{LOGOS}/process.png")
    _documentation_url = HttpUrl("https://cloud.google.com/compute/docs/gpus")

    project: str = Field(description="The id of the Google Cloud project that pays.")
    service_account: SecretStr = Field(
        default=SecretStr(""),
        title="Service account key",
        description=(
            "The JSON key of a service account, the whole file. Empty: the login of the host of "
            "the flows (Application Default Credentials)."
        ),
    )
    zones: list[str] = Field(
        description="The zones to rent in, such as us-central1-a. Machines are in one of them.",
        min_length=1,
    )
    prices: dict[str, float] = Field(
        description=(
            "Dollars an hour of each machine type to rent, without its disk: g2-standard-4, or "
            "n1-standard-8+nvidia-tesla-t4x1 for one with a GPU attached. Add /us-central1 for a "
            "price in one region and /spot for that of spot machines. What has no price here is "
            "not rented: Google's list of prices does not say which price is whose."
        ),
    )
    disk_usd_gib_month: float = Field(
        gt=0,
        title="Price of disk",
        description=(
            "Dollars a month for a GiB of balanced disk, the highest of the zones. A machine that "
            "was stopped costs it, too."
        ),
    )
    image: str = Field(
        default="",
        description=(
            "The image of new machines, such as projects/PROJECT/global/images/family/FAMILY: "
            "Linux with Google's guest agent and Python 3.10 or newer. Empty: Google's Deep "
            "Learning VM with NVIDIA's driver and CUDA."
        ),
    )
    network: str = Field(default="default", description="The VPC network of new machines.")
    subnetwork: str = Field(
        default="",
        description="The subnetwork of new machines, for a network that does not choose one.",
    )
    ssh_from: SshFrom = Field(
        default="",
        description=(
            "The addresses from which SSH may come, as a CIDR: 203.0.113.7/32 for one host, "
            "0.0.0.0/0 for all. The first rental makes a firewall rule that opens port 22 for them "
            "to torpor's machines, where no rule does; a change here closes none. Empty: torpor "
            "makes none."
        ),
    )
    ports: Ports = Field(
        default_factory=list,
        description=(
            "TCP ports that torpor opens beside port 22, for the same addresses, on all its "
            "machines in the network. It closes none again. It needs SSH from."
        ),
    )
    deadline_h: float = Field(
        default=0,
        ge=0,
        title="Deadline",
        description=(
            "A machine powers itself off after so many hours in which the flow `watch` has not "
            "renewed this. Google keeps its disk. 0: never. Set it only where `watch` runs on a "
            "schedule: it cuts off whatever runs on the machine."
        ),
    )
    metadata_url: str = Field(
        default=gcp.METADATA_URL,
        title="Metadata service",
        description="Where a machine asks whether Google will take it away.",
        pattern=r"^http://[^/\s]+$",
    )
    url: ApiUrl = Field(
        default=URL,
        title="API address",
        description=(
            "Where Compute Engine's API answers. Leave it as it is, unless your requests go "
            "through a gateway. The login is sent there."
        ),
    )

    def open(self) -> gcp.GcpProvider:
        """The provider, ready to use. Nothing is sent. Raises InvalidInput."""
        key = self.service_account.get_secret_value().strip()
        login = GoogleLogin.of_service_account(key) if key else GoogleLogin.of_this_host()
        return gcp.GcpProvider(
            login,
            self.project,
            self.zones,
            self.prices,
            self.disk_usd_gib_month,
            image=self.image,
            network=self.network,
            subnetwork=self.subnetwork,
            ssh_from=self.ssh_from,
            ports=self.ports,
            url=self.url,
            metadata_url=self.metadata_url,
            deadline_s=self.deadline_h * 3600 or None,
        )

    @model_validator(mode="after")
    def _opens_for_somebody(self) -> Self:
        if self.ports and not self.ssh_from:
            raise ValueError(
                "ports: torpor opens ports only for the addresses in SSH from: write them there, "
                f"or leave the ports empty and open them in a firewall rule for the tag {TAG}"
            )
        return self

    @field_validator("deadline_h", mode="after")
    @classmethod
    def _long_enough(cls, value: float) -> float:
        if 0 < value < 1:
            raise ValueError(
                f"a machine would power itself off after {value} h, before `watch` has looked "
                "often enough: 1 h is the least, 0 is never"
            )
        return value

    @field_validator("project", "image", "network", "subnetwork", mode="after")
    @classmethod
    def _named(cls, value: str, info: ValidationInfo) -> str:
        return _checked(value, info.field_name or "")

    @field_validator("zones", mode="after")
    @classmethod
    def _listed(cls, value: list[str]) -> list[str]:
        return [_checked(item, "zones") for item in value]

    @field_validator("prices", mode="after")
    @classmethod
    def _priced(cls, value: dict[str, float]) -> dict[str, float]:
        for name, usd_h in value.items():
            try:
                priced(name)
            except InvalidInput as cause:
                raise ValueError(str(cause)) from None
            if usd_h <= 0:
                raise ValueError(f"{name} costs {usd_h} $/h: leave out what has no known price")
        return value


def _checked(text: str, field: str) -> str:
    text = text.strip()
    if not re.fullmatch(_IDS[field], text):
        raise ValueError(f"{text!r} is not what Google writes for {field}")
    return text
