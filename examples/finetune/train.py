"""A training run that goes on at its newest checkpoint, wherever it starts.

    python3 train.py

The model says which letter follows a letter: a table of 27 times 27 weights, trained in plain
Python so that this runs anywhere. Your model has another ``step_of``, and the same order of steps.
"""

from __future__ import annotations

import json
import math
import os
from itertools import pairwise
from pathlib import Path

STEPS = int(os.environ.get("STEPS", "2000"))
EVERY = 50  # steps between two checkpoints
RATE = 4.0
LETTERS = " abcdefghijklmnopqrstuvwxyz"
CHECKPOINT = Path("outputs/checkpoint.json")


def load() -> tuple[int, list[list[float]]]:
    """The step to go on from, and the weights there."""
    if not CHECKPOINT.exists():
        return 0, [[0.0] * len(LETTERS) for _ in LETTERS]
    kept = json.loads(CHECKPOINT.read_text())
    return kept["step"], kept["weights"]


def save(step: int, weights: list[list[float]]) -> None:
    """Under another name first: the checkpoint is whole at every moment."""
    CHECKPOINT.parent.mkdir(exist_ok=True)
    unfinished = CHECKPOINT.with_suffix(".new")
    unfinished.write_text(json.dumps({"step": step, "weights": weights}))
    os.replace(unfinished, CHECKPOINT)


def step_of(weights: list[list[float]], pairs: list[tuple[int, int]]) -> float:
    """One step of gradient descent over all pairs of letters; returns the loss before it."""
    size, loss = len(LETTERS), 0.0
    change = [[0.0] * size for _ in LETTERS]
    for first, second in pairs:
        powers = [math.exp(weight) for weight in weights[first]]
        whole = sum(powers)
        loss -= math.log(powers[second] / whole) / len(pairs)
        for letter, power in enumerate(powers):
            change[first][letter] += power / whole / len(pairs)
        change[first][second] -= 1 / len(pairs)
    for row, by in zip(weights, change, strict=True):
        for letter, amount in enumerate(by):
            row[letter] -= RATE * amount
    return loss


def main() -> None:
    text = "".join(letter for letter in Path("data.txt").read_text().lower() if letter in LETTERS)
    numbers = [LETTERS.index(letter) for letter in text]
    pairs = list(pairwise(numbers))
    step, weights = load()
    print(f"goes on at step {step}" if step else "begins", flush=True)
    while step < STEPS:
        loss = step_of(weights, pairs)
        step += 1
        if step % EVERY == 0 or step == STEPS:
            save(step, weights)
            print(f"step {step}: loss {loss:.3f}", flush=True)


if __name__ == "__main__":
    main()
