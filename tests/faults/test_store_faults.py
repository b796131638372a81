"""A store that refuses, stalls, cuts short and lies, in each phase of hibernate and wake."""

from __future__ import annotations

import pytest

from tests.fixtures.fault_proxy import Fault
from tests.fixtures.plain_flows import hibernate_plainly
from tests.fixtures.standing import Asleep, Awake, Matching, gets, lists, puts, raises
from tests.fixtures.trees import differences, facts
from torpor.shared.errors import SnapshotDamaged, StoreDenied, StoreUnavailable, TorporError

FOREVER = 1_000_000
HOST = r"127\.0\.0\.1:\d+"

PHASES = {
    "probe": (puts("/probe/"), "probe"),
    "list": (lists, "probe|list"),
    "packs": (puts("/packs/"), "PUT workspaces/demo/packs/"),
    "manifest": (puts("/snapshots/"), "PUT workspaces/demo/snapshots/"),
    "reading back": (gets("/snapshots/"), "(?i:GET workspaces/demo/snapshots/)"),
}
TRANSIENT = [
    ("packs", Fault("status", puts("/packs/"), status=500, code="InternalError")),
    ("packs", Fault("status", puts("/packs/"), status=503, count=2)),
    ("packs", Fault("timeout", puts("/packs/"))),
    ("packs", Fault("flip_up", puts("/packs/"), at_byte=1000)),
    ("packs", Fault("reset", puts("/packs/"))),
    ("packs", Fault("after", puts("/packs/"))),
    ("packs", Fault("status", puts("/packs/"), status=503, reads_body=False)),
    ("manifest", Fault("status", puts("/snapshots/"), status=503)),
    ("manifest", Fault("flip_up", puts("/snapshots/"), at_byte=100)),
    ("manifest", Fault("after", puts("/snapshots/"))),
    ("reading back", Fault("cut", gets("/snapshots/"), at_byte=50)),
    ("list", Fault("status", lists, status=503)),
]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    ("status", "code", "kind", "step"),
    [
        (503, "SlowDown", StoreUnavailable, "again"),
        (403, "AccessDenied", StoreDenied, "check"),
    ],
)
def test_a_store_that_refuses_stops_a_hibernate_and_harms_nothing(
    awake: Awake,
    short_agent: None,
    phase: str,
    status: int,
    code: str,
    kind: type[TorporError],
    step: str,
) -> None:
    when, what = PHASES[phase]
    _stops(awake, Fault("status", when, FOREVER, status, code), kind, what, HOST, code, step)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("status", puts("/packs/"), FOREVER, 500, "InternalError", "disk on fire"),
        Fault("timeout", puts("/packs/"), FOREVER),
        Fault("reset", puts("/packs/"), FOREVER),
        Fault("status", puts("/snapshots/"), FOREVER, 500, "InternalError", "disk on fire"),
        Fault("timeout", puts("/snapshots/"), FOREVER),
    ],
    ids=lambda fault: f"{fault.kind} {fault.status}",
)
def test_a_store_that_stays_away_stops_a_hibernate_and_harms_nothing(
    awake: Awake, short_agent: None, fault: Fault
) -> None:
    _stops(awake, fault, StoreUnavailable, "PUT workspaces/demo/", HOST, "again")


def test_a_store_whose_disk_is_full_says_so(awake: Awake, short_agent: None) -> None:
    full = Fault(
        "status", puts("/packs/"), FOREVER, 507, "XMinioStorageFull", "no space left on the disk"
    )
    _stops(awake, full, StoreUnavailable, "no space left", HOST, "507", "again")


@pytest.mark.parametrize(
    ("phase", "fault"), TRANSIENT, ids=[f"{p} {f.kind} {f.status}" for p, f in TRANSIENT]
)
def test_a_fault_that_passes_is_not_noticed(
    awake: Awake, short_agent: None, phase: str, fault: Fault
) -> None:
    awake.work()
    awake.world.proxy.clear()
    fault = awake.world.proxy.add(Fault(**vars(fault)))
    report = awake.hibernate()
    assert fault.count == 0, "the fault never happened"
    assert awake.world.snapshots()[0].snapshot == report.snapshot
    awake.unharmed()


def test_a_pack_that_the_store_acknowledged_and_lost_is_stored_again(
    awake: Awake, short_agent: None
) -> None:
    """The manifest is written only once every pack is there as it was sent."""
    awake.work()
    before = {found.key for found in awake.world.direct.list("workspaces/demo/packs/")}
    listed = 0

    def lose(method: str, path: str) -> bool:
        nonlocal listed
        new = {f.key for f in awake.world.direct.list("workspaces/demo/packs/")} - before
        if lists(method, path) and new and not listed:
            listed = len(new)
            awake.world.direct.delete(new)
        return False

    awake.world.proxy.add(Fault("delay", lose, FOREVER))
    awake.hibernate()
    assert listed > 0
    awake.world.proxy.clear()
    awake.unharmed()


@pytest.mark.parametrize(
    ("when", "status", "code", "kind", "step"),
    [
        (gets("/packs/"), 503, "SlowDown", StoreUnavailable, "again"),
        (gets("/packs/"), 403, "AccessDenied", StoreDenied, "check"),
        (gets("/snapshots/"), 403, "AccessDenied", StoreDenied, "check"),
        (puts("/rentals/open/"), 503, "SlowDown", StoreUnavailable, "again"),
    ],
)
def test_a_store_that_refuses_stops_a_wake_and_leaves_no_machine(
    asleep: Asleep,
    short_agent: None,
    when: Matching,
    status: int,
    code: str,
    kind: type[TorporError],
    step: str,
) -> None:
    asleep.world.proxy.clear()
    asleep.world.proxy.add(Fault("status", when, FOREVER, status, code))
    with raises(kind, HOST, code, "workspaces/demo/", step):
        asleep.wake()
    asleep.unharmed()
    asleep.recovers()


def test_faults_that_pass_do_not_show_in_what_is_woken(asleep: Asleep, short_agent: None) -> None:
    proxy = asleep.world.proxy
    proxy.clear()
    faults = [
        Fault("status", gets("/snapshots/"), status=503),
        Fault("cut", gets("/snapshots/"), at_byte=40),
        Fault("cut", gets("/packs/"), at_byte=100_000),
        Fault("flip_down", gets("/packs/"), at_byte=5_000),
        Fault("reset", gets("/packs/"), at_byte=70_000),
        Fault("timeout", gets("/packs/")),
    ]
    for fault in faults:
        proxy.add(fault)
    asleep.wake(retries=3)
    assert [fault.count for fault in faults] == [0] * len(faults)
    (machine,) = asleep.world.machines()
    assert not differences(asleep.truth, facts(asleep.world.workspace(machine.id)))
    hibernate_plainly(asleep.world.opened)


def test_a_pack_that_always_comes_with_a_flipped_bit_is_never_written(
    asleep: Asleep, short_agent: None
) -> None:
    asleep.world.proxy.clear()
    asleep.world.proxy.add(Fault("flip_down", gets("/packs/"), FOREVER, at_byte=5_000))
    with raises(SnapshotDamaged, "packs/", "(?i)wake|verify|again"):
        asleep.wake()
    asleep.unharmed()
    asleep.recovers()


def _stops(awake: Awake, fault: Fault, kind: type[TorporError], *words: str) -> None:
    """The fault ends a hibernate that was to destroy; nothing is lost; the next one completes."""
    awake.work()
    awake.world.proxy.clear()
    awake.world.proxy.add(fault)
    with raises(kind, *words):
        awake.hibernate(destroy=True)
    awake.world.proxy.clear()
    awake.unharmed()
    awake.recovers()
