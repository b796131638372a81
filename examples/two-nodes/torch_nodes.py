"""PyTorch on the machines of a job, one process of torchrun on each.

    torpor job run mywork --nodes 2 -- bash -c 'torchrun --nnodes $TORPOR_NODES
        --node-rank $TORPOR_NODE_RANK --master-addr $TORPOR_MASTER --master-port 29500
        torch_nodes.py STEPS POINTS'

Fits a small network to points, of which every process has a share. Rank 0 keeps ``state.pt``, and
the next start goes on from it.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import nn
from torch.distributed import barrier, destroy_process_group, get_rank, init_process_group
from torch.nn.parallel import DistributedDataParallel


def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """On every rank: each machine began with rank 0's files."""
    if not os.path.exists("state.pt"):
        return 0
    state = torch.load("state.pt", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def main(steps: str, points: str) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step = load(model, optimizer)
    barrier()  # nobody writes before all have read
    parallel = DistributedDataParallel(model)
    numbers = torch.Generator().manual_seed(1 + get_rank())
    x = torch.randn(int(points), 8, generator=numbers).to(device)
    y = x.sin().sum(dim=1, keepdim=True)
    print(f"rank {get_rank()} goes on from step {step}", flush=True)
    while step < int(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(parallel(x), y)
        loss.backward()
        optimizer.step()
        step += 1
        if get_rank() == 0:
            save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()})
            print(f"step {step}: {loss.item()}", flush=True)
    destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a usual exit (github.com/pytorch/pytorch/pull/179291)


def save(state: dict[str, Any]) -> None:
    torch.save(state, "state.new")
    os.replace("state.new", "state.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
