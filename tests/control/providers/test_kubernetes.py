"""Kubernetes: the contract, and what a cluster does differently from a market."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import asyncssh
import msgspec
import pytest
import urllib3

from tests.control.providers.container_contract import ContainerContract
from tests.control.providers.market_contract import Shop, label
from tests.fixtures.machines import KeyPair
from tests.fixtures.waiting import until
from tests.markets.boot import BootedMachine
from tests.markets.kubernetes import NAMESPACE, kubeconfig, secret_text
from tests.markets.test_boot import run
from torpor.control.providers.container import Container, Volume
from torpor.control.providers.kubernetes import provider as service_module
from torpor.control.providers.kubernetes.client import Right, is_coreweave
from torpor.control.providers.kubernetes.jump import RIGHTS as JUMP_RIGHTS
from torpor.control.providers.kubernetes.objects import Machines
from torpor.control.providers.kubernetes.provider import (
    QUEUE_RIGHTS,
    RIGHTS,
    KubernetesProvider,
)
from torpor.control.providers.kubernetes.trouble import PULL_S, ROOM_S
from torpor.control.providers.provider import Absent, MountsVolumes, Provider
from torpor.control.rental.waiting import wait_until_reachable
from torpor.shared.errors import (
    CreateFailed,
    CreateUncertain,
    InvalidInput,
    ProviderDenied,
    ProviderUnavailable,
)
from torpor.shared.values import Want

MACHINES = Machines(price_usd_h=2.30, gpu="H100 SXM")


class TestKubernetes(ContainerContract):
    label_cells: ClassVar = {"labels"}
    id_cells: ClassVar = {"metadata", "name", "uid"}
    offers_by_row = False  # a node that cannot be read leaves the others
    row = "kubernetes"
    queues = True
    login = "registry-login"

    def with_an_odd_offer(self, body: Any) -> Any:
        body["items"] = [*body["items"], {"metadata": {"name": "odd", "labels": None}}]
        return body

    def ask_for_everything(self, shop: Shop) -> None:
        super().ask_for_everything(shop)
        clock, fake = shop.market.clock, shop.fake
        fake.queues = {"h100": {"type": "Active", "status": "True"}}
        fake.priorities = {"hi"}
        shop.connect(priority_class="hi").check()
        with contextlib.suppress(InvalidInput):
            shop.connect(queue="another", priority_class="hi").check()
        queue = shop.another(
            queue="h100", priority_class="hi", address="jump pod", clock=lambda: clock.now_unix
        )
        queue.plain.check()
        machine, other = queue.create(), queue.create(label=label())
        fake.unschedulable = "no node has room"
        clock.advance(ROOM_S)
        queue.find(machine)
        fake.quota = 1
        fake.evict(shop.market.rented[-1])
        queue.find(other)
        fake.unschedulable = ""
        fake.orphans, fake.collects = {machine.id}, False
        (orphan,) = [live for live in queue.plain.list_own() if live.id == machine.id]
        queue.destroy(orphan)
        for _ in range(2):
            queue.destroy(machine)

    def ask_for_login(self, shop: Shop) -> None:
        shop.fake.pull_secrets = [self.login]

    def open_ports(self, shop: Shop) -> set[int]:
        service = shop.fake.objects["services", shop.market.rented[-1].id]
        pod = shop.asked()["spec"]["template"]["spec"]
        inner = {port["containerPort"] for port in pod["containers"][0]["ports"]}
        assert inner == {port["port"] for port in service["spec"]["ports"]}
        return inner

    @pytest.fixture
    def want(self) -> Want:
        return Want(gpu="H100", disk_gib=20)

    def test_a_secret_that_was_not_made_leaves_the_attempt_uncertain(self, shop: Shop) -> None:
        shop.arm("denied", "account", count=100)
        with pytest.raises(CreateUncertain, match="not all that belongs to it"):
            shop.create()
        shop.fake.faults.clear()
        assert [live.label for live in shop.plain.list_own()] == [shop.order.label]
        assert shop.create().id == shop.market.alive()[0].id

    @pytest.mark.parametrize("kind", ["denied", "unavailable", "wrong shape"])
    def test_a_taken_name_that_nobody_can_look_at_is_no_promise_that_nothing_was_rented(
        self, shop: Shop, kind: Any
    ) -> None:
        shop.create()
        shop.arm(kind, "find", count=100)
        with pytest.raises(CreateUncertain, match="the Job's name is taken"):
            shop.create()

    def test_a_quota_that_changes_meanwhile_does_not_deny_the_market(self, shop: Shop) -> None:
        shop.fake.quota_conflicts = 1
        with pytest.raises(CreateFailed, match="has been modified"):
            shop.create()
        shop.create()

    @pytest.mark.parametrize(
        ("error", "told"),
        [
            (urllib3.exceptions.SSLError("bad record mac"), CreateUncertain),
            (urllib3.exceptions.ClosedPoolError(Any, "closed"), ProviderUnavailable),
        ],
    )
    def test_what_a_lost_connection_says_of_a_create(
        self, shop: Shop, monkeypatch: pytest.MonkeyPatch, error: Exception, told: type[Exception]
    ) -> None:
        """TLS may fail after the request was sent; without a connection nothing was."""

        sends = urllib3.PoolManager.request

        def fails(pool: urllib3.PoolManager, method: str, *told: Any, **more: Any) -> Any:
            if method == "POST":
                raise error
            return sends(pool, method, *told, **more)

        monkeypatch.setattr(urllib3.PoolManager, "request", fails)
        with pytest.raises(told):
            shop.create()

    def test_the_host_key_is_in_the_secret_alone(self, shop: Shop) -> None:
        shop.create()
        line = shop.order.host_key.splitlines()[1]
        assert line not in msgspec.json.encode(shop.asked()).decode()
        (secret,) = [made for key, made in shop.fake.objects.items() if key[0] == "secrets"]
        assert line in secret_text(secret)["start"]

    def test_the_variables_are_in_the_secret_alone_and_in_no_message(self, shop: Shop) -> None:
        token = "canary-value"
        other = shop.another(container=Container(env={"start": token}))
        other.create()
        (secret,) = [made for key, made in shop.fake.objects.items() if key[0] == "secrets"]
        assert secret_text(secret).keys() == {"start", "env.start"}
        assert token not in msgspec.json.encode(shop.asked()).decode()
        shop.fake.repeats = True
        with pytest.raises(CreateUncertain, match="denied") as raised:
            other.create(label=label())
        assert token not in "".join(traceback.format_exception(raised.value))

    def test_a_claim_is_mounted_and_left_alone(self, shop: Shop) -> None:
        shop.fake.claims = frozenset({"my-data"})
        volumes = (Volume("my-data", "/data"),)
        other = shop.another(container=Container(volumes=volumes))
        assert isinstance(other.plain, MountsVolumes)
        assert (other.plain.volumes, shop.plain.volumes) == (["/data"], [])
        machine = other.create()
        assert other.find(machine).state == "running"
        pod = shop.asked()["spec"]["template"]["spec"]
        of_name = {volume["name"]: volume for volume in pod["volumes"]}
        (mount,) = [m for m in pod["containers"][0]["volumeMounts"] if m["mountPath"] == "/data"]
        assert of_name[mount["name"]]["persistentVolumeClaim"]["claimName"] == "my-data"
        other.destroy(machine)
        assert not any("persistentvolumeclaims" in path for _, path in shop.fake.calls)

    def test_a_machine_outlives_its_sshd(
        self, shop: Shop, provider: Provider, identity_key: KeyPair
    ) -> None:
        """Who restarts or upgrades sshd keeps the work, the host key and what he changed."""
        provider.create(shop.order)
        body, says = shop.market.rented[0].body, _login(shop, identity_key)
        until(lambda: says("echo mine >>/root/.ssh/authorized_keys; echo done"), "it answers")
        assert says("sleep 5; echo done")  # the first process knows by then that sshd ran
        for _ in range(2):
            os.kill(_children(body)["sshd"], signal.SIGTERM)
            until(lambda: "sshd" not in _children(body), "sshd has ended")
            until(lambda: says("tail -n 1 /root/.ssh/authorized_keys") == "mine\n", "it is back")
        assert body.running

    def test_a_pod_that_is_taken_stays_until_its_own_save_has_ended(
        self, shop: Shop, provider: Provider, identity_key: KeyPair
    ) -> None:
        """Only its first process hears that; the autosave process makes the save."""
        provider.create(shop.order)
        body, says = shop.market.rented[0].body, _login(shop, identity_key)
        save = "while [ ! -e /root/stored ]; do sleep 0.1; done"
        own = f'trap "sh -c \\"{save}\\" torpor rescue" TERM; while :; do sleep 0.1; done'
        begins = f"setsid sh -c '{own}' torpor autosave </dev/null >/dev/null 2>&1 & echo done"
        until(lambda: says(begins), "it answers")
        os.kill(body.first(), signal.SIGTERM)
        until(lambda: says("grep -lazx '[r]escue' /proc/[0-9]*/cmdline || :"), "it saves")
        assert says("sleep 6; echo there") == "there\n"
        says("touch /root/stored")
        until(lambda: not body.running, "the container has ended")

    def test_a_machine_ends_with_a_start_script_that_fails(
        self, shop: Shop, provider: Provider
    ) -> None:
        boot = shop.market.boot
        broken = "mount --bind /bin/false /usr/sbin/sshd && "
        shop.market.boot = lambda command: boot([*command[:2], broken + command[2], *command[3:]])
        provider.create(shop.order)
        body = shop.market.rented[0].body
        until(lambda: not body.running, "the container has ended")

    @pytest.mark.parametrize("disk_gib", [0, 20])
    def test_a_machine_requests_its_disk_without_a_limit(self, shop: Shop, disk_gib: float) -> None:
        """A kubelet evicts a pod that exceeds a limit, with the work on it."""
        shop.create(disk_gib=disk_gib)
        (container,) = shop.asked()["spec"]["template"]["spec"]["containers"]
        resources = container["resources"]
        disk = {"ephemeral-storage": f"{disk_gib or MACHINES.disk_gib:.0f}Gi"}
        assert resources["requests"] == resources["limits"] | disk
        assert "ephemeral-storage" not in resources["limits"]

    @pytest.mark.parametrize("spot", [False, True])
    def test_only_spot_machines_are_taken_to_save_nodes(self, shop: Shop, spot: bool) -> None:
        shop.connect(spot=spot).create(shop.order)
        told = shop.asked()["spec"]["template"]["metadata"]["annotations"]
        assert (told.get("karpenter.sh/do-not-disrupt") == "true") != spot
        safe = told.get("cluster-autoscaler.kubernetes.io/safe-to-evict")
        assert (safe == "false") != spot

    @pytest.mark.parametrize(
        ("address", "place"),
        [
            ("LoadBalancer", ("192.0.2.2", 22)),
            ("NodePort", ("192.0.2.1", 30022)),
            ("pod IP", ("192.0.2.2", 22)),
        ],
    )
    def test_each_way_to_reach_a_machine(
        self, shop: Shop, address: Any, place: tuple[str, int]
    ) -> None:
        there = shop.another(address=address)
        machine = there.create()
        endpoint = there.find(machine).endpoint
        assert (endpoint.host, endpoint.port) == place
        assert (("services", machine.id) in shop.fake.objects) == (address != "pod IP")
        nodes = shop.another(address="NodePort", node_address="gpu.example")
        if address != "pod IP":
            assert nodes.find(machine).endpoint.host == "gpu.example"

    def test_a_machine_waits_in_the_queue_and_starts_when_another_has_ended(
        self, shop: Shop
    ) -> None:
        shop.fake.quota = 1
        queue = shop.another(queue="h100")
        assert queue.plain.identity.endswith("/gpus/h100")
        assert queue.plain.abilities.queue_s > 0
        first = queue.create()
        assert first.state == "queued"
        assert queue.find(first).state == "running"
        second = queue.create(label=label())
        live = queue.find(second)
        assert (live.state, live.endpoint) == ("queued", None)
        assert live.note == "queued in h100: insufficient unused quota"
        queue.destroy(first)
        assert queue.find(second).state == "running"

    def test_a_machine_that_was_taken_never_comes_back_under_its_name(self, shop: Shop) -> None:
        """Kueue starts an evicted Job again, with an empty machine: what was seen is its owner."""
        queue = shop.another(queue="h100")
        machine = queue.create()
        assert queue.plain.list_own()[0].state == "starting"  # a listing makes nothing its owner
        assert queue.find(machine).state == "running"
        assert queue.plain.list_own()[0].state == "running"
        (rented,) = shop.market.rented
        owners = rented.request["metadata"]["ownerReferences"]
        assert [(owner["kind"], owner["uid"]) for owner in owners] == [("Pod", "pod-1")]
        rented.request["metadata"]["ownerReferences"] = [{**owners[0], "uid": "an earlier pod"}]
        assert queue.find(machine).state == "stopping"
        rented.request["metadata"]["ownerReferences"] = owners
        shop.fake.evict(rented)
        assert "no Job, pod, Secret or Service" in queue.find(machine).proof

    def test_a_job_that_somebody_changes_meanwhile_is_not_shown_as_running(
        self, shop: Shop
    ) -> None:
        machine = shop.create()
        shop.fake.conflicts = 1
        assert shop.find(machine).state == "starting"
        assert shop.find(machine).state == "running"

    def test_a_queue_that_is_not_there_or_admits_nothing(self, shop: Shop) -> None:
        provider = shop.connect(queue="h100", priority_class="hi")
        shop.fake.queues = {"a100": {"type": "Active", "status": "True"}}
        with pytest.raises(InvalidInput, match="no Kueue queue h100; it has a100"):
            provider.check()
        shop.fake.queues["h100"] = {"type": "Active", "status": "False", "message": "it is stopped"}
        with pytest.raises(ProviderDenied, match="queue h100 admits nothing now: it is stopped"):
            provider.check()
        shop.fake.queues["h100"] = {"type": "Active", "status": "True"}
        with pytest.raises(InvalidInput, match="no WorkloadPriorityClass hi"):
            provider.check()
        shop.fake.priorities = {"hi"}
        assert provider.check().notes == ["1 nodes fit the node selector, with 8 nvidia.com/gpu"]

    @pytest.mark.parametrize("right", [*RIGHTS, *QUEUE_RIGHTS, *JUMP_RIGHTS])
    def test_a_missing_right_is_named(self, shop: Shop, right: Right) -> None:
        shop.fake.queues = {"h100": {"type": "Active", "status": "True"}}
        shop.fake.forbidden = {(right.verb, right.resource)}
        with pytest.raises(ProviderDenied) as told:
            shop.connect(queue="h100", address="jump pod").check()
        group = f".{right.group}" if right.group else ""
        assert f"may not {right.verb} {right.resource}{group} in namespace gpus" in str(told.value)

    @pytest.mark.parametrize(
        ("reason", "message", "after_s"),
        [
            ("InvalidImageName", "couldn't parse image name", 0),
            ("ErrImagePull", "pull access denied, repository does not exist", 0),
            ("ImagePullBackOff", 'Back-off pulling image "a/b": ErrImagePull: not found', 0),
            ("ErrImagePull", "dial tcp: i/o timeout", PULL_S),
            ("ImagePullBackOff", 'Back-off pulling image "a/b"', PULL_S),
        ],
    )
    def test_an_image_that_cannot_be_pulled_ends_the_attempt(
        self, shop: Shop, reason: str, message: str, after_s: float
    ) -> None:
        """At once where the registry refuses, else after some more tries of the node."""
        clock = shop.market.clock
        provider = shop.connect(clock=lambda: clock.now_unix)
        machine = provider.create(shop.order)
        shop.fake.waiting = {"reason": reason, "message": message}
        if after_s:
            clock.advance(600)  # a large image, whose last layer fails
            assert provider.find(machine.id).state == "starting"
            clock.advance(after_s - 1)
            assert provider.find(machine.id).state == "starting"
            clock.advance(1)
        live = provider.find(machine.id)
        assert live.state == "stopped" and reason in live.note and message in live.note
        with pytest.raises(CreateFailed, match=reason):
            wait_until_reachable(provider, machine.id, timeout_s=1800)
        shop.destroy(live, provider)
        assert shop.market.alive() == []

    @pytest.mark.parametrize(
        ("said", "ends"),
        [
            ((), True),
            (("FailedScheduling",), True),
            (("TriggeredScaleUp", "NotTriggerScaleUp"), True),
            (("NotTriggerScaleUp", "TriggeredScaleUp", "FailedScheduling"), False),
            (("Nominated",), False),
        ],
    )
    def test_a_machine_without_room_is_given_up_unless_a_node_comes(
        self, shop: Shop, said: tuple[str, ...], ends: bool
    ) -> None:
        clock = shop.market.clock
        provider = shop.connect(clock=lambda: clock.now_unix)
        shop.fake.unschedulable = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
        shop.fake.said = said
        machine = provider.create(shop.order)
        assert provider.find(machine.id).state == "starting"
        clock.advance(ROOM_S)
        live = provider.find(machine.id)
        assert live.state == ("stopped" if ends else "starting")
        assert "Insufficient nvidia.com/gpu" in live.note
        assert [own.state for own in provider.list_own()] == ["starting"]

    @pytest.mark.parametrize("why", ["events are not seen", "others are taken for it"])
    def test_a_machine_without_room_is_waited_for_where_room_may_come(
        self, shop: Shop, why: str
    ) -> None:
        clock = shop.market.clock
        provider = shop.connect(clock=lambda: clock.now_unix)
        shop.fake.unschedulable = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
        shop.fake.forbidden = {("list", "events")} if why == "events are not seen" else set()
        shop.fake.nominated = "node-1" if why == "others are taken for it" else ""
        machine = provider.create(shop.order)
        clock.advance(10 * ROOM_S)
        assert provider.find(machine.id).state == "starting"

    def test_a_machine_that_runs_and_gets_no_address_says_why(self, shop: Shop) -> None:
        shop.fake.balances = False
        machine = shop.create()
        live = shop.find(machine)
        assert (live.state, live.endpoint) == ("running", None)
        assert "no load balancer" in live.note

    def test_the_runtime_of_gpus_is_named_where_the_cluster_has_it(self, shop: Shop) -> None:
        """k3s and RKE2 give a container no GPU without it."""

        def runtime() -> str | None:
            shop.connect().create(shop.changed(label=label()))
            named: str | None = shop.asked()["spec"]["template"]["spec"].get("runtimeClassName")
            return named

        assert runtime() is None
        shop.fake.runtime_classes = frozenset({"nvidia"})
        assert runtime() == "nvidia"
        shop.fake.forbidden = {("get", "runtimeclasses")}
        assert runtime() is None
        shop.connect(runtime_class="mine").create(shop.changed(label=label()))
        assert shop.asked()["spec"]["template"]["spec"]["runtimeClassName"] == "mine"

    def test_taints_of_the_block_are_tolerated(self, shop: Shop) -> None:
        taints = ["dedicated=ml:NoSchedule", "spot:NoExecute", "any"]
        shop.connect(tolerations=taints).create(shop.order)
        assert shop.asked()["spec"]["template"]["spec"]["tolerations"] == [
            {"key": "nvidia.com/gpu", "operator": "Exists"},
            {"key": "dedicated", "operator": "Equal", "value": "ml", "effect": "NoSchedule"},
            {"key": "spot", "operator": "Exists", "effect": "NoExecute"},
            {"key": "any", "operator": "Exists"},
        ]
        with pytest.raises(InvalidInput, match="no taint"):
            shop.connect(tolerations=["a b:Never"])

    def test_no_more_disk_than_a_node_has_is_asked_for_where_none_is_wanted(
        self, shop: Shop
    ) -> None:
        shop.fake.nodes[0]["status"]["allocatable"]["ephemeral-storage"] = "65000000000"
        shop.create(disk_gib=0)
        (container,) = shop.asked()["spec"]["template"]["spec"]["containers"]
        assert container["resources"]["requests"]["ephemeral-storage"] == "60Gi"
        shop.create(disk_gib=80)  # a node that is to come may have it
        (container,) = shop.asked()["spec"]["template"]["spec"]["containers"]
        assert container["resources"]["requests"]["ephemeral-storage"] == "80Gi"

    def test_an_older_kueue_is_asked_in_its_own_version(self, shop: Shop) -> None:
        """v1beta2 came with 0.15."""
        shop.fake.kueue_versions = ("v1beta1",)
        shop.fake.queues = {"h100": {"type": "Active", "status": "True"}}
        shop.fake.priorities, shop.fake.quota = {"hi"}, 0
        queue = shop.another(queue="h100", priority_class="hi")
        assert queue.plain.check().name
        assert "insufficient unused quota" in queue.find(queue.create()).note

    @pytest.mark.parametrize(
        ("server", "public"),
        [
            ("https://a-b.k8s.us-east-04a.coreweave.com", True),
            ("https://coreweave.com.evil", False),
        ],
    )
    def test_a_machine_at_coreweave_gets_a_public_address(
        self, shop: Shop, monkeypatch: pytest.MonkeyPatch, server: str, public: bool
    ) -> None:
        wanted = {"service.beta.kubernetes.io/coreweave-load-balancer-type": "public"}
        assert is_coreweave(server) is public
        monkeypatch.setattr(service_module, "is_coreweave", lambda url: public)
        for mine in ({}, {next(iter(wanted)): "internal"}):
            machine = shop.connect(service_annotations=mine).create(shop.changed(label=label()))
            service = shop.fake.objects["services", machine.id]
            found = service["metadata"]["annotations"]
            assert found == ((wanted if public else {}) | mine)

    def test_check_names_the_labels_of_gpu_nodes(self, shop: Shop) -> None:
        shop.fake.nodes[0]["metadata"]["labels"] = {"gpu.nvidia.com/class": "H100_NVLINK_80GB"}
        assert any("gpu.nvidia.com/class=H100_NVLINK_80GB" in note
                   for note in shop.plain.check().notes)  # fmt: skip

    def test_what_the_nodes_show_of_an_offer(self, shop: Shop) -> None:
        for count in (1, 8):
            (offer,) = shop.plain.offers(Want(gpu="H100", gpu_count=count))
            assert (offer.gpu_count, offer.available) == (count, True)
            assert offer.price_usd_h == pytest.approx(2.30 * count)

        def available(count: int = 1) -> bool | None:
            return shop.plain.offers(Want(gpu="H100", gpu_count=count))[0].available

        shop.fake.nodes[0]["status"]["allocatable"] = {"nvidia.com/gpu": "1"}
        assert available(2) is False
        shop.fake.nodes[0]["status"]["allocatable"] = {"cpu": "4"}  # the pool with GPUs is empty
        assert available() is None
        shop.fake.nodes = []
        assert available() is None
        shop.fake.forbidden = {("list", "nodes")}
        assert available() is None
        assert "may not list nodes" in shop.plain.check().notes[0]

    def test_where_nodes_are_billed_an_idle_one_is_left_over(self, shop: Shop) -> None:
        provider = shop.connect(nodes_billed=True)
        (idle,) = provider.residue()
        assert (idle.kind, idle.id, idle.label) == ("node", "node-1", None)
        assert idle.price_usd_h == pytest.approx(8 * 2.30)
        shop.create()
        assert provider.residue() == []
        shop.fake.forbidden = {("list", "nodes")}
        for ask in (provider.residue, provider.check):
            with pytest.raises(ProviderDenied, match="may not list nodes"):
                ask()

    @pytest.mark.parametrize("address", ["LoadBalancer", "pod IP"])
    def test_a_pod_whose_job_was_deleted_without_it_is_listed_and_ended(
        self, shop: Shop, address: Any
    ) -> None:
        """It runs, holds the work and costs."""
        queue = shop.another(queue="h100", address=address)
        machine = queue.create()
        assert queue.find(machine).state == "running"
        shop.fake.orphans = {machine.id}
        shop.fake.collects = False
        (live,) = queue.plain.list_own()
        assert live == queue.find(machine)
        assert (live.id, live.label, live.state) == (machine.id, machine.label, "running")
        assert live.endpoint is not None
        assert live.price_usd_h == machine.price_usd_h
        assert queue.plain.residue() == []
        assert shop.connect(queue="another").list_own() == []
        queue.destroy(live)
        assert shop.market.alive() == []
        assert queue.find(machine) == Absent()
        queue.destroy(live)
        assert queue.find(machine).proof

    def test_a_cluster_that_is_too_old_is_refused(self, shop: Shop) -> None:
        shop.fake.minor = "26"
        with pytest.raises(InvalidInput, match=r"is Kubernetes 1\.26; torpor needs 1\.27 or newer"):
            shop.plain.check()

    def test_a_service_that_outlives_its_job_is_left_over_and_ended(self, shop: Shop) -> None:
        machine = shop.create()
        service = shop.fake.objects["services", machine.id]
        shop.market.end(shop.market.rented[0])
        shop.fake.collects = False
        shop.fake.objects = {("services", machine.id): service}
        (left,) = shop.plain.residue()
        assert (left.kind, left.label) == ("service", machine.label)
        assert shop.find(machine) == Absent()
        shop.destroy(machine)
        assert shop.plain.residue() == []
        assert shop.find(machine).proof


@pytest.mark.parametrize("text", ["", "[", "a: 1", "clusters: []", "clusters: [{name: c}]"])
def test_a_kubeconfig_that_is_none(text: str) -> None:
    with pytest.raises(InvalidInput, match="the kubeconfig"):
        KubernetesProvider(text, NAMESPACE, MACHINES)


@pytest.mark.parametrize(
    "text",
    [
        "users: [{name: me, user: {token: s3cret}}",
        "clusters: [{name: c, cluster: {server: 'https://c'}}]\n"
        "contexts: [{name: x, context: {cluster: c, user: u}}]\ncurrent-context: x\n"
        "users: [{name: u, user: {client-certificate-data: 's3cret-é'}}]",
    ],
)
def test_a_faulty_kubeconfig_is_not_quoted(text: str) -> None:
    with pytest.raises(InvalidInput) as told:
        KubernetesProvider(text, NAMESPACE, MACHINES)
    assert "s3cret" not in "".join(traceback.format_exception(told.value))


@pytest.mark.parametrize(
    ("server", "identity"),
    [
        ("https://one:6443", "kubernetes://one:6443/gpus"),
        ("https://One:6443/", "kubernetes://one:6443/gpus"),
        ("https://me:secret@one:6443", "kubernetes://one:6443/gpus"),
        ("https://[2001:db8::1]:6443", "kubernetes://[2001:db8::1]:6443/gpus"),
        ("https://r/k8s/clusters/c-1", "kubernetes://r/k8s/clusters/c-1//gpus"),
        ("https://r/k8s/clusters/c-2/", "kubernetes://r/k8s/clusters/c-2//gpus"),
    ],
)
def test_each_cluster_behind_one_host_is_a_market_of_its_own(server: str, identity: str) -> None:
    """A machine of another cluster would be proved absent."""
    assert KubernetesProvider(kubeconfig(server, "t"), NAMESPACE, MACHINES).identity == identity


def test_without_the_client_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(InvalidInput, match=re.escape("pip install '.[kubernetes]'")):
        KubernetesProvider(kubeconfig("http://127.0.0.1:1", "t"), NAMESPACE, MACHINES)


def _login(shop: Shop, identity_key: KeyPair) -> Callable[[str], str]:
    """What a command prints on the machine; empty where it cannot be asked."""
    body = shop.market.rented[0].body
    shown = asyncssh.import_private_key(shop.order.host_key).export_public_key()
    host_key = shown.decode().strip()

    def says(command: str) -> str:
        try:
            return run(body, identity_key, host_key, command)
        except (OSError, asyncssh.Error):
            return ""

    return says


def _children(body: BootedMachine) -> dict[str, int]:
    """What the machine's first process started, by names."""
    first = body.first()
    found = {}
    for pid in Path(f"/proc/{first}/task/{first}/children").read_text().split():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found[Path(f"/proc/{pid}/comm").read_text().strip()] = int(pid)
    return found
