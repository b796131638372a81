"""The block of the embedded provider: machines on this host."""

from __future__ import annotations

from pathlib import Path

from prefect.blocks.core import Block
from pydantic import Field, HttpUrl

from blocks.connection import see_that_it_is_of_this_host
from blocks.reference import LOGOS
from torpor.control.providers.local import provider as local


class LocalProvider(Block):
    """Machines on the host where the flows run, each an SSH server with a folder of its own.

    For trying torpor out and for tests. The machines are not isolated from each other.

    Example:
        List the machines:
        ```python
        from blocks import LocalProvider

        provider = LocalProvider.load("BLOCK_NAME")
        print(provider.open().list_own())
        ```
    """

    _block_type_name = "Local Provider"
    _block_type_slug = "local-provider"
    _logo_url = HttpUrl(f"{LOGOS}/process.png")
    _documentation_url = HttpUrl("https://docs.prefect.io/v3/concepts/blocks")

    folder: str = Field(
        default="~/.local/state/torpor/machines", description="The folder that holds the machines."
    )
    price_usd_h: float = Field(
        default=0.0,
        ge=0,
        title="Price per hour",
        description="The pretended price of a machine in reports, in dollars an hour.",
    )

    def open(self) -> local.LocalProvider:
        """The provider, ready to use. InvalidInput where its machines are on another host."""
        see_that_it_is_of_this_host(f"the local provider with the machines in {self.folder}")
        return local.LocalProvider(Path(self.folder), price_usd_h=self.price_usd_h)
