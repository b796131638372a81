"""Which offers fit, why others do not, and what one failure says of the others."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.fixtures.market import H100
from torpor.control.providers.gpus import GpuModel
from torpor.control.providers.offers import blocks, misfit
from torpor.shared.errors import (
    CreateFailed,
    CreateUncertain,
    NoCapacity,
    OrderUnpaid,
    ProviderDenied,
    ProviderUnavailable,
    QuotaReached,
    TorporError,
)
from torpor.shared.values import Want


@pytest.mark.parametrize(
    ("want", "reason"),
    [
        (Want(), ""),
        (Want(gpu="H100 SXM 80GB", gpu_count=2, disk_gib=200, max_price_usd_h=4.0), ""),
        (Want(gpu="A100"), "its GPU is H100 SXM, A100 is wanted"),
        (Want(gpu="H100 PCIe"), "its H100 is SXM, PCIe is wanted"),
        (Want(gpu="H100", gpu_count=4), "it has 2 GPUs, 4 are wanted"),
        (Want(disk_gib=201), "its disk is 200 GiB, 201 GiB are wanted"),
        (Want(max_price_usd_h=3.9), "it costs 4 $/h, the limit is 3.9 $/h"),
        (Want(regions=["EU", "CA"]), "it is in US, not in EU or CA"),
        (Want(regions=["EU", "US"]), ""),
        (Want(spot="only"), "it is no spot machine"),
        (Want(min_reliability=0.99), "its reliability is 0.98, 0.99 is wanted"),
        (Want(architecture="aarch64"), "its processor is x86_64, aarch64 is wanted"),
        (Want(cuda=(12, 4)), ""),
        (Want(cuda=(12, 10)), "its driver supports CUDA 12.4, 12.10 is wanted"),
        (Want(driver=(550, 54, 14)), ""),
        (Want(driver=(552,)), ""),
        (Want(driver=(555,)), "its driver supports CUDA 12.4, 12.5 is wanted"),
        (Want(driver=(999,), cuda=(14, 0)), "its driver supports CUDA 12.4, 14.0 is wanted"),
    ],
)
def test_an_offer_fits_or_says_why_not(want: Want, reason: str) -> None:
    assert misfit(H100, want) == reason


@pytest.mark.parametrize(
    ("changes", "want", "reason"),
    [
        ({"spot": True}, Want(), "it is a spot machine"),
        ({"spot": True}, Want(spot="allowed"), ""),
        ({"available": False}, Want(), "it is sold out"),
        ({"available": None}, Want(), ""),
        ({"reliability": None}, Want(min_reliability=0.99), ""),
        (
            {"reliability": None, "many_owners": True},
            Want(min_reliability=0.5),
            "its host states no reliability, 0.5 is wanted",
        ),
        ({"reliability": None, "many_owners": True}, Want(), ""),
        ({"many_owners": True}, Want(min_reliability=0.9), ""),
        ({"cuda": None}, Want(cuda=(12, 0)), ""),
        ({"gpu": None, "gpu_count": 0, "cuda": None}, Want(cuda=(12, 0)), ""),
        ({"cuda": None}, Want(driver=(580,)), ""),
        (
            {"driver": (550, 54, 9)},
            Want(driver=(550, 54, 14)),
            "its driver is 550.54.09, 550.54.14 is wanted",
        ),
        ({"driver": (550, 54, 14)}, Want(driver=(550, 54)), ""),
        ({"driver": (550,)}, Want(driver=(550, 54)), ""),
        (
            {"cuda": (99, 0)},
            Want(driver=(999,)),
            "it does not state its driver, 999 is wanted",
        ),
        ({"driver": (999, 1), "cuda": None}, Want(driver=(999,)), ""),
        ({"gpu": None, "gpu_count": 0}, Want(gpu="L4"), "it has no GPU, L4 is wanted"),
    ],
)
def test_what_is_not_stated(changes: dict[str, Any], want: Want, reason: str) -> None:
    assert misfit(msgspec.structs.replace(H100, **changes), want) == reason


@pytest.mark.parametrize(
    ("error", "changes", "blocked"),
    [
        (NoCapacity("x"), {"id": "2"}, True),
        (NoCapacity("x"), {"id": "2", "domain": "host-2"}, False),
        (CreateFailed("x"), {"id": "2"}, False),
        (QuotaReached("x"), {"domain": "host-2"}, True),
        (QuotaReached("x"), {"domain": "host-2", "region": "EU"}, False),
        (QuotaReached("x"), {"domain": "host-2", "spot": True}, False),
        (QuotaReached("x"), {"domain": "host-2", "gpu": GpuModel("L4")}, False),
        (ProviderDenied("x"), {"domain": "host-2", "region": "EU", "gpu": GpuModel("L4")}, True),
        (ProviderDenied("x"), {"provider": "vast:2"}, False),
        (NoCapacity("x"), {"provider": "vast:2"}, False),
        (ProviderUnavailable("x"), {"id": "2"}, False),
        (CreateUncertain("x"), {"id": "2"}, False),
        (OrderUnpaid("x"), {"domain": "host-2", "region": "EU", "gpu": GpuModel("L4")}, True),
        (OrderUnpaid("x"), {"provider": "vast:2"}, False),
    ],
)
def test_an_error_blocks_its_domain_and_no_more(
    error: TorporError, changes: dict[str, Any], blocked: bool
) -> None:
    assert blocks(error, H100, msgspec.structs.replace(H100, **changes)) is blocked
