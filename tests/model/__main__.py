"""``python -m tests.model --actions 2000 --seed 1``: random actions against a model of what must
exist. Exit 1 on a violation."""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path

from tests.campaign.command import Command, Found, Given
from tests.fixtures.clocked_agent import ClockedStore
from tests.fixtures.world import own_store
from tests.model.model import Model, Violation
from torpor.control.store.s3 import S3Store


def run(store: S3Store, folder: Path, actions: int, seed: int) -> Found:
    """Do the actions, tell what was done."""
    began = time.monotonic()
    model = Model(ClockedStore(store), folder / "machines", random.Random(seed))
    number, violations = 0, []
    try:
        for number in range(1, actions + 1):
            model.act()
            if number % 100 == 0:
                print(f"{number} actions in {time.monotonic() - began:.0f} s", flush=True)
        model.end()
    except Violation as violation:
        violations.append(f"at action {number}: {violation}")
        print(f"VIOLATION {violations[0]}")
    finally:
        model.close()
    for what, count in model.counts.most_common():
        print(f"{count:6} {what}")
    summary = f"{number} actions, prune freed {model.freed_bytes:,} bytes"
    return Found(summary, violations, dict(model.counts), [f"--actions {number}"])


def _carry_out(seed: int, actions: int, given: Given) -> Found:
    with (
        tempfile.TemporaryDirectory(prefix="torpor-model-") as folder,
        own_store(Path(folder) / "store") as store,
    ):
        return run(store.server.store(), Path(folder), actions, seed)


COMMAND = Command("tests.model", "actions", 2000, _carry_out)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
