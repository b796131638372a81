"""Draws which rooms import which, from the imports themselves, for docs/contributing/map.md:
`python docs/pictures/rooms.py` writes the pictures into it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "contributing" / "map.md"
_FLOORS: Final = ("shared", "machine", "control")
_PACKAGES: Final = ("torpor_cli", "deployments", "flows", "tasks", "blocks", "gpu_kernels")

Graph = dict[str, set[str]]
"""The names that each name imports."""


def page(text: str) -> str:
    """The page with its pictures drawn anew, each between its two comments."""
    for name, graph in pictures().items():
        drawn = f"<!-- {name} -->\n```mermaid\n{_mermaid(graph)}```\n<!-- end -->"
        text, count = re.subn(rf"<!-- {name} -->\n.*?<!-- end -->", drawn, text, flags=re.DOTALL)
        if count != 1:
            raise SystemExit(f"{PAGE} has no place for the picture {name}")
    return text


def pictures() -> dict[str, Graph]:
    """What imports what: the packages with the floors of torpor, and the rooms of two floors."""
    found: dict[str, Graph] = {"house": {}, "machine": {}, "control": {}}
    for path in _modules():
        mine = _names(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for imported in _imports(path):
            theirs = _names(imported)
            for picture in mine.keys() & theirs.keys():
                graph = found[picture]
                graph.setdefault(theirs[picture], set())
                graph.setdefault(mine[picture], set())
                if mine[picture] != theirs[picture]:
                    graph[mine[picture]].add(theirs[picture])
    return {name: _reduced(graph) for name, graph in found.items()}


def _modules() -> Iterator[Path]:
    for top in ("torpor", *_PACKAGES):
        yield from sorted((ROOT / top).rglob("*.py"))


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _names(module: str) -> dict[str, str]:
    """What stands for a module in each picture that shows it."""
    package, _, rest = module.partition(".")
    floor, _, rest = rest.partition(".")
    room = rest.partition(".")[0]
    if package in _PACKAGES:
        return {"house": package}
    if package != "torpor" or floor not in _FLOORS:
        return {}
    return {"house": f"torpor/{floor}", **({floor: room} if room and floor != "shared" else {})}


def _reduced(graph: Mapping[str, Set[str]]) -> Graph:
    """Without the imports that a longer way implies; the picture has no circle."""
    return {
        name: {
            one for one in below if not any(one in _below(graph, other) for other in below - {one})
        }
        for name, below in graph.items()
    }


def _below(graph: Mapping[str, Set[str]], name: str) -> set[str]:
    found: set[str] = set()
    pending = [*graph.get(name, ())]
    while pending:
        one = pending.pop()
        if one not in found:
            found.add(one)
            pending += graph.get(one, ())
    return found


def _mermaid(graph: Graph) -> str:
    lines = ["flowchart TD"]
    for name in sorted(graph):
        lines += [f"    {name} --> {one}" for one in sorted(graph[name])]
        if not graph[name] and not any(name in below for below in graph.values()):
            lines.append(f"    {name}")
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
