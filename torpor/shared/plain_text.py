"""Text of a machine or a market, for people's terminals."""

from __future__ import annotations

import re
from typing import Final

_CONTROLS: Final = (
    *range(0x20),
    *range(0x7F, 0xA0),
    *range(0x202A, 0x202F),  # characters that change the direction of text
    *range(0x2066, 0x206A),
    # surrogates, by which Python keeps bytes that are not UTF-8: they cannot be encoded
    *range(0xD800, 0xE000),
)
_SHOWN: Final = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
    for code in _CONTROLS
    if chr(code) not in "\n\t"
}
_IN_JSON: Final = {code: f"\\u{code:04x}" for code in _CONTROLS if code >= 0x7F}


def plain(text: str) -> str:
    """The text without control characters, which a terminal would obey (one sequence writes into
    the clipboard): each becomes an escape such as ``\x1b``. Ends of lines and tabs stay."""
    return text.translate(_SHOWN)


_HASHED: Final = re.compile(r"\b([a-z][a-z0-9]*)://[0-9a-f]{16}\b")
_ERRNO: Final = re.compile(r"\[Errno -?\d{1,5}\] ")
_LOCAL: Final = re.compile(r"\b(local)://[\w./~@-]*[\w/]")


def short(text: str) -> str:
    """``plain``, shortened for people. An account that only the hash of its key names, such as
    ``vast://3f2a9c81d04e5b6a``, and the folder of local machines become the market's name; ``[Errno
    2]`` before a system error's words is left out."""
    return _LOCAL.sub(r"\1", _HASHED.sub(r"\1", _ERRNO.sub("", plain(text))))


def plain_json(text: str) -> str:
    """``plain`` for a JSON text: the result is JSON with the same meaning. Only characters that
    JSON does not escape itself are escaped."""
    return text.translate(_IN_JSON)
