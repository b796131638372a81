"""The block of Azure: a subscription, its regions, and a login."""

from __future__ import annotations

import re
from typing import Final, Self

from prefect.blocks.core import Block
from pydantic import (
    ConfigDict,
    Field,
    HttpUrl,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from blocks.container import Ports, SshFrom
from blocks.markets import ApiUrl
from blocks.reference import LOGOS
from torpor.control.providers.azure import provider as azure
from torpor.control.providers.azure.client import LOGIN_URL, URL, AzureLogin
from torpor.control.providers.azure.image import IMAGE
from torpor.control.providers.azure.prices import PRICES_URL

_ID: Final = r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_SHAPES: Final = {
    "subscription": _ID,
    "tenant": f"(?:{_ID})?",
    "application": f"(?:{_ID})?",
    "regions": r"[a-z]{2,40}\d{0,2}",
    "sizes": r"[A-Z][a-z]+_\w{1,60}",
    "image": f"(?:{IMAGE.pattern})?",
}
_PARTS: Final = re.compile(r"Standard_NV\w+_A10_v5", re.IGNORECASE)


class AzureProvider(Block):
    """One subscription of Azure: virtual machines with NVIDIA GPUs, on demand and spot.

    Each rental has a resource group of its own, with its network; the end of the rental deletes the
    group and all that is in it.

    Example:
        List what is on sale:
        ```python
        from blocks import AzureProvider
        from torpor.shared.values import Want

        provider = AzureProvider.load("BLOCK_NAME").open()
        print(provider.check(), provider.offers(Want(gpu="T4", spot="allowed")))
        ```
    """

    _block_type_name = "Azure Provider"
    _block_type_slug = "azure-provider"
    _logo_url = HttpUrl(f"{LOGOS}/process.png")
    _documentation_url = HttpUrl(
        "https://learn.microsoft.com/azure/virtual-machines/sizes/overview"
    )

    model_config = ConfigDict(hide_input_in_errors=True)  # the input may be a secret

    subscription: str = Field(description="The id of the Azure subscription that pays.")
    tenant: str = Field(
        default="",
        description="The directory (tenant) id of the application. Empty without an application.",
    )
    application: str = Field(
        default="",
        description=(
            "The client id of an application with the role Contributor in the subscription. Empty: "
            "the login of the host of the flows (az login, a managed identity), which needs the "
            "extra azure."
        ),
    )
    secret: SecretStr = Field(
        default=SecretStr(""),
        title="Client secret",
        description="A client secret of the application, its value. Empty without an application.",
    )
    regions: list[str] = Field(
        description="The regions to rent in, such as eastus. Machines are in one of them.",
        min_length=1,
    )
    ssh_from: SshFrom = Field(
        description=(
            "The addresses from which SSH may come, as a CIDR: 203.0.113.7/32 for one host, "
            "0.0.0.0/0 for all. Port 22 of each machine is open to them."
        ),
        min_length=1,
    )
    sizes: list[str] = Field(
        default_factory=list,
        description=(
            "The sizes to rent, such as Standard_NC24ads_A100_v4; also ones without a GPU. Empty: "
            "all with whole NVIDIA GPUs that torpor knows."
        ),
    )
    image: str = Field(
        default="",
        description=(
            "The image of new machines, as PUBLISHER:OFFER:SKU:VERSION of the marketplace: Linux "
            "with cloud-init and Python 3.10 or newer, without a purchase plan. Empty: "
            "Microsoft's HPC image with NVIDIA's driver and CUDA."
        ),
    )
    ports: Ports = Field(
        default_factory=list,
        description="TCP ports of each machine that are open as port 22 is.",
    )
    metadata_url: str = Field(
        default=azure.METADATA_URL,
        title="Metadata service",
        description="Where a machine asks whether Azure will take it away.",
        pattern=r"^http://[^/\s]+$",
    )
    url: ApiUrl = Field(
        default=URL,
        title="API address",
        description=(
            "Where Azure Resource Manager answers. Leave it as it is, unless your requests go "
            "through a gateway. The login is sent there."
        ),
    )
    login_url: ApiUrl = Field(
        default=LOGIN_URL,
        title="Login address",
        description="Where Entra ID answers. The client secret is sent there.",
    )
    prices_url: ApiUrl = Field(
        default=PRICES_URL,
        title="Price list",
        description="Where Azure's list of retail prices answers, which needs no login.",
    )

    def open(self) -> azure.AzureProvider:
        """The provider, ready to use. Nothing is sent. Raises InvalidInput."""
        secret = self.secret.get_secret_value().strip()
        login = (
            AzureLogin.of_application(self.tenant, self.application, secret, url=self.login_url)
            if secret
            else AzureLogin.of_this_host()
        )
        return azure.AzureProvider(
            login,
            self.subscription,
            self.regions,
            self.ssh_from,
            sizes=self.sizes,
            image=self.image,
            ports=self.ports,
            url=self.url,
            prices_url=self.prices_url,
            metadata_url=self.metadata_url,
        )

    @model_validator(mode="after")
    def _whole_login(self) -> Self:
        parts = [self.tenant, self.application, self.secret.get_secret_value().strip()]
        if any(parts) and not all(parts):
            raise ValueError(
                "a login is a tenant, an application and its secret: fill in all three, or none "
                "for the login of this host"
            )
        return self

    @field_validator("subscription", "tenant", "application", "image", mode="after")
    @classmethod
    def _named(cls, value: str, info: ValidationInfo) -> str:
        return _checked(value, info.field_name or "")

    @field_validator("regions", "sizes", mode="after")
    @classmethod
    def _listed(cls, value: list[str], info: ValidationInfo) -> list[str]:
        return [_checked(item, info.field_name or "") for item in value]


def _checked(text: str, field: str) -> str:
    text = text.strip()
    if not re.fullmatch(_SHAPES[field], text):
        raise ValueError(f"this is not what Azure writes for {field}")
    if _PARTS.fullmatch(text):
        raise ValueError(f"{text} has a part of a GPU, which torpor does not rent")
    return text
