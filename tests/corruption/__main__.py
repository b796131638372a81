"""``python -m tests.corruption --rounds 1000 --seed 1``: break objects, and see that a full verify
finds each and blames the right files. Exit 1 where one was missed or misjudged."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.campaign.command import Command, Found, Given, Violations
from tests.corruption.corruption import KINDS, Corruption
from tests.fixtures.world import own_store
from torpor.control.store.s3 import S3Store


def run(store: S3Store, folder: Path, rounds: int, seed: int, sealed: bool) -> Found:
    """The rounds, as many of each kind."""
    rng = random.Random(seed)
    broken = Corruption(store, folder, rng, rng.randbytes(32) if sealed else None)
    counts: Counter[str] = Counter()
    violations = Violations()
    try:
        for number in range(rounds):
            done = broken.round(KINDS[number % len(KINDS)])
            how = "by reading alone" if done.blind else "with the store's listing"
            counts[f"{done.kind} {done.what}, {how}"] += 1
            for line in done.wrong:
                violations.add(f"round {number}, {done.kind} {done.what}: {line}")
    finally:
        broken.close()
    for what, count in sorted(counts.items()):
        print(f"{count:6} {what}")
    return Found(f"{rounds} corruptions judged", violations, dict(counts))


def _carry_out(seed: int, rounds: int, given: Given) -> Found:
    with (
        tempfile.TemporaryDirectory(prefix="torpor-corruption-") as folder,
        own_store(Path(folder) / "store") as store,
    ):
        return run(store.server.store(), Path(folder) / "machine", rounds, seed, given.sealed)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sealed", action="store_true", help="with an encryption key")


COMMAND = Command("tests.corruption", "rounds", 1000, _carry_out, _options)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
