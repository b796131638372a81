"""A short run of the rounds; the long one is ``python -m tests.saves --rounds 200``."""

from __future__ import annotations

import secrets

from tests.saves.__main__ import carry_out
from tests.saves.judge import Judge, is_missed
from torpor.shared.values import SnapshotId


def test_rounds_with_autosaves_and_vanishing_folders_lose_no_work() -> None:
    seed = secrets.randbelow(1 << 32)
    for number in range(5):
        done = carry_out(seed, number)
        assert done.violations == [], f"--seed {seed} --first {number} --rounds 1"
        assert len(done.did) > 10


ONE, TWO, THREE, FOUR = (SnapshotId(f"20261128T08000{n}Z-00000000") for n in range(4))
FULL = {f"build/{n}": b"%d" % n for n in range(30)}
NOTES = {"notes": b"notes"}


def _judge(*saves: tuple[SnapshotId, dict[str, bytes]], verified: bool = False) -> Judge:
    """It knows these saves of machine one, and the first as what machine two goes on from."""
    judge = Judge()
    judge.begin("one")
    for snapshot, tree in saves:
        judge.accept("one", snapshot, tree, verified=verified)
    return judge


def test_the_judge_wants_what_was_saved_last_in_the_wake_or_named() -> None:
    judge = _judge((ONE, NOTES), (TWO, {"notes": b"later"}))
    assert judge.woken({"notes": b"later"}, [], [ONE, TWO]) == []
    (wrong,) = judge.woken(NOTES, [], [ONE, TWO])
    assert "1 files such as notes" in wrong
    assert judge.woken(NOTES, [TWO], [ONE, TWO]) == []
    in_vain, gone = judge.woken(NOTES, [TWO], [ONE])
    assert f"{TWO} is named, and does not exist" in in_vain
    assert "is in no snapshot" in gone


def test_the_judge_takes_the_loss_of_most_files_for_missed_and_of_few_for_deleted() -> None:
    judge = _judge((ONE, {**NOTES, **FULL}), (TWO, NOTES))
    (wrong,) = judge.woken(NOTES, [], [ONE, TWO])
    assert "30 files such as build/0" in wrong
    assert judge.woken(NOTES, [ONE], [ONE, TWO]) == []
    judge.delete(ONE, [TWO])
    assert judge.woken(NOTES, [], [TWO]) == []
    few = {f"src/{n}": b"src %d" % n for n in range(40)}
    assert not is_missed({**few, **FULL}, few)
    assert _judge((ONE, {**few, **FULL}), (TWO, few)).woken(few, [], [TWO]) == []


def test_to_the_judge_new_files_make_up_for_no_missed_one() -> None:
    judge = _judge((ONE, {**NOTES, **FULL}), (TWO, NOTES))
    others = {f"new/{n}": b"new %d" % n for n in range(30)}
    judge.accept("one", THREE, {**NOTES, **others}, verified=True)
    assert "30 files such as build/0" in judge.woken({**NOTES, **others}, [], [ONE, TWO, THREE])[0]
    back = dict([*FULL.items()][:20])
    judge.accept("one", FOUR, {**NOTES, **back}, verified=True)
    assert "10 files such as" in judge.woken({**NOTES, **back}, [], [ONE, FOUR])[0]


def test_the_judge_wants_the_machine_kept_that_misses_most_of_a_verified_snapshot() -> None:
    judge = _judge((ONE, {**NOTES, **FULL}), verified=True)
    judge.accept("one", TWO, NOTES, verified=True)
    (wrong,) = judge.destroyed("one", NOTES)
    assert "was ended and missed 30 files" in wrong
    assert "named by none" in judge.woken(NOTES, [], [ONE, TWO])[0]
    assert judge.woken(NOTES, [ONE], [ONE, TWO]) == []
    assert "is in no snapshot" in judge.woken(NOTES, [], [TWO])[0]


def test_the_judge_knows_what_a_second_machine_goes_on_from() -> None:
    judge = _judge((ONE, NOTES))
    judge.begin("two", ONE)
    judge.accept("two", TWO, {"notes": b"of two"}, verified=True)
    assert judge.woken({"notes": b"of two"}, [], [TWO]) == []
    judge.accept("one", THREE, {"notes": b"of one"}, verified=False)
    (wrong,) = judge.woken({"notes": b"of two"}, [], [TWO, THREE])
    assert "which machine one saved last" in wrong


def test_the_judge_owes_nobody_what_one_machine_has_deleted_and_others_still_hold() -> None:
    judge = _judge((ONE, {**NOTES, "old": b"old"}))
    judge.begin("two", ONE)
    judge.accept("one", TWO, NOTES, verified=True)
    judge.begin("three", ONE)
    judge.accept("three", THREE, {**NOTES, "old": b"old"}, verified=True)
    assert judge.woken(NOTES, [], [ONE, TWO, THREE]) == []
