"""Flows in a cluster, as a platform team installs it: part of ``make oracles``. Root only.

A real API server with Kueue, PostgreSQL, Prefect's own chart of its server and ours. Pods run on a
stand-in kubelet (tests/markets/kubelet.py) in the root that the Containerfile's steps make, also
those of Prefect's image, which nobody here can pull; machines boot with an sshd of their own.
Prefect's chart comes from its repository, without Bitnami's library chart
(tests/fixtures/prefect_chart.py). There is no DNS and no network of pods: names are in /etc/hosts,
and no NetworkPolicy holds.
"""

from __future__ import annotations

import json
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlsplit

import httpx
import pytest
import yaml
from cryptography.fernet import Fernet
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from prefect_aws import MinIOCredentials
from pydantic import SecretStr

from blocks import KubernetesProvider, ObjectStore, SSHIdentity, Workspace
from deployments.installation import CHECKOUT
from tests.fixtures.containerfile import Image
from tests.fixtures.deployed import Deployed
from tests.fixtures.helm import CHART, NAMESPACE, Helm
from tests.fixtures.kube import Kube, running_kube
from tests.fixtures.machines import new_key_pair
from tests.fixtures.postgres import PASSWORD, USER, running_postgres
from tests.fixtures.prefect_chart import prefect_chart
from tests.fixtures.stores import Server
from tests.fixtures.trees import differences, kept, let_settle, plant_every_kind
from tests.fixtures.waiting import until
from tests.jobs import training
from tests.markets.boot import Machines
from tests.markets.kubelet import LABEL, Kubelet
from torpor.control.jobs.records import Job, Jobs, new_job_id
from torpor.control.ports import free_ports
from torpor.control.store.s3 import S3Store
from torpor.shared.values import workspace_name

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.usefixtures("needs_server"),
    pytest.mark.together("other roots"),
]

LOGIN: Final = "torpor:of-the-server"
TEAM: Final = "team-vision"
SSH: Final = 22
STEPS: Final = 240
BLOCK: Final = "main"
VALUES: Final = """
image: {{name: torpor, tag: 0.1.0}}
prefect: {{url: "{url}", login: {{secret: prefect-login}}}}
"""
TEAMS: Final = f"""
teams: [{{name: vision, namespace: {TEAM}, gpus: 1, weight: 1, usd_month: 1000}}]
queues: {{onDemand: {{nodeLabels: {json.dumps(LABEL)}}}}}
"""
CLAIM: Final = """
apiVersion: v1
kind: PersistentVolume
metadata: {name: prefect-server}
spec:
  capacity: {storage: 1Gi}
  accessModes: [ReadWriteOnce]
  storageClassName: none
  hostPath: {path: /nonexistent}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: prefect-server, namespace: prefect}
spec:
  accessModes: [ReadWriteOnce]
  storageClassName: none
  resources: {requests: {storage: 1Gi}}
"""


@dataclass
class Site:
    """The cluster, with a Prefect server and workspaces that are saved as blocks there."""

    kube: Kube
    helm: Helm
    kubelet: Kubelet
    deployed: Deployed
    store: S3Store

    def helms(self, *words: str, values: str = "") -> None:
        done = self.helm.run(*words, values=values, kubeconfig=self.kube.folder / "kubeconfig")
        assert done.returncode == 0, done.stdout + done.stderr

    def install(self, namespace: str = NAMESPACE, more: str = TEAMS) -> None:
        """Install the chart, or upgrade it; wait until its Job has told Prefect's server."""
        values = VALUES.format(url=f"http://prefect-server.prefect:{self.port}/api") + more
        words = ("upgrade", "--install", "torpor", str(CHART), "--namespace", namespace)
        self.helms(*words, values=values)
        until(lambda: self._told(namespace), "the Job has told the server", every_s=1)

    @property
    def port(self) -> int | None:
        return urlsplit(self.deployed.api_url).port

    def run(self, flow: str, **parameters: Any) -> str:
        """Run a deployment to its end; returns the run's id."""
        run = self.deployed.start(flow, parameters)
        ended = self.deployed.end(run)
        assert ended["state_type"] == "COMPLETED", ended["state"]["message"]
        return run

    def table(self, run: str) -> list[dict[str, str]]:
        (page,) = self.deployed.pages(run)
        rows: list[dict[str, str]] = json.loads(page["data"])
        return rows

    def pods(self) -> set[str]:
        """The uids of the workers' pods."""
        chosen = ("-l", "app.kubernetes.io/component in (worker, job-worker)")
        found = self._objects("pods", NAMESPACE, *chosen)
        return {one["metadata"]["uid"] for one in found}

    def create(self, workspace: str) -> Path:
        """Rent the first machine of a workspace, and put a program there."""
        self.run("create", workspace=workspace)
        (made,) = self.machines()
        place = self.workspace(made)
        (place / "training.py").write_text(Path(training.__file__).read_text())
        let_settle()
        return place

    def train(self, workspace: str) -> str:
        """Start a job of the lowest priority that trains there; returns the run's id."""
        command = ["python3", "training.py", str(STEPS), "0.5"]
        given = {"workspace": workspace, "command": command, "save_minutes": 1000}
        return self.deployed.start("job", {**given, "spot": "allowed"}, "low")

    def job(self, workspace: str, run: str) -> Job:
        """The job that a run has begun."""
        found = Jobs(self.store, workspace_name(workspace)).of(new_job_id(run))
        assert found is not None
        return found

    def watched(self, workspace: str, run: str) -> Job:
        """The same, after another run of `watch`, as its schedule makes them."""
        self.run("watch")
        return self.job(workspace, run)

    def stands_by(self, run: str) -> bool:
        """Whether the machine of a job's run has what it needs to save by itself."""
        wanted = {"name": {"like_": "stand by"}, "state": {"type": {"any_": ["COMPLETED"]}}}
        of = {"flow_runs": {"id": {"any_": [run]}}, "task_runs": wanted}
        return bool(self.deployed.ask("task_runs/filter", of))

    def machines(self) -> list[str]:
        return [one["metadata"]["name"] for one in self._objects("jobs", TEAM)]

    def running(self) -> list[str]:
        """The machines that have the team's GPUs."""
        found = self._objects("pods", TEAM)
        found = [pod["metadata"] for pod in found if pod["status"]["phase"] == "Running"]
        return [pod["labels"]["batch.kubernetes.io/job-name"] for pod in found]

    def workspace(self, machine: str) -> Path:
        return self.kubelet.body(machine).root / "root/workspace"

    def _told(self, namespace: str) -> bool:
        found = self._objects("jobs", namespace)
        return [one.get("status", {}).get("succeeded") for one in found] == [1]

    def _objects(self, kind: str, namespace: str, *words: str) -> list[Any]:
        said = self.kube.kubectl("get", kind, "-n", namespace, "-o", "json", *words)
        found: list[Any] = json.loads(said)["items"]
        return found


@pytest.fixture(scope="module")
def site(image: Image, helm: Helm, seaweed: Server) -> Iterator[Site]:
    folder = Path(tempfile.mkdtemp(prefix="torpor-market-"))
    (port,) = free_ports(1)
    machines = Machines(folder)
    machines.port = SSH  # as in any pod
    images = {"torpor": image.root, "prefecthq/prefect": image.root}
    hosts = "127.0.0.1 localhost kubernetes.default.svc prefect-server.prefect\n"
    (image.root / "etc/hosts").write_text(hosts)
    entry = image.root / "opt/prefect/entrypoint.sh"
    entry.parent.mkdir()
    entry.write_text('#!/bin/sh\nexec "$@"\n')
    entry.chmod(0o755)
    api_url = f"http://127.0.0.1:{port}/api"
    try:
        with (
            running_postgres() as postgres,
            running_kube("--fair") as kube,
            Kubelet(kube.kubeconfig, NAMESPACE, machines, images=images) as kubelet,
            pytest.MonkeyPatch.context() as patched,
            temporary_settings({PREFECT_API_URL: api_url, PREFECT_API_AUTH_STRING: LOGIN}),
        ):
            patched.setenv("PREFECT_API_AUTH_STRING", LOGIN)
            kube.kubectl("cordon", "node-1")  # the tool's own node mounts no volumes
            made = Site(kube, helm, kubelet, Deployed(api_url), seaweed.store())
            _make_secret(kube, NAMESPACE, "prefect-login", "auth-string", LOGIN)
            _make_secret(kube, "prefect", "prefect-login", "auth-string", LOGIN)
            url = f"{USER}:{quote(PASSWORD, safe='')}@127.0.0.1:{postgres.port}/postgres"
            _make_secret(kube, "prefect", "prefect-database", "url", f"postgresql+asyncpg://{url}")
            key = Fernet.generate_key().decode()
            _make_secret(kube, "prefect", "prefect-blocks", "encryption-key", key)
            kube.kubectl("create", "-f", "-", given=CLAIM)
            chart = prefect_chart(folder)
            file = CHART.parent / "values" / "prefect-server.yaml"
            words = ("prefect-server", str(chart), "--namespace", "prefect", "--values", str(file))
            made.helms("install", *words, values=f"service: {{port: {port}, targetPort: {port}}}")
            until(lambda: _ready(api_url), "Prefect's server is ready", every_s=0.5)
            made.install()
            _save_blocks(kube, seaweed, made.store)
            yield made
    finally:
        machines.end()
        for log in sorted(folder.glob("*.log")):  # shown where a test has failed
            print(f"{log.name}:\n{log.read_text(errors='replace')[-3000:]}")
        shutil.rmtree(folder)


def test_hibernate_and_wake_by_the_workers_of_the_chart(site: Site) -> None:
    place = site.create("demo")
    (made,) = site.machines()
    plant_every_kind(place)
    (place / "sparse/vast").unlink()  # of a TiB, which no disk on sale has
    truth = kept(place)
    let_settle()
    site.run("hibernate", workspace="demo")
    until(lambda: not site.machines(), "the machine is gone")
    site.run("wake", workspace="demo")
    (woken,) = site.machines()
    assert woken != made
    assert not differences(truth, kept(site.workspace(woken)))


def test_an_upgrade_that_replaces_the_workers_loses_no_job(site: Site) -> None:
    (machine,) = site.machines()
    place = site.workspace(machine)
    run = site.train("demo")
    until(lambda: _state(place)["n"] > 5, "the command runs", every_s=0.1)
    pods = site.pods()
    site.install(more=f"{TEAMS}workers: {{graceSeconds: 60}}")
    until(lambda: site.pods().isdisjoint(pods), "the workers' pods are new", every_s=1)
    assert site.deployed.end(run)["state_type"] == "CRASHED"  # its end is on record, with no watch
    until(lambda: site.watched("demo", run).ended, "another run has ended it", every_s=10)
    (attempt,) = site.job("demo", run).attempts
    assert (attempt.end, attempt.machine) == ("command ended", machine)
    until(lambda: not site.machines(), "the machine is gone", every_s=1)
    site.run("wake", workspace="demo")
    (woken,) = site.machines()
    assert _state(site.workspace(woken)) == training.uninterrupted(STEPS)


def test_a_critical_job_takes_the_machine_of_a_low_one_which_goes_on_after_it(
    site: Site,
) -> None:
    (idle,) = site.machines()
    (site.workspace(idle) / "state.json").unlink()
    let_settle()
    site.run("hibernate", workspace="demo")
    site.create("urgent")
    site.run("hibernate", workspace="urgent")
    low = site.train("demo")
    (machine,) = until(site.running, "the low job has its machine", every_s=1)
    place = site.workspace(machine)
    until(lambda: _state(place)["n"] > 5, "the command runs", every_s=0.1)
    until(lambda: site.stands_by(low), "the machine can save", every_s=1)
    taken_at = _state(place)["n"]
    urgent = site.deployed.start(
        "job", {"workspace": "urgent", "command": "sleep 20", "spot": "allowed"}, "critical"
    )
    most, running = 0, ("PENDING", "RUNNING", "SCHEDULED")
    while site.deployed.run(urgent)["state_type"] in running:
        most = max(most, len(site.running()))
        time.sleep(0.2)
    assert site.deployed.run(urgent)["state_type"] == "COMPLETED"
    assert most == 1  # the quota
    assert site.deployed.end(low)["state_type"] == "COMPLETED"
    first, second = site.job("demo", low).attempts
    assert (first.machine, first.end, first.saved) == (machine, "machine lost", True)
    assert (second.end, second.status) == ("command ended", 0)
    until(lambda: not site.machines(), "the machines are gone", every_s=1)
    site.run("wake", workspace="demo")
    (woken,) = site.machines()
    place = site.workspace(woken)
    assert _state(place) == training.uninterrupted(STEPS)
    log = (place / ".torpor-jobs" / f"{new_job_id(low)}.log").read_text()
    begun = [int(line.rsplit(" ", 1)[1]) for line in log.splitlines() if "goes on from" in line]
    assert begun[0] == 0
    assert begun[1] >= taken_at


def test_after_an_uninstall_another_worker_lists_the_machine(site: Site) -> None:
    (machine,) = site.machines()
    site.helms("uninstall", "torpor", "--namespace", NAMESPACE)
    until(lambda: not site.pods(), "the workers are gone", every_s=1)
    assert site.machines() == [machine]
    _make_secret(site.kube, "elsewhere", "prefect-login", "auth-string", LOGIN)
    site.install("elsewhere", f"machines: {{namespaces: [{TEAM}]}}")
    found = site.table(site.run("reconcile", workspace="demo"))
    assert [(row["machine"], row["what"]) for row in found] == [(machine, "in use")]
    site.run("hibernate", workspace="demo")
    until(lambda: not site.machines(), "the machine is gone", every_s=1)


def _state(place: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((place / "state.json").read_text())
    except FileNotFoundError:
        return training.start()
    return found


def _make_secret(kube: Kube, namespace: str, name: str, key: str, value: str) -> None:
    spaces = kube.kubectl("get", "namespaces", "-o", "name").split()
    if f"namespace/{namespace}" not in spaces:
        kube.kubectl("create", "namespace", namespace)
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": namespace},
        "stringData": {key: value},
    }
    kube.kubectl("create", "-f", "-", given=yaml.safe_dump(secret))


def _ready(api_url: str) -> bool:
    try:
        auth = httpx.BasicAuth(*LOGIN.split(":"))
        return httpx.get(f"{api_url}/ready", auth=auth).is_success
    except httpx.TransportError:
        return False


def _save_blocks(kube: Kube, server: Server, store: S3Store) -> None:
    _, _, _, bucket, prefix = store.address.split("/", 4)
    MinIOCredentials(
        minio_root_user=server.access_key, minio_root_password=SecretStr(server.secret_key)
    ).save(BLOCK)
    ObjectStore(
        flavour="seaweedfs",
        bucket=bucket,
        prefix=prefix,
        endpoint_url=server.endpoint_url,
        credentials=f"minio-credentials/{BLOCK}",
        encryption_key=SecretStr(secrets.token_hex(32)),
    ).save(BLOCK)
    SSHIdentity(private_key=SecretStr(new_key_pair().private)).save(BLOCK)
    kubeconfig = _guide_kubeconfig(kube)
    for workspace, priority in (("demo", "low"), ("urgent", "critical")):
        KubernetesProvider(
            kubeconfig=SecretStr(kubeconfig),
            namespace=TEAM,
            queue="vision",
            priority_class=priority,
            gpu="H100 SXM 80GB",
            price_usd_h=2.30,
            spot=True,
            address="pod IP",
        ).save(priority)
        Workspace(
            name=workspace,
            store=BLOCK,
            provider=f"kubernetes-provider/{priority}",
            identity=BLOCK,
            gpu="H100",
            spot="allowed",
            project="vision",
        ).save(workspace)


def _guide_kubeconfig(kube: Kube) -> str:
    """Of a pod, as the guide says. No Service leads to this API server: its own port is named."""
    guide = (CHECKOUT / "docs/guide/kubernetes-team.md").read_text()
    text = guide.split('IN_CLUSTER = """')[1].split('"""')[0]
    port = urlsplit(yaml.safe_load(kube.kubeconfig)["clusters"][0]["cluster"]["server"]).port
    name = "https://kubernetes.default.svc"
    assert name in text
    return text.replace(name, f"{name}:{port}")
