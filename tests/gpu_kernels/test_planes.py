from __future__ import annotations

import numpy as np
import pytest

from gpu_kernels import native
from gpu_kernels.planes import portable, reference
from tests.gpu_kernels import cases

CASES = [
    pytest.param(width, rotate, plain, id=f"{name}, {'turned' if rotate else 'as it is'}")
    for name, width, plain in cases.elements_to_split()
    for rotate in (False, True)
]


def expected(plain: bytes, width: int, rotate: bool) -> list[bytes]:
    planes = reference.split(np.frombuffer(plain, np.uint8), width, rotate)
    return [plane.tobytes() for plane in planes]


def rooms(plain: bytes, width: int) -> list[memoryview]:
    return [memoryview(bytearray(len(plain) // width)) for _ in range(width)]


@pytest.mark.parametrize(("width", "rotate", "plain"), CASES)
def test_c_is_the_reference(lib: native.Library, width: int, rotate: bool, plain: bytes) -> None:
    planes = rooms(plain, width)
    native.split(lib, plain, width, rotate, planes)
    assert [bytes(plane) for plane in planes] == expected(plain, width, rotate)
    back = bytearray(len(plain))
    native.join(lib, planes, width, rotate, back)
    assert back == plain


@pytest.mark.parametrize(("width", "rotate", "plain"), CASES)
def test_plain_python_is_the_reference(width: int, rotate: bool, plain: bytes) -> None:
    planes, back = rooms(plain, width), bytearray(len(plain))
    portable.split(memoryview(plain), width, rotate, planes)
    assert [bytes(plane) for plane in planes] == expected(plain, width, rotate)
    portable.join(planes, width, rotate, memoryview(back))
    assert back == plain


def test_reference_puts_the_exponent_in_plane_0() -> None:
    # BF16: -1.0 is 0xBF80, exponent 127; 0x0001 is the least mantissa.
    plain = np.array([0xBF80, 0x0001, 0x8000], "<u2").tobytes()
    assert expected(plain, 2, True) == [bytes([0x7F, 0, 0]), bytes([0x01, 0x02, 0x01])]
    # FP32 -1.0 with the least mantissa: the sign joins plane 1, planes 2 and 3 stay as they are.
    plain = np.array([0xBF800001], "<u4").tobytes()
    assert expected(plain, 4, True) == [b"\x7f", b"\x01", b"\x00", b"\x01"]


@pytest.mark.parametrize(("width", "rotate", "plain"), CASES[::5])
def test_reference_joins_what_it_split(width: int, rotate: bool, plain: bytes) -> None:
    planes = reference.split(np.frombuffer(plain, np.uint8), width, rotate)
    assert reference.join(planes, rotate).tobytes() == plain


@pytest.mark.parametrize(
    ("size", "width", "plane_sizes"),
    [(9, 2, [4, 4]), (8, 2, [4, 3]), (8, 2, [4, 4, 4]), (9, 3, [3, 3, 3])],
)
def test_sizes_are_checked_before_c_sees_an_address(
    lib: native.Library, size: int, width: int, plane_sizes: list[int]
) -> None:
    planes = [memoryview(bytearray(n)) for n in plane_sizes]
    with pytest.raises(ValueError, match=r"planes"):
        native.split(lib, bytes(size), width, False, planes)
    with pytest.raises(ValueError, match=r"planes"):
        native.join(lib, planes, width, False, bytearray(size))


def test_c_does_not_write_into_read_only_memory(lib: native.Library) -> None:
    with pytest.raises(BufferError):
        native.split(lib, bytes(8), 2, False, [memoryview(bytes(4)), memoryview(bytes(4))])
