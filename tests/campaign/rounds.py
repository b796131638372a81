"""Campaigns of many short rounds, each of which its seed and number make again."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from tests.campaign.command import Found


class Done(NamedTuple):
    """A round, and what came of it. ``counts``: what is added up over all rounds."""

    number: int
    did: list[str]
    violations: list[str]
    counts: dict[str, int]


def found(done: Sequence[Done]) -> Found:
    """What came of all rounds; prints the counts."""
    counts: Counter[str] = Counter()
    for one in done:
        counts.update(one.counts)
    for what, count in counts.most_common():
        print(f"{count:6} {what}")
    wrong = [one for one in done if one.violations]
    return Found(
        f"{len(done)} rounds, {len(wrong)} with a violation",
        [f"round {one.number}: {words}" for one in wrong for words in one.violations],
        [one._asdict() for one in done],
        [f"--first {one.number} --rounds 1 --jobs 1" for one in wrong],
    )


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--first", type=int, default=0, help="the number of the first round")
    parser.add_argument("--jobs", type=int, default=2, help="rounds at the same time")
