"""Writes docs/api.md from the docstrings of `flows`, and docs/blocks.md from the fields of
`blocks`: `python docs/api.py`."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin

import annotated_types
import griffe
import msgspec
from prefect.blocks.core import Block

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import blocks  # noqa: E402
import flows  # noqa: E402
from torpor.shared import errors  # noqa: E402

API: Final = ROOT / "docs" / "api.md"
BLOCKS: Final = ROOT / "docs" / "blocks.md"
_UNITS: Final = {
    "_usd_h": "USD an hour",
    "_usd_gib_month": "USD for a GiB and month",
    "_gb_month_usd": "USD for a GB and month",
    "_egress_gb_usd": "USD for a GB",
    "usd_month": "USD a month",
    "_usd": "USD",
    "_gib": "GiB",
    "_kib_s": "KiB/s",
    "_percent": "percent",
    "_minutes": "minutes",
    "minutes": "minutes",
    "_min": "minutes",
    "_hours": "hours",
    "hours": "hours",
    "_h": "hours",
    "_days": "days",
    "months": "months",
    "_s": "seconds",
}
"""The unit of a number, by the end of its name; the first that fits."""

_API: Final = """\
# Python

Most of what torpor does for a workspace is a function in `flows`. To hibernate a workspace and
see what was stored:

```python
from flows import hibernate
from torpor.shared.errors import StillChanging

try:
    report = hibernate("mywork")
except StillChanging as error:
    print(error)  # names the files, and the machine that was kept
else:
    print(report.snapshot, report.title())
```

It prints the id of the snapshot, and what became of the workspace:

```
20261130T204228Z-6951b5a4 Workspace mywork hibernated as 20261130T204228Z-6951b5a4
```

A `HibernateReport` has `destroyed`, whether the machine was ended. If the workspace sleeps
already, the report is an `AsleepReport`, which has only `workspace`, `snapshot` and `words`.

**Nobody is asked.** `create`, `wake`, `deploy`, `replicate` and `job` rent at any price within
`max_price_usd_h` of the workspace and its budgets: set `max_price_usd_h`. To wake, run a command
and hibernate, call [`job`](#job): it does all three, also when the command fails.

**In a flow of your own.** The functions that run flows are Prefect flows: called in a function
with `@flow`, they are runs below its run. They are synchronous: from async code, call them in a
thread, as `await asyncio.to_thread(hibernate, "mywork")`.

**Checks.** A wake whose restored bytes differ raises `SnapshotDamaged`, and its machine is
destroyed; `verify` raises the same where the store lacks something. A `hibernate` whose files do
not come to rest raises `StillChanging`, and one that would lose files `UnsavedWork`; both leave
the machine running, at its price. `EndUnproven` means that the snapshot is verified and the
machine may still run: look at the market's console.

A flow runs in your own process, as a run of the Prefect server that [torpor
finds](guide/unattended.md#which-server-is-meant). The functions that begin with `list_` and
`frame` make no run. [Commands, forms and calls](guide/commands.md) has the command for each
function; [blocks](blocks.md) has the settings.

**Workspaces.** `workspace` is a saved Workspace block or its name. An empty text or list means
what the parameter's sentence says.

**Results.** A flow returns a report. Its fields are below; `report.rows()` is the table that the
terminal and the run's page show. Names of fields and parameters end with their unit: `_s` is
seconds, `_usd_h` is USD an hour, `_unix` is seconds since 1970.

**Errors.** Each error is a subclass of `TorporError` in `torpor.shared.errors`, and its message
names the next step. The lists below have the errors that belong to the function. Besides, any
function may raise `StoreError` where the object store does not answer or refuses, `MachineError`
where SSH or the machine fails, `ProviderError` where a market does, `InvalidInput` where a block
is missing, and Prefect's `ParameterTypeError` for a value of the wrong type or out of its range.
[All errors](#errors) are at the end. After an error of the object store, the SSH connection or a
market whose name has a star there, the same call may succeed later.

"""

_BLOCKS: Final = """\
# Blocks

A block holds what you set once: a workspace, a store, the key of a market. To make a workspace,
and change a setting later:

```python
from blocks import Workspace

Workspace(name="mywork", paths=["~/workspace"], gpu="RTX 4090").save("mywork")

block = Workspace.load("mywork")
block.gpu = "L40S"
block.save("mywork", overwrite=True)
```

`torpor edit mywork gpu=L40S` does the same in a terminal, and **Blocks** in the UI has a form for
each. A field that names another block takes its name, `type/name`, or the saved block. Fields
that are **secret** are encrypted in Prefect's database, and shown as asterisks. `BLOCK_NAME` in
the examples is the name under which you saved the block.

"""


def pages() -> dict[Path, str]:
    """Both pages as they must be now."""
    return {API: _api(), BLOCKS: _blocks()}


def _api() -> str:
    names = sorted(flows.__all__)
    index = "".join(f"* [`{name}`](#{name}): {_first(getattr(flows, name))}\n" for name in names)
    entries = "\n".join("\n".join(_function(name)) + "\n" for name in names)
    tree = inspect.cleandoc(errors.__doc__ or "").split("\n\n")[1:3]
    drawn = "```\n" + "\n\n".join(inspect.cleandoc(f"\n{part}") for part in tree) + "\n```\n"
    return f"{_API}{index}\n{entries}\n## Errors\n\n{drawn}"


def _function(name: str) -> Iterator[str]:
    function: Callable[..., object] = getattr(flows, name)
    signature = inspect.signature(getattr(function, "fn", function), eval_str=name != "frame")
    sections = _sections(function)
    first, *more = sections["text"].split("\n\n")
    yield f"## {name}\n\n{_flow(first)}\n\n```\n{_signature(name, signature)}\n```\n"
    for paragraph in more:
        yield f"{_flow(paragraph)}\n"
    said = {one.name: one.description for one in sections["parameters"]}
    if said.keys() != signature.parameters.keys():
        raise SystemExit(f"{name} takes {[*signature.parameters]}, and describes {[*said]}")
    yield "Parameters:\n"
    for parameter in signature.parameters.values():
        bounds = _bounds(parameter)
        about = f" ({bounds})" if bounds else ""
        yield f"* `{parameter.name}`{about}: {_flow(said[parameter.name])}"
    (returned,) = sections["returns"]
    words = ": ".join(filter(None, [returned.annotation, returned.description]))
    yield f"\nReturns: {_flow(words)}"
    reports = [one for one in _options(signature.return_annotation) if _is_report(one)]
    for report in reports:
        fields = ", ".join(f"`{field}`" for field in _fields(report))
        yield f"\n`{report.__name__}` has {fields}."
    if raised := sections.get("raises", []):
        yield "\nRaises:\n"
        for error in raised:
            if not hasattr(errors, str(error.annotation)):
                raise SystemExit(f"{name} raises {error.annotation}, which is no error of torpor")
            yield f"* `{error.annotation}`: {_flow(error.description)}"
    title, _, code = sections["admonition"].description.partition("\n")
    yield f"\nExample. {title}\n\n{code}"


def _blocks() -> str:
    names = sorted(blocks.__all__)
    index = "".join(
        f"* [`{one}`](#{one.lower()}): {_first(getattr(blocks, one))}\n" for one in names
    )
    return f"{_BLOCKS}{index}\n" + "\n".join("\n".join(_block(one)) + "\n" for one in names)


def _block(name: str) -> Iterator[str]:
    block: type[Block] = getattr(blocks, name)
    schema = block.model_json_schema()
    secrets = {field.partition(".")[0] for field in schema["secret_fields"]}
    sections = _sections(block)
    yield f"## {name}\n\n" + "\n\n".join(map(_flow, sections["text"].split("\n\n"))) + "\n"
    yield f"Its type is `{block.get_block_type_slug()}`. Fields:\n"
    for field, about in block.model_fields.items():
        shown = schema["properties"][field]
        facts = [_type(shown), _unit(field), _range(shown)]
        facts.append(
            "required"
            if about.is_required()
            else f"default {_default(about.get_default(call_default_factory=True))}"
        )
        facts.append("**secret**" if field in secrets else "")
        yield f"* `{field}` ({', '.join(filter(None, facts))}): {shown['description']}"
    title, _, code = sections["admonition"].description.partition("\n")
    yield f"\nExample. {title}\n\n{code}"


def _sections(of: object) -> dict[str, Any]:
    """The sections of a docstring, by their kinds."""
    parsed = griffe.Docstring(inspect.getdoc(of) or "").parse(
        "google", returns_named_value=False, returns_multiple_items=False, warnings=False
    )
    return {section.kind.value: section.value for section in parsed}


def _first(of: object) -> str:
    """The first sentence of a docstring."""
    return _flow(_sections(of)["text"].split("\n\n")[0]).split(". ")[0].rstrip(".") + "."


def _flow(text: str) -> str:
    return " ".join(text.split())


def _signature(name: str, signature: inspect.Signature) -> str:
    lines = []
    for parameter in signature.parameters.values():
        line = f"    {parameter.name}: {_name(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            line += f" = {_default(parameter.default).strip('`')}"
        lines.append(f"{line},\n")
    returned = signature.return_annotation
    result = "pandas.DataFrame" if returned is object else _name(returned)
    return f"{name}(\n{''.join(lines)}) -> {result}"


def _name(annotation: Any) -> str:
    """A type as one writes it."""
    if isinstance(annotation, str):
        return annotation
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _name(inner[0])
    if origin is Literal:
        return f"Literal[{', '.join(map(_quoted, inner))}]"
    if isinstance(origin, type) and issubclass(origin, list):
        return f"list[{', '.join(map(_name, inner))}]"
    if inner:
        return " | ".join(map(_name, inner))
    return "None" if annotation is type(None) else str(annotation.__name__)


def _options(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) or (annotation,)


def _is_report(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _fields(report: type[msgspec.Struct]) -> list[str]:
    stored = [field.name for field in msgspec.structs.fields(report)]
    computed = inspect.getmembers(report, lambda member: isinstance(member, property))
    return stored + [name for name, _ in computed if name != "about" and not name.startswith("_")]


def _bounds(parameter: inspect.Parameter) -> str:
    """The unit and the range of a number."""
    if get_origin(parameter.annotation) is not Annotated:
        return _unit(parameter.name) if parameter.annotation is float else ""
    shown: dict[str, Any] = {}
    for rule in parameter.annotation.__metadata__[0].metadata:
        match rule:
            case annotated_types.Ge(ge):
                shown["minimum"] = ge
            case annotated_types.Gt(gt):
                shown["exclusiveMinimum"] = gt
            case annotated_types.Le(le):
                shown["maximum"] = le
    return ", ".join(filter(None, [_unit(parameter.name), _range(shown)]))


def _unit(name: str) -> str:
    return next((unit for end, unit in _UNITS.items() if name.endswith(end)), "")


def _range(shown: dict[str, Any]) -> str:
    shown = next((one for one in shown.get("anyOf", []) if one.get("type") != "null"), shown)
    low, above = shown.get("minimum"), shown.get("exclusiveMinimum")
    high, below = shown.get("maximum"), shown.get("exclusiveMaximum")
    if low is not None and high is not None:
        return f"{_number(low)} to {_number(high)}"
    limits = {"above": above, "at least": low, "at most": high, "below": below}
    known = {word: _number(limit) for word, limit in limits.items() if limit is not None}
    return ", ".join(f"{word} {limit}" for word, limit in known.items())


def _number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


def _type(shown: dict[str, Any]) -> str:
    """The Python type of a field, by its schema."""
    if "anyOf" in shown:
        return " or ".join(map(_type, shown["anyOf"]))
    if "enum" in shown:
        return " or ".join(f"`{_quoted(one)}`" for one in shown["enum"])
    kind = shown.get("type", "")
    if kind == "array":
        return f"`list[{_type(shown['items']).strip('`')}]`"
    names = {"string": "str", "number": "float", "integer": "int", "boolean": "bool"}
    return f"`{(names | {'object': 'dict', 'null': 'None'})[kind]}`"


def _default(value: Any) -> str:
    secret = getattr(value, "get_secret_value", None)
    return f"`{_quoted(secret() if secret else value)}`"


def _quoted(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
