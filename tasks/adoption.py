"""The steps of adopt: find the machine, log in, record it and mark it, or give the machine up."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

import asyncssh
import msgspec

from tasks.autosave import ask_to_end
from tasks.machines import endpoint_of, machines_of, session_with
from tasks.retries import ONCE
from tasks.runner import runner
from tasks.step import step
from tasks.workspace import OpenWorkspace
from tasks.workspace_blocks import open_all
from torpor.control.money.storage import look
from torpor.control.providers.provider import Absent, Adopts, Provider
from torpor.control.remote.agent import Session
from torpor.control.rental.adoption import (
    adopted_before,
    check_asleep,
    check_free,
    provider_of,
    usable,
)
from torpor.control.rental.markets import recall
from torpor.control.rental.records import Rental, Rentals
from torpor.shared.errors import HostKeyChanged, InvalidInput, ProviderUnavailable, TorporError
from torpor.shared.values import Label, Machine

_SHOWN_S: Final = (0.0, 1.0, 2.0, 4.0, 8.0)
"""The waits in seconds before the looks for a mark that was just made: a market may list the mark
late."""


@dataclass(frozen=True)
class Adoptable:
    """A machine that its user may give to torpor. ``rental``: of an earlier adoption, which may
    have stopped half-way."""

    provider: Provider
    machine: Machine
    price_usd_h: float
    rental: Rental | None
    ledgers: tuple[Rentals, ...]  # records in which the machine may be another workspace's


@step("find machine to adopt")
def find_adoptable(opened: OpenWorkspace, wanted: str, price_usd_h: float) -> Adoptable:
    """The machine that ``MARKET:ID`` or ``BLOCK:ID`` names. NotOurs where it is not in the account,
    or is a rental of torpor; UnsafeDestroy where it does not run; WorkspaceAwake where the
    workspace is on another one. Changes nothing."""
    markets = opened.markets
    provider, machine = provider_of(wanted, opened.each(), markets.named, markets.every())
    ledgers = _ledgers(opened, provider)
    mine = opened.rentals.open()
    own = adopted_before(mine, provider, machine)
    recall([provider], mine)
    live = usable(provider, machine, own)
    check_free(ledgers, provider, machine, own)
    check_asleep(mine, machines_of(opened).machines, live, own)
    price = price_usd_h or (own.price_usd_h if own else live.price_usd_h)
    if price <= 0:
        raise InvalidInput(
            f"{provider.identity} does not state what machine {machine} costs: state it, in "
            "dollars an hour, with --price"
        )
    return Adoptable(provider, live, price, own, ledgers)


@step("log in to adopt", phase="connect", retries=ONCE)
def log_in_to_adopt(opened: OpenWorkspace, found: Adoptable, host_key: str) -> tuple[Session, str]:
    """A session, and the host key that the machine has shown. HostKeyChanged where that is not the
    recorded one, the market's, or ``host_key``; MachineDenied, with what to do, where the
    workspace's key may not log in."""
    endpoint = endpoint_of(found.machine)
    recorded = found.rental.host_key if found.rental else endpoint.host_key
    if recorded and host_key and _key(recorded) != _key(host_key):
        raise HostKeyChanged(
            f"machine {found.machine.id} has the recorded host key {fingerprint(recorded)}, and "
            f"you expect {fingerprint(host_key)}: nothing was sent to it. Give the adoption up "
            "with --release if you set the machine up again"
        )
    known, seen = recorded or host_key or None, list[str]()
    session = opened.log_in(
        msgspec.structs.replace(endpoint, host_key=known), opened.identity, pin=seen.append
    )
    return session, _key(known) if known else seen[0]


@step("record adoption", retries=ONCE)
def record_adoption(opened: OpenWorkspace, found: Adoptable, host_key: str) -> Rental:
    """Write the rental, before anything is changed at the market: if the run is killed afterwards,
    the machine is on record as one that holds work."""
    if (before := found.rental) is not None:
        if before.price_usd_h == found.price_usd_h:
            return before
        return opened.rentals.change(before, price_usd_h=found.price_usd_h)
    label = opened.rentals.new_label(opened.owner)
    rental = opened.rentals.adopt(
        label, found.machine, host_key, found.price_usd_h, opened.project, opened.spec.want
    )
    try:  # another run may have written the rental meanwhile
        ledgers = (*found.ledgers, opened.rentals)
        check_free(ledgers, found.provider, found.machine.id, rental)
        check_asleep(opened.rentals.open(), (), found.machine, rental)
    except Exception:
        opened.rentals.change(rental, state="ended", why="another run uses it: nothing was marked")
        raise
    return rental


def _ledgers(opened: OpenWorkspace, provider: Provider) -> tuple[Rentals, ...]:
    """The rentals of all workspaces in the store. Where the market shows no mark, those in the
    stores of all saved Workspace blocks, too; InvalidInput if one of these cannot be opened."""
    stores = {opened.store.address: opened.store}
    if provider.abilities.adopts == "by record":
        others, closed = open_all(runner().workspaces())
        for block, error in closed.items():
            raise InvalidInput(
                f"nobody can say whether workspace {block} has adopted the machine, because its "
                f"block cannot be used ({error}): correct it, or delete the block"
            )
        stores |= {one.store.address: one.store for one in others.values()}
    return tuple(Rentals(store, name) for store in stores.values() for name in look(store))


def set_mark(provider: Provider, machine: Machine, label: Label | None) -> None:
    """Mark the machine at its market, or take the mark off, and check that the market shows the
    change."""
    if not isinstance(provider, Adopts):
        raise InvalidInput(
            f"{provider.identity} keeps no label for machine {machine.id}, and torpor adopts only "
            "machines that it can label. `torpor hibernate WORKSPACE --machine USER@HOST` stores "
            "its work and leaves it; `torpor wake WORKSPACE` then rents one that torpor ends"
        )
    provider.mark(machine, label)
    for wait_s in _SHOWN_S:
        time.sleep(wait_s)
        live = provider.find(machine.id)
        if not isinstance(live, Absent) and live.label == label:
            return
    raise ProviderUnavailable(
        f"{provider.identity} does not show the changed mark of machine {machine.id} yet: run "
        "`torpor adopt` again. If that stays so, change its label in the market's console"
    )


mark_adopted = step("mark machine")(set_mark)


@step("end its own saves", retries=ONCE)
def end_saves(opened: OpenWorkspace, rental: Rental) -> list[str]:
    """End the own saves of a machine that is given up; a warning if that fails, because the machine
    has the workspace's key and grants for up to twelve hours."""
    provider = opened.markets.of(rental.provider)
    recall([provider], [rental])
    try:
        live = Absent() if rental.machine is None else provider.find(rental.machine)
        if not isinstance(live, Machine) or live.state != "running":
            return []
        named = msgspec.structs.replace(live, label=rental.label)
        with session_with(opened, named) as session:
            ask_to_end(opened, session)
    except TorporError as error:
        words = (
            f"machine {rental.machine} could not be told to end its own saves, and may write "
            f"snapshots of the workspace until its grants end, within twelve hours: {error}"
        )
        runner().log.warning("%s", words)
        return [words]
    return []


@step("give up machine")
def give_up(opened: OpenWorkspace, rental: Rental) -> None:
    """Take the mark off, then close the rental. The machine is left as it is, and runs on."""
    provider = opened.markets.of(rental.provider)
    recall([provider], [rental])
    live = Absent() if rental.machine is None else provider.find(rental.machine)
    if isinstance(live, Machine) and live.state == "stopping":
        raise InvalidInput(
            f"machine {live.id} is being ended ({live.note or 'its market says so'}): it was not "
            "given up"
        )
    if isinstance(live, Machine) and live.label == rental.label:
        set_mark(provider, live, None)
    why = "its user has given the adoption up: the machine was left alone"
    # the rental holds no snapshot any more: the disk of the machine changes again
    opened.rentals.change(rental, state="ended", why=why, snapshot=None)


def fingerprint(host_key: str) -> str:
    """The fingerprint of a public key as OpenSSH shows it, SHA256:... InvalidInput for text that is
    not a public key."""
    try:
        return asyncssh.import_public_key(host_key).get_fingerprint()
    except (asyncssh.KeyImportError, ValueError):
        raise InvalidInput(
            f"{host_key[:80]!r} is no OpenSSH public key: give the line of a file "
            "ssh_host_*_key.pub of the machine, ssh-ed25519 AAAA..."
        ) from None


def _key(host_key: str) -> str:
    """A public key line without its comment."""
    fingerprint(host_key)
    return " ".join(host_key.split()[:2])
