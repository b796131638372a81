"""``make up``: a Prefect server, a store, a worker, blocks and deployments, all on this host.

The supervisor starts the server, the store and the workers as its children; blocks and deployments
are registered in between. Everything listens on loopback only. Running it again starts only what
is missing. ``make down`` ends everything.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from deployments import database, lost_runs, parent, server, services
from deployments.down import down
from deployments.installation import BELIEVE, BELIEVE_HELP, CHECKOUT, Installation
from deployments.processes import last_words, mark
from deployments.server import Server
from torpor.control.disk_space import full_disks
from torpor.control.own_server import announce, state_folder
from torpor.control.processes import ending_with_this_process
from torpor.control.smoke.watchdog import end_left
from torpor.control.supervision import living_parent
from torpor.shared.errors import InvalidInput, TorporError

RETRY_S: Final = 10.0
LOCK_S: Final = 60.0
"""How long `make up` or `make down` may go on after SIGTERM to a process that stays."""
REGISTER_S: Final = 1200.0
"""20 to 60 s, measured; the first time it fetches the agent's wheels."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make up", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, help="the port of the Prefect server; default 4200")
    parser.add_argument(
        "--stay",
        action="store_true",
        help="stay until SIGTERM or `make down`, and start a supervisor that ends again (systemd)",
    )
    parser.add_argument(BELIEVE, action="store_true", help=BELIEVE_HELP)
    options = parser.parse_args(arguments)
    if options.stay and options.believe_records:
        parser.error(f"{BELIEVE} is for one `up`: run it without --stay")
    installation = Installation.here()
    try:
        if options.stay:
            stay(installation, options.port)
        else:
            up(installation, options.port, believe=options.believe_records)
    except TorporError as error:
        _complain(error)
        return 1
    return 0


def up(
    installation: Installation,
    port: int | None = None,
    postgres: str | None = None,
    believe: bool = False,
) -> Server:
    """Start what is missing and print the UI's address. ``postgres`` as for database.choose(),
    ``believe`` as for sign_stores()."""
    with installation.locked():
        if full := full_disks([installation.folder]):
            raise TorporError("; ".join(full))
        used = server.server_of(installation, port)
        if choice := server.choice_for(installation, used):
            announce(choice)
        if postgres is not None:
            if not used.own:
                raise InvalidInput(
                    f"{used.named_by} names {used.api_url}, a server that torpor does not start: "
                    "leave out --database, or unset that variable"
                )
            database.choose(installation, postgres)
        server.check(installation, used)
        before = _served(installation)
        try:
            notes = _start(installation, used, believe)
        except (Exception, KeyboardInterrupt):
            _put_back(installation, before)
            raise
    print(
        _WELCOME.format(
            ui=used.ui_url,
            interpreter=shlex.quote(sys.executable),
            torpor=shlex.quote(str(Path(sys.executable).with_name("torpor"))),
            folder=installation.folder,
            notes=notes + _key(installation),
            **_login(installation, used),
        )
    )
    return used


def _start(installation: Installation, used: Server, believe: bool) -> str:
    """Start what is missing; returns what registering printed."""
    _say("Prefect server", f"starting at {used.ui_url}" if used.own else used.ui_url)
    before = _served(installation)
    if parent.start(installation, used) and before is not None:
        _say("supervisor", "another one, with server, store and workers; flow runs go on")
    _say("blocks, store, flows", "registering (half a minute the first time)")
    notes = register(installation, used, believe)
    for words in lost_runs.end_lost_runs(used, workers=parent.works(installation)):
        _say("lost runs", words)
    with ThreadPoolExecutor(1, thread_name_prefix="scheduler") as aside:
        # The server takes up to 5 s to look at a new schedule: the workers start meanwhile.
        checked = aside.submit(services.check_scheduler, used) if used.own else None
        _say("workers", "starting")
        parent.work(installation)
        for words in end_left(state_folder() / "smoke", server.environment(installation, used)):
            _say("smoke", words)
        if checked is not None:
            _say("schedules", "checking that the server runs them")
            checked.result()
    if used.own:
        for words in services.check_served(used):
            _say("work pools", words)
    return notes


def _served(installation: Installation) -> Server | None:
    """The server that the supervisor of now serves."""
    there = living_parent(installation.folder)
    if there is None:
        return None
    return Server(there.api_url, there.own, installation.login() if there.own else "")


def _put_back(installation: Installation, before: Server | None) -> None:
    """After a failure: what ran before runs again, and nothing else. What fails once all runs ends
    nothing."""
    try:
        if before is not None:
            if _served(installation) != before:
                parent.start(installation, before)
            parent.work(installation)
        elif not parent.works(installation):
            parent.leave(installation)
    except TorporError as error:
        _complain(error)


def stay(installation: Installation, port: int | None = None) -> None:
    """Start everything, and return after `make down`. SIGTERM does the same."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        try:
            up(installation, port)
        except TorporError as error:
            if not parent.lives(installation):
                raise
            _complain(error)  # all runs, or another `make up` is at it
        while not parent.wait(installation):
            try:
                up(installation)
            except TorporError as error:
                _complain(error)
                time.sleep(RETRY_S)
    except SystemExit:
        down(installation, wait_s=LOCK_S)
        raise


def _complain(error: TorporError) -> None:
    print(f"torpor: {error}", file=sys.stderr, flush=True)


def _login(installation: Installation, used: Server) -> dict[str, str]:
    """Where the password of our own server is, and the shell's line for Python."""
    python = f"export PREFECT_API_URL={used.api_url}"
    if not used.own:
        return {"login": "the login of your own server", "python": python}
    file = shlex.quote(str(installation.login_file))
    return {
        "login": f"the whole line in {installation.login_file}",
        "python": f'{python} {server.LOGIN_VARIABLE}="$(cat {file})"',
    }


def _key(installation: Installation) -> str:
    """What to keep of the key that `default` was made with."""
    file = installation.store_key_file
    if not file.exists():
        return ""
    return f"  note      snapshots are sealed: without {file} they are lost, so keep a copy of it\n"


def register(installation: Installation, used: Server, believe: bool = False) -> str:
    """Run ``deployments.register`` against the server; returns its output. ``believe`` as for
    sign_stores()."""
    log = installation.log("register")
    with log.open("wb") as errors:
        log.chmod(0o600)
        try:
            done = subprocess.run(
                [sys.executable, "-m", "deployments.register", *([BELIEVE] if believe else [])],
                cwd=CHECKOUT,
                env={
                    **server.environment(installation, used),
                    **mark(installation, "register"),
                    # A server whose host is overloaded says so too; registering can be repeated.
                    "PREFECT_CLIENT_RETRY_EXTRA_CODES": "500",
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                timeout=REGISTER_S,
                check=False,
                preexec_fn=ending_with_this_process(),
            )
        except subprocess.TimeoutExpired:
            raise TorporError(
                f"registering at {used.api_url} did not end within {REGISTER_S:.0f} s; see {log}"
            ) from None
    if done.returncode:
        raise TorporError(
            f"blocks and deployments could not be registered at {used.api_url}; the last of "
            f"{log}:\n{last_words(log)}"
        )
    return done.stdout.decode(errors="replace")


def _say(what: str, doing: str) -> None:
    print(f"{what + ' ':.<24} {doing}", flush=True)


_WELCOME: Final = """
torpor is up.

  UI        {ui}
  password  {login}
  first     Deployments, search for hibernate, Run > Custom run, choose `demo`, Submit.
            torpor stores its files, verifies them, and destroys its machine.
            Then run `wake` the same way: the files are back on a new machine.
  Python    {python}
            {interpreter} -c "from flows import hibernate; hibernate('demo')"
  blocks    Your own bucket, machine and workspaces are blocks: Blocks > + in the UI.
  files     {folder}
  terminal  {torpor} --help
  stop      {torpor} down
  at boot   {torpor} boot
{notes}"""


if __name__ == "__main__":
    sys.exit(main())
