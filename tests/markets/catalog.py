"""Hundreds of wares for the fake markets: real offers of one day, where the markets' data is there,
else generated ones of the same shape."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.markets.ec2 import DISK_USD_GIB_MONTH, REGION
from tests.markets.market import Ware

OFFERS: Final = Path(__file__).resolve().parents[3] / "shared" / "specs" / "offers.csv"
NAMES: Final = {"vast": "vast", "runpod": "runpod", "lambda": "lambda", "aws": "ec2"}
"""Of the data, and of the fakes."""
_ZONES: Final = "abcdef"

Row = dict[str, str]


def catalog_wares(offers: Path = OFFERS) -> dict[str, list[Ware]]:
    """By the name of the fake. Each row of RunPod is a data centre of its own; all of AWS are moved
    into the zones of one region."""
    found: dict[str, list[Ware]] = {name: [] for name in NAMES.values()}
    zones: dict[str, Iterator[str]] = {}
    for row in _rows(offers):
        market, name, region = NAMES.get(row["provider"]), row["instance"], row["region"]
        whole = row["gpu_count"].isdecimal()  # AWS also sells half a GPU
        if market is None or not whole or not row["price_usd_h"]:
            continue
        if market == "runpod":
            region, name = f"{region}-{row['gpu_count']}", ""
        elif market == "ec2":
            zone = next(zones.setdefault(name, itertools.cycle(_ZONES)))
            region = f"{REGION}{zone}"
        spot = row["spot_price_usd_h"]
        found[market].append(
            Ware(
                row["gpu"].replace("_", " "),
                int(row["gpu_count"]),
                int(row["vram_gib_per_gpu"]),
                float(row["price_usd_h"]),
                region,
                spot_usd_h=float(spot) if spot and market == "ec2" else None,
                disk_usd_gib_month=DISK_USD_GIB_MONTH if market == "ec2" else 0.0,
                name=name,
            )
        )
    return found


def _rows(offers: Path) -> Iterator[Row]:
    if offers.exists():
        with offers.open(newline="") as lines:
            yield from csv.DictReader(lines)
        return
    gpus = (("RTX 4090", "24", 0.4), ("H100 SXM", "80", 2.2), ("A100 PCIE", "80", 1.2))
    types = ("g4dn.xlarge", "g5.xlarge", "p3.2xlarge", "p4d.24xlarge", "p5.48xlarge")
    for number, (gpu, vram, usd_h) in zip(range(400), itertools.cycle(gpus), strict=False):
        market = tuple(NAMES)[number % 4]
        kind = types[number // 4 % len(types)] if market == "aws" else f"type-{number % 3}"
        yield {
            "provider": market,
            "instance": kind,
            "gpu": gpu,
            "gpu_count": "1",
            "vram_gib_per_gpu": vram,
            "region": f"region-{number}",
            "price_usd_h": str(usd_h + number / 1000),
            "spot_price_usd_h": str(usd_h / 2) if market == "aws" else "",
        }
