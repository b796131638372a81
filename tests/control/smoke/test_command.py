"""What ends a smoke test before anything is rented."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

import blocks
from deployments import smoke
from tests.markets.runpod import FakeRunPod
from torpor.control.own_server import FOLDER_VARIABLE
from torpor.control.smoke.plan import SmokePlan
from torpor.shared.errors import InvalidInput, RunCancelled

REFERENCE = "runpod-provider/mine"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeRunPod]:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    with FakeRunPod() as made:
        block = blocks.RunpodProvider(api_key=SecretStr(made.key), url=made.url)
        monkeypatch.setattr(smoke, "load", lambda reference, kinds, of: block)
        yield made


def test_nothing_is_rented_without_an_answer(
    fake: FakeRunPod, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[SmokePlan] = []

    def agree(plan: SmokePlan) -> None:
        shown.append(plan)
        smoke.ask(plan)

    with pytest.raises(InvalidInput, match="add --yes"):
        smoke.smoke(REFERENCE, agree=agree)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: "")
    with pytest.raises(RunCancelled, match="nothing was rented"):
        smoke.smoke(REFERENCE, agree=agree)
    said = {row["what"]: row["value"] for row in shown[0].rows()}
    assert "worst case" in said
    assert "its start script tries to end it after 15 min" in said["if all else fails"]
    assert fake.market.rented == []
