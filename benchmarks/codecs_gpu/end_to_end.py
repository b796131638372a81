"""Chunks encoded and decoded on a GPU from host memory to host memory, by the clock on the wall."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from benchmarks.codecs_gpu.chunks import CameBackWrong
from gpu_kernels import nvcomp
from gpu_kernels.device import Device
from torpor.shared.codecs.gpu import GpuEncoder
from torpor.shared.codecs.layout import Element, Run
from torpor.shared.codecs.planes import RANS


def encoder_seconds(
    device: Device, chunks: Sequence[bytes], element: Element, threads: int, rounds: int
) -> list[float]:
    """Seconds of each round over all chunks through the agent's encoder, behind one that warms up
    and whose streams the CPU decodes. Closes the device, unless its driver hangs."""
    try:
        encoder = GpuEncoder(device, release=lambda: None)
    except BaseException:
        device.close()
        raise

    def encode(chunk: bytes) -> bytes | None:
        return encoder.encode(chunk, [Run(len(chunk), element)])

    seconds = []
    try:
        with ThreadPoolExecutor(threads) as pool:
            for number in range(rounds + 1):
                started = time.perf_counter()
                streams = list(pool.map(encode, chunks))
                seconds.append(time.perf_counter() - started)
                if number == 0:
                    _compare_streams(streams, chunks)
    finally:
        encoder.close()
    return seconds[1:]


def batches_seconds(
    device: Device,
    library: nvcomp.Nvcomp,
    algorithm: str,
    chunks: Sequence[bytes],
    element: Element,
    rounds: int,
) -> tuple[list[float], list[float]]:
    """Seconds of encoding and of decoding all chunks in each round behind one that warms up."""
    batches = nvcomp.Batches(device, library, algorithm, element.name, len(chunks[0]))
    encode_s, decode_s = [], []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        encoded = list(batches.encode(chunks))
        between = time.perf_counter()
        plains = list(batches.decode(encoded))
        decode_s.append(time.perf_counter() - between)
        encode_s.append(between - started)
        if plains != list(chunks):
            raise CameBackWrong(f"nvCOMP {algorithm} does not give all chunks back, end to end")
    batches.close()
    return encode_s[1:], decode_s[1:]


def _compare_streams(streams: Sequence[bytes | None], chunks: Sequence[bytes]) -> None:
    for number, (stream, chunk) in enumerate(zip(streams, chunks, strict=True)):
        if stream is not None and RANS.decode(memoryview(stream), len(chunk)) != chunk:
            raise CameBackWrong(f"torpor does not give chunk {number} back, end to end")
