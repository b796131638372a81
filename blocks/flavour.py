"""Defaults of each kind of object store. What a store can do is probed, never assumed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import urlsplit

Flavour = Literal[
    "aws-s3", "cloudflare-r2", "backblaze-b2", "wasabi", "seaweedfs", "minio", "other"
]


@dataclass(frozen=True)
class Defaults:
    """One flavour's defaults. ``host`` matches the hosts of the flavour's endpoints; None: any
    host."""

    region: str
    host: re.Pattern[str] | None
    example: str
    by_region: str | None = None
    """The endpoint of a region, if the region determines it."""
    optional: bool = False
    """Whether the endpoint is optional, because the region is enough."""


_REGION: Final = r"(?P<region>[a-z]{2,}(?:-[a-z0-9]+)+)"

DEFAULTS: Final[dict[Flavour, Defaults]] = {
    "aws-s3": Defaults(
        region="us-east-1",
        host=re.compile(r"(?:.+\.)?amazonaws\.com(?:\.cn)?"),
        example="none: the region is enough",
        optional=True,
    ),
    "cloudflare-r2": Defaults(
        region="auto",
        host=re.compile(r"[0-9a-f]{32}(?:\.[a-z]+)?\.r2\.cloudflarestorage\.com"),
        example="https://ACCOUNT_ID.r2.cloudflarestorage.com",
    ),
    "backblaze-b2": Defaults(
        region="",
        host=re.compile(rf"s3\.{_REGION}\.backblazeb2\.com"),
        example="https://s3.us-west-004.backblazeb2.com",
        by_region="https://s3.{region}.backblazeb2.com",
    ),
    "wasabi": Defaults(
        region="us-east-1",
        host=re.compile(rf"s3(?:\.{_REGION})?\.wasabisys\.com"),
        example="https://s3.eu-central-2.wasabisys.com",
        by_region="https://s3.{region}.wasabisys.com",
    ),
    "seaweedfs": Defaults("us-east-1", None, "http://127.0.0.1:8333"),
    "minio": Defaults("us-east-1", None, "http://127.0.0.1:9000"),
    "other": Defaults("us-east-1", None, "https://s3.example.com"),
}


def region_and_endpoint(flavour: Flavour, region: str, endpoint_url: str) -> tuple[str, str | None]:
    """The region and endpoint to use; ValueError if they contradict each other."""
    defaults = DEFAULTS[flavour]
    if not endpoint_url:
        region = region or defaults.region
        if defaults.optional:
            return region, None
        if defaults.by_region is None or not region:
            raise ValueError(
                f"flavour {flavour} needs an endpoint_url, for example {defaults.example}"
                + (", or a region" if defaults.by_region else "")
            )
        return region, defaults.by_region.format(region=region)
    named = _region_of(flavour, defaults, endpoint_url)
    if region and named and region != named:
        raise ValueError(
            f"endpoint {endpoint_url} is in region {named}, but the block says {region}: leave "
            "the region empty or correct it"
        )
    return region or named or defaults.region, endpoint_url.rstrip("/")


def _region_of(flavour: Flavour, defaults: Defaults, endpoint_url: str) -> str | None:
    url = urlsplit(endpoint_url)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError(
            f"{endpoint_url!r} is not an endpoint: write https:// (or http://) and a host, for "
            f"example {defaults.example}"
        )
    if url.username or url.password:
        raise ValueError("an endpoint has no user name or password: use a credentials block")
    if url.path.strip("/") or url.query or url.fragment:
        raise ValueError(
            f"{endpoint_url!r} is more than an endpoint: remove what follows the host; bucket and "
            "prefix have their own fields"
        )
    if defaults.host is None:
        return None
    match = defaults.host.fullmatch(url.hostname)
    if match is None:
        raise ValueError(
            f"{url.hostname} is not a host of flavour {flavour}: expected one like "
            f"{defaults.example}; for another S3-compatible store choose flavour other"
        )
    return match.groupdict().get("region")
