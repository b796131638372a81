"""What each encoding does on this machine's cores and GPU."""

from __future__ import annotations

from torpor.machine.agent.call import Call
from torpor.machine.agent.gpu import MachineGpu
from torpor.machine.agent.rates import coders, digest_s, run_coder, run_gpu, samples
from torpor.machine.agent.runs import coding_cores
from torpor.shared.codecs.gpu import GpuError
from torpor.shared.codecs.layout import Element
from torpor.shared.errors import SnapshotDamaged
from torpor.shared.values import Coded
from torpor.shared.wire.machine import Encodings, MeasureEncodings


def measure_encodings(request: MeasureEncodings, call: Call) -> Encodings:
    """Encode and decode every kind of content by every encoding that a CPU writes, and numbers on
    the GPU, if there is one that can be used."""
    coded: list[Coded] = []
    per_byte_s = 0.0
    why = "this machine encodes no numbers on a GPU"
    for data, plain, element in samples(request.content_bytes, request.seed):
        for coder in coders(element):
            call.check()
            coded.append(run_coder(data, plain, coder, request.rounds))
        if element is Element.BYTES:
            per_byte_s = digest_s(plain)
            continue
        try:
            gpu = MachineGpu(call.home, request.gpu, []).open(call.cancelled)
        except GpuError as error:
            why = f"not measured: {error}"
            continue
        try:
            coded.append(run_gpu(data, plain, element, gpu, request.rounds))
            why = gpu.name
        except (GpuError, SnapshotDamaged) as error:
            why = f"not measured: {error}"
        finally:
            gpu.close()
    return Encodings(coded, coding_cores(), per_byte_s, why)
