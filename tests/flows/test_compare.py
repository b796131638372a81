"""The flow that says where to rent, over a market in memory."""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from flows import compare, create, wake
from tasks.canaries import keep_canary, read_canaries
from tasks.programs import prove_freezing
from tests.fixtures.lab import DEMO, Lab
from tests.fixtures.manifests import PLAIN, SNAPSHOT, entry, honest
from tests.fixtures.market import Market
from tests.fixtures.plain_flows import Shows, plain, run_plainly
from torpor.control.compare.offers import OffersReport
from torpor.control.remote.agent import Agent
from torpor.control.rental.canaries import Canary, CanaryRecords
from torpor.control.rental.records import Rentals
from torpor.control.store_prices import StorePrice
from torpor.shared.errors import (
    InvalidInput,
    MachineUnfit,
    NoCapacity,
    NoOffer,
    ProviderDenied,
    SnapshotMissing,
    StoreUnavailable,
)
from torpor.shared.format.frozen import frozen_record
from torpor.shared.format.manifest import DIRECTORY, FILE, Chunk, Extent, Pack, encode_manifest
from torpor.shared.format.names import manifest_key, pack_key
from torpor.shared.values import GIB, MIB, Host, WorkspaceName
from torpor.shared.wire.job import Tried

STORED = 2 * 10**9


def keep_snapshot(lab: Lab, **facts: object) -> None:
    """A snapshot of 100 GiB in 2 GB, of a machine with CUDA 12.8 and these ``facts``."""
    statistics = {"bytes": 100 * GIB, "stored_bytes": STORED}
    data = bytes(4 * MIB)
    pack = Pack(b"p" * 16, len(data), hashlib.md5(data, usedforsecurity=False).digest())
    lab.store.put(pack_key(DEMO, pack.id), data)
    extents = (Extent(0, 0, len(data)),) * (100 * GIB // len(data))
    big = entry(FILE, b"big", size=100 * GIB, extents=extents)
    manifest = honest(
        environment={"cuda": "12.8", **facts},
        statistics=statistics,
        entries=[entry(DIRECTORY, b""), big],
        chunks=[Chunk(PLAIN.name(data), len(data), 0, 0, 0, len(data))],
        packs=[pack],
    )
    blob, _ = encode_manifest(manifest, PLAIN)
    lab.store.put(manifest_key(DEMO, SNAPSHOT), blob)


def test_a_dry_run_of_a_wake_shows_what_it_would_rent_and_rents_nothing(lab: Lab) -> None:
    keep_snapshot(lab)
    lab.market.on_sale = [
        msgspec.structs.replace(lab.market.on_sale[0], **changes)  # type: ignore[arg-type]
        for changes in (
            {"id": "dear", "cuda": (12, 8), "price_usd_h": 5.0},
            {"id": "old", "cuda": (12, 4)},
            {"id": "cheap", "cuda": (12, 8), "link_mbit_s": 80.0},
        )
    ]
    with Shows(lab.opened) as shows:
        shown = wake.fn(DEMO, dry_run=True)
    assert isinstance(shown, OffersReport)
    assert [choice.offer.id for choice in shown.fitting] == ["cheap", "dear"]
    assert shown.title() == (
        f"2 offers fit snapshot {SNAPSHOT} of workspace demo, 1 do not. Nothing was rented"
    )
    assert [(row["offer"], row["$ a day"]) for row in shows.rows] == [
        ("cheap", "96.00"), ("dear", "120.00"), ("old", ""),
    ]  # fmt: skip
    longest = lab.market.abilities.queue_s + lab.market.abilities.ready_s
    assert shows.rows[0]["ready after"] == f"at most {longest + 200:.0f} s"
    assert "CUDA 12.4" in shows.rows[2]["outcome"]
    assert lab.machines() == []
    assert not [*Rentals(lab.store, DEMO).open()]
    with pytest.raises(InvalidInput, match="rents nothing"):
        run_plainly(lab.opened, wake, machine="root@198.51.100.7", dry_run=True)


def test_where_frozen_programs_went_on_comes_before_what_is_cheaper_and_it_says_so(
    lab: Lab,
) -> None:
    keep_snapshot(lab, kernel="6.8.0", **frozen_record(1, 0))
    lab.market.on_sale = [
        msgspec.structs.replace(lab.market.on_sale[0], cuda=None, id=region, region=region)
        for region in ("US", "EU")
    ]
    lab.market.on_sale[0] = msgspec.structs.replace(lab.market.on_sale[0], price_usd_h=3.6)
    there = lab.record(gpu="H100 SXM", gpu_count=2, region="EU")
    CanaryRecords(lab.store).keep(there.provider, Canary.of(there, "", Host("6.8.0")))
    day = time.strftime("%Y-%m-%d", time.gmtime())
    opened = lab.wanting(programs=["exec sleep 600"], process="try")
    with Shows(opened) as shows:
        shown = wake.fn(DEMO, dry_run=True)
        assert isinstance(shown, OffersReport)
        assert [choice.offer.id for choice in shown.fitting] == ["EU", "US"]
        assert [row["outcome"] for row in shows.rows] == [
            f"fits; processes went on there on {day}",
            "fits; processes may go on there: none was tried",
        ]
    table = run_plainly(opened, compare)
    assert list(table.offer) == ["EU", "US"]
    assert list(table.checkpoint) == [f"proven {day}", "unknown"]
    for plain_one in (lab.opened, lab.wanting(programs=["exec sleep 600"])):  # nothing is to go on
        assert list(run_plainly(plain_one, compare).offer) == ["US", "EU"]


def test_where_a_canary_failed_nothing_is_rented_that_has_to_freeze_programs(lab: Lab) -> None:
    keep_snapshot(lab)
    lab.market.on_sale[0] = msgspec.structs.replace(lab.market.on_sale[0], cuda=None)
    there = lab.record(gpu="H100 SXM", gpu_count=2, region="US")
    spec = lab.wanting(programs=["exec sleep 600"], process="require")
    opened = replace(spec, sealing=bytes(32))
    in_use = msgspec.structs.replace(there, state="handed over")
    with plain(opened):
        keep_canary(opened, in_use, Tried("its disk is full"))
    assert list(run_plainly(spec, compare).checkpoint) == ["unknown"]
    machine = SimpleNamespace(call=lambda *_, **__: Tried("it lacks SYS_TIME", host=Host("6.8")))
    with plain(opened), pytest.raises(MachineUnfit, match="it lacks SYS_TIME"):
        prove_freezing(opened, cast("Agent", machine), there)
    with pytest.raises(NoOffer, match=r"a canary failed there on .*: it lacks SYS_TIME"):
        run_plainly(spec, wake, dry_run=True)
    assert list(run_plainly(spec, compare).checkpoint) == ["no"]
    lab.store.fails = StoreUnavailable("away")
    with plain(opened):
        assert read_canaries(opened).of(lab.market.on_sale[0]) is None  # ranks without it
        keep_canary(opened, there, Tried())


def test_it_shows_offers_for_the_snapshot(lab: Lab) -> None:
    keep_snapshot(lab)
    lab.market.on_sale = [
        msgspec.structs.replace(lab.market.on_sale[0], **changes)  # type: ignore[arg-type]
        for changes in (
            {"id": "new", "cuda": (12, 8), "link_mbit_s": 80.0, "reliability": None},
            {"id": "old", "cuda": (12, 4)},
            {"id": "small", "cuda": None, "disk_gib": 50.0},
            {"id": "spot", "cuda": None, "spot": True, "price_usd_h": 1.0},
        )
    ]
    price = StorePrice(0.02, 0.1, "2026-08-03", "https://x")
    with Shows(replace(lab.opened, store_price=lambda: price)) as shows:
        table = compare.fn(DEMO, hours=2.0).set_index("offer")
    assert list(table.index[:2]) == ["spot", "new"]
    assert table.rejected["old"] == "its driver supports CUDA 12.4, 12.8 is wanted"
    assert table.rejected["small"] == "its disk is 50 GiB, 110 GiB are wanted"
    assert table.session_usd["new"] == pytest.approx(2 * 4.0 + 0.1 * 2)
    assert table.hibernated_usd_month["new"] == pytest.approx(0.04)
    assert table.restore_s["new"] == pytest.approx(200.0)
    assert [row["offer"] for row in shows.rows] == ["spot", "new", "old", "small"]
    assert [row["outcome"] for row in shows.rows[:2]] == ["fits, spot", "fits"]
    assert [row["$ for 2 h"] for row in shows.rows] == ["2.20", "8.20", "", ""]
    assert shows.rows[1]["$ a month hibernated"] == "0.04"
    assert shows.rows[2]["outcome"] == "its driver supports CUDA 12.4, 12.8 is wanted"
    never = run_plainly(lab.opened, compare, spot="never", snapshot=SNAPSHOT)
    assert never.set_index("offer").rejected["spot"] == "it is a spot machine"


def test_what_our_rentals_did_is_counted(lab: Lab) -> None:
    """Of all workspaces of the store: a start, a wake that read from the store, a refusal."""
    from tasks.machines import create_machine, look_for_offers, renting

    run_plainly(lab.opened, create)
    other = replace(
        lab.opened, spec=msgspec.structs.replace(lab.opened.spec, name=WorkspaceName("other"))
    )
    with plain(other), renting(other) as held:
        tenancy = create_machine(held, look_for_offers(other))
        tenancy.hand_over(fetched_bytes=10**9, fetched_s=20.0)
        lab.market.faults = [NoCapacity("sold out")]
        with pytest.raises(Exception, match="sold out"):
            create_machine(held, look_for_offers(other))
    keep_snapshot(lab)
    lab.market.on_sale = [msgspec.structs.replace(one, cuda=None) for one in lab.market.on_sale]
    (line,) = run_plainly(lab.opened, compare).to_dict("records")
    assert (line["failures"], line["attempts"], line["starts"]) == (1, 3, 2)
    assert (line["start_from"], line["attempts_at"]) == ("our rentals", "with this GPU here")
    assert line["start_p50_s"] <= line["start_p90_s"] < 60
    assert (line["link_mb_s"], line["restore_s"]) == (50.0, 40.0)


def test_what_was_measured_is_kept_when_a_rental_ends(lab: Lab) -> None:
    from tasks.machines import create_machine, destroy_machine, look_for_offers, renting
    from torpor.control.safety import never_handed_over

    with plain(lab.opened), renting(lab.opened) as held:
        tenancy = create_machine(held, look_for_offers(lab.opened))
        tenancy.hand_over(fetched_bytes=10**9, fetched_s=20.0)
        (rental,) = Rentals(lab.store, DEMO).open()
        machine = tenancy.machine
        destroy_machine(lab.opened, machine, never_handed_over(machine, rental.label))
        with renting(lab.opened) as scratch:  # ends with its run, and has answered too
            create_machine(scratch, look_for_offers(lab.opened))
    woken, unused = sorted(Rentals(lab.store, DEMO).history(), key=lambda one: one.created_unix)
    assert (woken.fetched_bytes, woken.fetched_s, woken.failed) == (10**9, 20.0, False)
    assert woken.answered_unix is not None
    assert unused.answered_unix is not None
    assert unused.fetched_bytes == 0


def test_one_market_that_fails_does_not_stop_the_others(lab: Lab) -> None:
    away, other = Market("runpod://2"), Market("lambda://3")
    away.away = ProviderDenied("the key is wrong")
    other.on_sale = []
    each = [
        ("vast-provider/mine", lab.market),
        ("runpod-provider/mine", away),
        ("lambda-provider/mine", other),
        ("ec2-provider/broken", InvalidInput("the block cannot be used")),
    ]
    opened = replace(lab.opened, each=lambda: each)
    with Shows(opened) as shows:
        table = compare.fn(DEMO)
    assert list(table.provider) == [lab.market.identity]  # its block and the workspace are one
    assert {row["provider"]: row["outcome"] for row in shows.rows[1:]} == {
        "runpod://2": "the key is wrong",
        "ec2-provider/broken": "the block cannot be used",
        "lambda://3": "nothing on sale is like that",
    }
    with Shows(opened) as shows:
        compare.fn(DEMO, everywhere=False)
    assert len(shows.rows) == 1


def test_a_snapshot_that_is_not_there_is_an_error(lab: Lab) -> None:
    with pytest.raises(SnapshotMissing):
        run_plainly(lab.opened, compare, snapshot=SNAPSHOT)
    # Without any, there is only nothing to restore.
    assert list(run_plainly(lab.opened, compare).restore_s) == [0.0]
