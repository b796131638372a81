"""Commands about machines."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from cyclopts import Parameter

from deployments.terminal import say
from torpor.shared.errors import InvalidInput
from torpor.shared.values import WantChange
from torpor_cli import programs, sleeping
from torpor_cli.flow_runs import Format, Options, run
from torpor_cli.output import print_report, print_rows, quiet
from torpor_cli.question import ask_to_rent, offers_of
from torpor_cli.server import connected

Flag = Annotated[bool, Parameter(negative=())]
Several = Annotated[list[str] | None, Parameter(negative=())]


def offers(
    workspace: str,
    *,
    snapshot: str = "newest",
    most: int = 20,
    gpu: str = "",
    region: Several = None,
    options: Format | None = None,
) -> None:
    """Show what fits a workspace and what it costs, the best first. Rents nothing.

    Args:
        workspace: The workspace.
        snapshot: The snapshot to wake there.
        most: How many offers to show.
        gpu: The GPUs, in order of preference, such as "RTX 4090, L40S", H100:8 or 24GB+, where they
            are not to be the workspace's.
        region: A region, where it is not to be the workspace's. May be repeated.
    """
    chosen = options or Format()
    with connected():
        from tasks.progress import doing

        with quiet(chosen.json), doing("asking the markets for machines"):
            found = offers_of(workspace, snapshot, change=WantChange(gpu, region or []))
        if chosen.json:
            print_report(found, as_json=True)
        else:
            print_rows(found.rows()[:most], found.title(), wide=chosen.wide)


def wake(
    workspace: str,
    *,
    snapshot: str = "newest",
    machine: str = "",
    count: int = 1,
    gpu: str = "",
    region: Several = None,
    sleep_after: sleeping.After = None,
    yes: Flag = False,
    accept_path: Several = None,
    options: Options | None = None,
) -> None:
    """Restore a workspace on a new machine, after a question that names the price.

    Args:
        workspace: The workspace.
        snapshot: The snapshot, as `torpor snapshots` names it.
        machine: user@host:port of a machine of your own. Nothing is rented then.
        count: How many machines to restore it on.
        gpu: The GPUs, in order of preference, such as "RTX 4090, L40S", H100:8 or 24GB+, where they
            are not to be the workspace's.
        region: A region to rent in, where it is not to be the workspace's. May be repeated.
        sleep_after: Hibernate its machines after so long without work, such as 30m, now and after
            each wake. The schedule of watch does it; where that is off, you are asked.
        yes: Do not ask.
        accept_path: A directory of the snapshot that the block does not name, to restore all the
            same. May be repeated.
    """
    if count < 1 or (machine and count > 1):
        raise InvalidInput(
            "--count is the number of machines to rent, 1 or more, without --machine"
        )
    if machine and sleep_after is not None:
        raise InvalidInput("--sleep-after is for a rented machine: torpor ends none of your own")
    agreed_usd_h = None
    if sleep_after is not None or not (machine or yes):
        with connected():
            saves = sleeping.sleep_after(workspace, sleep_after, asks=not yes)
            if not yes:
                change = WantChange(gpu, region or [])
                wide = _wide(options)
                agreed_usd_h = ask_to_rent(
                    workspace, snapshot, count, starts=count == 1, change=change, wide=wide
                )
            saves()
    given: dict[str, Any] = {"workspace": workspace, "snapshot": snapshot}
    given |= {"agreed_usd_h": agreed_usd_h}
    given |= {"accept_paths": accept_path or [], "gpu": gpu, "regions": region or []}
    if count == 1:
        report = run("wake", options, machine=machine, **given)
    else:
        report = run("replicate", options, count=count, **given)
    if not machine and count == 1:
        _say_login(report, workspace, options)


def create(
    workspace: str,
    *,
    gpu: str = "",
    region: Several = None,
    sleep_after: sleeping.After = None,
    yes: Flag = False,
    options: Options | None = None,
) -> None:
    """Rent an empty machine for a workspace without a snapshot, after a question with the price.

    Args:
        workspace: The workspace.
        gpu: The GPUs, in order of preference, where they are not to be the workspace's.
        region: A region to rent in, where it is not to be the workspace's. May be repeated.
        sleep_after: Hibernate its machines after so long without work, such as 30m, now and after
            each wake. The schedule of watch does it; where that is off, you are asked.
        yes: Do not ask.
    """
    agreed_usd_h = None
    if sleep_after is not None or not yes:
        with connected():
            saves = sleeping.sleep_after(workspace, sleep_after, asks=not yes)
            if not yes:
                change = WantChange(gpu, region or [])
                agreed_usd_h = ask_to_rent(
                    workspace, "newest", 1, starts=True, change=change, wide=_wide(options)
                )
            saves()
    report = run(
        "create",
        options,
        workspace=workspace,
        gpu=gpu,
        regions=region or [],
        agreed_usd_h=agreed_usd_h,
    )
    _say_login(report, workspace, options)


def hibernate(
    workspace: str,
    *,
    machine: str = "",
    keep: Flag = False,
    accept_changed: Several = None,
    accept_lost: Several = None,
    dry_run: Flag = False,
    options: Options | None = None,
) -> None:
    """Store a workspace, verify it, and destroy its machine. What you wrote in a home beside the
    workspace is named, and at a terminal you are asked before it is lost; elsewhere it is stored
    as home--WORKSPACE, or keeps the machine.

    Args:
        workspace: The workspace.
        machine: The machine, as its id or user@host:port, where there are several.
        keep: Keep the machine.
        accept_changed: A pattern of files that may change meanwhile. May be repeated.
        accept_lost: A directory or file that may be lost with the machine; '~/*' for whatever was
            written in a home. May be repeated.
        dry_run: Store and end nothing. Only say what would be stored and what left behind, which
            programs would be frozen, and what is saved.
    """
    run(
        "hibernate",
        options,
        asks=True,
        workspace=workspace,
        machine=machine,
        destroy=not keep and "@" not in machine,
        accept_changed=accept_changed or [],
        accept_lost=accept_lost or [],
        dry_run=dry_run,
    )


def ssh(
    workspace: str = "",
    *command: str,
    machine: str = "",
    setup: Flag = False,
    refresh: Flag = False,
) -> None:
    """Log in to a workspace's machine with the right key and its pinned host key.

    torpor ssh mywork -- nvidia-smi

    Args:
        workspace: The workspace.
        command: A command to run there instead of a shell.
        machine: The machine's id, where there are several.
        setup: Add one line to ~/.ssh/config, so that `ssh`, `scp`, `rsync` and editors know the
            names of all workspaces, also after the next wake.
        refresh: Write where the machine is now, and do not log in. OpenSSH asks for it.
    """
    from torpor_cli import logins

    program = programs.found("ssh") or ""
    if not (setup or refresh or program):
        raise InvalidInput(logins.NO_SSH)
    if workspace and not (setup or refresh or machine) and (file := logins.current(workspace)):
        _log_in(program, file, workspace, command)
    with connected():
        if setup:
            logins.set_up()
            return
        if not workspace:
            raise InvalidInput("name a workspace: `torpor ssh mywork`, or use --setup")
        if refresh:
            logins.refresh_quietly(workspace)
            return
        file = logins.refresh(workspace, machine)
    _log_in(program, file, workspace, command)


def _log_in(program: str, file: Path, workspace: str, command: Sequence[str]) -> NoReturn:
    sys.stdout.flush()
    argv = ["ssh", "-F", str(file), workspace, *command]
    os.execv(program, argv)  # noqa: S606 - the user's own OpenSSH takes over, terminal and all


def deploy(
    workspace: str,
    stack: str,
    *,
    strategy: Literal["official", "setup", "own", "stored"] = "stored",
    snapshot: str = "newest",
    yes: Flag = False,
    options: Options | None = None,
) -> None:
    """Start a server on a workspace's machine, or on a new one, and wait until it answers.

    Args:
        workspace: The workspace.
        stack: The stack, such as vllm or ollama.
        strategy: How the software gets onto the machine: with the official image, by the setup
            command at each start, with an image of your own, or from the store.
        snapshot: The snapshot for a new machine.
        yes: Rent a new machine without a question.
    """
    agreed_usd_h = None
    if not yes:
        with connected():
            from flows.procedures.listing import list_logins

            if not list_logins(workspace):  # the flow makes the same look
                agreed_usd_h = ask_to_rent(
                    workspace, snapshot, 1, starts=False, wide=_wide(options)
                )
    run(
        "deploy",
        options,
        workspace=workspace,
        stack=stack,
        strategy=strategy,
        snapshot=snapshot,
        agreed_usd_h=agreed_usd_h,
    )


def spend(workspace: str, *, months: int = 12, options: Options | None = None) -> None:
    """Show what machines and storage cost, by month.

    Args:
        workspace: A workspace in whose store to look.
        months: How many months to show, with this one.
    """
    run("spend", options, workspace=workspace, months=months)


def reconcile(
    workspace: str,
    *,
    end: Several = None,
    left: Several = None,
    gone: Several = None,
    abandoned: Flag = False,
    options: Options | None = None,
) -> None:
    """Compare rentals with the machines at all markets, and end what is named.

    Args:
        workspace: The workspace.
        end: The id of a machine to end. May be repeated.
        left: The id of a machine that a killed run left. May be repeated.
        gone: The id of a rental whose machine is gone for certain. May be repeated.
        abandoned: Also end attempts that failed, if a machine of theirs shows.
    """
    run(
        "reconcile",
        options,
        workspace=workspace,
        end=end or [],
        left=left or [],
        gone=gone or [],
        abandoned=abandoned,
    )


def _wide(options: Options | None) -> bool:
    return options is not None and options.wide


def _say_login(report: Any, workspace: str, options: Options | None) -> None:
    if report is None or (options and options.json):  # detached, or output for a program
        return
    from torpor_cli import logins

    if logins.is_set_up():
        try:
            logins.refresh_quietly(workspace)  # so that the first `ssh` need not look
        except Exception as error:  # noqa: BLE001 - the machine is rented, and `ssh` looks itself
            say(f"torpor: warning: `ssh {workspace}` is slow once: {error}", sys.stderr)
    say(f"log in: {logins.command_for(workspace)}")
    if not logins.has_ssh():
        say(f"torpor: warning: {logins.NO_SSH}", sys.stderr)
