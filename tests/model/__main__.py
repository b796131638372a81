"""``python -m tests.model --actions 2000 --seed 1``: random actions against a model of what must
exist. Exit 1 on a violation."""

from __future__ import annotations

import argparse
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.fixtures.clocked import ClockedStore
from tests.model.model import Model, Violation
from torpor.control.store.embedded import EmbeddedStore
from torpor.control.store.s3 import S3Settings, S3Store


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    parser.add_argument("--actions", type=int, default=2000)
    parser.add_argument("--seed", type=int, help="a random one where none is given")
    given = parser.parse_args(argv)
    seed = given.seed if given.seed is not None else secrets.randbelow(1 << 32)
    with tempfile.TemporaryDirectory(prefix="torpor-model-") as folder:
        keys = f"AK{secrets.token_hex(8).upper()}", secrets.token_hex(20)
        with EmbeddedStore.start(Path(folder) / "store", *keys, "model") as running:
            settings = S3Settings("model", *keys, endpoint_url=running.endpoint_url)
            return run(S3Store.connect(settings), Path(folder), given.actions, seed)


def run(store: S3Store, folder: Path, actions: int, seed: int) -> int:
    """Do the actions, tell what was done; 0 when nothing was violated."""
    began = time.monotonic()
    model = Model(ClockedStore(store), folder / "machines", random.Random(seed))
    number = 0
    try:
        for number in range(1, actions + 1):
            model.act()
            if number % 100 == 0:
                print(f"{number} actions in {time.monotonic() - began:.0f} s", flush=True)
        model.end()
    except Violation as violation:
        print(f"VIOLATION at action {number}: {violation}")
        print(f"to repeat: python -m tests.model --actions {number} --seed {seed}")
        return 1
    finally:
        model.close()
    _tell(model.counts, model.freed_bytes)
    print(f"seed {seed}: {actions} actions in {time.monotonic() - began:.0f} s, 0 violations")
    return 0


def _tell(counts: Counter[str], freed_bytes: int) -> None:
    for what, count in counts.most_common():
        print(f"{count:6} {what}")
    print(f"prune freed {freed_bytes:,} bytes")


if __name__ == "__main__":
    sys.exit(main())
