"""A training program on several nodes, which find each other by what torpor tells them.

    python3 two_nodes.py STEPS SECONDS_A_STEP PORT [GO]

In each step every node hashes the state with its rank, rank 0 gathers the hashes into the next
state, and sends it to all. Rank 0 keeps ``state.json`` in the current directory and goes on from
it. A node that loses another one fails. Halfway, rank 0 waits until the file GO is there. Only
Python's own library.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import time
from typing import Any


def share(state: dict[str, Any], rank: int) -> str:
    return hashlib.sha256(f"{state['chain']} {state['n'] + 1} {rank}".encode()).hexdigest()


def gathered(state: dict[str, Any], shares: list[str]) -> dict[str, Any]:
    return {"n": state["n"] + 1, "chain": hashlib.sha256(" ".join(shares).encode()).hexdigest()}


def uninterrupted(steps: int, nodes: int) -> dict[str, Any]:
    """What the state is after so many steps."""
    state: dict[str, Any] = {"n": 0, "chain": ""}
    for _ in range(steps):
        state = gathered(state, [share(state, rank) for rank in range(nodes)])
    return state


def lead(steps: int, seconds: float, port: int, go: str) -> None:
    nodes, master = int(os.environ["TORPOR_NODES"]), os.environ["TORPOR_MASTER"]
    state: dict[str, Any] = {"n": 0, "chain": ""}
    if os.path.exists("state.json"):
        with open("state.json") as file:
            state = json.load(file)
    with socket.create_server((master, port)) as server:
        server.settimeout(900)
        lines = [server.accept()[0].makefile("rw") for _ in range(1, nodes)]
    print(f"{nodes} nodes go on from step {state['n']}", flush=True)
    while state["n"] < steps:
        for line in lines:
            print(json.dumps(state), file=line, flush=True)
        told = sorted(json.loads(line.readline()) for line in lines)
        state = gathered(state, [share(state, 0), *(hashed for _, hashed in told)])
        with open("state.new", "w") as file:
            json.dump(state, file)
        os.replace("state.new", "state.json")
        print(f"step {state['n']}", flush=True)
        time.sleep(seconds)
        while go and state["n"] == steps // 2 and not os.path.exists(go):
            time.sleep(0.05)
    for line in lines:
        print("null", file=line, flush=True)


def follow(port: int) -> None:
    rank, master = int(os.environ["TORPOR_NODE_RANK"]), os.environ["TORPOR_MASTER"]
    give_up = time.monotonic() + 900
    while True:
        try:
            line = socket.create_connection((master, port)).makefile("rw")
            break
        except OSError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.05)
    print(f"node {rank} has joined", flush=True)
    while (state := json.loads(line.readline())) is not None:
        print(json.dumps([rank, share(state, rank)]), file=line, flush=True)


def main(steps: str, seconds: str, port: str, go: str = "") -> None:
    if os.environ["TORPOR_NODE_RANK"] == "0":
        lead(int(steps), float(seconds), int(port), go)
    else:
        follow(int(port))


if __name__ == "__main__":
    main(*sys.argv[1:])
