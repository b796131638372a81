from __future__ import annotations

from typing import get_args

import pytest

from blocks.flavour import DEFAULTS, Flavour, region_and_endpoint

R2 = "https://0123456789abcdef0123456789abcdef.r2.cloudflarestorage.com"


def test_every_flavour_has_its_customs() -> None:
    assert set(DEFAULTS) == set(get_args(Flavour))


@pytest.mark.parametrize(
    ("flavour", "region", "endpoint", "placed"),
    [
        ("aws-s3", "", "", ("us-east-1", None)),
        ("aws-s3", "eu-central-1", "", ("eu-central-1", None)),
        (
            "aws-s3",
            "cn-north-1",
            "https://s3.cn-north-1.amazonaws.com.cn",
            ("cn-north-1", "https://s3.cn-north-1.amazonaws.com.cn"),
        ),
        ("cloudflare-r2", "", R2 + "/", ("auto", R2)),
        (
            "cloudflare-r2",
            "",
            R2.replace(".r2", ".eu.r2"),
            ("auto", R2.replace(".r2", ".eu.r2")),
        ),
        (
            "backblaze-b2",
            "",
            "https://s3.us-west-004.backblazeb2.com",
            ("us-west-004", "https://s3.us-west-004.backblazeb2.com"),
        ),
        (
            "backblaze-b2",
            "eu-central-003",
            "",
            ("eu-central-003", "https://s3.eu-central-003.backblazeb2.com"),
        ),
        ("wasabi", "", "", ("us-east-1", "https://s3.us-east-1.wasabisys.com")),
        ("wasabi", "", "https://s3.wasabisys.com", ("us-east-1", "https://s3.wasabisys.com")),
        (
            "wasabi",
            "",
            "https://s3.eu-central-2.wasabisys.com",
            ("eu-central-2", "https://s3.eu-central-2.wasabisys.com"),
        ),
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
