"""The GPU's benchmark, small, on stand-ins for CuPy and nvCOMP: its rates are those of no GPU,
everything else is as on one."""

from __future__ import annotations

import ctypes
import json
import sys
import zlib
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from benchmarks import codecs
from benchmarks.codecs_gpu import __main__ as codecs_gpu
from tests.fixtures.gpu import MakePython
from tests.gpu_kernels.suite import NO_GPU
from torpor.machine.agent.gpu_worker import GpuWorker
from torpor.shared.codecs.encodings import ENCODINGS
from torpor.shared.codecs.layout import Run
from torpor.shared.codecs.planes import RANS
from torpor.shared.values import KIB

CHUNK = 64 * KIB
REPORT = ("benchmarks.codecs_gpu.coders", "benchmarks.codecs_gpu.report")
"""Modules that import CuPy."""
WEIGHTS = "weights BF16"
HEADS = {1: 4 + 5 + 5, 2: 4 + 5 + 10, 4: 4 + 5 + 20}
"""Bytes of a chunk's stream besides its planes, by the width of its element (docs/planes.md)."""
NVCOMP = ("nvCOMP ans", "nvCOMP zstd, 64 KiB", "nvCOMP lz4, 64 KiB", "nvCOMP gdeflate",
          "nvCOMP bitcomp")  # fmt: skip


class Batch:
    """Buffers as nvCOMP holds them."""

    def __init__(self, arrays: Sequence[Any]) -> None:
        self.arrays = list(arrays)
        self.buffer_sizes = [array.nbytes for array in arrays]


class Codec:
    """zlib in the place of each algorithm; makes the element's type known to be asked for."""

    spoils = ""

    def __init__(self, algorithm: str, cuda_stream: int, **settings: Any) -> None:
        expected = {"bitstream_kind", "uncomp_chunk_size"}
        if algorithm in ("ANS", "Bitcomp"):
            expected.add("data_type")
        assert settings.keys() == expected
        assert cuda_stream
        assert settings["bitstream_kind"] == ("raw" if algorithm in ("LZ4", "Zstd") else "own")
        self.algorithm = algorithm

    def get_max_comp_buffer_size(self, source: Any) -> int:
        return int(source.nbytes) + 1000

    def compression_config(self, sizes: list[int]) -> object:
        return sizes

    decompression_config = compression_config

    def encode(self, given: Batch, out: Batch, compression_config: Any) -> Batch:
        return self._each(zlib.compress, given, out)

    def decode(self, given: Batch, *, out: Batch, decompression_config: Any) -> Batch:
        made = self._each(zlib.decompress, given, out)
        if self.algorithm == self.spoils:
            made.arrays[0][0] ^= 1
        return made

    def _each(self, work: Callable[[bytes], bytes], given: Batch, out: Batch) -> Batch:
        for number, (source, room) in enumerate(zip(given.arrays, out.arrays, strict=True)):
            done = work(source.tobytes())
            ctypes.memmove(room.data.ptr, done, len(done))
            out.buffer_sizes[number] = len(done)
        return out


def nvcomp() -> ModuleType:
    made = ModuleType("nvidia.nvcomp")
    made.__dict__.update(
        __version__="6.0.0",
        BitstreamKind=SimpleNamespace(RAW="raw", NVCOMP_NATIVE="own"),
        Codec=Codec,
        as_array=lambda array: array,
        as_arrays=lambda arrays, cuda_stream: Batch(arrays),
    )
    return made


Measure = Callable[..., dict[str, Any]]


@pytest.fixture
def measure(
    cupy: Any, gpu: Any, make_python: MakePython, monkeypatch: pytest.MonkeyPatch
) -> Measure:
    """Run the benchmark on two chunks of the kinds that are named."""
    for name in REPORT:
        monkeypatch.delitem(sys.modules, name, raising=False)
    report = import_module("benchmarks.codecs_gpu.report")
    monkeypatch.setattr(report, "END_TO_END_CHUNKS", 2)
    monkeypatch.setattr(report, "THREADS", (1, 2))
    monkeypatch.setitem(sys.modules, "nvidia.nvcomp", nvcomp())
    monkeypatch.setattr(codecs_gpu, "GpuWorker", lambda python: GpuWorker(make_python()))
    sets = list(codecs.data_sets(2 * CHUNK))

    def run(*names: str) -> dict[str, Any]:
        chosen = [row for row in sets if row[0] in names]
        assert len(chosen) == len(names)
        monkeypatch.setattr(codecs_gpu, "data_sets", lambda limit: iter(chosen))
        return codecs_gpu.run(gpu, 2 * CHUNK, rounds=1, chunk_bytes=CHUNK)

    return run


def test_every_codec_has_its_ratio_and_its_rates(measure: Measure) -> None:
    report = measure(WEIGHTS, "weights FP32", "random bytes")
    json.dumps(report)
    rows = {(row["data"], row["codec"]): row for row in report["rows"]}
    assert [row["data"] for row in report["left_out"]] == ["random bytes"]
    for name, plain, element in codecs.data_sets(2 * CHUNK):
        if name not in (WEIGHTS, "weights FP32"):
            continue
        assert [codec for data, codec in rows if data == name] == ["torpor", *NVCOMP]
        chunks = [plain[:CHUNK], plain[CHUNK:]]
        whole = [RANS.encode(memoryview(chunk), [Run(CHUNK, element)]) for chunk in chunks]
        expected = sum(len(stored or b"") - HEADS[element.width] for stored in whole)
        assert rows[name, "torpor"]["stored_bytes"] == expected
    assert [c for d, c in rows if d == codecs.EXPONENTS] == ["torpor", "nvCOMP ans"]
    for row in report["rows"]:
        assert row["plain_bytes"] == 2 * CHUNK
        assert row["encode_gb_s"]["n"] == row["decode_gb_s"]["n"] == 1
        assert min(row["encode_share_of_copy"], row["decode_share_of_copy"]) >= 0
    assert report["host"]["gpu"] == "CPU stand-in, compute capability 0.0"
    assert report["host"]["nvcomp"] == "6.0.0"
    assert f"| {WEIGHTS} | torpor | 1." in report["table"]
    assert next(iter(report["goals"].values())) is False
    ends = [row["codec"] for row in report["end_to_end"]]
    assert ends == ["torpor, 1 thread", "torpor, 2 threads"]


def test_without_nvcomp_its_rows_are_absent_and_the_report_says_why(
    measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.nvcomp", None)
    report = measure(WEIGHTS)
    assert {row["codec"] for row in report["rows"]} == {"torpor"}
    (left_out,) = report["left_out"]
    assert left_out["why"].startswith("nvCOMP is not here (")
    assert report["goals"]["faster than nvCOMP's ANS both ways, at a better ratio"] is None


def test_a_codec_that_gives_other_bytes_back_is_no_row(
    cupy: Any, measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Codec, "spoils", "Zstd")
    wrong = import_module("benchmarks.codecs_gpu.report").CameBackWrong
    with pytest.raises(wrong, match="nvCOMP zstd, 64 KiB does not give chunk 0 back"):
        measure(WEIGHTS)
    cupy.PLAN |= {"at": 1, "do": "lie"}
    with pytest.raises(wrong, match="torpor does not give chunk 0 back"):
        measure("weights FP8 E4M3")


def test_without_cupy_or_a_gpu_nothing_is_measured_and_no_file_invented(
    cupy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["codecs_gpu", "--out", str(tmp_path / "gpu.json")])
    cupy.PLAN["devices"] = 0
    assert codecs_gpu.main() == NO_GPU == 3
    assert "no benchmark was run: no NVIDIA GPU can be used" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "cupy", None)
    for name in ("gpu_kernels.cuda", *REPORT):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert codecs_gpu.main() == NO_GPU
    assert "install torpor[gpu]" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_no_snapshot_can_hold_what_is_nvcomp_s_own() -> None:
    """A manifest names an encoding by its number, and none of these is nvCOMP's; and nothing but
    the benchmark knows of nvCOMP, so no path of the engine leads there."""
    root = Path(codecs_gpu.__file__).parents[2]
    tops = ("torpor", "gpu_kernels", "blocks", "tasks", "flows", "deployments")
    paths = [path for top in tops for path in (root / top).rglob("*.py")]
    assert [str(path) for path in paths if "nvcomp" in path.read_text().lower()] == []
    assert {codec.name for codec in ENCODINGS.values()} == {"raw", "lz4", "zstd", "planes", "rans"}
