"""What the figures advise: a store, and an encoding for each kind of data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from torpor.control.measure.figures import Figure, find
from torpor.control.store_prices import StorePrice
from torpor.shared.codecs.planes import RANS


class Advice(msgspec.Struct, frozen=True):
    """One recommendation, and the measurement on which it rests."""

    about: str
    choice: str
    because: str


def advise(
    figures: Sequence[Figure], prices: Mapping[str, StorePrice | None], cores: int = 1
) -> list[Advice]:
    """The advice that the measurements allow. ``cores``: how many encode at once."""
    said = [_store(figures, prices), *_codecs(figures, cores)]
    return [advice for advice in said if advice is not None]


def shown(figure: Figure) -> str:
    """A figure in words: median, n, lowest and highest."""
    unit = {"MB/s": " MB/s", "s": " s", "ratio": "", "$": " $"}[figure.unit]
    digits = 0 if figure.median >= 100 else 2
    median, low, high = (
        f"{value:,.{digits}f}" for value in (figure.median, figure.low, figure.high)
    )
    spread = "one sample" if figure.n == 1 else f"{low} to {high}, n = {figure.n}"
    return f"{median}{unit} ({spread})"


def _store(figures: Sequence[Figure], prices: Mapping[str, StorePrice | None]) -> Advice | None:
    """The store with the fastest download; of those within its spread, the cheapest."""
    lines = find(figures, "line", direction="down")
    if not lines:
        return None
    best = max(lines, key=lambda line: line.median)
    equal = [line for line in lines if line.high >= best.low]

    def monthly(line: Figure) -> float:
        price = prices.get(line.name)
        return float("inf") if price is None else price.gb_month_usd

    chosen = min(equal, key=lambda line: (monthly(line), -line.median))
    up = find(figures, "line", direction="up", name=chosen.name)[0]
    because = f"raw random bytes come back at {shown(chosen)} and go there at {shown(up)}"
    price = prices.get(chosen.name)
    if price is not None:
        because += f"; {1000 * price.gb_month_usd:.2f} $ for a TB and month ({_dated(price)})"
    if len(lines) == 1:
        because += "; it is the only store that was measured"
    elif len(equal) > 1:
        names = ", ".join(sorted(line.name for line in equal if line is not chosen))
        because += f"; within the spread of {names}"
    return Advice("store", chosen.name, because)


def _codecs(figures: Sequence[Figure], cores: int) -> list[Advice]:
    """For each kind of data the fewest bytes among encodings that keep up with the line on all
    cores; the fastest where none does."""
    on = "one core" if cores == 1 else f"{cores} cores"
    line = max(find(figures, "line", direction="up"), key=lambda f: f.median, default=None)
    said = []
    for data in dict.fromkeys(f.data for f in figures if f.what == "codec"):
        shares, rates = (
            {f.name: f for f in find(figures, "codec", data=data, **which) if f.name != RANS.name}
            for which in ({"phase": "stored"}, {"direction": "up"})
        )
        gains = [name for name in rates if shares[name].median < _RAW_ABOVE]
        if not gains:
            said.append(Advice(f"encoding of {data}", "raw", "no encoding saves 3 % of it"))
            continue
        keeping_up = [
            name for name in gains if line is not None and cores * rates[name].median >= line.median
        ]
        if keeping_up or line is None:
            choice = min(keeping_up or gains, key=lambda name: shares[name].median)
            why = f"the fewest bytes of those that {on} can encode as fast as the line takes them"
        else:
            choice = max(gains, key=lambda name: rates[name].median)
            why = f"no encoding keeps up with the line on {on}, and this one is the fastest"
        because = (
            f"stores {100 * shares[choice].median:.1f} %, and one core encodes "
            f"{shown(rates[choice])}: {why}"
        )
        said.append(Advice(f"encoding of {data}", choice, because))
    return said


def _dated(price: StorePrice) -> str:
    return f"{price.source}, {price.as_of}"


_RAW_ABOVE = 0.97
"""Above this ratio a chunk is stored raw, as in torpor.shared.codecs.choose: below 3 % gained,
decoding costs more than the bytes."""
