"""docs/contributing/agent-protocol.md names every operation and its fields as the types do."""

from __future__ import annotations

import re
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
import pytest

from torpor.shared.wire import (
    activity,
    autosave,
    job,
    losses,
    machine,
    protocol,
    restore,
    snapshot,
    sync,
)
from torpor.shared.wire.request import Event, Request

PAGE = Path(__file__).resolve().parents[3] / "docs" / "contributing" / "agent-protocol.md"
REQUESTS: list[type[Request[Any]]] = [
    kind
    for module in (snapshot, losses, restore, sync, job, autosave, machine, activity)
    for kind in vars(module).values()
    if isinstance(kind, type)
    and issubclass(kind, Request)
    and kind.op
    and kind.__module__ == module.__name__
]


def fields_of(kind: type[msgspec.Struct]) -> str:
    """The fields as the document writes them: text without a type, ``?`` may be null or absent."""
    shown = []
    for field in msgspec.structs.fields(kind):
        name = field.encode_name if field.required else f"{field.encode_name}?"
        spelled = _spelled(field.type)
        bare = spelled in ("str", field.encode_name)
        shown.append(name if bare else f"{name}: {spelled}")
    return ", ".join(shown)


def documented() -> dict[str, tuple[str, str]]:
    """Each operation's arguments and answer, as the blocks of the document have them."""
    found: dict[str, tuple[str, str]] = {}
    for block in re.findall(r"```text\n(.*?)```", PAGE.read_text(), re.S):
        for entry in re.split(r"\n(?=\S)", block.strip()):
            op, _, rest = " ".join(entry.split()).partition(" ")
            args, _, answer = rest.partition("->")
            assert op not in found, f"{op} is there twice"
            found[op] = (args.strip(), answer.strip())
    return found


def test_the_document_has_every_operation_and_no_other() -> None:
    assert sorted(documented()) == sorted(kind.op for kind in REQUESTS)


@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.op)
def test_the_document_has_every_field_and_no_other(kind: type[Request[Any]]) -> None:
    answer = kind.answer_type()
    assert issubclass(answer, msgspec.Struct)
    assert documented()[kind.op] == (fields_of(kind), fields_of(answer))


def test_the_document_shows_a_hello_with_its_fields() -> None:
    (line,) = re.findall(r'\{"hello": \{(.*?)\}\}', PAGE.read_text())
    names = re.findall(r'"(\w+)":', line)
    assert names == [field.name for field in msgspec.structs.fields(protocol.Hello)]


def test_an_event_is_as_the_document_has_it() -> None:
    assert f'"event": {{{fields_of(Event)}}}' in PAGE.read_text()


def _spelled(kind: Any) -> str:
    kind = getattr(kind, "__supertype__", kind)  # of a NewType
    origin, of = get_origin(kind), get_args(kind)
    if origin is Annotated:  # with its limits
        return _spelled(of[0])
    if origin in (Union, types.UnionType):
        (kept,) = [each for each in of if each is not type(None)]
        return f"{_spelled(kept)} | null"
    if origin is list:
        inner = _spelled(of[0])
        return f"[{inner}]"
    if origin is dict:
        return "{...}"
    if origin is Literal:
        return "str"
    if issubclass(kind, msgspec.Struct):
        if kind.__struct_config__.array_like:
            return "[" + ", ".join(field.name for field in msgspec.structs.fields(kind)) + "]"
        if kind.__name__ == "Grant":
            return "grant"
        return "{" + fields_of(kind) + "}"
    return str(kind.__name__)
