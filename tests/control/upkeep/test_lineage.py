"""Which work a snapshot lacks, and that retention keeps it."""

from __future__ import annotations

import pytest

from tests.fixtures.manifests import PLAIN, entry, honest
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.small_saves import DEMO, verified_save
from torpor.control.store.receipts import Receipt
from torpor.control.upkeep.lineage import Other, also_in, ends, lacking, named
from torpor.control.upkeep.pins import pin
from torpor.control.upkeep.retention import Retention, Taken, judge
from torpor.shared.format.lineage import Lineage, recorded
from torpor.shared.format.manifest import DIRECTORY, encode_manifest
from torpor.shared.format.names import manifest_key
from torpor.shared.values import SnapshotId, made_at


def _id(number: int) -> SnapshotId:
    return SnapshotId(f"202611{number:02}T120000Z-00000000")


def _lines(*steps: str) -> dict[int, Lineage]:
    """``3<1`` is snapshot 3, which goes on from 1; ``3=1`` with no change; ``3`` from nothing."""
    lines: dict[int, Lineage] = {}
    for step in steps:
        number, _, parent = step.replace("=", "<").partition("<")
        before = lines[int(parent)] if parent else None
        lines[int(number)] = Lineage.after(before, _id(int(number)), equal="=" in step)
    return lines


def _receipts(lines: dict[int, Lineage]) -> list[tuple[SnapshotId, Receipt]]:
    """Newest first."""
    return [
        (line.snapshot, Receipt(1, "", 0, None, f"a{number}", f"m{number}", line))
        for number, line in sorted(lines.items(), reverse=True)
    ]


@pytest.mark.parametrize(
    ("steps", "mine", "others"),
    [
        (["1", "2<1", "3<2"], 3, []),
        (["1", "2<1", "3<2"], 2, [3]),
        (["1", "2<1", "3=1"], 3, [2]),  # a machine that had not changed is stored after another
        (["1", "2<1", "3=1"], 2, []),
        (["1", "2<1", "3<1", "4<2", "5<3"], 5, [4]),  # in turn: the end of the other line
        (["1", "2<1", "3<1", "4<2", "5<3"], 4, [5]),
        (["1", "2<1", "3<1", "4<1"], 4, [3, 2]),
        (["1", "2=1", "3=1", "4=1"], 2, []),  # replicas that nobody has used
        (["1", "2"], 2, [1]),  # a machine that remembers nothing
        (["1", "2<1", "3<1"], 1, [3, 2]),  # what is synced back
    ],
)
def test_what_a_snapshot_lacks_is_the_end_of_each_other_line(
    steps: list[str], mine: int, others: list[int]
) -> None:
    lines = _lines(*steps)
    found = ends(lines[mine], _receipts(lines))
    assert found == [Other(_id(number), f"m{number}") for number in others]


def test_a_listing_says_where_else_the_work_of_a_snapshot_is() -> None:
    lines = _lines("1", "2<1", "3<1", "4<3", "5=4")
    found = also_in(dict(_receipts(lines)))
    assert found == {_id(1): _id(5), _id(2): None, _id(3): _id(5), _id(4): _id(5), _id(5): _id(4)}


def _put(store: MemoryStore, line: Lineage) -> None:
    """A verified snapshot of that lineage."""
    manifest = honest(
        snapshot=line.snapshot, entries=[entry(DIRECTORY, b"")], chunks=[], packs=[],
        environment=line.record(), machine="agent",
    )  # fmt: skip
    store.put(manifest_key(DEMO, line.snapshot), encode_manifest(manifest, PLAIN)[0])
    assert recorded(verified_save(store, line.snapshot).manifest) == line


def test_it_is_read_from_receipts_and_pins_put_a_line_aside(memory_store: MemoryStore) -> None:
    lines = _lines("1", "2<1", "3<1", "4<3")
    for line in lines.values():
        _put(memory_store, line)
    assert lacking(memory_store, DEMO, lines[4]) == [Other(_id(2), "agent")]
    assert named(lacking(memory_store, DEMO, lines[4])) == (
        f"{_id(2)} of machine agent (2026-11-02 12:00 UTC)"
    )
    assert lacking(memory_store, DEMO, lines[4], since=_id(3)) == []  # an older matter
    memory_store.delete([manifest_key(DEMO, _id(1))])  # a deleted parent breaks no line
    assert lacking(memory_store, DEMO, lines[4]) == [Other(_id(2), "agent")]
    pin(memory_store, DEMO, _id(2), "as it was in the paper")
    assert lacking(memory_store, DEMO, lines[4]) == []


@pytest.mark.parametrize(
    ("steps", "kept"),
    [
        (["1", "2<1", "3<2"], [3]),
        (["1", "2<1", "3<1"], [2, 3]),
        (["1", "2<1", "3<1", "4<2", "5<4"], [3, 5]),
        (["1", "2=1", "3=1"], [3]),
        (["1", "2<1", "3=1", "4<2"], [4]),
    ],
)
def test_retention_deletes_no_work_that_no_other_snapshot_has(
    steps: list[str], kept: list[int]
) -> None:
    """Long after the machine of the other line has ended, too."""
    taken = [
        Taken(line.snapshot, made_at(line.snapshot).timestamp() + 1e8 * number, True,
              f"a{number}", lineage=line)
        for number, line in _lines(*steps).items()
    ]  # fmt: skip
    verdicts = judge(taken, Retention(last=1), {})
    assert sorted(verdict.snapshot for verdict in verdicts if verdict.kept) == [*map(_id, kept)]
