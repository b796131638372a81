"""Byte planes in numpy: the shortest true statement of the format. Tests compare all others."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


def split(plain: Bytes, width: int, rotate: bool) -> Bytes:
    """Shape (elements * width,) to (width, elements), most significant byte first."""
    elements = plain.reshape(-1, width)[:, ::-1].copy()
    if rotate:
        top = elements[:, 0].astype(np.uint16) << 8 | elements[:, 1]
        top = top << 1 | top >> 15
        elements[:, 0], elements[:, 1] = top >> 8, top & 255
    return np.ascontiguousarray(elements.T)


def join(planes: Bytes, rotate: bool) -> Bytes:
    """The inverse of ``split``."""
    elements = planes.T.copy()
    if rotate:
        top = elements[:, 0].astype(np.uint16) << 8 | elements[:, 1]
        top = top >> 1 | top << 15
        elements[:, 0], elements[:, 1] = top >> 8, top & 255
    return np.ascontiguousarray(elements[:, ::-1]).reshape(-1)
