"""Write the tables of docs/guide/settings.md: every field of every block, every parameter of every
deployment.

    python -m deployments.settings_page

Run it after a change of a block or a flow; a test compares the page with the code.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal, NamedTuple, get_args, get_origin, get_type_hints

import yaml
from prefect import Flow
from prefect.blocks.core import Block
from prefect.types import SecretDict
from pydantic import SecretStr

import blocks
from blocks.markets import KeyedProvider
from deployments.installation import CHECKOUT

PAGE: Final = CHECKOUT / "docs" / "guide" / "settings.md"
_BEGIN, _END = "<!-- written by deployments.settings_page -->", "<!-- end -->"
_UNITS: Final = {
    "gib": "GiB", "mib": "MiB", "kib_s": "KiB/s", "usd_h": "$/h", "usd_month": "$ a month",
    "usd_gib_month": "$ a GiB and month", "gb_month_usd": "$ a GB and month",
    "egress_gb_usd": "$ a GB", "minutes": "min", "hours": "h", "h": "h", "s": "s", "percent": "%",
    "days": "days",
}  # fmt: skip
_KEPT: Final = ("Empty", "None", "Off", "0", "May ", "Without ", "Never ")
"""How sentences begin that say what a value means; of others, the table has the first one."""
_SAME: Final = {
    "workspace": "A Workspace block, or its name.",
    "accept_paths": "Directories of the snapshot to accept that the workspace's paths do not name.",
}
"""What flows say in words of their own."""


class Row(NamedTuple):
    """One setting."""

    name: str
    unit: str
    default: str
    line: str

    def __str__(self) -> str:
        return f"| `{self.name}` | {self.unit} | {self.default} | {self.line} |\n"


def main() -> None:
    page = PAGE.read_text()
    PAGE.write_text(with_tables(page))
    print(f"{PAGE}: {'unchanged' if PAGE.read_text() == page else 'written'}")


def with_tables(page: str) -> str:
    """The page with the tables as they are now."""
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{PAGE} lacks the lines {_BEGIN} and {_END}")
    return f"{before}{_BEGIN}\n\n{tables()}\n{_END}{after}"


def tables() -> str:
    """All tables with their headings, in Markdown."""
    several, own = parameters()
    return "\n".join(
        [
            "## Blocks\n",
            *(_table(title, rows) for title, rows in blocks_by_title().items()),
            "## Deployments\n",
            _shared(several),
            *(_table(title, rows) for title, rows in own.items() if rows),
        ]
    )


def blocks_by_title() -> dict[str, list[Row]]:
    """The fields of each block. What all markets with an API key ask for stands once."""
    keyed, found, key = [], {}, []
    for name in blocks.__all__:
        kind: type[Block] = getattr(blocks, name)
        if issubclass(kind, KeyedProvider):
            keyed.append(kind.get_block_type_name().removesuffix(" Provider"))
            rows = list(_fields(kind))
            key = [row for row in rows if row.name in KeyedProvider.model_fields]
            if own := [row for row in rows if row not in key]:
                found[f"{kind.get_block_type_name()}, besides"] = own
        else:
            found[kind.get_block_type_name()] = list(_fields(kind))
    replaced = {"api_key": "The account's API key.", "url": "The address of the market's API."}
    found[f"{', '.join(keyed)} Provider"] = [
        row._replace(line=replaced.get(row.name, row.line)) for row in key
    ]
    return found


def parameters() -> tuple[dict[Row, list[str]], dict[str, list[Row]]]:
    """The parameters that several flows have, with their deployments; and those of one flow only,
    by its deployments."""
    flows: dict[str, list[dict[str, Any]]] = {}
    for deployment in yaml.safe_load((CHECKOUT / "prefect.yaml").read_text())["deployments"]:
        flows.setdefault(deployment["entrypoint"], []).append(deployment)
    rows: dict[str, list[Row]] = {}
    for entrypoint, deployments in flows.items():
        flow = _flow(entrypoint)
        names = [deployment["name"] for deployment in deployments]
        title = ", ".join(
            f"`{name if flow.name in name else f'{flow.name}/{name}'}`" for name in names
        )
        rows[title] = list(_parameters(flow.fn, deployments))
    of: dict[Row, list[str]] = {}
    for title, its in rows.items():
        for row in its:
            of.setdefault(row, []).append(title)
    several = {row: titles for row, titles in of.items() if len(titles) > 1}
    own = {title: [row for row in its if row not in several] for title, its in rows.items()}
    return several, own


def _shared(several: dict[Row, list[str]]) -> str:
    lines = ["| name | unit | default | what | of |\n| --- | --- | --- | --- | --- |\n"]
    for row, titles in several.items():
        lines.append(f"{str(row).rstrip()} {', '.join(titles)} |\n")
    return f"### Of several deployments\n\n{''.join(lines)}"


def _table(title: str, rows: list[Row]) -> str:
    head = "| name | unit | default | what |\n| --- | --- | --- | --- |\n"
    return f"### {title}\n\n{head}{''.join(str(row) for row in rows)}"


def _fields(kind: type[Block]) -> Iterator[Row]:
    said = _arguments(kind.__doc__)
    for name, field in kind.model_fields.items():
        required = field.is_required()
        default = None if required else field.get_default(call_default_factory=True)
        line = _line(said.get(name, field.description or ""))
        meaning = [words for words in _sentences(field.description or "")[1:] if _means(words)]
        if name in said and not any(_means(words) for words in _sentences(line)[1:]):
            line = " ".join([line, *meaning])
        shown = "required" if required else _shown(default, _choices(field.annotation))
        yield Row(name, _unit(name), "the market's" if name == "url" else shown, line)


def _parameters(flow: Callable[..., Any], deployments: list[dict[str, Any]]) -> Iterator[Row]:
    said, hints = _arguments(flow.__doc__), get_type_hints(flow)
    for name, parameter in inspect.signature(flow).parameters.items():
        required = parameter.default is inspect.Parameter.empty
        default = "required" if required else _shown(parameter.default, _choices(hints[name]))
        given: dict[str, list[str]] = {}
        for deployment in deployments:
            if name in (its := deployment.get("parameters", {})):
                given.setdefault(_shown(its[name], []), []).append(f"`{deployment['name']}`")
        default += "".join(f"; {value} in {' and '.join(of)}" for value, of in given.items())
        yield Row(name, _unit(name), default, _SAME.get(name) or _line(said[name]))


def _flow(entrypoint: str) -> Flow[..., Any]:
    path, name = entrypoint.split(":")
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    flow: Flow[..., Any] = getattr(module, name)
    return flow


def _arguments(doc: str | None) -> dict[str, str]:
    """What a docstring says of each argument."""
    text = inspect.cleandoc(doc or "").partition("Args:\n")[2]
    text = re.split(r"\n(?=\S)", text)[0]
    found = re.findall(r"^    (\w+): (.+(?:\n        .+)*)", text, re.MULTILINE)
    return {name: " ".join(words.split()) for name, words in found}


def _line(text: str) -> str:
    first, *others = _sentences(text)
    return " ".join([first, *(words for words in others if _means(words))])


def _means(words: str) -> bool:
    return words.startswith(_KEPT)


def _sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.])\s+(?=[A-Z0-9])", text.strip())


def _unit(name: str) -> str:
    endings = (unit for end, unit in _UNITS.items() if name == end or name.endswith(f"_{end}"))
    return max(endings, key=len, default="")


def _choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    return []


def _shown(default: Any, choices: list[str]) -> str:
    if isinstance(default, SecretStr | SecretDict):
        default = default.get_secret_value()
    if isinstance(default, bool):
        return "on" if default else "off"
    if default is None or default in ("", [], {}):
        return "none"
    if isinstance(default, list):
        return ", ".join(f"`{item}`" for item in default)
    text = f"{default:g}" if isinstance(default, float) else str(default)
    others = [f"`{choice}`" for choice in choices if choice != default]
    return f"`{text}`" + (f"; or {', '.join(others)}" if others else "")


if __name__ == "__main__":
    main()
