"""When an ETag is the MD5 of the object, and when it only looks like one."""

from __future__ import annotations

import re
from collections.abc import Mapping

_HEX_MD5 = re.compile(r"[0-9a-f]{32}")


def plain_md5(etag: str | None, encryption: str | None) -> str | None:
    """The MD5 (hex) that an ETag states, or None where it states something else.

    ``encryption`` is the ``x-amz-server-side-encryption`` header: with KMS keys (and with keys
    of the customer's) the ETag has 32 hex digits and is not an MD5. Multipart ETags end in -N.
    """
    text = (etag or "").strip().strip('"').lower()
    if encryption not in (None, "", "AES256") or not _HEX_MD5.fullmatch(text):
        return None
    return text


def encryption_of(headers: Mapping[str, str]) -> str | None:
    """The server-side encryption that an answer's headers (lower-case names) state."""
    if "x-amz-server-side-encryption-customer-algorithm" in headers:
        return "customer"
    return headers.get("x-amz-server-side-encryption")
