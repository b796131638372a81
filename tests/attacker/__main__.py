"""``python -m tests.attacker --rounds 2000 --seed 1``: the bucket is the attacker. Exit 1 where a
command runs that nobody asked for, work is lost, a key is handed out, or a run dies."""

from __future__ import annotations

import random
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from typing import Final
from unittest.mock import patch

from tests.attacker.installation import make_installation
from tests.attacker.round import Round
from tests.campaign.command import Command, Found, Given
from tests.campaign.rounds import Done, found, options
from torpor.machine.agent import rescue, snapshot
from torpor.machine.agent.environment import record_environment

_TOGETHER: Final = 50
"""Rounds of one installation: to make one takes as long as a few rounds."""


def carry_out(seed: int, numbers: range) -> list[Done]:
    """The same seed and number make the same choices again."""
    recorded = cache(record_environment)  # half of the time of a small snapshot
    done = []
    sealed = (seed + numbers.start // _TOGETHER) % 2 == 1
    with (
        patch.object(snapshot, "record_environment", recorded),
        patch.object(rescue, "record_environment", recorded),
        make_installation(sealed) as made,
    ):
        for number in numbers:
            made.put_back()
            one = Round(made, random.Random(f"{seed}:{number}"))
            try:
                one.run()
            except Exception:  # noqa: BLE001 - a round's border: all is a violation
                one.violations.append(traceback.format_exc())
            kind = "sealed" if sealed else "plain"
            if one.violations:
                said = [f"round {number} ({kind}):", *one.did, *one.violations]
                print("\n  ".join(said), flush=True)
            one.counts[f"rounds on a {kind} store"] += 1
            done.append(Done(number, one.did, one.violations, dict(one.counts)))
    return done


def _carry_out_all(seed: int, rounds: int, given: Given) -> Found:
    ends = given.first + rounds
    starts = [given.first, *range((given.first // _TOGETHER + 1) * _TOGETHER, ends, _TOGETHER)]
    parts = [range(start, min(ends, (start // _TOGETHER + 1) * _TOGETHER)) for start in starts]
    with ProcessPoolExecutor(given.jobs, get_context("fork")) as pool:
        return found([one for part in pool.map(partial(carry_out, seed), parts) for one in part])


COMMAND = Command("tests.attacker", "rounds", 2000, _carry_out_all, options)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
