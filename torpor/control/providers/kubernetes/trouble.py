"""Why a pod will never run, where the cluster says so, so that nobody pays for waiting for it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Final, NamedTuple

import msgspec

from torpor.control.providers.kubernetes.objects import Condition, Pod

PULL_S: Final = 120.0
"""Seconds that a node may go on trying after it first failed to pull an image that no registry
refused. The first try of a large image may take many minutes; then the kubelet waits 10, 20 and 40
s. SkyPilot gives up at the first failure (provision/kubernetes/instance.py)."""
ROOM_S: Final = 120.0
"""Seconds that a cluster's autoscaler may be silent about a pod without room. Cluster Autoscaler
looks every 10 s, Karpenter too, and both write an event; a node itself takes minutes, and is waited
for."""
_NO_NAME: Final = frozenset({"InvalidImageName", "ErrImageNeverPull"})
_NO_IMAGE: Final = frozenset({"ErrImagePull", "ImagePullBackOff"})
_REFUSED: Final = re.compile(
    r"not ?found|manifest unknown|unauthorized|denied|forbidden|does not exist|no match(?:ing)?",
    re.IGNORECASE,
)
_COMES: Final = frozenset({"TriggeredScaleUp", "Nominated"})  # of Cluster Autoscaler, of Karpenter
_COMES_NOT: Final = "NotTriggerScaleUp"


class KubernetesEvent(msgspec.Struct, rename="camel", frozen=True):
    reason: str = ""
    message: str = ""
    last_timestamp: str | None = None
    event_time: str | None = None

    @property
    def at(self) -> str:
        """RFC 3339 in UTC sorts as text."""
        return self.last_timestamp or self.event_time or ""


class Events(msgspec.Struct, frozen=True):
    items: list[KubernetesEvent]


class PullFault(NamedTuple):
    words: str
    lasts: bool
    """Whether the pull will fail again when the node tries again."""


def pull_fault(pod: Pod) -> PullFault | None:
    """Why the pod's image has not come, where a node failed to pull it."""
    for container in pod.status.container_statuses:
        waiting = container.state.waiting
        if waiting is None or waiting.reason not in _NO_NAME | _NO_IMAGE:
            continue
        lasts = waiting.reason in _NO_NAME or _REFUSED.search(waiting.message) is not None
        words = f"its image does not come: {waiting.reason} {waiting.message}"
        return PullFault(words, lasts)
    return None


def lacks_room(pod: Pod, now_unix: float) -> bool:
    """Whether no node has room for the pod, for so long that an autoscaler would have spoken."""
    placing = _placing(pod)
    return (
        placing is not None
        and (placing.status, placing.reason) == ("False", "Unschedulable")
        and not pod.status.nominated_node_name  # it waits for others that are taken for it
        and _since_s(placing, now_unix) >= ROOM_S
    )


def room_fault(pod: Pod, events: Sequence[KubernetesEvent]) -> str:
    """Why no node will come for a pod that lacks room; empty where one comes."""
    said = sorted(
        (event for event in events if event.reason in _COMES or event.reason == _COMES_NOT),
        key=lambda event: event.at,
    )
    if said and said[-1].reason in _COMES:
        return ""
    why = said[-1].message if said else "no autoscaler brings a node"
    return f"no node has room: {pod.words()}; {why}"


def _placing(pod: Pod) -> Condition | None:
    return next((found for found in pod.status.conditions if found.type == "PodScheduled"), None)


def _since_s(condition: Condition | None, now_unix: float) -> float:
    """Seconds since the condition changed; 0 where the cluster does not say."""
    if condition is None or not condition.last_transition_time:
        return 0.0
    try:
        return now_unix - datetime.fromisoformat(condition.last_transition_time).timestamp()
    except ValueError:
        return 0.0
