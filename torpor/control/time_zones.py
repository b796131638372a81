"""Time zones by name."""

from __future__ import annotations

from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from torpor.shared.errors import InvalidInput


def zone_named(name: str) -> ZoneInfo:
    """The time zone; InvalidInput for a name that this host does not know."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise InvalidInput(
            f"{name!r} is not a time zone that this host knows: write UTC or a name like "
            "Europe/Berlin"
        ) from None
