"""Waiting for a machine until SSH answers on it."""

from __future__ import annotations

import math
import random
import socket
import time
from collections.abc import Callable

from torpor.control.providers.labels import label_name
from torpor.control.providers.provider import Absent, Provider
from torpor.shared.errors import (
    CreateFailed,
    MachineUnreachable,
    ProviderDenied,
    ProviderError,
    TorporError,
)
from torpor.shared.values import Endpoint, Label, Machine, MachineId

_FIRST_WAIT_S = 0.05  # seconds between two questions to the provider
_LONGEST_WAIT_S = 4.0  # seconds; markets limit requests
_GROWTH = 1.6
_GREETING_WAIT_S = 0.5  # seconds between two tries at SSH, which no market counts
_BANNER_S = 5.0
_BANNER_BYTES = 8 << 10  # RFC 4253 lets a server send other lines before its version


def wait_until_reachable(
    provider: Provider,
    machine: MachineId,
    *,
    timeout_s: float,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
    greets: Callable[[Endpoint], str | None] | None = None,
    told: Callable[[str], None] = lambda words: None,
    queued: Callable[[], None] = lambda: None,
    label: Label | None = None,
) -> Machine:
    """The machine once it runs and its SSH server has said its version.

    CreateFailed when it dies meanwhile, or runs for ``abilities.address_s`` without an address: try
    the next offer. ProviderDenied at once when the login is refused, as after a key was revoked. A
    machine that the provider does not show is waited for, also with a proof of its end while the
    provider settles. MachineUnreachable when ``timeout_s`` is over, with what was seen last.
    ``greets`` returns None or what went wrong.
    ``timeout_s`` begins again where the machine leaves the provider's queue, in which it may wait
    for ``abilities.queue_s``; ``told`` hears why
    the machine waits there, each time that this changes; ``queued`` is called at each look that
    shows it there. With ``label``, a machine that does not show it is not handed out: torpor could
    never end it.
    """
    greets = greets or ssh_banner_fault
    end = clock() + timeout_s
    queue_end = clock() + provider.abilities.queue_s
    words = ""
    settled = clock() + provider.abilities.settling_s
    able = provider.abilities
    wait_s = max(_FIRST_WAIT_S, able.poll_s)
    bare_since = math.inf
    while True:
        seen = _look(provider, machine, clock() < settled, label)
        if isinstance(seen, Machine) and seen.state == "queued":
            end = clock() + timeout_s
            queued()
            if seen.note != words:
                words = seen.note
                told(f"machine {machine} at {provider.identity} is {words}")
            seen = words
            if clock() >= queue_end:
                end = clock()
        if isinstance(seen, Machine) and seen.endpoint is None:
            bare_since = min(bare_since, clock())
            seen = f"it runs without an address for SSH: {seen.note}"
            if able.address_s is not None and clock() >= bare_since + able.address_s:
                raise CreateFailed(f"machine {machine} at {provider.identity} is of no use: {seen}")
        elif not isinstance(seen, TorporError):  # these errors say nothing of an address
            bare_since = math.inf
        look_again = min(clock() + wait_s * random.uniform(0.75, 1.25), end)  # noqa: S311
        wait_s = max(able.poll_s, min(wait_s * _GROWTH, _LONGEST_WAIT_S))
        while True:
            if isinstance(seen, Machine) and seen.endpoint is not None:
                fault = greets(seen.endpoint)
                if fault is None:
                    return seen
            else:
                fault = str(seen)
            if clock() >= end:
                raise MachineUnreachable(
                    f"machine {machine} at {provider.identity} was not reachable by SSH within "
                    f"{timeout_s:.0f} s: {fault}"
                )
            if clock() >= look_again:
                break
            most_s = _GREETING_WAIT_S if isinstance(seen, Machine) else _LONGEST_WAIT_S
            sleep(max(0.0, min(most_s, look_again - clock())))


def ssh_banner_fault(endpoint: Endpoint) -> str | None:
    """None when an SSH server greets at ``endpoint``, otherwise what went wrong."""
    told = f"{endpoint.host} port {endpoint.port}"
    try:
        with socket.create_connection((endpoint.host, endpoint.port), _BANNER_S) as link:
            heard = b""
            until = time.monotonic() + _BANNER_S
            while len(heard) < _BANNER_BYTES and time.monotonic() < until:
                more = link.recv(1024)
                heard += more
                if any(line.startswith(b"SSH-") for line in heard.split(b"\n")):
                    return None
                if not more:
                    break
    except OSError as cause:
        return f"{told}: {cause}"
    return f"{told} does not speak SSH: it said {heard[:80]!r}"


def _look(
    provider: Provider, machine: MachineId, in_settling: bool, label: Label | None
) -> Machine | TorporError | str:
    """The machine once it runs, or waits in a queue; why the provider cannot be asked; or what is
    still missing. CreateFailed when waiting is in vain, ProviderDenied when no later look will be
    answered."""
    try:
        live = provider.find(machine)
    except ProviderDenied as cause:
        raise ProviderDenied(
            f"machine {machine} at {provider.identity} is not waited for any longer: {cause}"
        ) from cause
    except (MachineUnreachable, ProviderError) as cause:
        return cause
    if isinstance(live, Absent):
        if not live.proof or in_settling:
            return "the provider does not show it"
        raise CreateFailed(
            f"machine {machine} at {provider.identity} ended before SSH answered: {live.proof}"
        )
    if live.state in ("stopping", "stopped"):
        words = f": {live.note}" if live.note else ""
        raise CreateFailed(
            f"machine {machine} at {provider.identity} is {live.state} before SSH answered{words}"
        )
    if live.state == "queued" or (live.state == "running" and live.endpoint is None):
        return live
    if live.state != "running":
        return f"it is {live.state} {live.note}".strip()
    if label is not None and live.label != label:
        return (
            f"the provider does not show the label {label_name(label)} on it, so torpor cannot end "
            "it: if that stays so, end it in the provider's console"
        )
    return live
