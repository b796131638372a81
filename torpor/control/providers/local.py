"""The embedded provider: each machine is an SSH server on loopback with a home of its own.

It stands in for a rented machine in the demo, the tests and on a workstation. Separation is by
convention, not by walls: sessions run as the same account, on the same file system.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pwd
import re
import shutil
import socket
import time
from pathlib import Path
from typing import Final, Literal

import msgspec
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from torpor.control.providers import openssh_host
from torpor.control.providers.local_lock import held
from torpor.control.providers.local_place import (
    MachineRecord,
    Place,
    name_of_id,
    new_machine_id,
    place_of,
    places_in,
    write_whole,
)
from torpor.control.providers.local_processes import (
    MARK,
    boot_id,
    end_processes,
    machine_processes,
)
from torpor.control.providers.local_server import log_words, serve, server_lives
from torpor.control.providers.local_sweep import sweep
from torpor.control.providers.nvidia import gpus_here, is_model
from torpor.control.providers.removal import remove_contents, remove_tree
from torpor.control.safety import Warrant
from torpor.shared.errors import CreateFailed, InvalidInput, NotOurs, ProviderError, UnsafeDestroy
from torpor.shared.values import GIB, Endpoint, Label, Machine, MachineId, Offer, Want

ServerKind = Literal["openssh", "asyncssh"]

_LOCK_S = 120.0  # a destroy that holds the lock may remove a big home
# These would end a quoted word in sshd_config or begin one of its tokens.
_UNQUOTABLE = re.compile(r"[\x00-\x1f\x7f\"'\\%]")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}\$?")

_log = logging.getLogger(__name__)


class LocalProvider:
    """Machines below ``folder``. See ``torpor.control.providers.seam.Provider`` for the contract.

    ``server`` "auto" takes OpenSSH's sshd where it can serve this account, else asyncssh.
    A machine whose server died is "stopped"; ``create`` with its label starts the server again.
    """

    kind: Final = "local"

    def __init__(
        self,
        folder: Path,
        *,
        server: Literal["auto", "openssh", "asyncssh"] = "auto",
        price_usd_h: float = 0.0,
    ) -> None:
        self._folder = Path(folder).expanduser().resolve()
        if _UNQUOTABLE.search(str(self._folder)):
            raise InvalidInput(
                f"{str(self._folder)!r} cannot hold local machines: use a folder whose path has no "
                "quotes, backslashes, percent signs or control characters"
            )
        self._host = socket.gethostname()  # another host may have a folder of the same path
        self._server = server
        self._price_usd_h = price_usd_h

    @property
    def identity(self) -> str:
        return f"local://{self._host}{self._folder}"

    def home(self, label: Label) -> Path:
        """The home folder of the machine of this label, as one sees it after logging in."""
        return place_of(self._folder, label).home

    def offers(self, want: Want) -> list[Offer]:
        """This host, without its GPUs and once for each model of them, where its disk suffices."""
        try:
            free_gib = shutil.disk_usage(_existing(self._folder)).free / GIB
        except OSError as cause:
            raise self._unreadable(cause) from cause
        limit = want.max_price_usd_h
        if free_gib < want.disk_gib or (limit is not None and self._price_usd_h > limit):
            return []
        on_sale: list[tuple[str, str | None, int]] = [("local-cpu", None, 0)]
        for model, count in gpus_here():
            slug = "-".join(re.findall(r"[a-z0-9]+", model.lower()))
            on_sale.append((f"local-{slug}", model, count))
        return [
            Offer(id, self.identity, model, count, self._price_usd_h, "localhost", free_gib)
            for id, model, count in on_sale
            if want.gpu is None
            or (model is not None and count >= want.gpu_count and is_model(want.gpu, model))
        ]

    def create(self, offer: Offer, label: Label, ssh_public_key: str) -> Machine:
        """Returns once the server listens, so in state "running"."""
        if offer.provider != self.identity:
            raise CreateFailed(f"offer {offer.id} is of {offer.provider}, this is {self.identity}")
        key = _public_key(ssh_public_key)
        place = place_of(self._folder, label)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            sweep(self._folder)
            with held(place.lock, timeout_s=_LOCK_S):
                return self._create(place, offer, label, key)
        except OSError as cause:
            raise CreateFailed(f"no machine could be made in {place.root}: {cause}") from cause
        except NotOurs as cause:
            raise CreateFailed(f"no machine could be made for lease {label.lease}: {cause}") from (
                cause
            )

    def find(self, machine: MachineId) -> Machine | None:
        place = self._place(machine)
        if place is None:
            return None
        try:
            record = place.read_machine()
            if record is None or record.id != machine:
                return None
            return self._describe(place, record)
        except NotOurs as cause:
            return Machine(machine, self.identity, None, "stopped", None, note=str(cause))
        except OSError as cause:
            raise self._unreadable(cause) from cause

    def list_own(self) -> list[Machine]:
        """Damaged ones are no machines of ours: they are named in the log and left alone."""
        try:
            looked = [self._look(place) for place in places_in(self._folder)]
        except OSError as cause:
            raise self._unreadable(cause) from cause
        return [machine for machine in looked if machine is not None]

    def destroy(self, machine: Machine, warrant: Warrant) -> None:
        """Returns when the machine's processes and its folder are gone."""
        if type(warrant) is not Warrant:
            raise UnsafeDestroy(
                f"machine {machine.id} was to be destroyed with a {type(warrant).__name__} that "
                "torpor.control.safety did not make: nothing was destroyed"
            )
        if machine.provider != self.identity:
            raise UnsafeDestroy(
                f"machine {machine.id} is at {machine.provider}, this is {self.identity}: nothing "
                "was destroyed"
            )
        place = self._place(machine.id)
        if place is None or not self._folder.is_dir():
            return
        try:
            sweep(self._folder)
            with held(place.lock, timeout_s=_LOCK_S):
                live = self.find(machine.id)
                if live is None:
                    return
                warrant.check(live)
                if os.environ.get(MARK) == machine.id:
                    raise UnsafeDestroy(
                        f"this process runs on machine {machine.id} itself: destroy it from outside"
                    )
                _end(place, machine.id)
        except OSError as cause:
            raise ProviderError(
                f"machine {machine.id} is not removed yet, {place.root} is still there: {cause}; "
                "mend that and destroy it again"
            ) from cause

    def _unreadable(self, cause: OSError) -> ProviderError:
        return ProviderError(
            f"the folder of the local machines, {self._folder}, cannot be read: {cause}; what "
            "machines there are is unknown until it can"
        )

    def _look(self, place: Place) -> Machine | None:
        if place.destroying.exists():
            _go_on_ending(place)
        try:
            record = place.read_machine()
        except NotOurs as cause:
            _log.warning("%s", cause)
            return None
        return None if record is None else self._describe(place, record)

    def _place(self, machine: MachineId) -> Place | None:
        name = name_of_id(machine)
        return None if name is None else Place(self._folder / name)

    def _create(self, place: Place, offer: Offer, label: Label, key: str) -> Machine:
        record = place.read_machine()
        fresh = record is None
        if record is None:
            record = self._lay_out(place, offer, label, key)
        elif record.label != label:
            raise NotOurs(f"{place.root} is of another label, {record.label}")
        elif place.destroying.exists():
            raise CreateFailed(
                f"machine {record.id} of this lease is being destroyed; destroy it again until it "
                "is gone, or take a new lease"
            )
        elif place.authorized_keys.read_text() != key:
            raise CreateFailed(
                f"machine {record.id} of this lease was made for another SSH key; use that key or "
                "take a new lease"
            )
        try:
            serve(place, record)
        except (CreateFailed, OSError):
            if fresh:
                # It never listened, so nobody has ever been on it.
                _end(place, record.id)
            raise
        return self._describe(place, record)

    def _lay_out(self, place: Place, offer: Offer, label: Label, key: str) -> MachineRecord:
        """Make the folder under another name; the last step names it, whole."""
        unborn = Place(place.unborn)
        remove_tree(unborn.root)
        remove_tree(place.remains)
        private, public = _new_host_key()
        record = MachineRecord(
            version=1,
            id=new_machine_id(label),
            label=label,
            offer=offer.id,
            price_usd_h=offer.price_usd_h,
            server=self._choose_server(),
            user=_user(),
            host_key=public,
            created_unix=time.time(),
        )
        try:
            unborn.root.mkdir(mode=0o700)
            unborn.home.mkdir(mode=0o700)
            write_whole(unborn.host_key, private)
            write_whole(unborn.authorized_keys, key.encode())
            write_whole(unborn.machine_json, msgspec.json.encode(record))
            unborn.root.rename(place.root)
        except OSError:
            with contextlib.suppress(OSError):
                remove_tree(unborn.root)
            raise
        return record

    def _choose_server(self) -> ServerKind:
        if self._server == "asyncssh":
            return "asyncssh"
        unfit = openssh_host.unfit()
        if unfit is None:
            return "openssh"
        if self._server == "openssh":
            raise CreateFailed(f"OpenSSH cannot serve local machines here: {unfit}")
        return "asyncssh"

    def _describe(self, place: Place, record: MachineRecord) -> Machine:
        server = place.read_server()
        state: Literal["starting", "running", "stopped", "stopping"]
        note = ""
        endpoint = None
        if place.destroying.exists():
            state = "stopping"
        elif server is None or server.process is None:
            state = "starting"
        elif server_lives(server):
            state = "running"
            endpoint = Endpoint("127.0.0.1", server.port, record.user, record.host_key)
        else:
            state = "stopped"
            note = f"its SSH server died; last words: {log_words(place, 0) or 'none'}"
        return Machine(
            record.id, self.identity, record.label, state, endpoint, record.price_usd_h, note
        )


def _go_on_ending(place: Place) -> None:
    """A rented machine whose end was begun goes on to end, also when who asked for it is gone."""
    with (
        contextlib.suppress(ProviderError, OSError),  # its destroyer lives; or it stays "stopping"
        held(place.lock, timeout_s=0),
    ):
        record = place.read_machine()
        here = record is not None and os.environ.get(MARK) == record.id
        if record is not None and place.destroying.exists() and not here:
            _end(place, record.id)


def _end(place: Place, machine: MachineId) -> None:
    """End the machine's processes, then its folder; killed anywhere, a repeat goes on.

    The records go last, in one step: until then the machine is listed as "stopping".
    """
    place.destroying.touch(mode=0o600)
    server = place.read_server()
    process = server.process if server is not None and server.boot == boot_id() else None
    end_processes(lambda: machine_processes(machine, place.log, process))
    remove_contents(place.root, keep=(place.machine_json.name, place.destroying.name))
    remove_tree(place.remains)
    place.root.rename(place.remains)
    remove_tree(place.remains)


def _new_host_key() -> tuple[bytes, str]:
    """A private key as OpenSSH keeps it, and its public line."""
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return private, public.decode()


def _public_key(line: str) -> str:
    """The line for authorized_keys, without its comment; InvalidInput where it is no key."""
    words = line.split()
    told = " ".join(words[:2])
    fault = "an OpenSSH public key is one line: type, key, comment"
    if len(words) >= 2 and "\n" not in line.strip():
        try:
            serialization.load_ssh_public_key(told.encode())
        except (ValueError, UnsupportedAlgorithm) as cause:
            fault = str(cause)
        else:
            return f"{told}\n"
    raise InvalidInput(f"this is not an OpenSSH public key ({fault}): {line[:40]!r}")


def _user() -> str:
    """The name of the account that sessions run as, whatever the environment claims."""
    uid = os.geteuid()
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid-{uid}"
    if not _USER.fullmatch(name):
        raise CreateFailed(f"an account named {name!r} cannot stand in an SSH server's settings")
    return name


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder
