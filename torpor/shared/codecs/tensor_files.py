"""Where the tensors of a file lie: safetensors, NumPy, PyTorch zip archives, npz, GGUF.

Only headers are read, never more than the limits below, and nothing of a file is trusted: sizes
that lie, overlaps and nonsense make the layout None, and the bytes are then coded by what they
look like. Nothing is ever unpickled or executed.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from torpor.shared.codecs.layout import Element, Layout, Run
from torpor.shared.codecs.pickles import storage_dtypes
from torpor.shared.values import MIB, learned

ReadAt = Callable[[int, int], bytes]
"""``read(offset, length)``: at most ``length`` bytes of the file."""
Guess = Callable[[memoryview], "Element | None"]

HEADER_MAX: Final = 32 * MIB
JSON_MAX: Final = 4 * MIB
TENSORS_MAX: Final = 1 << 17
PICKLE_MAX: Final = 4 * MIB
_SAMPLE: Final = 64 << 10

_SAFETENSORS: Final = {
    "F8_E4M3": Element.F8, "F8_E5M2": Element.F8, "F16": Element.F16, "BF16": Element.BF16,
    "F32": Element.F32, "F64": Element.F64, "C64": Element.F32, "I16": Element.I16,
    "U16": Element.I16, "I32": Element.I32, "U32": Element.I32, "I64": Element.I64,
    "U64": Element.I64,
}  # fmt: skip
_NUMPY: Final = {
    "f2": Element.F16, "f4": Element.F32, "f8": Element.F64, "c8": Element.F32,
    "c16": Element.F64, "i2": Element.I16, "u2": Element.I16, "i4": Element.I32,
    "u4": Element.I32, "i8": Element.I64, "u8": Element.I64,
}  # fmt: skip
_TORCH: Final = {
    "HalfStorage": Element.F16, "BFloat16Storage": Element.BF16, "FloatStorage": Element.F32,
    "DoubleStorage": Element.F64, "ComplexFloatStorage": Element.F32,
    "ComplexDoubleStorage": Element.F64, "ShortStorage": Element.I16, "IntStorage": Element.I32,
    "LongStorage": Element.I64,
}  # fmt: skip
_GGUF: Final = {
    0: Element.F32, 1: Element.F16, 25: Element.I16, 26: Element.I32, 27: Element.I64,
    28: Element.F64, 30: Element.BF16,
}  # fmt: skip
_GGUF_SIZES: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_NUMPY_DESCR: Final = re.compile(rb"'descr':\s*'([<|=>])([a-zA-Z]\d{1,4})'")


class Span(NamedTuple):
    """``[start, end)`` of a file holds whole elements."""

    start: int
    end: int
    element: Element


class _Tensor(msgspec.Struct):
    dtype: str
    data_offsets: tuple[int, int]


class _HeaderError(Exception):
    """A header with values that cannot be true."""


# Exceptions that a malformed header raises: fields cut short, numbers past 64 bits, and bytes that
# are not valid text or JSON.
_UNREADABLE: Final = (
    _HeaderError, struct.error, IndexError, OverflowError, RecursionError, UnicodeError,
    msgspec.MsgspecError,
)  # fmt: skip


def layout_of_tensors(read: ReadAt, file_size: int, guess: Guess) -> Layout | None:
    """The layout of a file of a known kind; None for any other, and for one with a false header.

    ``guess`` names the element of a sample where a header leaves it open.
    """
    magic = read(0, 16)
    try:
        if magic[:6] == b"\x93NUMPY":
            spans: Iterable[Span] = _npy(read, 0, file_size, guess)
        elif magic[:4] == b"GGUF":
            spans = _gguf(read, file_size)
        elif magic[:4] == b"PK\x03\x04":
            spans = _zip(read, file_size, guess)
        elif magic[8:9] == b"{":
            spans = _safetensors(read, file_size)
        else:
            return None
        return _layout(list(spans), file_size)
    except _UNREADABLE:
        return None


def _layout(spans: Sequence[Span], file_size: int) -> Layout:
    """Spans as runs, the gaps as BYTES; raises where they overlap or leave the file."""
    runs: list[Run] = []
    at = 0
    for start, end, element in sorted(spans):
        if not at <= start <= end <= file_size:
            raise _HeaderError
        runs += (Run(start - at, Element.BYTES), Run(end - start, element))
        at = end
    runs.append(Run(file_size - at, Element.BYTES))
    return Layout(runs)


def _safetensors(read: ReadAt, file_size: int) -> list[Span]:
    (length,) = struct.unpack("<Q", read(0, 8))
    if length > min(JSON_MAX, file_size - 8):
        raise _HeaderError
    entries = msgspec.json.decode(_exactly(read, 8, length), type=dict[str, msgspec.Raw])
    if len(entries) > TENSORS_MAX:
        raise _HeaderError
    base, spans = 8 + length, []
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        tensor = msgspec.json.decode(entry, type=learned(_Tensor))
        start, end = tensor.data_offsets
        if start < 0:
            raise _HeaderError
        element = _SAFETENSORS.get(tensor.dtype, Element.BYTES)
        if end > start:
            spans.append(Span(base + start, base + end, element))
    return spans


def _npy(read: ReadAt, start: int, end: int, guess: Guess) -> list[Span]:
    """One NumPy array between two offsets of a file; big-endian and structured ones stay BYTES."""
    head = read(start, 12)
    if head[:6] != b"\x93NUMPY" or head[6] not in (1, 2, 3):
        raise _HeaderError
    size_at, form = (8, "<H") if head[6] == 1 else (8, "<I")
    (length,) = struct.unpack_from(form, head, size_at)
    data = start + size_at + struct.calcsize(form) + length
    if length > MIB or data > end:
        raise _HeaderError
    found = _NUMPY_DESCR.search(_exactly(read, data - length, length))
    if found is None or found[1] == b">":
        return []
    kind = found[2].decode()
    # ml_dtypes writes bfloat16 and float8 as types without a name, of two bytes or one.
    element = guess(_sample(read, data, end)) if kind[0] == "V" else _NUMPY.get(kind)
    return [Span(data, end, element)] if element is not None else []


def _gguf(read: ReadAt, file_size: int) -> list[Span]:
    head = _Reader(read(0, min(file_size, HEADER_MAX)))
    head.take(4)
    version, tensors, entries = head.unpack("<IQQ")
    if version not in (2, 3) or tensors > TENSORS_MAX or entries > TENSORS_MAX:
        raise _HeaderError
    align = 32
    for _ in range(entries):
        key = head.text()
        (kind,) = head.unpack("<I")
        if key == b"general.alignment" and kind == 4:
            (align,) = head.unpack("<I")
        else:
            _skip_value(head, kind, depth=0)
    places = []
    for _ in range(tensors):
        head.text()
        (dimensions,) = head.unpack("<I")
        if dimensions > 8:
            raise _HeaderError
        shape = head.unpack(f"<{dimensions}Q")
        kind, offset = head.unpack("<IQ")
        places.append((offset, kind, math.prod(shape)))
    if not align or align & (align - 1):
        raise _HeaderError
    base = -(-head.at // align) * align
    return [
        Span(base + offset, base + offset + count * _GGUF[kind].width, _GGUF[kind])
        for offset, kind, count in places
        if kind in _GGUF
    ]


def _skip_value(head: _Reader, kind: int, depth: int) -> None:
    if kind == 8:
        head.text()
    elif kind == 9:
        inner, count = head.unpack("<IQ")
        if depth > 4 or count > HEADER_MAX:
            raise _HeaderError
        if inner in _GGUF_SIZES:
            head.take(count * _GGUF_SIZES[inner])
        else:
            for _ in range(count):
                _skip_value(head, inner, depth + 1)
    elif kind in _GGUF_SIZES:
        head.take(_GGUF_SIZES[kind])
    else:
        raise _HeaderError


class _Reader:
    """Takes fields from a header; reading past its end raises."""

    def __init__(self, data: bytes) -> None:
        self._data, self.at = data, 0

    def take(self, length: int) -> bytes:
        if length > len(self._data) - self.at:
            raise _HeaderError
        self.at += length
        return self._data[self.at - length : self.at]

    def unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(form, self.take(struct.calcsize(form)))

    def text(self) -> bytes:
        (length,) = self.unpack("<Q")
        return self.take(length)


class _Member(NamedTuple):
    name: bytes
    start: int
    end: int


def _zip(read: ReadAt, file_size: int, guess: Guess) -> list[Span]:
    """The stored members of a zip: ``.npy`` arrays of an npz, storages of a PyTorch archive."""
    members = _members(read, file_size)
    dtypes: dict[str, str] = {}
    for member in members:
        if member.name.endswith(b"/data.pkl") and member.end - member.start <= PICKLE_MAX:
            dtypes = storage_dtypes(_exactly(read, member.start, member.end - member.start))
            break
    spans: list[Span] = []
    for member in members:
        folder, _, key = member.name.rpartition(b"/")
        if member.name.endswith(b".npy"):
            spans += _npy(read, member.start, member.end, guess)
        elif folder.endswith(b"/data") or folder == b"data":
            kind = dtypes.get(key.decode("latin-1"))
            element = _TORCH.get(kind) if kind in _TORCH else None
            if kind is None or kind == "UntypedStorage":
                element = guess(_sample(read, member.start, member.end))
            if element is not None:
                spans.append(Span(member.start, member.end, element))
    return spans


def _members(read: ReadAt, file_size: int) -> list[_Member]:
    """Where the members that are stored uncompressed lie, from the archive's directory."""
    tail_at = max(0, file_size - (1 << 16) - 22)
    tail = read(tail_at, file_size - tail_at)
    at = tail.rfind(b"PK\x05\x06")
    if at < 0:
        raise _HeaderError
    count, size, offset = struct.unpack_from("<HII", tail, at + 10)
    if 0xFFFF in (count,) or 0xFFFFFFFF in (size, offset):
        magic, _, place = struct.unpack_from("<4sIQ", tail, max(at - 20, 0))
        if magic != b"PK\x06\x07":
            raise _HeaderError
        record = _exactly(read, place, 56)
        if record[:4] != b"PK\x06\x06":
            raise _HeaderError
        count, size, offset = struct.unpack_from("<QQQ", record, 32)
    if count > TENSORS_MAX or size > HEADER_MAX:
        raise _HeaderError
    head = _Reader(_exactly(read, offset, size))
    return [m for m in (_member(read, head) for _ in range(count)) if m is not None]


def _member(read: ReadAt, head: _Reader) -> _Member | None:
    fields = struct.unpack("<4s4xHH8xIIHHH8xI", head.take(46))
    magic, flags, method, packed, size, name_size, extra_size, note_size, local = fields
    if magic != b"PK\x01\x02":
        raise _HeaderError
    name, extra = head.take(name_size), _Reader(head.take(extra_size))
    head.take(note_size)
    while extra_size - extra.at >= 4 and 0xFFFFFFFF in (packed, size, local):
        kind, length = extra.unpack("<HH")
        field = _Reader(extra.take(length))
        if kind == 1:  # zip64: only the fields that did not fit, in this order
            size = field.unpack("<Q")[0] if size == 0xFFFFFFFF else size
            packed = field.unpack("<Q")[0] if packed == 0xFFFFFFFF else packed
            local = field.unpack("<Q")[0] if local == 0xFFFFFFFF else local
            break
    if method != 0 or packed != size or flags & 1 or not size:
        return None
    own = _exactly(read, local, 30)
    if own[:4] != b"PK\x03\x04":
        raise _HeaderError
    start = local + 30 + sum(struct.unpack_from("<HH", own, 26))
    return _Member(name, start, start + size)


def _exactly(read: ReadAt, offset: int, length: int) -> bytes:
    data = read(offset, length)
    if len(data) != length:
        raise _HeaderError
    return data


def _sample(read: ReadAt, start: int, end: int) -> memoryview:
    """Some bytes from the middle of a span, at a multiple of 8 from its start."""
    middle = start + max(0, (end - start - _SAMPLE) // 2) // 8 * 8
    return memoryview(read(middle, min(_SAMPLE, end - middle)))
