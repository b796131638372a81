"""What the workspaces of a store keep there now, and what it costs a month."""

from __future__ import annotations

from decimal import Decimal
from typing import Final

import msgspec

from torpor.control.store.object_store import ObjectStore
from torpor.control.store_prices import StorePrice
from torpor.shared.values import HOME, RESERVED, WorkspaceName, home_of, names_of

_GB: Final = 10**9
_PREFIX: Final = "workspaces/"


class StorageUse(msgspec.Struct, frozen=True):
    """The bytes of one workspace, with those of its benchmarks, its drills and its homes.
    ``usd_month``: what so many bytes cost in a month; None if the store's price is unknown."""

    workspace: WorkspaceName
    bytes: int
    usd_month: Decimal | None


def look(store: ObjectStore) -> dict[WorkspaceName, int]:
    """The bytes under each name in the store. Lists every object."""
    found: dict[WorkspaceName, int] = {}
    for stored in store.list(_PREFIX):
        name = WorkspaceName(stored.key.removeprefix(_PREFIX).partition("/")[0])
        found[name] = found.get(name, 0) + stored.bytes
    return found


def workspaces(names: dict[WorkspaceName, int]) -> dict[WorkspaceName, WorkspaceName]:
    """The workspace to which each of these names belongs: its own name, and those of its drills,
    benchmarks and homes."""
    known = {name: name for name in names}
    for name in [*names]:
        if not name.startswith((*RESERVED, HOME)):
            known |= dict.fromkeys([*names_of(name), home_of(name)], name)
    return known


def stored(names: dict[WorkspaceName, int], price: StorePrice | None) -> list[StorageUse]:
    """What each workspace keeps, by name."""
    known, sizes = workspaces(names), dict[WorkspaceName, int]()
    for name, size in names.items():
        sizes[known[name]] = sizes.get(known[name], 0) + size
    gb_usd = None if price is None else Decimal(str(price.gb_month_usd))
    return [
        StorageUse(name, size, None if gb_usd is None else _rounded(gb_usd * size / _GB))
        for name, size in sorted(sizes.items())
    ]


def _rounded(usd: Decimal) -> Decimal:
    return usd.quantize(Decimal("0.000001"))
