"""The rows of a market's list of machines, each read on its own: an odd cell of somebody else's
machine hides none of ours."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import UnionType
from typing import Any, Final, Generic, TypeVar, Union, get_args, get_origin

import msgspec

from torpor.control.providers.offers import Offer
from torpor.control.providers.provider import Absent
from torpor.shared.errors import MachineUnread, UnexpectedAnswer
from torpor.shared.values import Label, Machine, MachineId, learned

_TOLD_CHARACTERS: Final = 200  # characters of an id, or of what is wrong with a cell, in a message
_log = logging.getLogger(__name__)

_Shape = TypeVar("_Shape", bound=msgspec.Struct)


class Rows(Generic[_Shape]):
    """Reads rows of ``shape``. A cell that cannot be read takes the default of its field: it is
    named in the machine's note, and once in the log. A field without a default, and one whose path
    is in ``exact``, such as ``metadata.labels``, cannot be left out: without it nobody can say
    whose machine the row is. Thread-safe.

    ``id_of``: empty where a row does not say it. ``label_of`` may raise msgspec.ValidationError.
    """

    def __init__(
        self,
        market: str,
        shape: type[_Shape],
        *,
        id_of: Callable[[_Shape], str],
        label_of: Callable[[_Shape], Label | None],
        exact: Iterable[str] = (),
    ) -> None:
        self._market, self._shape = market, shape
        self._id_of, self._label_of = id_of, label_of
        self._exact = frozenset(exact)
        self._said: set[str] = set()

    def own(
        self, rows: Iterable[object], describe: Callable[[_Shape], Machine | Absent]
    ) -> list[Machine]:
        """The machines with a label of ours, as ``describe`` has them. MachineUnread, with these
        machines, where a further row may be ours: its label cannot be read, or it is ours and its
        id cannot be read."""
        machines, unread = [], []
        for told in rows:
            try:
                row, odd = self._read(told)
                label = self._label_of(row)
            except msgspec.ValidationError as cause:
                unread.append(self._say(_id_in(told), str(cause)))
                continue
            if label is None:
                self._warn(self._id_of(row) or _id_in(told), odd)
            elif not self._id_of(row):
                unread.append(self._say(_id_in(told), "; ".join(odd) or "it has no id"))
            else:
                seen = self._described(row, label, odd, describe)
                machines += [seen] if isinstance(seen, Machine) else []
        if unread:
            raise unread_machines(self._market, machines, unread)
        return machines

    def find(
        self,
        machine: MachineId,
        rows: Iterable[object],
        describe: Callable[[_Shape], Machine | Absent],
    ) -> Machine | Absent | None:
        """The machine in a list; None where the list does not have it, and an Absent without a
        proof where a row that cannot be read may be it."""
        found: Absent | None = None
        for told in rows:
            try:
                row, odd = self._read(told)
                number, label = self._id_of(row), self._label_of(row)
            except msgspec.ValidationError as cause:
                self._say(_id_in(told), str(cause))
                if not (named := _ids_in(told)) or machine in named:
                    found = Absent()
                continue
            if number == machine:
                return self._described(row, label, odd, describe)
            if not number and label is not None:
                found = Absent()
        return found

    def one(
        self, machine: MachineId, told: object, describe: Callable[[_Shape], Machine | Absent]
    ) -> Machine | Absent:
        """The machine in an answer that is about it alone. UnexpectedAnswer where the answer is
        about another one, or does not say whose machine it is."""
        row, odd = self._of(machine, told)
        return self._described(row, self._label_of(row), odd, describe)

    def row(self, machine: MachineId, told: object) -> _Shape:
        """The row in an answer that is about one machine alone. UnexpectedAnswer as ``one``."""
        return self._of(machine, told)[0]

    def readable(self, rows: Iterable[object]) -> list[_Shape]:
        """The rows that can be read; nothing may be concluded from what they lack."""
        found = []
        for told in rows:
            try:
                row, _ = self._read(told)
                self._label_of(row)
            except msgspec.ValidationError as cause:
                self._say(_id_in(told), str(cause))
            else:
                found.append(row)
        return found

    def _of(self, machine: MachineId, told: object) -> tuple[_Shape, list[str]]:
        fault = ""
        try:
            row, odd = self._read(told)
            self._label_of(row)
        except msgspec.ValidationError as cause:
            fault = str(cause)
        else:
            if self._id_of(row) == machine:
                return row, odd
            fault = f"it is about {self._id_of(row) or 'a machine without an id'}"
        raise UnexpectedAnswer(
            f"{self._market} answered about machine {machine} in a shape that torpor does not "
            f"know: {fault[:_TOLD_CHARACTERS]}. Nothing is concluded from it; look at the market's "
            "console and report this"
        )

    def _described(
        self,
        row: _Shape,
        label: Label | None,
        odd: list[str],
        describe: Callable[[_Shape], Machine | Absent],
    ) -> Machine | Absent:
        self._warn(self._id_of(row), odd)
        try:
            seen = describe(row)
        except UnexpectedAnswer as error:  # of a further question about this machine
            words = str(error)
            number = MachineId(self._id_of(row))
            return Machine(number, self._market, label, "starting", None, 0.0, words)
        if not odd or not isinstance(seen, Machine):
            return seen
        note = f"{seen.note}; the market's answer has odd cells: {'; '.join(odd)}".lstrip("; ")
        return msgspec.structs.replace(seen, note=note)

    def _read(self, told: object) -> tuple[_Shape, list[str]]:
        odd: list[str] = []
        return _read(self._shape, told, "", self._exact, odd), odd

    def _warn(self, number: str, odd: list[str]) -> None:
        if odd:
            self._say(number, "; ".join(odd))

    def _say(self, number: str, what: str) -> str:
        """Name the row and the cell in the log, once."""
        words = f"machine {number or 'without an id'}: {what[:_TOLD_CHARACTERS]}"
        if words not in self._said:
            self._said.add(words)
            _log.warning("%s answered a row that torpor cannot read whole: %s", self._market, words)
        return words


def unread_machines(
    market: str, machines: Sequence[Machine], unread: Sequence[str]
) -> MachineUnread:
    """The error for a list with ``machines`` of ours, and with others that may be."""
    error = MachineUnread(
        f"{market} lists machines of which torpor cannot read whose they are: "
        f"{'; '.join(unread[:5])}. One of them may be torpor's, so nothing is concluded from what "
        "the list lacks. Look at the market's console: end the machine or give it another name if "
        "it is yours, else report this"
    )
    error.machines = machines
    return error


def offered(
    market: str,
    shape: type[_Shape],
    rows: Iterable[object],
    offers: Callable[[_Shape], Iterable[Offer]],
) -> list[Offer]:
    """What each row of a list offers, and an offer for each row that cannot be read."""
    read, unread = offer_rows(market, shape, rows)
    return [offer for row in read for offer in offers(row)] + unread


def offer_rows(
    market: str, shape: type[_Shape], rows: Iterable[object]
) -> tuple[list[_Shape], list[Offer]]:
    """The rows that can be read, and for each other one an offer that fits nobody, so that the
    report of refused offers names it."""
    read: list[_Shape] = []
    unread: list[Offer] = []
    for told in rows:
        try:
            read.append(msgspec.convert(told, learned(shape)))
        except msgspec.ValidationError as cause:
            unread.append(unread_offer(market, _id_in(told), str(cause)))
    return read, unread


def unread_offer(market: str, number: str, fault: str) -> Offer:
    """An offer that fits nobody, because ``fault`` keeps torpor from reading it."""
    words = f"the market's answer has an odd cell: {fault[:_TOLD_CHARACTERS]}"
    return Offer(
        id=number or "without an id", provider=market, gpu=None, gpu_count=0, price_usd_h=0.0,
        region="", disk_gib=0.0, domain="", priced_unix=0.0, unread=words,
    )  # fmt: skip


def _read(
    shape: type[_Shape], told: object, path: str, exact: frozenset[str], odd: list[str]
) -> _Shape:
    """``told`` as ``shape``, cell by cell where it does not convert as a whole. What takes its
    default is added to ``odd``."""
    try:
        return msgspec.convert(told, learned(shape))
    except msgspec.ValidationError:
        if not isinstance(told, Mapping):
            raise
    cells = {}
    for field in msgspec.structs.fields(shape):
        name = f"{path}{field.encode_name}"
        if field.encode_name not in told:
            if field.required:
                raise msgspec.ValidationError(f"it has no `{name}`")
            continue
        cell = told[field.encode_name]
        inner = next((one for one in _kinds(field.type) if _is_struct(one)), None)
        try:
            if inner is not None and isinstance(cell, Mapping):
                cells[field.name] = _read(inner, cell, f"{name}.", exact, odd)
            else:
                cells[field.name] = msgspec.convert(cell, learned(field.type))
        except msgspec.ValidationError as cause:
            within = any(part == name or part.startswith(f"{name}.") for part in exact)
            if field.required or within:
                raise msgspec.ValidationError(f"`{name}`: {cause}") from cause
            odd.append(f"`{name}`: {cause}")
    return shape(**cells)


def _kinds(kind: Any) -> tuple[Any, ...]:
    """The type itself, or the types of a union."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _id_in(told: object) -> str:
    """For people: what a row that cannot be read says of its id."""
    row = told if isinstance(told, Mapping) else {}
    meta = row.get("metadata")  # of Kubernetes
    more = [row.get("InstanceType"), meta.get("name") if isinstance(meta, Mapping) else None]
    found = [*_ids_in(told), *(name for name in more if isinstance(name, str))]
    return next(iter(found), "")[:_TOLD_CHARACTERS]


def _ids_in(told: object) -> list[str]:
    """The values that may be the id of a row that cannot be read."""
    row = told if isinstance(told, Mapping) else {}
    return [str(row[key]) for key in ("id", "name") if isinstance(row.get(key), (str, int))]
