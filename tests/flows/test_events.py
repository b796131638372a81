"""Events say what happened in small typed payloads, and never fail what they tell of."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import pytest

from tasks.events import BackupFailed, SnapshotCommitted, VerificationFailed, WorkspaceEvent, emit
from tasks.plain_runner import PlainRunner
from torpor.shared.values import SnapshotId, WorkspaceName

DEMO = WorkspaceName("demo")
SNAPSHOT = SnapshotId("20261120T234913Z-1f0c9ab2")


def _kinds(kind: type[WorkspaceEvent] = WorkspaceEvent) -> list[type[WorkspaceEvent]]:
    below = [found for sub in kind.__subclasses__() for found in _kinds(sub)]
    return below or [kind]


@pytest.fixture
def sent() -> Iterator[list[dict[str, Any]]]:
    found: list[dict[str, Any]] = []
    with PlainRunner(on_event=found.append):
        yield found


def test_every_event_has_a_name_of_the_usual_form() -> None:
    names = [kind.event for kind in _kinds()]
    assert len(names) == len(set(names)) >= 11
    for name in names:
        assert re.fullmatch(r"torpor\.[a-z]+\.[a-z-]+", name), name


def test_payloads_are_small_typed_values_and_name_no_secret() -> None:
    plain = {str, int, float, bool, type(None)}
    for kind in _kinds():
        for name, hint in get_type_hints(kind).items():
            parts = {getattr(part, "__supertype__", part) for part in get_args(hint) or (hint,)}
            if name != "event":
                assert parts <= plain, f"{kind.__name__}.{name} is {hint}"
            assert not re.search(r"key|secret|password|token|url", name), f"{kind}.{name}"


def test_an_event_names_what_it_happened_to_and_the_workspace(sent: list[dict[str, Any]]) -> None:
    emit(SnapshotCommitted(workspace=DEMO, snapshot=SNAPSHOT, files=3, bytes=4))
    assert sent == [
        {
            "event": "torpor.snapshot.committed",
            "resource": {
                "prefect.resource.id": f"torpor.snapshot.demo.{SNAPSHOT}",
                "prefect.resource.name": "demo",
            },
            "related": [
                {
                    "prefect.resource.id": "torpor.workspace.demo",
                    "prefect.resource.role": "workspace",
                    "prefect.resource.name": "demo",
                }
            ],
            "payload": {"workspace": "demo", "snapshot": SNAPSHOT, "files": 3, "bytes": 4},
        }
    ]


def test_an_event_of_a_workspace_is_not_related_to_itself(sent: list[dict[str, Any]]) -> None:
    emit(BackupFailed(workspace=DEMO, error="StoreDenied", message="x" * 5000))
    (event,) = sent
    assert event["resource"]["prefect.resource.id"] == "torpor.workspace.demo"
    assert event["related"] == []
    assert len(event["payload"]["message"]) == 1000


def test_long_lists_are_cut(sent: list[dict[str, Any]]) -> None:
    many = [SNAPSHOT] * 5000
    emit(VerificationFailed(workspace=DEMO, snapshots=many, problems=5000, message=""))
    assert len(sent[0]["payload"]["snapshots"]) == 100
    assert sent[0]["payload"]["problems"] == 5000


@pytest.mark.parametrize("fault", [RuntimeError("no loop"), OSError("no server"), ValueError()])
def test_an_event_that_cannot_be_sent_fails_nothing(
    fault: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(event: dict[str, Any]) -> None:
        raise fault

    with caplog.at_level(logging.WARNING), PlainRunner(on_event=fails):
        emit(SnapshotCommitted(workspace=DEMO, snapshot=SNAPSHOT, files=3, bytes=4))
    assert "torpor.snapshot.committed was not sent" in caplog.text
