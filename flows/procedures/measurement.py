"""The order of a benchmark's measurements, and the judgement of them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeVar, cast

import msgspec
from msgspec import structs

from blocks import Workspace
from flows.hibernate import hibernate
from flows.procedures.scratch_machine import ScratchMachine, held_and_cleared, scratch_machines
from flows.replicate import replicate
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
from tasks.phases import phase, seconds_by_phase
from tasks.runner import runner
from tasks.workspace import OpenWorkspace
from tasks.workspace_blocks import open_workspace, probe_store
from torpor.control.measure import advice, page, peers, plots
from torpor.control.measure.figures import Direction, Figure, find
from torpor.control.measure.host import host_facts
from torpor.control.measure.results import INSTALL, default_folder, left_out, write_results
from torpor.control.measure.rounds import Rounds
from torpor.control.measure.scratch import scratch_name
from torpor.control.measure.storage import MACHINE, above_line
from torpor.control.reports import BenchmarkReport, HibernateReport, WakeReport
from torpor.shared.content import path_of
from torpor.shared.errors import InvalidInput, MachineError, StoreError
from torpor.shared.format.sizes import CHUNK_BYTES
from torpor.shared.values import MIB, WorkspaceName

_SHARES: Final = {"stores": 0.12, "flows": 0.72, "replicas": 0.8, "others": 0.95}
"""Of the time, when each kind of measurement begins no further round. The rest is for the codecs
and the pictures, which take seconds."""

Report = TypeVar("Report")


def measure_stores(
    workspace: Workspace | str,
    sizes: Sizes,
    stores: list[str],
    machine: str,
    minutes: float,
    folder: str,
    *,
    other_tools: bool,
) -> BenchmarkReport:
    """Measure the workspace's store and ``stores``, and on scratch machines hibernate, wake and
    replicate, and other tools; and the encodings on this host."""
    began = time.monotonic()
    block = Workspace.of(workspace)
    measured = open_stores(block, stores)
    opened = open_workspace(measured_block(block, sizes, 1))
    probe_store(opened)
    work = Measurement(block, opened, measured, sizes, began, 60 * minutes)
    name = WorkspaceName(block.name)
    with (
        held_and_cleared(opened, name, runner().run),
        scratch_machines(opened, name, machine, max(sizes.machines, default=1)) as scratch,
    ):
        work.stores(scratch[0])
        work.flows(scratch[0])
        work.replicas(scratch)
        if other_tools:
            work.others(scratch[0])
    work.codecs()
    return work.judge(folder)


class Measurement:
    """Each method measures one thing and adds to ``figures``. ``notes`` say what was not measured,
    and why."""

    def __init__(
        self,
        block: Workspace,
        opened: OpenWorkspace,
        measured: list[MeasuredStore],
        sizes: Sizes,
        began: float,
        seconds: float,
    ) -> None:
        self.figures: list[Figure] = []
        self.notes: list[str] = []
        self._block = block
        self._opened = opened
        self._name = opened.spec.name
        self._measured = measured
        self._sizes = sizes
        self._began = began
        self._seconds = seconds
        self._started = datetime.now(timezone.utc)

    def stores(self, scratch: ScratchMachine) -> None:
        """Measure each store. A further store that fails is noted; the others are measured."""
        with phase("stores"):
            for number, one in enumerate(self._measured, 1):
                share = _SHARES["stores"] * number / len(self._measured)
                rounds = self._rounds(share)
                try:
                    self.figures += measure_store(
                        one, scratch.session, self._name, self._sizes, rounds
                    )
                except (InvalidInput, StoreError) as error:
                    if number == 1:  # nothing else works without it
                        raise
                    self._note(f"store {one.name} was not measured: {error}")
                else:
                    self._tell(rounds, f"store {one.name}")

    def flows(self, scratch: ScratchMachine) -> None:
        """Measure hibernate and wake. Each round covers all numbers of parts, so that a slow minute
        affects all of them."""
        most = self._sizes.content_mib * MIB // CHUNK_BYTES
        seen: dict[int, list[_Round]] = {n: [] for n in self._sizes.parts if n <= most}
        for count in sorted(set(self._sizes.parts) - set(seen)):
            need = count * CHUNK_BYTES // MIB
            self._note(f"{count} parts were not measured: they take {need} MiB of content")
        rounds = self._rounds(_SHARES["flows"])
        with phase("hibernate and wake"):
            for _ in rounds:
                for count, ran in seen.items():
                    ran.append(self._round(scratch, count))
        self._tell(rounds, "hibernate and wake")
        for count, ran in seen.items():
            self.figures += self._figures("hibernate", count, [one.slept for one in ran])
            self.figures += self._figures("wake", count, [one.woken for one in ran])

    def replicas(self, machines: Sequence[ScratchMachine]) -> None:
        """One snapshot to several machines at once, at the number of parts that woke fastest."""
        counts = [count for count in self._sizes.machines if count <= len(machines)]
        wakes = find(self.figures, "wake", unit="s")
        if not wakes or len(counts) < len(self._sizes.machines):
            self._note("replicate was not measured for more machines than there are")
        if not wakes or not counts:
            return
        parts = min(wakes, key=lambda figure: figure.median).parts or 1
        block = measured_block(self._block, self._sizes, parts)
        seen: dict[int, list[_Ran]] = {count: [] for count in counts}
        rounds = self._rounds(_SHARES["replicas"])
        with phase("replicate"):
            self._make(machines[0])
            hibernate(block, destroy=False, machine=machines[0].address)
            self._empty(machines[0])
            for one in machines[1:]:  # what has not been made there would not be removed either
                make_machine_content(one.session, self._name, 0, 0)
                self._empty(one)
            for _ in rounds:
                for count, ran in seen.items():
                    targets = [one.address for one in machines[:count]]
                    report, wall_s = _timed(
                        lambda to=targets: replicate(block, count=0, machines=to)  # type: ignore[misc]
                    )
                    if report.failed:
                        raise MachineError(
                            f"replicate to {count} machines failed on {report.failed[0].machine}: "
                            f"{report.failed[0].words}"
                        )
                    ran.append(_Ran(wall_s, report.seconds, 0, 0.0))
                    for one in machines[:count]:
                        self._empty(one)
            clear_scratch(self._opened, "snapshots/")
            clear_scratch(self._opened, "packs/")
        self._tell(rounds, "replicate")
        for count, ran in seen.items():
            whole = Figure(
                "replicate", "torpor", "s", tuple(one.wall_s for one in ran), "down",
                parts=parts, machines=count, measured_from=MACHINE,
            )  # fmt: skip
            self.figures += [whole, *_by_phase(whole, ran)]

    def others(self, scratch: ScratchMachine) -> None:
        """Other tools run on this host, so they are measured only if the machine is on this
        host.
        """
        flows = find(self.figures, "hibernate", unit="s")
        if not scratch.here or not flows:
            self._note("other tools were not measured: the machine is not on this host")
            return
        best = min(flows, key=lambda figure: figure.median)
        back = find(self.figures, "wake", unit="s", parts=best.parts)[0]
        stored = find(self.figures, "hibernate", unit="bytes", parts=best.parts)[0]
        self.figures += [structs.replace(one, what="peer") for one in (best, back, stored)]
        with phase("other tools"):
            for number, peer in enumerate(peers.PEERS, 1):
                absent = peers.missing(peer)
                if absent is not None:
                    self._note(f"{peer} was not measured: {absent} is not installed on this host")
                    continue
                past = _SHARES["replicas"]
                rounds = self._rounds(past + (_SHARES["others"] - past) * number / len(peers.PEERS))
                content = self._sizes.content_mib * MIB
                try:
                    self.figures += measure_peer(
                        peer, self._measured[0], self._name, content, rounds
                    )
                except StoreError as error:  # it costs none of what was measured before
                    self._note(f"{peer} was not measured: {error}")
                else:
                    self._tell(rounds, peer)

    def codecs(self) -> None:
        """Measure the encodings on this host; nothing is sent."""
        with phase("encodings"):
            self.figures += measure_codecs(self._sizes.codec_mib * MIB, self._sizes.rounds)

    def judge(self, folder: str) -> BenchmarkReport:
        """Advise what to use; write everything below ``folder``, and show it as a page."""
        prices = {one.name: one.price for one in self._measured}
        said = advice.advise(self.figures, prices)
        pictures: dict[str, bytes] = {}
        missing = left_out()
        if missing:
            self._note(
                f"not written: {', '.join(missing.values())}. Missing: {' and '.join(missing)}. "
                f"{INSTALL}"
            )
        if "matplotlib" not in missing:
            with phase("pictures"):
                pictures = plots.pictures(self.figures, self._measured[0].name)
        facts = host_facts() | {
            "workspace": self._block.name,
            "provider": ", ".join(one.identity for one in self._opened.providers),
            "content": f"{self._sizes.content_mib} MiB, made for it: BF16 weights, sources, JSON",
            "rounds": f"{self._sizes.rounds}, as far as {self._seconds / 60:g} minutes let them",
            "seconds": ", ".join(f"{k} {v:.1f}" for k, v in seconds_by_phase().items()),
        }
        kept = Path(folder).expanduser() if folder else default_folder()
        into = kept / f"{self._started:%Y%m%dT%H%M%SZ}-{self._block.name}"
        about = {"host": facts, "notes": self.notes, "prices": msgspec.to_builtins(prices)}
        write_results(into, self.figures, said, pictures, about)
        runner().page(
            key=f"benchmark-{self._block.name}",
            markdown=page.page(self.figures, said, pictures, prices, facts, self.notes),
            description=f"Benchmark of workspace {self._block.name}. Table, JSON and pictures: "
            f"{into}",
        )
        return BenchmarkReport(
            workspace=WorkspaceName(self._block.name),
            folder=str(into),
            figures=len(self.figures),
            advice={one.about: f"{one.choice}: {one.because}" for one in said},
            cached=sum(figure.cached for figure in self.figures),
            notes=self.notes,
            seconds=seconds_by_phase(),
        )

    def _round(self, scratch: ScratchMachine, count: int) -> _Round:
        """Hibernate and wake new content, which no store has seen."""
        self._make(scratch)
        block = measured_block(self._block, self._sizes, count)
        kept, slept_s = _timed(lambda: hibernate(block, destroy=False, machine=scratch.address))
        slept = cast("HibernateReport", kept)  # a machine of one's own is never asleep
        self._empty(scratch)  # a wake needs the place empty
        restored, woken_s = _timed(lambda: wake(block, machine=scratch.address))
        woken = cast("WakeReport", restored)  # it was no dry run
        self._empty(scratch)
        clear_scratch(self._opened, "snapshots/")
        clear_scratch(self._opened, "packs/")
        return _Round(
            _Ran(slept_s, slept.seconds, slept.stored_bytes, slept.seconds["store"]),
            _Ran(woken_s, woken.seconds, woken.stored_bytes, woken.seconds["restore"]),
        )

    def _make(self, scratch: ScratchMachine) -> None:
        content = self._sizes.content_mib * MIB
        make_machine_content(scratch.session, self._name, content, secrets.randbits(31))

    def _empty(self, scratch: ScratchMachine) -> None:
        remove_machine_content(scratch.session, self._name, place_too=False)

    def _figures(
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
        yield from _by_phase(whole, ran)
        stored = tuple(float(one.stored_bytes) for one in ran)
        yield structs.replace(whole, values=stored, unit="bytes")
        rates = tuple(rate(one.stored_bytes, one.moving_s) for one in ran)
        cached = above_line(rates, line[0] if line else None)
        yield structs.replace(whole, values=rates, unit="MB/s", cached=cached)

    def _rounds(self, share: float) -> Rounds:
        return Rounds(self._sizes.rounds, self._began + share * self._seconds)

    def _tell(self, rounds: Rounds, what: str) -> None:
        if rounds.done < self._sizes.rounds:
            self._note(
                f"the time limit was reached after {rounds.done} of {self._sizes.rounds} rounds "
                f"of {what}"
            )

    def _note(self, text: str) -> None:
        runner().log.warning(text)
        self.notes.append(text)


def measured_block(block: Workspace, sizes: Sizes, parts: int) -> Workspace:
    """The workspace's settings with the benchmark's name and content, cut into ``parts``."""
    name = scratch_name(WorkspaceName(block.name))
    return block.for_measuring(name, path_of(name), parts, max(1, sizes.content_mib // parts))


class _Ran(NamedTuple):
    """One flow: wall seconds in all and by phase, and what it moved in how long."""

    wall_s: float
    seconds: dict[str, float]
    stored_bytes: int
    moving_s: float


class _Round(NamedTuple):
    slept: _Ran
    woken: _Ran


def _by_phase(whole: Figure, ran: Sequence[_Ran]) -> Iterator[Figure]:
    for name in ran[0].seconds:
        values = tuple(one.seconds.get(name, 0.0) for one in ran)
        yield structs.replace(whole, values=values, phase=name)


def _timed(work: Callable[[], Report]) -> tuple[Report, float]:
    started = time.monotonic()
    report = work()
    return report, time.monotonic() - started
