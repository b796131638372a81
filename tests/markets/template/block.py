"""The block of Example."""

from __future__ import annotations

from pydantic import Field, HttpUrl

from blocks.markets import ApiKey, ApiUrl, KeyedProvider
from blocks.reference import LOGOS
from tests.markets.template import adapter


class ExampleProvider(KeyedProvider):
    """An account at Example: virtual machines on demand."""

    _block_type_name = "Example Provider"
    _block_type_slug = "example-provider"
    _logo_url = HttpUrl(f"{LOGOS}/process.png")
    _documentation_url = HttpUrl("https://docs.example.com/api")

    api_key: ApiKey = Field(title="API key", description="An API key of the account.")

    url: ApiUrl = Field(default=adapter.URL, title="API address", description="Where it answers.")

    def open(self) -> adapter.ExampleProvider:
        return self._opened(adapter.ExampleProvider)
