"""Rents a market's cheapest machine for `torpor smoke`, and says what differs from its adapter.

Each exchange with the market is kept in a folder, without secrets. A second process ends the
machine if this one cannot.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import cast

import asyncssh
import msgspec
from prefect.blocks.core import Block
from prefect.types import SecretDict
from pydantic import SecretStr

from blocks import PROVIDERS, ObjectStore
from blocks.reference import load
from deployments.installation import secret_file
from deployments.smoke_sleep import PATH, ToldProvider, sleep_and_wake
from tasks.workspace import OpenWorkspace
from torpor.control.measure.scratch import scratch_name
from torpor.control.own_server import state_folder
from torpor.control.providers.market_client import observed
from torpor.control.providers.provider import Provider
from torpor.control.remote.ssh import Identity
from torpor.control.rental.records import Rental
from torpor.control.smoke.login import SshDoor
from torpor.control.smoke.plan import MAX_USD, MINUTES, SmokePlan, make_plan
from torpor.control.smoke.recording import PLAN, Recorder
from torpor.control.smoke.redact import Redactor
from torpor.control.smoke.trial import OWNER, SmokeReport, SmokeTrial
from torpor.control.smoke.watchdog import Watchdog, end_left
from torpor.shared.errors import EndUnproven, InvalidInput, RunCancelled, TorporError
from torpor.shared.format.keys import workspace_key
from torpor.shared.values import WorkspaceSpec, workspace_name


def smoke(
    reference: str,
    *,
    max_usd: float = MAX_USD,
    minutes: float = MINUTES,
    gpu: str = "",
    store: str = "",
    agree: Callable[[SmokePlan], None],
    say: Callable[[str], None] = print,
) -> SmokeReport:
    """Run the test. ``agree`` sees the plan before anything is rented, and raises to stop.
    ``store``: an Object Store block, through which a workspace is hibernated and woken then.

    EndUnproven where the machine's end is not proven: the watchdog goes on.
    """
    block = load(reference, PROVIDERS, of="")
    state = state_folder() / "smoke"
    for words in end_left(state):
        say(words)
    key = secret_file(state / "ssh_key", _new_key) + "\n"
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    market = block.get_block_type_slug().removesuffix("-provider")
    rentals = secrets.token_hex(8), secrets.token_hex(8)
    folder = state / f"{market}-{stamp}-{rentals[1][:4]}"
    record = Recorder(folder, Redactor([*_secrets(block), key]))
    with observed(record):
        provider = block.open()
    kept_in = load(store, (ObjectStore,), of="--store") if store else None
    machines = (
        1 if kept_in is None else 3
    )  # one each for the trial, for the hibernation, and for the wake
    plan = make_plan(provider, max_usd=max_usd, minutes=minutes, gpu=gpu, machines=machines)
    agree(plan)
    identity = Identity(key)
    record.keep(PLAN, {"plan": plan.without_account(), "rentals": rentals})
    told = [reference, provider.identity, f"{machines * minutes * 60:g}"]
    argv = [sys.executable, "-m", "deployments.smoke_watchdog", *told]
    watchdog = Watchdog(argv, folder / "watchdog.log")
    say(f"recording   {folder}")
    say(f"watchdog    process {watchdog.pid} ends the machine if this command cannot")

    def tell(rental: Rental) -> None:
        watchdog.tell(rental)
        machine = f", machine {rental.machine}" if rental.machine else ""
        say(f"rental      {rental.label.rental} of offer {rental.offer}: {rental.state}{machine}")

    trial = SmokeTrial(provider, plan, identity.load(), SshDoor(identity), tell, rentals)
    try:
        report = trial.run()
        if kept_in is None or report.fault:
            return report
        opened = _workspace(provider, watchdog, kept_in, identity, plan, rentals[1])
        return _with_sleep(report, opened, plan)
    except TorporError as error:
        raise _unended(error, watchdog) from error
    finally:
        watchdog.close()
        with suppress(OSError):
            record.keep("report", trial.report())


def _workspace(
    provider: Provider,
    watchdog: Watchdog,
    store: ObjectStore,
    identity: Identity,
    plan: SmokePlan,
    name: str,
) -> OpenWorkspace:
    """A workspace for this test only, whose name no user's workspace has."""
    of = scratch_name(workspace_name(f"smoke-{name}"))
    want = msgspec.structs.replace(plan.want, max_price_usd_h=plan.offer.bound_usd_h)
    key = store.key()
    return OpenWorkspace(
        spec=WorkspaceSpec(of, [PATH], want=want),
        store=store.open(),
        sealing=None if key is None else workspace_key(key, of),
        providers=(cast(Provider, ToldProvider(provider, watchdog.tell, plan.lifetime_s)),),
        identity=identity,
        owner=OWNER,
    )


def _with_sleep(report: SmokeReport, opened: OpenWorkspace, plan: SmokePlan) -> SmokeReport:
    checks, began, fault = [*report.checks], time.monotonic(), ""
    try:
        sleep_and_wake(opened, checks.append)
    except TorporError as error:
        fault = (
            f"{error}. The watchdog ends the machine. The store keeps what the test wrote, below "
            f"workspaces/{opened.spec.name}/"
        )
    usd = plan.offer.bound_usd_h * (time.monotonic() - began) / 3600
    return msgspec.structs.replace(report, checks=checks, fault=fault, usd=report.usd + usd)


def _unended(error: TorporError, watchdog: Watchdog) -> EndUnproven:
    is_accepted = isinstance(error, EndUnproven) and error.accepted
    told = EndUnproven(
        f"ending: the market has accepted it, and carries it out. {error}. Leave process "
        f"{watchdog.pid} running: it notes the proof in {watchdog.log}"
        if is_accepted
        else f"{error}. Process {watchdog.pid} goes on trying to end the machine: {watchdog.log}"
    )
    told.accepted = is_accepted
    return told


def _new_key() -> str:
    return asyncssh.generate_private_key("ssh-ed25519").export_private_key().decode()


def _secrets(block: Block) -> list[str]:
    values = [getattr(block, name) for name in type(block).model_fields]
    found = [value.get_secret_value() for value in values if isinstance(value, SecretStr)]
    variables = [value.get_secret_value() for value in values if isinstance(value, SecretDict)]
    return found + [text for of in variables for text in of.values()]


def ask(plan: SmokePlan) -> None:
    """InvalidInput if nobody can answer, RunCancelled after a no."""
    asked = f"Rent it? It costs {plan.worst_usd:.4f} $ at most."
    if not sys.stdin.isatty():
        raise InvalidInput(f"{asked} Nobody is at the terminal to answer: add --yes")
    if input(f"{asked} [y/N] ").strip().lower() not in ("y", "yes"):
        raise RunCancelled("nothing was rented")
