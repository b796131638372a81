"""Calendar months in a time zone, and how much of a span of time is in each.

Times are whole microseconds since 1970, so that spans add up exactly. A month begins when its first
day begins on the zone's clocks, daylight saving included.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Final
from zoneinfo import ZoneInfo

import msgspec

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND: Final = timedelta(microseconds=1)


class Month(msgspec.Struct, frozen=True, order=True):
    """One month of the calendar."""

    year: int
    number: int  # 1 to 12

    def __str__(self) -> str:
        return f"{self.year}-{self.number:02}"

    @classmethod
    def of(cls, at_us: int, zone: ZoneInfo) -> Month:
        """The month that the zone's clocks show at this moment."""
        local = (_EPOCH + at_us * _MICROSECOND).astimezone(zone)
        return cls(local.year, local.month)

    def plus(self, months: int) -> Month:
        """The month that is ``months`` later; earlier where that is negative."""
        year, number = divmod(12 * self.year + self.number - 1 + months, 12)
        return Month(year, number + 1)

    def begin_us(self, zone: ZoneInfo) -> int:
        """When the month begins, in microseconds."""
        return (datetime(self.year, self.number, 1, tzinfo=zone) - _EPOCH) // _MICROSECOND


def microseconds(unix: float) -> int:
    """Seconds since 1970 as whole microseconds."""
    return round(unix * 1_000_000)


def split(begin_us: int, end_us: int, zone: ZoneInfo) -> Iterator[tuple[Month, int]]:
    """The months of a span, each with the microseconds in it; nothing for an empty span."""
    while begin_us < end_us:
        month = Month.of(begin_us, zone)
        until_us = min(end_us, month.plus(1).begin_us(zone))
        yield month, until_us - begin_us
        begin_us = until_us
