"""The chart against the definitions of Kueue, Karpenter and the GPU operator (``make oracles``).

The definitions are not ours to ship, so these tests are collected only by name, where
../shared/specs has them. They hold fields, types, patterns and ranges; rules in CEL are for a real
API server (cluster_oracles.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from deployments.installation import CHECKOUT
from tests.fixtures.helm import CHART, Helm

pytestmark = pytest.mark.oracle

CRDS = CHECKOUT.parent / "shared" / "specs" / "crds"
FOLDERS = ("kueue", "karpenter-aws", "gpu-operator")
KINDS = {
    *("ClusterQueue", "Cohort", "LocalQueue", "ResourceFlavor", "WorkloadPriorityClass"),
    *("NodePool", "EC2NodeClass"),
}
Schema = dict[str, Any]


def test_every_object_is_as_its_definition_says(helm: Helm) -> None:
    asked = set()
    for found in helm.objects("full"):
        schema = _schemas().get((found["apiVersion"], found["kind"]))
        if schema is not None:
            asked.add(found["kind"])
            assert list(_faults(schema, found)) == [], found["metadata"]["name"]
    assert asked == KINDS


def test_a_wrong_field_and_a_wrong_value_are_found(helm: Helm) -> None:
    (pool, *_) = [one for one in helm.objects("full") if one["kind"] == "NodePool"]
    pool["spec"]["disruption"] |= {
        "consolidation": True,
        "consolidationPolicy": "WhenUnderutilized",
    }
    faults = [*_faults(_schemas()[pool["apiVersion"], "NodePool"], pool)]
    assert len(faults) == 2
    assert "'consolidation' was unexpected" in " ".join(faults)
    assert "'WhenUnderutilized' is not one of" in " ".join(faults)


def test_the_gpu_operators_values_are_fields_of_its_policy() -> None:
    values = yaml.safe_load((CHART.parent / "values" / "gpu-operator.yaml").read_text())
    policy = _schemas()["nvidia.com/v1", "ClusterPolicy"]["properties"]["spec"]["properties"]
    for name, section in values.items():
        config = section.get("config", {})
        for only_of_the_chart in ("create", "data"):
            config.pop(only_of_the_chart, None)
        assert list(_faults(policy[name], section)) == [], name


@cache
def _schemas() -> dict[tuple[str, str], Schema]:
    """What each version of each kind may be."""
    found = {}
    for file in (file for folder in FOLDERS for file in sorted((CRDS / folder).glob("*.yaml"))):
        spec = yaml.safe_load(file.read_text())["spec"]
        for version in spec["versions"]:
            name = f"{spec['group']}/{version['name']}", spec["names"]["kind"]
            found[name] = _strict(version["schema"]["openAPIV3Schema"])
    assert found
    return found


def _strict(schema: Any) -> Any:
    """The schema, as an API server takes it with strict validation: unknown fields are faults."""
    if isinstance(schema, list):
        return [_strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {
        name: {field: _strict(one) for field, one in value.items()}
        if name == "properties"
        else value
        if name in ("default", "enum", "description")
        else _strict(value)
        for name, value in schema.items()
    }
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        strict.setdefault("additionalProperties", False)
    return strict


def _faults(schema: Schema, value: Any) -> Iterator[str]:
    for fault in Draft202012Validator(schema).iter_errors(value):
        yield f"{fault.json_path}: {fault.message}"
