"""Wares for the fake markets, written as each market writes them."""

from __future__ import annotations

from tests.markets.market import Ware


def vast_wares() -> list[Ware]:
    return [
        Ware("RTX 4090", 1, 24, 0.40, "Texas, US", spot_usd_h=0.20, disk_usd_gib_month=0.15),
        Ware("H100 SXM", 1, 80, 2.10, "Norway, NO", spot_usd_h=1.10, disk_usd_gib_month=0.20),
        Ware("H100 PCIE", 2, 80, 3.90, "France, FR", cuda="12.4", disk_usd_gib_month=0.10),
        Ware("RTX 4090", 1, 24, 0.31, "Vietnam, VN", reliability=0.71, disk_usd_gib_month=0.10),
    ]


def runpod_wares() -> list[Ware]:
    return [
        Ware("NVIDIA GeForce RTX 4090", 1, 24, 0.59, "US-KS-2"),
        Ware("NVIDIA GeForce RTX 4090", 1, 24, 0.34, "EU-RO-1", name="COMMUNITY"),
        Ware("NVIDIA H100 80GB HBM3", 1, 80, 2.69, "EU-NL-1"),
        Ware("NVIDIA H100 PCIe", 1, 80, 1.99, "CA-MTL-1", cuda="12.4"),
    ]


def lambda_wares() -> list[Ware]:
    def sxm(region: str) -> Ware:
        return Ware("H100 (80 GB SXM5)", 1, 80, 3.29, region, name="gpu_1x_h100_sxm5")

    return [
        Ware("A10 (24 GB PCIe)", 1, 24, 0.75, "us-west-1", name="gpu_1x_a10", disk_gib=1400),
        Ware("H100 (80 GB PCIe)", 1, 80, 2.49, "us-west-3", name="gpu_1x_h100_pcie"),
        sxm("us-south-2"),
        sxm("us-south-3"),
    ]
