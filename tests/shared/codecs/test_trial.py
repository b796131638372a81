"""Numbers go through the GPU where it has shown on the run's own chunks that it is faster."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from gpu_kernels import twin
from gpu_kernels.worker import CHUNK_MAX
from tests.fixtures.waiting import PATIENCE_S
from torpor.shared.codecs.choose import Encoder
from torpor.shared.codecs.codec import Buffer
from torpor.shared.codecs.effort import Effort, Pace
from torpor.shared.codecs.encodings import decode_chunk
from torpor.shared.codecs.gpu import Gpu, GpuError
from torpor.shared.codecs.layout import Element, Run
from torpor.shared.codecs.planes import PLANES, RANS
from torpor.shared.codecs.trial import CHUNKS, GpuTrial, Stopped
from torpor.shared.errors import SnapshotDamaged
from torpor.shared.values import MIB

SIZE = MIB
RUNS = [Run(SIZE, Element.BF16)]
ALL_CORES = 1_000_000
"""No GPU is faster; 0 cores are slower than any."""


def chunk(number: int) -> memoryview:
    floats = np.random.default_rng(number).normal(0, 0.02, SIZE // 2).astype(np.float32)
    return memoryview((floats.view(np.uint32) >> 16).astype(np.uint16).tobytes())


PLAINS = [chunk(number) for number in range(CHUNKS)]
STREAMS = [RANS.encode(plain, RUNS) or b"" for plain in PLAINS]


class TwinGpu:
    """A GPU whose work the C twins do. After ``good`` chunks, ``fault`` is raised, or one byte of
    what it makes is wrong where there is none."""

    def __init__(self, good: int | None = None, fault: Exception | None = None) -> None:
        self.good = good
        self.fault = fault
        self.opened = self.closed = self.decodes = 0

    def open(self, stopped: Stopped) -> Gpu:
        self.opened += 1
        return self

    def encode(
        self, parts: Sequence[memoryview], element: Element, coded: Sequence[int]
    ) -> list[tuple[bool, bytes]]:
        plain = b"".join(parts)
        planes = [memoryview(bytearray(len(plain) // 2)) for _ in range(2)]
        twin.split(memoryview(plain), 2, element.turned, planes)
        planes[1][0] ^= self._is_wrong()  # the plane of noise, where no decoder notices
        stream = twin.rans_encode(planes[0], len(planes[0])) or b""
        return [(True, bytes(stream)), (False, bytes(planes[1]))]

    def decode(
        self, planes: Sequence[tuple[bool, Buffer]], element: Element, parts: Sequence[memoryview]
    ) -> None:
        self.decodes += 1
        size = sum(map(len, parts)) // 2
        exponents = twin.rans_decode(planes[0][1], size)
        plain = memoryview(bytearray(2 * size))
        twin.join([exponents, planes[1][1]], 2, element.turned, plain)
        plain[0] ^= self._is_wrong()
        parts[0][:] = plain

    def close(self) -> None:
        self.closed += 1

    def _is_wrong(self) -> bool:
        if self.good is None or self.good > 0:
            self.good = None if self.good is None else self.good - 1
            return False
        if self.fault is not None:
            raise self.fault
        return True

    def refuse(self, stopped: Stopped) -> Gpu:
        assert self.fault is not None
        raise self.fault


class Bench:
    """What a trial said, and how often it opened the GPU."""

    def __init__(self) -> None:
        self.gpu = TwinGpu()
        self.said: list[str] = []

    def trial(self, cores: int = 0) -> GpuTrial:
        return GpuTrial(self.gpu.open, cores, self.said.append)

    def encoded(self, cores: int = 0) -> GpuTrial:
        """A trial that has measured the GPU on chunks to encode; the CPU encoded these."""
        trial = self.trial(cores)
        assert fed(trial) == {PLANES.code}
        trial.settle(PATIENCE_S)
        return trial

    def decoded(self, cores: int = 0) -> GpuTrial:
        """A trial that has measured the GPU on chunks to decode."""
        trial = self.trial(cores)
        decode_all(trial)
        trial.settle(PATIENCE_S)
        return trial


@pytest.fixture
def bench(built_library: object) -> Bench:
    return Bench()


def fed(trial: GpuTrial, plains: Sequence[memoryview] = PLAINS, *, wanted: bool = True) -> set[int]:
    """The encodings that chunks get; each must come back."""
    codes = set()
    for plain in plains:
        code, stream = trial.encode(plain, RUNS, wanted=wanted)
        assert stream is not None
        assert decode_chunk(code, stream, len(plain)) == plain
        codes.add(code)
    return codes


def decode_all(trial: GpuTrial) -> None:
    """All chunks come back."""
    for plain, stream in zip(PLAINS, STREAMS, strict=True):
        assert trial.decode(stream, SIZE, lambda made, plain=plain: made == plain) == plain


@pytest.mark.parametrize(
    ("cores", "code", "words"),
    [
        (0, RANS.code, r"GPU used: \d+\.\d GB/s end to end against 0\.0 GB/s on 0 cores"),
        (
            ALL_CORES,
            PLANES.code,
            r"GPU not used: \d+\.\d GB/s end to end against \d+\.\d GB/s on 1000000 cores",
        ),
    ],
    ids=["faster", "slower"],
)
def test_a_gpu_that_is_faster_than_the_cores_is_used(
    bench: Bench, cores: int, code: int, words: str
) -> None:
    trial = bench.encoded(cores)
    assert bench.gpu.closed == (cores > 0)
    assert fed(trial) == {code}
    assert re.fullmatch(words, trial.words)
    assert bench.said == [trial.words]
    trial.close()
    trial.close()
    assert (bench.gpu.opened, bench.gpu.closed) == (1, 1)
    assert fed(trial) == {PLANES.code}


@pytest.mark.parametrize(("cores", "decodes"), [(0, CHUNKS), (ALL_CORES, 0)])
def test_a_faster_gpu_decodes_and_a_slower_one_does_not(
    bench: Bench, cores: int, decodes: int
) -> None:
    trial = bench.decoded(cores)
    before = bench.gpu.decodes
    decode_all(trial)
    assert trial.words.startswith("GPU not used: " if cores else "GPU used: ")
    trial.close()
    decode_all(trial)
    assert bench.gpu.decodes - before == decodes


@pytest.mark.parametrize(
    ("fault", "words"),
    [(None, "what it decoded was wrong"), (GpuError("its worker died"), "its worker died")],
)
def test_a_gpu_that_does_not_decode_is_given_up_and_no_chunk_is_lost(
    bench: Bench, fault: Exception | None, words: str
) -> None:
    trial = bench.decoded()
    bench.gpu.good, bench.gpu.fault = 1, fault
    decode_all(trial)
    assert trial.words == f"GPU used until it failed: {words}"
    assert bench.gpu.closed == 1


def test_a_chunk_that_is_damaged_is_not_the_gpu_s_fault(bench: Bench) -> None:
    trial = bench.decoded()
    with pytest.raises(SnapshotDamaged, match="does not match its hash"):
        trial.decode(STREAMS[0], SIZE, lambda made: False)
    torn = bytearray(STREAMS[0])
    torn[40] ^= 1
    with pytest.raises(SnapshotDamaged, match="cannot be decoded"):
        trial.decode(torn, SIZE, lambda made: True)
    assert trial.words.startswith("GPU used: ")
    decode_all(trial)
    trial.close()


def test_nothing_is_opened_before_it_is_wanted(bench: Bench) -> None:
    trial = bench.trial()
    assert trial.words == ""
    fed(trial, wanted=False)
    assert trial.words == "GPU not tried: cores were not what the run waited for"
    fed(trial, PLAINS[1:])
    assert trial.words == f"GPU not tried: there were under {CHUNKS} chunks of numbers to measure"
    assert bench.gpu.opened == 0
    trial.close()


def test_what_is_small_or_no_numbers_is_not_measured(bench: Bench) -> None:
    trial = bench.trial()
    noise = memoryview(np.random.default_rng(1).bytes(SIZE))
    small = PLAINS[0][: MIB // 2]
    for _ in range(CHUNKS + 1):
        assert trial.encode(noise, RUNS, wanted=True) == (PLANES.code, None)
        trial.encode(small, [Run(len(small), Element.BF16)], wanted=True)
    assert bench.gpu.opened == 0


def test_chunks_that_do_not_fit_stay_on_the_cpu(bench: Bench) -> None:
    trial = bench.encoded()
    large = memoryview(b"".join(PLAINS) + bytes(2))
    assert len(large) > CHUNK_MAX
    assert trial.encode(large, [Run(len(large), Element.BF16)], wanted=True)[0] == PLANES.code
    trial.close()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (GpuError("no NVIDIA GPU"), "no NVIDIA GPU"),
        (MemoryError("no host memory"), "MemoryError: no host memory"),
        (RuntimeError("a bug\nof ours"), "RuntimeError: a bug of ours"),
        (None, "what it makes is wrong"),
        (SnapshotDamaged("torn"), "what it makes is wrong"),
    ],
)
def test_whatever_fails_in_a_trial_is_its_outcome_in_a_line(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, fault: Exception | None, words: str
) -> None:
    bench.gpu = TwinGpu(2 if fault else 0, fault)
    outcomes = [bench.encoded()]
    assert (bench.gpu.opened, bench.gpu.closed) == (1, 1)
    if words != "what it makes is wrong":
        monkeypatch.setattr(bench.gpu, "open", bench.gpu.refuse)
        outcomes.append(bench.encoded())
    assert bench.said == [f"GPU not used: {words}"] * len(outcomes)
    for trial in outcomes:
        assert fed(trial) == {PLANES.code}
        trial.close()


@pytest.mark.parametrize("fault", [GpuError("its worker died"), ValueError("a bug of ours")])
def test_a_gpu_that_fails_mid_run_is_given_up_and_no_chunk_is_lost(
    bench: Bench, fault: Exception
) -> None:
    trial = bench.encoded()
    assert fed(trial) == {RANS.code}
    bench.gpu.good, bench.gpu.fault = 1, fault
    with ThreadPoolExecutor(4) as threads:
        for codes in threads.map(lambda _: fed(trial), range(4)):
            assert PLANES.code in codes
    assert fed(trial) == {PLANES.code}
    assert bench.said[1:] == [trial.words]
    assert trial.words.startswith("GPU used until it failed: ")
    assert str(fault) in trial.words
    assert bench.gpu.closed == 1


def test_a_run_that_ends_while_the_gpu_is_opened_stops_that(bench: Bench) -> None:
    begun = threading.Event()

    def slowly(stopped: Stopped) -> Gpu:
        begun.set()
        while not stopped():
            pass
        return bench.gpu.open(stopped)

    trial = GpuTrial(slowly, 0, bench.said.append)
    fed(trial)
    assert begun.wait(PATIENCE_S)
    assert trial.words == "GPU not used: the run ended while it was measured"
    trial.close()
    assert bench.said == ["GPU not used: the run ended while it was measured"]
    assert bench.gpu.closed == 1
    assert fed(trial) == {PLANES.code}


def test_a_system_without_another_thread_goes_on_without_the_gpu(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", full)
    trial = bench.trial()
    assert fed(trial) | fed(trial) == {PLANES.code}
    assert bench.said == ["GPU not used: can't start new thread"] == [trial.words]
    trial.close()


def test_an_encoder_tries_the_gpu_when_cores_limit_the_run(bench: Bench) -> None:
    effort, trial = Effort(), bench.trial()
    encoder = Encoder(effort, trial)

    def codes() -> set[int]:
        made = [encoder.encode(plain, RUNS) for plain in PLAINS]
        for (code, stored), plain in zip(made, PLAINS, strict=True):
            assert decode_chunk(code, stored, SIZE) == plain
        return {code for code, _ in made}

    assert codes() == {PLANES.code}
    assert encoder.words == (
        "nothing new was encoded; GPU not tried: cores were not what the run waited for"
    )
    for _ in range(4):
        effort.note(Pace(effort.step, filled=5, encoded=4, encoded_cpu=4, by_step=0, sent=0.5))
    assert effort.cores_limit
    codes()
    trial.settle(PATIENCE_S)
    assert codes() == {RANS.code}
    assert "time on sending; GPU used: " in encoder.words
    for _ in range(8):
        effort.note(Pace(effort.step, 1, encoded=0.8, encoded_cpu=0.8, by_step=0, sent=9))
    assert not effort.cores_limit
    assert codes() == {RANS.code}  # what was shown to be faster stays
    trial.close()


def test_without_numbers_the_report_says_nothing_of_gpus(bench: Bench) -> None:
    encoder = Encoder(Effort(), bench.trial())
    encoder.encode(b"text " * 100_000)
    assert encoder.words == Effort().words
