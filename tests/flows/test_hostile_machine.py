"""A hostile machine against whole flows: each ends with an error of ours, and what is destroyed was
verified first or held nothing."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final, TypeVar

import msgspec
import pytest

from flows import hibernate, job, wake
from tasks.plain_runner import PlainRunner
from tests.fixtures.driver import hurried
from tests.fixtures.hostile_machine import anything
from tests.fixtures.lab import Lab
from tests.fixtures.near_agent import NearMachine
from tests.fixtures.plain_flows import hibernate_plainly
from torpor.shared.errors import MachineError, TorporError, from_wire
from torpor.shared.values import SnapshotId
from torpor.shared.wire.protocol import MAX_LINE_BYTES, parse_said
from torpor.shared.wire.request import Request, parse_answer

A = TypeVar("A")
Lie = Callable[[Request[Any], random.Random], bytes]
"""The line that answers a request."""


def _result(value: object) -> bytes:
    return json.dumps({"id": "1", "result": value}).encode()


LIES: dict[str, Lie] = {
    "well-typed": lambda request, dice: _result(anything(request.answer_type(), dice, wrong=False)),
    "ill-typed": lambda request, dice: _result(anything(request.answer_type(), dice, wrong=True)),
    "nested": lambda request, dice: b'{"id":"1","result":' + b"[" * 200_000,
    "huge": lambda request, dice: _result({"a": [{}] * (MAX_LINE_BYTES // 8)}),
    "an error of the control side": lambda request, dice: json.dumps(
        {
            "id": "1",
            "error": {
                "type": dice.choice(["WorkspaceAsleep", "HandedOver", "UnsafeDestroy", "NoOffer"]),
                "message": "its machine was destroyed; a verified snapshot holds all of it",
            },
        }
    ).encode(),
}


class Liar:
    """Makes machines lie from the ``step``-th request on; after ``told`` lies, ``taken_away`` is
    called, and they are honest again."""

    def __init__(self, lie: Lie, monkeypatch: pytest.MonkeyPatch) -> None:
        self.step, self.asked, self.told = 1 << 30, 0, 1 << 30
        self.taken_away: Callable[[], None] = lambda: None
        self._lie, self._dice, self._honest = lie, random.Random(7), NearMachine.call
        liar = self

        def call(near: NearMachine, request: Request[A], **how: Any) -> A:
            liar.asked += 1
            if not liar.step < liar.asked <= liar.step + liar.told:
                return honest(near, request, **how)
            if liar.asked == liar.step + liar.told:
                liar.taken_away()
            return liar._said(request)

        honest = self._honest
        monkeypatch.setattr(NearMachine, "call", call)

    def _said(self, request: Request[A]) -> A:
        said = parse_said(self._lie(request, self._dice))
        if said is None:
            raise MachineError("near: a line that is no message")
        if said.error is not None:
            raise from_wire(said.error)
        return parse_answer(type(request), said.result)


def _stored(lab: Lab) -> SnapshotId:
    """The workspace, of one file, sleeps."""
    machine = lab.rent()
    lab.workspace(machine.id).mkdir(parents=True)
    (lab.workspace(machine.id) / "file").write_bytes(b"work")
    return hibernate_plainly(lab.opened, machine=machine.id).snapshot


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """pytest's workers cannot send on what it would keep of such names."""
    log = logging.getLogger("torpor.plain")
    log.disabled = True
    yield
    log.disabled = False


@pytest.mark.rule("H12")
@pytest.mark.parametrize("lie", LIES)
def test_hibernate_destroys_no_machine_that_lies_without_a_verified_snapshot(
    lab: Lab, lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    liar = Liar(LIES[lie], monkeypatch)
    for liar.step in range(0, 40, 2):
        machine = lab.rent()
        lab.workspace(machine.id).mkdir(parents=True)
        (lab.workspace(machine.id) / "file").write_bytes(b"work" * liar.step)
        liar.asked, before, is_done = 0, len(lab.snapshots()), False
        with PlainRunner(lab.opened, retries=0, wait_factor=0), suppress(TorporError):
            hibernate.fn("demo", machine=machine.id)
            is_done = True
        if liar.asked <= liar.step:
            break
        assert is_done == (machine.id not in lab.market.alive), "it reports what is not so"
        if is_done:
            assert len(lab.snapshots()) > before
            assert lab.verify_listed()
        lab.lose_machines()
        lab.forget_rentals()
    assert liar.step, "it never lied"


@pytest.mark.rule("H12")
@pytest.mark.parametrize("lie", LIES)
def test_a_wake_of_a_machine_that_lies_ends_with_an_error_of_ours_and_keeps_the_snapshot(
    lab: Lab, lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _stored(lab)
    liar = Liar(LIES[lie], monkeypatch)
    for liar.step in range(40):
        liar.asked = 0
        with PlainRunner(lab.opened, retries=0, wait_factor=0), suppress(TorporError):
            wake.fn("demo")
        if liar.asked <= liar.step:
            break
        assert lab.verify_listed() == 1
        lab.lose_machines()
        lab.forget_rentals()
    assert liar.step, "it never lied"


LIES_TOLD: Final = 8
"""Then its owner takes the machine away. Until then a lie may be that the command still runs."""


@pytest.mark.usefixtures("needs_server", "short_agent")
@pytest.mark.parametrize("lie", LIES)
def test_a_job_on_a_machine_that_lies_goes_on_elsewhere_and_every_snapshot_stays_whole(
    lab: Lab, lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, a save that the machine named ended the job's run with a ValueError of ours."""
    first = _stored(lab)
    liar = Liar(LIES[lie], monkeypatch)
    ends = set()
    with hurried():
        for liar.step in range(0, 64, 7):
            liar.asked, liar.told = 0, LIES_TOLD
            liar.taken_away = lab.lose_machines
            with PlainRunner(lab.opened, retries=0, wait_factor=0.01), suppress(TorporError):
                job.fn("demo", ["sh", "-c", "echo result >result"])
            lab.lose_machines()
            lab.forget_rentals()
            for left in lab.opened.jobs.open():
                lab.opened.jobs.end(msgspec.structs.replace(left, state="failed"))
            ends.add(lab.opened.jobs.ended(1)[0].state)
            names = [one.snapshot for one in lab.snapshots()]
            assert first in names and lab.verify_listed() == len(names)
            if liar.asked <= liar.step:
                break
    assert liar.step, "it never lied"
    assert "succeeded" in ends
