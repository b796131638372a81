"""``python -m tests.saves --rounds 200 --seed 1``: rounds in which machines save by themselves, are
backed up, killed and lost, and folders vanish. Exit 1 where work is lost, or named by nothing."""

from __future__ import annotations

import argparse
import logging
import random
import sys
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from typing import NamedTuple
from unittest.mock import patch

from tests.campaign.command import Command, Found, Given
from tests.fixtures.lab import make_lab
from tests.saves.round import Round
from torpor.machine.agent import rescue, snapshot
from torpor.machine.agent.environment import record_environment


class Done(NamedTuple):
    """A round, and what came of it."""

    number: int
    did: list[str]
    violations: list[str]


def carry_out(seed: int, number: int) -> Done:
    """The same seed and number make the same choices again."""
    recorded = cache(record_environment)  # half of the time of a small snapshot
    with (
        make_lab() as lab,
        patch.object(snapshot, "record_environment", recorded),
        patch.object(rescue, "record_environment", recorded),
    ):
        logging.disable(logging.WARNING)
        one = Round(lab, random.Random(f"{seed}:{number}"))
        try:
            one.run()
        except Exception:  # noqa: BLE001 - a round's border: all is a violation
            one.violations.append(traceback.format_exc())
        finally:
            logging.disable(logging.NOTSET)
    if one.violations:
        print("\n  ".join([f"round {number}:", *one.did]), flush=True)
    return Done(number, one.did, one.violations)


def _carry_out_all(seed: int, rounds: int, given: Given) -> Found:
    numbers = range(given.first, given.first + rounds)
    with ProcessPoolExecutor(given.jobs, get_context("fork")) as pool:
        done = list(pool.map(partial(carry_out, seed), numbers))
    counts = Counter(did.partition(":")[0].partition(" (")[0] for one in done for did in one.did)
    for what, count in counts.most_common():
        print(f"{count:6} {what}")
    wrong = [one for one in done if one.violations]
    violations = [f"round {one.number}: {words}" for one in wrong for words in one.violations]
    repeat = [f"--first {one.number} --rounds 1 --jobs 1" for one in wrong]
    return Found(
        f"{rounds} rounds, {len(wrong)} with a violation",
        violations,
        [one._asdict() for one in done],
        repeat,
    )


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--first", type=int, default=0, help="the number of the first round")
    parser.add_argument("--jobs", type=int, default=2, help="rounds at the same time")


COMMAND = Command("tests.saves", "rounds", 200, _carry_out_all, _options)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
