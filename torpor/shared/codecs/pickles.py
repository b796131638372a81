"""Reads the storage types out of a PyTorch archive's pickle, without unpickling it."""

from __future__ import annotations

import io
import pickletools
from typing import Final

_OPCODES_MAX: Final = 1 << 20
_STRINGS: Final = frozenset({"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"})
_REMEMBERS: Final = frozenset({"BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"})
_RECALLS: Final = frozenset({"BINGET", "LONG_BINGET", "GET"})
_KEEP: Final = 8
"""How many constants are remembered before a persistent id. A persistent id is a tuple of five
constants."""


def storage_dtypes(pickle: bytes) -> dict[str, str]:
    """For each storage's key (its file's name) the name of its class, e.g. ``FloatStorage``.

    PyTorch writes a storage as the persistent id ``("storage", class, key, device, elements)``.
    The opcodes are walked, none is executed; what does not look like that is left out.
    """
    found: dict[str, str] = {}
    recent: list[str] = []
    memo: dict[int, str] = {}
    try:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(io.BytesIO(pickle))):
            if number > _OPCODES_MAX:
                break
            name = opcode.name
            if name in _STRINGS or name == "GLOBAL":
                recent.append(str(argument))
            elif name == "STACK_GLOBAL":
                recent[-2:] = [" ".join(recent[-2:])]
            elif name in _REMEMBERS:
                # Tuples and dicts are remembered, too: the memo gets the constant before them.
                place = len(memo) if name == "MEMOIZE" else int(argument or 0)
                memo[place] = recent[-1] if recent else ""
            elif name in _RECALLS:
                recent.append(memo.get(int(argument or 0), ""))
            elif name == "BINPERSID":
                _note(recent, found)
                recent.clear()
            del recent[:-_KEEP]
    except (ValueError, OverflowError, Warning):
        pass  # cut short, or escapes that pickletools warns of: what was read before still holds
    return found


def _note(recent: list[str], found: dict[str, str]) -> None:
    if "storage" not in recent:
        return
    fields = recent[len(recent) - 1 - recent[::-1].index("storage") :]
    if len(fields) >= 3 and " " in fields[1]:
        found[fields[2]] = fields[1].rpartition(" ")[2].rpartition(".")[2]
