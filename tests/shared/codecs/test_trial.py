"""Numbers go through the GPU where it has shown on the run's own chunks that it is faster."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from gpu_kernels import batch
from gpu_kernels.driver import GpuError
from tests.fixtures.shim import LAUNCH_FAILED, OUT_OF_MEMORY, ShimDriver
from torpor.shared.codecs import gpu as gpu_module
from torpor.shared.codecs import trial as trial_module
from torpor.shared.codecs.choose import Encoder
from torpor.shared.codecs.codec import Buffer
from torpor.shared.codecs.effort import Effort, Pace
from torpor.shared.codecs.encodings import decode_chunk
from torpor.shared.codecs.gpu import GpuEncoder
from torpor.shared.codecs.layout import Element, Run
from torpor.shared.codecs.planes import PLANES, RANS
from torpor.shared.codecs.trial import CHUNKS, GpuTrial
from torpor.shared.values import MIB

SIZE = MIB
RUNS = [Run(SIZE, Element.BF16)]
WAIT_S = 60.0
ALL_CORES = 1_000_000
"""No GPU is faster; 0 cores are slower than any."""


def chunk(number: int) -> memoryview:
    floats = np.random.default_rng(number).normal(0, 0.02, SIZE // 2).astype(np.float32)
    return memoryview((floats.view(np.uint32) >> 16).astype(np.uint16).tobytes())


PLAINS = [chunk(number) for number in range(CHUNKS)]


class Bench:
    """A trial over the tests' driver; what it said and how often it opened the GPU."""

    def __init__(self, shim: ShimDriver) -> None:
        self.said: list[str] = []
        self.opened = self.released = 0
        self._shim = shim

    def trial(self, cores: int) -> GpuTrial:
        return GpuTrial(self.open, cores, self.said.append)

    def open(self) -> GpuEncoder:
        self.opened += 1
        device = self._shim.device()
        try:
            return GpuEncoder(device, self.release)
        except GpuError:
            device.close()
            raise

    def release(self) -> None:
        self.released += 1


@pytest.fixture
def bench(shim: ShimDriver) -> Bench:
    return Bench(shim)


def fed(
    trial: GpuTrial, plains: Sequence[memoryview] = PLAINS, *, wanted: bool = True
) -> list[int]:
    """The encodings that chunks get; each must come back."""
    codes = []
    for plain in plains:
        code, stream = trial.encode(plain, RUNS, wanted=wanted)
        assert stream is not None
        assert decode_chunk(code, stream, len(plain)) == plain
        codes.append(code)
    return codes


def settled(trial: GpuTrial) -> GpuTrial:
    trial.settle(WAIT_S)
    return trial


def test_a_gpu_that_is_faster_than_the_cores_is_used(bench: Bench, shim: ShimDriver) -> None:
    trial = bench.trial(cores=0)
    assert set(fed(trial)) == {PLANES.code}
    assert set(fed(settled(trial))) == {RANS.code}
    assert re.fullmatch(
        r"GPU used: \d+\.\d GB/s end to end against 0\.0 GB/s on 0 cores", trial.words
    )
    assert bench.said == [trial.words]
    trial.close()
    trial.close()
    assert (shim.held, bench.opened, bench.released) == (0, 1, 1)
    assert set(fed(trial)) == {PLANES.code}


def test_a_gpu_that_is_slower_is_given_back(bench: Bench, shim: ShimDriver) -> None:
    trial = bench.trial(cores=ALL_CORES)
    fed(trial)
    assert set(fed(settled(trial))) == {PLANES.code}
    assert re.fullmatch(
        r"GPU not used: \d+\.\d GB/s end to end against \d+\.\d GB/s on 1000000 cores", trial.words
    )
    assert (shim.held, bench.opened, bench.released) == (0, 1, 1)


def test_nothing_is_opened_before_it_is_wanted(bench: Bench) -> None:
    trial = bench.trial(cores=0)
    assert trial.words == ""
    fed(trial, wanted=False)
    assert trial.words == "GPU not tried: cores were not what the run waited for"
    fed(trial, PLAINS[1:])
    assert trial.words == f"GPU not tried: there were under {CHUNKS} chunks of numbers to measure"
    assert bench.opened == 0
    trial.close()


def test_what_is_small_or_no_numbers_is_not_measured(bench: Bench) -> None:
    trial = bench.trial(cores=0)
    noise = memoryview(np.random.default_rng(1).bytes(SIZE))
    for _ in range(CHUNKS + 1):
        assert trial.encode(noise, RUNS, wanted=True) == (PLANES.code, None)
        small = PLAINS[0][: MIB // 2]
        trial.encode(small, [Run(len(small), Element.BF16)], wanted=True)
    assert bench.opened == 0


def test_chunks_that_do_not_fit_stay_on_the_cpu(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = bench.trial(cores=0)
    fed(trial)
    settled(trial)
    monkeypatch.setattr(gpu_module, "CHUNK_MAX", SIZE - 1)
    assert set(fed(trial)) == {PLANES.code}
    trial.close()


@pytest.mark.parametrize(
    ("function", "result", "words"),
    [
        ("cuInit", 100, "cuInit failed with 100: no CUDA-capable device is detected"),
        ("cuModuleLoadData", OUT_OF_MEMORY, "cuModuleLoadData failed with 2: out of memory"),
        ("cuMemGetInfo_v2", 3, "cuMemGetInfo_v2 failed with 3"),
        ("cuMemAlloc_v2", OUT_OF_MEMORY, "cuMemAlloc_v2 failed with 2: out of memory"),
        ("cuLaunchKernel", LAUNCH_FAILED, "failed with 719: unspecified launch failure"),
    ],
)
def test_whatever_fails_in_a_trial_is_its_outcome(
    bench: Bench, shim: ShimDriver, function: str, result: int, words: str
) -> None:
    trial = bench.trial(cores=0)
    shim.fail(function, result)
    fed(trial)
    assert set(fed(settled(trial))) == {PLANES.code}
    assert trial.words.startswith("GPU not used: ")
    assert words in trial.words
    assert bench.said == [trial.words]
    trial.close()
    assert shim.held == 0


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (GpuError("no CUDA driver (libcuda.so.1: gone)"), "no CUDA driver (libcuda.so.1: gone)"),
        (MemoryError("no host memory"), "MemoryError: no host memory"),
        (RuntimeError("a bug\nof ours"), "RuntimeError: a bug of ours"),
    ],
)
def test_a_gpu_that_cannot_be_opened_is_a_line(fault: Exception, words: str) -> None:
    def refuse() -> GpuEncoder:
        raise fault

    said: list[str] = []
    trial = GpuTrial(refuse, 0, said.append)
    fed(trial)
    fed(settled(trial))
    assert said == [f"GPU not used: {words}"]


@pytest.mark.parametrize(
    ("function", "result"), [("cuLaunchKernel", LAUNCH_FAILED), ("cuMemcpyHtoDAsync_v2", 1)]
)
def test_a_gpu_that_fails_mid_run_is_given_up_and_no_chunk_is_lost(
    bench: Bench, shim: ShimDriver, function: str, result: int
) -> None:
    trial = bench.trial(cores=0)
    fed(trial)
    assert set(fed(settled(trial))) == {RANS.code}
    shim.fail(function, result, nth=2)
    codes: list[int] = []
    threads = [threading.Thread(target=lambda: codes.extend(fed(trial))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(codes) == 4 * CHUNKS
    assert codes.count(PLANES.code) >= 4 * (CHUNKS - 1)
    assert len(bench.said) == 2
    assert bench.said[1] == trial.words
    assert trial.words.startswith("GPU used until it failed: ")
    assert (shim.held, bench.released) == (0, 1)


@pytest.mark.parametrize(
    "fault", [MemoryError("a queue has no bytes left"), ValueError("a stream of -1 bytes")]
)
def test_whatever_goes_wrong_mid_run_gives_the_gpu_up(
    bench: Bench, shim: ShimDriver, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    trial = bench.trial(cores=0)
    fed(trial)
    settled(trial)

    def full(*_: object) -> None:
        raise fault

    monkeypatch.setattr(batch, "split", full)
    assert set(fed(trial)) == {PLANES.code}
    assert trial.words == f"GPU used until it failed: {type(fault).__name__}: {fault}"
    assert shim.held == 0


def test_what_does_not_come_back_is_not_used(
    bench: Bench, shim: ShimDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = GpuEncoder.encode

    def wrong(self: GpuEncoder, plain: Buffer, runs: Sequence[Run]) -> bytes | None:
        stream = bytearray(real(self, plain, runs) or b"")
        stream[-1] ^= 1  # of the plane of noise, where no decoder notices
        return bytes(stream)

    monkeypatch.setattr(GpuEncoder, "encode", wrong)
    trial = bench.trial(cores=0)
    fed(trial)
    assert set(fed(settled(trial))) == {PLANES.code}
    assert trial.words == "GPU not used: what it encodes does not come back"
    assert shim.held == 0


def test_a_run_that_ends_while_it_is_measured_gets_the_gpu_back(
    bench: Bench, shim: ShimDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = threading.Event(), threading.Event()
    opened = bench.open

    def slowly() -> GpuEncoder:
        begun.set()
        assert ended.wait(WAIT_S)
        return opened()

    trial = GpuTrial(slowly, 0, bench.said.append)
    fed(trial)
    assert begun.wait(WAIT_S)
    assert trial.words == "GPU not used: the run ended while it was measured"
    monkeypatch.setattr(trial_module, "CLOSE_S", 0.01)
    trial.close()
    ended.set()
    settled(trial)
    assert bench.said == ["GPU not used: the run ended while it was measured"]
    assert (shim.held, bench.released) == (0, 1)
    assert set(fed(trial)) == {PLANES.code}


def test_a_process_ends_though_the_driver_never_opens_the_gpu() -> None:
    """An agent that leaves must not wait for a GPU that does not come. Once it is open, the encoder
    itself waits for it only so long."""
    done = subprocess.run([sys.executable, "-c", _HANGS], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().strip() == "GPU not used: the run ended while it was measured"


_HANGS = """
import threading
from torpor.shared.codecs import trial
from torpor.shared.codecs.layout import Element, Run

def hangs(): threading.Event().wait()

trial.CLOSE_S = 0.2
one = trial.GpuTrial(hangs, 1, lambda words: None)
plain = memoryview(bytes(range(256)) * 8192)
for _ in range(trial.CHUNKS):
    one.encode(plain, [Run(len(plain), Element.BF16)], wanted=True)
one.close()
print(one.words)
"""


def test_a_system_without_another_thread_goes_on_without_the_gpu(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", full)
    trial = bench.trial(cores=0)
    assert set(fed(trial) + fed(trial)) == {PLANES.code}
    assert bench.said == ["GPU not used: can't start new thread"] == [trial.words]
    trial.close()


def test_an_encoder_tries_the_gpu_when_cores_limit_the_run(bench: Bench) -> None:
    effort = Effort()
    trial = bench.trial(cores=0)
    encoder = Encoder(effort, trial)
    codes = tally(encoder)
    assert codes() == {PLANES.code}
    assert not effort.cores_limit
    assert encoder.words == (
        "nothing new was encoded; GPU not tried: cores were not what the run waited for"
    )
    for _ in range(4):
        effort.note(Pace(filled=5, encoded=4, encoded_cpu=4, sent=0.5))
    assert effort.cores_limit
    codes()
    settled(trial)
    assert codes() == {RANS.code}
    assert "time on sending; GPU used: " in encoder.words
    for _ in range(8):
        effort.note(Pace(filled=1, encoded=0.8, encoded_cpu=0.8, sent=9))
    assert not effort.cores_limit
    assert codes() == {RANS.code}  # what was shown to be faster stays
    trial.close()


def tally(encoder: Encoder) -> Callable[[], set[int]]:
    def codes() -> set[int]:
        made = [encoder.encode(plain, RUNS) for plain in PLAINS]
        for (code, stored), plain in zip(made, PLAINS, strict=True):
            assert decode_chunk(code, stored, SIZE) == plain
        return {code for code, _ in made}

    return codes


def test_without_numbers_the_report_says_nothing_of_gpus(bench: Bench) -> None:
    encoder = Encoder(Effort(), bench.trial(cores=0))
    encoder.encode(b"text " * 100_000)
    assert encoder.words == Effort().words
