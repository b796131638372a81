"""A real Kubernetes API server with Kueue, against our adapter: part of ``make oracles``.

The cluster is a test tool that is not ours to ship, so these tests are collected only by name,
where ../shared/tools has it. Its pods run on a stand-in kubelet (tests/markets/kubelet.py).
"""

from __future__ import annotations

import itertools
import json
import logging
import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import asyncssh
import httpx
import msgspec
import pytest
import yaml

from deployments.installation import CHECKOUT
from flows import create, job
from flows.procedures.job import attempt
from tasks.workspace import OpenWorkspace
from tests.fixtures.driver import hurried
from tests.fixtures.kube import running_kube
from tests.fixtures.machines import KeyPair
from tests.fixtures.plain_flows import hibernate_plainly, plain, run_plainly, wake_plainly
from tests.fixtures.trees import differences, kept, let_settle, plant_every_kind
from tests.fixtures.waiting import until
from tests.jobs import training
from tests.markets.boot import Machines as Booted
from tests.markets.kubelet import LABEL, Kubelet
from torpor.control.jobs import records
from torpor.control.providers.kubernetes.objects import Machines
from torpor.control.providers.kubernetes.provider import KubernetesProvider
from torpor.control.providers.offers import misfit
from torpor.control.providers.provider import Absent, Order
from torpor.control.rental.greeting import greeting_fault
from torpor.control.rental.order import host_key_of, order_for
from torpor.control.safety import never_handed_over
from torpor.shared.errors import CreateUncertain, InvalidInput, ProviderDenied
from torpor.shared.values import Endpoint, Label, MachineId, Want, WorkspaceName, workspace_name

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.usefixtures("needs_server"),
    pytest.mark.together("a cluster"),
]

KUEUE: Final = "/apis/kueue.x-k8s.io/v1beta2"
QUEUE: Final = "h100"
WANT: Final = Want(gpu="H100", disk_gib=20)
STEPS: Final = 150
EMPTY_S: Final = 60.0  # a failed test's machine is not waited for any longer
_OURS: Final = (
    ("batch/v1", "jobs"),
    ("v1", "pods"),
    ("v1", "secrets"),
    ("v1", "services"),
    ("apps/v1", "deployments"),
    ("kueue.x-k8s.io/v1beta2", "workloads"),
)
KINDS: Final = {
    "namespaces": "Namespace",
    "resourceflavors": "ResourceFlavor",
    "clusterqueues": "ClusterQueue",
    "localqueues": "LocalQueue",
    "workloadpriorityclasses": "WorkloadPriorityClass",
    "serviceaccounts": "ServiceAccount",
    "roles": "Role",
    "rolebindings": "RoleBinding",
}
_numbers: Final = itertools.count(1)


@pytest.fixture(scope="module")
def kubeconfig() -> Iterator[str]:
    """Of a cluster of its own, with Kueue."""
    with running_kube("--kueue") as kube:
        yield kube.kubeconfig


@dataclass
class Cluster:
    """One namespace with a queue, whose quota is one machine with one GPU."""

    kubeconfig: str
    namespace: str
    kubelet: Kubelet
    booted: Booted
    _made: list[str] = field(default_factory=list)

    def provider(self, kubeconfig: str = "", **changes: Any) -> KubernetesProvider:
        machines = Machines(
            price_usd_h=2.0,
            gpu="H100 SXM 80GB",
            cores=1.0,
            memory_gib=2.0,
            node_selector=LABEL,
            queue=QUEUE,
            grace_s=60,
        )
        return KubernetesProvider(
            kubeconfig or self.kubeconfig,
            self.namespace,
            msgspec.structs.replace(machines, **changes),
            ssh_port=self.booted.port,
        )

    def make(self, path: str, body: dict[str, Any]) -> Any:
        """An object of the whole cluster or of the namespace."""
        words = path.split("/")
        api = "v1" if words[1] == "api" else "/".join(words[2:4])
        kind = KINDS[words[-1]]
        made = self.kubelet.ask("POST", path, {"apiVersion": api, "kind": kind, **body})
        assert made is not None, (path, body)
        self._made.append(f"{path}/{made['metadata']['name']}")
        return made

    def set_up(self) -> None:
        self.make("/api/v1/namespaces", {"metadata": {"name": self.namespace}})
        name = self.namespace
        flavour = {"metadata": {"name": name}, "spec": {"nodeLabels": LABEL}}
        self.make(f"{KUEUE}/resourceflavors", flavour)
        quota = {"nvidia.com/gpu": "1", "cpu": "64", "memory": "64Gi", "ephemeral-storage": "1Ti"}
        resources = [{"name": resource, "nominalQuota": most} for resource, most in quota.items()]
        groups = {"coveredResources": [*quota], "flavors": [{"name": name, "resources": resources}]}
        spec = {
            "namespaceSelector": {},
            "resourceGroups": [groups],
            "preemption": {"withinClusterQueue": "LowerPriority"},
        }
        self.make(f"{KUEUE}/clusterqueues", {"metadata": {"name": name}, "spec": spec})
        queue = {"metadata": {"name": QUEUE}, "spec": {"clusterQueue": name}}
        self.make(f"{KUEUE}/namespaces/{name}/localqueues", queue)
        for level, value in (("low", 10), ("high", 1000)):
            priority = {"metadata": {"name": f"{name}-{level}"}, "value": value}
            self.make(f"{KUEUE}/workloadpriorityclasses", priority)

    def tear_down(self) -> None:
        for path in reversed(self._made):
            self.kubelet.ask("DELETE", path)

    def left(self) -> list[str]:
        """Whatever there is in the namespace of what a machine is made of."""
        found = []
        for api, resource in _OURS:
            root = "/api/v1" if api == "v1" else f"/apis/{api}"
            path = f"{root}/namespaces/{self.namespace}/{resource}"
            rows = self.kubelet.ask("GET", path)["items"]
            found += [f"{resource} {row['metadata']['name']}" for row in rows]
        return found

    def see_empty(self) -> None:
        """Nothing is left, once the garbage collection has had its time."""
        gives_up = time.monotonic() + EMPTY_S
        while (found := self.left()) and time.monotonic() < gives_up:
            time.sleep(0.2)
        assert found == []

    def jobs(self) -> list[str]:
        return [left for left in self.left() if left.startswith("jobs ")]

    def workspace(self, machine: str) -> Path:
        return self.kubelet.body(machine).root / "root/workspace"


@pytest.fixture
def cluster(kubeconfig: str, booted_machines: Booted) -> Iterator[Cluster]:
    namespace = f"gpus-{next(_numbers)}"
    with Kubelet(kubeconfig, namespace, booted_machines) as kubelet:
        made = Cluster(kubeconfig, namespace, kubelet, booted_machines)
        made.set_up()
        until(lambda: _active(made), "Kueue knows the queue")
        yield made
        made.see_empty()
        made.tear_down()


def test_hibernate_and_wake_byte_for_byte(
    cluster: Cluster, rented_workspace: OpenWorkspace
) -> None:
    opened = replace(rented_workspace, providers=(cluster.provider(),))
    made = run_plainly(opened, create).id
    plant_every_kind(cluster.workspace(made))
    (cluster.workspace(made) / "sparse/vast").unlink()  # of a TiB, which no disk on sale has
    truth = kept(cluster.workspace(made))
    let_settle()
    assert hibernate_plainly(opened).destroyed
    cluster.see_empty()
    woken = wake_plainly(opened).machine
    assert woken != made
    assert not differences(truth, kept(cluster.workspace(woken)))
    hibernate_plainly(opened)
    cluster.see_empty()
    assert opened.rentals.open() == []


def test_a_create_that_is_repeated_after_a_lost_answer_makes_one_job(
    cluster: Cluster, identity_key: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = cluster.provider()
    order = _order(provider, identity_key)
    sends = httpx.Client.send

    def loses(client: httpx.Client, request: httpx.Request, **options: Any) -> httpx.Response:
        answer = sends(client, request, **options)
        if request.method == "POST" and request.url.path.endswith("/jobs"):
            answer.close()
            raise httpx.ReadError("the answer was lost")
        return answer

    with monkeypatch.context() as lossy:
        lossy.setattr(httpx.Client, "send", loses)
        with pytest.raises(CreateUncertain):
            provider.create(order)
    assert len(cluster.jobs()) == 1
    first = provider.create(order)
    with ThreadPoolExecutor(4) as threads:
        again = [*threads.map(lambda _: provider.create(order).id, range(4))]
    assert {first.id, *again} == {first.id}
    assert cluster.jobs() == [f"jobs {first.id}"]
    assert [machine.label for machine in provider.list_own()] == [order.label]
    _end(provider, first.id, order)


def test_a_pod_whose_job_was_deleted_without_it_is_shown_and_ended(
    cluster: Cluster, identity_key: KeyPair
) -> None:
    provider = cluster.provider(queue="")
    order = _order(provider, identity_key)
    machine = provider.create(order)
    until(lambda: _runs(provider, machine.id), "it runs")
    # Nobody owns the Job but its pod: who deletes it so keeps the pod.
    path = f"/apis/batch/v1/namespaces/{cluster.namespace}/jobs/{machine.id}"
    options = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Orphan"}
    cluster.kubelet.ask("DELETE", path, options)
    until(lambda: not cluster.jobs(), "the Job is gone")
    (live,) = provider.list_own()
    assert (live.id, live.label, live.state) == (machine.id, order.label, "running")
    assert live.endpoint is not None
    assert provider.residue() == []
    _end(provider, machine.id, order)


def test_the_second_wake_waits_in_the_queue_until_the_first_has_hibernated(
    cluster: Cluster, rented_workspace: OpenWorkspace, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first = replace(rented_workspace, providers=(cluster.provider(),))
    second = _other(first, "second", cluster.provider())
    for opened in (first, second):
        _write_notes(cluster, opened)
        hibernate_plainly(opened)
    wake_plainly(first)
    with ThreadPoolExecutor(1) as thread:
        waking = thread.submit(wake_plainly, second)
        until(lambda: "is queued in h100: couldn't assign flavors" in caplog.text, "it says so")
        assert len(cluster.jobs()) == 2
        assert not waking.done()
        hibernate_plainly(first)
        woken = waking.result().machine
    assert (cluster.workspace(woken) / "notes.txt").read_text() == "second"
    hibernate_plainly(second)
    cluster.see_empty()


def test_a_higher_priority_takes_the_machine_of_a_job_which_saves_and_goes_on_later(
    cluster: Cluster,
    rented_workspace: OpenWorkspace,
    short_agent: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    low = cluster.provider(priority_class=f"{cluster.namespace}-low")
    high = cluster.provider(priority_class=f"{cluster.namespace}-high")
    working = replace(rented_workspace, providers=(low,))
    urgent = _other(working, "urgent", high)
    _write_notes(cluster, urgent)
    hibernate_plainly(urgent)
    made = run_plainly(working, create).id
    place = cluster.workspace(made)
    place.mkdir(exist_ok=True)
    (place / "training.py").write_text(Path(training.__file__).read_text())
    let_settle()
    command = ["python3", "training.py", str(STEPS), "0.1"]

    stand_by, stands_by = attempt.stand_by, threading.Event()

    def note(*given: Any) -> float:
        again_s = stand_by(*given)
        stands_by.set()
        return again_s

    monkeypatch.setattr(attempt, "stand_by", note)

    def run() -> Any:
        with plain(working):
            return job.fn(working.spec.name, command, save_minutes=1000)

    with hurried(), ThreadPoolExecutor(1) as thread:
        monkeypatch.setattr(records, "LOST_S", 900.0)  # no run counts as gone on a busy host
        running = thread.submit(run)
        until(lambda: _step(place) > 5 or running.done(), "the command runs")
        until(lambda: stands_by.is_set() or running.done(), "the machine can save")
        assert not running.done(), running.result()
        taken_at = _step(place)
        wake_plainly(urgent)
        until(lambda: f"jobs {made}" not in cluster.jobs(), "its Job goes with its pod")
        assert not running.done()
        hibernate_plainly(urgent)
        report = running.result()
    assert report.job.state == "succeeded"
    first, second = report.job.attempts
    assert (first.machine, first.end, first.saved) == (made, "machine lost", True)
    assert (second.end, second.status) == ("command ended", 0)
    woken = cluster.workspace(wake_plainly(working).machine)
    assert json.loads((woken / "state.json").read_text()) == training.uninterrupted(STEPS)
    log = next((woken / ".torpor-jobs").glob("*.log")).read_text()
    begun = [int(line.rsplit(" ", 1)[1]) for line in log.splitlines() if "goes on from" in line]
    assert begun[0] == 0
    assert begun[1] >= taken_at
    hibernate_plainly(working)
    cluster.see_empty()
    assert urgent.rentals.open() == []
    # The rental of the lost machine is closed by a later run, once the provider has settled.
    assert {rental.machine for rental in working.rentals.open()} <= {made}


def test_names_that_the_cluster_does_not_know(cluster: Cluster) -> None:
    with pytest.raises(InvalidInput, match=f"has no Kueue queue a100; it has {QUEUE}"):
        cluster.provider(queue="a100").check()
    with pytest.raises(InvalidInput, match="no WorkloadPriorityClass urgent"):
        cluster.provider(priority_class="urgent").check()
    with pytest.raises(InvalidInput, match="no PriorityClass urgent"):
        cluster.provider(queue="", priority_class="urgent").check()
    stopped = {"metadata": {"name": "stopped"}, "spec": {"clusterQueue": "nowhere"}}
    path = f"{KUEUE}/namespaces/{cluster.namespace}/localqueues"
    cluster.make(path, stopped)
    stopped_queue = cluster.provider(queue="stopped")
    until(lambda: "admits nothing now" in _denied(stopped_queue), "Kueue has looked at it")
    notes = cluster.provider(priority_class=f"{cluster.namespace}-low").check().notes
    assert notes == ["1 nodes fit the node selector, with 8 nvidia.com/gpu"]


def test_machines_share_a_jump_pod_which_goes_with_the_last(
    cluster: Cluster, identity_key: KeyPair
) -> None:
    # The tool's own node mounts no Secrets.
    cluster.kubelet.ask("PATCH", "/api/v1/nodes/node-1", {"spec": {"unschedulable": True}})
    provider = cluster.provider(queue="", address="jump pod")
    orders = [_order(provider, identity_key) for _ in range(2)]
    machines = [provider.create(order) for order in orders]
    until(lambda: all(_endpoint(provider, made.id) for made in machines), "they have addresses")
    assert len([left for left in cluster.left() if left.startswith("deployments")]) == 1
    key = asyncssh.import_private_key(identity_key.private)
    for made, order in zip(machines, orders, strict=True):
        host_key = host_key_of(key, order.label).public
        endpoint = _endpoint(provider, made.id)
        assert endpoint is not None and endpoint.jump is not None
        until(lambda at=endpoint, own=host_key: greeting_fault(at, own, key) is None, "it greets")
    _end(provider, machines[0].id, orders[0])
    endpoint = _endpoint(provider, machines[1].id)
    assert endpoint is not None
    assert greeting_fault(endpoint, host_key_of(key, orders[1].label).public, key) is None
    _end(provider, machines[1].id, orders[1])
    cluster.see_empty()


def test_the_role_of_the_guide_is_enough_and_each_right_of_it_is_needed(
    cluster: Cluster, identity_key: KeyPair
) -> None:
    rules = _guide_rules()
    account = {"metadata": {"name": "torpor"}}
    space = f"/api/v1/namespaces/{cluster.namespace}/serviceaccounts"
    cluster.make(space, account)
    asked = {"kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1", "spec": {}}
    token = cluster.kubelet.ask("POST", f"{space}/torpor/token", asked)["status"]["token"]
    login = _with_token(cluster.kubeconfig, token)
    provider = cluster.provider(login, address="jump pod")
    assert "may not create jobs.batch in namespace" in _denied(provider)
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{cluster.namespace}"
    cluster.make(f"{rbac}/roles", {"metadata": {"name": "torpor"}, "rules": rules})
    subject = {"kind": "ServiceAccount", "name": "torpor", "namespace": cluster.namespace}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "torpor"}
    bound = {"metadata": {"name": "torpor"}, "roleRef": role, "subjects": [subject]}
    cluster.make(f"{rbac}/rolebindings", bound)
    until(lambda: "may not" not in _denied(provider), "the rights are known")
    assert len(provider.check().notes) == 1  # it may not list nodes
    order = _order(provider, identity_key)
    machine = provider.create(order)
    until(lambda: _runs(provider, machine.id), "it runs")
    _end(provider, machine.id, order)


def _active(cluster: Cluster) -> bool:
    path = f"{KUEUE}/namespaces/{cluster.namespace}/localqueues/{QUEUE}"
    conditions = cluster.kubelet.ask("GET", path).get("status", {}).get("conditions", [])
    return any(state["type"] == "Active" and state["status"] == "True" for state in conditions)


def _other(opened: OpenWorkspace, name: str, provider: KubernetesProvider) -> OpenWorkspace:
    spec = msgspec.structs.replace(opened.spec, name=WorkspaceName(name))
    return replace(opened, spec=spec, providers=(provider,))


def _write_notes(cluster: Cluster, opened: OpenWorkspace) -> None:
    """On a machine of its own: the name of the workspace."""
    place = cluster.workspace(run_plainly(opened, create).id)
    place.mkdir(exist_ok=True)
    (place / "notes.txt").write_text(opened.spec.name)
    let_settle()


def _order(provider: KubernetesProvider, identity: KeyPair) -> Order:
    offer = next(offer for offer in provider.offers(WANT) if not misfit(offer, WANT))
    label = Label("oracle", workspace_name("oracle"), secrets.token_hex(8))
    return order_for(offer, label, asyncssh.import_private_key(identity.private), WANT)


def _runs(provider: KubernetesProvider, machine: MachineId) -> bool:
    found = provider.find(machine)
    return not isinstance(found, Absent) and found.state == "running"


def _endpoint(provider: KubernetesProvider, machine: MachineId) -> Endpoint | None:
    found = provider.find(machine)
    return None if isinstance(found, Absent) else found.endpoint


def _end(provider: KubernetesProvider, machine: MachineId, order: Order) -> None:
    """Destroy it as rentals do, until the proof."""
    live = next(listed for listed in provider.list_own() if listed.id == machine)
    warrant = never_handed_over(live, order.label)

    def gone() -> bool:
        provider.destroy(live, warrant)
        found = provider.find(machine)
        return isinstance(found, Absent) and bool(found.proof) and provider.residue() == []

    until(gone, f"{machine} is gone", every_s=0.2)


def _step(place: Path) -> int:
    try:
        return int(json.loads((place / "state.json").read_text())["n"])
    except FileNotFoundError:
        return 0


def _denied(provider: KubernetesProvider) -> str:
    """Why ``check`` is refused; empty where it is not."""
    try:
        provider.check()
    except ProviderDenied as error:
        return str(error)
    return ""


def _guide_rules() -> list[Any]:
    """Of the Role in the guide."""
    text = (CHECKOUT / "docs/guide/markets/kubernetes.md").read_text()
    role = next(yaml.safe_load_all(text.split("```yaml")[1].split("```")[0]))
    assert role["kind"] == "Role"
    rules: list[Any] = role["rules"]
    return rules


def _with_token(kubeconfig: str, token: str) -> str:
    config = yaml.safe_load(kubeconfig)
    config["users"][0]["user"] = {"token": token}
    return yaml.safe_dump(config)
