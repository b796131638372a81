"""The order of a benchmark's measurements, and the judgement of them."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from blocks import Workspace
from flows.procedures.scratch_machine import held_and_cleared, scratch_machine
from tasks.measure import CODEC_BYTES, measure_encodings, measure_store, open_stores
from tasks.phases import phase, seconds_by_phase
from tasks.runner import runner
from tasks.workspace_blocks import open_workspace, probe_store
from torpor.control.measure import advice, page
from torpor.control.measure.encodings import fastest_by_line, figures_of
from torpor.control.measure.figures import Figure
from torpor.control.measure.host import host_facts
from torpor.control.measure.results import default_folder, write_results
from torpor.control.measure.rounds import Rounds
from torpor.control.measure.scratch import scratch_name
from torpor.control.measure.storage import OBJECT_BYTES, OBJECTS
from torpor.control.reports import BenchmarkReport
from torpor.shared.errors import InvalidInput, StoreError
from torpor.shared.values import MIB, GpuUse


def measure_stores(
    workspace: Workspace | str,
    stores: list[str],
    machine: str,
    rounds: int,
    minutes: float,
    folder: str,
) -> BenchmarkReport:
    """Measure the workspace's store and ``stores`` and the encodings on a scratch machine. A
    further store that fails is noted; the others are measured."""
    began, started = time.monotonic(), datetime.now(timezone.utc)
    measured = open_stores(workspace, stores)
    opened = open_workspace(workspace)
    probe_store(opened)
    name = opened.spec.name
    scratch = opened.under(scratch_name(name))
    figures: list[Figure] = []
    notes: list[str] = []

    def note(text: str) -> None:
        runner().log.warning(text)
        notes.append(text)

    with (
        held_and_cleared(scratch, name, runner().run),
        scratch_machine(scratch, name, machine) as session,
    ):
        with phase("stores"):
            for number, one in enumerate(measured, 1):
                limit = Rounds(rounds, began + 60 * minutes * number / len(measured))
                try:
                    figures += measure_store(one, session, scratch.spec.name, limit)
                except (InvalidInput, StoreError) as error:
                    if number == 1:  # the workspace's own store
                        raise
                    note(f"store {one.name} was not measured: {error}")
                    continue
                if limit.done < rounds:
                    note(f"the time limit was reached after {limit.done} of {rounds} rounds of "
                         f"store {one.name}")  # fmt: skip
        with phase("encodings"):
            gpu = opened.spec.compression.gpu or GpuUse()
            encodings = measure_encodings(session, rounds, gpu)
    figures += [figure for coded in encodings.coded for figure in figures_of(coded)]
    prices = {one.name: one.price for one in measured}
    said = advice.advise(figures, prices, encodings.cores)
    facts = host_facts() | {
        "workspace": name,
        "provider": ", ".join(one.identity for one in opened.providers),
        "a sample of a store": f"{OBJECTS} objects of {OBJECT_BYTES // MIB} MiB, random bytes",
        "a sample of an encoding": f"{CODEC_BYTES // MIB} MiB of each kind of content",
        "cores that encode": encodings.cores,
        "GPU": encodings.gpu,
        "seconds": ", ".join(f"{k} {v:.1f}" for k, v in seconds_by_phase().items()),
    }
    kept = Path(folder).expanduser() if folder else default_folder()
    into = kept / f"{started:%Y%m%dT%H%M%SZ}-{name}"
    by_line = [*fastest_by_line(encodings)]
    about = {"host": facts, "notes": notes, "prices": msgspec.to_builtins(prices)}
    about |= {"fastest_by_line": by_line}
    write_results(into, figures, said, about)
    runner().page(
        key=f"benchmark-{name}",
        markdown=page.page(figures, said, prices, by_line, facts, notes),
        description=f"Benchmark of workspace {name}. Table and JSON: {into}",
    )
    return BenchmarkReport(
        workspace=name,
        folder=str(into),
        figures=len(figures),
        advice={one.about: f"{one.choice}: {one.because}" for one in said},
        notes=notes,
        seconds=seconds_by_phase(),
    )
