"""The file with the figures of GPUs, whatever lies in its place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torpor.machine.sampler.gpu_table import GPU_TABLE, read_gpu_table, write_gpu_table
from torpor.shared.wire.activity import GpuFigures, GpuTable

TABLE = GpuTable(5.0, "0" * 32, [GpuFigures(90, 70_000, 11_559, 71, 650_000, 120, 2400)])


@pytest.mark.rule(3)
def test_what_lies_in_the_place_of_the_table_is_no_table(tmp_path: Path) -> None:
    """Activity is read with it: an error would make a machine that works Unknown."""
    assert read_gpu_table(tmp_path) is None
    write_gpu_table(tmp_path, TABLE)
    assert read_gpu_table(tmp_path) == TABLE
    place = tmp_path / GPU_TABLE
    for said in (b"", b"\xff", b"[" * 60_000, b'{"x":' * 10_000):
        place.write_bytes(said)
        assert read_gpu_table(tmp_path) is None
    place.unlink()
    os.mkfifo(place)  # without a writer, opening it would wait for ever
    assert read_gpu_table(tmp_path) is None
    place.unlink()
    place.mkdir()
    assert read_gpu_table(tmp_path) is None


@pytest.mark.rule(3)
def test_what_lies_in_the_place_of_the_new_table_is_left_alone(tmp_path: Path) -> None:
    """The sampler writes it, and a sampler that waits makes a machine that works Unknown."""
    fresh, work = tmp_path / f".{GPU_TABLE}", tmp_path / "work"
    os.mkfifo(fresh)  # without a reader, opening it would wait for ever
    write_gpu_table(tmp_path, TABLE)
    fresh.unlink()
    work.write_text("the only copy")
    fresh.symlink_to(work)
    write_gpu_table(tmp_path, TABLE)
    assert work.read_text() == "the only copy"
    assert read_gpu_table(tmp_path) is None
