"""Other tools store and restore beside torpor, and no argument and no file holds a key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import other_tools
from benchmarks.content import make_below
from tests.fixtures.stores import Server
from torpor.shared.errors import StoreError
from torpor.shared.values import KIB, MIB


@pytest.mark.parametrize("peer", sorted(other_tools.PEERS))
def test_a_peer_stores_and_restores_and_no_argument_and_no_file_holds_a_key(
    peer: str, seaweed: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    real = other_tools.subprocess.Popen

    def started(argv: list[str], **how: Any) -> object:
        seen.extend([*argv, *how["env"].values()])
        return real(argv, **how)  # type: ignore[call-overload]

    monkeypatch.setattr(other_tools.subprocess, "Popen", started)
    make_below(tmp_path / "content", MIB, 1)
    store = seaweed.store()
    settings = seaweed.settings(*_place_of(store.address))
    tool = other_tools.PEERS[peer](
        settings, f"{settings.prefix}/peers", tmp_path / "content", tmp_path / "c"
    )
    assert tool.full().wall_s > 0
    assert sum(found.bytes for found in store.list("peers/")) > 100 * KIB
    tool.restore(tmp_path / "back")
    first = {path.name: path.stat().st_size for path in (tmp_path / "content").rglob("*.py")}
    again = {path.name: path.stat().st_size for path in (tmp_path / "back").rglob("*.py")}
    assert first == again != {}
    assert not any(settings.secret_key in word for word in seen)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(settings.secret_key.encode() in path.read_bytes() for path in files)


def test_a_peer_that_fails_says_why(seaweed: Server, tmp_path: Path) -> None:
    settings = seaweed.settings("no-such-bucket-here", "x")
    (tmp_path / "content").mkdir()
    tool = other_tools.tarball(settings, "x", tmp_path / "content", tmp_path)
    with pytest.raises(StoreError, match="s5cmd"):
        tool.restore(tmp_path / "back")


def _place_of(address: str) -> tuple[str, str]:
    bucket, _, prefix = address.partition("://")[2].partition("/")[2].partition("/")
    return bucket, prefix
