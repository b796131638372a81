"""What is usual at each kind of object store. What a store can do is probed, never assumed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import urlsplit

Flavour = Literal[
    "aws-s3", "cloudflare-r2", "backblaze-b2", "wasabi", "seaweedfs", "minio", "other"
]


@dataclass(frozen=True)
class Custom:
    """One flavour's habits. ``host`` is what its endpoints look like; None: any host."""

    region: str
    host: re.Pattern[str] | None
    example: str
    by_region: str | None = None
    """The endpoint of a region, where the region says it."""
    optional: bool = False
    """No endpoint is needed at all."""


_REGION: Final = r"(?P<region>[a-z]{2,}(?:-[a-z0-9]+)+)"

CUSTOMS: Final[dict[Flavour, Custom]] = {
    "aws-s3": Custom(
        region="us-east-1",
        host=re.compile(r"(?:.+\.)?amazonaws\.com(?:\.cn)?"),
        example="none: the region is enough",
        optional=True,
    ),
    "cloudflare-r2": Custom(
        region="auto",
        host=re.compile(r"[0-9a-f]{32}(?:\.[a-z]+)?\.r2\.cloudflarestorage\.com"),
        example="https://ACCOUNT_ID.r2.cloudflarestorage.com",
    ),
    "backblaze-b2": Custom(
        region="",
        host=re.compile(rf"s3\.{_REGION}\.backblazeb2\.com"),
        example="https://s3.us-west-004.backblazeb2.com",
        by_region="https://s3.{region}.backblazeb2.com",
    ),
    "wasabi": Custom(
        region="us-east-1",
        host=re.compile(rf"s3(?:\.{_REGION})?\.wasabisys\.com"),
        example="https://s3.eu-central-2.wasabisys.com",
        by_region="https://s3.{region}.wasabisys.com",
    ),
    "seaweedfs": Custom("us-east-1", None, "http://127.0.0.1:8333"),
    "minio": Custom("us-east-1", None, "http://127.0.0.1:9000"),
    "other": Custom("us-east-1", None, "https://s3.example.com"),
}


def place(flavour: Flavour, region: str, endpoint_url: str) -> tuple[str, str | None]:
    """Region and endpoint as they are used; ValueError where they cannot belong together."""
    custom = CUSTOMS[flavour]
    if not endpoint_url:
        region = region or custom.region
        if custom.optional:
            return region, None
        if custom.by_region is None or not region:
            raise ValueError(
                f"flavour {flavour} needs an endpoint_url, for example {custom.example}"
                + (", or a region" if custom.by_region else "")
            )
        return region, custom.by_region.format(region=region)
    named = _region_of(flavour, custom, endpoint_url)
    if region and named and region != named:
        raise ValueError(
            f"endpoint {endpoint_url} is in region {named}, the block says {region}: leave the "
            "region empty or make them agree"
        )
    return region or named or custom.region, endpoint_url.rstrip("/")


def _region_of(flavour: Flavour, custom: Custom, endpoint_url: str) -> str | None:
    url = urlsplit(endpoint_url)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError(
            f"{endpoint_url!r} is not an endpoint: it begins with https:// (or http://) and a "
            f"host, for example {custom.example}"
        )
    if url.username or url.password:
        raise ValueError("an endpoint carries no user name or password: use a credentials block")
    if url.path.strip("/") or url.query or url.fragment:
        raise ValueError(
            f"{endpoint_url!r} is more than an endpoint: leave away what follows the host, the "
            "bucket and prefix have fields of their own"
        )
    if custom.host is None:
        return None
    match = custom.host.fullmatch(url.hostname)
    if match is None:
        raise ValueError(
            f"{url.hostname} is not a host of flavour {flavour}: expected one like "
            f"{custom.example}; for another S3-compatible store choose flavour other"
        )
    return match.groupdict().get("region")
