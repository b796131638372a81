"""A flow that starts another: as a run of its own where a worker is, else at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flows import hibernate
from tasks.prefect_runner import PrefectRunner


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    runs: list[tuple[str, dict[str, Any]]] = []

    def run_deployment(name: str, **options: Any) -> SimpleNamespace:
        runs.append((name, options))
        return SimpleNamespace(name="hibernate-mywork", state=None)

    monkeypatch.setattr("tasks.prefect_runner.run_deployment", run_deployment)
    return runs


def test_a_run_of_a_deployment_starts_a_deployment_once_for_each_key(
    monkeypatch: pytest.MonkeyPatch, asked: list[tuple[str, dict[str, Any]]]
) -> None:
    monkeypatch.setattr("tasks.prefect_runner.deployment", SimpleNamespace(id="1"))
    said = PrefectRunner().start(hibernate, "key", workspace="mywork", only_if_idle=True)
    assert said == "run hibernate-mywork"
    ((name, options),) = asked
    assert name == "hibernate/hibernate"
    assert options == {
        "parameters": {"workspace": "mywork", "only_if_idle": True},
        "timeout": 0,
        "as_subflow": False,
        "idempotency_key": "key",
    }


def test_a_call_from_python_runs_the_flow_at_once(
    monkeypatch: pytest.MonkeyPatch, asked: list[tuple[str, dict[str, Any]]]
) -> None:
    monkeypatch.setattr("tasks.prefect_runner.deployment", SimpleNamespace(id=None))
    called: list[dict[str, Any]] = []

    def flow(**parameters: Any) -> None:
        called.append(parameters)

    assert PrefectRunner().start(flow, "key", workspace="mywork") == ""  # type: ignore[arg-type]
    assert (called, asked) == ([{"workspace": "mywork"}], [])
