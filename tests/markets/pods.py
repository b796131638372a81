"""A pod's container, run as its spec says in the root of its image: user, volumes, environment, and
what it may write. It shares this host's network. Limits and probes are not held.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from tests.markets.boot import BootedMachine, Machines

Object = dict[str, Any]
Ask = Callable[..., Any]

_ENTER: Final = Path(__file__).with_name("pod.sh")
_PATH: Final = "/opt/torpor/.venv/bin:/usr/local/bin:/usr/bin:/bin"
"""Of both images: Containerfile's."""


class Missing(Exception):
    """The pod needs an object that is not there yet."""


def image_of(row: Object) -> str:
    """The image of a pod, without its tag or digest."""
    found: str = row["spec"]["containers"][0]["image"]
    return re.split("[:@]", found)[0]


def boot_pod(machines: Machines, root: Path, row: Object, ask: Ask) -> BootedMachine:
    """Start its only container. Raises Missing."""
    spec = row["spec"]
    (container,) = spec["containers"]
    rules = spec.get("securityContext", {}) | container.get("securityContext", {})
    user, group = str(rules["runAsUser"]), str(rules.get("fsGroup", rules["runAsUser"]))
    volumes = {one["name"]: one for one in spec.get("volumes", [])}
    mounts = []
    for mount in container.get("volumeMounts", []):
        source = _folder(machines, volumes[mount["name"]], row, ask) / mount.get("subPathExpr", "")
        source.mkdir(exist_ok=True)
        source.chmod(0o2777)
        mounts.append(f"{source}:{mount['mountPath']}")
    environment = {"PATH": _PATH, "HOSTNAME": row["metadata"]["name"]}
    environment |= dict(_environment(container, row, ask))
    words = [*container.get("command", []), *container.get("args", [])]
    words = [re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], word) for word in words]
    nobody = ["setpriv", "--reuid", user, "--regid", user, "--groups", group]
    nobody += ["--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"]
    return machines.boot_image(
        [
            *(str(_ENTER), str(root), "ro" if rules.get("readOnlyRootFilesystem") else "rw"),
            *(*mounts, "--"),
        ],
        [
            *("env", "--ignore-environment", f"--chdir={container['workingDir']}"),
            *(f"{name}={value}" for name, value in environment.items()),
            *(*nobody, *words),
        ],
    )


def _folder(machines: Machines, volume: Object, row: Object, ask: Ask) -> Path:
    """Where a volume is on this host; claims outlive their pods."""
    claim = volume.get("persistentVolumeClaim", {}).get("claimName", "")
    folder = machines.folder / (f"claim-{claim}" if claim else row["metadata"]["uid"])
    folder /= volume["name"]
    if not folder.exists():
        files = dict(_files(volume, row, ask))
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / name).write_bytes(text)
    return folder


def _files(volume: Object, row: Object, ask: Ask) -> Iterator[tuple[str, bytes]]:
    """What is in a volume when the pod begins."""
    if "secret" in volume:
        yield from _data(row, ask, "secrets", volume["secret"]["secretName"])
    elif "configMap" in volume:
        yield from _data(row, ask, "configmaps", volume["configMap"]["name"])
    for source in volume.get("projected", {}).get("sources", []):
        if "configMap" in source:
            yield from _data(row, ask, "configmaps", source["configMap"]["name"])
        elif "serviceAccountToken" in source:
            account = f"{_space(row)}/serviceaccounts/{row['spec']['serviceAccountName']}/token"
            pod = {"kind": "Pod", "apiVersion": "v1"}
            pod |= {name: row["metadata"][name] for name in ("name", "uid")}
            asked = {"kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1"}
            made = ask("POST", account, {**asked, "spec": {"boundObjectRef": pod}})
            yield "token", made["status"]["token"].encode()


def _environment(container: Object, row: Object, ask: Ask) -> Iterator[tuple[str, str]]:
    for source in container.get("envFrom", []):
        for name, text in _data(row, ask, "secrets", source["secretRef"]["name"]):
            yield name, text.decode()
    for variable in container.get("env", []):
        given = variable.get("valueFrom", {})
        if "secretKeyRef" in given:
            wanted = given["secretKeyRef"]
            yield (
                variable["name"],
                dict(_data(row, ask, "secrets", wanted["name"]))[wanted["key"]].decode(),
            )
        elif "fieldRef" in given:
            yield variable["name"], row["metadata"][given["fieldRef"]["fieldPath"].split(".")[1]]
        else:
            yield variable["name"], variable.get("value", "")


def _data(row: Object, ask: Ask, kind: str, name: str) -> Iterator[tuple[str, bytes]]:
    found = ask("GET", f"{_space(row)}/{kind}/{name}")
    if found is None:
        raise Missing(f"{kind} {name}")
    for key, text in found["data"].items():
        yield key, base64.b64decode(text) if kind == "secrets" else text.encode()


def _space(row: Object) -> str:
    return f"/api/v1/namespaces/{row['metadata']['namespace']}"
