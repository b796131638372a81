from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from torpor.control.providers import nvidia


@pytest.fixture(autouse=True)
def forgets() -> Iterator[None]:
    nvidia.gpus_here.cache_clear()
    yield
    nvidia.gpus_here.cache_clear()


def test_the_driver_names_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for bus, model in (("0000:01:00.0", "NVIDIA H200"), ("0000:02:00.0", "NVIDIA H200")):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(f"Model: \t\t {model}\nIRQ:   16\n")
    (tmp_path / "0000:03:00.0").mkdir()
    (tmp_path / "0000:03:00.0" / "information").write_bytes(b"\xff no model here")
    monkeypatch.setattr(nvidia, "DRIVER", tmp_path)
    assert nvidia.gpus_here() == (("NVIDIA H200", 2),)


def test_the_tool_is_asked_where_the_driver_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho NVIDIA L4\n")
    tool.chmod(0o755)
    monkeypatch.setattr(nvidia, "DRIVER", tmp_path / "none")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert nvidia.gpus_here() == (("NVIDIA L4", 1),)
    nvidia.gpus_here.cache_clear()
    tool.write_text("#!/bin/sh\necho no devices were found\nexit 6\n")
    assert nvidia.gpus_here() == ()
    nvidia.gpus_here.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert nvidia.gpus_here() == ()
