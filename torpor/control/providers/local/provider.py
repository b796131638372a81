"""The embedded provider: each machine is an SSH server on loopback with a home of its own.

It stands in for a rented machine in the demo, the tests and on a workstation. Separation is by
convention, not by walls: sessions run as the same account, on the same file system.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import pwd
import re
import shutil
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import asyncssh
import msgspec

from torpor.control.processes import end_processes
from torpor.control.providers.checks import check_request
from torpor.control.providers.gpus import parse_gpu
from torpor.control.providers.local.folder import (
    MARK,
    MachineFolder,
    MachineRecord,
    folder_of,
    folders_in,
    name_of_id,
    new_machine_id,
    write_whole,
)
from torpor.control.providers.local.lock import held, sweep
from torpor.control.providers.local.server import (
    last_words,
    machine_processes,
    serve,
    server_lives,
)
from torpor.control.providers.nvidia import gpus_here
from torpor.control.providers.offers import Offer
from torpor.control.providers.provider import Abilities, Absent, Account, Order, Residue
from torpor.control.providers.removal import remove_tree
from torpor.control.safety import Warrant
from torpor.shared.errors import CreateFailed, InvalidInput, NotOurs, ProviderError, UnsafeDestroy
from torpor.shared.values import GIB, Endpoint, Label, Machine, MachineId, Want
from torpor.shared.wire.job import NoticeSource

_LOCK_S = 120.0  # seconds; a destroy that holds the lock may remove a big home
_log = logging.getLogger(__name__)


class LocalProvider:
    """Machines below ``folder``. See ``providers.provider.Provider`` for the contract.

    A machine whose server died is "stopped"; ``create`` with its label starts the server again.
    """

    abilities: Abilities = Abilities(
        kind="folder",
        privileged=False,
        host_key="installed",
        idempotency="token",
        settling_s=0.0,
        ready_s=300.0,
        stop_keeps="disk",
        stopped_usd_gib_month=0.0,
        min_disk_gib=0.0,
        billing_s=1.0,
        notice_s=None,
        private_network=True,  # the host's own
        images=False,
        not_adopted="its machines are folders of this host that torpor made. For a host of your "
        "own, use `torpor hibernate --machine user@host --keep`",
        tried=True,
    )

    def __init__(
        self, folder: Path, *, price_usd_h: float = 0.0, notices: Sequence[NoticeSource] = ()
    ) -> None:
        """``notices``: servers that play a market's metadata service."""
        self._folder = Path(folder).expanduser().resolve()
        self._host = socket.gethostname()  # another host may have a folder of the same path
        self._price_usd_h = price_usd_h
        if notices:
            self.abilities = msgspec.structs.replace(
                self.abilities, notice_s=0.0, notices=tuple(notices)
            )

    @property
    def identity(self) -> str:
        return f"local://{self._host}{self._folder}"

    def home(self, label: Label) -> Path:
        """The home folder of the machine of this label, as one sees it after logging in."""
        return folder_of(self._folder, label).home

    def check(self, image: str = "") -> Account:
        if image:
            raise InvalidInput(
                f"{self.identity} has no images, its machines are this host: leave the image empty"
            )
        self._free_gib()
        return Account(name=self.identity)

    def offers(self, want: Want) -> list[Offer]:
        """This host, without its GPUs and once for each model of them."""
        free_gib = self._free_gib()
        on_sale: list[tuple[str, str, int]] = [("local-cpu", "", 0)]
        for model, count in gpus_here():
            slug = "-".join(re.findall(r"[a-z0-9]+", model.lower()))
            on_sale.append((f"local-{slug}", model, count))
        return [
            Offer(
                id=id,
                provider=self.identity,
                gpu=parse_gpu(model),
                gpu_count=count,
                price_usd_h=self._price_usd_h,
                region="localhost",
                disk_gib=free_gib,
                domain=self.identity,
                priced_unix=time.time(),
                architecture=platform.machine(),
                cores=os.cpu_count(),
            )
            for id, model, count in on_sale
        ]

    def create(self, order: Order) -> Machine:
        """Returns once the server listens, so in state "running"."""
        offer, label = order.offer, order.label
        if offer.provider != self.identity:
            raise CreateFailed(f"offer {offer.id} is of {offer.provider}, this is {self.identity}")
        keys = _public_key(order.public_key), _host_key(order.host_key)
        folder = folder_of(self._folder, label)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            sweep(self._folder)
            with held(folder.lock, timeout_s=_LOCK_S):
                return self._create(folder, offer, label, *keys)
        except OSError as cause:
            raise CreateFailed(f"no machine could be made in {folder.root}: {cause}") from cause
        except NotOurs as cause:
            raise CreateFailed(
                f"no machine could be made for rental {label.rental}: {cause}"
            ) from cause

    def find(self, machine: MachineId) -> Machine | Absent:
        """A folder of machines that is missing as a whole may be on a disk that is not mounted."""
        folder = self._machine_folder(machine)
        there = self._folder.is_dir()
        absent = Absent(f"{self._folder} has no folder of machine {machine}" if there else "")
        if folder is None:
            return absent
        try:
            _go_on_starting(folder)
            record = folder.read_machine()
            if record is None or record.id != machine:
                return absent
            return self._describe(folder, record)
        except NotOurs as cause:
            return Machine(machine, self.identity, None, "stopped", None, note=str(cause))
        except OSError as cause:
            raise self._unreadable(cause) from cause

    def list_own(self) -> list[Machine]:
        """Damaged ones are no machines of ours: they are named in the log and left alone."""
        try:
            looked = [self._look(folder) for folder in folders_in(self._folder)]
        except OSError as cause:
            raise self._unreadable(cause) from cause
        return [machine for machine in looked if machine is not None]

    def destroy(self, machine: Machine, warrant: Warrant) -> None:
        """Returns when the machine's processes and its folder are gone."""
        check_request(self.identity, machine, warrant)
        folder = self._machine_folder(machine.id)
        if folder is None or not self._folder.is_dir():
            return
        try:
            sweep(self._folder)
            with held(folder.lock, timeout_s=_LOCK_S):
                live = self.find(machine.id)
                if isinstance(live, Absent):
                    return
                warrant.check(live)
                if os.environ.get(MARK) == machine.id:
                    raise UnsafeDestroy(
                        f"this process runs on machine {machine.id} itself: destroy it from outside"
                    )
                _end(folder, machine.id)
        except OSError as cause:
            raise ProviderError(
                f"machine {machine.id} is not removed yet, {folder.root} is still there: {cause}; "
                "mend that and destroy it again"
            ) from cause

    def residue(self) -> list[Residue]:
        """None: a machine goes with its folder, and ``sweep`` clears what was killed half-way."""
        return []

    def _free_gib(self) -> float:
        try:
            return shutil.disk_usage(_existing(self._folder)).free / GIB
        except OSError as cause:
            raise self._unreadable(cause) from cause

    def _unreadable(self, cause: OSError) -> ProviderError:
        return ProviderError(
            f"the folder of the local machines, {self._folder}, cannot be read: {cause}; what "
            "machines there are is unknown until it can"
        )

    def _look(self, folder: MachineFolder) -> Machine | None:
        if folder.destroying.exists():
            _go_on_ending(folder)
        try:
            _go_on_starting(folder)
            record = folder.read_machine()
        except NotOurs as cause:
            _log.warning("%s", cause)
            return None
        return None if record is None else self._describe(folder, record)

    def _machine_folder(self, machine: MachineId) -> MachineFolder | None:
        name = name_of_id(machine)
        return None if name is None else MachineFolder(self._folder / name)

    def _create(
        self,
        folder: MachineFolder,
        offer: Offer,
        label: Label,
        key: str,
        host_key: asyncssh.SSHKey,
    ) -> Machine:
        record = folder.read_machine()
        fresh = record is None
        if record is None:
            record = self._lay_out(folder, offer, label, key, host_key)
        elif record.label != label:
            raise NotOurs(f"{folder.root} is of another label, {record.label}")
        elif folder.destroying.exists():
            raise CreateFailed(
                f"machine {record.id} of this rental is being destroyed; destroy it again until "
                "it is gone, or begin a new rental"
            )
        elif folder.authorized_keys.read_text() != key:
            raise CreateFailed(
                f"machine {record.id} of this rental was made for another SSH key; use that key "
                "or begin a new rental"
            )
        try:
            serve(folder, record)
        except (CreateFailed, OSError):
            if fresh:
                # It never listened, so nobody has ever been on it.
                _end(folder, record.id)
            raise
        return self._describe(folder, record)

    def _lay_out(
        self,
        folder: MachineFolder,
        offer: Offer,
        label: Label,
        key: str,
        host_key: asyncssh.SSHKey,
    ) -> MachineRecord:
        """Make the folder under another name; the last step names it, whole."""
        new = MachineFolder(folder.new)
        remove_tree(new.root)
        record = MachineRecord(
            version=1,
            id=new_machine_id(label),
            label=label,
            offer=offer.id,
            price_usd_h=offer.price_usd_h,
            server="asyncssh",
            user=_user(),
            host_key=host_key.export_public_key().decode().strip(),
            created_unix=time.time(),
        )
        new.root.mkdir(mode=0o700)
        new.home.mkdir(mode=0o700)
        write_whole(new.host_key, host_key.export_private_key())
        write_whole(new.authorized_keys, key.encode())
        write_whole(new.machine_json, msgspec.json.encode(record))
        new.root.rename(folder.root)
        return record

    def _describe(self, folder: MachineFolder, record: MachineRecord) -> Machine:
        server = folder.read_server()
        state: Literal["starting", "running", "stopped", "stopping"]
        note = ""
        endpoint = None
        if folder.destroying.exists():
            state = "stopping"
        elif server is None:
            state = "starting"
        elif server_lives(server):
            state = "running"
            endpoint = Endpoint("127.0.0.1", server.port, record.user, record.host_key)
        else:
            state = "stopped"
            note = f"its SSH server died; last words: {last_words(folder)}"
        return Machine(
            record.id, self.identity, record.label, state, endpoint, record.price_usd_h, note
        )


def _go_on_ending(folder: MachineFolder) -> None:
    """Continue to end a machine whose end was begun, also when the caller that began it is gone."""
    with (
        contextlib.suppress(ProviderError, OSError),  # its destroyer lives; or it stays "stopping"
        held(folder.lock, timeout_s=0),
    ):
        record = folder.read_machine()
        here = record is not None and os.environ.get(MARK) == record.id
        if record is not None and folder.destroying.exists() and not here:
            _end(folder, record.id)


def _go_on_starting(folder: MachineFolder) -> None:
    """Start a machine that was asked for, also when its creator was killed."""
    if folder.served.exists() or folder.destroying.exists() or not folder.machine_json.exists():
        return
    with (
        contextlib.suppress(ProviderError, OSError),  # its creator lives; or it stays "starting"
        held(folder.lock, timeout_s=0),
    ):
        record = folder.read_machine()
        if record is not None and not folder.destroying.exists():
            serve(folder, record)


def _end(folder: MachineFolder, machine: MachineId) -> None:
    """End the machine's processes, then its folder; killed anywhere, a repeat goes on.

    The records go last, in one step: until then the machine is listed as "stopping".
    """
    folder.destroying.touch(mode=0o600)
    end_processes(lambda: machine_processes(folder, machine))
    remove_tree(folder.home)
    remove_tree(folder.new)
    folder.root.rename(folder.new)
    remove_tree(folder.new)


def _public_key(line: str) -> str:
    """The line for authorized_keys, without its comment; InvalidInput where it is no key."""
    if len(line.splitlines()) > 1:
        raise InvalidInput("a machine has one SSH key: give one public key, on one line")
    try:
        key = asyncssh.import_public_key(line)
    except asyncssh.KeyImportError as cause:
        raise InvalidInput(f"this is not an OpenSSH public key ({cause}): {line[:40]!r}") from cause
    key.set_comment(None)
    return key.export_public_key().decode()


def _host_key(text: str) -> asyncssh.SSHKey:
    try:
        return asyncssh.import_private_key(text)
    except asyncssh.KeyImportError:
        raise InvalidInput("the host key of an order is no OpenSSH private key") from None


def _user() -> str:
    """The name of the account that sessions run as, whatever the environment claims."""
    uid = os.geteuid()
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid-{uid}"


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder
