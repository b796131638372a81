"""Keys of runs."""

from __future__ import annotations

from flows.procedures.run_key import RETRY_S, run_key


def test_a_run_is_started_once_in_each_period() -> None:
    first = run_key("left-m1", 10 * RETRY_S)
    assert first == "left-m1-10"
    assert run_key("left-m1", 11 * RETRY_S - 0.5) == first
    assert run_key("left-m1", 11 * RETRY_S) == "left-m1-11"
    assert run_key("continue", 299.9, 300) == "continue-0"
