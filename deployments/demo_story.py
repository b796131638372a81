"""The steps of the demo. ``deployments.demo`` starts it."""

from __future__ import annotations

import secrets
import socket
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, cast

from prefect_aws import MinIOCredentials
from pydantic import SecretStr

from blocks import LocalProvider, ObjectStore, SSHIdentity, Workspace
from deployments.demo import begun_in, told_in
from deployments.example import make_example
from deployments.installation import Installation
from deployments.inventory import differences, inventory_of, sizes_of
from deployments.terminal import CLEARED, Waiting, rewrites
from flows import create, hibernate, list_machines, wake
from tasks.progress import followed_by
from torpor.control.processes import ending_with_this_process
from torpor.control.providers.local.folder import folder_of
from torpor.control.reports import HibernateReport, WakeReport
from torpor.control.store.embedded import EmbeddedStore
from torpor.shared.errors import TorporError
from torpor.shared.plain_text import short
from torpor.shared.values import Endpoint, Machine

NAME: Final = "demo"
BUCKET: Final = "torpor-demo"
PRICE_USD_H: Final = 2.0
SHOWN_DIFFERENCES: Final = 20
_LABEL_WIDTH: Final = 15
_COLUMNS: Final = 80


def main() -> int:
    installation = Installation(Path(sys.argv[1]))
    begun_in(installation).touch()
    try:
        with _store(installation) as store:
            code = _tell(installation, store)
            told_in(installation).touch()
            return code
    except TorporError as error:
        print(f"\nThe demo failed: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _tell(installation: Installation, store: EmbeddedStore) -> int:
    with _step("Prefect") as say:
        save_blocks(installation, store)
        say("a temporary server, with the settings of the demo")
    with _step("machine 1") as say:
        first = create(NAME)
        say(f"{first.id}: {_server(first)}")
    with _step("workspace") as say:
        folder = home_of(installation, first) / "workspace"
        folder.mkdir(exist_ok=True)
        made = make_example(folder)
        before = inventory_of(folder)
        sizes, links = sizes_of(before), sum(bool(one["target"]) for one in before.values())
        say(f"{len(sizes):,} files, {sum(sizes.values()):,} bytes, {links} symlinks")
        for item in made:
            say(f"  {item.what:<32}{item.where}")
    with _step("hibernate") as say:
        slept = cast("HibernateReport", hibernate(NAME))  # a report of a kept machine
        say(f"snapshot {slept.snapshot}")
        say(f"{slept.bytes:,} bytes, stored as {slept.total_stored_bytes:,}")
        say(_sealed(slept))
    with _step("machine 1") as say:
        for line in _gone(installation, first):
            say(line)
    with _step("wake") as say:
        woken = cast("WakeReport", wake(NAME))  # not a dry run
        second = list_machines(NAME)[0]
        say(f"{second.id}: {_server(second)}")
        say(f"{woken.bytes:,} bytes written; torpor has checked")
        say(woken.checked)
    with _step("compare") as say:
        after = inventory_of(home_of(installation, second) / "workspace")
        differing = differences(before, after)
        say("once more, by a walk of its own: SHA-256, kind, mode,")
        say("owner, mtime, extended attributes, links, holes")
    return _end(sizes, differing, slept, woken)


@contextmanager
def _store(installation: Installation) -> Iterator[EmbeddedStore]:
    with _step("object store") as say:
        access, secret = f"demo-{secrets.token_hex(4)}", secrets.token_urlsafe(24)
        ends = ending_with_this_process()
        store = EmbeddedStore.start(installation.store, access, secret, BUCKET, ends)
        say(f"SeaweedFS, S3 on {store.endpoint_url}")
    with store:
        yield store


def save_blocks(installation: Installation, store: EmbeddedStore) -> None:
    """Save the blocks that a user fills in by hand for a bucket and machines of their own."""
    MinIOCredentials(
        minio_root_user=store.access_key, minio_root_password=SecretStr(store.secret_key)
    ).save(NAME)
    ObjectStore(
        flavour="seaweedfs",
        bucket=BUCKET,
        endpoint_url=store.endpoint_url,
        credentials=f"minio-credentials/{NAME}",
        encryption_key=ObjectStore.new_encryption_key(),
    ).save(NAME)
    SSHIdentity.generate().save(NAME)
    LocalProvider(folder=str(installation.machines), price_usd_h=PRICE_USD_H).save(NAME)
    Workspace(
        name=NAME,
        paths=["~/workspace"],
        store=NAME,
        provider=f"local-provider/{NAME}",
        identity=NAME,
    ).save(NAME)


def home_of(installation: Installation, machine: Machine) -> Path:
    """The home folder of a local machine's user."""
    if machine.label is None:
        raise TorporError(f"machine {machine.id} came without a label")
    return folder_of(installation.machines, machine.label).home


def _gone(installation: Installation, machine: Machine) -> Iterator[str]:
    """Raise TorporError if anything is left of a machine."""
    home, endpoint = home_of(installation, machine), machine.endpoint
    if endpoint is None or _answers(endpoint) or home.parent.exists() or list_machines(NAME):
        raise TorporError(f"machine {machine.id} should be gone, and something of it is left")
    yield f"destroyed: not listed, no folder, port {endpoint.port} is closed"


def _answers(endpoint: Endpoint) -> bool:
    try:
        socket.create_connection((endpoint.host, endpoint.port), timeout=5).close()
    except OSError:
        return False
    return True


def _end(
    sizes: dict[str, int], differing: list[str], slept: HibernateReport, woken: WakeReport
) -> int:
    if differing:
        print(f"\nThe woken workspace is NOT identical, in {len(differing)} points:")
        for line in differing[:SHOWN_DIFFERENCES]:
            print(f"  {line}")
        return 1
    print(
        "\nThe woken workspace is identical, every byte and every attribute.\n"
        f"  {'files':<{_LABEL_WIDTH}}{len(sizes):,}\n"
        f"  {'bytes':<{_LABEL_WIDTH}}{sum(sizes.values()):,}\n"
        f"  {'stored bytes':<{_LABEL_WIDTH}}{slept.total_stored_bytes:,}, ratio {slept.ratio:.2f}\n"
        f"  {'hibernate':<{_LABEL_WIDTH}}{_phases(slept.seconds)}\n"
        f"  {'wake':<{_LABEL_WIDTH}}{_phases(woken.seconds)}"
    )
    return 0


def _phases(seconds: Mapping[str, float]) -> str:
    each = ", ".join(f"{name} {value:.1f}" for name, value in seconds.items())
    whole = f"{sum(seconds.values()):.1f} s: {each}"
    beside = "\n" + " " * (_LABEL_WIDTH + 2)
    return beside.join(textwrap.wrap(whole, _COLUMNS - _LABEL_WIDTH - 2))


def _sealed(report: HibernateReport) -> str:
    return "encrypted with AES-256-GCM" if report.sealed else "not encrypted"


def _server(machine: Machine) -> str:
    where = machine.endpoint
    return "no address" if where is None else f"ssh {where.user}@{where.host} -p {where.port}"


class _Step(Waiting):
    """One step of the output: its name, its lines, and its seconds. A terminal shows meanwhile what
    goes on."""

    def __init__(self, name: str) -> None:
        super().__init__("", sys.stdout)
        self._name = f"{name:<{_LABEL_WIDTH}}"
        self._lines: list[str] = []
        print(self._name, end="", flush=True)

    def __call__(self, line: str) -> None:
        self._lines.append(line)

    def line(self, took_s: float) -> str:
        return f"{self._name}{f'{took_s:.0f} s':>7}  {self.words}"

    def begins(self, thing: str, words: str) -> None:
        self.words = short(words)

    def ends(self, thing: str) -> None:
        self.words = ""

    def moves(self, what: str, done_bytes: int, total_bytes: int) -> None:
        self.words = f"{what}: {done_bytes / 1e6:.0f} of {total_bytes / 1e6:.0f} MB"

    def prints(self, text: str) -> None:
        """Does nothing: no command runs in the demo."""

    def close(self, seconds: float) -> None:
        first, *others = self._lines
        name = f"{CLEARED}{self._name}" if rewrites(sys.stdout) else ""
        print(f"{name}{f'{seconds:.1f} s':>7}  {first}")
        for line in others:
            print(f"{'':<{_LABEL_WIDTH + 9}}{line}", flush=True)


@contextmanager
def _step(name: str) -> Iterator[_Step]:
    """Print the step's name; time what runs inside and print it at the end."""
    step = _Step(name)
    began = time.monotonic()
    try:
        with step, followed_by(step):
            yield step
    except BaseException:
        print("failed", flush=True)
        raise
    step.close(time.monotonic() - began)


if __name__ == "__main__":
    sys.exit(main())
