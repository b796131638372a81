"""nvCOMP's room, over a module that compresses on the CPU and a driver that runs there."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lz4.block
import pytest
import zstandard

from gpu_kernels import cases, nvcomp, nvcomp_suite
from gpu_kernels.device import Device
from gpu_kernels.driver import GpuError
from gpu_kernels.nvcomp import Batches, Encoded, EncodedRefused, NvcompError, Stock, Transient
from tests.fixtures.nvcomp import BitstreamKind, FakeNvcomp
from tests.fixtures.shim import LAUNCH_FAILED, ShimDriver
from torpor.shared.codecs.encodings import ENCODINGS, decode_chunk
from torpor.shared.codecs.layout import Element
from torpor.shared.codecs.stock import LZ4, ZSTD
from torpor.shared.errors import ManifestInvalid, SnapshotDamaged
from torpor.shared.format import checks
from torpor.shared.format.manifest import Chunk

KIB = 1024
ALL = ("lz4", "zstd", "ans", "gdeflate", "bitcomp")


def chunks(count: int = 11) -> list[bytes]:
    """Of every size up to 64 KiB, each another one."""
    dice = random.Random(5)
    sizes = [64 * KIB, 2, 40_000, *(2 * dice.randrange(1, 32 * KIB) for _ in range(count - 3))]
    return [cases.exponents(dice, size) for size in sizes]


def batches(
    device: Device, library: FakeNvcomp, algorithm: str, element: str = "BF16", batch: int = 3
) -> Batches:
    return Batches(device, library, algorithm, element, 64 * KIB, batch)


@pytest.mark.parametrize("algorithm", ALL)
def test_batches_come_back_in_order(
    device: Device, fake_nvcomp: FakeNvcomp, algorithm: str
) -> None:
    room = batches(device, fake_nvcomp, algorithm)
    plains = chunks()
    encoded = list(room.encode(plains))
    assert [one.plain_bytes for one in encoded] == [len(plain) for plain in plains]
    assert sum(len(one.stored) for one in encoded) < 0.6 * sum(map(len, plains))
    assert all(len(one.stored) <= room.bound for one in encoded)
    assert list(room.decode(encoded)) == plains
    assert list(room.decode(reversed(encoded))) == plains[::-1]
    assert list(room.encode([])) == []


def test_stock_formats_are_those_of_the_cpu(device: Device, fake_nvcomp: FakeNvcomp) -> None:
    plains = chunks()
    for algorithm, cpu in (("lz4", LZ4), ("zstd", ZSTD)):
        room = batches(device, fake_nvcomp, algorithm)
        for one, plain in zip(room.encode(plains), plains, strict=True):
            assert type(one) is Stock
            assert cpu.name == one.algorithm
            assert cpu.decode(one.stored, one.plain_bytes) == plain
        stored = [bytes(cpu.encode(plain)) for plain in plains]
        theirs = [
            Stock(algorithm, len(plain), one, nvcomp.digest_of(one))
            for one, plain in zip(stored, plains, strict=True)
        ]
        assert list(room.decode(theirs)) == plains


def test_a_batch_begins_before_the_one_ahead_has_ended(
    device: Device, fake_nvcomp: FakeNvcomp
) -> None:
    room = batches(device, fake_nvcomp, "lz4")
    list(room.encode(chunks(11)))
    one, other = (lane.queue.stream for lane in room.lanes)
    assert one != other
    assert fake_nvcomp.calls == [
        ("encode", one), ("encode", other),
        ("encode done", one), ("encode", one),
        ("encode done", other), ("encode", other),
        ("encode done", one), ("encode done", other),
    ]  # fmt: skip


def test_chunks_are_taken_as_they_are_needed(device: Device, fake_nvcomp: FakeNvcomp) -> None:
    taken = 0

    def source() -> Iterator[bytes]:
        nonlocal taken
        for taken, plain in enumerate(chunks(30), 1):  # noqa: B007
            yield plain

    encoded = batches(device, fake_nvcomp, "zstd").encode(source())
    next(encoded)
    assert taken == 3 * 3  # two lanes at work, and the batch that waits for one of them


def test_memory_is_bounded_and_given_back(
    device: Device, shim: ShimDriver, fake_nvcomp: FakeNvcomp
) -> None:
    shim.has_free(1 << 30)
    room = batches(device, fake_nvcomp, "lz4")
    assert (1 << 30) - device.free_bytes() == room.device_bytes
    assert room.device_bytes < 2 * 3 * (2 * 64 * KIB + 2 * KIB)
    for _ in range(3):
        begun = room.encode(chunks())
        next(begun)
        begun.close()  # type: ignore[attr-defined]
    noise = [random.Random(9).randbytes(64 * KIB)] * 7  # as large as it gets
    assert list(room.decode(list(room.encode(noise)))) == noise
    with pytest.raises(RuntimeError, match="end one encode or decode"):
        list(room.decode(room.encode(noise)))
    begun = room.encode(noise)
    next(begun)
    with pytest.raises(RuntimeError, match="before they are closed"):
        room.close()
    begun.close()  # type: ignore[attr-defined]
    room.close()
    room.close()
    assert device.free_bytes() == 1 << 30
    assert fake_nvcomp.streams_gone == [0, 0, 0]  # two codecs, and one that told its bound
    with pytest.raises(RuntimeError, match="these Batches are closed"):
        next(room.encode(noise))
    device.close()
    assert shim.held == 0


@pytest.mark.parametrize("algorithm", ALL)
@pytest.mark.parametrize("where", [0, 1, -1])
def test_damage_is_refused_before_any_decoder_sees_it(
    device: Device, fake_nvcomp: FakeNvcomp, algorithm: str, where: int
) -> None:
    room = batches(device, fake_nvcomp, algorithm)
    encoded = list(room.encode(chunks(3)))
    damaged = bytearray(encoded[where].stored)
    damaged[len(damaged) // 2] ^= 1
    encoded[where] = replace(encoded[where], stored=bytes(damaged))
    fake_nvcomp.calls.clear()
    with pytest.raises(EncodedRefused, match=rf"a chunk of {algorithm}, \d+ bytes, is damaged"):
        list(room.decode(encoded))
    assert fake_nvcomp.calls == []


def test_claims_beyond_the_bounds_are_refused(device: Device, fake_nvcomp: FakeNvcomp) -> None:
    room = batches(device, fake_nvcomp, "lz4")
    (good,) = room.encode([b"plain" * 1000])
    long = bytes(room.bound + 1)
    fake_nvcomp.calls.clear()
    for bad in (
        replace(good, plain_bytes=64 * KIB + 1),
        replace(good, plain_bytes=0),
        replace(good, plain_bytes=-1),
        replace(good, stored=b"", digest=nvcomp.digest_of(b"")),
        replace(good, stored=long, digest=nvcomp.digest_of(long)),
    ):
        with pytest.raises(EncodedRefused, match=r"claims -?\d+ bytes in \d+; the limits are"):
            list(room.decode([bad]))
    with pytest.raises(EncodedRefused, match="a chunk of lz4 was given to zstd"):
        list(batches(device, fake_nvcomp, "zstd").decode([good]))
    assert fake_nvcomp.calls == []


def test_another_version_s_own_bitstream_is_refused_and_its_stock_formats_are_not(
    device: Device, fake_nvcomp: FakeNvcomp
) -> None:
    plains = chunks(3)
    made = {name: list(batches(device, fake_nvcomp, name).encode(plains)) for name in ALL}
    fake_nvcomp.__version__ = "6.1.0"
    fake_nvcomp.calls.clear()
    for name in sorted(nvcomp.TRANSIENT):
        assert all(type(one) is Transient for one in made[name])
        with pytest.raises(
            EncodedRefused, match=rf"{name} was made by nvCOMP 6\.0\.0, and here is 6\.1\.0.*again"
        ):
            list(batches(device, fake_nvcomp, name).decode(made[name]))
    assert fake_nvcomp.calls == []
    for name in sorted(nvcomp.STOCK):
        assert list(batches(device, fake_nvcomp, name).decode(made[name])) == plains


def test_what_decodes_to_another_size_is_an_error(device: Device, fake_nvcomp: FakeNvcomp) -> None:
    room = batches(device, fake_nvcomp, "zstd")
    (good,) = room.encode([b"plain" * 1000])
    with pytest.raises(NvcompError, match=r"zstd decoded to other sizes: \[5000\]"):
        list(room.decode([replace(good, plain_bytes=5001)]))
    with pytest.raises(NvcompError, match="zstd does not decode: The output buffer is too small"):
        list(room.decode([replace(good, plain_bytes=4999)]))
    assert list(room.decode([good])) == [b"plain" * 1000]


@pytest.mark.parametrize("lie", [-10_000, 80 * KIB])
def test_sizes_that_nvcomp_cannot_have_written_are_not_believed(
    device: Device, fake_nvcomp: FakeNvcomp, lie: int
) -> None:
    room = batches(device, fake_nvcomp, "lz4")
    fake_nvcomp.lies_by = lie
    with pytest.raises(NvcompError, match=r"claims .* bytes: out of bounds"):
        list(room.encode([b"plain" * 1000]))


def test_a_fault_of_the_gpu_is_one_of_ours(
    device: Device, shim: ShimDriver, fake_nvcomp: FakeNvcomp
) -> None:
    room = batches(device, fake_nvcomp, "lz4")
    shim.fail("cuMemcpyHtoDAsync_v2", LAUNCH_FAILED, nth=5)
    with pytest.raises(GpuError, match="719"):
        list(room.encode(chunks()))


def test_chunks_that_an_algorithm_does_not_take(device: Device, fake_nvcomp: FakeNvcomp) -> None:
    with pytest.raises(ValueError, match="a chunk of 0 bytes"):
        list(batches(device, fake_nvcomp, "lz4").encode([b""]))
    with pytest.raises(ValueError, match=r"a chunk of 65537 bytes; lz4 takes up to 65536 here"):
        list(batches(device, fake_nvcomp, "lz4").encode([bytes(65537)]))
    with pytest.raises(ValueError, match=r"a chunk of 6 bytes; ans takes .* in elements of 4"):
        list(batches(device, fake_nvcomp, "ans", "F32").encode([b"odd..."]))
    assert len(list(batches(device, fake_nvcomp, "zstd", "F32").encode([b"odd..."]))) == 1
    for size, batch in ((0, 1), ((1 << 24) + 1, 1), (1, 0)):
        with pytest.raises(ValueError, match="the limit is 16777216"):
            Batches(device, fake_nvcomp, "lz4", "BYTES", size, batch)
    for algorithm, element in (("snappy", "BF16"), ("lz4", "BF17")):
        with pytest.raises(ValueError, match=f"nvCOMP has no '{algorithm}' of '{element}'"):
            batches(device, fake_nvcomp, algorithm, element)


# -- what the codecs are made with


def test_arguments_of_the_codecs(device: Device, fake_nvcomp: FakeNvcomp) -> None:
    raw = {"bitstream_kind": BitstreamKind.RAW, "uncomp_chunk_size": 64 * KIB}
    own = {"bitstream_kind": BitstreamKind.NVCOMP_NATIVE, "uncomp_chunk_size": 65_536}
    wanted: dict[str, dict[str, Any]] = {
        "lz4": {"algorithm": "LZ4", **raw},
        "zstd": {"algorithm": "Zstd", **raw},
        "ans": {"algorithm": "ANS", "data_type": "<f2", **own},
        "gdeflate": {"algorithm": "GDeflate", **own},
        "bitcomp": {"algorithm": "Bitcomp", "data_type": "<u2", **own},
    }
    for algorithm, expected in wanted.items():
        fake_nvcomp.codecs.clear()
        room = batches(device, fake_nvcomp, algorithm)
        assert fake_nvcomp.codecs == [
            expected,  # asked for its bound
            *({**expected, "cuda_stream": lane.queue.stream} for lane in room.lanes),
        ]


def test_every_element_has_a_type_of_its_width(fake_nvcomp: FakeNvcomp) -> None:
    types = {
        algorithm: {
            element.name: nvcomp.settings(fake_nvcomp, algorithm, element.name, 4096)["data_type"]
            for element in Element
        }
        for algorithm in ("ans", "bitcomp")
    }
    assert types["ans"] == dict.fromkeys(Element.__members__, "|u1") | {
        "F8": "|f1", "F16": "<f2", "BF16": "<f2", "F32": "<f4",
    }  # fmt: skip
    for element in Element:
        assert types["bitcomp"][element.name][1:] == f"u{element.width}"
        assert element.width % int(types["ans"][element.name][-1]) == 0


# -- what is missing


def test_without_the_library_the_reason_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.nvcomp", None)
    with pytest.raises(NvcompError, match=r"nvCOMP is not here \(.*\): install torpor\[gpu\]"):
        nvcomp.load()


def test_another_major_version_is_not_used(
    monkeypatch: pytest.MonkeyPatch, fake_nvcomp: FakeNvcomp
) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.nvcomp", fake_nvcomp)
    assert nvcomp.load() is fake_nvcomp
    monkeypatch.setitem(sys.modules, "nvidia.nvcomp", SimpleNamespace(__version__="5.1.0"))
    with pytest.raises(NvcompError, match=r"nvCOMP 5\.1\.0 is here, torpor knows 6: install"):
        nvcomp.load()


def test_the_library_s_own_word_on_a_missing_driver_is_kept(
    device: Device, fake_nvcomp: FakeNvcomp, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(**_: object) -> None:
        raise RuntimeError("CUDA Runtime API failure: CUDA driver version is insufficient")

    monkeypatch.setattr(fake_nvcomp, "Codec", none)
    with pytest.raises(NvcompError, match="nvCOMP's ans cannot be set up: CUDA Runtime API fail"):
        batches(device, fake_nvcomp, "ans")


# -- no snapshot


def test_no_snapshot_takes_what_is_nvcomp_s_own(device: Device, fake_nvcomp: FakeNvcomp) -> None:
    """A manifest names an encoding by its number, and a chunk is a buffer: this is neither."""
    (one,) = batches(device, fake_nvcomp, "ans").encode([b"plain" * 1000])
    assert isinstance(one, Transient)
    assert not {"code", "encoding"} & {field.name for field in fields(one)}
    with pytest.raises(TypeError):
        memoryview(one)  # type: ignore[arg-type]
    known = set(ENCODINGS)
    names = {encoding.name for encoding in ENCODINGS.values()}
    assert not names & nvcomp.TRANSIENT
    for code in set(range(-1, 256)) - known:
        with pytest.raises(SnapshotDamaged, match=f"unknown encoding {code}"):
            decode_chunk(code, one.stored, one.plain_bytes)
    for code in known - {0}:  # smuggled in under a known number, it does not decode
        with pytest.raises(SnapshotDamaged):
            decode_chunk(code, one.stored, one.plain_bytes)


@pytest.mark.parametrize("code", [99, 100, 255, -1])
def test_a_manifest_that_names_another_encoding_is_refused(code: int) -> None:
    chunk = Chunk(name=bytes(32), plain=10, encoding=code, pack=0, offset=0, stored=10)
    with pytest.raises(checks._Refused, match=f"unknown encoding {code}"):
        checks._check_chunks([chunk], [])
    assert issubclass(ManifestInvalid, Exception)


def test_nothing_but_its_suite_and_benchmark_knows_of_nvcomp() -> None:
    """So no path of the engine, which writes the manifests, leads there."""
    root = Path(nvcomp.__file__).parents[1]
    tops = ("torpor", "gpu_kernels", "blocks", "tasks", "flows", "deployments")
    named = {
        str(path.relative_to(root))
        for top in tops
        for path in (root / top).rglob("*.py")
        if "nvcomp" in path.read_text().lower()
    }
    assert named == {"gpu_kernels/nvcomp.py", "gpu_kernels/nvcomp_suite.py"}


def test_a_stock_chunk_is_not_called_transient_nor_the_other_way_round() -> None:
    with pytest.raises(ValueError, match="'ans' is no stock format"):
        Stock("ans", 1, b"x", b"")
    with pytest.raises(ValueError, match="'zstd' is not nvCOMP's own"):
        Transient("zstd", 1, b"x", b"", "6.0.0")
    one = Encoded("lz4", 1, b"secret", b"digest")
    assert "secret" not in repr(one)
    with pytest.raises(AttributeError):
        one.stored = b""  # type: ignore[misc]


def test_the_fake_is_as_strict_as_the_documentation(fake_nvcomp: FakeNvcomp) -> None:
    for options in ({"algorithm": "lzma"}, {"algorithm": "Zstd", "data_type": "|u1"}):
        with pytest.raises(ValueError, match=r"Unknown algorithm|Unsupported argument"):
            fake_nvcomp.Codec(**options)
    frame = zstandard.ZstdCompressor().compress(b"plain")
    assert zstandard.ZstdDecompressor().decompress(frame) == b"plain"
    assert lz4.block.decompress(lz4.block.compress(b"x" * 99)) == b"x" * 99


# -- the suite for a machine with a GPU


def test_the_suite_finds_nothing_and_gives_all_back(
    device: Device, shim: ShimDriver, fake_nvcomp: FakeNvcomp
) -> None:
    before = shim.held
    report = nvcomp_suite.run(device, fake_nvcomp, sizes=[4096])
    assert report == {"device": "CPU shim", "nvcomp": "6.0.0", "failures": []}
    assert shim.held == before
    assert set(fake_nvcomp.streams_gone) == set(range(0, shim.calls("cuStreamDestroy_v2"), 2))


@pytest.mark.parametrize("algorithm", ALL)
def test_the_suite_names_what_comes_back_wrong(
    device: Device, fake_nvcomp: FakeNvcomp, algorithm: str
) -> None:
    fake_nvcomp.spoils = algorithm
    failures = nvcomp_suite.run(device, fake_nvcomp, sizes=[4096])["failures"]
    assert isinstance(failures, list)
    assert len(failures) > 10
    assert {failure.split()[0] for failure in failures} == {algorithm}
