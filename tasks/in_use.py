"""What a workspace still has for which its block is needed: machines and jobs."""

from __future__ import annotations

from tasks.market_look import listed, open_rentals
from tasks.runner import runner
from tasks.workspace import OpenWorkspace
from torpor.control.store.records import Unread, named
from torpor.shared.values import names_of


def in_use(opened: OpenWorkspace) -> list[str]:
    """The workspace's machines, rentals and unfinished jobs, in words; empty where it certainly has
    none. What is unknown counts as in use, with one exception: a market that does not answer and is
    not one of the workspace's is a warning. TorporError where the workspace's store does not
    answer."""
    unread = Unread()
    rentals = open_rentals(opened, unread)
    jobs = opened.jobs.open(unread)
    found = [
        f"machine {one.machine or 'not named yet'} at {one.provider} ({one.state})"
        for one in rentals
    ]
    found += [f"job {one.id} ({one.state})" for one in jobs]
    if why := named(unread):
        found.append(f"records that cannot be believed: {why}")
    there, silent = listed(opened.markets.every(), rentals)
    names = {*names_of(opened.spec.name)}
    known = {one.machine for one in rentals}
    found += [
        f"machine {machine.id} at {market} ({machine.state}), which no open rental names"
        for market, (machines, _) in there.items()
        for machine in machines
        if machine.label is not None
        and machine.label.workspace in names
        and machine.id not in known
    ]
    own = {provider.identity for provider in opened.providers}
    for market, error in silent.items():
        if market in own:
            found.append(f"machines at {market}, perhaps: it does not answer ({error})")
        else:
            runner().log.warning("%s was left out: %s", market, error)
    return found
