"""Whether a machine is idle: a pure function of what its sampler saw, and of the rules.

Unknown is not idle, and missing is not zero: a second without a sample counts as work.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

import msgspec

from torpor.shared.values import IdleRules
from torpor.shared.wire.activity import (
    GPU_LOST,
    GPUS_UNREADABLE,
    JUPYTER_SILENT,
    NOBODY,
    OWN_SAVE,
    PERSON,
    STALE_S,
    UNKNOWN,
    Activity,
    Sample,
)

OWN_WORK: Final = "torpor works on it"
"""The reason of a machine on which a run of torpor is under way."""
_AHEAD_S: Final = 5.0  # seconds by which a sample may be newer than the answer that brings it
_UNREADABLE: Final = "unreadable"
_SAVING: Final = "its own save"
_NO_WORK: Final = {_UNREADABLE, _SAVING}
_NOW: Final = 3
"""If this many newest samples all show work, the machine counts as working, however quiet it was
before."""

Kind = Literal["busy", "idle", "unknown"]


class Verdict(msgspec.Struct, frozen=True):
    """Whether a machine is idle. ``reason`` is a phrase for people."""

    kind: Kind
    reason: str


class Forecast(NamedTuple):
    """``idle_in_s``: in about how many seconds the machine will be idle if nobody uses it any more,
    0 where it is idle; None where nobody can say."""

    verdict: Verdict
    idle_in_s: float | None


class _Use(NamedTuple):
    """A use of the machine; ``what`` was used, as a phrase for people."""

    ago_s: float
    what: str


def judge_idleness(
    activity: Activity, rules: IdleRules, gpus: int = 0, *, since_s: float | None = None
) -> Verdict:
    """Idle only if every rule was kept during the whole window; Unknown where that cannot be said.
    A machine on which a job's command runs is busy, whatever the figures say. A machine with a
    server that torpor started counts as used if the server was started, or did one second of work,
    within the window: work on a GPU, or any work where there is no GPU. Seconds in which the
    machine saved its workspace by itself are left out, except for its GPUs and its people.

    ``gpus``: how many the machine was rented with. ``since_s``: of a machine that was idle then, on
    its clock, judge only the time since, in which torpor itself used CPU, network and disk. It must
    not be longer than the rules' window, and nothing is spared.
    """
    if activity.job_s is not None:
        return Verdict("busy", "a job runs on it")
    window_s = rules.minutes * 60.0
    if since_s is not None:
        passed_s = max(0.0, activity.now_s - since_s)
        if passed_s > window_s:
            return Verdict("unknown", f"storing took {_span(passed_s)}; the next time takes less")
        window_s = passed_s
        rules = msgspec.structs.replace(rules, cpu_percent=0, network_kib_s=0, disk_kib_s=0)
    newest = activity.samples[-1] if activity.samples else None
    fault = sampler_fault(activity)
    if fault or newest is None:
        return Verdict("unknown", fault)
    seen = _seen(activity, window_s)
    lost = _lost(newest, max((sample.gpus for sample in seen), default=0), gpus)
    if lost:
        return Verdict("unknown", lost)
    if activity.runs and since_s is None:
        return Verdict("busy", OWN_WORK)
    server = _server(activity, seen, window_s, rules, newest.gpus > 0)
    if server is not None:
        return Verdict("busy", f"a server runs on it, and {server.what} {_span(server.ago_s)} ago")
    person = _person(activity, seen, window_s, rules)
    if person is not None:
        return Verdict("busy", f"{person.what} was used {_span(person.ago_s)} ago")
    if activity.served_s is not None and any(
        _UNREADABLE in _causes(sample, rules) for sample in seen
    ):
        return Verdict("unknown", "a server runs on it, and a second of it cannot be read")
    return _by_seconds(newest, seen, window_s, rules, since_s is None)


def forecast_idleness(activity: Activity, rules: IdleRules, gpus: int = 0) -> Forecast:
    """The verdict, and when the machine will be idle. ``gpus``: as in judge_idleness."""
    verdict = judge_idleness(activity, rules, gpus)
    return Forecast(verdict, 0.0 if verdict.kind == "idle" else _idle_in_s(activity, rules))


def _idle_in_s(activity: Activity, rules: IdleRules) -> float | None:
    """Of a machine that is not idle: its window after the last use."""
    newest = activity.samples[-1] if activity.samples else None
    if newest is None or sampler_fault(activity) or activity.job_s is not None or activity.runs:
        return None
    if rules.people and newest.flags & JUPYTER_SILENT:
        return None
    window_s = rules.minutes * 60.0
    seen = _seen(activity, window_s)
    if not (seen and _worked(newest, rules)):
        return None
    server = _server(activity, seen, window_s, rules, newest.gpus > 0)
    uses = [use.ago_s for use in (server, _person(activity, seen, window_s, rules)) if use]
    return window_s - min(_last_work_s(activity, seen, rules), window_s, *uses) or None


def _seen(activity: Activity, window_s: float) -> list[Sample]:
    return [
        sample
        for sample in activity.samples
        if sample.boot == activity.boot and -_AHEAD_S <= activity.now_s - sample.at_s <= window_s
    ]


def _worked(newest: Sample, rules: IdleRules) -> bool:
    """Whether something has run on the machine, or nothing needs to have."""
    worked = newest.gpu_peak > rules.gpu_percent or newest.flags & PERSON
    return rules.unused or bool(worked) or 0 < rules.cpu_percent < newest.cpu_peak


def _last_work_s(activity: Activity, seen: list[Sample], rules: IdleRules) -> float:
    """How long ago the work ended that keeps the machine busy. Seconds with work, and those without
    a sample, are ignored as long as they are few enough."""
    spare_s = (1 - rules.share) * rules.minutes * 60.0
    after_s = activity.now_s
    for sample in reversed(seen):
        missing_s = max(0.0, after_s - sample.at_s - 1.0)
        if missing_s > spare_s:
            break
        spare_s -= missing_s + any(True for _ in _causes(sample, rules))
        after_s = sample.at_s
        if spare_s < 0:
            return activity.now_s - sample.at_s
    return activity.now_s - after_s + spare_s


def sampler_fault(activity: Activity) -> str:
    """Why nothing can be said about the present; empty if something can."""
    newest = activity.samples[-1] if activity.samples else None
    if newest is None:
        return "no sampler has written anything"
    if newest.boot != activity.boot:
        return "the machine has started again, and no sampler has written anything since"
    age_s = activity.now_s - newest.at_s
    if age_s > STALE_S or age_s < -_AHEAD_S:
        return f"the sampler is dead: its newest sample is {_span(age_s)} old"
    return ""


def _lost(newest: Sample, seen: int, rented: int) -> str:
    if newest.gpu_state == GPU_LOST:
        return "a GPU is lost: its driver no longer reaches it"
    there, expected = newest.gpus, max(seen, rented)
    if there < expected and newest.gpu_state != GPUS_UNREADABLE:
        return f"{expected - there} of {expected} GPUs are missing"
    return ""


def _server(
    activity: Activity, seen: list[Sample], window_s: float, rules: IdleRules, gpus: bool
) -> _Use | None:
    """The newest use of a server, if it was in the window."""
    if activity.served_s is None:
        return None
    uses = [_Use(activity.served_s, "started")] if activity.served_s < window_s else []
    for sample in reversed(seen):
        causes = set(_causes(sample, rules)) - _NO_WORK
        if sample.gpu > rules.gpu_percent or (causes and not gpus):
            what = "used a GPU" if gpus else "something worked"
            uses.append(_Use(activity.now_s - sample.at_s, what))
            break
    return min(uses, default=None)


def _person(
    activity: Activity, seen: list[Sample], window_s: float, rules: IdleRules
) -> _Use | None:
    """The newest use by SSH or by Jupyter, if it was in the window and the rules count people."""
    uses = [
        _Use(quiet_s + activity.now_s - sample.at_s, what)
        for sample in seen
        for quiet_s, what in ((sample.ssh_s, "an SSH session"), (sample.jupyter_s, "Jupyter"))
        if quiet_s != NOBODY
    ]
    newest = min(uses, default=None)
    return newest if rules.people and newest is not None and newest.ago_s < window_s else None


def _by_seconds(
    newest: Sample, seen: list[Sample], window_s: float, rules: IdleRules, whole: bool
) -> Verdict:
    """Count the seconds of each cause. ``seen`` is ordered by time. ``whole``: the window was not
    cut short, so that each second of it must be known, and the machine must have worked before."""
    spent: dict[str, float] = {}
    quiet_s = active_s = unread_s = 0.0
    before_s = -1.0
    for sample in seen:
        covered_s = max(0.0, min(1.0, sample.at_s - before_s)) if before_s >= 0 else 1.0
        before_s = sample.at_s
        causes = set(_causes(sample, rules))
        for cause in causes:
            spent[cause] = spent.get(cause, 0.0) + covered_s
        active_s += covered_s * bool(causes - _NO_WORK)
        unread_s += covered_s * (bool(causes) and causes <= _NO_WORK)
        quiet_s += covered_s * (not causes)
    spare_s = (1 - rules.share) * window_s
    newest_few = [bool(set(_causes(sample, rules)) - _NO_WORK) for sample in seen[-_NOW:]]
    works_now = bool(newest_few) and all(newest_few)
    if active_s > spare_s or works_now or (spent.keys() - _NO_WORK and not whole):
        named = sorted((c for c in spent if c not in _NO_WORK), key=lambda c: -spent[c])
        words = ", ".join(f"{c} in {_percent(spent[c], window_s)}" for c in named)
        return Verdict("busy", f"{words} of {_span(window_s)}")
    if unread_s > spare_s or _UNREADABLE in _causes(newest, rules):
        return Verdict("unknown", _unread(newest, rules))
    if quiet_s < rules.share * window_s - (0 if whole else STALE_S):
        reason = f"only {_span(quiet_s + active_s + unread_s)} of {_span(window_s)} were sampled"
        return Verdict("unknown", reason)
    if rules.people and newest.flags & JUPYTER_SILENT:
        return Verdict("unknown", "a Jupyter server runs and does not say what it does")
    if whole and not _worked(newest, rules):
        return Verdict("unknown", "nothing has run on it yet: it may wait for its user")
    return Verdict("idle", f"nothing ran for {_span(window_s)}")


def _causes(sample: Sample, rules: IdleRules) -> Iterator[str]:
    """What a second was used for. A rule of 0 is not applied."""
    if sample.gpu > rules.gpu_percent:
        yield f"a GPU above {rules.gpu_percent:g} %"
    if sample.gpu_state in (GPUS_UNREADABLE, GPU_LOST):
        yield _UNREADABLE
    saves = bool(sample.flags & OWN_SAVE)
    for value, most, what in (
        (sample.cpu, rules.cpu_percent, f"CPU above {rules.cpu_percent:g} % of a core"),
        (sample.network, rules.network_kib_s, f"network above {rules.network_kib_s:g} KiB/s"),
        (sample.disk, rules.disk_kib_s, f"disk above {rules.disk_kib_s:g} KiB/s"),
    ):
        if most and value > most:
            yield _SAVING if saves else what
        if most and value == UNKNOWN:
            yield _UNREADABLE


def _unread(newest: Sample, rules: IdleRules) -> str:
    figures = [
        what
        for value, most, what in (
            (newest.cpu, rules.cpu_percent, "CPU"),
            (newest.network, rules.network_kib_s, "network"),
            (newest.disk, rules.disk_kib_s, "disk"),
        )
        if most and value == UNKNOWN
    ]
    if newest.gpu_state == GPUS_UNREADABLE:
        figures.insert(0, "GPU")
    named = " and ".join(figures)
    return f"its {named} activity cannot be read" if named else "it saved itself for too long"


def _percent(part_s: float, whole_s: float) -> str:
    return f"{100 * part_s / whole_s:.0f} %" if whole_s else "100 %"


def _span(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if abs(seconds) >= 120 else f"{seconds:.0f} s"
