"""What people write to say which GPUs they want: ``RTX 4090, L40S``, ``24GB+``, ``H100:8``."""

from __future__ import annotations

import difflib
import re
from functools import lru_cache
from typing import Final

import msgspec

from torpor.control.providers.gpus import GpuModel, gpu_misfit, parse_gpu, vram_misfit
from torpor.control.providers.vast_gpus import GPU_NAMES
from torpor.shared.errors import InvalidInput
from torpor.shared.values import Want

MOST_WISHES: Final = 16
MOST_GPUS: Final = 16
GRAMMAR: Final = (
    "write models in order of preference, as in `RTX 4090, L40S`; `H100:8` for eight; `A100 80GB` "
    "or `24GB+` for the least memory of each; `any` for any GPU; `none` for a machine without one"
)
_TIMES: Final = re.compile(r"(\d+)\s*x\s+(.+)|(\d+)x(.+)", re.IGNORECASE)  # as offers write it
_COUNT: Final = re.compile(r"(.+?)\s*:\s*(\d+)")
_COUNTED: Final = re.compile(r"\b\d+\s*x\b|\bx\s*\d+\b|:\s*\d+\b(?!\s*gi?b)", re.IGNORECASE)
_MEMORY: Final = re.compile(r"(\d+) ?gi?b ?\+?", re.IGNORECASE)
_SHAPE: Final = re.compile(r"[A-Z]{1,5}\d{1,4}[A-Z0-9]*|RTX .+")
_BESIDE: Final = ("GB200", "GB300", "GH200", "H20", "H800", "L2", "L20", "T4G", "MI355X", "V100S")
MODELS: Final = frozenset(
    gpu.model for name in (*GPU_NAMES, *_BESIDE) if (gpu := parse_gpu(name)) is not None
)
"""The models that have a name here. Others may be sold, under names of the same form."""


class GpuWish(msgspec.Struct, frozen=True):
    """One of the machines that somebody takes. ``count``: how many GPUs at least; 0 for a machine
    without any. ``gpu``: None for any model; its model is empty where only memory counts."""

    text: str  # the wish without the count
    count: int
    gpu: GpuModel | None = None

    def misfit(self, gpu: GpuModel | None, count: int) -> str:
        """Why ``count`` of ``gpu`` are not what is wished for; empty where they are."""
        if not self.count:
            return f"it has a GPU, {gpu}, none is wanted" if gpu else ""
        wanted = self.gpu or GpuModel("")
        if gpu is None:
            return f"it has no GPU, {self.text} is wanted"
        named = gpu_misfit(wanted, gpu) if wanted.model else vram_misfit(wanted.vram_gib, gpu)
        if named or count >= self.count:
            return named
        return f"it has {count} GPUs, {self.count} are wanted"


def wishes_of(want: Want) -> tuple[GpuWish, ...]:
    """The GPUs that are wanted, the preferred ones first; none of them where any machine will do.
    InvalidInput where what is written is not understood."""
    return _wishes(want.gpu or "", want.gpu_count)


def counted(text: str) -> str:
    """The wishes, with the number of `1x H100` made binding: `H100:1`. In a block such a number is
    not binding, because older blocks were saved where only another setting's number counted."""

    def one(part: str) -> str:
        times = _TIMES.fullmatch(part)
        return f"{(times[2] or times[4]).strip()}:{times[1] or times[3]}" if times else part

    return ", ".join(one(part.strip()) for part in text.split(","))


def is_known(wish: GpuWish) -> bool:
    """Whether the wish's model has a name here."""
    return wish.gpu is None or wish.gpu.model in {"", *MODELS}


def nearest(wish: GpuWish) -> str:
    """The known models whose names are like it, for people; empty if none is."""
    name = wish.gpu.model if wish.gpu else wish.text
    return " or ".join(difflib.get_close_matches(name.upper(), sorted(MODELS), n=2, cutoff=0.5))


@lru_cache(maxsize=256)
def _wishes(text: str, count: int) -> tuple[GpuWish, ...]:
    if not text.strip():
        return ()
    found = tuple(_wish(part.strip(), count) for part in text.split(","))
    if len(found) > MOST_WISHES:
        raise InvalidInput(f"the GPU is one of {len(found)}: name {MOST_WISHES} at most")
    return found


def _wish(text: str, count: int) -> GpuWish:
    name = text
    if times := _TIMES.fullmatch(text):
        # Older blocks were saved where only the number of GPUs in another setting counted, and not
        # this one.
        name, count = (times[2] or times[4]).strip(), max(int(times[1] or times[3]), count)
    elif counted := _COUNT.fullmatch(text):
        name, count = counted[1], int(counted[2])
    if not 1 <= count <= MOST_GPUS:
        raise InvalidInput(f"the GPU {text!r} is wanted {count} times: 1 to {MOST_GPUS} times")
    if _COUNTED.search(name):  # otherwise the number would be dropped, and one GPU be rented
        raise InvalidInput(f"the number of GPUs in {text!r} is not understood. Please {GRAMMAR}")
    name = " ".join(name.replace(":", " ").split())
    if name.lower() == "none":
        return GpuWish("none", 0)
    if name.lower() == "any":
        return GpuWish("any", count)
    if memory := _MEMORY.fullmatch(name):
        return GpuWish(name, count, GpuModel("", "", float(memory[1])))
    gpu = parse_gpu(name.removesuffix("+"))
    wish = GpuWish(name, count, gpu)
    if gpu is None or not (gpu.model in MODELS or _SHAPE.fullmatch(gpu.model)):
        like = nearest(wish)
        meant = f" Did you mean {like}?" if like else ""
        raise InvalidInput(f"the GPU {text!r} is not understood.{meant} Please {GRAMMAR}")
    return wish
