from __future__ import annotations

import io
import json
import os
import pickle
import random
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torpor.shared.codecs import tensor_files
from torpor.shared.codecs.elements import Element, Layout, Run, guess, layout_of, layout_of_chunk
from torpor.shared.codecs.layout import covered
from torpor.shared.codecs.pickles import storage_dtypes


def layout_of_bytes(data: bytes) -> Layout | None:
    return tensor_files.layout_of_tensors(lambda at, n: data[at : at + n], len(data), guess)


def numbers_of(data: bytes) -> list[Run]:
    """The runs of a layout that are not bytes."""
    layout = layout_of_bytes(data)
    assert layout is not None and layout.bytes == len(data)
    return [run for run in layout.runs if run.element]


def safetensors(tensors: dict[str, tuple[str, bytes]], **extra: Any) -> bytes:
    header: dict[str, Any] = dict(extra)
    body = b""
    for name, (dtype, data) in tensors.items():
        span = [len(body), len(body) + len(data)]
        header[name] = {"dtype": dtype, "shape": [len(data)], "data_offsets": span}
        body += data
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def weights(count: int, dtype: str) -> bytes:
    return np.random.default_rng(1).normal(0, 0.02, count).astype(dtype).tobytes()


BF16 = (np.frombuffer(weights(20_000, "<f4"), "<u4") >> 16).astype("<u2").tobytes()


def test_safetensors_follows_its_tensors(tmp_path: Path) -> None:
    data = safetensors(
        {
            "a": ("BF16", bytes(100)),
            "b": ("BF16", bytes(60)),
            "c": ("F8_E4M3", bytes(33)),
            "d": ("I64", bytes(16)),
            "e": ("BOOL", bytes(5)),
        },
        __metadata__={"format": "pt"},
    )
    file = tmp_path / "model"
    file.write_bytes(data)
    fd = os.open(file, os.O_RDONLY)
    try:
        layout = layout_of(fd, len(data))
    finally:
        os.close(fd)
    header = len(data) - 214
    assert layout == Layout([
        Run(header, Element.BYTES), Run(160, Element.BF16), Run(33, Element.F8),
        Run(16, Element.I64), Run(5, Element.BYTES),
    ])  # fmt: skip


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize(
    ("dtype", "element"),
    [("<f4", Element.F32), ("<f2", Element.F16), ("<i8", Element.I64), ("<c16", Element.F64)],
)
def test_numpy_arrays(version: tuple[int, int], dtype: str, element: Element) -> None:
    out = io.BytesIO()
    np.lib.format.write_array(out, np.zeros(100, dtype), version=version)
    assert numbers_of(out.getvalue()) == [Run(100 * np.dtype(dtype).itemsize, element)]


@pytest.mark.parametrize("dtype", [">f4", "|u1", "<U3", [("a", "<f4"), ("b", "<i2")]])
def test_other_numpy_arrays_stay_bytes(dtype: Any) -> None:
    out = io.BytesIO()
    np.save(out, np.zeros(100, dtype))
    layout = layout_of_bytes(out.getvalue())
    assert layout == Layout([Run(len(out.getvalue()), Element.BYTES)])


def test_npz_finds_its_arrays() -> None:
    out = io.BytesIO()
    np.savez(out, first=np.zeros(500, "<f4"), second=np.zeros(30, "<i2"))
    assert numbers_of(out.getvalue()) == [Run(2000, Element.F32), Run(60, Element.I16)]
    packed = io.BytesIO()
    np.savez_compressed(packed, first=np.zeros(500, "<f4"))
    assert numbers_of(packed.getvalue()) == []


class Storage(NamedTuple):
    """What torch pickles as a persistent id."""

    kind: type
    key: str
    count: int


FLOATS = type("FloatStorage", (), {"__module__": "torch"})
BF16S = type("BFloat16Storage", (), {"__module__": "torch"})


class TorchPickler(pickle.Pickler):
    def persistent_id(self, value: object) -> object:
        if isinstance(value, Storage):
            return ("storage", value.kind, value.key, "cpu", value.count)
        return None


def torch_archive(storages: list[tuple[type, bytes]], protocol: int = 2) -> bytes:
    """What torch.save writes: a pickle with persistent ids, and each storage as a stored member."""
    text = io.BytesIO()
    items = [(kind, str(n), data) for n, (kind, data) in enumerate(storages)]
    state = {f"layer.{key}": Storage(kind, key, len(data)) for kind, key, data in items}
    torch = SimpleNamespace(FloatStorage=FLOATS, BFloat16Storage=BF16S)
    with patch.dict(sys.modules, {"torch": torch}):  # where the pickler looks the classes up
        TorchPickler(text, protocol).dump(state)
    return zipped({"data.pkl": text.getvalue(), **{f"data/{key}": data for _, key, data in items}})


def zipped(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members.items():
            archive.writestr(f"model/{name}", data)
    return out.getvalue()


@pytest.mark.parametrize("protocol", [2, 4])
def test_pytorch_archives_follow_their_storages(protocol: int) -> None:
    data = torch_archive(
        [(FLOATS, bytes(400)), (BF16S, bytes(60)), (FLOATS, bytes(80))],
        protocol,
    )
    assert numbers_of(data) == [
        Run(400, Element.F32), Run(60, Element.BF16), Run(80, Element.F32),
    ]  # fmt: skip


def test_a_pickle_is_never_executed(tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            return os.mkdir, (str(tmp_path / "harm"),)

    assert storage_dtypes(pickle.dumps(Harm())) == {}
    assert not (tmp_path / "harm").exists()


def test_storages_of_no_known_type_are_tried() -> None:
    found = numbers_of(zipped({"data.pkl": pickle.dumps({}), "data/0": weights(40_000, "<f4")}))
    assert Run(160_000, Element.F32) in found


def gguf(tensors: list[tuple[str, int, list[int], bytes]], align: int = 32) -> bytes:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 3)
    out += text("general.alignment") + struct.pack("<II", 4, align)
    out += text("name") + struct.pack("<I", 8) + text("a model")
    words = ["a", "list", "of words"]
    out += text("tokens") + struct.pack("<IIQ", 9, 8, len(words)) + b"".join(map(text, words))
    body = b""
    for name, kind, shape, data in tensors:
        body += bytes(-len(body) % align)
        out += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
        out += struct.pack("<IQ", kind, len(body))
        body += data
    return out + bytes(-len(out) % align) + body


def test_gguf_follows_its_tensors() -> None:
    data = gguf(
        [
            ("norm", 0, [25], bytes(100)),
            ("quantised", 2, [32, 2], bytes(36)),
            ("half", 1, [10, 3], bytes(60)),
            ("brain", 30, [8], bytes(16)),
        ],
        align=64,
    )
    assert numbers_of(data) == [
        Run(100, Element.F32), Run(60, Element.F16), Run(16, Element.BF16),
    ]  # fmt: skip


GOOD = {
    "safetensors": safetensors({"a": ("BF16", bytes(40)), "b": ("F32", bytes(40))}),
    "gguf": gguf([("a", 0, [10], bytes(40)), ("b", 1, [10], bytes(20))]),
    "torch": torch_archive([(FLOATS, bytes(40)), (BF16S, bytes(20))]),
}


@pytest.mark.parametrize("kind", sorted(GOOD))
@given(changes=st.lists(st.tuples(st.integers(0, 2000), st.binary(min_size=1, max_size=8))))
@settings(max_examples=300)
def test_hostile_headers_never_raise(kind: str, changes: list[tuple[int, bytes]]) -> None:
    data = bytearray(GOOD[kind])
    for place, value in changes:
        at = place % len(data)
        data[at : at + len(value)] = value
    layout = layout_of_bytes(bytes(data))
    assert layout is None or layout.bytes == len(data)


@pytest.mark.parametrize("kind", sorted(GOOD))
def test_files_cut_short_never_raise(kind: str) -> None:
    for size in range(len(GOOD[kind])):
        layout = layout_of_bytes(GOOD[kind][:size])
        assert layout is None or layout.bytes == size


@pytest.mark.parametrize(
    "spans", [[[0, 40], [20, 60]], [[0, 1 << 40]], [[-8, 40]], [[40, 0]], [[0, 1 << 70]], [[0]]]
)
def test_safetensors_that_lie_have_no_layout(spans: list[list[int]]) -> None:
    header = {
        str(n): {"dtype": "F32", "shape": [10], "data_offsets": span}
        for n, span in enumerate(spans)
    }
    text = json.dumps(header).encode()
    data = struct.pack("<Q", len(text)) + text + bytes(100)
    layout = layout_of_bytes(data)
    assert layout is None or layout == Layout([Run(len(data), Element.BYTES)])


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<Q", 1 << 62) + b"{" + bytes(100),
        struct.pack("<Q", 60_000) + b'{"a":' * 12_000 + bytes(100),
        b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0) + bytes(100),
        b"GGUF"
        + struct.pack("<IQQ", 3, 0, 1)
        + struct.pack("<QI", 0, 9)
        + bytes([9, 0, 0, 0]) * 90,
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + bytes(100),
        b"PK\x03\x04" + bytes(40) + b"PK\x05\x06" + b"\xff" * 18,
        b"\x93NUMPY",
        b"GGUF",
        b"",
        b"\x7fELF" + bytes(1000),
    ],
)
def test_sizes_that_lie_have_no_layout(data: bytes) -> None:
    assert layout_of_bytes(data) is None


def test_chunks_of_a_layout_add_up_whatever_the_phase() -> None:
    layout = Layout([
        Run(13, Element.BYTES), Run(1000, Element.F32), Run(999, Element.BF16),
        Run(800, Element.F64), Run(3, Element.F8),
    ])  # fmt: skip
    dice = random.Random(5)
    for _ in range(500):
        offset = dice.randrange(layout.bytes + 20)
        length = dice.randrange(1, 900)
        runs = layout_of_chunk(layout, offset, length)
        assert covered(runs) == length
        at = offset
        for run in runs:
            assert run.bytes > 0
            if run.element:
                # Every run begins at a whole element of the file.
                start = {"F32": 13, "BF16": 1013, "F64": 2012, "F8": 2812}[run.element.name]
                assert (at - start) % run.element.width == 0
                assert run.bytes % run.element.width == 0
            at += run.bytes


def test_a_chunk_within_an_element_is_bytes() -> None:
    layout = Layout([Run(80, Element.F64)])
    assert layout_of_chunk(layout, 3, 4) == (Run(4, Element.BYTES),)
    assert layout_of_chunk(layout, 3, 14) == (
        Run(5, Element.BYTES), Run(8, Element.F64), Run(1, Element.BYTES),
    )  # fmt: skip
    assert layout_of_chunk(layout, 200, 10) == (Run(10, Element.BYTES),)


@pytest.mark.parametrize(
    ("sample", "elements"),
    [
        (weights(16_000, "<f4"), {Element.F32}),
        (weights(16_000, "<f8"), {Element.F64}),
        (weights(16_000, "<f2"), {Element.BF16}),  # cut as FP16 is, and the first is named
        (BF16, {Element.BF16}),
        (
            np.random.default_rng(3).integers(0, 3000, 8000).astype("<i4").tobytes(),
            {Element.I32, Element.F32},
        ),
    ],
    ids=["f32", "f64", "f16", "bf16", "integers"],
)
def test_numbers_are_guessed_by_trying(sample: bytes, elements: set[Element]) -> None:
    assert guess(memoryview(sample)) in elements


@pytest.mark.parametrize(
    "sample",
    [
        b"",
        bytes(100),
        random.Random(1).randbytes(60_000),
        Path(random.__file__).read_bytes(),
        Path("/bin/sh").read_bytes(),
    ],
    ids=["nothing", "too little", "noise", "text", "a program"],
)
def test_what_planes_do_not_help_is_not_guessed(sample: bytes) -> None:
    assert guess(memoryview(sample)) is None
