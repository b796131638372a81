"""``python -m tests.rules 13``: a safety rule, the files that enforce it and the tests that are
marked with it (``@pytest.mark.rule(13)``). Without a number: one line for each rule."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROJECT: Final = Path(__file__).resolve().parents[1]
RULES: Final = PROJECT / "docs" / "contributing" / "safety.md"
HOSTILE: Final = PROJECT / "docs" / "contributing" / "hostile.md"
_TITLE_LENGTH: Final = 72


@dataclass(frozen=True)
class Rule:
    number: str
    """``13`` in safety.md, ``H4`` in hostile.md."""
    title: str
    page: Path
    enforced: tuple[tuple[str, tuple[str, ...]], ...]
    """Each file or folder, with the functions and classes that are named in brackets behind it."""


@dataclass(frozen=True)
class Marked:
    test: str
    """As pytest names it: the file, the class if there is one, the function. A file alone marks all
    of its tests."""
    numbers: tuple[str, ...]


def rules() -> list[Rule]:
    """The rules of both pages, in their order."""
    found = []
    for section in re.split(r"^## (?=\d+\. )", RULES.read_text(), flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        number, _, title = heading.partition(". ")
        found.append(Rule(number, title, RULES, _enforced(text)))
    rows = re.findall(r"^\| (H\d+) \| (.+?) \| (.+) \|$", HOSTILE.read_text(), re.MULTILINE)
    return found + [
        Rule(number, title, HOSTILE, _enforced(f"* enforced: {files}"))
        for number, title, files in rows
    ]


def marked() -> list[Marked]:
    """Every test, or file of tests, with the numbers in its marks."""
    return [
        one
        for path in sorted((PROJECT / "tests").rglob("*.py"))
        if "pytest.mark.rule(" in (text := path.read_text())
        for one in _marked(path.relative_to(PROJECT).as_posix(), ast.parse(text))
    ]


def described(number: str) -> str:
    """What the command prints of one rule."""
    (rule,) = (one for one in rules() if one.number == number)
    files = [f"{path} ({', '.join(names)})" if names else path for path, names in rule.enforced]
    tests = [one.test for one in marked() if number in one.numbers]
    return "\n".join(
        [
            f"{rule.number}. {rule.title} ({rule.page.relative_to(PROJECT)})",
            "enforced by",
            *(f"  {one}" for one in files),
            "tests",
            *(f"  {one}" for one in tests),
        ]
    )


def listed() -> str:
    """One line for each rule."""
    counts = [number for one in marked() for number in one.numbers]
    lines = [f"{'rule':<5} {'title':<{_TITLE_LENGTH}} {'files':>5} {'tests':>5}"]
    for rule in rules():
        title = rule.title[:_TITLE_LENGTH]
        files, tests = len(rule.enforced), counts.count(rule.number)
        lines.append(f"{rule.number:<5} {title:<{_TITLE_LENGTH}} {files:>5} {tests:>5}")
    return "\n".join(lines)


def _enforced(text: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    found: list[tuple[str, list[str]]] = []
    for item in re.findall(r"^\* enforced: (.+?)(?=^\* |^$|\Z)", text, re.MULTILINE | re.DOTALL):
        for name in re.findall(r"`([^`]+)`", item):
            if "/" in name:
                found.append((name, []))
            else:
                found[-1][1].append(name)
    return tuple((path, tuple(names)) for path, names in found)


def _marked(path: str, tree: ast.Module) -> Iterator[Marked]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            yield from _with(path, ast.walk(node.value))
        elif isinstance(node, ast.FunctionDef):
            yield from _with(f"{path}::{node.name}", node.decorator_list)
        elif isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    yield from _with(f"{path}::{node.name}::{method.name}", method.decorator_list)


def _with(test: str, nodes: Iterator[ast.AST] | Sequence[ast.AST]) -> Iterator[Marked]:
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.rule":
            yield Marked(test, tuple(str(ast.literal_eval(one)) for one in node.args))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.rules", description=__doc__)
    known = [rule.number for rule in rules()]
    parser.add_argument("numbers", nargs="*", metavar="NUMBER", help="such as 13, or H4")
    numbers = parser.parse_args().numbers
    if unknown := [one for one in numbers if one not in known]:
        parser.error(f"no rule {', '.join(unknown)}; the rules are {', '.join(known)}")
    print("\n\n".join(map(described, numbers)) if numbers else listed())


if __name__ == "__main__":
    main()
