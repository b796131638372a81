"""Clearing what killed processes left beside the machines: nothing in it was ever a machine."""

from __future__ import annotations

import os
import re
from pathlib import Path

from torpor.control.providers.local_lock import held
from torpor.control.providers.local_place import Place
from torpor.control.providers.removal import remove_tree
from torpor.shared.errors import ProviderError

_DEBRIS = re.compile(r"\.(m-[0-9a-f]{12})\.(?:new|gone|lock)")


def sweep(folder: Path) -> None:
    """Remove machines without a name yet, or any more, that no live process works on."""
    matches = (_DEBRIS.fullmatch(name) for name in os.listdir(folder))
    for name in sorted({match.group(1) for match in matches if match}):
        place = Place(folder / name)
        try:
            with held(place.lock, timeout_s=0):
                remove_tree(place.unborn)
                remove_tree(place.remains)
        except ProviderError:
            continue  # its holder lives
