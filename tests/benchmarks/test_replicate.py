"""The measurements of replicate, small: who is reported and replaced, and what peers carry."""

from __future__ import annotations

import pytest

from flows.procedures import fleet
from tests.benchmarks.replicate import kills, limited
from tests.fixtures.stores import Server
from torpor.shared.values import MIB


def test_killed_machines_are_reported_and_replaced_when_spares_are_asked_for(
    seaweed: Server, short_agent: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -m tests.benchmarks.replicate kills` is the same with eight machines, two killed."""
    monkeypatch.setattr(fleet, "WATCH_S", 0.3)
    figures = kills(seaweed, 3, 1, mib=8, link_s=3.0)
    without, spared = figures["without spares"], figures["with spares"]
    for figure in (without, spared):
        assert figure["reported"] == figure["killed"]
        assert len(figure["killed"]) == 1
        assert figure["not_of_the_report"] == figure["leaked"] == []
    assert (without["ready"], without["identical"], without["replaced"]) == (2, 2, 0)
    assert (spared["ready"], spared["identical"]) == (3, 3)
    # The spare took the place if it was still starting, else a new one did.
    assert spared["replaced"] in (0, 1)


def test_peers_relieve_the_store_s_link(seaweed: Server, short_agent: None) -> None:
    """`python -m tests.benchmarks.replicate store` is the same with eight machines."""
    figures = limited(seaweed, "store", 3, mib=24, bytes_s=6 * MIB, peers="always")
    assert figures["from_store_bytes"] <= 1.5 * figures["stored_bytes"]  # 3 without peers
    assert "passed on by peers" in figures["source"]
    assert figures["from_peers_bytes"] >= 1.5 * figures["stored_bytes"]
