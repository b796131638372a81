"""Busy, Idle, Unknown: what a verdict needs, and what never makes a machine idle."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.activity import NOW_S, activity, quiet, sample
from torpor.control.idleness import Verdict, forecast_idleness, judge_idleness
from torpor.shared.values import IdleRules
from torpor.shared.wire.activity import (
    GPU_LOST,
    GPUS_FINE,
    GPUS_UNREADABLE,
    JUPYTER_SILENT,
    NO_GPU,
    OWN_RUN,
    OWN_SAVE,
    PERSON,
    UNKNOWN,
    Sample,
)

RULES = IdleRules(minutes=5)
WINDOW = 300


def _with(at: range, samples: list[Sample], **changes: Any) -> list[Sample]:
    return [
        msgspec.structs.replace(sample, **changes) if number in at else sample
        for number, sample in enumerate(samples)
    ]


def _verdict(samples: list[Sample], rules: IdleRules = RULES, **changes: Any) -> Verdict:
    return judge_idleness(activity(samples, **changes), rules)


CPU_ONLY = quiet(WINDOW, gpus=0, gpu_state=NO_GPU, gpu=UNKNOWN, gpu_peak=0)
NO_DISK = msgspec.structs.replace(RULES, disk_kib_s=0)


@pytest.mark.parametrize(
    ("samples", "rules"),
    [
        (quiet(WINDOW), RULES),
        (quiet(2 * WINDOW), RULES),
        (CPU_ONLY, RULES),
        (quiet(WINDOW, ssh_s=WINDOW), RULES),  # a terminal without input is not a person
        (quiet(WINDOW, gpu_peak=5, cpu_peak=50, flags=PERSON), RULES),
        (quiet(WINDOW, gpu_peak=5, cpu_peak=51), RULES),
        (quiet(WINDOW, disk=UNKNOWN), NO_DISK),  # a figure that is not looked at
    ],
)
def test_a_quiet_machine_that_worked_before_is_idle(
    samples: list[Sample], rules: IdleRules
) -> None:
    assert _verdict(samples, rules).kind == "idle"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpu": 6}, "a GPU above 5 %"),
        ({"cpu": 51}, "CPU above 50 % of a core"),
        ({"network": 101}, "network above 100 KiB/s"),
        ({"disk": 1025}, "disk above 1024 KiB/s"),
    ],
)
def test_work_in_over_five_percent_of_the_seconds_is_busy(
    changes: dict[str, int], words: str
) -> None:
    busy = _verdict(_with(range(100, 116), quiet(WINDOW), **changes))
    assert (busy.kind, words in busy.reason) == ("busy", True)
    less = _with(range(100, 115), quiet(WINDOW), **changes)
    assert _verdict(less).kind == "idle"
    assert _verdict(_with(range(20, 30), less, gpu=50, cpu=90)).kind == "busy"  # causes add up


@pytest.mark.parametrize("person", [{"ssh_s": 100}, {"jupyter_s": 0}])
def test_one_second_of_a_person_is_busy(person: dict[str, int]) -> None:
    samples = _with(range(250, 251), quiet(WINDOW), **person)
    assert _verdict(samples).kind == "busy"
    alone = msgspec.structs.replace(RULES, people=False)
    assert _verdict(samples, alone).kind == "idle"


def test_torpors_own_run_is_busy_and_hides_no_other_work() -> None:
    """Whose CPU it was, nobody knows."""
    assert _verdict(quiet(WINDOW), runs=True).reason == "torpor works on it"
    past = _with(range(200), quiet(WINDOW), flags=OWN_RUN, cpu=400)
    assert _verdict(past).kind == "busy"


@pytest.mark.rule(3)
def test_a_machine_on_which_a_job_runs_is_busy_whatever_the_figures_say() -> None:
    """A job may wait for a slow download: it uses no GPU and hardly any CPU meanwhile."""
    for samples in (quiet(WINDOW), quiet(WINDOW)[:-61], [], quiet(WINDOW, gpu_state=GPU_LOST)):
        seen = activity(samples, job_s=5.0)
        assert judge_idleness(seen, RULES) == Verdict("busy", "a job runs on it")
        assert judge_idleness(seen, RULES, since_s=NOW_S - 20).kind == "busy"


def test_a_quiet_server_is_idle_and_one_request_within_the_window_is_a_use() -> None:
    """A few requests are far less than a share of the seconds."""
    assert _verdict(quiet(WINDOW), served_s=2.0 * WINDOW).kind == "idle"
    asked = _with(range(WINDOW - 120, WINDOW - 119), quiet(WINDOW), gpu=50)
    used = Verdict("busy", "a server runs on it, and used a GPU 119 s ago")
    assert _verdict(asked, served_s=2.0 * WINDOW) == used
    assert _verdict(asked).kind == "idle"
    assert (
        judge_idleness(activity(asked, served_s=2.0 * WINDOW), RULES, since_s=NOW_S - 200) == used
    )
    other = _with(range(100, 116), quiet(WINDOW), cpu=51)
    assert "CPU above" in _verdict(other, served_s=2.0 * WINDOW).reason, (
        "its CPU counts as any program's"
    )
    assert _verdict(quiet(WINDOW), served_s=2.0 * WINDOW, job_s=5.0).reason == "a job runs on it"
    assert _verdict(quiet(WINDOW)[:-61], served_s=2.0 * WINDOW).kind == "unknown"


@pytest.mark.rule(3)
def test_the_start_of_a_server_is_a_use_of_it() -> None:
    """It may load for long, or wait for its first request."""
    for served_s in (0.0, WINDOW - 1.0):
        assert _verdict(quiet(WINDOW), served_s=served_s).kind == "busy"
    assert _verdict(quiet(WINDOW), served_s=WINDOW + 0.0).kind == "idle"
    looked = activity(quiet(WINDOW), served_s=19.0, runs=True)
    again = Verdict("busy", "a server runs on it, and started 19 s ago")
    assert judge_idleness(looked, RULES, since_s=NOW_S - 20) == again
    assert judge_idleness(looked, RULES, since_s=NOW_S - 19).kind == "idle"
    used = _with(range(WINDOW - 18, WINDOW - 17), quiet(WINDOW), gpu=50)
    newest = "a server runs on it, and started 5 s ago"
    assert _verdict(used, served_s=5.0).reason == newest, "the window counts from the newest use"


@pytest.mark.rule(3)
@pytest.mark.parametrize("work", [{"cpu": 51}, {"network": 101}, {"disk": 1025}])
def test_without_a_gpu_any_second_of_work_is_a_use_of_a_server(work: dict[str, int]) -> None:
    assert _verdict(CPU_ONLY, served_s=2.0 * WINDOW).kind == "idle"
    asked = _with(range(100, 101), CPU_ONLY, **work)
    used = _verdict(asked, served_s=2.0 * WINDOW)
    assert used == Verdict("busy", "a server runs on it, and something worked 3 min ago")
    assert _verdict(asked).kind == "idle"


@pytest.mark.rule(3)
@pytest.mark.parametrize("unread", [{"cpu": UNKNOWN}, {"gpu_state": GPUS_UNREADABLE, "gpu": -1}])
def test_a_server_may_be_used_in_a_second_that_cannot_be_read(unread: dict[str, int]) -> None:
    samples = _with(range(100, 101), quiet(WINDOW), **unread)
    assert _verdict(samples, served_s=2.0 * WINDOW).kind == "unknown"
    assert _verdict(samples).kind == "idle"


def test_work_that_goes_on_now_is_busy_however_quiet_it_was_before() -> None:
    assert _verdict(_with(range(WINDOW - 3, WINDOW), quiet(WINDOW), gpu=50)).kind == "busy"
    assert _verdict(_with(range(WINDOW - 2, WINDOW), quiet(WINDOW), gpu=50)).kind == "idle"


def test_a_hibernation_that_took_longer_than_the_window_is_not_judged() -> None:
    """Who came and went before the window is not seen."""
    verdict = judge_idleness(activity(quiet(WINDOW)), RULES, since_s=NOW_S - WINDOW - 1)
    assert (verdict.kind, "storing took" in verdict.reason) == ("unknown", True)
    late = _with(range(WINDOW - 60, WINDOW - 54), quiet(WINDOW), gpu=100)
    assert judge_idleness(activity(late), RULES, since_s=NOW_S - WINDOW).kind == "busy"


@pytest.mark.rule(3)
@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([], "no sampler has written anything"),
        ([sample(int(NOW_S) - 61)], "the sampler is dead"),
        ([sample(int(NOW_S) + 60)], "the sampler is dead"),
        (quiet(WINDOW, boot="a" * 32), "has started again"),
        (quiet(WINDOW, gpu_state=GPU_LOST), "a GPU is lost"),
        (_with(range(50), quiet(WINDOW), gpus=8), "7 of 8 GPUs are missing"),
        (quiet(WINDOW, gpu_state=GPUS_UNREADABLE, gpu=UNKNOWN), "its GPU activity cannot be read"),
        (quiet(WINDOW, cpu=UNKNOWN, disk=UNKNOWN), "its CPU and disk activity cannot be read"),
        (quiet(WINDOW, gpu_peak=5, cpu_peak=50), "nothing has run on it yet"),
        (quiet(WINDOW, flags=JUPYTER_SILENT), "upyter"),
        (quiet(WINDOW // 2), "were sampled"),
        (quiet(WINDOW)[:100] + quiet(WINDOW)[120:], "were sampled"),
        (quiet(WINDOW, boot="a" * 32)[:200] + quiet(WINDOW)[200:], "were sampled"),
    ],
)
def test_what_cannot_be_known_is_unknown(samples: list[Sample], words: str) -> None:
    verdict = _verdict(samples)
    assert (verdict.kind, words in verdict.reason) == ("unknown", True), verdict
    assert judge_idleness(activity(CPU_ONLY), RULES, gpus=1).reason == "1 of 1 GPUs are missing"


def test_the_time_since_a_first_verdict_is_judged_alone() -> None:
    since_s = NOW_S - 20
    own = _with(range(WINDOW - 20, WINDOW), quiet(WINDOW), flags=OWN_RUN, cpu=900, network=9999)
    asked = activity(own, runs=True)
    assert judge_idleness(asked, RULES, since_s=since_s).kind == "idle"
    for change in ({"gpu": 80}, {"ssh_s": 0}):
        used = activity(_with(range(WINDOW - 5, WINDOW), own, **change), runs=True)
        assert judge_idleness(used, RULES, since_s=since_s).kind == "busy"
    dead = activity(own[:-61], runs=True)
    assert judge_idleness(dead, RULES, since_s=since_s).kind == "unknown"
    assert (
        judge_idleness(activity(own[:-200] + own[-1:]), RULES, since_s=NOW_S - 200).kind
        == "unknown"
    )


_CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "gpu": st.integers(-1, 100),
        "gpu_state": st.sampled_from([GPUS_FINE, GPUS_UNREADABLE, GPU_LOST]),
        "gpus": st.integers(0, 8),
        "cpu": st.integers(-1, 200),
        "network": st.integers(-1, 300),
        "disk": st.integers(-1, 3000),
        "ssh_s": st.integers(-1, 400),
        "jupyter_s": st.integers(-1, 400),
        "flags": st.integers(0, 7),
        "boot": st.sampled_from(["a" * 32, "b" * 32]),
    },
)
_SPELLS = st.lists(st.tuples(st.integers(0, 299), st.integers(1, 40), _CHANGES), max_size=3)


def _machine(spells: list[tuple[int, int, dict[str, Any]]]) -> list[Sample]:
    samples = quiet(WINDOW)
    for begin, length, changes in spells:
        samples = _with(range(begin, begin + length), samples, **changes)
    return samples


@pytest.mark.rule(3)
@given(_SPELLS)
def test_idle_means_that_every_rule_was_kept(
    spells: list[tuple[int, int, dict[str, Any]]],
) -> None:
    samples = _machine(spells)
    if _verdict(samples).kind != "idle":
        return
    newest = samples[-1]
    same_boot = [second for second in samples if second.boot == newest.boot]
    kept = [
        second
        for second in same_boot
        if second.gpu <= RULES.gpu_percent
        and second.gpu_state == GPUS_FINE
        and 0 <= second.cpu <= 50
        and 0 <= second.network <= 100
        and 0 <= second.disk <= 1024
    ]
    assert len(kept) >= 0.95 * WINDOW
    assert newest.gpu_state == GPUS_FINE
    for second in same_boot:
        ago = newest.number - second.number
        assert not 0 <= second.ssh_s < WINDOW - ago
        assert not 0 <= second.jupyter_s < WINDOW - ago
        assert second.gpus <= newest.gpus


@pytest.mark.rule(3)
@given(_SPELLS, st.sets(st.integers(0, WINDOW - 1), max_size=60))
def test_less_knowledge_never_makes_a_machine_idle(
    spells: list[tuple[int, int, dict[str, Any]]], lost: set[int]
) -> None:
    """Samples of activity may be lost with the others, except those of people and of GPUs that are
    gone: without them the same figures are judged."""
    samples = _machine(spells)
    for second in samples:
        if second.ssh_s >= 0 or second.jupyter_s >= 0 or second.gpus != 1:
            return
        if second.flags or second.gpu_state == GPU_LOST:
            return
    left = [second for number, second in enumerate(samples) if number not in lost]
    if _verdict(samples).kind != "idle" and samples[-1] in left:
        assert _verdict(left).kind != "idle"


@given(_SPELLS, st.integers(16, WINDOW))
def test_a_busy_gpu_is_never_idle(
    spells: list[tuple[int, int, dict[str, Any]]], seconds: int
) -> None:
    samples = _with(range(WINDOW - seconds, WINDOW), _machine(spells), gpu=50)
    assert _verdict(samples).kind != "idle"


@pytest.mark.rule(13)
def test_the_seconds_of_its_own_saves_keep_no_machine_busy() -> None:
    """They are no quiet ones either, and a GPU works for its user then, too."""
    costs = {"cpu": 300, "network": 50_000, "disk": 50_000, "flags": OWN_SAVE}
    for samples in (quiet(WINDOW), CPU_ONLY):
        saves = _with(range(WINDOW - 4, WINDOW), _with(range(100, 106), samples, **costs), **costs)
        assert _verdict(saves).kind == "idle"
        assert _verdict(saves, served_s=float(WINDOW)).kind == "idle"
    longer = _verdict(_with(range(100, 140), quiet(WINDOW), **costs))
    assert (longer.kind, longer.reason) == ("unknown", "it saved itself for too long")
    works = _with(range(100, 140), quiet(WINDOW), **costs, gpu=50)
    assert _verdict(works).kind == "busy"


NEVER_USED = quiet(WINDOW, gpu_peak=0, cpu_peak=0)


def test_a_machine_that_nobody_has_used_sleeps_where_its_workspace_says_so_and_no_earlier() -> None:
    asked = msgspec.structs.replace(RULES, unused=True)
    assert _verdict(NEVER_USED).kind == "unknown"
    assert _verdict(NEVER_USED, asked).kind == "idle"
    assert _verdict(NEVER_USED[WINDOW // 2 :], asked).kind == "unknown"
    assert _verdict(quiet(WINDOW, ssh_s=0), asked).kind == "busy"
    assert _verdict(NEVER_USED, asked, job_s=1.0).kind == "busy"


@pytest.mark.parametrize(
    ("samples", "changes", "left_s"),
    [
        (quiet(WINDOW), {}, 0.0),
        (_with(range(100, 116), quiet(WINDOW), gpu=50), {}, 101.0),  # one second too many is work
        (_with(range(WINDOW - 20, WINDOW), quiet(WINDOW), gpu=50), {}, 285.0),
        (_with(range(250, 251), quiet(WINDOW), ssh_s=100), {}, 151.0),
        (quiet(WINDOW, jupyter_s=0), {}, 300.0),
        (quiet(WINDOW // 2), {}, 136.0),  # 0.95 of the window are to be sampled
        (quiet(WINDOW), {"served_s": 20.0}, 280.0),
        (_with(range(200, 201), quiet(WINDOW), gpu=50), {"served_s": 900.0}, 201.0),
        (quiet(WINDOW), {"job_s": 5.0}, None),
        (quiet(WINDOW), {"runs": True}, None),
        (NEVER_USED, {}, None),
        (quiet(WINDOW)[:-61], {}, None),
        ([], {}, None),
        (quiet(WINDOW, flags=JUPYTER_SILENT), {}, None),
        (quiet(WINDOW, flags=JUPYTER_SILENT, jupyter_s=0), {}, None),
    ],
)
def test_when_a_machine_will_be_idle_is_its_window_after_the_last_use(
    samples: list[Sample], changes: dict[str, Any], left_s: float | None
) -> None:
    assert forecast_idleness(activity(samples, **changes), RULES).idle_in_s == left_s


@given(_SPELLS)
def test_a_machine_that_nobody_uses_any_more_is_idle_when_it_was_said_to_be(
    spells: list[tuple[int, int, dict[str, Any]]],
) -> None:
    samples = _machine(spells)
    left_s = forecast_idleness(activity(samples), RULES).idle_in_s
    if not left_s or samples[-1].gpus != 1 or samples[-1].boot != sample(0).boot:
        return
    later = int(NOW_S + left_s) + 2  # the window's first second counts, too
    ssh_s, jupyter_s = samples[-1].ssh_s, samples[-1].jupyter_s
    for at in range(int(NOW_S) + 1, later + 1):
        since = at - int(NOW_S)
        samples.append(
            sample(
                at,
                ssh_s=ssh_s + since if ssh_s >= 0 else ssh_s,
                jupyter_s=jupyter_s + since if jupyter_s >= 0 else jupyter_s,
                flags=samples[WINDOW - 1].flags,
            )
        )
    then = judge_idleness(activity(samples, now_s=float(later)), RULES)
    if "GPUs are missing" not in then.reason:
        assert then.kind == "idle", then
