"""What canaries have shown: kept by account and kind of machine, and what it says of an offer."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from tests.fixtures.market import H100
from tests.fixtures.memory_store import MemoryStore
from torpor.control.providers.local.provider import LocalProvider
from torpor.control.rental.canaries import MOST_KINDS, Canary, CanaryRecords, CanaryResults
from torpor.control.rental.prospects import checkpoint, prospect
from torpor.control.rental.records import Rental
from torpor.shared.values import FrozenPrograms, Host, Label, Want, WorkspaceName

DAY_S = 24 * 3600.0
RENTAL = Rental(
    label=Label("me", WorkspaceName("demo"), "r"), provider=H100.provider, state="standing",
    created_unix=1.0, gpu="H100 SXM", gpu_count=2, region="US",
)  # fmt: skip
LAST = Host("6.8.0-31", "fpu sse2 avx2 hypervisor", "570.86.15")


def test_the_newest_canary_of_each_kind_counts_whichever_workspace_flew_it(
    store: MemoryStore,
) -> None:
    other = msgspec.structs.replace(RENTAL, region="EU")
    for rental, why_not in ((RENTAL, "no SYS_TIME"), (other, "a\nlie | \x1b[0m"), (RENTAL, "")):
        CanaryRecords(store).keep(rental.provider, Canary.of(rental, why_not, LAST))
    CanaryRecords(store).keep("another", Canary.of(RENTAL, "away", Host()))
    canaries = CanaryRecords(store).results()
    found = canaries.of(H100)
    assert found is not None
    assert (found.why_not, found.host) == ("", LAST)
    (lie,) = [one for one in [canaries.of(msgspec.structs.replace(H100, region="EU"))] if one]
    assert lie.why_not == "a lie | [0m"
    assert canaries.of(msgspec.structs.replace(H100, gpu_count=1)) is None


def test_one_that_fails_on_another_architecture_says_nothing_of_this_one(
    store: MemoryStore,
) -> None:
    records = CanaryRecords(store)
    records.keep(RENTAL.provider, Canary.of(RENTAL, "", LAST))
    arm = Host("6.8.0", architecture="aarch64")
    records.keep(RENTAL.provider, Canary.of(RENTAL, "CRIU is not sent to aarch64", arm))
    found = records.results().of(H100)
    assert found is not None
    assert found.why_not == ""
    there = msgspec.structs.replace(H100, architecture="aarch64")
    assert prospect(there, LocalProvider.abilities, records.results().of(there), Want()).barred


def test_hostile_machines_cannot_make_the_record_too_large_to_read(store: MemoryStore) -> None:
    worst = Host(*['"' * 10_000] * 4)
    for count in range(MOST_KINDS + 1):
        rental = msgspec.structs.replace(RENTAL, gpu_count=count)
        CanaryRecords(store).keep(rental.provider, Canary.of(rental, '"' * 10_000, worst))
    last = msgspec.structs.replace(H100, gpu_count=MOST_KINDS, architecture='"' * 300)
    assert CanaryRecords(store).results().of(last) is not None


@pytest.mark.parametrize(
    ("days", "why_not", "counts"),
    [
        (89, "", True),
        (91, "", False),
        (6, "x", True),
        (8, "x", False),
        (-8, "x", False),
        (-1e18, "", False),
    ],
)
def test_what_failed_is_tried_again_after_a_week(days: int, why_not: str, counts: bool) -> None:
    old = msgspec.structs.replace(
        Canary.of(RENTAL, why_not, LAST), flown_unix=time.time() - days * DAY_S
    )
    assert (CanaryResults({H100.provider: [old]}).of(H100) is not None) == counts


FROZEN = FrozenPrograms(
    Host("6.5.0", "sse2 avx2 arch_capabilities", "570.86.15"), "NVIDIA H100 80GB", 2
)


@pytest.mark.parametrize(
    ("offer", "last", "frozen", "words"),
    [
        ({}, LAST, FROZEN, "went on there on"),
        ({}, Host(), FROZEN, "went on there on"),
        ({"driver": (570, 86)}, LAST, FROZEN, "went on there on"),
        ({"driver": (580, 65, 6)}, LAST, FROZEN, "570.86.15, its driver is 580.65.06"),
        ({}, Host(driver="580.65"), FROZEN, "they used driver 570.86.15, its driver is 580.65"),
        ({"gpu_count": 1}, LAST, FROZEN, "they used 2 GPUs, it has 1"),
        ({}, LAST, FrozenPrograms(Host(), "NVIDIA L4", 1), "they used L4, its GPU is H100 SXM"),
        ({}, LAST, FrozenPrograms(Host("6.11.2")), "Linux 6.11, the last machine there had 6.8"),
        (
            {},
            LAST,
            FrozenPrograms(Host(features="avx512f")),
            "the last machine there had no avx512f",
        ),
        ({"architecture": "aarch64"}, LAST, FROZEN, "its processor is aarch64"),
    ],
)  # fmt: skip
def test_what_must_match_is_compared_where_it_is_known(
    offer: dict[str, Any], last: Host, frozen: FrozenPrograms, words: str
) -> None:
    there = msgspec.structs.replace(H100, **offer)
    seen = prospect(
        there, LocalProvider.abilities, Canary.of(RENTAL, "", last), Want(frozen=frozen)
    )
    assert words in seen.words
    assert seen.level == ("proven" if "went on" in words else "no")
    assert bool(seen.barred) == ("aarch64" in words)  # `require` refuses no other driver or CPU


def test_a_canary_says_more_than_the_market() -> None:
    able = LocalProvider.abilities
    day = time.strftime("%Y-%m-%d", time.gmtime())
    assert checkpoint(H100, able, None) == "unknown"
    assert checkpoint(H100, able, Canary.of(RENTAL, "", LAST)) == f"proven {day}"
    assert checkpoint(H100, able, Canary.of(RENTAL, "no SYS_TIME", LAST)) == "no"
