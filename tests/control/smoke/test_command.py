"""What ends a smoke test before anything is rented."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

import blocks
from deployments import smoke
from tests.markets.runpod import FakeRunPod
from torpor.control.smoke.plan import Plan
from torpor.control.supervision import FOLDER_VARIABLE
from torpor.shared.errors import BudgetExceeded, InvalidInput, ProviderError, RunCancelled

REFERENCE = "runpod-provider/mine"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeRunPod]:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    with FakeRunPod() as made:
        block = blocks.RunpodProvider(api_key=SecretStr(made.key), url=made.url)
        monkeypatch.setattr(smoke, "load", lambda reference, kinds, of: block)
        yield made


def test_a_price_over_the_maximum_ends_it_before_anything_is_rented(
    fake: FakeRunPod, tmp_path: Path
) -> None:
    with pytest.raises(BudgetExceeded, match="nothing was rented"):
        smoke.smoke(REFERENCE, max_usd=0.001, agree=lambda plan: None)
    assert fake.market.rented == []
    (folder,) = (tmp_path / "smoke").glob("runpod-*")
    written = [file.read_text() for file in sorted(folder.iterdir())]
    assert len(written) > 1  # the account and the offers
    assert not [text for text in written if fake.key in text]


def test_nothing_is_rented_without_an_answer(
    fake: FakeRunPod, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Plan] = []

    def agree(plan: Plan) -> None:
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
    assert "stay, and watch its console" in said["if all else fails"]
    assert fake.market.rented == []


@pytest.mark.usefixtures("needs_server")
def test_nothing_is_rented_when_the_watchdog_does_not_start(
    fake: FakeRunPod, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(ProviderError, match="the watchdog did not start"):
        smoke.smoke(REFERENCE, agree=lambda plan: None)
    assert fake.market.rented == []
