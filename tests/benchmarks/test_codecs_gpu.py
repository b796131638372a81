"""The GPU's benchmark, small, over a driver that runs the kernels here and tells the time by the
work done: its rates are those of no GPU, everything else is as on one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import codecs
from benchmarks.codecs_gpu import __main__ as codecs_gpu
from benchmarks.codecs_gpu import report as gpu_report
from benchmarks.codecs_gpu.chunks import CameBackWrong
from benchmarks.codecs_gpu.coders import Torpor
from benchmarks.codecs_gpu.report import WEIGHTS
from gpu_kernels import device as device_module
from gpu_kernels import nvcomp
from gpu_kernels.suite import NO_GPU
from tests.fixtures.nvcomp import FakeNvcomp
from tests.fixtures.shim import LAUNCH_FAILED, NO_DEVICE, NOT_READY, OUT_OF_MEMORY, ShimDriver
from torpor.shared.codecs.layout import Element, Run
from torpor.shared.codecs.planes import RANS
from torpor.shared.values import KIB

CHUNK = 64 * KIB
HEADS = {1: 4 + 5 + 5, 2: 4 + 5 + 10, 4: 4 + 5 + 20}
"""Bytes of a chunk's stream besides its planes, by the width of its element (docs/planes.md)."""
NVCOMP = ("nvCOMP ans", "nvCOMP zstd, 64 KiB", "nvCOMP lz4, 64 KiB", "nvCOMP gdeflate",
          "nvCOMP bitcomp")  # fmt: skip

Sets = list[tuple[str, bytes, Element]]


@pytest.fixture(scope="module")
def sets() -> Sets:
    """Two chunks of each kind: real weights and text."""
    return list(codecs.data_sets(2 * CHUNK))


@pytest.fixture
def few(sets: Sets, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Leave kinds out, and measure one thread end to end on two chunks."""

    def choose(*names: str) -> None:
        chosen = [one for one in sets if one[0] in names]
        assert len(chosen) == len(names)
        monkeypatch.setattr(codecs_gpu, "data_sets", lambda limit: iter(chosen))

    monkeypatch.setattr(gpu_report, "END_TO_END_CHUNKS", 2)
    monkeypatch.setattr(gpu_report, "THREADS", (1, 2))
    choose(*(name for name, _, _ in sets))
    return choose


@pytest.fixture
def measure(shim: ShimDriver, few: Callable[..., None]) -> Iterator[Callable[..., dict[str, Any]]]:
    """Run the benchmark; all that it takes is given back."""
    device = shim.device()

    def run(library: Any, chunks: int = 2, rounds: int = 1) -> dict[str, Any]:
        return codecs_gpu.run(device, shim.device, library, chunks * CHUNK, rounds, CHUNK)

    yield run
    device.close()
    assert shim.held == 0


def test_every_codec_has_its_ratio_and_its_rates(
    measure: Callable[..., dict[str, Any]], fake_nvcomp: FakeNvcomp, sets: Sets
) -> None:
    report = measure(fake_nvcomp)
    json.dumps(report)
    rows = {(row["data"], row["codec"]): row for row in report["rows"]}
    ours = {data for data, codec in rows if codec == "torpor"}
    assert ours == {name for name, _, of in sets if of is not Element.BYTES} | {codecs.EXPONENTS}
    assert [one["data"] for one in report["left_out"]] == [
        name for name, _, of in sets if of is Element.BYTES
    ]
    for name, plain, element in sets:
        assert [codec for data, codec in rows if data == name and codec != "torpor"] == [*NVCOMP]
        if name in ours and name != "weights FP32 holding BF16":  # of which zstd takes two planes
            chunks = [plain[:CHUNK], plain[CHUNK:]]
            whole = [RANS.encode(memoryview(one), [Run(CHUNK, element)]) for one in chunks]
            expected = sum(len(one or b"") - HEADS[element.width] for one in whole)
            assert rows[name, "torpor"]["stored_bytes"] == expected
            assert rows[name, "torpor"]["ratio"] == round(2 * CHUNK / expected, 4)
    assert [c for d, c in rows if d == codecs.EXPONENTS] == ["torpor", "nvCOMP ans"]
    for row in report["rows"]:
        assert row["plain_bytes"] == 2 * CHUNK
        assert row["encode_gb_s"]["n"] == row["decode_gb_s"]["n"] == 1
        for way in ("encode", "decode"):
            assert row[f"{way}_gb_s"]["median"] > 0
            copied = report["copies"]["on_device_read_and_written_gb_s"]["median"]
            moved = 1 + row["stored_bytes"] / row["plain_bytes"]
            share = row[f"{way}_gb_s"]["median"] * moved / copied
            assert row[f"{way}_share_of_copy"] == pytest.approx(share, abs=1e-4)
    # a byte copied takes the shim a nanosecond, and is read and written
    for name, rate in (("on_device_read_and_written", 2), ("host_to_device", 1)):
        assert report["copies"][f"{name}_gb_s"]["median"] == pytest.approx(rate, rel=1e-3)
    assert report["host"]["gpu"] == "CPU shim"
    assert report["host"]["nvcomp"] == "6.0.0"
    assert report["host"]["commit"]
    assert f"| {WEIGHTS} | torpor | 1." in report["table"]
    ends = {one["codec"]: one for one in report["end_to_end"]}
    assert list(ends)[:2] == ["torpor, 1 thread", "torpor, 2 threads"]
    assert len(ends) == 7
    assert all(one["encode_gb_s"]["median"] >= 0 for one in ends.values())
    assert fake_nvcomp.streams_gone[0] == 0


def test_a_kind_whose_planes_zstd_takes_counts_them_as_raw(
    measure: Callable[..., dict[str, Any]], few: Callable[..., None]
) -> None:
    few("weights FP32 holding BF16", "random bytes")
    report = measure("not here")
    (row,) = report["rows"]
    assert 1.1 < row["ratio"] < 1.3  # of four planes one is coded
    assert {"data": "all", "codec": "nvCOMP", "why": "not here"} in report["left_out"]
    assert report["end_to_end"] == []  # that is for BF16
    assert report["goals"] == {}


def test_chunks_come_again_until_there_are_enough(
    measure: Callable[..., dict[str, Any]], few: Callable[..., None]
) -> None:
    few(WEIGHTS)
    two = measure("not here", chunks=2)["rows"]
    five = measure("not here", chunks=5, rounds=2)["rows"]
    for row, more in zip(two, five, strict=True):
        assert more["plain_bytes"] == 5 * CHUNK
        assert more["ratio"] == pytest.approx(row["ratio"], rel=0.01)
        assert more["encode_gb_s"]["n"] == 2


def test_what_nvcomp_does_not_do_is_left_out_and_said(
    measure: Callable[..., dict[str, Any]],
    few: Callable[..., None],
    fake_nvcomp: FakeNvcomp,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few(WEIGHTS)
    whole = fake_nvcomp.Codec

    def codec(**options: Any) -> object:
        if options["algorithm"] == "Bitcomp":
            raise RuntimeError("nvcompErrorNotSupported")
        return whole(**options)

    monkeypatch.setattr(fake_nvcomp, "Codec", codec)
    report = measure(fake_nvcomp)
    why = "nvCOMP's bitcomp cannot be set up: nvcompErrorNotSupported"
    assert report["left_out"] == [
        {"data": data, "codec": "nvCOMP bitcomp", "why": why}
        for data in (WEIGHTS, f"{WEIGHTS}, end to end")
    ]
    assert [row["codec"] for row in report["rows"]][1:5] == [*NVCOMP[:4]]


def test_no_codec_of_nvcomp_outlives_its_stream(
    measure: Callable[..., dict[str, Any]],
    few: Callable[..., None],
    shim: ShimDriver,
    fake_nvcomp: FakeNvcomp,
) -> None:
    few(WEIGHTS)
    measure(fake_nvcomp)
    of_rows = 2 * len(NVCOMP) + 2  # one tells its bound, one works; and for the exponents
    assert fake_nvcomp.streams_gone[:of_rows] == [0] * of_rows
    assert max(fake_nvcomp.streams_gone) < shim.calls("cuStreamDestroy_v2")


@pytest.mark.parametrize("algorithm", ["ans", "zstd"])
def test_a_codec_that_gives_other_bytes_back_is_no_row(
    measure: Callable[..., dict[str, Any]],
    few: Callable[..., None],
    fake_nvcomp: FakeNvcomp,
    algorithm: str,
) -> None:
    few(WEIGHTS)
    fake_nvcomp.spoils = algorithm
    with pytest.raises(CameBackWrong, match=f"nvCOMP {algorithm}.* does not give chunk 0 back"):
        measure(fake_nvcomp)


@pytest.mark.parametrize("part", ["_decoding", "_join", "_raw"])
def test_bytes_that_were_not_decoded_are_not_taken_for_decoded_ones(
    measure: Callable[..., dict[str, Any]],
    few: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    part: str,
) -> None:
    """Nothing that the memory holds from before, the plain bytes above all, may pass."""
    few("weights FP8 E4M3" if part == "_raw" else WEIGHTS)
    whole = Torpor.decode

    def decode(self: Torpor) -> None:
        getattr(self, part).clear()
        whole(self)

    if part == "_raw":  # so that one chunk is stored as it is
        coded = iter([[0], []])
        monkeypatch.setattr(gpu_report, "coded_planes", lambda chunk, element: next(coded))
    monkeypatch.setattr(Torpor, "check", lambda self: None)
    monkeypatch.setattr(Torpor, "decode", decode)
    with pytest.raises(CameBackWrong, match="torpor does not give chunk"):
        measure("not here")


def test_chunks_that_are_stored_raw_come_back_too(
    measure: Callable[..., dict[str, Any]],
    few: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few("weights FP8 E4M3")
    coded = iter([[0], []])
    monkeypatch.setattr(gpu_report, "coded_planes", lambda chunk, element: next(coded))
    (row,) = measure("not here")["rows"]
    assert 1.05 < row["ratio"] < 1.15


def test_a_gpu_with_less_room_measures_fewer_chunks(
    measure: Callable[..., dict[str, Any]], few: Callable[..., None], shim: ShimDriver
) -> None:
    few("weights FP8 E4M3")
    each = 8 * CHUNK + 640 * KIB
    shim.has_free(2 * each * 3)
    assert measure("not here", chunks=64)["plain_bytes"] == 3 * CHUNK


# -- the command


@pytest.fixture
def command(
    shim: ShimDriver,
    few: Callable[..., None],
    fake_nvcomp: FakeNvcomp,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Path:
    """``main`` over the tests' driver and nvCOMP; the JSON goes to what this gives."""
    few(WEIGHTS)
    out = tmp_path / "gpu.json"
    monkeypatch.setattr(codecs_gpu, "Device", shim.device)
    monkeypatch.setattr(nvcomp, "load", lambda: fake_nvcomp)
    monkeypatch.setattr(
        "sys.argv", ["codecs_gpu", "--mib", "1", "--rounds", "1", "--out", str(out)]
    )
    return out


def test_the_command_writes_json_and_a_picture_and_prints_a_table(
    command: Path, shim: ShimDriver, capsys: pytest.CaptureFixture[str]
) -> None:
    assert codecs_gpu.main() == 0
    assert shim.held == 0
    report = json.loads(command.read_text())
    assert report["rounds"] == 1
    goals = report["goals"]
    assert goals["encodes at 300 GB/s"] is False
    assert list(goals)[2] == "faster than nvCOMP's ANS both ways, at a better ratio"
    assert isinstance(list(goals.values())[2], bool)
    picture = command.with_suffix(".svg").read_text()
    assert picture.count("</svg>") == 1
    assert len(list(command.parent.iterdir())) == 2
    printed = capsys.readouterr()
    assert printed.out.strip() == report["table"]
    assert len(printed.err.splitlines()) == len(report["rows"])


def test_without_nvcomp_its_rows_are_absent_and_the_report_says_why(
    command: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> None:
        raise nvcomp.NvcompError("nvCOMP is not here: install torpor[gpu]")

    monkeypatch.setattr(nvcomp, "load", none)
    assert codecs_gpu.main() == 0
    report = json.loads(command.read_text())
    assert {row["codec"] for row in report["rows"]} == {"torpor"}
    assert report["left_out"] == [
        {"data": "all", "codec": "nvCOMP", "why": "nvCOMP is not here: install torpor[gpu]"}
    ]
    assert report["host"]["nvcomp"] is None
    assert report["goals"]["faster than nvCOMP's ANS both ways, at a better ratio"] is None


def test_without_a_gpu_nothing_is_measured_and_no_file_invented(
    command: Path, shim: ShimDriver, capsys: pytest.CaptureFixture[str]
) -> None:
    shim.fail("cuInit", NO_DEVICE)
    assert codecs_gpu.main() == NO_GPU == 3
    printed = capsys.readouterr()
    assert printed.err == (
        "no benchmark was run: cuInit failed with 100: no CUDA-capable device is detected\n"
    )
    assert printed.out == ""
    assert list(command.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("function", "result", "nth"),
    [
        ("cuMemGetInfo_v2", LAUNCH_FAILED, 1),
        ("cuMemAlloc_v2", OUT_OF_MEMORY, 1),
        ("cuMemHostAlloc", OUT_OF_MEMORY, 1),
        ("cuEventCreate", OUT_OF_MEMORY, 2),
        ("cuMemcpyDtoDAsync_v2", LAUNCH_FAILED, 1),
        ("cuMemcpyHtoDAsync_v2", LAUNCH_FAILED, 2),
        ("cuEventRecord", LAUNCH_FAILED, 3),
        ("cuEventElapsedTime", LAUNCH_FAILED, 1),
        ("cuLaunchKernel", LAUNCH_FAILED, 1),
        ("cuLaunchKernel", LAUNCH_FAILED, 7),
        ("cuStreamQuery", LAUNCH_FAILED, 40),
        ("cuMemcpyDtoHAsync_v2", LAUNCH_FAILED, 9),
        ("cuDevicePrimaryCtxRetain", OUT_OF_MEMORY, 2),  # the agent's encoder, end to end
        ("cuMemAlloc_v2", OUT_OF_MEMORY, 2),
    ],
)
def test_a_call_of_the_driver_that_fails_is_a_line_and_nothing_is_kept(
    command: Path,
    shim: ShimDriver,
    capsys: pytest.CaptureFixture[str],
    function: str,
    result: int,
    nth: int,
) -> None:
    shim.fail(function, result, nth=nth)
    assert codecs_gpu.main() == 1
    printed = capsys.readouterr()
    last = printed.err.splitlines()[-1]
    assert last.startswith("the benchmark was ended, and nothing is kept: ")
    assert f"failed with {result}" in last
    assert all(line.startswith("|") for line in printed.err.splitlines()[:-1])
    assert printed.out == ""
    assert list(command.parent.iterdir()) == []
    assert shim.held == 0


def test_a_gpu_that_hangs_keeps_its_memory_and_is_said_in_a_line(
    command: Path,
    shim: ShimDriver,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may still write there, and memory that is given back may have another owner by then."""
    monkeypatch.setattr(device_module, "PATIENCE_S", 0.02)
    shim.fail("cuStreamQuery", NOT_READY, nth=20, times=1_000_000)
    assert codecs_gpu.main() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("CPU shim has not answered for 0.02 s")
    assert list(command.parent.iterdir()) == []
    assert shim.held > 0
    shim.fail("", 0, times=0)
