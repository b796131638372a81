"""What a job does next: each case by a table, and every state by hypothesis."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.lab import DEMO
from torpor.control.jobs.decide import EndJob, JobMachine, Move, Situation, is_over_on, next_move
from torpor.control.jobs.policy import MOST_LOSSES, is_retried
from torpor.control.jobs.records import Attempt, Job, Node, Stop
from torpor.control.rental.records import Rental
from torpor.shared.values import Label, Machine, MachineId, SnapshotId

LABEL = Label("me", DEMO, "0123456789abcdef")
RENTAL = Rental(label=LABEL, provider="p:1", created_unix=1.0, state="handed over")
CANCEL = Stop("cancelled", "hibernate", "enough", 1.0)
KEEP = Stop("cancelled", "keep", "enough", 1.0)
SAVE = SnapshotId("20261120T234913Z-1f0c9ab2")


def job(*ends: tuple[str, int | None], **fields: Any) -> Job:
    attempts = [
        Attempt(
            number=number,
            machine=MachineId("m1"),
            provider="p:1",
            rental=LABEL.rental,
            spot=False,
            price_usd_h=1.0,
            began_unix=1.0,
            seen_unix=1.0,
            end=end,  # type: ignore[arg-type]
            status=status,
        )
        for number, (end, status) in enumerate(ends, 1)
    ]
    of = {"id": "j", "workspace": DEMO, "block": DEMO, "command": ["true"], "created_unix": 1.0}
    return Job(**of | {"attempts": attempts, "retries": 1} | fields)


def on(state: str = "running", *, ours: bool = True, machine: str = "m1") -> Situation:
    shown = Machine(MachineId(machine), "p:1", LABEL, state, None)  # type: ignore[arg-type]
    return Situation(JobMachine(shown, RENTAL, ours))


OPEN, FINE, FAILED = ("", None), ("command ended", 0), ("command ended", 7)
LOST, STOPPED = ("machine lost", None), ("stopped", None)
NODE = Node(machine=MachineId("m9"), provider="p:1")
ENDING = Situation(
    JobMachine(
        Machine(MachineId("m1"), "p:1", LABEL, "stopping", None),
        msgspec.structs.replace(RENTAL, snapshot=SAVE),
        ours=True,
    )
)


@pytest.mark.parametrize(
    ("state", "seen", "stop", "move"),
    [
        (job(), Situation(untouched=True), CANCEL, EndJob("cancelled", "enough")),
        (job(), Situation(first=False), None, "wait for turn"),
        (job(), Situation(), None, "rent"),
        (job(), Situation(left=True), CANCEL, "clear"),
        (job(), Situation(), CANCEL, EndJob("cancelled", "enough")),
        (job(), on(), None, "run"),
        (job(), on(ours=False), CANCEL, EndJob("cancelled", "enough")),
        (job(OPEN), Situation(hidden=True), CANCEL, "look again"),
        (job(OPEN), on(), None, "run"),
        (job(OPEN), on(), CANCEL, "run"),  # whoever runs it stops the command
        (job(OPEN), on(), KEEP, "keep"),
        (job(OPEN), on("stopped"), None, "revive"),
        (job(LOST), Situation(), None, "rent"),
        (job(*[LOST] * MOST_LOSSES), Situation(), None, "preempted"),
        (job(*[("supervisor lost", None)] * MOST_LOSSES), on(), None, "hibernate"),
        (job(*[("supervisor lost", None)] * MOST_LOSSES, final=SAVE), Situation(), None, "failed"),
        (job(FAILED), on(), None, "run"),
        (job(FAILED), Situation(), None, "rent"),
        (job(FAILED, FAILED), on(), None, "hibernate"),
        (job(FAILED, FAILED, final=SAVE), Situation(), None, "failed"),
        (job(FINE), on(), None, "hibernate"),
        (job(FINE), on(machine="m2"), None, "run"),  # its end is in no snapshot
        (job(FINE), on(), KEEP, "succeeded"),
        (job(FINE, final=SAVE), on("stopping"), None, "revive"),
        (job(FINE, final=SAVE), Situation(), None, "succeeded"),
        (job(STOPPED), on(), CANCEL, "hibernate"),
        (job(STOPPED), on(), KEEP, "cancelled"),
        (job(STOPPED, final=SAVE), Situation(), CANCEL, EndJob("cancelled", "enough")),
        (job(nodes=2), Situation(left=True), None, "clear"),  # it may be in another region
        (job(nodes=2), on(ours=False), None, "failed"),  # its user may work there
        (job(nodes=2), on(), None, "renew"),
        (job(nodes=2, others=[NODE]), on(), None, "run"),
        (job(nodes=3, others=[NODE]), on(), None, "renew"),
        (job(OPEN, nodes=2, others=[NODE]), on(), None, "run"),
        (job(OPEN, nodes=2, others=[NODE]), on(machine="m2"), None, "renew"),
        (job(OPEN, nodes=2, others=[NODE]), on("stopped"), None, "revive"),
        (job(LOST, nodes=2), on(), None, "renew"),
        (job(LOST, nodes=2), ENDING, None, "rent"),
        (job(LOST, nodes=2), Situation(), None, "rent"),
        (job(*[LOST] * MOST_LOSSES, nodes=2), on(), None, "hibernate"),
        (job(FAILED, nodes=2), on(), None, "renew"),
        (job(FINE, nodes=2), on(), None, "hibernate"),
        (job(STOPPED, nodes=2), on(), CANCEL, "hibernate"),
    ],
)
def test_the_next_move(state: Job, seen: Situation, stop: Stop | None, move: Move | str) -> None:
    made = next_move(state, seen, stop)
    assert (made.state if isinstance(made, EndJob) and isinstance(move, str) else made) == move


ends = st.sampled_from([FINE, FAILED, LOST, STOPPED, ("supervisor lost", None)])
jobs = st.builds(
    lambda past, last, final, nodes: job(
        *past, *last, final=final if last != [OPEN] else None, nodes=nodes
    ),
    st.lists(ends, max_size=5),
    st.sampled_from([[], [OPEN], [FINE], [FAILED], [LOST], [STOPPED]]),
    st.sampled_from([None, SAVE]),
    st.sampled_from([1, 2]),
).filter(lambda made: made.final is None or bool(made.attempts))
machines = st.builds(
    lambda state, ours, name: on(state, ours=ours, machine=name).machine,
    st.sampled_from(["running", "starting", "stopped", "stopping", "queued"]),
    st.booleans(),
    st.sampled_from(["m1", "m2"]),
)
seen_ = st.builds(
    Situation, st.none() | machines, st.booleans(), st.just(False), st.booleans(), st.booleans()
)
stops = st.none() | st.sampled_from([CANCEL, KEEP])


@given(jobs, seen_, stops)
def test_no_move_starts_a_command_that_has_ended(
    state: Job, seen: Situation, stop: Stop | None
) -> None:
    move = next_move(state, seen, stop)
    if move == "run" and seen.machine is not None:
        newest = state.attempts[-1] if state.attempts else None
        if newest is not None and newest.machine == seen.machine.machine.id:
            over = newest.end == "command ended" and (newest.status == 0 or not is_retried(state))
            assert not over and newest.end != "stopped"
    if stop is not None and seen.machine is not None and not seen.machine.ours:
        assert move not in ("run", "revive", "hibernate", "keep")


@given(jobs, seen_, stops)
def test_from_every_state_the_job_comes_to_its_end(
    state: Job, seen: Situation, stop: Stop | None
) -> None:
    """Where machines answer and the command ends with 0, or is stopped."""
    for _ in range(12):
        move = next_move(state, seen, stop)
        match move:
            case EndJob():
                return
            case "keep":
                return
            case "wait for turn":
                seen = Situation(seen.machine, hidden=seen.hidden, left=seen.left)
            case "look again" | "clear":
                seen = Situation()
            case "rent" | "revive":
                others = [NODE] * (state.nodes - 1) if move == "rent" else []
                state, seen = msgspec.structs.replace(state, others=others), on()
            case "renew":
                seen = Situation()
            case "run":
                end = FINE if stop is None else STOPPED
                state = msgspec.structs.replace(
                    state, attempts=[*state.attempts, *job(end).attempts], others=[]
                )
                seen = on()
            case "hibernate":
                assert seen.machine is not None and is_over_on(state, seen.machine.machine)
                state, seen = msgspec.structs.replace(state, final=SAVE), Situation()
    raise AssertionError(f"{state} does not end: {move}")
