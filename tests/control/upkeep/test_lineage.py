"""Which state is the newest, which work a snapshot lacks, and that retention keeps it."""

from __future__ import annotations

import itertools
from datetime import datetime, timedelta, timezone

import pytest

from tests.fixtures.faulty_stores import ShortListings
from tests.fixtures.manifests import PLAIN, entry, honest
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.small_saves import DEMO, verified_save
from torpor.control.store import receipts
from torpor.control.store.manifests import snapshot_ids
from torpor.control.store.receipts import verified_snapshots
from torpor.control.upkeep.history import taken_snapshots
from torpor.control.upkeep.lineage import (
    JobLineage,
    NewestState,
    SnapshotLines,
    StoredState,
    also_in,
    choose_newest,
    lacking,
    named,
    sure_save,
)
from torpor.control.upkeep.pins import pin
from torpor.control.upkeep.retention import Retention, Taken, judge
from torpor.control.upkeep.superseded import Succession
from torpor.shared.errors import ManifestInvalid, SnapshotDamaged, SnapshotMissing, StoreCorrupt
from torpor.shared.format import lineage
from torpor.shared.format.lineage import AUTOSAVE, OWN_SAVE, Lineage
from torpor.shared.format.manifest import DIRECTORY, encode_manifest
from torpor.shared.format.names import manifest_key
from torpor.shared.values import SnapshotId, made_at, new_snapshot_id


def _id(number: int) -> SnapshotId:
    return SnapshotId(f"202611{number:02}T120000Z-00000000")


def _number(snapshot: SnapshotId | None) -> int | None:
    return None if snapshot is None else int(snapshot[6:8])


class Past:
    """A workspace in memory, whose clock goes on by a second with each write. A step is a snapshot
    that the store receives: its name's number, ``<`` the one that it goes on from (``=`` with no
    change, ``?`` if it does not say), and marks: ``~`` an autosave, ``!`` a save for a job that its
    machine made by itself, ``-`` that nobody has verified it, ``x`` that it lacks packs, ``X`` that
    its manifest cannot be read. A letter before the number: its machine, ``a`` by default."""

    def __init__(self, *steps: str) -> None:
        self.store = MemoryStore(itertools.count(1.0).__next__)
        self.lines: dict[int, Lineage] = {}
        for step in steps:
            self.take(step)

    def take(self, step: str) -> None:
        marks = {mark for mark in "~!-xX?" if mark in step}
        machine = next((each for each in step if each in "abcmw"), "a")
        number, _, parent = step.strip("~!-xX?abcmw").replace("=", "<").partition("<")
        name, before = _id(int(number)), self.lines[int(parent)] if parent else None
        line = Lineage.after(before, name, equal="=" in step, autosave="~" in marks)
        self.lines[int(number)] = Lineage.unknown(name) if "?" in marks else line
        own = {OWN_SAVE: 1} if marks & {"~", "!"} else {}
        facts = {
            "snapshot": name,
            "environment": {} if "?" in marks else line.record(),
            "machine": machine,
            "statistics": {**own, **({AUTOSAVE: 1} if "~" in marks else {})},
        }
        empty = {"entries": [entry(DIRECTORY, b"")], "chunks": [], "packs": []}
        manifest = honest(**facts | ({} if "x" in marks else empty))
        blob = encode_manifest(manifest, PLAIN)[0]
        self.store.put(manifest_key(DEMO, name), blob[:-1] if "X" in marks else blob)
        if not marks & {"-", "~", "!", "x", "X"}:
            verified_save(self.store, name)

    def choice(self, own: JobLineage | None = None, *, saves: bool = True) -> NewestState:
        return choose_newest(self.store, DEMO, PLAIN, own=own, saves=saves)

    def chosen(
        self, own: JobLineage | None = None, *, saves: bool = True
    ) -> tuple[int | None, ...]:
        """The snapshot that is chosen, and the tips that are left aside."""
        choice = self.choice(own, saves=saves)
        found = None if choice.snapshot is None else choice.snapshot.snapshot
        return (_number(found), *(_number(one.snapshot) for one in choice.aside))


@pytest.mark.rule(12)
@pytest.mark.parametrize(
    ("steps", "chosen"),
    [
        ([], (None,)),
        (["1", "2<1", "3<2"], (3,)),
        (["1", "3<1", "2<3"], (2,)),  # names out of order: descent decides
        (["1", "3<1-", "~2<3"], (2,)),  # a killed backup, then a save under an older name
        (["1", "3<1-", "~2<3", "~4<2"], (4,)),
        (["1", "4<1", "~2<1"], (2, 4)),  # between lines: what the store received last
        (["1", "3<1", "b2<1"], (2, 3)),
        (["1", "b2<1", "3<1"], (3, 2)),
        (["1", "~2<1", "b~3<1"], (3, 2)),  # two machines that saved by themselves and vanished
        (["1", "b~3<1", "~2<1", "c4<1"], (4, 2, 3)),
        (["1", "2<1", "b3=1"], (2,)),  # a machine that had not changed is no tip
        (["1", "2=1", "b3=1"], (3,)),  # of equal ones the last
        (["1", "2=1", "3<2", "b4=1"], (3,)),
        (["1", "2", "b3<2"], (3, 1)),  # a machine that remembers nothing began another line
        (["1?", "3?", "2?"], (2,)),  # from before lineages: one line in the store's order
        (["1?", "2?", "3<2", "4<3"], (4,)),
        (["1?", "2?", "b3", "4<2"], (4, 3)),
    ],
)
def test_the_newest_state_is_the_tip_that_the_store_received_last(
    steps: list[str], chosen: tuple[int | None, ...]
) -> None:
    assert Past(*steps).chosen() == chosen


def test_a_late_put_never_wins_over_what_descends_from_it() -> None:
    """The manifest of an autosave arrives after the hibernation that names it."""
    past = Past("1")
    past.lines[2] = Lineage.after(past.lines[1], _id(2), equal=False, autosave=True)
    past.take("3<2")
    past.take("~2<1")
    assert past.chosen() == (3,)


@pytest.mark.rule(12)
@pytest.mark.parametrize(
    ("steps", "chosen", "refused"),
    [
        (["1", "2<1", "~3<2x"], 2, [3]),
        (["1", "~2<1", "~3<2x"], 2, [3]),
        (["1", "~2<1", "3<2x"], 2, [3]),
        (["1", "~2<1x", "3<2", "~4<3x"], 3, [4]),
        (["1", "~2<1x", "~3<2x"], 1, [3, 2]),
        (["1?", "2?", "3?x"], 2, [3]),
        (["1", "b2<1", "~3x"], 2, [3]),  # nothing of the last line is whole: another line's tip
    ],
)
def test_where_the_tip_is_not_whole_its_nearest_whole_ancestor_is_chosen(
    steps: list[str], chosen: int, refused: list[int]
) -> None:
    choice = Past(*steps).choice()
    assert choice.snapshot is not None and _number(choice.snapshot.snapshot) == chosen
    assert [_number(one.snapshot) for one, _ in choice.refused] == refused


def test_a_manifest_that_cannot_be_read_is_named_and_hides_nothing() -> None:
    choice = Past("1", "2<1", "~3<2X").choice()
    assert choice.snapshot is not None and choice.snapshot.snapshot == _id(2)
    assert [type(error) for _, error in choice.refused] == [ManifestInvalid]
    assert Past("1", "~2<1X", "b3<1").chosen() == (3, 2)


def test_a_pin_keeps_a_tip_from_being_named_and_not_from_being_chosen() -> None:
    past = Past("1", "2<1", "b3<1")
    pin(past.store, DEMO, _id(2), "as it was in the paper")
    assert past.chosen() == (3,)
    pin(past.store, DEMO, _id(3), "this one too")
    assert past.chosen() == (3,)


def test_what_runs_made_alone_passes_autosaves_over_and_names_them() -> None:
    past = Past("1", "2<1", "b~3<1", "b~4<3")
    assert past.chosen() == (4, 2)
    assert past.chosen(saves=False) == (2, 4)
    assert Past("1", "b~2<1", "b3<2").chosen(saves=False) == (3,)
    assert Past("1", "b2<1", "b~4<2", "3<1").chosen(saves=False) == (3, 2, 4)


def test_a_job_whose_newest_save_is_gone_goes_on_from_what_else_its_machines_stored() -> None:
    past = Past("1", "2<1", "b4<1", "3<2")
    own = JobLineage(_id(3), frozenset("a"), frozenset())
    past.store.delete([manifest_key(DEMO, _id(3))])
    assert past.chosen(own) == (2, 4)
    past.store.delete([manifest_key(DEMO, _id(2)), manifest_key(DEMO, _id(1))])
    assert past.chosen(own) == (4,)


def test_a_listing_that_lacks_a_job_s_newest_save_chooses_nothing() -> None:
    past = Past("1", "2<1", "b3<1")
    short = ShortListings(past.store)
    short.hidden = {manifest_key(DEMO, _id(2))}
    own = JobLineage(_id(2), frozenset("a"), frozenset())
    with pytest.raises(StoreCorrupt, match="its listing lacks it"):
        choose_newest(short, DEMO, PLAIN, own=own)
    with pytest.raises(StoreCorrupt, match="its listing lacks it"):
        sure_save(short, DEMO, PLAIN, own)


@pytest.mark.parametrize(
    ("steps", "pins", "named", "goes"),
    [
        (["1", "2<1", "3<2"], [], [3], [1, 2, 3]),
        (["1", "2<1", "3<2", "b4<1", "b5<4"], [], [5], [4, 5]),  # 1 is the other line's too
        (["1", "2<1", "3<2", "b4<1", "b5<4"], [], [3, 5], [1, 2, 3, 4, 5]),
        (["1", "2<1", "3<2", "4<3"], [2], [4], [3, 4]),
        (["1", "~2<1", "~3<2", "4<3"], [], [3], [3]),  # 4 goes on from it
        (["1?", "2?", "3<2"], [], [3], [2, 3]),  # 1 says nothing of its line
    ],
)
def test_a_line_is_what_only_it_goes_on_from(
    steps: list[str], pins: list[int], named: list[int], goes: list[int]
) -> None:
    past = Past(*steps)
    for number in pins:
        pin(past.store, DEMO, _id(number), "kept")
    lines = SnapshotLines.of(past.store, DEMO, PLAIN)
    found = lines.only_for([_id(number) for number in named])
    assert sorted(_number(one) or 0 for one in found) == goes


@pytest.mark.rule(12)
@pytest.mark.parametrize(
    ("steps", "chosen"),
    [
        (["1", "2<1"], (2,)),
        (["1", "2<1", "!3<2"], (3,)),  # at a notice
        (["1", "2<1", "3<2-"], (3,)),  # a run that was killed before it verified
        (["1", "2<1", "3<2", "w4<3"], (3, 4)),  # its user woke it elsewhere: not the job's line
        (["1", "2<1", "w3<1"], (2, 3)),  # the workstation's backup
        (["1", "2<1", "!3<2", "w4<2"], (3, 4)),
        (["1", "2<1", "!3<1"], (2, 3)),  # of a machine that was given up and lived on
        (["1", "w2=1"], (2,)),  # the job's newest save is gone from the store
    ],
)
def test_a_job_goes_on_from_its_own_line(steps: list[str], chosen: tuple[int, ...]) -> None:
    past = Past(*steps)
    own = JobLineage(_id(2), frozenset("a"), frozenset())
    assert past.chosen(own) == chosen


def test_a_job_without_a_save_goes_on_from_what_its_machines_stored_or_from_the_newest() -> None:
    past = Past("1", "!2<1", "w3<1")
    assert past.chosen(JobLineage(None, frozenset("a"), frozenset())) == (2, 3)
    assert Past("1", "w3<1").chosen(JobLineage(None, frozenset("b"), frozenset())) == (3,)


def test_of_a_jobs_machines_the_receipts_name_some() -> None:
    """A run was killed after it verified a save, and before the job's record said so."""
    past = Past("1", "m2<1", "b3<2")
    assert past.chosen(JobLineage(_id(2), frozenset(), frozenset())) == (2, 3)
    assert past.chosen(JobLineage(_id(2), frozenset(), frozenset("b"))) == (3,)


@pytest.mark.rule(16)
def test_a_machine_is_not_ended_for_a_save_before_the_newest() -> None:
    """What came after it would be lost, though it may be mended."""
    own = JobLineage(_id(2), frozenset("a"), frozenset())
    first = JobLineage(None, frozenset("a"), frozenset())
    assert sure_save(Past().store, DEMO, PLAIN, first) is None
    past = Past("1", "2<1", "b4<1")
    found = sure_save(past.store, DEMO, PLAIN, own)
    assert found is not None and found.snapshot == _id(2)
    past.take("!3<2x")
    with pytest.raises(SnapshotDamaged, match=str(_id(3))):
        sure_save(past.store, DEMO, PLAIN, own)
    past.store.delete([manifest_key(DEMO, _id(2))])
    with pytest.raises(SnapshotMissing, match=f"{_id(2)}.*was not ended"):
        sure_save(past.store, DEMO, PLAIN, own)


@pytest.mark.rule(12)
@pytest.mark.parametrize(
    ("steps", "mine", "others"),
    [
        (["1", "2<1", "3<2"], 3, []),
        (["1", "2<1", "3<2"], 2, [3]),
        (["1", "2<1", "3=1"], 3, [2]),
        (["1", "2<1", "3=1"], 2, []),
        (["1", "2<1", "3<1", "4<2", "5<3"], 5, [4]),  # in turn: the end of the other line
        (["1", "2<1", "3<1", "4<2", "5<3"], 4, [5]),
        (["1", "2<1", "3<1", "4<1"], 4, [3, 2]),
        (["1", "2=1", "3=1", "4=1"], 2, []),  # replicas that nobody has used
        (["1", "2"], 2, [1]),  # a machine that remembers nothing
        (["1", "2<1", "3<1"], 1, [3, 2]),  # what is synced back
        (["1", "~2<1", "b~3<1"], 3, [2]),
        (["1?", "2?", "3<2", "b~4<2"], 3, [4]),
    ],
)
def test_what_a_snapshot_lacks_is_the_end_of_each_other_line(
    steps: list[str], mine: int, others: list[int]
) -> None:
    past = Past(*steps)
    found = lacking(past.store, DEMO, PLAIN, past.lines[mine])
    assert [_number(one.snapshot) for one in found] == others


def test_it_is_read_from_receipts_and_pins_put_a_line_aside() -> None:
    past = Past("1", "2<1", "3<1", "4<3")
    store, mine = past.store, past.lines[4]
    (other,) = lacking(store, DEMO, PLAIN, mine)
    assert (other.snapshot, other.machine, other.verified) == (_id(2), "a", True)
    assert named([other]) == f"{_id(2)} of machine a (1970-01-01 00:00 UTC)"
    assert lacking(store, DEMO, PLAIN, mine, since=_id(3)) == []  # an older matter
    store.delete([manifest_key(DEMO, _id(1))])  # a deleted parent breaks no line
    assert lacking(store, DEMO, PLAIN, mine) == [other]
    pin(store, DEMO, _id(2), "as it was in the paper")
    assert lacking(store, DEMO, PLAIN, mine) == []


def test_at_most_three_are_named_and_who_was_never_verified() -> None:
    tips = [
        StoredState(_id(at), 0.0, Lineage(_id(at), _id(at)), "", f"m{at}") for at in (5, 4, 3, 2)
    ]
    unsure = tips[0]._replace(verified=False)
    words = named([unsure, *tips[1:]])
    assert words.startswith(f"{_id(5)} of machine m5 (1970-01-01 00:00 UTC, never verified), ")
    assert words.endswith(" and 1 more") and str(_id(2)) not in words


def test_a_listing_says_where_else_the_work_of_a_snapshot_is() -> None:
    past = Past("1", "2<1", "3<1", "4<3", "5=4")
    found = also_in(dict(verified_snapshots(past.store, DEMO)))
    assert found == {_id(1): _id(5), _id(2): None, _id(3): _id(5), _id(4): _id(5), _id(5): _id(4)}


@pytest.mark.rule(11)
@pytest.mark.parametrize(
    ("steps", "kept"),
    [
        (["1", "2<1", "3<2"], [3]),
        (["1", "2<1", "3<1"], [2, 3]),
        (["1", "2<1", "3<1", "4<2", "5<4"], [3, 5]),
        (["1", "2=1", "3=1"], [3]),
        (["1", "2<1", "3=1", "4<2"], [4]),
        (["1", "2", "3?"], [1, 2, 3]),  # what says nothing supersedes nothing
        (["1", "2?", "3<2"], [1, 3]),
    ],
)
def test_retention_deletes_no_work_that_no_other_snapshot_has(
    steps: list[str], kept: list[int]
) -> None:
    """Long after the machine of the other line has ended, too."""
    taken = [
        Taken(line.snapshot, made_at(line.snapshot).timestamp() + 1e8 * number, True,
              f"a{number}", lineage=line)
        for number, line in Past(*steps).lines.items()
    ]  # fmt: skip
    verdicts = judge(taken, Retention(last=1), {})
    assert sorted(verdict.snapshot for verdict in verdicts if verdict.kept) == [*map(_id, kept)]


def _stays(line: list[Lineage], retention: Retention) -> list[SnapshotId]:
    """What stays of these snapshots of one machine, though no rule keeps it."""
    taken = [
        Taken(one.snapshot, made_at(one.snapshot).timestamp(), True, "a", lineage=one)
        for one in line
    ]
    alone = "no other snapshot has its work"
    return [one.snapshot for one in judge(taken, retention, {}) if one.reasons == [alone]]


@pytest.mark.rule(11)
def test_a_line_of_a_thousand_snapshots_is_thinned_and_another_machines_tip_stays() -> None:
    """Far beyond what one lineage names."""
    first, line = datetime(2023, 1, 1, tzinfo=timezone.utc), list[Lineage]()
    for day in range(1000):
        name = new_snapshot_id(first + timedelta(days=day))
        line.append(Lineage.after(line[-1] if line else None, name, equal=False))
    assert not line[-1].whole
    retention = Retention(daily=7, weekly=5, monthly=12)
    assert _stays(line, retention) == []
    other = new_snapshot_id(first + timedelta(days=500, hours=1))
    assert _stays([*line, Lineage.after(line[499], other, equal=False)], retention) == [other]


@pytest.mark.rule(11)
def test_a_line_of_which_most_was_deleted_is_thinned_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is kept of it lies further apart than one lineage reaches: the receipts tell more."""
    for module in (lineage, receipts):
        monkeypatch.setattr(module, "MOST_ANCESTORS", 20)
    store, first = (
        MemoryStore(itertools.count(1.0).__next__),
        datetime(2023, 1, 1, tzinfo=timezone.utc),
    )
    retention, line = Retention(last=2, weekly=3), None
    for number in range(6 * 7 * 6):  # six a day, for six weeks
        name = new_snapshot_id(first + timedelta(hours=4 * number))
        line = Lineage.after(line, name, equal=False)
        manifest = honest(snapshot=name, entries=[entry(DIRECTORY, b"")], chunks=[], packs=[],
                          environment=line.record())  # fmt: skip
        store.put(manifest_key(DEMO, name), encode_manifest(manifest, PLAIN)[0])
        verified = verified_save(store, name)
        if number % 6 == 0:
            taken = list(taken_snapshots(store, DEMO, PLAIN, ["~/workspace"]))
            unruled = [one.snapshot for one in judge(taken, retention, {}) if not one.kept]
            Succession.of(store, verified, PLAIN).end(unruled, "no rule keeps it")
            assert len(snapshot_ids(store, DEMO)) <= 6
    before = dict(verified_snapshots(store, DEMO))
    assert any(receipt.older for receipt in before.values())
    for snapshot in before:
        verified_save(store, snapshot)  # once more, where most that it names is gone
    assert dict(verified_snapshots(store, DEMO)) == before
