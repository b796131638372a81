"""Chunks encoded on a GPU: the bytes that the CPU makes, and an end to it when anything fails."""

from __future__ import annotations

import mmap
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu_kernels import batch
from gpu_kernels import device as device_module
from gpu_kernels.device import GpuHangs
from gpu_kernels.driver import GpuError
from tests.fixtures.shim import LAUNCH_FAILED, NOT_READY, OUT_OF_MEMORY, ShimDriver
from torpor.shared.codecs import gpu as gpu_module
from torpor.shared.codecs.gpu import (
    CHUNK_MAX,
    DEVICE_BYTES_MAX,
    FREE_LEAST,
    PINNED_BYTES,
    QUEUE_BYTES,
    QUEUES,
    GpuEncoder,
)
from torpor.shared.codecs.layout import Element, Run
from torpor.shared.codecs.planes import RANS, choose_ways, huffman
from torpor.shared.format.sizes import CHUNK_BYTES, GROUP_BYTES
from torpor.shared.values import MIB

RNG = np.random.default_rng(7)
FLOATS = RNG.normal(0, 0.02, MIB).astype(np.float32)
BF16 = (FLOATS.view(np.uint32) >> 16).astype(np.uint16).tobytes()


class Released:
    """How often an encoder said that all is given back."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1


@pytest.fixture
def released() -> Released:
    return Released()


@pytest.fixture
def encoder(shim: ShimDriver, released: Released) -> Iterator[GpuEncoder]:
    made = GpuEncoder(shim.device(), released)
    yield made
    made.close()


def rans(plain: bytes, runs: list[Run]) -> bytes | None:
    return RANS.encode(memoryview(plain), runs)


def wide(element: Element) -> tuple[bytes, list[Run]]:
    """Half a MiB of an element, as weights, indices and counters are."""
    floats = FLOATS[: MIB // 8]
    plain = {
        Element.BYTES: b"a line of text that comes again\n" * 5000,
        Element.F8: BF16[1:MIB:2],
        Element.F16: floats.astype(np.float16).tobytes(),
        Element.BF16: BF16[: MIB // 2],
        Element.F32: floats.tobytes(),
        Element.F64: floats[: MIB // 16].astype(np.float64).tobytes(),
        Element.I16: RNG.poisson(900, MIB // 8).astype(np.uint16).tobytes(),
        Element.I32: RNG.poisson(90_000, MIB // 16).astype(np.uint32).tobytes(),
        Element.I64: RNG.poisson(90_000, MIB // 32).astype(np.uint64).tobytes(),
    }[element]
    return plain, [Run(len(plain), element)]


@pytest.mark.parametrize("element", list(Element), ids=lambda element: element.name)
def test_the_stream_is_the_cpu_s_for_each_element(
    encoder: GpuEncoder, shim: ShimDriver, element: Element
) -> None:
    plain, runs = wide(element)
    stream = encoder.encode(plain, runs)
    assert stream == rans(plain, runs)
    assert stream is not None
    assert (shim.calls("cuLaunchKernel") > 0) == (element is not Element.BYTES)


def test_bf16_in_fp32_leaves_its_empty_planes_to_zstd(encoder: GpuEncoder) -> None:
    plain = (FLOATS.view(np.uint32) & 0xFFFF0000).tobytes()[:MIB]
    runs = [Run(len(plain), Element.F32)]
    stream = encoder.encode(plain, runs)
    assert stream == rans(plain, runs)
    assert stream is not None and len(plain) / len(stream) > 2.5


def test_runs_at_odd_offsets_and_of_many_elements(encoder: GpuEncoder, shim: ShimDriver) -> None:
    runs = [
        Run(4001, Element.BYTES),
        Run(200_000, Element.BF16),
        Run(63, Element.BYTES),
        Run(100_002, Element.BF16),
        Run(80_000, Element.F32),
        Run(7, Element.F8),
        Run(160_000, Element.F16),
        Run(999, Element.I16),
    ]
    plain = BF16[: sum(run.bytes for run in runs)]
    stream = encoder.encode(plain, runs)
    assert stream is not None
    assert stream == rans(plain, runs)
    assert shim.calls("cuLaunchKernel") >= 10
    assert RANS.decode(memoryview(stream), len(plain)) == plain


@given(data=st.data())
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # one encoder serves them all
)
def test_any_layout_gives_the_cpu_s_bytes(
    encoder: GpuEncoder, monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    monkeypatch.setattr(gpu_module, "WORTH_BYTES", 0)
    runs = [
        Run(data.draw(st.integers(0, 4000)), data.draw(st.sampled_from(Element)))
        for _ in range(data.draw(st.integers(1, 5)))
    ]
    start = data.draw(st.integers(0, 1000))
    plain = BF16[start : start + sum(run.bytes for run in runs)]
    if plain:
        assert encoder.encode(plain, runs) == rans(plain, runs)


def test_noise_and_nothing_gain_nothing(encoder: GpuEncoder) -> None:
    noise = random.Random(1).randbytes(MIB)
    assert encoder.encode(noise, [Run(MIB, Element.BF16)]) is None
    for plain in (b"", bytes(CHUNK_MAX + 1)):
        assert not encoder.takes(len(plain))
        with pytest.raises(ValueError, match="the GPU takes up to"):
            encoder.encode(plain, [Run(len(plain), Element.BF16)])


def test_a_queue_holds_the_worst_chunk(
    encoder: GpuEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every plane in rANS, of every element at once, in the largest chunk."""
    monkeypatch.setattr(gpu_module, "WORTH_BYTES", 0)
    monkeypatch.setattr(
        gpu_module,
        "choose_ways",
        lambda plain, element, places: [huffman] * element.width,
    )
    most = CHUNK_MAX // 9 // 8 * 8
    runs = [Run(most + 8 * (element % 2), element) for element in Element]
    runs[-1] = Run(CHUNK_MAX - sum(run.bytes for run in runs[:-1]), Element.I64)
    plain = np.tile(RNG.poisson(3, MIB).astype(np.uint8), 4).tobytes()
    stream = encoder.encode(plain, runs)
    assert stream is not None
    assert RANS.decode(memoryview(stream), CHUNK_MAX) == plain


def test_what_is_taken_is_bounded() -> None:
    assert max(CHUNK_BYTES, GROUP_BYTES) <= CHUNK_MAX
    assert DEVICE_BYTES_MAX == QUEUES * QUEUE_BYTES <= 512 * MIB
    assert QUEUES * PINNED_BYTES <= 80 * MIB


def test_threads_share_the_queues(
    encoder: GpuEncoder, shim: ShimDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, runs = BF16[: MIB // 4], [Run(MIB // 4, Element.BF16)]
    expected = rans(plain, runs)
    made: list[bytes | None] = []
    threads = [
        threading.Thread(target=lambda: made.append(encoder.encode(plain, runs)))
        for _ in range(QUEUES + 4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [expected] * len(threads)
    assert 1 <= shim.calls("cuStreamCreate") <= QUEUES


def test_a_gpu_with_little_memory_free_is_left_alone(shim: ShimDriver, released: Released) -> None:
    shim.has_free(FREE_LEAST - 1)
    device = shim.device()
    with pytest.raises(GpuError, match="only 2047 MiB of CPU shim are free, under 2048"):
        GpuEncoder(device, released)
    device.close()
    assert shim.held == released.times == 0


@pytest.mark.parametrize(
    ("function", "result"),
    [
        ("cuStreamCreate", OUT_OF_MEMORY),
        ("cuMemAlloc_v2", OUT_OF_MEMORY),
        ("cuMemHostAlloc", OUT_OF_MEMORY),
        ("cuCtxSetCurrent", 201),
        ("cuMemcpyHtoDAsync_v2", LAUNCH_FAILED),
        ("cuLaunchKernel", LAUNCH_FAILED),
        ("cuMemcpyDtoHAsync_v2", LAUNCH_FAILED),
        ("cuStreamQuery", LAUNCH_FAILED),
    ],
)
def test_whatever_fails_is_raised_and_closing_gives_all_back(
    shim: ShimDriver, released: Released, function: str, result: int
) -> None:
    encoder = GpuEncoder(shim.device(), released)
    plain, runs = wide(Element.BF16)
    shim.fail(function, result)
    with pytest.raises(GpuError, match=str(result)):
        encoder.encode(plain, runs)
    encoder.close()
    encoder.close()
    assert (shim.held, released.times) == (0, 1)
    with pytest.raises(GpuError, match="it was given back"):
        encoder.encode(plain, runs)


def test_closing_waits_for_the_chunk_that_is_on_it(
    shim: ShimDriver, released: Released, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = GpuEncoder(shim.device(), released)
    plain, runs = wide(Element.BF16)
    begun, go_on = threading.Event(), threading.Event()
    real = choose_ways

    def halting(*args: Any) -> Any:
        begun.set()
        assert go_on.wait(30)
        return real(*args)

    monkeypatch.setattr(gpu_module, "choose_ways", halting)
    made: list[bytes | None] = []
    thread = threading.Thread(target=lambda: made.append(encoder.encode(plain, runs)))
    thread.start()
    assert begun.wait(30)
    encoder.close()
    assert (shim.held > 0, released.times) == (True, 0)
    go_on.set()
    thread.join()
    assert made == [rans(plain, runs)]
    assert (shim.held, released.times) == (0, 1)


def test_a_driver_that_does_not_take_the_gpu_back_holds_nobody_up(
    shim: ShimDriver, released: Released, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of the driver that never returns, as those for a GPU that fell off its bus."""
    go_on, before = threading.Event(), set(threading.enumerate())
    close = device_module.Device.close

    def hanging(device: device_module.Device) -> None:
        assert go_on.wait(30)
        close(device)

    monkeypatch.setattr(device_module.Device, "close", hanging)
    monkeypatch.setattr(gpu_module, "GIVE_BACK_S", 0.02)
    encoder = GpuEncoder(shim.device(), released)
    encoder.close()
    assert (shim.held > 0, released.times) == (True, 0)
    go_on.set()
    ended(set(threading.enumerate()) - before)
    assert (shim.held, released.times) == (0, 1)


def test_a_driver_that_does_not_come_back_holds_no_chunk_up(
    shim: ShimDriver, released: Released, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, before = threading.Event(), set(threading.enumerate())

    def hanging(*_: object) -> None:
        assert go_on.wait(30)
        raise GpuError("too late")

    monkeypatch.setattr(batch, "split", hanging)
    monkeypatch.setattr(gpu_module, "ENCODE_S", 0.02)
    encoder = GpuEncoder(shim.device(), released)
    for _ in range(QUEUES + 2):  # none of those that wait keeps a turn
        with pytest.raises(GpuHangs, match=r"driver has not come back for 0\.02 s"):
            encoder.encode(*wide(Element.BF16))
    encoder.close()
    go_on.set()
    ended(set(threading.enumerate()) - before)  # the shim must not take their memory before
    assert (shim.held > 0, released.times) == (True, 0)


def test_threads_end_with_the_encoder(shim: ShimDriver, released: Released) -> None:
    before = set(threading.enumerate())
    encoder = GpuEncoder(shim.device(), released)
    for _ in range(3):
        encoder.encode(*wide(Element.BF16))
    (thread,) = set(threading.enumerate()) - before
    encoder.close()
    ended({thread, *threading.enumerate()} - before)


def test_a_chunk_goes_when_it_is_encoded(shim: ShimDriver, released: Released) -> None:
    """Its thread waits for another one, and the run may be at its end."""
    plain, layout = wide(Element.BF16)
    memory = mmap.mmap(-1, len(plain))
    memory[:] = bytes(plain)
    encoder = GpuEncoder(shim.device(), released)
    view = memoryview(memory)
    encoder.encode(view, layout)
    view.release()
    deadline = time.monotonic() + 10
    while True:  # the thread answers a moment before it lets go
        try:
            memory.close()
            break
        except BufferError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    encoder.close()


def ended(threads: set[threading.Thread]) -> None:
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_without_another_thread_the_gpu_is_given_back_all_the_same(
    shim: ShimDriver, released: Released, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    encoder = GpuEncoder(shim.device(), released)
    monkeypatch.setattr(threading.Thread, "start", full)
    encoder.close()
    assert (shim.held, released.times) == (0, 1)


def test_a_gpu_that_hangs_is_not_given_back(
    shim: ShimDriver, released: Released, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may still write into its memory, so the next user must not touch it."""
    monkeypatch.setattr(device_module, "PATIENCE_S", 0.02)
    encoder = GpuEncoder(shim.device(), released)
    shim.fail("cuStreamQuery", NOT_READY, times=1_000_000)
    with pytest.raises(GpuError, match="has not answered"):
        encoder.encode(*wide(Element.BF16))
    encoder.close()
    assert (shim.held > 0, released.times) == (True, 0)
