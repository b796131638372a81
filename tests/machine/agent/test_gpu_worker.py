"""The process that works on the GPU: the CPU's bytes, and a clear end whatever happens to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu_kernels.worker import CHUNK_MAX, FREE_LEAST, SLOT_BYTES, SLOTS
from tests.fixtures.gpu import MakePython
from tests.fixtures.waiting import PATIENCE_S, until
from torpor.machine.agent import gpu_worker
from torpor.machine.agent.gpu_worker import GpuWorker, NotHere
from torpor.shared.codecs import gpu as gpu_module
from torpor.shared.codecs.gpu import GpuError, decode_chunk, encode_chunk
from torpor.shared.codecs.layout import Element, Run
from torpor.shared.codecs.planes import RANS
from torpor.shared.errors import SnapshotDamaged
from torpor.shared.format.sizes import CHUNK_BYTES, GROUP_BYTES
from torpor.shared.values import KIB, MIB

RNG = np.random.default_rng(7)
FLOATS = RNG.normal(0, 0.02, MIB // 2).astype(np.float32)
BF16 = (FLOATS.view(np.uint32) >> 16).astype(np.uint16).tobytes()
RUNS = [Run(256 * KIB, Element.BF16)]
PLAIN = BF16[: 256 * KIB]


@pytest.fixture
def worker(make_python: MakePython) -> Iterator[GpuWorker]:
    made = GpuWorker(make_python())
    yield made
    made.close()


def of(element: Element) -> bytes:
    """A quarter of a MiB or more, as weights, indices and counters are."""
    few = FLOATS[: MIB // 8]
    return {
        Element.BYTES: b"a line of text that comes again\n" * 5000,
        Element.F8: BF16[1::2],
        Element.F16: few.astype(np.float16).tobytes(),
        Element.BF16: BF16[: MIB // 2],
        Element.F32: few.tobytes(),
        Element.F64: few[: MIB // 16].astype(np.float64).tobytes(),
        Element.I16: RNG.poisson(900, MIB // 8).astype(np.uint16).tobytes(),
        Element.I32: RNG.poisson(90_000, MIB // 16).astype(np.uint32).tobytes(),
        Element.I64: RNG.poisson(90_000, MIB // 32).astype(np.uint64).tobytes(),
    }[element]


def comes_back(worker: GpuWorker, plain: bytes, runs: list[Run]) -> None:
    """The GPU makes the CPU's stream, and the plain bytes of it."""
    stream = encode_chunk(worker, plain, runs)
    assert stream == RANS.encode(memoryview(plain), runs)
    if stream is not None:
        assert decode_chunk(worker, stream, len(plain)) == plain


def test_streams_are_the_cpu_s_for_every_element(worker: GpuWorker) -> None:
    assert worker.name == "CPU stand-in, compute capability 0.0"
    for element in Element:
        plain = of(element)
        comes_back(worker, plain, [Run(len(plain), element)])
    empty_planes = (FLOATS.view(np.uint32) & 0xFFFF0000).tobytes()[:MIB]  # zstd takes them
    comes_back(worker, empty_planes, [Run(MIB, Element.F32)])
    comes_back(worker, RNG.bytes(MIB), [Run(MIB, Element.BF16)])


@given(data=st.data())
@settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # one worker serves them all
)
def test_any_layout_gives_the_cpu_s_bytes(
    worker: GpuWorker, monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    monkeypatch.setattr(gpu_module, "WORTH_BYTES", 1)
    runs = [
        Run(data.draw(st.integers(0, 4000)), data.draw(st.sampled_from(Element)))
        for _ in range(data.draw(st.integers(1, 5)))
    ]
    start = data.draw(st.integers(0, 1000))
    plain = BF16[start : start + sum(run.bytes for run in runs)]
    if plain:
        comes_back(worker, plain, runs)


def test_threads_share_the_slots(worker: GpuWorker) -> None:
    expected = RANS.encode(memoryview(PLAIN), RUNS)
    with ThreadPoolExecutor(SLOTS + 4) as threads:
        made = threads.map(lambda _: encode_chunk(worker, PLAIN, RUNS), range(SLOTS + 4))
    assert [*made] == [expected] * (SLOTS + 4)


def test_a_damaged_stream_is_refused_and_the_worker_goes_on(worker: GpuWorker) -> None:
    stream = RANS.encode(memoryview(PLAIN), RUNS) or b""
    damaged = bytearray(stream)
    damaged[40] ^= 1  # in the rANS plane's table
    with pytest.raises(SnapshotDamaged, match="rANS stream is wrong"):
        decode_chunk(worker, damaged, len(PLAIN))
    assert decode_chunk(worker, stream, len(PLAIN)) == PLAIN


def test_what_a_worker_shares_is_bounded(worker: GpuWorker) -> None:
    assert max(CHUNK_BYTES, GROUP_BYTES) <= CHUNK_MAX
    assert SLOTS * SLOT_BYTES <= 64 * MIB
    with pytest.raises(ValueError, match="more than 4194304 bytes for one slot"):
        worker.encode([memoryview(bytes(CHUNK_MAX + 2))], Element.BF16, [0])


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"devices": 0}, "no NVIDIA GPU can be used (cudaErrorNoDevice"),
        ({"load": "CUDA_ERROR_NO_BINARY_FOR_GPU"}, "the kernels do not load on CPU stand-in, "),
        ({"free": FREE_LEAST - 1}, "has 2047 MiB free; with less than 2048 MiB it is left to"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_said_in_a_line(
    make_python: MakePython, plan: dict[str, object], words: str
) -> None:
    python = make_python(**plan)
    with pytest.raises(GpuError) as said:
        GpuWorker(python)
    assert str(said.value).startswith(f"{python}: ")
    assert words in str(said.value)
    assert not isinstance(said.value, NotHere)


def test_a_python_without_cupy_is_passed_over(make_python: MakePython) -> None:
    for python, words in (
        (make_python(missing="libcudart.so.12: no such file"), r"CuPy cannot be imported \(libcud"),
        ("/usr/bin/none", "/usr/bin/none cannot be started"),
        ("/bin/true", "the worker of /bin/true ended with status 0"),
    ):
        with pytest.raises(NotHere, match=words):
            GpuWorker(python)


def test_a_worker_that_does_not_greet_is_not_waited_for_long(tmp_path: Path) -> None:
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nexec sleep 600\n")
    silent.chmod(0o755)
    with pytest.raises(NotHere, match=r"did not open it within 0\.3 s"):
        GpuWorker(os.fspath(silent), start_s=0.3)
    with pytest.raises(GpuError, match="the run ended"):
        GpuWorker(os.fspath(silent), stopped=lambda: True)


@pytest.mark.parametrize(
    ("do", "words"),
    [
        ("crash", "its worker was ended by SIGABRT"),
        ("hang", r"its worker did not answer for 0\.5 s"),
        ("memory", "OutOfMemoryError: out of memory"),
    ],
)
def test_a_worker_that_fails_is_killed(
    make_python: MakePython, monkeypatch: pytest.MonkeyPatch, do: str, words: str
) -> None:
    monkeypatch.setattr(gpu_worker, "WORK_S", 0.5 if do == "hang" else 30)
    worker = GpuWorker(make_python(at=1, do=do))
    process = psutil.Process(worker._process.pid)

    def encode(_: int) -> str:
        with pytest.raises(GpuError, match=words) as said:
            for _ in range(2):  # memory runs out behind the first launch
                encode_chunk(worker, PLAIN, RUNS)
        return str(said.value)

    with ThreadPoolExecutor(3) as threads:
        assert len(set(threads.map(encode, range(3)))) == 1  # nobody blames the kill
    assert not process.is_running()
    worker.close()
    with pytest.raises(GpuError, match="it was given back"):
        encode_chunk(worker, PLAIN, RUNS)


def test_closing_ends_the_process_and_what_is_at_work(make_python: MakePython) -> None:
    worker = GpuWorker(make_python(at=1, do="hang"))
    released: list[bool] = []
    worker.released = lambda: released.append(True)
    with ThreadPoolExecutor(1) as threads:
        encoding = threads.submit(encode_chunk, worker, PLAIN, RUNS)
        until(lambda: worker._slots.qsize() < SLOTS, "it is at work")
        worker.close()
        worker.close()
        with pytest.raises(GpuError, match="its worker was ended by SIGKILL"):
            encoding.result(PATIENCE_S)
    assert released == [True]


def test_a_worker_ends_with_its_agent(worker: GpuWorker) -> None:
    """Whatever its threads wait for: the kernel closes a dead agent's sockets."""
    worker._life.close()
    assert worker._process.wait(PATIENCE_S) == 0
