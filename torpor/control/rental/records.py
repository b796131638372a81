"""The records of rentals, in the store beside the snapshots of their workspace.

``rentals/open/ID`` is written before a machine is asked for. When its end is proven, the record
moves to ``rentals/ended/ID`` and stays there as the history of what was spent.
``rentals/handed/ID`` is a copy of the record at the hand-over: where a store cannot refuse a late
write of an earlier state, that write does not undo the hand-over.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, Final, Literal

import msgspec

from torpor.control.providers.gpu_wishes import wishes_of
from torpor.control.providers.offers import Offer
from torpor.control.store.object_store import ObjectStore
from torpor.control.store.records import TRIES, Records, Unread, last_written, left_out
from torpor.shared.errors import (
    HandedOver,
    ObjectChanged,
    ObjectExists,
    StoreError,
    UnsafeDestroy,
)
from torpor.shared.values import (
    RESERVED,
    Label,
    Machine,
    MachineId,
    ObjectKey,
    SnapshotId,
    Want,
    WorkspaceName,
)

State = Literal["asked", "standing", "handed over", "abandoned", "ended"]

NEXT: Final[dict[State, tuple[State, ...]]] = {
    "asked": ("standing", "abandoned", "ended"),
    "standing": ("standing", "handed over", "abandoned", "ended"),
    "handed over": ("ended",),
    "abandoned": ("abandoned", "ended"),
    "ended": (),
}
"""The states that may follow each state. Repeating the same write is allowed, with three
exceptions: nothing is asked twice, only one run hands a machine over, and an ended rental stays
ended."""

_MOST_BYTES: Final = 64 * 1024
# most ended rentals that are read: failed attempts have no snapshot, and a search may make a few
_MOST_READ: Final = 20
_SAME_S: Final = 2e-6  # seconds within which two runs cannot hand one machine over
# seconds by which the clocks of the store and of a control side may differ
_CLOCKS_S: Final = 24 * 3600.0
OWN_HOST: Final = "local://"
"""The beginning of a local provider's identity. Local machines cost nothing."""


class Rental(msgspec.Struct, frozen=True, kw_only=True):
    """One machine that was asked for, from the request to its proven end."""

    label: Label
    provider: str
    state: State
    created_unix: float  # when it was asked for
    offer: str = ""
    gpu: str = ""
    gpu_count: int = 0
    region: str = ""
    spot: bool = False
    price_usd_h: float = 0.0
    # the most that an hour may cost while the price is unknown; 0: it is ``price_usd_h``
    most_usd_h: float = 0.0
    # of a spot machine: the price of the same machine on demand; 0: unknown
    on_demand_usd_h: float = 0.0
    machine: MachineId | None = None  # None: the provider has not named one
    host_key: str | None = None  # the only host key that its SSH server may show; None: not met yet
    seen_unix: float | None = None  # when the provider last showed the machine
    queued_unix: float | None = None  # when it was last seen in the provider's queue, at no cost
    handed_unix: float | None = None  # when it was handed over
    # of an abandoned rental: since when its provider has shown no machine
    unseen_unix: float | None = None
    absent_unix: tuple[float, ...] = ()  # times of the looks that missed it since ``seen_unix``
    ended_unix: float | None = None  # when the end was proven; it may have been earlier
    why: str = ""  # the reason of an abandoned rental, or the proof of an ended one
    # of a machine that ended or is ending: the snapshot with all that it held
    snapshot: SnapshotId | None = None
    project: str = ""  # the workspace's project when the machine was asked for
    job: str = ""  # the job that it was rented for, until the run of another job uses it
    # when SSH first answered; None: it has not, as far as is known
    answered_unix: float | None = None
    failed: bool = False  # the market made no machine on which SSH answers
    fetched_bytes: int = 0  # what its wake read from the store
    fetched_s: float = 0.0  # seconds that reading took
    starting: bool = False  # handed over, and the workspace's programs were not started yet
    # where its provider was told to mount disks that outlive the machine
    volumes: tuple[str, ...] = ()
    # the user rented the machine and torpor took it over: it always holds work
    adopted: bool = False
    version: int = 0  # counts its writes

    @property
    def measured(self) -> dict[str, float]:
        """What the rental's run has measured; written with the next change of state."""
        names = ("answered_unix", "price_usd_h", "fetched_bytes", "fetched_s")
        return {name: value for name in names if (value := getattr(self, name))}

    @property
    def bound_usd_h(self) -> float:
        """What an hour costs at most; 0 where no price is known."""
        return max(self.price_usd_h, self.most_usd_h)

    @property
    def unfinished(self) -> bool:
        """Whether the rental's run still works on it, or was killed."""
        return self.state in ("asked", "standing")

    def is_ending(self, machine: Machine) -> bool:
        """Whether the provider is carrying out an end that torpor asked for, of a machine whose
        work is stored."""
        return machine.state == "stopping" and self.snapshot is not None


class Rentals:
    """The rentals of one workspace in one store."""

    def __init__(self, store: ObjectStore, workspace: WorkspaceName) -> None:
        self._store = store
        self._records = Records(
            store, Rental, _MOST_BYTES, "check the machine that it may belong to"
        )
        self.workspace = workspace

    def through(self, way: Callable[[ObjectStore], ObjectStore]) -> Rentals:
        """These rentals, read through another wrapper of the store."""
        return Rentals(way(self._store), self.workspace)

    def new_label(self, owner: str) -> Label:
        """A label that no other attempt has."""
        return Label(owner, self.workspace, secrets.token_hex(8))

    def begin(
        self,
        label: Label,
        offer: Offer,
        host_key: str | None,
        project: str = "",
        job: str = "",
        volumes: Sequence[str] = (),
    ) -> Rental:
        """Record that a machine is about to be asked for, with the key that it must show."""
        rental = Rental(
            label=label,
            provider=offer.provider,
            state="asked",
            created_unix=time.time(),
            offer=offer.id,
            gpu=str(offer.gpu or ""),
            gpu_count=offer.gpu_count,
            region=offer.region,
            spot=offer.spot,
            price_usd_h=offer.price_usd_h,
            most_usd_h=offer.most_usd_h or 0.0,
            on_demand_usd_h=offer.on_demand_usd_h or 0.0,
            host_key=host_key,
            project=project,
            job=job,
            volumes=tuple(volumes),
        )
        self._records.create(self.key(label), rental)
        return rental

    def adopt(
        self,
        label: Label,
        machine: Machine,
        host_key: str,
        price_usd_h: float,
        project: str,
        want: Want,
    ) -> Rental:
        """Record a machine that its user rented. It is handed over from the first write on: there
        is no moment at which anything but a verified snapshot may end it. ``want``: the GPUs that
        it must show to be judged idle."""
        if label.workspace.startswith(RESERVED):
            raise UnsafeDestroy(f"no machine is adopted under the reserved name {label.workspace}")
        now_unix = time.time()
        gpus = min((wish.count for wish in wishes_of(want)), default=0)
        rental = Rental(
            label=label,
            provider=machine.provider,
            state="handed over",
            created_unix=now_unix,
            price_usd_h=price_usd_h,
            gpu=(want.gpu or "") if gpus else "",
            gpu_count=gpus,
            machine=machine.id,
            host_key=host_key,
            seen_unix=now_unix,
            handed_unix=now_unix,
            project=project,
            adopted=True,
        )
        self._records.create(self.key(label), rental)
        return rental

    def open(self, unread: Unread | None = None) -> list[Rental]:
        """Every rental that has not ended, at any provider. ``unread``: as in Records.read_each."""
        keys = [found.key for found in self._store.list(self._prefix("rentals/"))]
        ended = {rental_named(key) for key in keys if "/rentals/ended/" in key}
        handed = {rental_named(key) for key in keys if "/rentals/handed/" in key}
        names = [rental_named(key) for key in keys if "/rentals/open/" in key]
        rentals = []
        for name in names:
            with left_out(self._key("ended", name), unread):
                if name in ended and self.ended(name) is not None:
                    continue  # a name alone, which anybody may write, ends no rental
            with left_out(self._key("open", name), unread):
                found = self._read(name, handed=name in handed)
                if found is not None and found[0].state == "ended":
                    self._file(found[0])  # its run was killed half-way
                elif found is not None:
                    rentals.append(found[0])
        return rentals

    def history(self, since_unix: float = 0.0, unread: Unread | None = None) -> list[Rental]:
        """Every rental that has ended, at least those that ended after ``since_unix``. ``unread``:
        as in Records.read_each."""
        listed = self._store.list(self._prefix("rentals/ended/"))
        late = [stored.key for stored in listed if stored.modified_unix > since_unix - _CLOCKS_S]
        return self._records.read_each(late, unread)

    def since(self, since_unix: float = 0.0, unread: Unread | None = None) -> list[Rental]:
        """The rentals of ``open`` and of ``history``. Open ones are listed and read first, so that
        a rental which ends meanwhile, also between two pages of a listing, is not lost."""
        found = [*self.open(unread), *self.history(since_unix, unread)]
        return [*{rental.label: rental for rental in found}.values()]

    def last_stored(self) -> Rental | None:
        """The rental that ended last with its work in a snapshot; None if none of the newest ended
        ones has one."""
        last = last_written(self._store.list(self._prefix("rentals/ended/")), _MOST_READ)
        stored = [rental for rental in self._records.read_each(last) if rental.snapshot]
        return max(stored, key=lambda rental: rental.ended_unix or 0.0, default=None)

    def of(self, label: Label) -> Rental | None:
        """The rental of this label while it is open."""
        found = self._read(label.rental)
        return None if found is None or found[0].state == "ended" else found[0]

    def check_held(self, rental: Rental) -> None:
        """HandedOver where the user has given an adopted machine up meanwhile."""
        if rental.adopted and self.of(rental.label) is None:
            raise HandedOver(
                f"machine {rental.machine} was given up by its user meanwhile: it was left alone"
            )

    def ended(self, rental: str) -> Rental | None:
        """The rental of this id once it has ended."""
        found = self._records.read(self._key("ended", rental))
        return None if found is None else found[0]

    def change(self, rental: Rental, **changes: Any) -> Rental:
        """Write the stored record with ``changes``. HandedOver where another run has ended the
        rental, or has changed its state so that these changes are not allowed."""
        return self._change(rental, changes)

    def change_untaken(self, rental: Rental, **changes: Any) -> Rental:
        """As ``change``; HandedOver also where another run has written the record since it was
        ``rental``, because that run may use the machine."""
        return self._change(rental, changes, untaken=True)

    def _change(self, rental: Rental, changes: dict[str, Any], *, untaken: bool = False) -> Rental:
        label = rental.label
        if changes.get("state") == "handed over":
            changes["handed_unix"] = time.time()
        for _ in range(TRIES):
            found = self._read(label.rental)
            if found is None or found[0].state == "ended":
                raise self._taken(label, None)
            now, version = found
            if _is_written(now, changes):  # by this run, whose answer was lost
                then = now
            elif "state" in changes and changes["state"] not in NEXT[now.state]:
                raise self._taken(label, now)
            elif untaken and not _is_untaken(now, rental):
                raise HandedOver(
                    f"another run has written rental {label.rental} of workspace {self.workspace} "
                    "meanwhile, and may go on with its machine, which was left alone"
                )
            else:
                then = msgspec.structs.replace(now, version=now.version + 1, **changes)
                if then.state == "ended":
                    then = msgspec.structs.replace(then, ended_unix=time.time())
                try:
                    self._records.replace(self.key(label), then, version)
                except ObjectChanged:
                    continue  # another run's write came first: may this one still follow?
            if then.state == "ended":
                self._file(then)
            elif changes.get("state") == "handed over":
                self._records.put(self._key("handed", label.rental), then)
            return then
        raise self._records.contested(self.key(label))

    def pin(self, label: Label, host_key: str) -> None:
        """Record the host key of the first login."""
        rental = self.of(label)
        if rental is not None and rental.host_key is None:
            self.change(rental, host_key=host_key)

    def seen(self, rental: Rental) -> Rental:
        """Record that the provider shows the rental's machine now."""
        return self.change(rental, seen_unix=time.time(), absent_unix=())

    def check_unclaimed(self, label: Label) -> None:
        """HandedOver where another run has handed the machine over or ended it; StoreError if the
        store does not answer. A machine under a reserved name holds no work, and may always be
        ended."""
        if label.workspace.startswith(RESERVED):
            return
        try:
            now = self.of(label)
        except StoreError as error:
            raise type(error)(
                f"{error}. The machine of rental {label.rental} of workspace {self.workspace} may "
                "have been handed over, so torpor left it alone; reconcile lists it once the store "
                "answers"
            ) from error
        if now is None or now.state == "handed over":
            raise self._taken(label, now)

    def key(self, label: Label) -> ObjectKey:
        """Where the open rental of this label is kept."""
        return self._key("open", label.rental)

    def _taken(self, label: Label, now: Rental | None) -> HandedOver:
        done = "ended" if now is None else now.state
        return HandedOver(
            f"rental {label.rental} of workspace {self.workspace} was {done} by another run; its "
            "machine was left alone, and reconcile lists it"
        )

    def _file(self, rental: Rental) -> None:
        """Move the record of an ended rental to the history."""
        name = rental.label.rental
        with suppress(ObjectExists):  # another run has done it
            self._records.create(self._key("ended", name), rental)
        self._store.delete([self._key("open", name), self._key("handed", name)])

    def _read(self, name: str, *, handed: bool = True) -> tuple[Rental, str] | None:
        """The record that counts, and the version that a change replaces. ``handed``: whether the
        machine may have been handed over."""
        found = self._records.read(self._key("open", name))
        if found is not None and handed and found[0].state in ("asked", "standing", "abandoned"):
            over = self._records.read(self._key("handed", name))
            if over is not None:  # a write that arrived late
                return over[0], found[1]
        return found

    def _prefix(self, rest: str) -> str:
        return f"workspaces/{self.workspace}/{rest}"

    def _key(self, kind: Literal["open", "handed", "ended"], rental: str) -> ObjectKey:
        return ObjectKey(self._prefix(f"rentals/{kind}/{rental}"))


def _is_written(now: Rental, changes: dict[str, Any]) -> bool:
    """Whether the record has exactly this hand-over. The store's clock moves its time a little."""
    asked_unix = changes.get("handed_unix", math.inf)
    return now.handed_unix is not None and abs(now.handed_unix - asked_unix) < _SAME_S


def _is_untaken(now: Rental, then: Rental) -> bool:
    """Whether nobody has written the record since, except for the host key of the first login."""
    return now.version - then.version == (now.host_key != then.host_key)


def rental_named(key: str) -> str:
    """The id of the rental that an object of this name would be a record of."""
    return key.rsplit("/", 1)[1]


def with_host_key(machine: Machine, rental: Rental | None) -> Machine:
    """The machine, with the only host key that it may show."""
    host_key = rental.host_key if rental else None
    if machine.endpoint is None or host_key is None:
        return machine
    endpoint = msgspec.structs.replace(machine.endpoint, host_key=host_key)
    return msgspec.structs.replace(machine, endpoint=endpoint)


def by_label(rentals: Collection[Rental]) -> dict[Label, Rental]:
    """Each rental by the label that its machine carries."""
    return {rental.label: rental for rental in rentals}
