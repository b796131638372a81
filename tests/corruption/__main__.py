"""``python -m tests.corruption --rounds 1000 --seed 1``: break objects, and see that a full verify
finds each and blames the right files. Exit 1 where one was missed or misjudged."""

from __future__ import annotations

import argparse
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.corruption.corruption import KINDS, Corruption
from torpor.control.store.embedded import EmbeddedStore
from torpor.control.store.s3 import S3Settings, S3Store


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.corruption", description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, help="a random one where none is given")
    parser.add_argument("--sealed", action="store_true", help="with an encryption key")
    given = parser.parse_args(argv)
    seed = given.seed if given.seed is not None else secrets.randbelow(1 << 32)
    with tempfile.TemporaryDirectory(prefix="torpor-corruption-") as folder:
        keys = f"AK{secrets.token_hex(8).upper()}", secrets.token_hex(20)
        with EmbeddedStore.start(Path(folder) / "store", *keys, "corruption") as running:
            settings = S3Settings("corruption", *keys, endpoint_url=running.endpoint_url)
            store = S3Store.connect(settings)
            return run(store, Path(folder) / "machine", given.rounds, seed, given.sealed)


def run(store: S3Store, folder: Path, rounds: int, seed: int, sealed: bool) -> int:
    """The rounds, as many of each kind; 0 when each was found and judged right."""
    began = time.monotonic()
    rng = random.Random(seed)
    broken = Corruption(store, folder, rng, rng.randbytes(32) if sealed else None)
    counts: Counter[str] = Counter()
    misjudged = 0
    try:
        for number in range(rounds):
            done = broken.round(KINDS[number % len(KINDS)])
            how = "by reading alone" if done.blind else "with the store's listing"
            counts[f"{done.kind} {done.what}, {how}"] += 1
            for line in done.wrong:
                print(f"round {number}, {done.kind} {done.what}: {line}")
            misjudged += bool(done.wrong)
    finally:
        broken.close()
    for what, count in sorted(counts.items()):
        print(f"{count:6} {what}")
    spent = time.monotonic() - began
    right = rounds - misjudged
    print(f"seed {seed}: {right} of {rounds} corruptions found and judged right in {spent:.0f} s")
    return 1 if misjudged else 0


if __name__ == "__main__":
    sys.exit(main())
