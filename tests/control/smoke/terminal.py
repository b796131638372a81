"""What a person starts in a terminal: the smoke test at a fake Vast.ai, and its watchdog.

python -m tests.control.smoke.terminal command URL LOG
python -m tests.control.smoke.terminal watchdog URL LEDGER
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import asyncssh

from tests.markets.server import KEY
from torpor.control.providers.vast import VastProvider
from torpor.control.smoke.login import Inside
from torpor.control.smoke.plan import make_plan
from torpor.control.smoke.trial import SmokeTrial
from torpor.control.smoke.watchdog import Watchdog, serve
from torpor.shared.values import Endpoint

LIFETIME_S = 600.0


class ClosedDoor:
    """SSH never answers, so the command waits."""

    def fault(self, endpoint: Endpoint, host_key: str | None) -> str | None:
        return "the port is closed"

    def look(self, endpoint: Endpoint) -> Inside:
        raise AssertionError("nobody logs in")


def main(what: str, url: str, file: str) -> None:
    provider = VastProvider(KEY, url=url)
    if what == "watchdog":
        serve(provider, provider.identity, LIFETIME_S, Path(file), _nap_shortly)
        return
    argv = [sys.executable, "-m", "tests.control.smoke.terminal", "watchdog", url]
    watchdog = Watchdog(argv, Path(file))
    identity = asyncssh.generate_private_key("ssh-ed25519")
    plan, rentals = make_plan(provider, max_usd=10.0), ("0" * 16, "1" * 16)
    SmokeTrial(provider, plan, identity, ClosedDoor(), watchdog.tell, rentals).run()


def _nap_shortly(seconds: float) -> None:
    time.sleep(0.05)


if __name__ == "__main__":
    main(*sys.argv[1:])
