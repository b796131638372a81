"""The watchdog of a smoke test, which ``deployments.smoke`` starts.

    python -m deployments.smoke_watchdog PROVIDER_BLOCK IDENTITY SECONDS LEDGER

See torpor/control/smoke/watchdog.py. The watchdog loads the block itself, so that its arguments
hold no secret. Its standard error is its log.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from blocks import PROVIDERS
from blocks.reference import load
from torpor.control.smoke.watchdog import serve


def main(argv: Sequence[str]) -> None:
    reference, identity, lifetime_s, ledger = argv
    provider = load(reference, PROVIDERS, of="the watchdog of torpor smoke").open()
    serve(provider, identity, float(lifetime_s), Path(ledger))


if __name__ == "__main__":
    main(sys.argv[1:])
