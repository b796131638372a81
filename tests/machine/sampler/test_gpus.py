"""The sampler's look at GPUs: the real nvidia-ml-py over our stand-in for libnvidia-ml."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.fixtures.nvml import StandIn
from tests.fixtures.waiting import PATIENCE_S
from torpor.machine.sampler.gpus import Gpus
from torpor.shared.wire.activity import GPU_LOST, GPUS_FINE, GPUS_UNREADABLE, NO_GPU, UNKNOWN

_LOOKER = """
import sys
from msgspec.structs import astuple
from torpor.machine.sampler.gpus import Gpus
clock = [0.0]
gpus = Gpus(lambda: clock[0])
for line in sys.stdin:
    if line == "figures\\n":
        print(*(figure for gpu in gpus.figures() or [] for figure in astuple(gpu)), flush=True)
        continue
    clock[0] += float(line)
    print(*gpus.look(), flush=True)
"""

Look = Callable[..., tuple[int, ...]]


@pytest.fixture
def ask(stand_in_gpus: StandIn) -> Iterator[Callable[[str], tuple[int, ...]]]:
    """Ask a process that loads the stand-in."""
    process = subprocess.Popen(
        [sys.executable, "-c", _LOOKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def ask(what: str) -> tuple[int, ...]:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{what}\n")
        process.stdin.flush()
        return tuple(map(int, process.stdout.readline().split()))

    yield ask
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0


@pytest.fixture
def look(ask: Callable[[str], tuple[int, ...]]) -> Look:
    """Look once, ``after_s``."""
    return lambda after_s=1.0: ask(str(after_s))


@pytest.mark.parametrize(
    ("gpus", "seen"),
    [
        (["samples=0,0,0 rate=0"], (1, GPUS_FINE, 0)),
        (["samples=0,97,0 rate=0"], (1, GPUS_FINE, 97)),  # a burst, which a rate of now misses
        ([*["samples=0,0 rate=0"] * 7, "samples=40,60 rate=50"], (8, GPUS_FINE, 60)),
        (["rate=33"], (1, GPUS_FINE, 33)),  # no buffer of samples
        (["samples=4294967295 rate=7"], (1, GPUS_FINE, 7)),
        (["nothing"], (1, GPUS_UNREADABLE, UNKNOWN)),
    ],
)
def test_the_busiest_gpu_of_the_last_second_counts(
    stand_in_gpus: StandIn, look: Look, gpus: list[str], seen: tuple[int, ...]
) -> None:
    stand_in_gpus.are(*gpus)
    assert look() == seen


def test_a_lost_gpu(stand_in_gpus: StandIn, look: Look) -> None:
    stand_in_gpus.are("samples=10", "samples=20")
    assert look() == (2, GPUS_FINE, 20)
    stand_in_gpus.are("samples=10", "lost")
    assert look() == (2, GPU_LOST, 10)
    assert look(60.0) == (2, GPU_LOST, 10)  # and NVML was opened again
    assert look() == (2, GPU_LOST, 10)
    stand_in_gpus.are("samples=10", "samples=30")
    assert look() == (2, GPUS_FINE, 30)


def test_mig_is_read_from_its_instances(stand_in_gpus: StandIn, look: Look) -> None:
    stand_in_gpus.are("mig=2 gpm=0")
    assert look() == (1, GPUS_UNREADABLE, UNKNOWN)  # a rate needs two looks
    assert look() == (1, GPUS_FINE, 0)
    stand_in_gpus.are("mig=2 gpm=55")
    assert look() == (1, GPUS_FINE, 55)
    stand_in_gpus.are("mig=3 gpm=55")
    assert look() == (1, GPUS_UNREADABLE, UNKNOWN)  # one of them is new
    assert look() == (1, GPUS_FINE, 55)
    stand_in_gpus.are("mig=0")
    assert look() == (1, GPUS_FINE, 0)  # no instance: nothing can run


def test_mig_without_gpm_is_unknown(stand_in_gpus: StandIn, look: Look) -> None:
    stand_in_gpus.are("mig=2", "samples=80")
    for _ in range(3):
        assert look() == (2, GPUS_UNREADABLE, 80)


def test_the_figures_of_each_gpu_and_what_it_does_not_say(
    stand_in_gpus: StandIn, ask: Callable[[str], tuple[int, ...]], look: Look
) -> None:
    said = "used=70000 free=11559 heat=71 power=650000 sent=120 received=2400"
    stand_in_gpus.are(f"rate=40 {said}", "rate=0 heat=30", "nothing")
    look()
    stand_in_gpus.are(f"rate=90 {said}", "rate=0 heat=30", "nothing")
    look()
    none = (UNKNOWN,) * 7
    assert (ask("figures"), ask("figures")) == ((), ())  # one GPU at each call
    assert ask("figures") == (
        *(65, 70000, 11559, 71, 650000, 120, 2400),  # the mean of both looks
        *(0, UNKNOWN, UNKNOWN, 30, UNKNOWN, UNKNOWN, UNKNOWN),
        *none,
    )
    stand_in_gpus.are(f"lost rate=90 {said}", "rate=0", "nothing")
    answers = [ask("figures") for _ in range(10)]  # a round
    assert [answer[:7] for answer in answers if answer] == [none]


def test_no_call_reads_the_figures_of_many_gpus(
    stand_in_gpus: StandIn, ask: Callable[[str], tuple[int, ...]], look: Look
) -> None:
    stand_in_gpus.are(*["rate=0 heat=30"] * 16)
    look()
    heats = []
    for call in range(10):  # a call reads two: each shows how hot they were then
        stand_in_gpus.are(*[f"rate=0 heat={30 + call}"] * 16)
        heats.append(ask("figures")[3::7])
    assert heats == [()] * 9 + [(*range(30, 40), *range(30, 36))]


def test_a_driver_that_comes_later_is_noticed(stand_in_gpus: StandIn, look: Look) -> None:
    stand_in_gpus.are("dead")
    assert look() == (0, NO_GPU, UNKNOWN)
    stand_in_gpus.are("rate=1")
    assert look() == (0, NO_GPU, UNKNOWN)
    assert look(60.0) == (1, GPUS_FINE, 1)


def test_devices_without_a_library_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr("torpor.machine.sampler.gpus.DEVICES", ("/dev/none",))
    assert Gpus().look()[:3] == (0, NO_GPU, UNKNOWN)
    monkeypatch.setattr("torpor.machine.sampler.gpus.DEVICES", ("/dev/null",))
    assert Gpus().look()[:3] == (0, GPUS_UNREADABLE, UNKNOWN)
