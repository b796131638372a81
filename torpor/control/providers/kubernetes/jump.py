"""The jump pod: one SSH server, with one load balancer, before all machines of an SSH identity.

Its Deployment, Secret and Service have the Job of each machine as an owner. So the cluster deletes
them when the last of these Jobs is gone, also when nobody is there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any, Final, TypeVar

import asyncssh

from torpor.control.providers.kubernetes.client import KubernetesClient, Right
from torpor.control.providers.kubernetes.objects import (
    Machines,
    Metadata,
    Object,
    Service,
    Services,
    owner_of,
    toleration,
)
from torpor.control.providers.market_client import Refusal
from torpor.control.providers.provider import Order
from torpor.shared.errors import CreateUncertain
from torpor.shared.values import Endpoint

IMAGE: Final = (
    "testcontainers/sshd:1.3.0"
    "@sha256:c50c0f59554dcdb2d9e5e705112144428ae9d04ac0af6322b365a18e24213a6a"
)
"""An sshd on Alpine Linux, which Testcontainers and dstack use to forward connections. It has the
digest that dstack names: whoever can move a tag would stand before all machines."""
RIGHTS: Final = (
    *(Right(verb, "deployments", "apps") for verb in ("create", "patch", "delete")),
    Right("patch", "secrets"),
    Right("patch", "services"),
)
"""Rights to delete these objects. The cluster deletes them itself, but OpenShift lets only a user
who may delete an object change its owners."""
_APPS: Final = "apps/v1"
LABEL: Final = "torpor.dev/jump"
_HOST_KEY: Final = "torpor.dev/host-key"
_USER: Final = "jump"
_UID: Final = 65532
_PORT: Final = 2222  # a port that needs no root
_FOLDER: Final = "/etc/torpor-jump"
_TRIES: Final = 5

_PASSWD: Final = f"{_USER}:x:{_UID}:{_UID}::/:/bin/false\n"
"""sshd without root lets only its own user in, and asks the system for that user's account. Where
systemd answers, it calls ``nobody`` locked."""

_CONFIG: Final = f"""Port {_PORT}
HostKey {_FOLDER}/host_key
AuthorizedKeysFile {_FOLDER}/authorized_keys
StrictModes no
PidFile none
AllowUsers {_USER}
PasswordAuthentication no
KbdInteractiveAuthentication no
MaxStartups 100
MaxSessions 0
AllowTcpForwarding local
AllowStreamLocalForwarding no
PermitOpen *:@SSH@
"""
"""With ``MaxSessions 0``, sshd gives nobody a shell, command or subsystem, and still forwards."""

_START: Final = f"""set -- /usr/sbin/sshd -D -e -f {_FOLDER}/config
if "$@" -t -o PerSourcePenalties=no 2>/dev/null; then set -- "$@" -o PerSourcePenalties=no; fi
exec "$@"
"""
"""A load balancer may show all clients under one address: the penalties of OpenSSH 9.8 and newer
for a stranger would keep us out, too."""

_Shape = TypeVar("_Shape", Object, Service)


class JumpPod:
    """The jump pods of a namespace. ``annotations``: of the Service, beside the block's."""

    def __init__(
        self,
        client: KubernetesClient,
        machines: Machines,
        annotations: Mapping[str, str],
        ssh_port: int,
    ) -> None:
        self._client, self._machines = client, machines
        self._annotations = {**annotations, **machines.service_annotations}
        self._ssh_port = ssh_port

    def share(self, order: Order, job: Metadata) -> None:
        """Make the Job one more owner of the identity's jump pod, which is made where there is
        none. May be repeated.

        A Service is shown for minutes after its end, until the cloud has deleted the load balancer.
        The next jump pod has another name meanwhile.
        """
        for name in _names(order.public_key):
            service = self._own("services", self._service(name, order), job, Service)
            if service.metadata.deletion_timestamp is None:
                break
        else:
            raise CreateUncertain(
                f"Service {name} and the one before it are being deleted: try again in a minute"
            )
        self._own("secrets", self._secret(name, order), job, Object)
        self._own("deployments", self._deployment(name), job, Object)

    def endpoint(self, job: str) -> Endpoint | None:
        """Where the jump pod of a Job's machine answers; None where it has none, or not yet."""
        for service in self.services():
            meta, place = service.metadata, service.address()
            host_key = meta.annotations.get(_HOST_KEY)
            if is_owner(meta, [job]) and meta.deletion_timestamp is None and place and host_key:
                return Endpoint(*place, _USER, host_key)
        return None

    def services(self) -> list[Service]:
        return self._client.read(Services, self._client.path("services"), LABEL).items

    def _own(
        self, resource: str, body: dict[str, Any], job: Metadata, shape: type[_Shape]
    ) -> _Shape:
        """Add an owner to what is there, else make it. A patch adds to the list of owners: other
        runs do so at the same time."""
        name, api = body["metadata"]["name"], body["apiVersion"]
        body["metadata"]["ownerReferences"] = [owner_of(job)]
        change = {"metadata": {"ownerReferences": [owner_of(job)]}}
        ask, path = self._client.market.ask, self._client.path
        for tries_left in reversed(range(_TRIES)):
            answer = ask("PATCH", path(resource, name, api), shape, body=change)
            if isinstance(answer, Refusal) and answer.status == 404:
                answer = ask("POST", path(resource, api=api), shape, body=body)
            if not isinstance(answer, Refusal):
                return answer
            if answer.status != 409 or not tries_left:  # 409: another run was faster
                raise self._client.refused(answer, f"share {name} among {resource}")
        raise AssertionError("the last try returns or raises")

    def _service(self, name: str, order: Order) -> dict[str, Any]:
        key = asyncssh.import_private_key(order.jump_host_key).export_public_key()
        told = {**self._annotations, _HOST_KEY: key.decode().strip()}
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name, "labels": {LABEL: name}, "annotations": told},
            "spec": {
                "type": "LoadBalancer",
                "selector": {LABEL: name},
                "ports": [{"name": "ssh", "port": self._ssh_port, "targetPort": _PORT}],
            },
        }

    def _secret(self, name: str, order: Order) -> dict[str, Any]:
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "labels": {LABEL: name}},
            "stringData": {
                "config": _CONFIG.replace("@SSH@", str(self._ssh_port)),
                "host_key": order.jump_host_key,
                "authorized_keys": f"{order.public_key}\n",
                "passwd": _PASSWD,
            },
        }

    def _deployment(self, name: str) -> dict[str, Any]:
        container = {
            "name": "sshd",
            "image": self._machines.jump_image or IMAGE,
            "command": ["/bin/sh", "-c", _START],
            "ports": [{"name": "ssh", "containerPort": _PORT}],
            "resources": {
                "requests": {"cpu": "100m", "memory": "64Mi"},
                "limits": {"cpu": "1", "memory": "512Mi"},
            },
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            },
            "volumeMounts": [
                {"name": "keys", "mountPath": _FOLDER, "readOnly": True},
                {
                    "name": "keys",
                    "mountPath": "/etc/passwd",
                    "subPath": "passwd",
                    "readOnly": True,
                },
            ],
        }
        pod: dict[str, Any] = {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": _UID,
                "runAsGroup": _UID,
                "fsGroup": _UID,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": [{"name": "keys", "secret": {"secretName": name, "defaultMode": 0o440}}],
        }
        if self._machines.container.login:
            pod["imagePullSecrets"] = [{"name": self._machines.container.login}]
        if self._machines.tolerations:
            pod["tolerations"] = [toleration(taint) for taint in self._machines.tolerations]
        return {
            "apiVersion": _APPS,
            "kind": "Deployment",
            "metadata": {"name": name, "labels": {LABEL: name}},
            "spec": {
                "selector": {"matchLabels": {LABEL: name}},
                "template": {"metadata": {"labels": {LABEL: name}}, "spec": pod},
            },
        }


def is_owner(meta: Metadata, jobs: Collection[str]) -> bool:
    """Whether one of these Jobs is among the object's owners."""
    return any(owner.name in jobs for owner in meta.owner_references)


def _names(public_key: str) -> tuple[str, str]:
    """What the jump pod of an identity may be called."""
    key = " ".join(public_key.split()[:2])
    first = f"torpor-jump-{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}"
    return first, f"{first}-2"
