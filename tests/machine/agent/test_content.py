"""Content to measure encodings with is like a workspace's."""

from __future__ import annotations

import random

from torpor.machine.agent import content
from torpor.machine.agent.rates import coders
from torpor.shared.codecs.layout import Element, Run
from torpor.shared.codecs.planes import PLANES
from torpor.shared.values import MIB


def test_the_weights_are_like_weights() -> None:
    plain = content.weights(MIB, random.Random(1))
    stored = PLANES.encode(memoryview(plain), [Run(len(plain), Element.BF16)])
    assert stored is not None
    assert 1.45 < len(plain) / len(stored) < 1.55


def test_only_what_a_cpu_writes_is_measured_and_so_advised() -> None:
    """A snapshot may hold `rans` too, but only a GPU writes it."""
    assert {coder.name for coder in coders(Element.BF16)} == {"raw", "lz4", "zstd", "planes"}
    assert {coder.name for coder in coders(Element.BYTES)} == {"raw", "lz4", "zstd"}
