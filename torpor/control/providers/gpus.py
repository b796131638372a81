"""Names of GPUs as markets, drivers and people write them, parsed into model and form factor."""

from __future__ import annotations

import re
from typing import Final

import msgspec

_VENDORS: Final = re.compile(
    r"\b\d+x\b|nvidia|geforce|tesla|quadro|amd|instinct|radeon|generation|graphics|blackwell|edition"
    r"|mega|gpu"
)
_VRAM: Final = re.compile(r"(\d+) ?gi?b")
_FORM: Final = re.compile(r"sxm\d?|pcie|nvl|oam|hbm3")
_FORMS: Final = {"pcie": "PCIe", "nvl": "NVL", "oam": "OAM"}
_EDITIONS: Final = {
    "ws": "Workstation", "workstation": "Workstation", "wk": "Workstation",
    "s": "Server", "server": "Server", "maxq": "Max-Q", "": "",
}  # fmt: skip
_PRO: Final = re.compile(r"rtxpro(\d{4})(maxq|workstation|server|ws|wk|s|)(?:maxq|workstation)?")
_ADA: Final = re.compile(r"(?:rtx)?a?(\d{4})(?:sff)?ada")
_AMPERE: Final = re.compile(r"(?:rtx)?a([2-6][05]00)")
_RTX: Final = re.compile(r"(?:rtx)?([2-6]0[5-9]0)(tisuper|sti|ti|super|s|d|)")
_QUADRO: Final = re.compile(r"q?rtx(\d{4})")  # Vast.ai writes "Q RTX 8000", "RTX 4070S Ti"
_SUFFIX: Final = {
    "tisuper": " Ti SUPER", "sti": " Ti SUPER", "ti": " Ti", "super": " SUPER", "s": " SUPER",
    "d": " D", "": "",
}  # fmt: skip
# share of the stated memory that counts as enough: a "24 GB" card reports 22.5 GiB
_TOLERANCE: Final = 0.9


class GpuModel(msgspec.Struct, frozen=True):
    """One model of GPU. ``form`` and ``vram_gib`` are empty where they are unknown."""

    model: str  # "H100", "RTX 4090", "RTX 6000 Ada"
    form: str = ""  # "SXM", "PCIe", "NVL"; "Workstation", "Server", "Max-Q" of an RTX PRO
    vram_gib: float = 0.0

    def __str__(self) -> str:
        return f"{self.model} {self.form}".strip()


def parse_gpu(text: str, vram_gib: float = 0.0) -> GpuModel | None:
    """The GPU that ``text`` names; ``vram_gib``, where given, is what the market states of each.

    None for an empty name. A model that is not known keeps its name, in capitals.
    """
    words = re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()
    stated = _VRAM.search(words)
    words = _VRAM.sub(" ", words)
    found = _FORM.search(words)
    name = re.sub(r" +", "", _VENDORS.sub("", _FORM.sub(" ", words)))
    form = _FORMS.get(found[0], "SXM") if found else ""
    if not name:
        return None
    vram_gib = vram_gib or (float(stated[1]) if stated else 0.0)
    if pro := _PRO.fullmatch(name):
        return GpuModel(f"RTX PRO {pro[1]}", _EDITIONS[pro[2]], vram_gib)
    return GpuModel(_model(name), form, vram_gib)


def gpu_misfit(wanted: GpuModel, gpu: GpuModel | None) -> str:
    """Why ``gpu`` is not what somebody means who writes ``wanted``; empty where it is."""
    if gpu is None:
        return f"it has no GPU, {wanted} is wanted"
    if gpu.model != wanted.model:
        return f"its GPU is {gpu}, {wanted} is wanted"
    if wanted.form and gpu.form != wanted.form:
        return f"its {gpu.model} is {gpu.form or 'of no stated form'}, {wanted.form} is wanted"
    return vram_misfit(wanted.vram_gib, gpu)


def least_vram_gib(wanted_gib: float) -> float:
    """The GiB that a GPU sold with this much memory has to report at least."""
    return wanted_gib * _TOLERANCE


def vram_misfit(wanted_gib: float, gpu: GpuModel | None) -> str:
    """Why ``gpu`` has too little memory; empty where it has enough. Unknown is too little."""
    if gpu is not None and gpu.vram_gib >= least_vram_gib(wanted_gib):
        return ""
    if wanted_gib == 0:
        return ""
    has = f"{gpu.vram_gib:g} GiB" if gpu is not None and gpu.vram_gib else "unknown memory"
    return f"each of its GPUs has {has}, {wanted_gib:g} GiB is wanted"


def _model(name: str) -> str:
    if ada := _ADA.fullmatch(name):
        return f"RTX {ada[1]} Ada"
    if ampere := _AMPERE.fullmatch(name):
        return f"RTX A{ampere[1]}"
    if rtx := _RTX.fullmatch(name):
        return f"RTX {rtx[1]}{_SUFFIX[rtx[2]]}"
    if quadro := _QUADRO.fullmatch(name):
        return f"RTX {quadro[1]}"
    return name.removeprefix("rtx").upper()
