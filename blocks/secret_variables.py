"""Environment variables whose values are in Secret blocks: lines of the form NAME=BLOCK."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from prefect.blocks.system import Secret

from blocks.reference import load_named
from torpor.control.variables import is_variable
from torpor.shared.errors import InvalidInput

_BLOCK: Final = re.compile("[a-z0-9](?:[a-z0-9-]*[a-z0-9])?")


def checked_secrets(lines: Sequence[str]) -> list[str]:
    """The lines, trimmed. ValueError, without what does not fit: it may be a secret."""
    names = []
    for line in lines:
        name, _, block = line.strip().partition("=")
        if not is_variable(name) or not _BLOCK.fullmatch(block):
            raise ValueError(
                "each secret is NAME=BLOCK, such as HF_TOKEN=hugging-face: a variable, not "
                "TORPOR_..., and the name of a Secret block, not the secret itself"
            )
        names.append(name)
    if len(set(names)) < len(names):
        raise ValueError("each variable of the secrets is named once")
    return [line.strip() for line in lines]


def load_secrets(lines: Sequence[str], *, of: str) -> dict[str, str]:
    """The variables and their values. InvalidInput for a line or block that does not fit; ``of``
    names the referring object."""
    found = {}
    try:
        checked = checked_secrets(lines)
    except ValueError as error:
        raise InvalidInput(f"{of}: {error}") from None
    for name, _, block in (line.partition("=") for line in checked):
        value = load_named(Secret, block, of=f"the secret {name} of {of}").get()
        if not isinstance(value, str) or not value or "\0" in value:
            raise InvalidInput(f"the block secret/{block} of {name} must hold a text")
        found[name] = value
    return found
