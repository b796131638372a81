"""`torpor adopt` asks before it lets torpor destroy a machine."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

import flows
from torpor.control.rental.adoption import AdoptReport
from torpor.shared.errors import InvalidInput, NotOurs, RunCancelled, UnsafeDestroy
from torpor.shared.values import WorkspaceName
from torpor_cli import adoption
from torpor_cli.exit_codes import REFUSED, WRONG_USE, explained


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool, bool]]:
    """The calls of the flow: the host key that was asked for, `dry_run` and `release`."""
    made: list[tuple[str, bool, bool]] = []

    def flow(
        workspace: str, machine: str, price: float, key: str, dry_run: bool = True, **more: Any
    ) -> AdoptReport:
        made.append((key, dry_run, more.get("release", False)))
        name, state = WorkspaceName(workspace), "can be adopted" if dry_run else "adopted"
        more = {"host_key": "ssh-ed25519 AAAA", "fingerprint": "SHA256:abc", "paths": ["~/w"]}
        outside = ["/root/elsewhere: 2.0 MB in 1 file"]
        return AdoptReport(name, "1", "vast://a", state, 2.0, outside=outside, **more)

    monkeypatch.setattr(flows, "adopt", flow)
    monkeypatch.setattr(adoption, "connected", nullcontext)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    return made


def test_it_shows_what_it_may_do_and_what_would_be_lost_and_adopts_after_a_yes(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("builtins.input", lambda asked: print(asked) or "y")
    adoption.adopt("mywork", "vast:1")
    assert calls == [("", True, False), ("ssh-ed25519 AAAA", False, False)]
    said = "".join(capsys.readouterr())
    for words in ("DESTROY this machine", "/root/elsewhere", "SHA256:abc", "2.000 $/h", "[y/N]"):
        assert words in said, words


def test_a_no_adopts_nothing(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda asked: "")
    with pytest.raises(RunCancelled):
        adoption.adopt("mywork", "vast:1")
    assert calls == [("", True, False)]


def test_without_a_terminal_it_wants_a_yes(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    with pytest.raises(InvalidInput, match="add --yes") as refused:
        adoption.adopt("mywork", "vast:1")
    assert explained(refused.value)[0] == WRONG_USE
    assert calls == []
    adoption.adopt("mywork", "vast:1", yes=True)
    adoption.adopt("mywork", release=True)
    assert calls == [("", False, False), ("", False, True)]


@pytest.mark.parametrize("error", [NotOurs("theirs"), UnsafeDestroy("stopped")])
def test_what_is_not_the_user_s_is_refused_for_safety(error: Exception) -> None:
    assert explained(error)[0] == REFUSED
