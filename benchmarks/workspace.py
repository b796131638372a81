"""A workspace of mixed content: BF16 weights, installed packages, JSON lines."""

from __future__ import annotations

import json
import os
import random
import shutil
import sysconfig
from pathlib import Path

import numpy as np

from torpor.shared.values import MIB

_TENSOR = 4 << 20


def make_workspace(folder: Path, total_bytes: int, seed: int = 1) -> None:
    """About ``total_bytes``: 60 % weights, 30 % packages (with their symlinks), 10 % JSON lines."""
    folder.mkdir(parents=True)
    _weights(folder / "models", int(total_bytes * 0.6), seed)
    _packages(folder / "site-packages", int(total_bytes * 0.3))
    _json_lines(folder / "data", int(total_bytes * 0.1), seed)


def change_workspace(folder: Path, share: float, seed: int = 2) -> int:
    """Change about ``share`` of the bytes, file by file; returns how many bytes were rewritten."""
    dice = random.Random(seed)
    files = sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
    total = sum(p.stat().st_size for p in files)
    small = [p for p in files if p.stat().st_size < MIB]
    big = [p for p in files if p.stat().st_size >= 8 * MIB]
    changed = 0
    for path in dice.sample(small, min(len(small), int(len(small) * share))):
        path.write_bytes(path.read_bytes()[::-1])
        changed += path.stat().st_size
    while changed < total * share:
        path = dice.choice(big)
        at = dice.randrange(0, path.stat().st_size - 4 * MIB) // 4096 * 4096
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bf16(4 * MIB // 2, dice.randrange(1 << 30)))
        changed += 4 * MIB
    return changed


def bf16(count: int, seed: int) -> bytes:
    """``count`` Gaussian weights cast to BF16, two bytes each, as a trained layer has them."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(count, dtype=np.float32) * np.float32(0.02)
    return ((values.view(np.uint32) + 0x8000) >> 16).astype(np.uint16).tobytes()


def _weights(folder: Path, size: int, seed: int) -> None:
    folder.mkdir()
    per_file = 512 * MIB
    for number in range(max(1, -(-size // per_file))):
        count = min(per_file, size - number * per_file) // 2
        header = json.dumps(
            {"w": {"dtype": "BF16", "shape": [count], "data_offsets": [0, count * 2]}}
        ).encode()
        header += b" " * (-len(header) % 8)
        with (folder / f"model-{number:05}.safetensors").open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for block, at in enumerate(range(0, count, _TENSOR)):
                file.write(bf16(min(_TENSOR, count - at), seed * 1_000_003 + number * 997 + block))


def _packages(folder: Path, size: int) -> None:
    """Copies of this environment's packages, whole packages in turn, until there are enough."""
    source = Path(sysconfig.get_paths()["purelib"])
    names = sorted(
        p for p in source.iterdir() if p.is_dir() and p.name not in ("torch", "nvidia", "triton")
    )
    copied, turn = 0, 0
    while copied < size:
        for package in names:
            target = folder / f"env{turn}" / package.name
            shutil.copytree(package, target, symlinks=True)
            copied += sum(p.stat().st_size for p in target.rglob("*") if p.is_file())
            if copied >= size:
                return
        turn += 1


def _json_lines(folder: Path, size: int, seed: int) -> None:
    folder.mkdir()
    dice = random.Random(seed)
    words = [f"{dice.randrange(1 << 40):x}"[: dice.randrange(2, 9)] for _ in range(20_000)]
    written, number = 0, 0
    while written < size:
        lines = []
        for row in range(20_000):
            text = " ".join(dice.choices(words, k=12))
            lines.append(
                json.dumps({"id": number * 20_000 + row, "text": text, "score": dice.random()})
            )
        data = "\n".join(lines).encode()
        (folder / f"part-{number:04}.jsonl").write_bytes(data)
        written += len(data)
        number += 1


def tree_bytes(folder: Path) -> tuple[int, int]:
    """Files and their bytes."""
    files = size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            st = os.lstat(os.path.join(place, name))
            files += 1
            size += st.st_size if not os.path.islink(os.path.join(place, name)) else 0
    return files, size
