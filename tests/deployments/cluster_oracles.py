"""The chart on a real API server with Kueue: part of ``make oracles``.

Rules that a schema cannot hold, and who may do what, are the server's to judge. The objects of
Prometheus Operator are left out: its definitions are not there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from deployments.installation import CHECKOUT
from tests.fixtures.helm import CHART, NAMESPACE, VALUES, Helm
from tests.fixtures.kube import Kube, running_kube
from tests.fixtures.waiting import until

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.usefixtures("needs_server"),
    pytest.mark.together("a cluster"),
]

CRDS = CHECKOUT.parent / "shared" / "specs" / "crds"
SPACES = (NAMESPACE, "gpus", "team-vision", "team-speech")
ACCOUNT = f"system:serviceaccount:{NAMESPACE}:torpor"
Object = dict[str, Any]


@pytest.fixture(scope="module")
def kube() -> Iterator[Kube]:
    """With the definitions of Kueue, Karpenter and the GPU operator."""
    with running_kube("--fair") as made:
        for folder in ("karpenter-aws", "gpu-operator"):
            made.kubectl("apply", "--server-side", "-f", str(CRDS / folder))
        made.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
        for space in SPACES:
            made.kubectl("create", "namespace", space)
        yield made


@pytest.mark.parametrize("file", ["minimal", "team", "full"])
def test_every_object_is_accepted(helm: Helm, kube: Kube, file: str) -> None:
    found = [one for one in helm.objects(file) if not _of_prometheus(one)]
    said = kube.kubectl(
        "apply", "--dry-run=server", "--validate=strict", "-f", "-", given=_text(found)
    )
    assert len(said.splitlines()) >= len(found), said


def test_the_server_refuses_what_is_wrong(helm: Helm, kube: Kube) -> None:
    (queue, *_) = [one for one in helm.objects("team") if one["kind"] == "ClusterQueue"]
    for change, words in (
        ({"cohort": "gpus"}, 'unknown field "spec.cohort"'),
        ({"preemption": {"reclaimWithinCohort": "Always"}}, "reclaimWithinCohort"),
    ):
        wrong = {**queue, "spec": {**queue["spec"], **change}}
        said = kube.kubectl(
            *("apply", "--dry-run=server", "--validate=strict", "-f", "-"),
            given=_text([wrong]),
            succeeds=False,
        )
        assert words in said


def test_kueue_takes_the_queues_of_teams_into_use(helm: Helm, kube: Kube) -> None:
    ours = [one for one in helm.objects("team") if "kueue" in one["apiVersion"]]
    kube.kubectl("apply", "-f", "-", given=_text(ours))
    for kind in ("clusterqueues", "localqueues"):
        until(lambda kind=kind: all(_active(kube, kind)), f"{kind} are active")  # type: ignore[misc]
        assert len([*_active(kube, kind)]) == 2
    kube.kubectl("delete", "-f", "-", given=_text(ours))


def test_the_account_may_do_what_machines_need_and_no_more(helm: Helm, kube: Kube) -> None:
    kinds = ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
    ours = [one for one in helm.objects("team") if one["kind"] in kinds]
    kube.kubectl("apply", "-f", "-", given=_text(ours))
    for words, space, allowed in (
        ("create jobs", "team-vision", True),
        ("delete pods", "team-speech", True),
        ("list nodes", "", True),
        ("create jobs", "gpus", False),
        ("get secrets", NAMESPACE, False),
        ("list secrets", "team-vision", False),
        ("create pods/exec", "team-vision", False),
        ("delete nodes", "", False),
    ):
        place = ["--namespace", space] if space else []
        said = kube.kubectl(
            *("auth", "can-i", *words.split(), "--as", ACCOUNT, *place), succeeds=allowed
        )
        assert said.splitlines()[-1].startswith("yes" if allowed else "no"), words
    kube.kubectl("delete", "-f", "-", given=_text(ours))


def test_the_workers_pods_keep_to_the_restricted_standard(helm: Helm, kube: Kube) -> None:
    found = helm.objects("team")
    account = [one for one in found if one["kind"] == "ServiceAccount"]
    kube.kubectl("apply", "-f", "-", given=_text(account))
    enforced = "pod-security.kubernetes.io/enforce=restricted"
    kube.kubectl("label", "namespace", NAMESPACE, enforced)
    pods = [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": one["metadata"]["name"], "namespace": NAMESPACE},
            "spec": one["spec"]["template"]["spec"],
        }
        for one in found
        if one["kind"] in ("Deployment", "Job")
    ]
    kube.kubectl("apply", "--dry-run=server", "-f", "-", given=_text(pods))
    pods[0]["spec"]["containers"][0]["securityContext"]["capabilities"] = {"add": ["NET_ADMIN"]}
    said = kube.kubectl(
        "apply", "--dry-run=server", "-f", "-", given=_text(pods[:1]), succeeds=False
    )
    assert "violates PodSecurity" in said
    kube.kubectl("delete", "-f", "-", given=_text(account))


NO_NODE = "workers: {nodeSelector: {there.is/none: here}}"
"""No pod starts: it would look for torpor's image on this host."""
SPACE = "team-robots"
TEAMS = f"teams: [{{name: robots, namespace: {SPACE}, gpus: 2, weight: 1, usd_month: %d}}]"
MACHINE = """
apiVersion: batch/v1
kind: Job
metadata: {name: machine, labels: {kueue.x-k8s.io/queue-name: robots}}
spec:
  suspend: true
  template:
    spec:
      restartPolicy: Never
      terminationGracePeriodSeconds: 1
      containers:
        - name: machine
          image: none
          command: [sleep, "600"]
          resources: {limits: {nvidia.com/gpu: 1}}
"""


def test_an_upgrade_registers_again_and_an_uninstall_ends_no_machine(
    helm: Helm, kube: Kube
) -> None:
    def helms(*words: str, values: str = "") -> None:
        done = helm.run(*words, values=values, kubeconfig=kube.folder / "kubeconfig")
        assert done.returncode == 0, done.stdout + done.stderr

    def jobs() -> set[str]:
        return {*kube.kubectl("get", "jobs", "-n", NAMESPACE, "-o", "name").split()}

    def machine_runs() -> bool:
        pods = json.loads(kube.kubectl("get", "pods", "-n", SPACE, "-o", "json"))["items"]
        return [pod["status"]["phase"] for pod in pods] == ["Running"]

    release = ("torpor", str(CHART), "--namespace", NAMESPACE)
    file = ("--values", str(VALUES / "minimal.yaml"))
    kube.kubectl("label", "nodes", "--all", "karpenter.sh/capacity-type=on-demand")
    helms("install", *release, *file, values=f"{NO_NODE}\n{TEAMS % 100}")
    kube.kubectl("create", "-n", SPACE, "-f", "-", given=MACHINE)
    until(machine_runs, "Kueue has started the machine")
    first = jobs()
    helms("upgrade", *release, *file, values=f"{NO_NODE}\n{TEAMS % 200}")
    second = jobs()
    assert len(first) == len(second) == 1
    assert first != second
    helms("uninstall", "torpor", "--namespace", NAMESPACE)
    until(lambda: not jobs(), "the workers' objects have gone")
    until(lambda: not any(_active(kube, "clusterqueues")), "Kueue has seen that the queue goes")
    assert machine_runs()
    kube.kubectl("delete", "job", "machine", "-n", SPACE)
    until(lambda: not [*_active(kube, "clusterqueues")], "the queue goes with its last machine")
    kube.kubectl("delete", "namespace", SPACE, "--wait=false")


FAIR = """
queues: {spot: {gpus: 8}}
teams:
  - {name: vision, namespace: team-vision, gpus: 0, weight: 3, usd_month: 100}
  - {name: speech, namespace: team-speech, gpus: 0, weight: 1, usd_month: 100}
"""


def test_a_team_gets_its_share_by_weight_of_what_another_has_filled(helm: Helm, kube: Kube) -> None:
    ours = [one for one in helm.objects("minimal", FAIR) if "kueue" in one["apiVersion"]]
    kube.kubectl("apply", "-f", "-", given=_text(ours))
    until(lambda: [*_active(kube, "localqueues")] == [True, True], "both queues are active")

    def submit(team: str) -> None:
        machines = [yaml.safe_load(MACHINE) for _ in range(8)]
        for number, machine in enumerate(machines):
            labels = {"kueue.x-k8s.io/queue-name": team}
            machine["metadata"] = {"name": f"machine-{number}", "labels": labels}
        kube.kubectl("create", "-n", f"team-{team}", "-f", "-", given=_text(machines))

    def shares() -> tuple[int, ...]:
        """The machines of each team that Kueue lets run."""
        found = [
            json.loads(kube.kubectl("get", "jobs", "-n", f"team-{team}", "-o", "json"))["items"]
            for team in ("vision", "speech")
        ]
        return tuple(sum(not one["spec"]["suspend"] for one in jobs) for jobs in found)

    submit("speech")
    until(lambda: shares() == (0, 8), "one team has it all")
    submit("vision")
    until(lambda: shares() == (6, 2), "the shares are 3 to 1")
    for space in ("team-vision", "team-speech"):
        kube.kubectl("delete", "jobs", "--all", "-n", space)
    kube.kubectl("delete", "-f", "-", given=_text(ours))


def _of_prometheus(found: Object) -> bool:
    return str(found["apiVersion"]).startswith("monitoring.coreos.com/")


def _text(found: list[Object]) -> str:
    return yaml.safe_dump_all(found)


def _active(kube: Kube, kind: str) -> Iterator[bool]:
    for one in json.loads(kube.kubectl("get", kind, "--all-namespaces", "-o", "json"))["items"]:
        conditions = one.get("status", {}).get("conditions", [])
        yield any((c["type"], c["status"]) == ("Active", "True") for c in conditions)
