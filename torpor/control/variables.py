"""Environment variables of commands on machines, of which some are secrets."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from torpor.shared.errors import InvalidInput

_NAME: Final = re.compile("[A-Za-z_][A-Za-z0-9_]*")
_SECRET_LINE: Final = 4
"""Characters below which a line of a secret, such as a bracket, is not hidden by itself."""


def variables(lines: Sequence[str]) -> dict[str, str]:
    """The variables that lines of the form NAME=VALUE set; InvalidInput for other lines."""
    found: dict[str, str] = {}
    for line in lines:
        name, equals, value = line.partition("=")
        if not equals or not is_variable(name) or "\0" in value:
            raise InvalidInput(
                f"{name[:80]!r} is no environment variable: write NAME=VALUE, with letters, digits "
                "and _ in the name, and not TORPOR_ in front"
            )
        if name in found:
            raise InvalidInput(f"the environment variable {name} is set twice")
        found[name] = value
    return found


def is_variable(name: str) -> bool:
    """Whether a command may get a variable of that name."""
    return bool(_NAME.fullmatch(name)) and not name.startswith("TORPOR_")


@dataclass(frozen=True)
class Secrets:
    """Environment variables that no log, error or repr may show. ``bearer``: the variable that the
    server asks for as a bearer token."""

    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    bearer: str = ""

    def __post_init__(self) -> None:
        if not (self.token.isascii() and self.token.isprintable()):
            raise InvalidInput(
                f"the value of {self.bearer} cannot be a bearer token: it may hold printable ASCII "
                "characters only. Look for a line break at its end"
            )

    @property
    def token(self) -> str:
        return self.variables.get(self.bearer, "")

    @property
    def forms(self) -> list[str]:
        """The forms of the secrets that a program may print, longest first: each value, its lines,
        and as JSON."""
        found = set(self.variables.values())
        for value in self.variables.values():
            lines = [line.strip() for line in value.splitlines()]
            found.update(line for line in lines if len(line) >= _SECRET_LINE)
            found.update(json.dumps(value, ensure_ascii=ascii)[1:-1] for ascii in (True, False))
        return sorted(found - {""}, key=len, reverse=True)

    def hidden_in(self, text: str) -> str:
        """``text`` without the secrets. Pass the whole text, because half of a secret is not
        found."""
        for form in self.forms:
            text = text.replace(form, "***")
        return text
