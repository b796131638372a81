"""Removes what a recording must not hold: secrets, keys, addresses, and whose account it is.

A value keeps its type and its place, so that an adapter can still read the answer. Addresses become
those that are reserved for documentation.
"""

from __future__ import annotations

import base64
import ipaddress
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final
from urllib.parse import quote

REDACTED: Final = "REDACTED"
ADDRESS: Final = "192.0.2.1"
ADDRESS_6: Final = "2001:db8::1"
_SHORTEST: Final = 6  # characters that a secret must have to be looked for everywhere
_PART: Final = 20  # characters that a word within a longer secret must have
_BETWEEN: Final = re.compile(r"[\s\"',]|\\n")

_SECRET_NAME: Final = re.compile(
    r"authorization|cookie|api[-_]?key|token|secret|passw|(^|_)pass$|credential|private|"
    r"signature|user_?data|startup-script|^script$|onstart|string_?data|certificate|"
    r"(first|last|full|user)_?name|phone|e-?mail|^(extra_)?env$|^image_login$|"
    r"^bill|^(user|login)$|last_?4$|(^|_)(tax|vat)|company|(^|_)zip|zip_?code|postal|street|"
    r"address_?line|(^|_)city$",
    re.IGNORECASE,
)
"""Names of fields and headers whose text is always redacted."""
_SECRET_CONTENT: Final = ("data", "stringData")
"""The fields of a Kubernetes Secret. ``data``, in base64, is in answers."""
_E_MAIL: Final = re.compile(r"[\w.+%-]+(?:@|%40)[\w-]+(?:\.[\w-]+)+")
_PEM: Final = re.compile(r"-----BEGIN [A-Z ]+-----.*?(?:-----END [A-Z ]+-----|\Z)", re.DOTALL)
_SSH_KEY: Final = re.compile(r"((?:ssh|ecdsa|sk)-[\w@.-]+) +AAAA[A-Za-z0-9+/=]+(?: [\w@.:+-]+)?")
_LONG: Final = re.compile(r"[A-Za-z0-9+/=]{80,}|[\w-]{60,}")
"""Texts that look like a packed script, a token, or a key without its frame."""
_JWT: Final = re.compile(r"\beyJ[\w-]+\.[\w-]+\.[\w-]+")
_IN_URL: Final = re.compile(
    r"([?&#](?:[\w-]*(?:token|secret|passw|credential|signature)[\w-]*|(?:[\w-]*[_-])?key|sig))"
    r"=[^&#\s\"'<>]+",
    re.IGNORECASE,
)
"""Secrets in URLs, such as Lambda's ``jupyter_url``."""
_IPV4: Final = re.compile(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?!\d|\.\d)")
_IN_NAME: Final = re.compile(r"(?<!\d)\d{1,3}(?:-\d{1,3}){3}(?!\d)")
"""An address within a host's name, such as ``ec2-198-51-100-7.example``."""
_IPV6: Final = re.compile(r"(?<![\w:.])[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7}(?![\w:])")


class Redactor:
    """``secrets`` are found and replaced wherever they stand, also in an encoded URL or in
    base64."""

    def __init__(self, secrets: Iterable[str]) -> None:
        long = {secret for secret in secrets if len(secret) >= _SHORTEST}
        found = long | {quote(secret, safe="") for secret in long}
        # Parts of a key or a configuration, which an answer may hold without the other parts.
        parts = {part for secret in long for part in _BETWEEN.split(secret)}
        found |= {part for part in parts if len(part) >= _PART}
        found |= {form for secret in tuple(found) for form in _in_base64(secret)}
        ordered = sorted(found, key=len, reverse=True)
        self._secrets = re.compile("|".join(map(re.escape, ordered))) if ordered else None

    def value(self, value: Any, name: str = "") -> Any:
        """JSON without its secrets; ``name``: the name of the field that holds it."""
        if isinstance(value, dict):
            below = "secret" if _SECRET_NAME.search(name) else ""
            hidden = _SECRET_CONTENT if value.get("kind") == "Secret" else ()
            return {
                self.text(key): self.value(item, below or ("secret" if key in hidden else key))
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self.value(item, name) for item in value]
        if isinstance(value, str):
            return REDACTED if value and _SECRET_NAME.search(name) else self.text(value)
        return value

    def headers(self, headers: Iterable[tuple[str, str]]) -> dict[str, str]:
        """Headers by their names in lower case, without the host."""
        names = {name.lower(): text for name, text in headers if name.lower() != "host"}
        return {name: self.value(text, name) for name, text in names.items()}

    def text(self, text: str) -> str:
        """Text without secrets, keys and addresses."""
        if self._secrets is not None:
            text = self._secrets.sub(REDACTED, text)
        for pattern, instead in _PATTERNS:
            text = pattern.sub(instead, text)
        text = _IPV4.sub(lambda found: _public(found[0], ADDRESS), text)
        return _IPV6.sub(lambda found: _public(found[0], ADDRESS_6), text)


_PATTERNS: Final = (
    (_PEM, REDACTED),
    (_SSH_KEY, rf"\1 {REDACTED}"),
    (_JWT, REDACTED),
    (_IN_URL, rf"\1={REDACTED}"),
    (_LONG, REDACTED),
    (_E_MAIL, "user@example.org"),
    (_IN_NAME, ADDRESS.replace(".", "-")),
)


def _in_base64(secret: str) -> Iterator[str]:
    """The letters that stand for the secret alone, at each place that it may have in a longer text,
    plain and in an encoded URL."""
    data = secret.encode()
    for before in range(3):
        first, last = -(-before * 8 // 6), (before + len(data)) * 8 // 6
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            letters = encode(bytes(before) + data).decode()[first:last]
            yield from (letters, quote(letters, safe=""))


def _public(text: str, instead: str) -> str:
    """``instead`` for a public address; anything else unchanged."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return text
    return text if address.is_loopback or address.is_unspecified else instead
