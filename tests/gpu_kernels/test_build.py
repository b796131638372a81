"""What is compiled, and that the fat binaries in the repository are of its sources."""

from __future__ import annotations

import json
import shutil

import pytest

from gpu_kernels import build, nvrtc


@pytest.mark.parametrize("name", build.CUDA_SOURCES)
def test_the_compilers_make_the_same_fat_binaries_again(name: str) -> None:
    kept = build.BUILT / (name.split("/")[0] + ".fatbin")
    again = build.cuda_binary(name)
    assert again == kept.read_bytes(), f"{kept} is of other sources: run make kernels, and commit"


def test_the_fat_binaries_are_of_these_sources_and_compilers() -> None:
    kept = json.loads((build.BUILT / "kernels.json").read_text())
    assert kept == build.cuda_digests(), "run make kernels, and commit"


def test_the_compilers_name_what_they_refuse() -> None:
    source = b'#include "own.h"\nextern "C" __global__ void kernel(float *at) { *at = VALUE; }\n'
    made = nvrtc.fat_binary("small.cu", source, {"own.h": b"#define VALUE 1\n"}, (75, 90))
    assert made.count(b"\x7fELF") == 2 and b".target sm_75" in made
    with pytest.raises(nvrtc.CompilerError, match=r'refused small.cu for sm_75: .*"OTHER"'):
        nvrtc.fat_binary("small.cu", source, {"own.h": b"#define VALUE OTHER\n"}, (75, 90))


@pytest.mark.parametrize(
    ("wheel", "why"),
    [("no-such-compiler==1", "1 is not installed"), ("pytest==0.1", "pytest .* is not 0.1")],
)
def test_a_missing_wheel_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, wheel: str, why: str
) -> None:
    monkeypatch.setattr(nvrtc, "WHEELS", (wheel, wheel))
    with pytest.raises(build.BuildError, match=f"{why}: run make kernels"):
        build.build_cuda()


def test_a_missing_compiler_is_named() -> None:
    with pytest.raises(build.BuildError, match="no C compiler for sparc was found: install gcc"):
        build.build_library(machine="sparc")
    assert shutil.which("sparc-linux-gnu-gcc") is None
