"""Kubernetes: the contract, and what a cluster does differently from a market."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import asyncssh
import httpx
import msgspec
import pytest
import urllib3

from tests.control.providers.market_contract import MarketContract, label
from tests.fixtures.machines import KeyPair
from tests.fixtures.waiting import until
from tests.markets.boot import BootedMachine
from tests.markets.faults import Fault
from tests.markets.kubernetes import NAMESPACE, FakeKubernetes, kubeconfig, kubernetes_wares
from tests.markets.market import Market
from tests.markets.server import FakeMarket
from tests.markets.test_boot import run
from torpor.control.providers.kubernetes.client import Right
from torpor.control.providers.kubernetes.objects import Machines
from torpor.control.providers.kubernetes.provider import (
    QUEUE_RIGHTS,
    RIGHTS,
    KubernetesProvider,
)
from torpor.control.providers.seam import Absent, Order, Provider
from torpor.control.safety import never_handed_over
from torpor.shared.errors import (
    CreateFailed,
    CreateUncertain,
    InvalidInput,
    ProviderDenied,
    ProviderUnavailable,
    QuotaReached,
)
from torpor.shared.values import Label, Machine, MachineId, Want

MACHINES = Machines(price_usd_h=2.30, gpu="H100 SXM 80GB")
QUEUED = msgspec.structs.replace(MACHINES, queue="h100")


class TestKubernetes(MarketContract):
    @pytest.fixture
    def want(self) -> Want:
        return Want(gpu="H100", disk_gib=20)

    def new_fake(self) -> FakeMarket:
        return FakeKubernetes(Market(wares=kubernetes_wares()))

    def connect(
        self,
        fake: FakeMarket,
        key: str = "",
        timeout_s: float = 30.0,
        machines: Machines = MACHINES,
    ) -> KubernetesProvider:
        self.slept = []
        return KubernetesProvider(
            kubeconfig(fake.url, key or fake.key),
            NAMESPACE,
            machines,
            ssh_port=self.ssh_port,
            timeout=httpx.Timeout(timeout_s),
            sleep=self.slept.append,
        )

    def foreign(self, fake: FakeMarket) -> MachineId:
        market = fake.market
        made = market.rent(market.wares[0], "by hand", {}, id_of=lambda n: f"by-hand-{n}")
        return MachineId(made.id)

    @pytest.mark.parametrize(
        ("kind", "error"),
        [
            ("quota", QuotaReached),
            ("no money", ProviderDenied),
            ("lost", CreateUncertain),
            ("error after", CreateUncertain),
            ("error that created", CreateUncertain),
            ("wrong shape", CreateUncertain),
            ("not json", CreateUncertain),
        ],
    )
    def test_a_failed_create_says_what_it_blocks(
        self, plain: Provider, fake: FakeMarket, order: Order, kind: Any, error: type[Exception]
    ) -> None:
        """A cluster refuses no Job for want of capacity: its pod waits."""
        super().test_a_failed_create_says_what_it_blocks(plain, fake, order, kind, error)

    def test_a_secret_that_was_not_made_leaves_the_attempt_uncertain(
        self, plain: Provider, fake: FakeMarket, order: Order
    ) -> None:
        fake.faults.arm(Fault("denied", "account", count=100))
        with pytest.raises(CreateUncertain, match="not all that belongs to it"):
            plain.create(order)
        fake.faults.clear()
        assert [one.label for one in plain.list_own()] == [order.label]
        assert plain.create(order).id == fake.market.alive()[0].id

    @pytest.mark.parametrize("kind", ["denied", "unavailable", "wrong shape"])
    def test_a_taken_name_that_nobody_can_look_at_is_no_promise_that_nothing_was_rented(
        self, plain: Provider, fake: FakeMarket, order: Order, kind: Any
    ) -> None:
        plain.create(order)
        fake.faults.arm(Fault(kind, "find", count=100))
        with pytest.raises(CreateUncertain, match="the Job's name is taken"):
            plain.create(order)

    def test_a_quota_that_changes_meanwhile_does_not_deny_the_market(
        self, plain: Provider, fake: FakeMarket, order: Order
    ) -> None:
        assert isinstance(fake, FakeKubernetes)
        fake.quota_conflicts = 1
        with pytest.raises(CreateFailed, match="has been modified"):
            plain.create(order)
        plain.create(order)

    @pytest.mark.parametrize(
        ("error", "told"),
        [
            (urllib3.exceptions.SSLError("bad record mac"), CreateUncertain),
            (urllib3.exceptions.ClosedPoolError(Any, "closed"), ProviderUnavailable),
        ],
    )
    def test_what_a_lost_connection_says_of_a_create(
        self,
        plain: Provider,
        order: Order,
        monkeypatch: pytest.MonkeyPatch,
        error: Exception,
        told: type[Exception],
    ) -> None:
        """TLS may fail after the request was sent; without a connection nothing was."""

        def fails(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(urllib3.PoolManager, "request", fails)
        with pytest.raises(told):
            plain.create(order)

    def test_the_host_key_is_in_the_secret_alone(
        self, plain: Provider, fake: FakeMarket, order: Order
    ) -> None:
        assert isinstance(fake, FakeKubernetes)
        plain.create(order)
        line = order.host_key.splitlines()[1]
        assert line not in msgspec.json.encode(fake.market.rented[0].request).decode()
        ((_, secret),) = [one for one in fake.objects.items() if one[0][0] == "secrets"]
        assert line in secret["stringData"]["start"]

    def test_a_machine_outlives_its_sshd(
        self, provider: Provider, fake: FakeMarket, order: Order, identity_key: KeyPair
    ) -> None:
        """Who restarts or upgrades sshd keeps the work, the host key and what he changed."""
        provider.create(order)
        body = fake.market.rented[0].body
        assert isinstance(body, BootedMachine)
        host_key = asyncssh.import_private_key(order.host_key).export_public_key().decode().strip()

        def says(command: str) -> str:
            try:
                return run(body, identity_key, host_key, command)
            except (OSError, asyncssh.Error):
                return ""

        until(lambda: says("echo mine >>/root/.ssh/authorized_keys; echo done"), "it answers")
        assert says("sleep 5; echo done")  # the first process knows by then that sshd ran
        for _ in range(2):
            os.kill(_children(body)["sshd"], signal.SIGTERM)
            until(lambda: "sshd" not in _children(body), "sshd has ended")
            until(lambda: says("tail -n 1 /root/.ssh/authorized_keys") == "mine\n", "it is back")
        assert body.running

    def test_a_machine_ends_with_a_start_script_that_fails(
        self, provider: Provider, fake: FakeMarket, order: Order
    ) -> None:
        boot = fake.market.boot
        assert boot is not None
        broken = "mount --bind /bin/false /usr/sbin/sshd && "
        fake.market.boot = lambda command: boot([*command[:2], broken + command[2], *command[3:]])
        provider.create(order)
        body = fake.market.rented[0].body
        assert isinstance(body, BootedMachine)
        until(lambda: not body.running, "the container has ended")

    @pytest.mark.parametrize("disk_gib", [0, 20])
    def test_a_machine_requests_its_disk_without_a_limit(
        self, plain: Provider, fake: FakeMarket, order: Order, disk_gib: float
    ) -> None:
        """A kubelet evicts a pod that exceeds a limit, with the work on it."""
        plain.create(msgspec.structs.replace(order, disk_gib=disk_gib))
        (made,) = fake.market.rented
        (container,) = made.request["spec"]["template"]["spec"]["containers"]
        resources = container["resources"]
        disk = {"ephemeral-storage": f"{disk_gib or MACHINES.disk_gib:.0f}Gi"}
        assert resources["requests"] == resources["limits"] | disk
        assert "ephemeral-storage" not in resources["limits"]

    @pytest.mark.parametrize("spot", [False, True])
    def test_only_spot_machines_are_taken_to_save_nodes(
        self, fake: FakeMarket, order: Order, spot: bool
    ) -> None:
        self.connect(fake, machines=msgspec.structs.replace(MACHINES, spot=spot)).create(order)
        (made,) = fake.market.rented
        told = made.request["spec"]["template"]["metadata"]["annotations"]
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
        self, fake: FakeMarket, order: Order, address: Any, place: tuple[str, int]
    ) -> None:
        assert isinstance(fake, FakeKubernetes)
        provider = self.connect(fake, machines=msgspec.structs.replace(MACHINES, address=address))
        machine = provider.create(order)
        live = provider.find(machine.id)
        assert isinstance(live, Machine)
        assert live.endpoint is not None
        assert (live.endpoint.host, live.endpoint.port) == place
        assert (("services", machine.id) in fake.objects) == (address != "pod IP")
        nodes = msgspec.structs.replace(MACHINES, address="NodePort", node_address="gpu.example")
        other = self.connect(fake, machines=nodes).find(machine.id)
        if address != "pod IP":
            assert isinstance(other, Machine)
            assert other.endpoint is not None
            assert other.endpoint.host == "gpu.example"

    def test_a_machine_waits_in_the_queue_and_starts_when_another_has_ended(
        self, fake: FakeMarket, order: Order
    ) -> None:
        assert isinstance(fake, FakeKubernetes)
        fake.quota = 1
        provider = self.connect(fake, machines=QUEUED)
        assert provider.identity.endswith("/gpus/h100")
        assert provider.abilities.queue_s > 0
        first = provider.create(_at(provider, order))
        assert first.state == "queued"
        assert _state(provider, first) == "running"
        second = provider.create(_at(provider, order, label()))
        live = provider.find(second.id)
        assert isinstance(live, Machine)
        assert (live.state, live.endpoint) == ("queued", None)
        assert live.note == "queued in h100: insufficient unused quota"
        assert first.label is not None
        provider.destroy(first, never_handed_over(first, first.label))
        assert _state(provider, second) == "running"

    def test_a_machine_that_was_taken_never_comes_back_under_its_name(
        self, fake: FakeMarket, order: Order
    ) -> None:
        """Kueue starts an evicted Job again, with an empty machine: what was seen is its owner."""
        assert isinstance(fake, FakeKubernetes)
        provider = self.connect(fake, machines=QUEUED)
        machine = provider.create(_at(provider, order))
        assert provider.list_own()[0].state == "starting"  # a listing makes nothing its owner
        assert _state(provider, machine) == "running"
        assert provider.list_own()[0].state == "running"
        (rented,) = fake.market.rented
        owners = rented.request["metadata"]["ownerReferences"]
        assert [(one["kind"], one["uid"]) for one in owners] == [("Pod", "pod-1")]
        rented.request["metadata"]["ownerReferences"] = [{**owners[0], "uid": "an earlier pod"}]
        assert _state(provider, machine) == "stopping"
        rented.request["metadata"]["ownerReferences"] = owners
        fake.evict(rented)
        gone = provider.find(machine.id)
        assert isinstance(gone, Absent)
        assert "no Job, pod, Secret or Service" in gone.proof

    def test_a_job_that_somebody_changes_meanwhile_is_not_shown_as_running(
        self, plain: Provider, fake: FakeMarket, order: Order
    ) -> None:
        assert isinstance(fake, FakeKubernetes)
        machine = plain.create(order)
        fake.conflicts = 1
        assert _state(plain, machine) == "starting"
        assert _state(plain, machine) == "running"

    def test_a_queue_that_is_not_there_or_admits_nothing(self, fake: FakeMarket) -> None:
        assert isinstance(fake, FakeKubernetes)
        provider = self.connect(fake, machines=msgspec.structs.replace(QUEUED, priority_class="hi"))
        fake.queues = {"a100": {"type": "Active", "status": "True"}}
        with pytest.raises(InvalidInput, match="no Kueue queue h100; it has a100"):
            provider.check()
        fake.queues["h100"] = {"type": "Active", "status": "False", "message": "it is stopped"}
        with pytest.raises(ProviderDenied, match="queue h100 admits nothing now: it is stopped"):
            provider.check()
        fake.queues["h100"] = {"type": "Active", "status": "True"}
        with pytest.raises(InvalidInput, match="no WorkloadPriorityClass hi"):
            provider.check()
        fake.priorities = {"hi"}
        assert provider.check().notes == ["1 nodes fit the node selector, with 8 nvidia.com/gpu"]

    @pytest.mark.parametrize("right", [*RIGHTS, *QUEUE_RIGHTS])
    def test_a_missing_right_is_named(self, fake: FakeMarket, right: Right) -> None:
        assert isinstance(fake, FakeKubernetes)
        fake.queues = {"h100": {"type": "Active", "status": "True"}}
        fake.forbidden = {(right.verb, right.resource)}
        with pytest.raises(ProviderDenied) as told:
            self.connect(fake, machines=QUEUED).check()
        group = f".{right.group}" if right.group else ""
        assert f"may not {right.verb} {right.resource}{group} in namespace gpus" in str(told.value)

    def test_what_the_nodes_show_of_an_offer(self, fake: FakeMarket) -> None:
        assert isinstance(fake, FakeKubernetes)
        provider = self.connect(fake)
        for count, there in ((1, True), (8, True)):
            (offer,) = provider.offers(Want(gpu="H100", gpu_count=count))
            assert (offer.gpu_count, offer.available) == (count, there)
            assert offer.price_usd_h == pytest.approx(2.30 * count)
        fake.nodes[0]["status"]["allocatable"] = {"nvidia.com/gpu": "1"}
        assert provider.offers(Want(gpu="H100", gpu_count=2))[0].available is False
        fake.nodes[0]["status"]["allocatable"] = {"cpu": "4"}  # the pool with GPUs is empty
        assert provider.offers(Want(gpu="H100"))[0].available is None
        fake.nodes = []
        assert provider.offers(Want(gpu="H100"))[0].available is None
        fake.forbidden = {("list", "nodes")}
        assert provider.offers(Want(gpu="H100"))[0].available is None
        assert "may not list nodes" in provider.check().notes[0]

    def test_where_nodes_are_billed_an_idle_one_is_left_over(
        self, fake: FakeMarket, order: Order
    ) -> None:
        assert isinstance(fake, FakeKubernetes)
        provider = self.connect(fake, machines=msgspec.structs.replace(MACHINES, nodes_billed=True))
        (idle,) = provider.residue()
        assert (idle.kind, idle.id, idle.label) == ("node", "node-1", None)
        assert idle.price_usd_h == pytest.approx(8 * 2.30)
        provider.create(order)
        assert provider.residue() == []
        fake.forbidden = {("list", "nodes")}
        for ask in (provider.residue, provider.check):
            with pytest.raises(ProviderDenied, match="may not list nodes"):
                ask()

    @pytest.mark.parametrize("address", ["LoadBalancer", "pod IP"])
    def test_a_pod_whose_job_was_deleted_without_it_is_listed_and_ended(
        self, fake: FakeMarket, order: Order, address: Any
    ) -> None:
        """It runs, holds the work and costs."""
        assert isinstance(fake, FakeKubernetes)
        there = msgspec.structs.replace(QUEUED, address=address)
        provider = self.connect(fake, machines=there)
        machine = provider.create(_at(provider, order))
        assert _state(provider, machine) == "running"
        fake.orphans = {machine.id}
        fake.collects = False
        (live,) = provider.list_own()
        assert live == provider.find(machine.id)
        assert (live.id, live.label, live.state) == (machine.id, order.label, "running")
        assert live.endpoint is not None
        assert live.price_usd_h == machine.price_usd_h
        assert provider.residue() == []
        other = msgspec.structs.replace(QUEUED, queue="another")
        assert self.connect(fake, machines=other).list_own() == []
        provider.destroy(live, never_handed_over(live, order.label))
        assert fake.market.alive() == []
        assert provider.find(machine.id) == Absent()
        provider.destroy(live, never_handed_over(live, order.label))
        gone = provider.find(machine.id)
        assert isinstance(gone, Absent)
        assert gone.proof

    def test_a_cluster_that_is_too_old_is_refused(self, plain: Provider, fake: FakeMarket) -> None:
        assert isinstance(fake, FakeKubernetes)
        fake.minor = "26"
        with pytest.raises(InvalidInput, match=r"is Kubernetes 1\.26; torpor needs 1\.27 or newer"):
            plain.check()

    def test_a_service_that_outlives_its_job_is_left_over_and_ended(
        self, plain: Provider, fake: FakeMarket, order: Order
    ) -> None:
        assert isinstance(fake, FakeKubernetes)
        machine = plain.create(order)
        service = fake.objects["services", machine.id]
        fake.market.end(fake.market.rented[0])
        fake.collects = False
        fake.objects = {("services", machine.id): service}
        assert [(one.kind, one.label) for one in plain.residue()] == [("service", order.label)]
        assert plain.find(machine.id) == Absent()
        plain.destroy(machine, never_handed_over(machine, order.label))
        assert plain.residue() == []
        gone = plain.find(machine.id)
        assert isinstance(gone, Absent)
        assert gone.proof


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


def _at(provider: Provider, order: Order, other: Label | None = None) -> Order:
    """The same order of this provider's offer."""
    offer = msgspec.structs.replace(order.offer, provider=provider.identity)
    return msgspec.structs.replace(order, offer=offer, label=other or order.label)


def _children(body: BootedMachine) -> dict[str, int]:
    """What the machine's first process started, by names."""
    first = body.first()
    found = {}
    for pid in Path(f"/proc/{first}/task/{first}/children").read_text().split():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found[Path(f"/proc/{pid}/comm").read_text().strip()] = int(pid)
    return found


def _state(provider: Provider, machine: Machine) -> str:
    found = provider.find(machine.id)
    assert isinstance(found, Machine)
    return found.state
