"""Fixtures of the markets' own tests."""

from tests.markets.boot import booted_machines

__all__ = ["booted_machines"]
