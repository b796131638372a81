"""The chart: what helm makes of it with three files of values, and which values it refuses.

Fields are held against the official client's models. ``make oracles`` asks the definitions of Kueue
and Karpenter (chart_oracles.py) and a real API server (cluster_oracles.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prefect
import pytest
import yaml
from kubernetes import client

from deployments.cluster import read_teams
from deployments.installation import CHECKOUT, Installation
from deployments.server import SETTINGS
from deployments.worker import POOLS
from tests.fixtures.containerfile import steps
from tests.fixtures.helm import CHART, FILES, NAMESPACE, VALUES, Helm
from torpor.control.providers.kubernetes.jump import LABEL
from torpor.control.providers.kubernetes.jump import RIGHTS as JUMP_RIGHTS
from torpor.control.providers.kubernetes.provider import QUEUE_RIGHTS, RIGHTS
from torpor.control.providers.labels import label_tags
from torpor.shared.values import Label, WorkspaceName

Object = dict[str, Any]
PAGE = CHECKOUT / "docs" / "guide" / "markets" / "kubernetes.md"
TEAM_PAGE = CHECKOUT / "docs" / "guide" / "kubernetes-team.md"


@pytest.mark.parametrize("file", FILES)
def test_helm_lint_finds_nothing(helm: Helm, file: str) -> None:
    done = helm.run("lint", str(CHART), "--strict", "--values", str(VALUES / f"{file}.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", FILES)
def test_every_field_is_one_that_kubernetes_has(helm: Helm, file: str) -> None:
    checked = [found for found in helm.objects(file) if _model(found)]
    assert len(checked) >= 8
    for found in checked:
        assert _unknown(found, _model(found), found["kind"]) == []


def test_unknown_fields_are_found() -> None:
    pod = {"spec": {"containers": [{"name": "x", "comand": ["y"]}], "nodeselector": {}}}
    assert _unknown(pod, "V1Pod", "Pod") == [
        "Pod.spec.containers[0].comand",
        "Pod.spec.nodeselector",
    ]


@pytest.mark.parametrize("file", FILES)
def test_each_object_is_made_once_and_names_its_namespace(helm: Helm, file: str) -> None:
    found = helm.objects(file)
    names = [
        (one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in found
    ]
    assert len(names) == len({*names})
    namespaces = {NAMESPACE, *_machine_namespaces(file)}
    assert {namespace for _, namespace, _ in names if namespace} <= namespaces
    assert all(one["metadata"]["labels"]["app.kubernetes.io/instance"] == "torpor" for one in found)


def test_the_output_is_the_same_each_time(helm: Helm) -> None:
    assert helm.template("full", "# once more") == helm.template("full")
    for template in (CHART / "templates").iterdir():
        assert not re.search(r"\b(lookup|rand\w+|gen\w+|now|uuidv4)\b", template.read_text())


@pytest.mark.parametrize("file", FILES)
def test_pods_have_no_rights_that_they_do_not_need(helm: Helm, file: str) -> None:
    pods = [*_pods(helm.objects(file))]
    assert len(pods) == len(POOLS) + 1
    for pod in pods:
        context = pod["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] > 0
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not pod.keys() & {"hostNetwork", "hostPID", "hostIPC"}
        assert all(volume.keys() & {"emptyDir", "configMap"} for volume in pod["volumes"])
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            }
            assert container["resources"]["limits"]["memory"]


def test_only_workers_that_make_pods_hold_a_token(helm: Helm) -> None:
    tokens = {
        file: [pod["automountServiceAccountToken"] for pod in _pods(helm.objects(file))]
        for file in FILES
    }
    assert not any(tokens["minimal"])
    assert sorted(tokens["team"]) == [False, True, True]


@pytest.mark.parametrize("file", FILES)
def test_each_pool_has_a_worker_and_may_lose_one_at_a_time(helm: Helm, file: str) -> None:
    found = helm.objects(file)
    workers = [one for one in found if one["kind"] == "Deployment"]
    arguments = [one["spec"]["template"]["spec"]["containers"][0]["args"] for one in workers]
    assert {words[words.index("--pool") + 1] for words in arguments} == {
        pool.name for pool in POOLS
    }
    budgets = [one["spec"] for one in found if one["kind"] == "PodDisruptionBudget"]
    selectors = [one["spec"]["selector"] for one in workers]
    assert [budget["selector"] for budget in budgets] == selectors
    assert all(budget["maxUnavailable"] == 1 for budget in budgets)


@pytest.mark.parametrize("file", FILES)
def test_no_secret_is_in_clear_text(helm: Helm, file: str) -> None:
    found = helm.objects(file)
    assert [one for one in found if one["kind"] == "Secret"] == []
    for pod in _pods(found):
        for container in pod["containers"]:
            for variable in container.get("env", []):
                named = "AUTH" in variable["name"]
                assert ("secretKeyRef" in variable.get("valueFrom", {})) == named


def test_the_role_is_that_of_the_guide_and_what_the_provider_asks_for(helm: Helm) -> None:
    guide = re.search(r"```yaml\n(apiVersion: rbac.*?)```", PAGE.read_text(), re.DOTALL)
    assert guide is not None
    role, cluster_role = yaml.safe_load_all(guide[1])
    found = helm.objects("full")
    roles = [one for one in found if one["kind"] == "Role"]
    assert {one["metadata"]["namespace"] for one in roles} == _machine_namespaces("full")
    assert all(one["rules"] == role["rules"] for one in roles)
    (ours,) = [one for one in found if one["kind"] == "ClusterRole"]
    assert ours["rules"] == cluster_role["rules"]
    given = {
        (verb, resource, group)
        for rule in role["rules"]
        for verb in rule["verbs"]
        for resource in rule["resources"]
        for group in rule["apiGroups"]
    }
    asked = {
        (right.verb, right.resource, right.group)
        for right in (*RIGHTS, *QUEUE_RIGHTS, *JUMP_RIGHTS)
    }
    assert asked <= given
    accounts = [one["subjects"] for one in found if one["kind"].endswith("RoleBinding")]
    assert all(subject == accounts[0] for subject in accounts)


def test_without_machines_there_is_no_role(helm: Helm) -> None:
    kinds = {one["kind"] for one in helm.objects("minimal")}
    assert kinds == {
        *("ConfigMap", "Deployment", "Job", "NetworkPolicy", "PodDisruptionBudget"),
        "ServiceAccount",
    }


@pytest.mark.rule("H19")
def test_machines_reach_no_metadata_service_and_jump_pods_nothing_but_machines(
    helm: Helm,
) -> None:
    more = "{networkPolicy: {machinesNotTo: [10.0.0.0/8], machinePorts: [8888]}}"
    found = [one for one in helm.objects("full", more) if one["kind"] == "NetworkPolicy"]
    places = {
        (one["metadata"]["namespace"], one["metadata"]["name"]): one["spec"]
        for one in found
        if one["metadata"]["name"] != "torpor"
    }
    spaces = {one["metadata"]["namespace"] for one in helm.objects("full") if one["kind"] == "Role"}
    assert places.keys() == {
        (at, f"torpor-{what}") for at in spaces for what in ("machines", "jump")
    }
    label = Label("me", WorkspaceName("demo"), "0" * 12)
    for (_, name), spec in places.items():
        (selected,) = spec["podSelector"]["matchExpressions"]
        assert selected["key"] in (label_tags(label) if "machines" in name else (LABEL,))
        assert spec["policyTypes"] == ["Ingress", "Egress"]
        to = [one for rule in spec["egress"] for one in rule["to"]]
        wide = [one["ipBlock"] for one in to if one.get("ipBlock", {}).get("cidr") == "0.0.0.0/0"]
        assert [block["except"][::2] for block in wide] == (
            [["169.254.169.254/32", "10.0.0.0/8"]] if "machines" in name else []
        )
        ports = [port["port"] for rule in spec["ingress"] for port in rule.get("ports", ())]
        assert ports == (["ssh", 8888] if "machines" in name else ["ssh"])


@pytest.mark.rule("H19")
def test_nobody_reaches_the_workers_but_prometheus(helm: Helm) -> None:
    policies = {
        file: next(
            one["spec"]
            for one in helm.objects(file)
            if one["kind"] == "NetworkPolicy" and one["metadata"]["name"] == "torpor"
        )
        for file in FILES
    }
    assert policies["minimal"]["ingress"] == policies["team"]["ingress"] == []
    (rule,) = policies["full"]["ingress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": "metrics"}]
    for policy in policies.values():
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        blocks = [to["ipBlock"] for to in policy["egress"][1]["to"] if "ipBlock" in to]
        assert blocks and all(block["except"] for block in blocks)
    assert _ports(policies["full"]) == [443, 22, 6443]
    url = "http://prefect-server.prefect2:4200/api"
    narrow = f"{{prefect: {{url: '{url}'}}, networkPolicy: {{ports: [22, 443]}}}}"
    (policy,) = [
        one
        for one in helm.objects("team", narrow)
        if one["kind"] == "NetworkPolicy" and one["metadata"]["name"] == "torpor"
    ]
    assert _ports(policy["spec"]) == [4200, 22, 443]


def test_rules_and_dashboard_are_those_that_are_tested(helm: Helm) -> None:
    found = {one["kind"]: one for one in helm.objects("full") if one["kind"] != "ConfigMap"}
    folder = CHECKOUT / "deployments" / "monitoring"
    assert found["PrometheusRule"]["spec"] == yaml.safe_load((folder / "alerts.yaml").read_text())
    (dashboard,) = [
        one["data"]["torpor.json"]
        for one in helm.objects("full")
        if one["metadata"]["name"] == "torpor-dashboard"
    ]
    assert json.loads(dashboard) == json.loads((folder / "dashboard.json").read_text())
    assert found["PrometheusRule"]["metadata"]["labels"]["release"] == "prometheus"


def test_the_metrics_that_watch_writes_are_served(helm: Helm) -> None:
    ((worker, metrics),) = [
        pod["containers"] for pod in _pods(helm.objects("full")) if len(pod["containers"]) > 1
    ]
    (home,) = [one["value"] for one in worker["env"] if one["name"] == "HOME"]
    written = Installation(Path(home) / ".local" / "state" / "torpor").metrics
    assert metrics["args"] == ["--directory", str(written.parent)]
    (monitor,) = [one["spec"] for one in helm.objects("full") if one["kind"] == "PodMonitor"]
    assert monitor["podMetricsEndpoints"][0]["path"] == f"/{written.name}"


def test_a_change_makes_another_job_of_registration(helm: Helm) -> None:
    def name(values: str = "") -> str:
        (job,) = [one for one in helm.objects("team", values) if one["kind"] == "Job"]
        return str(job["metadata"]["name"])

    names = [
        name(),
        name(f"image: {{digest: sha256:{'f' * 64}}}"),
        name("workers: {nodeSelector: {a: b}}"),
        name("teams: [{name: a, namespace: b, gpus: 1, weight: 1, usd_month: 1}]"),
        name("prefect: {login: {secret: other}}"),
    ]
    assert len({*names}) == len(names)
    assert name("workers: {jobs: 5}") == names[0]


def test_the_values_of_the_guide_are_accepted(helm: Helm) -> None:
    (values,) = re.findall(r"```yaml\n(.*?)```", TEAM_PAGE.read_text(), re.DOTALL)
    queues = [one for one in helm.objects("minimal", values) if one["kind"] == "LocalQueue"]
    assert {one["metadata"]["name"] for one in queues} == {"vision", "speech"}


REFUSED = [
    ("imagee: {}", "imagee"),
    ("workers: {job: 2}", "job"),
    ("workers: {resources: {limits: {memry: 1Gi}}}", "memry"),
    ("image: {tag: '', digest: ''}", "image"),
    ("image: {digest: sha256:12}", "digest"),
    ("prefect: {url: ''}", "url"),
    ("prefect: {url: 'https://me:hunter2@prefect/api'}", "url"),
    ("prefect: {password: hunter2}", "password"),
    ("prefect: {login: {value: hunter2}}", "value"),
    ("workers: {environment: {PREFECT_API_AUTH_STRING: 'me:hunter2'}}", "AUTH_STRING"),
    ("workers: {environment: {AWS_SECRET_ACCESS_KEY: hunter2}}", "AWS_SECRET_ACCESS_KEY"),
    ("workers: {environment: {hf_token: hunter2}}", "hf_token"),
    ("workers: {environment: {DbPass: hunter2}}", "DbPass"),
    ("workers: {environment: {HTTPS_PROXY: 'http://me:hunter2@proxy'}}", "HTTPS_PROXY"),
    ("workers: {secrets: [{name: a, value: hunter2}]}", "secrets"),
    ("teams: [{name: a, namespace: b, gpus: 1, weight: 1}]", "usd_month"),
    ("teams: [{name: a, namespace: b, gpu: 1, weight: 1, usd_month: 1}]", "gpu"),
    ("teams: [{name: Team A, namespace: b, gpus: 1, weight: 1, usd_month: 1}]", "name"),
    ("teams: [{name: a, namespace: b, gpus: 1, weight: 0, usd_month: 1}]", "weight"),
    ("nodes: {enabled: true}", "nodes"),
    ("nodes: {families: []}", "families"),
    ("nodes: {consolidateAfter: 10}", "consolidateAfter"),
    ("nodes: {consolidate: Balanced}", "consolidate"),  # of later versions alone
    ("nodes: {atOnce: 200%}", "atOnce"),
    ("queues: {order: LIFO}", "order"),
]


@pytest.mark.parametrize(("values", "word"), REFUSED, ids=[values for values, _ in REFUSED])
def test_typos_and_secrets_in_clear_text_are_refused(helm: Helm, values: str, word: str) -> None:
    said = helm.refusal("minimal", values)
    assert "values don't meet the specifications of the schema" in said
    assert word in said


def test_teams_that_would_be_one_are_refused(helm: Helm) -> None:
    team = "{name: %s, namespace: %s, gpus: 1, weight: 1, usd_month: 1}"
    for first, second in ((("a", "b"), ("a", "c")), (("a", "b"), ("c", "b"))):
        said = helm.refusal("minimal", f"teams: [{team % first}, {team % second}]")
        assert "two teams have one name or one namespace" in said
    said = helm.refusal("minimal", f"teams: [{team % ('a', NAMESPACE)}]")
    assert "which torpor's Role could read" in said


def test_teams_share_what_they_do_not_use(helm: Helm) -> None:
    found = helm.objects("team")
    queues = {
        one["metadata"]["name"]: one["spec"] for one in found if one["kind"] == "ClusterQueue"
    }
    assert {name: queue["fairSharing"]["weight"] for name, queue in queues.items()} == {
        "vision": "3",
        "speech": "1",
    }
    (cohort,) = [one for one in found if one["kind"] == "Cohort"]
    for queue in queues.values():
        assert queue["cohortName"] == cohort["metadata"]["name"]
        assert queue["preemption"]["reclaimWithinCohort"] == "Any"
        (group,) = queue["resourceGroups"]
        assert [flavour["name"] for flavour in group["flavors"]] == ["spot", "on-demand"]
    assert _quotas(queues["vision"]) == {"spot": "0", "on-demand": "6"}
    assert _quotas(cohort["spec"]) == {"spot": "8", "on-demand": "0"}
    hard = [one["spec"]["hard"] for one in found if one["kind"] == "ResourceQuota"]
    assert hard == [{"requests.nvidia.com/gpu": "16"}] * 2  # 6 and 2 of the teams, 8 spot
    priorities = {
        one["metadata"]["name"]: one["value"]
        for one in found
        if one["kind"] == "WorkloadPriorityClass"
    }
    assert sorted(priorities, key=lambda name: priorities[name]) == [
        "low",
        "normal",
        "high",
        "critical",
    ]


def test_labels_of_nodes_that_are_named_replace_karpenters(helm: Helm) -> None:
    named = helm.objects("team", "queues: {onDemand: {nodeLabels: {pool: gpus}}}")
    labels = {
        one["metadata"]["name"]: one["spec"]["nodeLabels"]
        for one in named
        if one["kind"] == "ResourceFlavor"
    }
    spot = {"karpenter.sh/capacity-type": "spot"}
    assert labels == {"spot": spot, "on-demand": {"pool": "gpus"}}


def test_slices_belong_to_all_teams(helm: Helm) -> None:
    found = [one for one in helm.objects("full") if one["kind"] in ("Cohort", "ClusterQueue")]
    slices = "nvidia.com/mig-1g.10gb"
    quotas = {one["metadata"]["name"]: _quotas(one["spec"], slices) for one in found}
    assert quotas == {
        "gpus": {"spot": "0", "on-demand": "14"},
        "vision": {"spot": "0", "on-demand": "0"},
        "speech": {"spot": "0", "on-demand": "0"},
    }


def test_an_uninstall_keeps_what_machines_end_with(helm: Helm) -> None:
    kept = {
        (one["kind"], one["metadata"]["name"])
        for one in helm.objects("full")
        if one["metadata"].get("annotations", {}).get("helm.sh/resource-policy") == "keep"
    }
    assert kept == {
        ("Namespace", "team-vision"),
        ("Namespace", "team-speech"),
        ("EC2NodeClass", "torpor"),
        ("NodePool", "torpor-spot"),
        ("NodePool", "torpor-on-demand"),
    }
    kinds = {one["kind"] for one in helm.objects("team", "createNamespaces: false")}
    assert "Namespace" not in kinds and "LocalQueue" in kinds


def test_the_registration_reads_the_teams(helm: Helm, tmp_path: Path) -> None:
    (listed,) = [one for one in helm.objects("team") if one["metadata"]["name"] == "torpor-teams"]
    file = tmp_path / "teams.yaml"
    file.write_text(listed["data"]["teams.yaml"])
    assert [(team.name, team.usd_month) for team in read_teams(file)] == [
        ("vision", 12000.0),
        ("speech", 4000.5),
    ]
    assert read_teams(VALUES / "team.yaml") == read_teams(file)


def test_nodes_come_for_the_queues_and_go_when_they_are_idle(helm: Helm) -> None:
    on = "nodes: {enabled: true, cluster: ml, role: r, image: al2023@v1}"
    spot, on_demand = _pools(helm, "minimal", on)
    for pool, capacity in ((spot, "spot"), (on_demand, "on-demand")):
        assert pool["limits"] == {"nvidia.com/gpu": "64"}
        assert pool["disruption"] == {
            "consolidationPolicy": "WhenEmptyOrUnderutilized",
            "consolidateAfter": "10m",
            "budgets": [{"nodes": "10%"}],
        }
        needs = {one["key"]: one["values"] for one in pool["template"]["spec"]["requirements"]}
        assert needs["karpenter.sh/capacity-type"] == [capacity]  # what its flavour asks for
    spot, on_demand = _pools(helm, "full")
    assert [pool["limits"]["nvidia.com/gpu"] for pool in (spot, on_demand)] == ["16", "8"]
    for pool in (spot, on_demand):
        assert pool["disruption"] == {
            "consolidationPolicy": "WhenEmpty",
            "consolidateAfter": "1h30m",
            "budgets": [{"nodes": "2"}],
        }
    spot, _ = _pools(helm, "minimal", f"{on[:-1]}, spotGpus: 0}}")
    assert spot["limits"] == {"nvidia.com/gpu": "0"}  # without it the pool of before would stay


def test_an_upgrade_that_reuses_older_values_gets_the_new_keys(helm: Helm) -> None:
    older = (
        "{consolidate: null, atOnce: null, enabled: true, cluster: ml, role: r, image: al2023@v1}"
    )
    for pool in _pools(helm, "team", f"{{nodes: {older}, queues: {{order: null}}}}"):
        assert pool["disruption"]["consolidationPolicy"] == "WhenEmptyOrUnderutilized"
        assert pool["disruption"]["budgets"] == [{"nodes": "10%"}]
    objects = helm.objects("team", "queues: {order: null}")
    queues = [one["spec"] for one in objects if one["kind"] == "ClusterQueue"]
    assert {queue["queueingStrategy"] for queue in queues} == {"BestEffortFIFO"}


@pytest.mark.parametrize("limit", ["spotGpus: 15", "onDemandGpus: 7"])
def test_queues_with_more_gpus_than_nodes_are_refused(helm: Helm, limit: str) -> None:
    said = helm.refusal("full", f"nodes: {{{limit}}}")
    assert f"nodes.{limit.replace(':', ' is')}: raise it" in said


def test_the_order_of_queues_is_a_setting(helm: Helm) -> None:
    for file, order in (("team", "BestEffortFIFO"), ("full", "StrictFIFO")):
        queues = [one for one in helm.objects(file) if one["kind"] == "ClusterQueue"]
        assert {queue["spec"]["queueingStrategy"] for queue in queues} == {order}


def test_prefects_own_chart_gets_the_settings_of_our_server_and_no_secret() -> None:
    text = (CHART.parent / "values" / "prefect-server.yaml").read_text()
    values = yaml.safe_load(text)
    given = {one["name"]: one.get("value") for one in values["server"]["env"]}
    assert given.items() >= SETTINGS.items()
    assert given["PREFECT_SERVER_ENCRYPTION_KEY"] is None  # from a Secret
    assert prefect.__version__ in values["global"]["prefect"]["image"]["prefectTag"]


def test_the_image_gets_what_is_there_and_runs_as_the_charts_pods_do(helm: Helm) -> None:
    taken = steps()
    for words in (step.words for step in taken if step.instruction == "COPY"):
        assert all((CHECKOUT / source).exists() for source in words.split()[:-1]), words
    (user,) = [step.words for step in taken if step.instruction == "USER"]
    (folder,) = [step.words for step in taken if step.instruction == "WORKDIR"]
    for pod in _pods(helm.objects("full")):
        context = pod["securityContext"]
        assert f"{context['runAsUser']}:{context['runAsGroup']}" == user
        assert all(container["workingDir"] == folder for container in pod["containers"])


def test_the_gpu_operators_values_name_what_they_configure() -> None:
    values = yaml.safe_load((CHART.parent / "values" / "gpu-operator.yaml").read_text())
    slices = yaml.safe_load(values["migManager"]["config"]["data"]["config.yaml"])["mig-configs"]
    assert values["migManager"]["config"]["default"] in slices
    for devices in slices.values():
        sizes = devices[0].get("mig-devices", {})
        assert sum(int(size[0]) * count for size, count in sizes.items()) <= 7  # slices of a GPU
    plugin = values["devicePlugin"]["config"]
    assert "sharing" not in yaml.safe_load(plugin["data"][plugin["default"]])
    for line in values["dcgmExporter"]["config"]["data"].splitlines():
        assert re.fullmatch(r"DCGM_FI_[A-Z_]+, (gauge|counter), [^,]+\.", line), line


def _pools(helm: Helm, file: str, values: str = "") -> list[Object]:
    """The pools of spot nodes and of those on demand."""
    found = [one for one in helm.objects(file, values) if one["kind"] == "NodePool"]
    found.sort(key=lambda one: str(one["metadata"]["name"]), reverse=True)
    return [one["spec"] for one in found]


def _ports(policy: Object) -> list[int]:
    """The ports that workers may reach, beside those of name servers."""
    return [port["port"] for port in policy["egress"][1]["ports"]]


def _machine_namespaces(file: str) -> set[str]:
    values = yaml.safe_load((VALUES / f"{file}.yaml").read_text())
    spaces = {team["namespace"] for team in values.get("teams", [])}
    return spaces | {*values.get("machines", {}).get("namespaces", [])}


def _quotas(spec: Object, of: str = "nvidia.com/gpu") -> dict[str, str]:
    (group,) = spec["resourceGroups"]
    return {
        flavour["name"]: resource["nominalQuota"]
        for flavour in group["flavors"]
        for resource in flavour["resources"]
        if resource["name"] == of
    }


def _pods(found: list[Object]) -> Iterator[Object]:
    for one in found:
        if one["kind"] in ("Deployment", "Job"):
            yield one["spec"]["template"]["spec"]


def _model(found: Object) -> str:
    """The client's model of an object of Kubernetes itself; empty for any other."""
    name = f"{found['apiVersion'].rpartition('/')[2].capitalize()}{found['kind']}"
    return name if hasattr(client, name) else ""


def _unknown(value: Any, model: str, at: str) -> list[str]:
    """The fields that the client's model does not have."""
    if model.startswith("List["):
        inner = model[5:-1]
        return [word for n, one in enumerate(value) for word in _unknown(one, inner, f"{at}[{n}]")]
    kind = getattr(client, model, None)
    if kind is None or not hasattr(kind, "openapi_types"):
        return []
    fields = {written: kind.openapi_types[name] for name, written in kind.attribute_map.items()}
    assert isinstance(value, dict), at
    return [
        word
        for name, field in value.items()
        for word in (
            _unknown(field, fields[name], f"{at}.{name}") if name in fields else [f"{at}.{name}"]
        )
    ]
