"""Packs hashed together have the MD5 that each has alone."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from gpu_kernels import native, twin
from torpor.machine.pipeline.digests import PackDigests
from torpor.shared.values import KIB, MIB

md5 = partial(hashlib.md5, usedforsecurity=False)
DICE = random.Random(5)


@pytest.fixture(params=["as it is", "AVX2", "no vectors", "no library"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This machine, and lesser ones."""
    lib = native.library()
    assert lib is not None, "the C library is not built: python -m gpu_kernels.build"
    best = lib.torpor_cpu_level()
    if request.param == "AVX2":
        lib.torpor_cpu_limit(1)
    elif request.param == "no vectors":
        lib.torpor_cpu_limit(0)
    elif request.param == "no library":
        monkeypatch.setattr(native, "library", lambda: None)
    yield
    lib.torpor_cpu_limit(best)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("size", [0, 1, 55, 56, 63, 64, 65, 119, 120, 128, 300 * KIB + 7])
def test_one_pack_alone(size: int) -> None:
    plain = DICE.randbytes(size)
    digest = PackDigests().begin(memoryview(plain))
    digest.filled = size
    assert digest.finish() == md5(plain).digest()


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("packs", [2, 8, 11])
def test_packs_of_any_fill_are_taken_along(packs: int) -> None:
    digests = PackDigests()
    plains = [DICE.randbytes(DICE.randrange(64 * KIB, 3 * MIB)) for _ in range(packs)]
    open_ = [digests.begin(memoryview(plain)) for plain in plains]
    for digest, plain in zip(open_, plains, strict=True):
        digest.filled = len(plain) // 2
    first = md5(plains[0][: len(plains[0]) // 2]).digest()
    assert open_[0].finish() == first
    for digest, plain in zip(open_[1:], plains[1:], strict=True):
        digest.filled = len(plain)
    for digest, plain in zip(open_[1:], plains[1:], strict=True):
        assert digest.finish() == md5(plain).digest()


def test_it_hashes_others_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it is only slow, and nothing else would tell. Also without AVX2 it could."""
    assert native.library() is not None, "the C library is not built: python -m gpu_kernels.build"
    monkeypatch.setattr(twin, "md5_lanes", lambda: native.MD5_LANES)
    digests = PackDigests()
    plain = DICE.randbytes(4 * MIB)
    first, second = digests.begin(memoryview(plain)), digests.begin(memoryview(plain))
    first.filled = second.filled = len(plain)
    first.finish()
    assert second.blocks_behind == 0
    assert second.finish() == md5(plain).digest()


def test_parts_fill_and_finish_at_once() -> None:
    digests, wrong = PackDigests(), []

    def part(seed: int) -> None:
        dice = random.Random(seed)
        buffer = memoryview(bytearray(2 * MIB))
        for _ in range(12):
            digest, at = digests.begin(buffer), 0
            stop = dice.randrange(len(buffer))
            while at < stop:
                piece = dice.randbytes(min(stop - at, dice.randrange(1, 700 * KIB)))
                buffer[at : at + len(piece)] = piece
                at = digest.filled = at + len(piece)
            if dice.random() < 0.2:
                digest.drop()
            elif digest.finish() != md5(buffer[:at]).digest():
                wrong.append(seed)

    threads = [threading.Thread(target=part, args=(seed,)) for seed in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_dropped_pack_is_left_alone() -> None:
    digests = PackDigests()
    buffer = memoryview(bytearray(2 * MIB))
    dropped, kept = digests.begin(buffer), digests.begin(memoryview(bytes(2 * MIB)))
    dropped.filled = kept.filled = 2 * MIB
    dropped.drop()
    dropped.drop()
    assert kept.finish() == md5(bytes(2 * MIB)).digest()
    assert dropped.blocks_behind == 0


@pytest.mark.parametrize(
    ("states", "streams"),
    [([16], [63]), ([16, 16], [64, 128]), ([16], [64, 64]), ([15], [64]), ([16] * 9, [64] * 9)],
)
def test_what_does_not_fit_never_reaches_c(states: list[int], streams: list[int]) -> None:
    with pytest.raises(ValueError, match=r"streams|whole block"):
        twin.md5_advance([bytearray(n) for n in states], [memoryview(bytes(n)) for n in streams])
