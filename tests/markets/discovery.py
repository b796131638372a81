"""Google's own description of Compute Engine, against what is asked of a fake and what it answers.

The document comes with google-api-python-client, which ``make oracles`` installs. It is not ours to
ship.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.markets.server import Answer, Request

_DOCUMENT: Final = "googleapiclient/discovery_cache/documents/compute.v1.json"
_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,),
}  # fmt: skip


@dataclass
class Discovery:
    """``violations``: what Google's document does not have. ``asked``: the methods that were."""

    document: dict[str, Any]
    violations: list[str] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)

    @classmethod
    def installed(cls, venv: Path) -> Discovery:
        (found,) = venv.glob(f"lib/python*/site-packages/{_DOCUMENT}")
        return cls(json.loads(found.read_text()))

    def judge(self, request: Request, answer: Answer | None) -> None:
        """Method, path, parameters and body of the request, and the body of an answer that is no
        error."""
        path = request.path.removeprefix(f"/{self.document['servicePath']}")
        method = self._method(request.method, path)
        if method is None:
            self.violations.append(f"no method {request.method} {request.path}")
            return
        name = method["id"]
        self.asked.add(name)
        known = {*method["parameters"], *self.document["parameters"]}
        self.violations += [f"{name}: no parameter {key}" for key in {*request.query} - known]
        if "request" in method:
            self._check(request.body, method["request"]["$ref"], name)
        elif request.body is not None:
            self.violations.append(f"{name}: takes no body")
        if answer is not None and answer.status == 200:
            self._check(answer.body, method["response"]["$ref"], f"answer of {name}")

    def _method(self, verb: str, path: str) -> dict[str, Any] | None:
        """The one with the fewest parameters in its path: a family is not an image's name."""
        fitting = [
            method
            for resource in self.document["resources"].values()
            for method in resource.get("methods", {}).values()
            if method["httpMethod"] == verb
            and re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", method["path"]), path)
        ]
        return min(fitting, key=lambda method: method["path"].count("{"), default=None)

    def _check(self, value: Any, schema: str, where: str) -> None:
        self._fits(value, {"$ref": schema}, where)

    def _fits(self, value: Any, kind: dict[str, Any], where: str) -> None:
        if reference := kind.get("$ref"):
            kind = self.document["schemas"][reference]
        name = kind["type"]
        if name == "any":
            return
        if name == "array":
            if not isinstance(value, list):
                self.violations.append(f"{where}: {value!r} is no array")
                return
            for item in value:
                self._fits(item, kind["items"], f"{where}[]")
        elif name == "object":
            self._fits_object(value, kind, where)
        elif type(value) not in _TYPES[name]:
            self.violations.append(f"{where}: {value!r} is no {name}")
        elif "enum" in kind and value not in kind["enum"]:
            self.violations.append(f"{where}: {value!r} is none of {kind['enum']}")
        elif "pattern" in kind and not re.fullmatch(kind["pattern"], value):
            self.violations.append(f"{where}: {value!r} does not match {kind['pattern']}")

    def _fits_object(self, value: Any, kind: dict[str, Any], where: str) -> None:
        if not isinstance(value, dict):
            self.violations.append(f"{where}: {value!r} is no object")
            return
        known, other = kind.get("properties", {}), kind.get("additionalProperties")
        for key, item in value.items():
            if key not in known and other is None:
                self.violations.append(f"{where}: no property {key}")
            else:
                self._fits(item, known.get(key, other), f"{where}.{key}")
