"""AWS's own model of EC2, as botocore ships it, as the judge of a fake's answers."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any
from xml.etree import ElementTree


@lru_cache(maxsize=100)
def unknown_elements(operation: str, xml: str) -> list[str]:
    """Paths of elements that no answer of ``operation`` has, and of values of another type."""
    root = ElementTree.fromstring(xml)  # noqa: S314 - our own fake's
    shape = _model().operation_model(operation).output_shape
    if _name(root) != f"{operation}Response":
        return [f"{operation}: {_name(root)}"]
    rows = [child for child in root if _name(child) != "requestId"]
    if shape is None:
        return [f"{operation}: {_name(row)}" for row in rows if _name(row) != "return"]
    return [f"{operation}: {path}" for row in rows for path in _unknown(row, shape, "")]


def _unknown(element: ElementTree.Element, parent: Any, path: str) -> list[str]:
    names = {
        member.serialization.get("name", name): member for name, member in parent.members.items()
    }
    path = f"{path}/{_name(element)}"
    shape = names.get(_name(element))
    return [path] if shape is None else _misfits(element, shape, path)


def _misfits(element: ElementTree.Element, shape: Any, path: str) -> list[str]:
    if shape.type_name == "structure":
        return [fault for child in element for fault in _unknown(child, shape, path)]
    if shape.type_name == "list":
        wrong = [f"{path}/{_name(child)}" for child in element if _name(child) != "item"]
        return wrong + [f for child in element for f in _misfits(child, shape.member, path)]
    text = element.text or ""
    if len(element) or (shape.type_name == "integer" and text and not text.isdigit()):
        return [f"{path} = {text!r}"]
    return []


def _name(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]


@cache
def _model() -> Any:
    import botocore.session

    return botocore.session.Session().get_service_model("ec2")
