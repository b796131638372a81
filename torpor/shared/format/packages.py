"""What the environment record of a snapshot says of the packages that were added to its machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from torpor.shared.values import learned

PACKAGES: Final = "added_packages"
"""Its name in the environment record, where a reader of any torpor takes it for a fact more."""
MOST_PACKAGES: Final = 2000
"""Of each kind; further ones are in no list."""
_APT_NAME: Final = re.compile(r"[a-z0-9][a-z0-9+.-]{0,198}[a-z0-9+]")
"""As Debian's policy has it. apt-get takes a name with a hyphen at its end for a removal."""
_APT_VERSION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+:~-]{0,199}")
_PIP_NAME: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,198}[a-z0-9])?")
"""As PEP 503 normalizes names."""
_PIP_VERSION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+!_-]{0,199}")
_SEPARATORS: Final = re.compile(r"[-_.]+")


class Packages(msgspec.Struct, frozen=True):
    """Names with their versions. ``apt``: those that were asked for, not those that only others
    need. ``pip``: those of an index; ``files``: those that pip installed from a file, a folder or
    an address."""

    apt: dict[str, str] = {}
    pip: dict[str, str] = {}
    files: dict[str, str] = {}

    def checked(self) -> Packages:
        """Those that a command may name: neither an option nor an expression of apt-get or pip."""
        return Packages(
            _fitting(self.apt, _APT_NAME, _APT_VERSION),
            _fitting(self.pip, _PIP_NAME, _PIP_VERSION),
            _fitting(self.files, _PIP_NAME, _PIP_VERSION),
        )

    def record(self) -> dict[str, Any]:
        """What the environment record of a manifest keeps; nothing where nothing was added."""
        return {PACKAGES: msgspec.to_builtins(self)} if self != Packages() else {}


def packages_in(environment: Mapping[str, Any]) -> Packages:
    """What ``record`` put there. A machine writes the record: what does not fit is ignored."""
    try:
        return msgspec.convert(environment.get(PACKAGES, {}), learned(Packages)).checked()
    except msgspec.ValidationError:
        return Packages()


def normalized(name: str) -> str:
    """The name of a Python package by PEP 503."""
    return _SEPARATORS.sub("-", name).lower()


def _fitting(
    found: Mapping[str, str], names: re.Pattern[str], versions: re.Pattern[str]
) -> dict[str, str]:
    fits = {n: v for n, v in sorted(found.items()) if names.fullmatch(n) and versions.fullmatch(v)}
    return dict(list(fits.items())[:MOST_PACKAGES])
