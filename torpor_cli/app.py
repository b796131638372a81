"""The command line: its commands, and how errors end it.

A command's module imports Prefect only when the command runs: `torpor --help` answers at once.
"""

from __future__ import annotations

import gc
import inspect
import os
import shlex
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Final

from cyclopts import (
    App,
    CycloptsError,
    Group,
    Parameter,
    UnknownCommandError,
    UnknownOptionError,
)

from deployments.terminal import say
from torpor.shared.plain_text import short
from torpor_cli import (
    adoption,
    connecting,
    copying,
    deletion,
    forwarding,
    installation,
    jobs,
    machines,
    recovery,
    running,
    settings,
    setup,
    smoke,
    snapshots,
    status,
    store_keys,
    top,
)
from torpor_cli.exit_codes import INTERRUPTED, WRONG_USE, explained

HELP: Final = """Hibernate rented GPU machines into object storage, and wake them anywhere.

`torpor up` starts everything on this host. `torpor init` makes a workspace:
the directories to keep, their bucket, and the market to rent at. `torpor run`
runs a command of the folder that you are in on a rented machine.
Exit codes: 0 done, 1 failed, 2 wrong use, 3 refused because something would
be lost, 130 Ctrl-C.
"""


def _default(value: Any) -> str | None:
    """What the help shows as an option's default: nothing of a switch that is off, or of what is
    empty."""
    return None if value is None or value is False or value == "" else str(value)


def _with_whole_paragraphs(command: Callable[..., Any]) -> None:
    """Join the lines of each paragraph of a command's docstring: the help breaks lines where the
    terminal ends, and would keep those of the source too."""
    joined: list[str] = []
    before = ""
    for line in (inspect.getdoc(command) or "").splitlines():
        deeper = len(line) - len(line.lstrip()) > len(before) - len(before.lstrip())
        text = bool(line.strip() and before.strip()) and before != "Args:"
        if text and (deeper or not line.startswith(" ")):
            joined[-1] += f" {line.strip()}"
        else:
            joined.append(line)
            before = line
    command.__doc__ = "\n".join(joined)


app = App(
    name="torpor",
    help=HELP,
    version=lambda: f"torpor {version('torpor')}",
    help_format="plaintext",
    default_parameter=Parameter(show_default=_default),
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)
MACHINES: Final = Group("Machines", sort_key=1)
SNAPSHOTS: Final = Group("Snapshots", sort_key=2)

COMMANDS: Final[dict[Group, tuple[Callable[..., int | None], ...]]] = {
    MACHINES: (
        status.status,
        top.top,
        machines.offers,
        machines.create,
        adoption.adopt,
        machines.wake,
        machines.hibernate,
        machines.ssh,
        copying.cp,
        copying.push,
        copying.pull,
        forwarding.forward,
        forwarding.open_,
        machines.deploy,
        machines.spend,
        machines.reconcile,
    ),
    SNAPSHOTS: (
        snapshots.snapshots,
        snapshots.backup,
        snapshots.restore,
        snapshots.verify,
        snapshots.prune,
    ),
    jobs.JOBS: (running.run,),
    store_keys.HERE: (
        installation.demo,
        installation.up,
        setup.init,
        settings.edit,
        deletion.delete,
        recovery.recover,
        smoke.smoke,
        installation.down,
        installation.boot,
        connecting.connect,
        connecting.disconnect,
    ),
}
for group, commands in COMMANDS.items():
    for command in commands:
        _with_whole_paragraphs(command)
        app.command(command, group=group)
for command in (jobs.run_, jobs.list_, jobs.status, jobs.log, jobs.approve, jobs.cancel):
    _with_whole_paragraphs(command)
app.command(jobs.job)
app.command(store_keys.store)
PASSING_ON: Final = (("ssh",), ("job", "run"), ("run",))
"""Commands that pass on words of the command line to a machine."""
app.register_install_completion_command(
    name="completion",
    group=store_keys.HERE,
    help="Write a script for your shell, so that the Tab key completes commands and options.",
)


def main() -> None:
    """Run the command that the arguments name, and end the process with its exit code."""
    code = 0
    try:
        code = _run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    gc.freeze()  # otherwise Python searches all imported objects for garbage as it ends, for 0.3 s
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    for argument in arguments:
        if not _is_text(argument):
            shown = os.fsencode(argument).decode(errors="backslashreplace")
            say(
                f"torpor: the argument {shown} is no UTF-8, and commands and names are sent and "
                "kept as text: rename the file, or put the command into a script with a name in "
                "UTF-8",
                sys.stderr,
            )
            return WRONG_USE
    if os.environ.get("NO_COLOR"):
        from rich.console import Console  # cyclopts' own console writes in bold all the same

        app.console = Console(color_system=None)
    try:
        _check_words(arguments)
        return app(arguments, exit_on_error=False, print_error=False) or 0
    except CycloptsError as error:
        chain = tuple(error.command_chain or ())
        of = (
            "its options"
            if chain and not isinstance(error, UnknownCommandError)
            else "the commands"
        )
        says = f"`{' '.join(['torpor', *chain, '--help'])}` lists {of}."
        if chain in PASSING_ON and isinstance(error, UnknownOptionError):
            says = f"Options of the command for the machine follow `--`. {says}"
        say(f"torpor: {str(error).strip()} {says}", sys.stderr)
        return WRONG_USE
    except KeyboardInterrupt:
        print("torpor: interrupted. `torpor status` shows what is awake", file=sys.stderr)
        return INTERRUPTED
    except EOFError:
        print("torpor: the input ended before an answer: nothing was done", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        code, words = explained(error)
        if not words:
            raise
        say(f"torpor: {short(words)}", sys.stderr)
        return code


def _check_words(arguments: list[str]) -> None:
    """CycloptsError for an unknown command before `--help`, which would show another help; and for
    options between or after the words of a command for the machine: nobody could tell whose they
    are."""
    chain, found, rest = app.parse_commands(arguments)
    asks_for_help = [word for word in rest if word in ("--help", "-h")]
    if found[-1].default_command is None:
        if asks_for_help and not rest[0].startswith("-"):
            unknown = [*chain, *(word for word in rest if word not in asks_for_help)]
            app.parse_args(unknown, exit_on_error=False, print_error=False)
        return
    if asks_for_help and "--" not in rest[: rest.index(asks_for_help[0])]:
        return
    _, bound, _ = app.parse_args(arguments, exit_on_error=False, print_error=False)
    words = list(bound.arguments.get("command", ()))
    split = rest.index("--") if "--" in rest else len(rest) - len(words)
    if words and rest[split:] not in (words, ["--", *words]):
        named = "" if chain == ("run",) else "WORKSPACE "
        raise CycloptsError(
            msg=f'Options and "--" stand before the command for the machine: `torpor '
            f"{' '.join(chain)} {named}[OPTIONS] -- {shlex.join(words[:1])} ...`.",
            command_chain=chain,
        )


def _is_text(argument: str) -> bool:
    """False for bytes that are no UTF-8: Python keeps them as lone surrogates."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return True
