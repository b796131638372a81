"""The tree of errors is the one drawn, and crosses the wire whole."""

from __future__ import annotations

import copy
import json
import pickle
import re

import pytest

from torpor.shared import errors
from torpor.shared.errors import MachineError, TorporError, from_wire


def _tree(cls: type[TorporError]) -> list[type[TorporError]]:
    return [cls, *(below for sub in cls.__subclasses__() for below in _tree(sub))]


TREE = [cls for cls in _tree(TorporError) if cls.__module__ == "torpor.shared.errors"]
_LINE = re.compile(
    r"^ {4}(?P<depth>[\u2502\u251c\u2514\u2500 ]*)(?P<name>[A-Z]\w+)(?P<star> *\* )?"
)


def _drawn() -> dict[str, tuple[str | None, bool]]:
    """Name to parent and star, as the docstring draws them."""
    above: list[str] = []
    drawn: dict[str, tuple[str | None, bool]] = {}
    for line in (errors.__doc__ or "").splitlines():
        if not (found := _LINE.match(line)) or (drawn and not found["depth"]):
            continue
        depth = len(found["depth"]) // 4
        above[depth:] = [found["name"]]
        parent = above[depth - 1] if depth else None
        drawn[found["name"]] = (parent, bool(found["star"]))
    return drawn


def test_the_tree_is_the_one_drawn() -> None:
    actual = {
        cls.__name__: (None if cls is TorporError else cls.__bases__[0].__name__, cls.retryable)
        for cls in TREE
    }
    assert _drawn() == actual


def test_nothing_else_in_the_module_is_an_error() -> None:
    public = {value for name, value in vars(errors).items() if isinstance(value, type)}
    assert {cls for cls in public if issubclass(cls, BaseException)} == set(TREE)


OF_AN_AGENT = [
    cls
    for cls in TREE
    if issubclass(cls, (errors.MachineError, errors.SnapshotError, errors.StoreError))
    or cls in (errors.InvalidInput, errors.WorkspaceInvalid, errors.RunCancelled)
]


@pytest.mark.parametrize("cls", OF_AN_AGENT, ids=lambda cls: cls.__name__)
def test_every_error_of_an_agent_crosses_the_wire(cls: type[TorporError]) -> None:
    sent = cls("what happened, to what, and what to do").to_wire()
    assert sent == {"type": cls.__name__, "message": "what happened, to what, and what to do"}
    back = from_wire(sent)
    assert type(back) is cls
    assert str(back) == "what happened, to what, and what to do"


@pytest.mark.rule("H6")
@pytest.mark.parametrize(
    "wire",
    [
        {},
        {"type": "ValueError", "message": "x"},
        {"type": "object"},
        *({"type": cls.__name__, "message": "x"} for cls in TREE if cls not in OF_AN_AGENT),
    ],
)
def test_an_error_that_no_agent_raises_is_the_machine_s(wire: dict[str, str]) -> None:
    """WorkspaceAsleep, for example, says that the machine was destroyed with all of it stored."""
    back = from_wire(wire)
    assert type(back) is MachineError
    assert not back.retryable
    assert str(back) == wire.get("message", "no message")


def test_a_message_with_a_file_name_that_is_no_text_fits_into_a_record() -> None:
    """Before, the end of such a job could not be written: its run died with UnicodeEncodeError."""
    name = b"caf\xe9\x1b[2J".decode(errors="surrogateescape")
    error = errors.SnapshotDamaged(f"{name} differs")
    assert json.loads(json.dumps(str(error), ensure_ascii=False).encode()) == (
        "caf\\udce9\\x1b[2J differs"
    )


def test_a_message_that_is_made_of_another_error_is_plain_and_stays_so() -> None:
    error = MachineError(ValueError("x\x1b[2J"), 7, 0.5)
    assert error.args == ("x\\x1b[2J", 7, 0.5)
    error.__dict__["note"] = "kept"
    pickled = pickle.loads(pickle.dumps(error))  # noqa: S301 - what was just written here
    for again in (copy.deepcopy(error), pickled):
        assert (type(again), again.args, vars(again)) == (MachineError, error.args, vars(error))
