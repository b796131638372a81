"""What torpor asks of a market: `Provider`, and what only some can do beside that."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final, Literal, Protocol, runtime_checkable

import msgspec

from torpor.control.providers.offers import Offer
from torpor.control.safety import Warrant
from torpor.shared.errors import UnsafeDestroy
from torpor.shared.values import RESERVED, Label, Machine, MachineId, Want
from torpor.shared.wire.job import NoticeSource

Checkpoint = Literal["claimed", "no", "unknown"]


class Abilities(msgspec.Struct, frozen=True, kw_only=True):
    """What every machine of a provider is, and what the provider's API can do."""

    kind: Literal["vm", "container", "pod", "folder"]
    privileged: bool  # root that may load kernel modules and dump processes
    host_key: Literal["installed", "stated", "first use"]
    """``installed``: the machine shows ``Order.host_key``. ``stated``: the API says which key, in
    ``Machine.endpoint``. ``first use``: the key of the first login is pinned."""
    idempotency: Literal["token", "name", "lookup"]
    """How a repeated create is known: by the provider, or by looking for the label first, which
    misses a machine that is not listed yet."""
    settling_s: float  # how long after a create a machine may be missing from answers
    forgets_s: float | None = None
    """Seconds for which the market says at least that a machine has ended. Later it may not know
    the machine, so that repeated absences must do. None: it proves each end for ever."""
    ready_s: float  # an attempt whose SSH does not answer by then is given up
    address_s: float | None = None
    """Seconds that a machine may run without an address for SSH before an attempt is given up.
    None: as long as it may start."""
    poll_s: float = 0.0
    """Seconds to wait at least between two questions about a machine that starts, where the market
    limits requests."""
    queue_s: float = 0.0  # how long it may wait in the provider's queue before that
    stop_keeps: Literal["nothing", "disk", "volume"]
    restarts: bool = False
    """Whether ``Restarts.start`` can start a machine that was stopped with its disk kept."""
    stopped_usd_gib_month: float | None  # USD per GiB and month of the kept disk; None: not stated
    min_disk_gib: float
    billing_s: float  # seconds to which the bill is rounded up
    ending_s: float = 0.0
    """Seconds that an accepted destroy may take, and is billed, where that is hours."""
    notice_s: float | None  # the warning before a spot machine is taken; None: none
    notices: tuple[NoticeSource, ...] = ()
    """Where a machine itself can ask for that warning. Otherwise only the provider's state shows
    that a machine was taken."""
    deadline_s: float | None = None
    """Seconds that a machine runs until it is stopped, with its disk kept, unless
    ``Deadlines.renew`` is called meanwhile; None: it runs until somebody ends it."""
    ends_machines: Literal["", "the market", "the machine"] = ""
    """What ends a machine for good after ``Order.lifetime_s``. ``the machine``: its start script,
    once that runs, with the key to itself that the market gives it. Empty: nothing."""
    private_network: bool = False
    """Whether machines of one region reach each other, at every port, at the address of their own
    network interface."""
    images: bool = True  # whether ``Order.image`` can be chosen
    adopts: Literal["", "marked", "by record"] = ""
    """How a machine that its user rented is shown as ours once it was adopted. ``marked``: the
    market keeps our label. ``by record``: the market cannot be told, so each run calls
    ``Adopts.mark`` with what the records say. Empty: it cannot be adopted."""
    not_adopted: str = "its adapter cannot mark a machine"
    """Why a machine cannot be adopted: the end of a message."""
    many_owners: bool = False
    """Whether hosts may belong to owners for whom the market does not vouch. What such a machine
    has made is used by its own workspace only."""
    tried: bool = False  # whether the adapter was tried on the live service, not only on a fake

    @property
    def checkpoint(self) -> Checkpoint:
        """Whether processes can be frozen and stored there, as far as its kind tells: that takes
        root which may load modules and dump processes. Only a try on a machine proves it."""
        if self.privileged:
            return "claimed"
        return "unknown" if self.kind in ("vm", "folder") else "no"


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """The account that pays, as ``check`` was told."""

    name: str
    balance_usd: float | None = None  # None: not stated
    notes: list[str] = []  # quotas and what else a person may want to know


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One machine that is asked for, in one attempt."""

    offer: Offer
    label: Label
    public_key: str  # the OpenSSH line that may log in
    host_key: str  # an OpenSSH private key, which the machine shows where abilities allow it
    jump_host_key: str
    """An OpenSSH private key for the jump host that a provider may put before all machines of this
    ``public_key``."""
    image: str = ""  # empty: the provider's default
    disk_gib: float = 0
    bid_usd_h: float | None = None  # the most to pay for spot; None: the offer's price
    cuda: tuple[int, int] | None = None  # the driver must support at least this
    lifetime_s: float | None = None
    """Seconds that a machine which never holds work may live, where ``abilities.ends_machines``
    says that something ends it."""

    def __post_init__(self) -> None:
        if self.lifetime_s is not None and not self.label.workspace.startswith(RESERVED):
            raise UnsafeDestroy(
                f"a machine of workspace {self.label.workspace} may hold work: only one under a "
                "reserved name may be ordered with a lifetime"
            )

    @property
    def token(self) -> str:
        """32 hexadecimal digits, for idempotency tokens and unique names."""
        told = msgspec.json.encode([self.label.owner, self.label.workspace, self.label.rental])
        return hashlib.blake2b(told, digest_size=16).hexdigest()

    def __repr__(self) -> str:
        """Without the host keys, which are secrets."""
        return f"Order({self.offer.id} at {self.offer.provider} for {self.label})"


class Absent(msgspec.Struct, frozen=True):
    """The provider does not show a machine. ``proof``: the words that prove its end; empty: it may
    exist all the same, or appear later."""

    proof: str = ""


LeftKind = Literal["disk", "address", "service", "invoice", "node", "script", "key"]


FREE: Final[tuple[LeftKind, ...]] = ("script", "key")
"""Kinds of residue that cost nothing where they are left."""


class Residue(msgspec.Struct, frozen=True, kw_only=True):
    """What outlives a machine and still costs money: a disk, an address, a service, an invoice,
    a node. A start script and a key cost nothing."""

    id: str
    provider: str
    kind: LeftKind
    label: Label | None
    price_usd_h: float | None = None  # None: not stated


class Provider(Protocol):
    """A market that rents machines.

    Any method raises ProviderDenied, ProviderUnavailable, or UnexpectedAnswer for a shape that is
    not known. Each bounds its own time and retries what is safe to repeat. Nothing here touches a
    machine without our label. Thread-safe.
    """

    @property
    def identity(self) -> str:
        """Which account this is, without asking anybody; it stands in every Machine and is compared
        before a destroy."""

    @property
    def abilities(self) -> Abilities:
        """What the provider can do; constant."""

    def check(self, image: str = "") -> Account:
        """Look, before anything is rented, whether machines can be: login, balance, permission, and
        whether a machine of ``image`` gets Python and SSH. Else ProviderDenied or InvalidInput."""

    def offers(self, want: Want) -> list[Offer]:
        """What is on sale, at least everything that fits ``want`` (see ``misfit``), with the price
        of everything for its disk; may be empty. ``want`` may narrow the search."""

    def create(self, order: Order) -> Machine:
        """Rent; returns at once, perhaps in state "starting" or "queued".

        CreateFailed and its kinds, ProviderDenied, ProviderUnavailable and InvalidInput promise
        that nothing was rented, also later. Any other error means that a machine may exist or
        appear: CreateUncertain where the answer was lost. A second call with the same order returns
        the first one's machine, as far as ``abilities.idempotency`` allows.
        """

    def find(self, machine: MachineId) -> Machine | Absent:
        """The live truth about one machine. A machine that has ended for good is Absent with the
        proof; one that the API does not show, without."""

    def list_own(self) -> list[Machine]:
        """Every machine that carries a label of ours, in any state, but none that ``find`` proves
        absent. All pages of it. MachineUnread, with the machines that can be read, where a further
        one may be ours: ``create`` raises it too, and has rented nothing then."""

    def destroy(self, machine: Machine, warrant: Warrant) -> None:
        """End the rent of the machine, then what was rented with it, by its label.

        Checks ``warrant`` and the live label first (UnsafeDestroy, NotOurs); of a machine that is
        absent, with ``warrant.check_label``. Returns at once; call again until ``find`` has the
        proof and ``residue`` nothing of this label.
        """

    def residue(self) -> list[Residue]:
        """The residue of machines with torpor's label that still costs money: disks, addresses,
        services, invoices and nodes."""


@runtime_checkable
class Claims(Protocol):
    """A provider that may have its identity from its block alone: nobody can tell whether the
    account behind its key ever had the machines that are on record under that name."""

    @property
    def claimed(self) -> bool: ...


@runtime_checkable
class Prices(Protocol):
    """What a provider can also do whose spot prices change while a machine runs."""

    def rise_usd_h(self, offer: str, begin_unix: float, end_unix: float) -> float:
        """By how much the mean price of an hour of this offer was above the one at the begin;
        negative where it fell."""


@runtime_checkable
class Deadlines(Protocol):
    """What a provider with ``abilities.deadline_s`` can also do."""

    def renew(self, machine: Machine) -> None:
        """Let a machine of ours that runs go on for ``deadline_s`` from now, where less than most
        of it is left. NotOurs for a machine that has another label."""


@runtime_checkable
class Adopts(Protocol):
    """What a provider with ``abilities.adopts`` can also do."""

    def mark(self, machine: Machine, label: Label | None) -> None:
        """Show the machine under ``label`` from now on, as one that torpor rented; None: as one
        that is not ours. NotOurs, and nothing is changed, where it shows neither ``label`` nor the
        label of ``machine``. May be repeated."""


@runtime_checkable
class Restarts(Protocol):
    """What a provider with ``abilities.restarts`` can also do."""

    def start(self, machine: Machine) -> None:
        """Ask for the start of a machine of ours that is stopped, with its disk as it was; ``find``
        shows whether it runs. May be repeated. NoCapacity where the market has no room for it now,
        NotOurs for a machine that has another label."""


@runtime_checkable
class MountsVolumes(Protocol):
    """A provider whose block mounts volumes of the user's into each machine."""

    @property
    def volumes(self) -> Sequence[str]:
        """Where volumes are mounted, as tidy absolute paths. What is on them outlives the machine,
        and torpor leaves it alone."""


def volumes_of(provider: Provider) -> Sequence[str]:
    """Where the provider's machines have volumes; none at most providers."""
    return provider.volumes if isinstance(provider, MountsVolumes) else ()
