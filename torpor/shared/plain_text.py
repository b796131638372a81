"""Text of a machine or a market, for people's terminals."""

from __future__ import annotations

import re
from typing import Final

_CONTROLS: Final = (
    *range(0x20),
    *range(0x7F, 0xA0),
    *range(0x202A, 0x202F),  # they turn the direction of a text
    *range(0x2066, 0x206A),
    *range(0xD800, 0xE000),  # bytes that are no UTF-8, as Python keeps them: nothing can write them
)
_SHOWN: Final = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
    for code in _CONTROLS
    if chr(code) not in "\n\t"
}
_IN_JSON: Final = {code: f"\\u{code:04x}" for code in _CONTROLS if code >= 0x7F}


def plain(text: str) -> str:
    """Without what a terminal would obey, such as a sequence that writes into the clipboard: each
    control character is shown as ``\\x1b``, but for the ends of lines and tabs."""
    return text.translate(_SHOWN)


_HASHED: Final = re.compile(r"\b([a-z][a-z0-9]*)://[0-9a-f]{16}\b")
_ERRNO: Final = re.compile(r"\[Errno -?\d{1,5}\] ")
_LOCAL: Final = re.compile(r"\b(local)://[\w./~@-]*[\w/]")


def short(text: str) -> str:
    """``plain``, with a market's name alone for an account that only a hash of its key names, such
    as ``vast://3f2a9c81d04e5b6a``, and for the folder of local machines; and without the number of
    an error of the system, which stands before its words."""
    return _LOCAL.sub(r"\1", _HASHED.sub(r"\1", _ERRNO.sub("", plain(text))))


def plain_json(text: str) -> str:
    """The same of JSON, which has escaped the others already. It stays JSON of the same meaning."""
    return text.translate(_IN_JSON)
