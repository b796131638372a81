"""How Vast.ai spells GPUs. Its search compares names exactly, and answers an unknown one with an
empty list."""

from __future__ import annotations

from typing import Final

import msgspec

from torpor.control.providers.gpus import GpuModel, gpu_misfit, parse_gpu

GPU_NAMES: Final = (
    "A10", "A100 PCIE", "A100 SXM", "A100 SXM4", "A100X", "A10g", "A16", "A30", "A40",
    "A800 PCIE", "B200", "B300", "B300 SXM", "CMP 50HX", "GH200 SXM", "GTX 1050 Ti",
    "GTX 1060", "GTX 1070", "GTX 1070 Ti", "GTX 1080", "GTX 1080 Ti", "GTX 1650", "GTX 1650 S",
    "GTX 1660", "GTX 1660 S", "GTX 1660 Ti", "H100 NVL", "H100 PCIE", "H100 SXM", "H200",
    "H200 NVL", "InstinctMI100", "InstinctMI210", "InstinctMI250X", "InstinctMI50", "L4",
    "L40", "L40S", "MI300X", "MI325X", "Q RTX 4000", "Q RTX 5000", "Q RTX 6000", "Q RTX 8000",
    "Quadro P4000", "Quadro P5000", "Quadro P6000", "RTX 2000Ada", "RTX 2060", "RTX 2060S",
    "RTX 2070", "RTX 2070S", "RTX 2080", "RTX 2080 Ti", "RTX 2080S", "RTX 3050", "RTX 3060",
    "RTX 3060 Ti", "RTX 3070", "RTX 3070 Ti", "RTX 3080", "RTX 3080 Ti", "RTX 3090",
    "RTX 3090 Ti", "RTX 4000Ada", "RTX 4060", "RTX 4060 Ti", "RTX 4070", "RTX 4070 Ti",
    "RTX 4070S", "RTX 4070S Ti", "RTX 4080", "RTX 4080S", "RTX 4090", "RTX 4090D",
    "RTX 4500Ada", "RTX 5000Ada", "RTX 5060", "RTX 5060 Ti", "RTX 5070", "RTX 5070 Ti",
    "RTX 5080", "RTX 5090", "RTX 5880Ada", "RTX 6000Ada", "RTX A2000", "RTX A4000",
    "RTX A4500", "RTX A5000", "RTX A6000", "RTX PRO 4000", "RTX PRO 4500", "RTX PRO 5000",
    "RTX PRO 6000", "RTX PRO 6000 Max-Q", "RTX PRO 6000 S", "RTX PRO 6000 WS", "Tesla K80",
    "Tesla M40", "Tesla P100", "Tesla P4", "Tesla P40", "Tesla T4", "Tesla V100", "Titan RTX",
    "Titan V", "Titan Xp",
)  # fmt: skip
"""The names that Vast.ai's own client (vast-cli, vastai/data/query.py) knows, and newer ones."""


def names_of(gpu: GpuModel | None) -> list[str]:
    """The names of a wanted GPU in a search; empty where none is known, or any model will do."""
    if gpu is None or not gpu.model:
        return []
    model = msgspec.structs.replace(gpu, vram_gib=0.0)
    return [name for name in GPU_NAMES if not gpu_misfit(model, parse_gpu(name))]
