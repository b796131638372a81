"""Ray on the machines of a job: rank 0 is the head and keeps the state, the others are workers.

    torpor job run mywork --nodes 2 -- python ray_nodes.py STEPS POINTS

Fits a line to points of x * x, of which every node has a share. A step is one task on each node.
The state is in ``state.json``, and the next start goes on from it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

NODES, RANK = int(os.environ["TORPOR_NODES"]), int(os.environ["TORPOR_NODE_RANK"])
MASTER, NODE = os.environ["TORPOR_MASTER"], os.environ["TORPOR_NODE_IPS"].split(",")[RANK]
PORT = os.environ.get("RAY_PORT", "6379")
START = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
START += [f"--node-ip-address={NODE}", "--num-cpus=1"]


@ray.remote(num_cpus=1, max_retries=0)  # a lost node ends the attempt: torpor begins another one
def gradient(share: int, points: int, slope: float, offset: float) -> tuple[float, float, str]:
    by_slope = by_offset = 0.0
    for number in range(share, points, NODES):
        x = number / points
        error = slope * x + offset - x * x
        by_slope += error * x / points
        by_offset += error / points
    return by_slope, by_offset, ray.get_runtime_context().get_node_id()


def fit(steps: int, points: int) -> None:
    state = {"step": 0, "slope": 0.0, "offset": 0.0}
    if os.path.exists("state.json"):
        with open("state.json") as file:
            state = json.load(file)
    group = placement_group([{"CPU": 1}] * NODES, strategy="STRICT_SPREAD")  # one on every node
    ray.get(group.ready())
    places = [PlacementGroupSchedulingStrategy(group, share) for share in range(NODES)]
    tasks = [gradient.options(scheduling_strategy=place) for place in places]
    print(f"{NODES} nodes go on from step {state['step']}", flush=True)
    while state["step"] < steps:
        asked = [
            task.remote(share, points, state["slope"], state["offset"])
            for share, task in enumerate(tasks)
        ]
        by_slope, by_offset, nodes = zip(*ray.get(asked), strict=True)
        state["slope"] -= sum(by_slope)
        state["offset"] -= sum(by_offset)
        state["step"] += 1
        with open("state.new", "w") as file:
            json.dump(state, file)
        os.replace("state.new", "state.json")
        print(
            f"step {state['step']}: {state['slope']} x + {state['offset']}, by {len(set(nodes))}",
            flush=True,
        )


def main(steps: str, points: str) -> None:
    if RANK > 0:
        sys.exit(subprocess.call([*START, f"--address={MASTER}:{PORT}"]))  # waits for the head
    head = subprocess.Popen([*START, "--head", f"--port={PORT}", "--include-dashboard=false"])
    try:
        with ray.init(f"{MASTER}:{PORT}", log_to_driver=False):
            fit(int(steps), int(points))
    finally:
        head.terminate()
        head.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
