"""What HOSTKEY's answers say of names, states, rows and hardware, in the shapes that they have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from torpor.control.providers.gpus import GpuModel, parse_gpu
from torpor.control.providers.hostkey.client import Body
from torpor.control.providers.labels import label_in, label_name
from torpor.shared.values import Label, MachineId

_NAMES: Final = frozenset({"hostname", "server_name"})
_DEPLOYED: Final = re.compile(r"deploy_done|autodeploy completed")
_FAILED: Final = re.compile(
    r"\b(?:cancell?ed|cancel_request|aborted|rejected|failure|failed|error)\b|'status': 'cancel'"
)
"""Text about an order that will have no server, as HOSTKEY's own client reads it (its Terraform
provider 0.1.9, invapi/callback.go)."""
_SERVER_KEYS: Final = frozenset({"server_id", "eq_id", "id_server"})


def status_of(answer: Body) -> str:
    data = answer.get("server_data")
    return str(data.get("status") or "").lower() if isinstance(data, dict) else ""


def label_of(answer: Body) -> Label | None:
    """The label in an answer: in the host name, which stands at any depth of server_data, in the
    tags, or in both, because one of the two may lag."""
    names = [*_values(answer.get("server_data"), _NAMES)]
    tags = answer.get("tags")
    rows = [row for row in tags if isinstance(row, dict)] if isinstance(tags, list) else []
    names += [row.get("value") for row in rows if str(row.get("tag")).lower() in _NAMES]
    labels = [label_in(name.strip().lower()) for name in names if isinstance(name, str)]
    return next((label for label in labels if label is not None), None)


def _values(told: object, keys: frozenset[str]) -> Iterator[object]:
    """The values under these keys, at any depth."""
    if isinstance(told, dict):
        for key, value in told.items():
            if str(key).lower() in keys:
                yield value
            yield from _values(value, keys)
    elif isinstance(told, list):
        for value in told:
            yield from _values(value, keys)


def rows_in(told: object) -> list[object]:
    """The rows of a list, which PHP may write as an object by number."""
    if isinstance(told, dict):
        inner = [row for row in told.values() if isinstance(row, (dict, list))]
        if told and len(inner) < len(told):
            return [told]
        told = inner
    if not isinstance(told, list):
        return []
    nested = [rows_in(row) if isinstance(row, (dict, list)) else [row] for row in told]
    return [row for rows in nested for row in rows]


def concerns(row: object, machine: MachineId) -> bool:
    """Whether a row of an answer that was asked of one server concerns it: it may name another."""
    named = list(_values(row, _SERVER_KEYS)) if isinstance(row, dict) else [row]
    return machine in map(str, named) if named else True


def deploy_fault(answer: Body, label: Label) -> str:
    """The word that ends an order in what ``eq_callback/check`` tells of it; empty: none does."""
    if _DEPLOYED.search(str(answer.get("scope")).lower()):
        return ""
    keys = ("result", "scope", "context", "message", "error")
    told = " ".join(str(answer.get(key) or "") for key in keys).lower()
    found = _FAILED.search(told.replace(label_name(label), ""))  # a workspace may have any name
    return found[0] if found else ""


def label_among(told: object) -> Label | None:
    words = (label_in(word) for word in re.findall(r"torpor\.[\w.-]*\w", str(told)))
    return next((label for label in words if label is not None), None)


def gpu_of(row: dict[str, Any]) -> tuple[GpuModel | None, int]:
    """The GPU of a server: in ``gpu`` where that is stated, otherwise in the preset's name, such as
    gpu.v2-2xa5000."""
    name = str(row["name"])
    text = str(row.get("gpu") or "")
    if not text:
        if not re.match(r"v?gpu\.", name):
            return None, 0
        text = name.rpartition("-")[2]
    counted = re.match(r"\s*(\d+) ?x ?(.*)", text)
    gpu = parse_gpu(counted[2] if counted else text)
    return gpu, (int(counted[1]) if counted else 1) if gpu else 0


def disk_gb(text: str) -> float:
    """The size in GB of the first disk, which holds the system: "2x960" is 960."""
    found = re.search(r"(?:\d+x)?(\d+(?:\.\d+)?)\s*(t?)", text.lower())
    return float(found[1]) * (1000 if found[2] else 1) if found else 0.0
