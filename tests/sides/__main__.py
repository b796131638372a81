"""``python -m tests.sides --rounds 300 --seed 1``: two control sides of one bucket at once, each of
which burns down at random requests. Exit 1 where work is lost or a machine ends too early."""

from __future__ import annotations

import logging
import random
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from unittest.mock import patch

from tests.campaign.command import Command, Found, Given
from tests.campaign.rounds import Done, found, options
from tests.fixtures.lab import make_lab
from tests.sides.round import Round
from torpor.machine.agent import rescue, snapshot
from torpor.machine.agent.environment import record_environment


def carry_out(seed: int, number: int) -> Done:
    """The same seed and number make the same choices again; threads may take other turns."""
    recorded = cache(record_environment)  # half of the time of a small snapshot
    with (
        make_lab(sealed=number % 2 == 1, parts=1) as lab,
        patch.object(snapshot, "record_environment", recorded),
        patch.object(rescue, "record_environment", recorded),
        patch.object(snapshot, "PAUSE_S", 0.02),
    ):
        logging.disable(logging.CRITICAL)
        one = Round(lab, random.Random(f"{seed}:{number}"))
        try:
            one.run()
        except Exception:  # noqa: BLE001 - a round's border: all is a violation
            one.violations.append(traceback.format_exc())
        finally:
            logging.disable(logging.NOTSET)
    if one.violations:
        print("\n  ".join([f"round {number}:", *one.did, *one.violations]), flush=True)
    return Done(number, one.did, one.violations, dict(one.counts))


def _carry_out_all(seed: int, rounds: int, given: Given) -> Found:
    numbers = range(given.first, given.first + rounds)
    with ProcessPoolExecutor(given.jobs, get_context("fork")) as pool:
        return found(list(pool.map(partial(carry_out, seed), numbers)))


COMMAND = Command("tests.sides", "rounds", 300, _carry_out_all, options)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
