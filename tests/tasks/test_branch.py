"""Which steps a step follows in the graph of a run."""

from __future__ import annotations

from uuid import UUID

from tasks.branch import Branch, branch, current_branch

ONE, TWO, THREE, FOUR = map(UUID, (f"{number:032x}" for number in range(1, 5)))


def _now() -> Branch:
    found = current_branch()
    assert found is not None
    return found


def test_a_step_follows_the_one_before_and_all_that_went_on_together() -> None:
    with branch():
        assert _now().follows(beside=False) == []
        _now().ended(ONE, beside=False)
        assert _now().follows(beside=True) == [ONE]
        _now().ended(TWO, beside=True)
        assert _now().follows(beside=True) == [ONE]
        _now().ended(THREE, beside=True)
        assert _now().follows(beside=False) == [TWO, THREE]
        _now().ended(FOUR, beside=False)
        assert _now().follows(beside=True) == [FOUR]
    assert current_branch() is None


def test_a_branch_begins_where_the_one_around_it_is_and_leaves_it_there() -> None:
    name = ["machine 1"]
    with branch():
        _now().ended(ONE, beside=False)
        with branch(lambda: name[0]):
            name[0] = "m-12"  # once it is rented
            assert _now().name == "m-12"
            assert _now().follows(beside=False) == [ONE]
            _now().ended(TWO, beside=False)
        assert _now().name == ""
        assert _now().follows(beside=False) == [ONE]
