"""A stand-in kubelet: a node whose pods are machines that boot here, each with its own address.

It mounts the Secret of a pod, gives Services of type LoadBalancer the address of their pod, and
ends a pod as a kubelet does: SIGTERM to its first process, and SIGKILL when its time is over. A pod
whose image is given as a root runs in it (tests/markets/pods.py).
"""

from __future__ import annotations

import base64
import os
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from tests.markets.boot import BootedMachine, Machines
from tests.markets.kubernetes import first_process
from tests.markets.pods import Missing, boot_pod, image_of
from torpor.control.providers.kubernetes.client import KubernetesClient
from torpor.control.providers.kubernetes.jump import LABEL as JUMP
from torpor.control.providers.market_client import Refusal
from torpor.shared.errors import TorporError

LABEL: Final = {"torpor.dev/node": "oracle"}
_EVERY_S: Final = 0.1
_BEAT_S: Final = 5.0


class Kubelet:
    """As a context: the node is there, with ``gpus``, until it is left. ``images``: roots by the
    names of images."""

    def __init__(
        self,
        kubeconfig: str,
        namespace: str,
        machines: Machines,
        gpus: int = 8,
        images: Mapping[str, Path] = {},
    ) -> None:
        self._client = KubernetesClient(kubeconfig, namespace)
        self._machines = machines
        self._gpus = gpus
        self._images = images
        self._pods: dict[str, _Pod] = {}
        self._beaten = 0.0
        self._over = threading.Event()
        self.faults: list[str] = []
        self._thread = threading.Thread(target=self._run, name="kubelet")

    def __enter__(self) -> Kubelet:
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "oracle", "labels": LABEL}}
        self.ask("POST", "/api/v1/nodes", node)
        self._beat()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for pod in self._pods.values():
            pod.body.end()
        self.ask("DELETE", "/api/v1/nodes/oracle")
        assert self.faults == []

    def ask(self, method: str, path: str, body: Any = None, **params: str) -> Any:
        """What the API server answers; None where there is no such object."""
        answer = self._client.market.ask(method, path, dict[str, Any], body=body, params=params)
        if isinstance(answer, Refusal):
            assert answer.status in (404, 409), f"{method} {path}: {answer}"
            return None
        return answer

    def body(self, name: str) -> BootedMachine:
        """What the running pod of a Job or a Deployment runs on."""
        (found,) = [pod.body for pod in self._pods.values() if pod.name == name]
        return found

    def _run(self) -> None:
        while not self._over.wait(_EVERY_S):
            try:
                self._beat()
                self._look()
            except TorporError as error:  # the API server is busy
                self.faults.append(str(error))

    def _beat(self) -> None:
        if time.monotonic() - self._beaten < _BEAT_S:
            return
        self._beaten = time.monotonic()
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        has = {"cpu": "64", "memory": "256Gi", "pods": "50", "ephemeral-storage": "500Gi"}
        has["nvidia.com/gpu"] = str(self._gpus)
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "fake"}
        ready |= {"lastHeartbeatTime": now, "lastTransitionTime": now}
        status = {"capacity": has, "allocatable": has, "conditions": [ready]}
        self.ask("PATCH", "/api/v1/nodes/oracle/status", {"status": status})

    def _look(self) -> None:
        found = self.ask("GET", "/api/v1/pods", fieldSelector="spec.nodeName=oracle")["items"]
        for row in found:
            uid = row["metadata"]["uid"]
            if uid in self._pods:
                self._go_on(self._pods[uid], row)
            elif "deletionTimestamp" in row["metadata"]:
                self._remove(row)
            elif row["status"]["phase"] == "Pending":
                self._begin(row)
        there = {row["metadata"]["uid"] for row in found}
        for uid in [uid for uid in self._pods if uid not in there]:
            self._pods.pop(uid).body.end()

    def _begin(self, row: dict[str, Any]) -> None:
        if image_of(row) in self._images:
            self._run_container(row)
            return
        space = f"/api/v1/namespaces/{row['metadata']['namespace']}"
        (mounted,) = [v["secret"] for v in row["spec"]["volumes"] if "secret" in v]
        secret = self.ask("GET", f"{space}/secrets/{mounted['secretName']}")
        if secret is None:
            return  # as a kubelet waits for it
        data = {key: base64.b64decode(text).decode() for key, text in secret["data"].items()}
        labels = row["metadata"]["labels"]
        name = labels.get("batch.kubernetes.io/job-name") or labels[JUMP]
        pod = _Pod(self._machines.boot(first_process(row["spec"], data)), name)
        self._pods[row["metadata"]["uid"]] = pod
        self._say(row, pod, "Running")
        service = f"{space}/services/{name}"
        if self.ask("GET", service) is not None:
            balancer = {"loadBalancer": {"ingress": [{"ip": pod.body.address}]}}
            self.ask("PATCH", f"{service}/status", {"status": balancer})

    def _run_container(self, row: dict[str, Any]) -> None:
        with suppress(Missing):  # as a kubelet waits for it
            body = boot_pod(self._machines, self._images[image_of(row)], row, self.ask)
            pod = _Pod(body, row["metadata"]["name"])
            self._pods[row["metadata"]["uid"]] = pod
            self._say(row, pod, "Running")

    def _go_on(self, pod: _Pod, row: dict[str, Any]) -> None:
        if "deletionTimestamp" not in row["metadata"]:
            if not pod.body.running and row["status"]["phase"] == "Running":
                wanted = {"Always"} if pod.body.status == 0 else {"Always", "OnFailure"}
                if row["spec"]["restartPolicy"] in wanted:
                    self._run_container(row)
                else:
                    self._say(row, pod, "Succeeded" if pod.body.status == 0 else "Failed")
            return
        if pod.until is None:
            pod.until = time.monotonic() + row["metadata"]["deletionGracePeriodSeconds"]
            if pod.body.running:
                os.kill(pod.body.first(), signal.SIGTERM)
        if not pod.body.running or time.monotonic() >= pod.until:
            pod.body.end()
            self._remove(row)

    def _say(self, row: dict[str, Any], pod: _Pod, phase: str) -> None:
        up = "True" if phase == "Running" else "False"
        status = {
            "phase": phase,
            "podIP": pod.body.address,
            "hostIP": pod.body.address,
            "conditions": [{"type": kind, "status": up} for kind in ("Ready", "ContainersReady")],
        }
        self.ask("PATCH", f"{_path(row)}/status", {"status": status})

    def _remove(self, row: dict[str, Any]) -> None:
        now = {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0}
        self.ask("DELETE", _path(row), {**now, "preconditions": {"uid": row["metadata"]["uid"]}})


class _Pod:
    def __init__(self, body: BootedMachine, name: str) -> None:
        self.body, self.name = body, name
        self.until: float | None = None  # SIGKILL comes then


def _path(row: dict[str, Any]) -> str:
    return f"/api/v1/namespaces/{row['metadata']['namespace']}/pods/{row['metadata']['name']}"
