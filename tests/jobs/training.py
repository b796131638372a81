"""A training program: it counts, and hashes each number with all before. It can be ended anywhere.

    python3 training.py STEPS SECONDS_A_STEP [FAIL_AT]

It goes on from ``state.json`` in the current directory. Only Python's own library: it runs on the
machines of the campaign.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from typing import Any


def start() -> dict[str, Any]:
    return {"n": 0, "chain": ""}


def step(state: dict[str, Any]) -> dict[str, Any]:
    n = state["n"] + 1
    return {"n": n, "chain": hashlib.sha256(f"{state['chain']} {n}".encode()).hexdigest()}


def uninterrupted(steps: int) -> dict[str, Any]:
    """What the state is after so many steps."""
    state = start()
    for _ in range(steps):
        state = step(state)
    return state


def main(steps: int, seconds: float, fail_at: int = -1) -> int:
    state = start()
    if os.path.exists("state.json"):
        with open("state.json") as file:
            state = json.load(file)
    print(f"goes on from step {state['n']}", flush=True)
    while state["n"] < steps:
        if state["n"] == fail_at:
            print("fails", flush=True)
            return 3
        state = step(state)
        with open("state.new", "w") as file:
            json.dump(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace("state.new", "state.json")
        print(f"step {state['n']}", flush=True)
        time.sleep(seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), *map(int, sys.argv[3:4])))
