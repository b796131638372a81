from __future__ import annotations

from typing import get_args

import pytest

from blocks.flavour import DEFAULTS, Flavour, region_and_endpoint

R2 = "https://0123456789abcdef0123456789abcdef.r2.cloudflarestorage.com"
R2_EU = R2.replace(".r2", ".eu.r2")
CHINA = "https://s3.cn-north-1.amazonaws.com.cn"
B2 = "https://s3.{}.backblazeb2.com"
WASABI = "https://s3{}.wasabisys.com"
WASABI_EU = WASABI.format(".eu-central-2")


def test_every_flavour_has_its_customs() -> None:
    assert set(DEFAULTS) == set(get_args(Flavour))


@pytest.mark.parametrize(
    ("flavour", "region", "endpoint", "placed"),
    [
        ("aws-s3", "", "", ("us-east-1", None)),
        ("aws-s3", "eu-central-1", "", ("eu-central-1", None)),
        ("aws-s3", "cn-north-1", CHINA, ("cn-north-1", CHINA)),
        ("cloudflare-r2", "", f"{R2}/", ("auto", R2)),
        ("cloudflare-r2", "", R2_EU, ("auto", R2_EU)),
        ("backblaze-b2", "", B2.format("us-west-004"), ("us-west-004", B2.format("us-west-004"))),
        ("backblaze-b2", "eu-central-003", "", ("eu-central-003", B2.format("eu-central-003"))),
        ("wasabi", "", "", ("us-east-1", WASABI.format(".us-east-1"))),
        ("wasabi", "", WASABI.format(""), ("us-east-1", WASABI.format(""))),
        ("wasabi", "", WASABI_EU, ("eu-central-2", WASABI_EU)),
        ("seaweedfs", "", "http://127.0.0.1:8333", ("us-east-1", "http://127.0.0.1:8333")),
        ("other", "garage", "https://s3.example.com", ("garage", "https://s3.example.com")),
    ],
)
def test_region_and_endpoint(
    flavour: Flavour, region: str, endpoint: str, placed: tuple[str, str | None]
) -> None:
    assert region_and_endpoint(flavour, region, endpoint) == placed


@pytest.mark.parametrize(
    ("flavour", "region", "endpoint", "says"),
    [
        ("cloudflare-r2", "", "", "needs an endpoint_url"),
        ("minio", "us-east-1", "", "needs an endpoint_url"),
        ("backblaze-b2", "", "", "or a region"),
        ("cloudflare-r2", "", "https://s3.wasabisys.com", "not a host of flavour cloudflare-r2"),
        ("aws-s3", "", "https://amazonaws.com.evil.example", "not a host of flavour aws-s3"),
        ("wasabi", "us-east-1", "https://s3.eu-west-1.wasabisys.com", "is in region eu-west-1"),
        ("other", "", "s3.example.com", "not an endpoint"),
        ("other", "", "ftp://s3.example.com", "not an endpoint"),
        ("other", "", "https://s3.example.com/bucket", "more than an endpoint"),
        ("other", "", "https://user:word@s3.example.com", "credentials block"),
    ],
)
def test_what_cannot_be_is_refused(flavour: Flavour, region: str, endpoint: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        region_and_endpoint(flavour, region, endpoint)
