"""A fleet that is stopped."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from flows.procedures import fleet
from flows.procedures.fleet import Fleet, FleetRequest


def test_each_session_is_closed_once_however_long_its_machine_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet, "POLITE_S", -1.0)
    going: Any = Future()
    session = Mock()
    opened: Any = None
    stopped = Fleet(opened, opened, opened, opened, FleetRequest(1, 0, [], False), Mock())
    stopped._running[going] = SimpleNamespace(number=0, restore=None, session=session)  # type: ignore[assignment]
    end = threading.Timer(2.5, going.set_result, (None,))
    end.start()
    stopped._stop()
    end.join()
    assert session.close.call_count == 1
