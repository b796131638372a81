"""Names of GPUs as Vast, RunPod, Lambda, TensorDock, AWS, GCP, nvidia-smi and people write them."""

from __future__ import annotations

import pytest

from torpor.control.providers.gpus import GpuModel, gpu_misfit, parse_gpu

SPELLINGS: dict[GpuModel, tuple[str, ...]] = {
    GpuModel("H100"): ("H100", "NVIDIA H100", "h100"),
    GpuModel("H100", "", 80): ("nvidia-h100-80gb", "nvidia-h100-mega-80gb"),
    GpuModel("H100", "SXM"): ("H100-SXM", "H100_SXM", "H100 SXM5"),
    GpuModel("H100", "SXM", 80): (
        "H100 (80 GB SXM5)", "8x H100 (80 GB SXM5)", "NVIDIA H100 80GB HBM3", "h100-sxm5-80gb",
    ),
    GpuModel("H100", "PCIe"): ("NVIDIA H100 PCIe", "H100 PCIE"),
    GpuModel("H100", "NVL"): ("H100-NVL", "H100_NVL", "NVIDIA H100 NVL"),
    GpuModel("H200"): ("H200", "NVIDIA H200"),
    GpuModel("H200", "SXM"): ("H200-SXM",),
    GpuModel("H200", "NVL"): ("NVIDIA H200 NVL",),
    GpuModel("GH200", "", 480): ("NVIDIA GH200 480GB",),
    GpuModel("B200"): ("B200", "NVIDIA B200"),
    GpuModel("A100"): ("A100",),
    GpuModel("A100", "", 80): ("A100-80GB", "nvidia-a100-80gb", "A100 80 GiB"),
    GpuModel("A100", "SXM"): ("A100_SXM4", "A100 SXM4"),
    GpuModel("A100", "SXM", 40): ("NVIDIA A100-SXM4-40GB", "A100 (40 GB SXM4)"),
    GpuModel("A100", "PCIe"): ("A100_PCIE", "A100 PCIe"),
    GpuModel("A100", "PCIe", 80): ("NVIDIA A100 80GB PCIe",),
    GpuModel("A10"): ("A10", "NVIDIA A10"),
    GpuModel("A10G"): ("A10G",),
    GpuModel("A30"): ("NVIDIA  A30", "NVIDIA RTX A30"),
    GpuModel("A40"): ("A40", "NVIDIA A40"),
    GpuModel("L4"): ("L4", "NVIDIA L4", "nvidia-l4"),
    GpuModel("L40"): ("L40",),
    GpuModel("L40S"): ("L40S", "NVIDIA L40S"),
    GpuModel("P4"): ("P4", "nvidia-tesla-p4"),
    GpuModel("T4"): ("T4", "Tesla T4", "nvidia-tesla-t4"),
    GpuModel("V100"): ("V100", "Tesla_V100"),
    GpuModel("V100", "", 32): ("V100-32GB",),
    GpuModel("V100", "SXM"): ("V100 SXM2", "V100 SXM3"),
    GpuModel("V100", "SXM", 16): ("Tesla V100-SXM2-16GB",),
    GpuModel("MI300X", "OAM"): ("AMD Instinct MI300X OAM",),
    GpuModel("RTX 3060"): ("RTX_3060",),
    GpuModel("RTX 3070"): ("RTX_3070", "NVIDIA GeForce RTX 3070"),
    GpuModel("RTX 3080 Ti"): (
        "NVIDIA GeForce RTX 3080 Ti", "NVIDIA GeForce RTX 3080TI", "RTX_3080_Ti",
    ),
    GpuModel("RTX 3090"): ("RTX 3090", "RTX3090"),
    GpuModel("RTX 4070 Ti SUPER"): ("RTX 4070 Ti SUPER", "RTX_4070_Ti_Super", "RTX 4070S Ti"),
    GpuModel("RTX 4070 SUPER"): ("RTX 4070S",),
    GpuModel("RTX 4080 SUPER"): ("NVIDIA GeForce RTX 4080 SUPER", "RTX 4080S"),
    GpuModel("RTX 8000"): ("Quadro RTX 8000", "Q RTX 8000"),
    GpuModel("RTX 4090"): (
        "RTX4090", "RTX 4090", "RTX_4090", "rtx-4090", "NVIDIA GeForce RTX 4090", "4090",
    ),
    GpuModel("RTX 4090", "PCIe", 24): ("geforcertx4090-pcie-24gb",),
    GpuModel("RTX 4090 D"): ("RTX 4090 D",),
    GpuModel("RTX 5090"): ("RTX5090", "NVIDIA GeForce RTX 5090"),
    GpuModel("RTX 2000 Ada"): ("RTX2000-Ada", "NVIDIA RTX 2000 Ada Generation"),
    GpuModel("RTX 4000 Ada"): ("NVIDIA RTX 4000 SFF Ada Generation",),
    GpuModel("RTX 5000 Ada"): ("NVIDIA A5000 Ada", "NVIDIA RTX 5000 Ada Generation"),
    GpuModel("RTX 6000 Ada"): ("RTX_6000Ada", "RTX 6000 Ada", "NVIDIA RTX 6000 Ada Generation"),
    GpuModel("RTX 6000"): ("RTX6000", "Quadro RTX 6000", "Q RTX 6000"),
    GpuModel("RTX A2000"): ("NVIDIA RTX A2000",),
    GpuModel("RTX A4000"): ("RTXA4000",),
    GpuModel("RTX A4500"): ("NVIDIA  RTX A4500",),
    GpuModel("RTX A5000"): ("RTX_A5000",),
    GpuModel("RTX A6000"): ("A6000", "RTX_A6000", "RTX A6000"),
    GpuModel("RTX A6000", "PCIe", 48): ("rtxa6000-pcie-48gb",),
    GpuModel("RTX PRO 6000", "Workstation"): (
        "RTX_PRO_6000_WS", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"),
    GpuModel("RTX PRO 6000", "Server"): ("NVIDIA RTX PRO 6000 Blackwell Server Edition",
                                    "RTX_PRO_6000_S"),
    GpuModel("RTX PRO 6000", "Max-Q"): ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",),
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "gpu"), [(text, gpu) for gpu, texts in SPELLINGS.items() for text in texts]
)
def test_one_gpu_has_one_name_however_it_is_written(text: str, gpu: GpuModel) -> None:
    assert parse_gpu(text) == gpu
    assert parse_gpu(str(gpu), gpu.vram_gib) == gpu


def test_what_the_market_states_of_the_memory_counts() -> None:
    assert parse_gpu("A100_SXM4", 79.6) == GpuModel("A100", "SXM", 79.6)
    assert parse_gpu("A100-80GB", 79.6) == GpuModel("A100", "", 79.6)


def test_no_name_is_no_gpu_and_an_unknown_one_stays_itself() -> None:
    assert parse_gpu("") is None
    assert parse_gpu(" - ") is None
    assert parse_gpu("NoSuchGpu9000") == parse_gpu("no such GPU 9000")


@pytest.mark.parametrize(
    ("wanted", "has", "fits"),
    [
        ("H200", "NVIDIA H200", True),
        ("A100 80GB", "NVIDIA A100-SXM4-80GB", True),
        ("A100 80GB", "NVIDIA A100-SXM4-40GB", False),
        ("A100 80GB", "A100", False),  # unknown memory is not enough
        ("H20", "NVIDIA H200", False),
        ("H100", "H100 PCIe", True),
        ("H100 SXM", "H100 PCIe", False),
        ("H100 SXM", "H100", False),  # unknown is not SXM
        ("L40", "L40S", False),
        ("RTX 6000 Ada", "RTX6000", False),
        ("RTX A6000", "RTX 6000 Ada", False),
        ("RTX 4090", "RTX 4090 D", False),
    ],
)
def test_a_wish_fits_the_model_and_what_more_it_says(wanted: str, has: str, fits: bool) -> None:
    assert (gpu_misfit(parse_gpu(wanted), parse_gpu(has)) == "") is fits


def test_a_card_reports_a_little_less_than_its_name_says() -> None:
    wish = parse_gpu("L4 24GB")
    assert gpu_misfit(wish, GpuModel("L4", "", 22.35)) == ""
    assert "22 GiB, 24" not in gpu_misfit(wish, GpuModel("L4", "", 11))
    assert gpu_misfit(wish, None) == "it has no GPU, L4 is wanted"
