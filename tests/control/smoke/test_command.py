"""``python -m deployments.smoke`` and how it finds the secrets of a block."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

import blocks
from deployments import smoke
from tests.markets.runpod import FakeRunPod
from torpor.control.supervision import FOLDER_VARIABLE

REFERENCE = "runpod-provider/mine"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeRunPod]:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    with FakeRunPod() as made:
        block = blocks.RunpodProvider(api_key=SecretStr(made.key), url=made.url)
        monkeypatch.setattr(smoke, "load", lambda reference, kinds, of: block)
        yield made


def test_a_price_over_the_maximum_ends_it_before_anything_is_rented(
    fake: FakeRunPod, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert smoke.main([REFERENCE, "--max-usd", "0.001", "--yes"]) == 1
    assert "nothing was rented" in capsys.readouterr().err
    assert fake.market.rented == []
    (folder,) = (tmp_path / "smoke").glob("runpod-*")
    written = [file.read_text() for file in sorted(folder.iterdir())]
    assert len(written) > 1  # the account and the offers
    assert not [text for text in written if fake.key in text]


def test_nothing_is_rented_without_an_answer(
    fake: FakeRunPod, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert smoke.main([REFERENCE]) == 1
    assert "add --yes" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: "")
    assert smoke.main([REFERENCE]) == 1
    said = capsys.readouterr()
    assert "worst case" in said.out
    assert "stay, and watch its console" in said.out
    assert "nothing was rented" in said.err
    assert fake.market.rented == []


@pytest.mark.usefixtures("needs_server")
def test_nothing_is_rented_when_the_watchdog_does_not_start(
    fake: FakeRunPod, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    assert smoke.main([REFERENCE, "--yes"]) == 1
    assert "the watchdog did not start" in capsys.readouterr().err
    assert fake.market.rented == []
