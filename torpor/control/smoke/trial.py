"""The smoke test itself: a probe that rents nothing, one machine, its end, and what differed."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import asyncssh
import msgspec

from torpor.control.providers.gpus import parse_gpu
from torpor.control.providers.offers import Offer
from torpor.control.providers.provider import Absent, Order, Provider
from torpor.control.rental.ending import listed
from torpor.control.rental.order import host_key_of, order_for
from torpor.control.rental.records import Rental
from torpor.control.rental.search import billed_s
from torpor.control.rental.waiting import wait_until_reachable
from torpor.control.reports import Report, Row
from torpor.control.smoke.ending import end
from torpor.control.smoke.login import Door, Inside
from torpor.control.smoke.plan import SmokePlan
from torpor.shared.errors import (
    CreateFailed,
    EndUnproven,
    InvalidInput,
    ProviderDenied,
    ProviderError,
    ProviderUnavailable,
    TorporError,
)
from torpor.shared.values import DRILL, Label, Machine, MachineId, reserved_name, workspace_name

OWNER: Final = "torpor"
WORKSPACE: Final = reserved_name(DRILL, workspace_name("smoke"))
"""The reserved name of the test's machines. They hold no work: if all else fails, ``reconcile`` may
end them."""
NO_KIND: Final = "torpor-no-such-kind"
_NOTHING_RENTED: Final = (CreateFailed, ProviderDenied, ProviderUnavailable, InvalidInput)
# share of the machine's time for its start at most: the rest is for looking and ending
_STARTS: Final = 0.8
# share of the time within which the machine is ordered: the watchdog's time began before
_LATEST: Final = 0.5
_LIST_S: Final = 5.0  # least seconds between two listings while the machine starts
_PRICE_SLACK: Final = 0.01
_PYTHON: Final = (3, 10)
_MIRRORED: Final = str.maketrans("0123456789", "9876543210")


class AdapterCheck(msgspec.Struct, frozen=True):
    """One assumption of an adapter, and what was seen instead."""

    what: str
    assumed: str
    seen: str
    differs: bool

    def row(self) -> Row:
        told = msgspec.structs.asdict(self)
        return {**{name: str(told[name]) for name in ("what", "assumed", "seen")},
                "differs": "YES" if self.differs else ""}  # fmt: skip


class SmokeReport(Report, frozen=True, kw_only=True):
    """What differed, and the bill. ``fault``: why the test was not completed."""

    provider: str
    checks: list[AdapterCheck]
    fault: str
    ended: list[str]  # the proofs of the machines' ends
    usd: float  # estimated
    worst_usd: float
    inside: Inside | None  # None: nobody has logged in

    @property
    def passed(self) -> bool:
        return not self.fault and not any(check.differs for check in self.checks)

    def title(self) -> str:
        differ = sum(check.differs for check in self.checks)
        told = f"{self.provider}: {differ} of {len(self.checks)} assumptions differ"
        return f"{told}, about {self.usd:.4f} $" + (f"; it failed: {self.fault}" * bool(self.fault))

    def rows(self) -> list[Row]:
        """The report's rows, differences first."""
        checks = sorted(self.checks, key=lambda check: not check.differs)
        ends = [AdapterCheck("end", "proven", proof, False) for proof in self.ended]
        if not any(check.what == "end" for check in [*checks, *ends]):
            ends = [AdapterCheck("end", "proven", "nothing rented", False)]
        cost = AdapterCheck("cost", f"at most {self.worst_usd:.4f} $", f"{self.usd:.4f} $", False)
        return [check.row() for check in [*checks, *ends, cost]]


def asked(provider: Provider, order: Order) -> Rental:
    """What the watchdog is told before the market is asked."""
    return Rental(
        label=order.label,
        provider=provider.identity,
        state="asked",
        created_unix=time.time(),
        offer=order.offer.id,
    )


class SmokeTrial:
    """``tell``: the watchdog, which ends the machine if this process cannot. It is told of each
    rental before the market is asked, and may raise so that nothing is rented. ``rentals``: new
    ids, of the probe and of the machine."""

    def __init__(
        self,
        provider: Provider,
        plan: SmokePlan,
        identity: asyncssh.SSHKey,
        door: Door,
        tell: Callable[[Rental], None],
        rentals: tuple[str, str],
        *,
        nap: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._provider, self._able, self._plan = provider, provider.abilities, plan
        self._identity, self._door, self._tell = identity, door, tell
        self._nap, self._clock = nap, clock
        self._probe, self._machine = (Label(OWNER, WORKSPACE, rental) for rental in rentals)
        self._rentals: dict[Label, Rental] = {}
        self._checks: list[AdapterCheck] = []
        self._fault = ""
        self._ended: list[str] = []
        self._made_s = clock()
        self._began_s: float | None = None  # when the machine was asked for
        self._listed_s: float | None = None
        self._next_list_s = 0.0
        self._inside: Inside | None = None

    def run(self) -> SmokeReport:
        """The report once everything has provably ended; EndUnproven or the market's error where
        something has not ended and may cost money. ``report`` still says what was seen."""
        try:
            self._probe_dead_offer()
            self._rent()
        except TorporError as error:
            self._fault = str(error)
        finally:
            self._end_all()
        return self.report()

    def report(self) -> SmokeReport:
        """The report of what was seen until now."""
        return SmokeReport(
            provider=self._provider.identity,
            checks=self._checks,
            fault=self._fault,
            ended=self._ended,
            usd=self._cost_usd(),
            worst_usd=self._plan.worst_usd,
            inside=self._inside,
        )

    def _end_all(self) -> None:
        for rental in [*self._rentals.values()]:
            try:
                proof = end(self._provider, rental, nap=self._nap)
            except TorporError as error:
                is_accepted = isinstance(error, EndUnproven) and error.accepted
                seen = f"ending: the market has accepted it. {error}" if is_accepted else str(error)
                self._check("end", "proven", seen, not is_accepted)
                raise
            self._ended.append(proof)
            self._note(rental, state="ended")

    # -- the steps

    def _probe_dead_offer(self) -> None:
        """Order a kind of machine that nobody sells, which the market must refuse."""
        if self._able.kind == "folder":  # its machines are of this host, whatever their offer
            return
        kind, rest = re.match(r"([^/.]*)(.*)", self._plan.offer.id).groups()  # type: ignore[union-attr]
        dead = ("1" if kind.removesuffix("-bid").isdecimal() else NO_KIND) + rest
        offer = msgspec.structs.replace(self._plan.offer, id=dead)
        assumed = "refused: nothing is rented"
        try:
            machine = self._create(self._order(offer, self._probe))
        except (CreateFailed, InvalidInput) as error:
            self._check("order of a dead offer", assumed, f"{type(error).__name__}: {error}", False)
        except ProviderError as error:
            seen = f"{type(error).__name__}: {error}"
            self._check("order of a dead offer", assumed, seen, True)
            raise
        else:
            self._check("order of a dead offer", assumed, f"machine {machine.id}", True)
            raise ProviderError(f"an offer that is not there, {dead}, became machine {machine.id}")

    def _rent(self) -> None:
        plan, able, label = self._plan, self._able, self._machine
        gone_s, lives_s = self._clock() - self._made_s, plan.minutes * 60
        if gone_s > lives_s * _LATEST:
            raise ProviderError(
                f"{gone_s / 60:.1f} of {plan.minutes:g} min had passed before the machine was "
                "ordered, so none was rented: try again, or with more --minutes"
            )
        order = self._order(plan.offer, label)
        self._began_s = self._clock()
        machine = self._create(order)
        self._check("answer to the order", "one machine", f"machine {machine.id}", False)
        host_key = host_key_of(self._identity, label).public
        pinned = host_key if able.host_key == "installed" else None
        allowed_s = min(able.ready_s, lives_s * _STARTS - gone_s)
        live = wait_until_reachable(
            self._provider,
            machine.id,
            timeout_s=allowed_s,
            sleep=lambda seconds: self._nap_and_look(label, seconds),
            clock=self._clock,
            greets=lambda endpoint: self._door.fault(endpoint, pinned),
            label=label,
        )
        self._check_time("SSH answers", able.ready_s, self._since_order_s())
        self._check("host key", able.host_key, "as ordered" if pinned else "not compared", False)
        self._check_price(live)
        self._look_at_list(label)
        late_s = self._since_order_s() if self._listed_s is None else self._listed_s
        self._check_time("listed by its label", able.settling_s, late_s, self._listed_s is not None)
        self._check_unknown(machine.id)
        if live.endpoint is None:
            raise ProviderError(f"machine {machine.id} runs without an address")
        endpoint = msgspec.structs.replace(live.endpoint, host_key=pinned)
        self._inside = self._door.look(endpoint)
        self._check_inside(self._inside)

    # -- what is compared

    def _check(self, what: str, assumed: str, seen: str, differs: bool) -> None:
        self._checks.append(AdapterCheck(what, assumed, seen, differs))

    def _check_time(self, what: str, most_s: float, seen_s: float, came: bool = True) -> None:
        seen = f"after {seen_s:.0f} s" if came else f"not yet after {seen_s:.0f} s"
        self._check(what, f"within {most_s:.0f} s", seen, seen_s > most_s)

    def _check_price(self, live: Machine) -> None:
        offered, billed = self._plan.offer.bound_usd_h, live.price_usd_h
        differs = billed > 0 and abs(billed - offered) > _PRICE_SLACK * offered
        seen = f"{billed:.4f} $/h" if billed else "not stated"
        self._check("price of the machine", f"{offered:.4f} $/h", seen, differs)

    def _check_unknown(self, machine: MachineId) -> None:
        """Ask for a machine that does not exist, whose id looks like a real one."""
        name, cut, place = machine.partition(".")  # at some markets the id has a zone, which stays
        unknown = MachineId(name.translate(_MIRRORED) + cut + place)
        if unknown == machine:
            return
        try:
            found = self._provider.find(unknown)
        except TorporError as error:
            self._check("an unknown machine", "absent", f"{type(error).__name__}: {error}", True)
        else:
            absent = isinstance(found, Absent)
            seen = (found.proof or "absent") if isinstance(found, Absent) else str(found.state)
            self._check("an unknown machine", "absent", seen, not absent)

    def _check_inside(self, inside: Inside) -> None:
        offer = self._plan.offer
        gpus = [parse_gpu(line.split(",")[0]) for line in inside.gpus]
        models = [gpu.model if gpu else "" for gpu in gpus]
        wanted = [offer.gpu.model] * offer.gpu_count if offer.gpu else []
        self._check(
            "GPUs",
            f"{offer.gpu_count} x {offer.gpu}" if offer.gpu else "none",
            "; ".join(inside.gpus) or "none",
            models != wanted,
        )
        version = re.search(r"(\d+)\.(\d+)", inside.python)
        known = version is not None and (int(version[1]), int(version[2])) >= _PYTHON
        self._check("Python", "3.10 or newer", inside.python or "none", not known)
        self._check("umask", "0022", inside.umask, inside.umask not in ("0022", "022", "22"))
        self._check("system", "named", inside.system, not inside.system)
        names = ", ".join(inside.variables)
        self._check("environment", "named", names, not names)

    # -- rentals

    def _order(self, offer: Offer, label: Label) -> Order:
        order = order_for(offer, label, self._identity, self._plan.want)
        return msgspec.structs.replace(order, lifetime_s=self._plan.lifetime_s)

    def _create(self, order: Order) -> Machine:
        """Ask for a machine once. Whatever may exist afterwards is among the rentals."""
        rental = asked(self._provider, order)
        self._note(rental)
        try:
            machine = self._provider.create(order)
        except _NOTHING_RENTED:
            self._note(rental, state="ended")
            raise
        except BaseException:
            self._note(rental, created_unix=time.time())
            raise
        self._note(rental, state="standing", machine=machine.id)
        return machine

    def _note(self, rental: Rental, **changes: object) -> None:
        rental = msgspec.structs.replace(rental, **changes)
        self._tell(rental)
        if rental.state == "ended":
            self._rentals.pop(rental.label, None)
        else:
            self._rentals[rental.label] = rental

    def _nap_and_look(self, label: Label, seconds: float) -> None:
        """Sleep, and note when the market lists the machine. Markets limit requests."""
        if self._clock() >= self._next_list_s:
            self._next_list_s = self._clock() + max(_LIST_S, self._able.poll_s)
            self._look_at_list(label)
        self._nap(seconds)

    def _look_at_list(self, label: Label) -> None:
        if self._listed_s is None:
            with suppress(ProviderError):  # the next look sees it
                if listed(self._provider, label) is not None:
                    self._listed_s = self._since_order_s()

    def _since_order_s(self) -> float:
        return 0.0 if self._began_s is None else self._clock() - self._began_s

    def _cost_usd(self) -> float:
        """The cost until now, by the offer's price; 0 where no machine was rented."""
        if not any(check.what == "answer to the order" for check in self._checks):
            return 0.0
        hours = self._since_order_s() / 3600
        return self._plan.offer.bound_usd_h * billed_s(hours, self._able) / 3600
