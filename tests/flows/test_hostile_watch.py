"""One machine, market or store that misbehaves is one workspace's Unknown: in the same look of
watch, the machines and jobs of the others are seen to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from functools import partial
from importlib import import_module
from typing import Any, Final

import pytest

from flows import watch
from flows.procedures.watch import leftovers
from tasks import watch as steps
from tasks.plain_runner import PlainRunner
from tasks.workspace import OpenWorkspace
from tests.fixtures.activity import sample
from tests.fixtures.alert_server import AlertMemory
from tests.fixtures.clocked_agent import ClockedStore
from tests.fixtures.lab import FolderMarket, Lab
from tests.fixtures.loopback import Handler, Loopback
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.rentals import handed_over, standing
from tests.markets.market import Clock
from torpor.control.jobs.records import Job, new_job_id
from torpor.control.money.budgets import Budget, OpenBudget
from torpor.control.store.patience import StorePatience
from torpor.control.store.s3 import S3Settings, S3Store
from torpor.machine.sampler.ring import Ring, boot_clock_s, boot_id
from torpor.machine.supervisor.marker import MARKER
from torpor.shared.errors import TorporError
from torpor.shared.values import IdleRules, WorkspaceName

EVIL = WorkspaceName("evil")
OTHER = WorkspaceName("other")
RULES = IdleRules(minutes=5, share=0.5, people=False)


class Turns:
    """From its ``step``-th call on, whatever it is asked raises ``error``."""

    def __init__(self, error: Exception) -> None:
        self.error, self.step, self.calls, self.raised = error, 0, 0, True
        self.armed = False

    def __call__(self) -> None:
        self.calls += self.armed
        if self.step < self.calls:
            self.raised = True
            raise type(self.error)(*self.error.args)

    def around(self, thing: Any, *names: str) -> None:
        """Ask before each of these methods of ``thing``."""
        for name in names:
            setattr(thing, name, self._first(getattr(thing, name)))

    def _first(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **how: Any) -> Any:
            self()
            return method(*args, **how)

        return call


def _store(turns: Turns, evil: OpenWorkspace) -> OpenWorkspace:
    store = ClockedStore(evil.store)
    turns.around(store, "put", "get", "get_range", "head", "list", "delete_object", "delete")
    return replace(evil, store=store)


def _market(turns: Turns, evil: OpenWorkspace) -> OpenWorkspace:
    turns.around(evil.providers[0], "find", "list_own", "residue", "destroy")
    return evil


def _machine(turns: Turns, evil: OpenWorkspace) -> OpenWorkspace:
    (market,) = evil.providers
    assert isinstance(market, FolderMarket)
    for near in market.near.values():
        turns.around(near, "call", "execute")
    log_in = turns._first(market.log_in)
    return replace(evil, log_in=log_in)


def _idle(opened: OpenWorkspace) -> None:
    """A machine in use whose sampler has seen nothing for the window."""
    (market,) = opened.providers
    assert isinstance(market, FolderMarket)
    machine = handed_over(opened)[0]
    home = market.near[machine.id].user_home
    (home / "workspace").mkdir(parents=True)
    (home / "workspace" / "file").write_bytes(b"work")
    (home / ".torpor" / MARKER).touch(mode=0o600)
    ring, now_s, boot = Ring(home / ".torpor"), boot_clock_s(), boot_id()
    for n in range(300):
        ring.append(sample(1 + n, at_s=now_s - 299 + n, boot=boot, gpus=2))
    ring.close()


def _left_job(opened: OpenWorkspace) -> None:
    """A job that any run may continue."""
    name = opened.spec.name
    made = Job(id=new_job_id(name), workspace=name, block=name, command=["true"], created_unix=1.0)
    opened.jobs.leave(opened.jobs.take(made, "gone"), failed=False)


_PAGE: Final = (
    b"<ListBucketResult><IsTruncated>true</IsTruncated>"
    b"<NextContinuationToken>%d</NextContinuationToken></ListBucketResult>"
)


class _Endless(Handler):
    """Each byte that drips, or each page of a listing without an end, takes 50 s by the test's
    clock."""

    server: Endless

    def do_GET(self) -> None:
        endless = self.server
        endless.asked += 1
        if not endless.drips:
            endless.pass_time()
            self.reply(200, _PAGE % endless.asked)
            return
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        while True:
            endless.pass_time()
            self.wfile.write(b" ")


class Endless(Loopback):
    """A store; once it has held its client up for a whole look's patience, it waits for the test's
    end."""

    def __init__(self, drips: bool) -> None:
        self.drips, self.clock, self.asked = drips, Clock(), 0
        self.began_unix, self.closing = self.clock.now_unix, threading.Event()
        super().__init__(_Endless)

    def pass_time(self) -> None:
        if self.clock.now_unix - self.began_unix >= steps.STORE_S:
            self.closing.wait()
            raise ConnectionResetError
        self.clock.advance(50)

    def close(self) -> None:
        self.closing.set()
        super().close()

    def store(self) -> S3Store:
        settings = S3Settings(
            "evil", "key", "secret", self.url, attempts=1, read_timeout_s=1, root=bytes(32)
        )
        return S3Store.connect(settings)


class Starts(PlainRunner):
    """Keeps which flow was started for which workspace, and starts none."""

    def start(self, flow: Any, key: str, **parameters: Any) -> str:
        self.started = {*getattr(self, "started", ()), (flow.name, parameters.get("workspace"))}
        return "run one"


@pytest.mark.rule("H7")
@pytest.mark.parametrize("error", [TypeError("'int' object"), RecursionError(), MemoryError()])
@pytest.mark.parametrize("who", [_store, _market, _machine])
def test_whatever_one_raises_the_others_are_seen_to_in_the_same_look(
    lab: Lab,
    who: Callable[[Turns, OpenWorkspace], OpenWorkspace],
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It turns hostile for good at each of its calls in a look."""
    monkeypatch.setattr(leftovers, "LEFT_S", 0.0)  # what was never handed over is looked at
    market, store = FolderMarket(lab.folder / "evil", "vast:2"), MemoryStore()
    evil = replace(
        lab.wanting(name=EVIL, idle=RULES, save_minutes=5),
        store=store,
        providers=(market,),
        log_in=market.log_in,
    )
    good, other = lab.wanting(idle=RULES), lab.wanting(name=OTHER, idle=RULES)
    for opened in (evil, other):
        _idle(opened)
        standing(opened)
    _left_job(good)
    turns = Turns(error)
    evil = who(turns, evil)
    turns.armed = True
    while turns.raised:
        turns.calls, turns.raised, alerts = 0, False, AlertMemory()
        with (
            Starts(evil, other, good, retries=0, alerts=alerts) as runs,
            suppress(TorporError, type(error)),
        ):
            watch.fn(dry_run=False)  # which says at its end what failed
        assert ("hibernate", OTHER) in runs.started, turns.step
        assert ("job", "demo") in runs.started, turns.step
        told = [(one.kind, one.subject, one.workspace) for one in alerts.remembered()]
        is_told = any(EVIL in one or "vast:2" in one for one in told)
        assert is_told or not turns.raised, turns.step
        turns.step += 1
    assert turns.step > 2
    store.close()


@pytest.mark.rule("H7")
@pytest.mark.parametrize("drips", [True, False])
def test_a_store_that_ends_no_answer_holds_up_a_look_only_so_long(
    lab: Lab, drips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then it is this store's trouble, and nothing else is asked of it, also not for a budget."""
    endless = Endless(drips)
    patience = partial(StorePatience, clock=lambda: endless.clock.now_unix)
    monkeypatch.setattr(steps, "StorePatience", patience)
    # One clock for all stores: what one of them waits for would count for the others beside it.
    monkeypatch.setattr(import_module("flows.watch"), "OWNERS_AT_ONCE", 1)
    evil = replace(lab.wanting(name=EVIL, idle=RULES), store=endless.store())
    good, other = lab.wanting(idle=RULES), lab.wanting(name=OTHER, idle=RULES)
    standing(other)
    _idle(other)
    _left_job(good)
    counted = Budget(name="ml", usd_month=Decimal(10**6), workspaces=(OTHER, EVIL))
    budget = OpenBudget(counted, lambda: [one.rentals for one in (evil, other)])
    evil = replace(evil, budgets=lambda: [budget])
    alerts = AlertMemory()
    with Starts(evil, other, good, alerts=alerts) as runs, suppress(TorporError):
        watch.fn(dry_run=False)
    asked = endless.asked
    endless.close()
    assert {("hibernate", OTHER), ("job", "demo")} <= runs.started
    assert asked == (1 if drips else steps.STORE_S / 50 + 1)
    told = [one for one in alerts.remembered() if one.workspace == EVIL]
    assert any(evil.store.address in one.words for one in told), told
