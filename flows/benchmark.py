"""Benchmark: what stores, encodings and numbers of parts do, here and now; a page that advises."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import structs
from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from pydantic import Field

from blocks import Workspace
from flows.hibernate import hibernate
from flows.phases import Phases
from flows.scratch_machine import ScratchMachine, held_and_cleared, scratch_machine
from flows.wake import wake
from tasks.measure import (
    MeasuredStore,
    Sizes,
    clear_scratch,
    make_machine_content,
    measure_codecs,
    measure_peer,
    measure_store,
    open_stores,
    rate,
    remove_machine_content,
)
from tasks.place import Place, open_place, probe_store
from torpor.agent.content import path_of
from torpor.errors import InvalidInput, StoreError
from torpor.measure import advice, page, peers, plots
from torpor.measure.figures import Direction, Figure, find
from torpor.measure.host import host_facts
from torpor.measure.results import default_folder, write_results
from torpor.measure.scratch import scratch_name
from torpor.measure.storage import MACHINE, above_line
from torpor.reports import BenchmarkReport
from torpor.tree.plan import CHUNK_BYTES
from torpor.values import MIB, WorkspaceName

Report = TypeVar("Report")

PARTS: Final = [1, 4, 8, 16, 32, 64]
OBJECT_MIB: Final = [1, 8, 64]
_CODEC_MIB: Final = 16
_BATCH_MIB: Final = 64

Parts = Annotated[int, Field(ge=1, le=64)]
ObjectMib = Annotated[int, Field(ge=1, le=256)]


def _run_name() -> str:
    workspace = flow_run.parameters.get("workspace")
    return f"benchmark-{getattr(workspace, 'name', workspace)}"


@flow(name="benchmark", flow_run_name=_run_name, persist_result=False)
def benchmark(
    workspace: Workspace | str,
    parts: list[Parts] = PARTS,
    content_mib: Annotated[int, Field(ge=8, le=65536)] = 64,
    rounds: Annotated[int, Field(ge=1, le=20)] = 3,
    object_mib: list[ObjectMib] = OBJECT_MIB,
    stores: list[str] = [],  # noqa: B006 - a form shows the default; it is never changed
    other_tools: bool = True,
    machine: str = "",
    folder: str = "",
) -> BenchmarkReport:
    """Measure stores, encodings, hibernate and wake, and advise what to use.

    A machine is rented for it and destroyed, and everything that is stored is deleted. Your own
    machines and snapshots are not touched.

    Args:
        workspace: The Workspace block whose store, provider and identity are measured, or its name.
        parts: Numbers of parts to compare, 1 to 64.
        content_mib: How much is hibernated and woken each time, in MiB; made for it, not yours.
        rounds: How often everything is measured. A spread needs 3 or more.
        object_mib: Sizes of raw objects to store and fetch, in MiB.
        stores: Names of further Object Store blocks to measure; * for every one.
        other_tools: Measure restic and tar+lz4+s5cmd too, where they are installed.
        machine: user@host:port of a machine of your own to measure on. Empty: rent one.
        folder: Where table, JSON and pictures are kept. Empty: ~/.local/state/torpor/benchmarks.
    """
    began = datetime.now(timezone.utc)
    phases = Phases()
    block = Workspace.of(workspace)
    name = scratch_name(WorkspaceName(block.name))
    sizes = Sizes(
        tuple(sorted(set(parts))) or (1,),
        tuple(sorted(set(object_mib))) or (1,),
        _BATCH_MIB,
        content_mib,
        min(_CODEC_MIB, content_mib),
        rounds,
    )
    with phases.phase("prepare"):
        measured = open_stores(block, stores)
        place = open_place(_measured_block(block, name, sizes, 1))
        probe_store(place)
    work = _Benchmark(block, place, measured, sizes, phases)
    with (
        held_and_cleared(place, str(flow_run.id)),
        scratch_machine(place, WorkspaceName(block.name), machine, phases) as scratch,
    ):
        work.measure_stores(scratch)
        work.measure_flows(scratch)
        if other_tools:
            work.measure_others(scratch)
    with phases.phase("codecs"):
        work.figures += measure_codecs(sizes.codec_mib * MIB, rounds)
    return work.report(began, Path(folder).expanduser() if folder else default_folder())


class _Benchmark:
    """The order of one run. ``figures`` grow; ``notes`` say what could not be measured."""

    def __init__(
        self,
        block: Workspace,
        place: Place,
        measured: list[MeasuredStore],
        sizes: Sizes,
        phases: Phases,
    ) -> None:
        self._block = block
        self._place = place
        self._name = place.spec.name
        self._measured = measured
        self._sizes = sizes
        self._phases = phases
        self.figures: list[Figure] = []
        self.notes: list[str] = []

    def measure_stores(self, scratch: ScratchMachine) -> None:
        """Each store by itself; a further one that fails is noted, and the others are measured."""
        with self._phases.phase("stores"):
            for one in self._measured:
                try:
                    self.figures += measure_store(one, scratch.session, self._name, self._sizes)
                except (InvalidInput, StoreError) as error:
                    if one is self._measured[0]:
                        raise
                    self._note(f"store {one.name} was not measured: {error}")

    def measure_flows(self, scratch: ScratchMachine) -> None:
        """Rounds over all numbers of parts, so that a slow minute touches all alike."""
        most = self._sizes.content_mib * MIB // CHUNK_BYTES
        seen: dict[int, list[_Round]] = {n: [] for n in self._sizes.parts if n <= most}
        for count in set(self._sizes.parts) - set(seen):
            need = count * CHUNK_BYTES // MIB
            self._note(f"{count} parts were not measured: they take {need} MiB of content or more")
        with self._phases.phase("hibernate and wake"):
            for _ in range(self._sizes.rounds):
                for count, rounds in seen.items():
                    rounds.append(self._round(scratch, count))
        for count, rounds in seen.items():
            self.figures += self._flow_figures("hibernate", count, [one.slept for one in rounds])
            self.figures += self._flow_figures("wake", count, [one.woken for one in rounds])

    def measure_others(self, scratch: ScratchMachine) -> None:
        """Other tools run on this host, so they are only measured where the machine is here too."""
        if not scratch.here:
            self._note("other tools were not measured: the machine is not on this host")
            return
        own = self._measured[0]
        best = min(find(self.figures, "hibernate", unit="s"), key=lambda figure: figure.median)
        back = find(self.figures, "wake", unit="s", parts=best.parts)[0]
        stored = find(self.figures, "hibernate", unit="bytes", parts=best.parts)[0]
        for figure, direction in ((best, "up"), (back, "down"), (stored, "up")):
            self.figures.append(structs.replace(figure, what="peer", direction=direction))
        with self._phases.phase("other tools"):
            for peer in peers.PEERS:
                absent = peers.missing(peer)
                if absent is not None:
                    self._note(f"{peer} was not measured: {absent} is not installed on this host")
                    continue
                content = self._sizes.content_mib * MIB
                self.figures += measure_peer(peer, own, self._name, content, self._sizes.rounds)

    def report(self, began: datetime, folder: Path) -> BenchmarkReport:
        """Judge, draw and write; the page is an artifact of the run."""
        prices = {one.name: one.price for one in self._measured}
        said = advice.advise(self.figures, prices)
        with self._phases.phase("pictures"):
            pictures = plots.pictures(self.figures, self._measured[0].name)
        facts = host_facts() | {
            "workspace": self._block.name,
            "provider": self._place.provider.identity,
            "content": f"{self._sizes.content_mib} MiB, made for it: BF16 weights, sources, JSON",
            "rounds": self._sizes.rounds,
            "seconds": " ".join(f"{k} {v:.1f}" for k, v in self._phases.seconds.items()),
        }
        into = folder / f"{began:%Y%m%dT%H%M%SZ}-{self._block.name}"
        about = {"host": facts, "notes": self.notes, "prices": msgspec.to_builtins(prices)}
        write_results(into, self.figures, said, pictures, about)
        text = page.page(self.figures, said, pictures, prices, facts, self.notes)
        create_markdown_artifact(
            key=f"benchmark-{self._block.name}",
            markdown=text,
            description=f"Benchmark of workspace {self._block.name}; table, JSON in {into}",
        )
        return BenchmarkReport(
            workspace=WorkspaceName(self._block.name),
            folder=str(into),
            figures=len(self.figures),
            advice={one.about: f"{one.choice}: {one.because}" for one in said},
            cached=sum(figure.cached for figure in self.figures),
            notes=self.notes,
            seconds=self._phases.seconds,
        )

    def _round(self, scratch: ScratchMachine, count: int) -> _Round:
        """Content that no store has seen is hibernated and woken on the machine."""
        content = self._sizes.content_mib * MIB
        make_machine_content(scratch.session, self._name, content, secrets.randbits(31))
        block = _measured_block(self._block, self._name, self._sizes, count)
        slept, slept_s = _timed(lambda: hibernate(block, destroy=False, machine=scratch.address))
        remove_machine_content(
            scratch.session, self._name, place_too=False
        )  # a wake needs the place empty
        woken, woken_s = _timed(lambda: wake(block, machine=scratch.address))
        remove_machine_content(scratch.session, self._name, place_too=False)
        for below in ("snapshots/", "packs/"):
            clear_scratch(self._place, below)
        return _Round(
            _Ran(slept_s, slept.seconds, slept.stored_bytes, slept.seconds["store"]),
            _Ran(woken_s, woken.seconds, woken.stored_bytes, woken.seconds["restore"]),
        )

    def _flow_figures(
        self, what: Literal["hibernate", "wake"], count: int, ran: Sequence[_Ran]
    ) -> Iterator[Figure]:
        """Seconds of the flow and of each phase, stored bytes, and their rate in the phase that
        moves them."""
        direction: Direction = "up" if what == "hibernate" else "down"
        line = find(self.figures, "line", direction=direction, name=self._measured[0].name)
        whole = Figure(
            what, "torpor", "s", tuple(one.wall_s for one in ran), direction,
            parts=count, machines=1, measured_from=MACHINE,
        )  # fmt: skip
        yield whole
        for phase in ran[0].seconds:
            values = tuple(one.seconds.get(phase, 0.0) for one in ran)
            yield structs.replace(whole, values=values, phase=phase)
        yield structs.replace(
            whole, values=tuple(float(one.stored_bytes) for one in ran), unit="bytes"
        )
        rates = tuple(rate(one.stored_bytes, one.moving_s) for one in ran)
        cached = above_line(rates, line[0] if line else None)
        yield structs.replace(whole, values=rates, unit="MB/s", cached=cached)

    def _note(self, text: str) -> None:
        get_run_logger().warning(text)
        self.notes.append(text)


class _Ran(NamedTuple):
    """One flow: wall seconds in all and by phase, and what it moved in how long."""

    wall_s: float
    seconds: dict[str, float]
    stored_bytes: int
    moving_s: float


class _Round(NamedTuple):
    slept: _Ran
    woken: _Ran


def _measured_block(block: Workspace, name: WorkspaceName, sizes: Sizes, parts: int) -> Workspace:
    """The workspace's settings with the benchmark's name and content, cut into ``parts``."""
    part_mib = max(1, sizes.content_mib // parts)
    return block.for_measuring(name, path_of(name), parts, part_mib)


def _timed(work: Callable[[], Report]) -> tuple[Report, float]:
    started = time.monotonic()
    report = work()
    return report, time.monotonic() - started
