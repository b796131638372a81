"""Every adapter understands what its market was recorded to say.

See docs/contributing/market.md. A folder of ``recorded/`` is named MARKET-WORDS. Its
``report.json`` is what the replay must find: correct it where an adapter has learned what it did
not understand when this was recorded.
"""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.replay import RECORDED, Recording, record, replayed
from tests.markets.every import FAKES
from tests.markets.server import KEY
from torpor.control.smoke.redact import Redactor
from torpor.control.smoke.trial import SmokeReport

_PACKED_SCRIPT = base64.b64encode(b"#!/bin/sh\nse").decode()
FOLDERS = sorted(folder for folder in RECORDED.iterdir() if folder.is_dir())


def _replayed(folder: Path, recording: Recording) -> tuple[SmokeReport, list[tuple[str, str]]]:
    with FAKES[folder.name.partition("-")[0]]() as fake:
        report, replay = replayed(fake, recording)
    return report, replay.missing


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_adapter_finds_what_was_recorded(folder: Path) -> None:
    recording = Recording.of(folder)
    report, missing = _replayed(folder, recording)
    assert missing == []
    assert report.fault == recording.report.fault
    assert _differ(report) == _differ(recording.report)
    assert bool(report.ended) == bool(recording.report.ended)


def _differ(report: SmokeReport) -> dict[str, bool]:
    return {check.what: check.differs for check in report.checks}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_recording_holds_no_secret(folder: Path) -> None:
    """Redacting it once more changes nothing."""
    redactor = Redactor([KEY])
    for exchange in Recording.of(folder).exchanges:
        assert redactor.value(exchange) == exchange
    assert KEY not in "".join(file.read_text() for file in folder.iterdir())


def test_the_two_samples_are_there() -> None:
    assert {"vast-sample", "runpod-sample"} <= {folder.name for folder in FOLDERS}


@pytest.mark.parametrize("market", FAKES)
def test_what_is_recorded_at_a_fake_can_be_replayed(market: str, tmp_path: Path) -> None:
    if market == "ec2":  # boto3 sends for it, and shows nothing
        return
    folder = tmp_path / f"{market}-now"
    asked = record(market, folder)
    written = "".join(file.read_text() for file in folder.iterdir())
    passwords = re.findall(r"'root_pass': '([^']+)'", asked)
    for secret in (KEY, _PACKED_SCRIPT, "BEGIN OPENSSH", "AAAAC3Nza", *passwords):
        assert secret not in written
    assert bool(passwords) == (market == "hostkey")
    recording = Recording.of(folder)
    report, missing = _replayed(folder, recording)
    assert (missing, report.fault, report.passed) == ([], "", True)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_an_answer_of_another_shape_is_noticed(folder: Path) -> None:
    """Each answer to the create in turn: a market that has renamed its fields."""
    recording = Recording.of(folder)
    created = [e for e in recording.exchanges if e["status"] in (200, 201) and _creates(e)]
    assert created
    for exchange in created:
        exchange["body"] = _renamed(exchange["body"])
    report, _ = _replayed(folder, recording)
    assert not report.passed
    assert "order" in report.fault or "create" in report.fault or "rented" in report.fault


def _creates(exchange: dict[str, Any]) -> bool:
    return exchange["method"] in ("PUT", "POST") and "REDACTED" in str(exchange["request"])


def _renamed(body: Any) -> Any:
    return {f"new_{name}": value for name, value in body.items()}
