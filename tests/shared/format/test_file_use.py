"""What a manifest says of the files that were used is believed only if it fits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fixtures.manifests import PLAIN, honest
from torpor.shared.format.checks import check_manifest
from torpor.shared.format.file_use import recorded_use, used_record
from torpor.shared.format.manifest import decode_manifest, encode_manifest

FITS = bytes([0, 1, 2, 0, 1, 2, 0, 1])


@pytest.mark.parametrize(
    ("environment", "classes"),
    [
        (used_record(FITS), FITS),
        (used_record(b""), b""),
        ({}, b""),
        ({"used": FITS + b"\0"}, b""),
        ({"used": b""}, b""),
        ({"used": bytes([0, 1, 2, 0, 1, 2, 0, 3])}, b""),
        ({"used": FITS.decode()}, b""),
        ({"used": list(FITS)}, b""),
        ({"used": {"": FITS}}, b""),
        ({"used": None}, b""),
    ],
)
def test_what_does_not_fit_is_ignored(environment: dict[str, Any], classes: bytes) -> None:
    blob, _ = encode_manifest(honest(environment=environment), PLAIN)
    manifest, _ = decode_manifest(blob, PLAIN, "it")
    check_manifest(manifest, "it")
    assert recorded_use(manifest) == classes
