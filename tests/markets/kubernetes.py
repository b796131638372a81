"""A fake Kubernetes API server: Jobs, pods, Secrets, Services, Deployments and nodes, as far as
torpor asks.

A pod starts once its Secret exists. What belongs to Jobs goes with the last of them, and a Job with
the pod that owns it, as the cluster's garbage collection sees to.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any, ClassVar, Final

from pydantic import SecretStr

from tests.markets.market import Body, Market, Rented, Ware
from tests.markets.policies import Need, kubernetes_rights
from tests.markets.server import Answer, FakeMarket, Request
from torpor.control.providers.kubernetes.jump import LABEL
from torpor.control.providers.kubernetes.objects import Machines
from torpor.control.providers.kubernetes.provider import KubernetesProvider

NAMESPACE: Final = "gpus"
_SPACE: Final = f"/namespaces/{NAMESPACE}"
_KUEUE: Final = "kueue.x-k8s.io"
_RENTAL: Final = "torpor-rental"
_JOB_NAME: Final = "batch.kubernetes.io/job-name"
_PATH: Final = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/v\w+(?:/namespaces/(?P<space>[^/]+))?"
    r"(?:/(?P<resource>\w+)(?:/(?P<name>[^/]+))?)?"
)
_FULL: Final = (
    "jobs.batch is forbidden: exceeded quota: gpus, requested: count/jobs.batch=1, used: 1, "
    "limited: 1"
)


_LISTEN: Final = """
sed -n 's/^Port //p; s/^ListenAddress //p' /etc/ssh/sshd_config | {{ read -r port; read -r address
echo "ListenAddress $address:$port" >>{mount}/config; }}
chown -R 0:{user} {mount}
chmod -R u=rX,g=rX,o= {mount}"""
"""The address of a fake machine's own, as ``image.sh`` has written it."""
_AS_USER: Final = (
    *("setpriv", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"),
)


def kubernetes_wares() -> list[Ware]:
    return [Ware("H100 SXM", 1, 80, 2.30, "cluster")]


def kubeconfig(url: str, token: str) -> str:
    """Of a cluster without certificates."""
    return "\n".join([
        "apiVersion: v1",
        "kind: Config",
        f"clusters: [{{name: fake, cluster: {{server: '{url}'}}}}]",
        f"users: [{{name: me, user: {{token: '{token}'}}}}]",
        "contexts: [{name: fake, context: {cluster: fake, user: me}}]",
        "current-context: fake",
    ])  # fmt: skip


def stored_secret(secret: dict[str, Any]) -> dict[str, Any]:
    """What an API server makes of it: ``stringData`` is never in an answer."""
    told = {name: base64.b64encode(text.encode()).decode() for name, text in
            secret.get("stringData", {}).items()}  # fmt: skip
    kept = {name: value for name, value in secret.items() if name != "stringData"}
    return {**kept, "data": {**secret.get("data", {}), **told}}


def secret_text(secret: dict[str, Any]) -> dict[str, str]:
    """The text of its keys."""
    return {name: base64.b64decode(text).decode() for name, text in secret["data"].items()}


def first_process(pod: dict[str, Any], secret: dict[str, str]) -> list[str]:
    """The command of a pod's container, with its environment and as its user, and with the Secret's
    keys where it expects its volume."""
    ((name, volume),) = [(v["name"], v["secret"]) for v in pod["volumes"] if "secret" in v]
    files = volume.get("items") or [{"key": key, "path": key} for key in secret]
    container = pod["containers"][0]
    mounts = [m for m in container["volumeMounts"] if m["name"] == name]
    (mount,) = [m["mountPath"] for m in mounts if "subPath" not in m]
    prepare = f"umask 077; mkdir -p {mount}"
    for number, file in enumerate(files, 1):
        prepare += f'; printf %s "${number}" >{mount}/{file["path"]}'
    for alone in [m for m in mounts if "subPath" in m]:
        prepare += f"; cat {mount}/{alone['subPath']} >{alone['mountPath']}"
    user = pod.get("securityContext", {}).get("runAsUser")
    if user is not None:  # its sshd has a configuration of its own
        prepare += _LISTEN.format(mount=mount, user=user)
    keys = {v["name"]: v["valueFrom"]["secretKeyRef"]["key"] for v in container.get("env", [])}
    given = [f"{name}={secret[key]}" for name, key in keys.items()]
    command = [*container["command"], *container.get("args", [])]
    if user is not None:
        command = [*_AS_USER, f"--reuid={user}", f"--regid={user}", *command]
    script = f'{prepare}; shift {len(files)}; exec env "$@"'
    contents = (secret[file["key"]] for file in files)
    return ["/bin/sh", "-c", script, "sh", *contents, *given, *command]


class FakeKubernetes(FakeMarket):
    """``forbidden``: (verb, resource) that the user may not. ``objects``: what Jobs own.
    ``orphans``: Jobs that were deleted without their pods. ``queues``: the condition Active of
    each; ``quota``: how many Jobs of queues may run. ``waiting``: why containers do not start.
    ``unschedulable``: what the scheduler says of new pods; ``nominated``: the node on which it
    takes others for them; ``said``: the reasons of events about them, oldest first. ``balances``:
    whether Services get an address; ``lingers``: whether a Service is shown after its end, as while
    a cloud deletes its load balancer. ``jumps``: what the pods of Deployments run on."""

    waiting: dict[str, str] | None = None
    unschedulable: str = ""
    nominated: str = ""
    said: tuple[str, ...] = ()
    balances: bool = True
    kueue_versions: tuple[str, ...] = ("v1beta1", "v1beta2")
    claims: frozenset[str] = frozenset()  # PersistentVolumeClaims of the namespace
    pull_secrets: list[str] = []  # noqa: RUF012 - that all images ask for
    repeats: bool = False  # a refusal quotes the request
    runtime_classes: frozenset[str] = frozenset()
    wares = staticmethod(kubernetes_wares)
    rights = staticmethod(kubernetes_rights)
    given_port = True
    routes: ClassVar = {
        r"POST /selfsubjectaccessreviews": ("account", "_review"),
        r"GET /version": ("account", "_version"),
        r"GET /nodes": ("offers", "_nodes"),
        r"GET /(?:workload)?priorityclasses/(.+)": ("account", "_priority"),
        r"GET /runtimeclasses/(.+)": ("account", "_runtime_class"),
        r"GET /apis/kueue\.x-k8s\.io": ("account", "_kueue"),
        rf"GET {_SPACE}/events": ("account", "_events"),
        rf"GET {_SPACE}": ("account", "_namespace"),
        rf"POST {_SPACE}/jobs": ("create", "_create"),
        rf"GET {_SPACE}/jobs": ("list", "_list"),
        rf"DELETE {_SPACE}/jobs/(.+)": ("destroy", "_job"),
        rf"\w+ {_SPACE}/jobs/(.+)": ("find", "_job"),
        rf"GET {_SPACE}/pods": ("account", "_pods"),
        rf"DELETE {_SPACE}/pods/(.+)": ("account", "_end_pod"),
        rf"GET {_SPACE}/localqueues(?:/(.+))?": ("account", "_queue"),
        rf"GET {_SPACE}/workloads": ("account", "_workloads"),
        rf"POST {_SPACE}/(\w+)": ("account", "_make"),
        rf"\w+ {_SPACE}/(\w+)(?:/(.+))?": ("account", "_owned"),
    }
    words: ClassVar = {
        "no capacity": (403, "Forbidden", _FULL),
        "quota": (403, "Forbidden", _FULL),
        "no money": (403, "Forbidden", "jobs.batch is forbidden: the project is suspended"),
        "denied": (403, "Forbidden", "jobs.batch is forbidden: User cannot do that"),
        "wrong key": (401, "Unauthorized", "Unauthorized"),
        "no route": (404, "NotFound", "the server could not find the requested resource"),
        "error body": (500, "InternalError", "etcdserver: leader changed"),
        "failed": (500, "InternalError", "etcdserver: request timed out"),
    }

    @staticmethod
    def error(code: int, reason: str, message: str) -> Answer:
        status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        return Answer(code, {**status, "message": message, "reason": reason, "code": code})

    def __init__(self, market: Market | None = None) -> None:
        super().__init__(market)
        self.forbidden: set[tuple[str, str]] = set()
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.nodes = [_node("node-1", "8")]
        self.orphans: set[str] = set()
        self.minor = "27+"
        self.queues: dict[str, dict[str, str]] = {}
        self.priorities: set[str] = set()
        self.quota = 100
        self.conflicts = 0  # changes that come too late
        self.quota_conflicts = 0  # Jobs that come while somebody changes their quota
        self.collects = True  # whether what a Job owned goes with it
        self.lingers = False
        self.jumps: dict[str, Body] = {}

    def settings(self) -> dict[str, Any]:
        (ware,) = self.wares()
        config = SecretStr(kubeconfig(self.url, self.key))
        machines = {"gpu": ware.gpu, "price_usd_h": ware.usd_h}
        return {"kubeconfig": config, "namespace": NAMESPACE, **machines}

    def opened(self, key: str, **options: Any) -> KubernetesProvider:
        named = ("ssh_port", "timeout", "sleep", "clock")
        client = {name: options.pop(name) for name in named if name in options}
        (ware,) = self.wares()
        machines = Machines(price_usd_h=ware.usd_h, gpu=ware.gpu, **options)
        return KubernetesProvider(kubeconfig(self.url, key), NAMESPACE, machines, **client)

    def needs(self, request: Request) -> Iterator[Need]:
        """https://kubernetes.io/docs/reference/access-authn-authz/authorization/. Every user may
        ask for versions and for his own rights. ``check`` also looks for the namespace, which only
        a user with more rights than the page gives may see."""
        found = _PATH.fullmatch(request.path)
        if found is None or found["resource"] == "selfsubjectaccessreviews":
            return
        group, space, resource, name = found.group("group", "space", "resource", "name")
        verb = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}.get(
            request.method, "get" if name else "list"
        )
        if resource is None or (verb, resource) in self.forbidden:
            return
        of = f"{resource}.{group or ''}".rstrip(".")
        yield Need(f"{verb} {of}", space or "")
        owned = request.method in ("POST", "PATCH") and request.body["metadata"]
        if owned and "ownerReferences" in owned:
            # OpenShift lets only a user who may delete an object change its owners.
            yield Need(f"delete {of}", space or "")

    def asked(self, request: Request) -> str:
        path = re.sub(r"^/apis?(?:/[a-z0-9.-]+)?/v1(?:beta\d)?(?=/)", "", request.path)
        return f"{request.method} {path}"

    def handle(self, request: Request) -> Answer:
        kueue = re.match(rf"/apis/{_KUEUE}/(\w+)/", request.path)
        if kueue and kueue[1] not in self.kueue_versions:
            return Answer(404, "404 page not found", "text/plain")
        with self.market.lock:
            return super().handle(request)

    def _review(self, request: Request) -> Answer:
        asked = request.body["spec"]["resourceAttributes"]
        need = Need(
            f"{asked['verb']} {asked['resource']}.{asked['group']}".rstrip("."),
            asked.get("namespace", ""),
        )
        given = self.policy is None or self.policy.has(need)
        allowed = given and (asked["verb"], asked["resource"]) not in self.forbidden
        return Answer(201, {"status": {"allowed": allowed}})

    def _namespace(self, request: Request) -> Answer:
        return self.error(403, "Forbidden", f'namespaces "{NAMESPACE}" is forbidden')

    def _version(self, request: Request) -> Answer:
        return Answer(200, {"major": "1", "minor": self.minor})

    def _nodes(self, request: Request) -> Answer:
        if ("list", "nodes") in self.forbidden:
            return self.error(403, "Forbidden", "nodes is forbidden")
        return Answer(200, {"items": self.nodes})

    def _priority(self, request: Request, name: str) -> Answer:
        there = name in self.priorities
        return Answer(200, _object(name, name)) if there else self._missing("classes", name)

    def _runtime_class(self, request: Request, name: str) -> Answer:
        if ("get", "runtimeclasses") in self.forbidden:
            return self.error(403, "Forbidden", "runtimeclasses is forbidden")
        there = name in self.runtime_classes
        return Answer(200, _object(name, name)) if there else self._missing("runtimeclasses", name)

    def _kueue(self, request: Request) -> Answer:
        rows = [{"groupVersion": f"{_KUEUE}/{v}", "version": v} for v in self.kueue_versions]
        group = {"kind": "APIGroup", "apiVersion": "v1", "name": _KUEUE}
        return Answer(200, {**group, "versions": rows, "preferredVersion": rows[0]})

    def _events(self, request: Request) -> Answer:
        if ("list", "events") in self.forbidden:
            return self.error(403, "Forbidden", "events is forbidden")
        assert request.query["fieldSelector"].startswith("involvedObject.name=torpor-")
        now = self.market.clock.now_unix
        rows = [
            {**_object(f"e{n}", f"e{n}"), "reason": reason, "message": f"{reason} in its words",
             "lastTimestamp": _time(now + n)}
            for n, reason in enumerate(self.said)
        ]  # fmt: skip
        return Answer(200, {"items": rows[::-1]})

    # -- Jobs

    def _list(self, request: Request) -> Answer:
        self._admit()
        shown = [job for job in self.market.visible() if _RENTAL in _labels(job)]
        return Answer(200, {"items": [_job(job) for job in shown if job.id not in self.orphans]})

    def _job(self, request: Request, name: str) -> Answer:
        self._admit()
        machine = self._alive(name)
        if machine is None or name in self.orphans or request.has("not found"):
            return self._missing("jobs.batch", name)
        if request.method == "PATCH":
            wanted = request.body["metadata"]
            if self.conflicts or wanted["resourceVersion"] != _version(machine):
                self.conflicts = max(0, self.conflicts - 1)
                return self.error(409, "Conflict", "the object has been modified")
            machine.request["metadata"]["ownerReferences"] = wanted["ownerReferences"]
        elif request.method == "DELETE" and not request.has("lives"):
            if request.body["preconditions"]["uid"] != _uid(machine):
                return self.error(409, "Conflict", "the UID in the precondition is another")
            self.market.end(machine)
        return Answer(200, _job(machine))

    def _admit(self) -> None:
        """Start what is queued while there is quota, as Kueue does."""
        running = [job for job in self.market.alive() if not job.stopped]
        waiting = [job for job in self.market.alive() if job.stopped]
        for job in waiting[: self.quota - len(running)]:
            job.stopped = False
            job.request["spec"]["suspend"] = False

    def evict(self, machine: Rented) -> None:
        """What Kueue does to take a Job's quota, and what follows where its pod is its owner."""
        machine.stopped = True
        machine.request["spec"]["suspend"] = True
        if machine.request["metadata"].get("ownerReferences"):
            self.market.end(machine)

    def _queue(self, request: Request, name: str | None) -> Answer:
        rows = [
            {**_object(queue, queue), "status": {"conditions": [condition]}}
            for queue, condition in self.queues.items()
            if name in (None, queue)
        ]
        if name:
            return Answer(200, rows[0]) if rows else self._missing("localqueues", name)
        return Answer(200, {"items": rows})

    def _workloads(self, request: Request) -> Answer:
        uid = request.query["labelSelector"].partition("=")[2]
        waits = [job for job in self.market.alive() if job.stopped and _uid(job) == uid]
        words = {"type": "QuotaReserved", "status": "False", "message": "insufficient unused quota"}
        rows = [{**_object("workload", "w"), "status": {"conditions": [words]}} for _ in waits]
        return Answer(200, {"items": rows})

    def _create(self, request: Request) -> Answer:
        self._admit()
        body: dict[str, Any] = request.body
        name = body["metadata"]["name"]
        if refused := self.refusal(request):
            return refused
        if self.quota_conflicts:
            self.quota_conflicts -= 1
            words = 'Operation cannot be fulfilled on resourcequotas "gpus": the object has been'
            return self.error(409, "Conflict", f"{words} modified; please apply your changes")
        if self._alive(name) is not None:
            return self.error(409, "AlreadyExists", f'jobs.batch "{name}" already exists')
        suspended = bool(body["spec"].get("suspend"))
        machine = self.market.rent(
            self.market.wares[0], name, body, id_of=lambda number: name, stopped=suspended
        )
        if request.has("error that created"):
            return self.error(
                504, "Timeout", "request did not complete within the allotted timeout"
            )
        return Answer(201, _job(machine))

    def _missing(self, resource: str, name: str) -> Answer:
        return self.error(404, "NotFound", f'{resource} "{name}" not found')

    def _alive(self, name: str) -> Rented | None:
        return next((job for job in self.market.alive() if job.id == name), None)

    # -- what belongs to a Job

    def _make(self, request: Request, resource: str) -> Answer:
        self._collect()
        meta = request.body["metadata"]
        if self.repeats and resource == "secrets":
            return self.error(403, "Forbidden", f"denied: {request.body['stringData']}")
        if (resource, meta["name"]) in self.objects:
            told = f'{resource} "{meta["name"]}" already exists'
            return self.error(409, "AlreadyExists", told)
        made = {**request.body, "metadata": {**meta, "uid": f"{resource}-{meta['name']}"}}
        if resource == "services":
            ports = made["spec"]["ports"]
            if len({port.get("name") for port in ports}) < len(ports):
                return self.error(422, "Invalid", "spec.ports: a name is missing or taken")
            for number, port in enumerate(ports):
                port["nodePort"] = 30022 + number
            made["status"] = {}
        elif resource == "secrets":
            made = stored_secret(made)
        self.objects[resource, meta["name"]] = made
        machine = self._alive(meta["name"])
        if resource == "secrets" and machine is not None and self.market.boot is not None:
            pod = machine.request["spec"]["template"]["spec"]
            machine.body = self.market.boot(first_process(pod, secret_text(made)))
        if resource == "deployments" and self.market.boot is not None:
            pod, secret = made["spec"]["template"]["spec"], self.objects["secrets", meta["name"]]
            self.jumps[meta["name"]] = self.market.boot(first_process(pod, secret_text(secret)))
        self._collect()
        return Answer(201, made)

    def _owned(self, request: Request, resource: str, name: str | None) -> Answer:
        self._collect()
        if not name:
            key = request.query["labelSelector"]
            kept = [self._shown(*known) for known, made in self.objects.items()
                    if known[0] == resource and key in made["metadata"]["labels"]]  # fmt: skip
            return Answer(200, {"items": kept})
        if (resource, name) not in self.objects:
            return self._missing(resource, name)
        found = self._shown(resource, name)
        if request.method == "DELETE":
            assert request.body["preconditions"]["uid"] == found["metadata"]["uid"]
            del self.objects[resource, name]
        elif request.method == "PATCH":
            owners = {owner["uid"]: owner for owner in found["metadata"]["ownerReferences"]}
            owners |= {new["uid"]: new for new in request.body["metadata"]["ownerReferences"]}
            found["metadata"]["ownerReferences"] = [*owners.values()]
        return Answer(200, found)

    def _shown(self, resource: str, name: str) -> dict[str, Any]:
        found = self.objects[resource, name]
        behind = self.jumps.get(name) or self._alive(name)
        if resource != "services" or not self.balances:
            return found
        if behind is None and LABEL not in found["metadata"]["labels"]:
            return found
        address = behind.address if behind else "198.51.100.1"
        return {**found, "status": {"loadBalancer": {"ingress": [{"ip": address}]}}}

    def _collect(self) -> None:
        """Remove what no living Job owns."""
        if not self.collects:
            return
        uids = {_uid(machine) for machine in self.market.alive()}
        for (resource, name), made in [*self.objects.items()]:
            owners = made["metadata"]["ownerReferences"]
            made["metadata"]["ownerReferences"] = [o for o in owners if o["uid"] in uids] or owners
            if any(owner["uid"] in uids for owner in owners):
                continue
            if resource == "services" and self.lingers:
                made["metadata"]["deletionTimestamp"] = _time(self.market.clock.now_unix)
                continue
            del self.objects[resource, name]
            if resource == "deployments" and name in self.jumps:
                self.jumps.pop(name).end()

    def _end_pod(self, request: Request, name: str) -> Answer:
        machine = self._alive(name.removesuffix("-x"))
        if machine is None:
            return self._missing("pods", name)
        self.market.end(machine)
        return Answer(200, self._pod(machine))

    def _pods(self, request: Request) -> Answer:
        _, _, named = request.query["labelSelector"].partition("=")
        jobs = [job for job in self.market.alive() if not job.stopped]
        jobs = [job for job in jobs if job.id == named or (not named and _RENTAL in _labels(job))]
        shown = [job for job in jobs if not self.market.hidden(job)]
        return Answer(200, {"items": [self._pod(job) for job in shown]})

    def _pod(self, machine: Rented) -> dict[str, Any]:
        waits = ("secrets", machine.id) not in self.objects or self.market.starting(machine)
        pod = machine.request.get("spec", {}).get("template", {}).get("spec", {})
        claims = {
            volume["persistentVolumeClaim"]["claimName"]
            for volume in pod.get("volumes", [])
            if "persistentVolumeClaim" in volume
        }
        logins = [secret["name"] for secret in pod.get("imagePullSecrets", [])]
        waits = waits or bool(self.waiting or self.unschedulable)
        waits = waits or self.pull_secrets != logins or not claims <= self.claims
        reason = self.waiting or {"reason": "ContainerCreating"}
        waiting = [{"state": {"waiting": reason}}] if waits and not self.unschedulable else []
        placed = {"type": "PodScheduled", "status": "True"}
        if self.unschedulable:
            placed |= {"status": "False", "reason": "Unschedulable", "message": self.unschedulable}
        placed["lastTransitionTime"] = _time(machine.created_unix)
        labels = {**_labels(machine), _JOB_NAME: machine.id}
        meta = _object(f"{machine.id}-x", f"pod-{machine.number}", labels)["metadata"]
        told = machine.request.get("spec", {}).get("template", {}).get("metadata", {})
        owners = [] if machine.id in self.orphans else [{"uid": _uid(machine)}]
        meta |= {"annotations": told.get("annotations", {}), "ownerReferences": owners}
        return {
            "metadata": meta,
            "spec": {"nodeName": self.nodes[0]["metadata"]["name"] if self.nodes else ""},
            "status": {
                "phase": "Pending" if waits else "Running",
                "podIP": machine.address,
                "hostIP": "192.0.2.1",
                "containerStatuses": waiting,
                "conditions": [placed],
                "nominatedNodeName": self.nominated,
            },
        }


def _uid(machine: Rented) -> str:
    return f"job-{machine.number}"


def _version(machine: Rented) -> str:
    return str(len(machine.request["metadata"].get("ownerReferences", [])))


def _labels(machine: Rented) -> dict[str, str]:
    labels: dict[str, str] = machine.request.get("metadata", {}).get("labels", {})
    return labels


def _job(machine: Rented) -> dict[str, Any]:
    body = machine.request or _object(machine.id, "")
    meta = {**body["metadata"], "uid": _uid(machine), "resourceVersion": "0"}
    if machine.request:
        meta["resourceVersion"] = _version(machine)
    suspend = body.get("spec", {}).get("suspend", False)
    return {"metadata": meta, "spec": {"suspend": suspend}, "status": {}}


def _time(unix: float) -> str:
    return datetime.fromtimestamp(unix, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _node(name: str, gpus: str) -> dict[str, Any]:
    has = {"nvidia.com/gpu": gpus, "ephemeral-storage": "536870912000"}
    return {**_object(name, name), "status": {"allocatable": has}}


def _object(name: str, uid: str, labels: dict[str, str] | None = None) -> dict[str, Any]:
    return {"metadata": {"name": name, "uid": uid, "labels": labels or {}}}
