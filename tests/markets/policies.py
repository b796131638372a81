"""What a key may do at a market, by the file that the market's page gives a user, as the market
decides it: a fake refuses what the file does not allow, and notes which rights were needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import yaml

PAGES: Final = Path(__file__).resolve().parents[2] / "docs/guide/markets"
FILES: Final = PAGES / "policies"


@dataclass(frozen=True)
class Need:
    """What one request needs. ``resource``: what it is about, as the market writes that;
    ``facts``: what conditions may ask."""

    permission: str
    resource: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.permission} on {self.resource}" if self.resource else self.permission


@dataclass(frozen=True)
class Right:
    """One permission of a policy; ``allows`` says of which needs it is."""

    name: str
    allows: Callable[[Need], bool]


class Policy:
    """``lacks``: what was asked for and is not allowed."""

    def __init__(self, rights: Sequence[Right]) -> None:
        self.rights = list(rights)
        self.lacks: list[str] = []
        self._needed: set[str] = set()

    def grant(self, rights: Sequence[Right]) -> None:
        """Instead of those of the same names."""
        new = {right.name for right in rights}
        self.rights = [right for right in self.rights if right.name not in new] + [*rights]

    def has(self, need: Need) -> bool:
        return any(right.allows(need) for right in self.rights)

    def permits(self, need: Need) -> bool:
        """As ``has``, and notes it. Of two rights that allow the same, the second is not needed."""
        for right in self.rights:
            if right.allows(need):
                self._needed.add(right.name)
                return True
        self.lacks.append(str(need))
        return False

    def unneeded(self) -> list[str]:
        """The rights that nothing has needed yet."""
        return [right.name for right in self.rights if right.name not in self._needed]


# -- AWS


def iam_rights(name: str) -> list[Right]:
    """Of an IAM policy: a right for each action of a statement at each of its resources."""
    return [
        Right(f"{stated['Sid']}: {action} on {place}", _iam_right(action, place, stated))
        for stated in json.loads((FILES / name).read_text())["Statement"]
        for action in _listed(stated["Action"])
        for place in _listed(stated["Resource"])
        if stated["Effect"] == "Allow"
    ]


def _iam_right(action: str, place: str, stated: dict[str, Any]) -> Callable[[Need], bool]:
    conditions = stated.get("Condition", {})
    return lambda need: (
        need.permission == action
        and fnmatchcase(need.resource, place)
        and all(
            _IAM[operator](need.facts, key, _listed(values))
            for operator, asked in conditions.items()
            for key, values in asked.items()
        )
    )


_IAM: Final[dict[str, Callable[[Mapping[str, Any], str, list[str]], bool]]] = {
    "StringEquals": lambda facts, key, values: facts.get(key) in values,
    "Null": lambda facts, key, values: values == [str(key not in facts).lower()],
    "ForAllValues:StringEquals": lambda facts, key, values: {*facts.get(key, ())} <= {*values},
}


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


# -- Google Cloud


def google_rights(name: str, condition: str = "") -> list[Right]:
    """Of a role that is bound under a condition. A need's ``resource`` is TYPE and NAME."""
    meets = _google_condition(condition) if condition else lambda need: True
    return [
        Right(permission, lambda need, own=permission: need.permission == own and meets(need))
        for permission in yaml.safe_load((FILES / name).read_text())["includedPermissions"]
    ]


_COMPARED: Final = re.compile(r'resource\.type != "([^"]+)"')
_EXTRACTED: Final = re.compile(
    r'resource\.name\.extract\("([^"{]+)\{\w+\}"\)\.startsWith\("([^"]+)"\)'
)


def _google_condition(name: str) -> Callable[[Need], bool]:
    """As far as our condition needs CEL: clauses with ``||``, all of which must hold."""
    text = yaml.safe_load((FILES / name).read_text())["expression"]
    clauses = [clause[1:-1].split(" || ") for clause in text.split(" && ")]
    return lambda need: all(any(_holds(part, need) for part in clause) for clause in clauses)


def _holds(part: str, need: Need) -> bool:
    kind, _, name = need.resource.partition(" ")
    if compared := _COMPARED.fullmatch(part):
        return kind != compared[1]
    extracted = _EXTRACTED.fullmatch(part)
    assert extracted is not None, part
    return name.partition(extracted[1])[2].startswith(extracted[2])


# -- Azure


def azure_rights(name: str) -> list[Right]:
    """Of a role. Azure compares actions without case, and * stands for any text."""
    told = json.loads((FILES / name).read_text())
    assert told["NotActions"] == []
    return [
        Right(
            action,
            lambda need, own=action: fnmatchcase(need.permission.lower(), own.lower()),
        )
        for action in told["Actions"]
    ]


# -- Kubernetes


def kubernetes_rights() -> list[Right]:
    """Of the Role and the ClusterRole in the page. A need's permission is VERB RESOURCE.GROUP, its
    resource the namespace."""
    found = re.search(r"```yaml\n(apiVersion: rbac.*?)```", _page("kubernetes"), re.DOTALL)
    assert found is not None
    return [
        Right(
            permission,
            lambda need, own=permission, cluster=not space: (
                need.permission == own and (cluster or bool(need.resource))
            ),
        )
        for role in yaml.safe_load_all(found[1])
        for space in [role["metadata"].get("namespace", "")]
        for rule in role["rules"]
        for permission in (
            f"{verb} {resource}.{group}".rstrip(".")
            for verb in rule["verbs"]
            for resource in rule["resources"]
            for group in rule["apiGroups"]
        )
    ]


def _page(name: str) -> str:
    return (PAGES / f"{name}.md").read_text()


# -- Vast.ai


def vast_rights(name: str) -> list[Right]:
    """Of a key's permissions: categories of requests."""
    return [
        Right(category, lambda need, own=category: need.permission == own)
        for category in json.loads((FILES / name).read_text())["api"]
    ]
