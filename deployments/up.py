"""``make up``: a Prefect server, a store, a worker, blocks and deployments, all on this host.

The supervisor starts the server, the store and the workers as its children; blocks and deployments
are registered in between. Everything listens on loopback only. Running it again registers again,
and changes nothing that runs. ``make down`` ends everything.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NoReturn

from deployments import database, parent, server, services, unit, worker
from deployments.api import Api
from deployments.installation import BELIEVE, BELIEVE_HELP, CHECKOUT, Installation
from deployments.processes import last_words, mark
from deployments.server import Server
from deployments.terminal import Waiting, folded, say
from torpor.control.disk_space import full_disks
from torpor.control.front_page import KEY as FRONT_PAGE
from torpor.control.own_server import LOGIN_VARIABLE, announce, state_folder
from torpor.control.processes import ending_with_this_process
from torpor.control.smoke.watchdog import end_left
from torpor.shared.errors import InvalidInput, TorporError

REGISTER_S: Final = 1200.0
"""Seconds that registering may take. 20 to 60 s were measured; the first time it fetches the
agent's wheels."""
LOOK_S: Final = 1.0
UNCONNECTED: Final = "--unconnected"
"""The option with which a person's `make up` refuses to run under `torpor connect`. Units of
systemd and cron do without it: an installation looks after its machines after each boot, whatever
server commands use then."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make up", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, help="the port of the Prefect server; default 4200")
    parser.add_argument(BELIEVE, action="store_true", help=BELIEVE_HELP)
    words = "refuse while `torpor connect` has commands use a server elsewhere; not at boot"
    parser.add_argument(UNCONNECTED, action="store_true", help=words)
    # Units of earlier versions use these two commands, and systemd would otherwise start them again
    # for ever.
    parser.add_argument("--stay", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--started", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.started:
        return 0  # the supervisor that stays registers by itself
    if options.stay:
        stay(options.port)
    try:
        installation = Installation.here()
        if options.unconnected:
            server.see_that_none_is_connected(installation)
        up(installation, options.port, believe=options.believe_records)
    except TorporError as error:
        print(f"torpor: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def up(
    installation: Installation,
    port: int | None = None,
    postgres: str | None = None,
    believe: bool = False,
) -> Server:
    """Start a supervisor where none lives, register, and print the UI's address. What runs is not
    changed: InvalidInput where it is another server, port, login or version. ``postgres`` as for
    database.choose(). ``believe``: sign the stores' records."""
    with installation.locked():
        if full := full_disks([installation.folder]):
            raise TorporError("; ".join(full))
        used = server.server_of(installation, port)
        if choice := server.choice_for(installation, used):
            announce(choice)
        parent.see_that_nothing_else_runs(installation, used)
        if postgres is not None:
            if not used.own:
                raise InvalidInput(
                    f"{used.named_by} names {used.api_url}, a server that torpor does not start: "
                    "leave out --database, or unset that variable"
                )
            database.choose(installation, postgres)
        server.check(installation, used)
        notes = _start(installation, used, believe)
    print(
        _WELCOME.format(
            page=_front_page(used),
            ui=used.ui_url,
            interpreter=shlex.quote(sys.executable),
            torpor=_command(),
            folder=installation.folder,
            notes=folded(notes + _key(installation), sys.stdout),
            **_login(installation, used),
        )
    )
    return used


def _start(installation: Installation, used: Server, believe: bool) -> str:
    """Start what is missing; returns what registering printed."""
    _say("Prefect server", f"starting at {used.ui_url}" if used.own else used.ui_url)
    with Waiting("starting the Prefect server" if used.own else "starting the supervisor"):
        began = parent.start(installation, used)
    _say("blocks, store, flows", "registering (half a minute the first time)")
    try:
        with Waiting("registering blocks, store and flows"):
            notes = register(installation, used, believe)
        installation.note_registered(used.api_url)
    except BaseException:
        # otherwise its workers look after machines already
        if not installation.is_registered(used.api_url):
            parent.stop(began)
        raise
    with ThreadPoolExecutor(1, thread_name_prefix="scheduler") as aside:
        # The server takes up to 5 s to see a new schedule; the workers start meanwhile.
        checked = aside.submit(services.check_scheduler, used) if used.own else None
        _say("workers", "starting")
        with Waiting("starting the workers"):
            parent.see_that_they_run(installation, worker.ROLES, worker.READY_S)
        for words in end_left(state_folder() / "smoke", server.environment(installation, used)):
            _say("smoke", words)
        if checked is not None:
            _say("schedules", "checking that the server runs them")
            with Waiting("waiting for the server to look at a new schedule"):
                checked.result()
    if used.own:
        with Waiting("waiting until the workers have called the server"):
            served = services.check_served(used)
        for words in served:
            _say("work pools", words)
    if old := unit.outdated(installation):
        notes += f"  note      {old}\n"
    elif began is not None and (start := unit.start_command(installation)):
        notes += (
            "  note      systemd starts again only what it has started itself: `torpor down`, then "
            f"`{start}`\n"
        )
    return notes


def stay(port: int | None) -> NoReturn:
    """Become the supervisor, as units of an earlier version ask. It registers by itself once it
    lives, because such a unit may have no second line that registers."""
    argv = [sys.executable, "-m", unit.SUPERVISOR, "--earlier-unit"]
    argv += [] if port is None else ["--port", str(port)]
    os.execv(argv[0], argv)  # noqa: S606 - no shell


def _login(installation: Installation, used: Server) -> dict[str, str]:
    """Where the password of our own server is, and the shell line that uses it for Python."""
    python = f"export PREFECT_API_URL={used.api_url}"
    if not used.own:
        return {"login": "the login of your own server", "python": python}
    file = shlex.quote(str(installation.login_file))
    return {
        "login": f"the whole line in {installation.login_file}",
        "python": f'{python} {LOGIN_VARIABLE}="$(cat {file})"',
    }


def _front_page(used: Server) -> str:
    """The address of torpor's page in the UI; if that is unknown, of the list that has the page."""
    if used.own:
        wanted = {"artifacts": {"key": {"any_": [FRONT_PAGE]}}}
        with contextlib.suppress(TorporError), Api(used) as api:
            for found in api.all("artifacts/latest/filter", wanted):
                return f"{used.ui_url}/artifacts/artifact/{found['latest_id']}"
    return f"{used.ui_url}/artifacts/key/{FRONT_PAGE}"


def _command() -> str:
    """How this shell calls torpor: by name, if the name leads to this torpor."""
    here = Path(sys.executable).with_name("torpor")
    found = shutil.which("torpor")
    return "torpor" if found and Path(found).resolve() == here.resolve() else shlex.quote(str(here))


def _key(installation: Installation) -> str:
    """What to keep of the key that `default` was made with."""
    file = installation.store_key_file
    if not file.exists():
        return ""
    return f"  note      snapshots are sealed: without {file} they are lost, so keep a copy of it\n"


def register(installation: Installation, used: Server, believe: bool = False) -> str:
    """Run ``deployments.register`` against the server; returns its output. ``believe`` as for
    sign_stores()."""
    log, deadline = installation.log("register"), time.monotonic() + REGISTER_S
    with log.open("wb") as errors:
        log.chmod(0o600)
        process = subprocess.Popen(
            [sys.executable, "-m", "deployments.register", *([BELIEVE] if believe else [])],
            cwd=CHECKOUT,
            env={
                **server.environment(installation, used),
                **mark(installation, "register"),
                # A server whose host is overloaded sends this answer, too; registering can be
                # repeated.
                "PREFECT_CLIENT_RETRY_EXTRA_CODES": "500",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            preexec_fn=ending_with_this_process(),
        )
    with process:
        try:
            said = _said_until_its_end(installation, process, deadline)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise TorporError(
            f"blocks and deployments could not be registered at {used.api_url}; the last of "
            f"{log}:\n{last_words(log)}"
        )
    return said.decode(errors="replace")


def _said_until_its_end(
    installation: Installation, registering: subprocess.Popen[bytes], deadline: float
) -> bytes:
    """The output of registering. TorporError at the deadline, or where the supervisor has ended,
    and the server with it: systemd starts another one once the `up` beside the first has ended."""
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return registering.communicate(timeout=LOOK_S)[0]
        parent.see_that_it_lives(installation)
        if time.monotonic() > deadline:
            raise TorporError(
                f"registering did not end within {REGISTER_S:.0f} s; see "
                f"{installation.log('register')}"
            )


def _say(what: str, doing: str) -> None:
    say(f"{what + ' ':.<24} {doing}")


_WELCOME: Final = """
torpor is up.

  page      {page}
            What is awake, what it costs, and what to do next.
  UI        {ui}
  password  {login}
  next      {torpor} init mywork
            It asks for bucket, market and directories. `default` and `local`
            mean this host: nothing is rented.
  in the UI Deployments, hibernate, Run > Custom run, choose `demo`, Submit.
            torpor stores its files, verifies them, and destroys its machine.
            Then run `wake` the same way: the files are back on a new machine.
  Python    {python}
            {interpreter} -c "from flows import hibernate; hibernate('demo')"
  files     {folder}
  terminal  {torpor} --help
  stop      {torpor} down
  at boot   {torpor} boot    also starts torpor again where its supervisor is killed
{notes}"""


if __name__ == "__main__":
    sys.exit(main())
