"""Commands about the keys of a sealed store."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import App, Group, Parameter

from deployments.terminal import say
from torpor.shared.errors import InvalidInput, TorporError
from torpor.shared.plain_text import plain
from torpor.shared.values import WorkspaceName
from torpor_cli.output import print_rows
from torpor_cli.question import confirm
from torpor_cli.server import connected

if TYPE_CHECKING:
    from blocks import ObjectStore, Workspace
    from torpor.control.store.key_objects import KeyObjects, Listed
    from torpor.shared.format.user_keys import UserKey

HERE: Final = Group("This installation", sort_key=4)
store = App(name="store", help="The keys of a store: list, add, remove, rotate, print.", group=HERE)
Flag = Annotated[bool, Parameter(negative=())]
_LEAST_ID: Final = 4  # digits of an id that is shortened
_FOR_EVER: Final = (
    "The old key is the store key itself: nothing takes it away, and whoever has it reads all that "
    "was stored and will be stored here. Only a new store has another one: `torpor init` makes one"
)
_NOT_TAKEN_BACK: Final = (
    "What was stored is sealed as before. Whoever has used a removed key may have kept the store "
    "key, and any copy of the bucket that is older still has the removed key object: replace the "
    "bucket's access key too, and make a new store if that key was stolen"
)


@dataclass(frozen=True)
class _Opened:
    name: str
    block: ObjectStore
    key: UserKey
    objects: KeyObjects
    store_key: bytes = field(repr=False)
    workspaces: list[Workspace]


@store.command
def keys(name: str = "default", *, wide: Flag = False) -> None:
    """List the keys that open a store.

    Args:
        name: The Object Store block.
        wide: Show the whole table, however narrow the terminal is.
    """
    with connected():
        found = _open(name, check=False)
        listed, more = found.objects.listed(found.store_key, found.key.id)
        rows = [_row(found, one) for one in listed]
        if not found.key.opens:
            rows.insert(0, {"key": "the store key itself", "label": "", "made": "", "used": "here"})
        print_rows(rows, wide=wide)
        if more:
            say(f"{more} more were not read: whoever writes in the bucket may add any number.")
        _say_of_snapshots(found)


@store.command
def add_key(name: str = "default", *, label: str, into: str = "") -> None:
    """Make a second key that opens a store, for a colleague or an escrow, and show it once.

    It opens all that the store has and will have. Paste it as the encryption key of an Object
    Store block on another installation, or keep it where your own key is not.

    Args:
        name: The Object Store block.
        label: Whose key it is, such as escrow. Everybody who reads the bucket sees it.
        into: A new file for the key, instead of the terminal. Only you can read it.
    """
    with connected():
        from torpor.shared.format.user_keys import UserKey, checked_label

        label = checked_label(label)
        _check_shown(into)
        found = _open(name)
        key = UserKey.new()
        _show(f"{key.text}\n", into)  # before it opens anything: nobody has a key that was not seen
        found.objects.add(key, found.store_key, label, time.time())
        say(f'key         {key.id[:8]}, labelled "{label}", opens {_place(found)}')
        say("            It is not shown again. Whoever has it, and reads the bucket, reads all,")
        say("            also the SSH key that logs in to the machines of its workspaces.")


@store.command
def remove_key(name: str, key: str, *, yes: Flag = False) -> None:
    """Have a key open a store no more.

    Refused for the key that the block uses, and for what no key of this store has made, so the last
    one stays, and the key of another store. Nothing is stored again.

    Args:
        name: The Object Store block.
        key: The id of the key, as `torpor store keys` lists it, or its first digits.
        yes: Do not ask.
    """
    with connected():
        found = _open(name, all_fit=True)
        one = found.objects.read(_chosen(found.objects.ids(), key), found.store_key)
        if one.id == found.key.id:
            raise InvalidInput(
                f"the key {one.id[:8]} is the one that object-store/{name} uses: `torpor store "
                f"rotate {name}` replaces it"
            )
        if not one.genuine or one.found is None:
            raise InvalidInput(
                f"keys/{one.id} in {_place(found)} was not made with a key of this store: it may "
                "be the only key of another one. If it is junk, delete it at the store's console"
            )
        if used := _users(found, one.id):
            raise InvalidInput(
                f"the key {one.id[:8]} is the one that object-store/{used[0]} uses: `torpor store "
                f"rotate {used[0]}` replaces it"
            )
        label = plain(one.found.label)
        if not yes:
            confirm(
                f'Remove the key {one.id[:8]}, labelled "{label}", from {_place(found)}?',
                "no key was removed",
            )
        found.objects.remove(one.id, found.key)
        say(f'key         {one.id[:8]}, labelled "{label}", opens nothing here any more')
        say(f"            {_NOT_TAKEN_BACK}.")


@store.command
def rotate(name: str = "default", *, yes: Flag = False) -> None:
    """Replace the key that a store block uses by a new one, without storing anything again.
    Copies of the old key open nothing afterwards.

    If it is stopped, the block has a key that opens the store: give the command again.

    Args:
        name: The Object Store block.
        yes: Do not ask.
    """
    with connected():
        from torpor.control.store.key_rotation import rotate as rotated
        from torpor_cli.key_files import keep_object, key_file

        found = _open(name, all_fit=True)
        if not yes:
            others = (
                "Your copies of the old key will open nothing: copy the key file again afterwards. "
                "Other installations with the old key need the new one, or one of their own."
            )
            then = others if found.key.opens else f"{_FOR_EVER}."
            confirm(f"{then} Give object-store/{name} a new key?", "the key was not rotated")
        done = rotated(found.objects, found.key, _saving(name, found.key), time.time())
        if done.resumed:
            say("rotation    an earlier one was stopped, and was finished first")
        say(f"key         object-store/{name} opens {_place(found)} with the key {done.key.id[:8]}")
        for gone in done.gone:
            say(f"            The key {gone[:8]} opens nothing here any more.")
        if done.gone:
            say(f"            {_NOT_TAKEN_BACK}.")
            say(f"            Copies of the old key open nothing now: copy {key_file(name)}.")
        else:
            say(f"            {_FOR_EVER}. The new key is in {key_file(name)}, too.")
        say("            A recovery sheet of before opens the store still.")
        keep_object(name, found.objects, done.key)


@store.command
def sheet(name: str = "default", *, into: str = "") -> None:
    """Print the recovery sheet of a store: its place, the store key and how to recover.

    The store key opens the store and every copy of it, and nothing takes it away.

    Args:
        name: The Object Store block.
        into: A new file for the sheet, instead of the terminal. Only you can read it.
    """
    with connected():
        _check_shown(into)
        _show(_sheet(name), into)


def _open(name: str, *, check: bool = True, all_fit: bool = False) -> _Opened:
    """The block, and what its key opens. InvalidInput where the store is plain, WrongKey where the
    block has a store key and the snapshots say that they, or with ``all_fit`` any of them, were
    sealed with another one. A key object proves its store key, whatever a machine has written."""
    from blocks import ObjectStore
    from blocks.reference import load_named
    from torpor.control.store.key_check import check_sealed_with

    block = load_named(ObjectStore, name, of="torpor store")
    key = block.user_key()
    if key is None:
        from blocks.records_key import secret_name

        raise InvalidInput(
            f"object-store/{name} has no encryption key: its snapshots are plain, and whoever "
            "reads the bucket reads them. The Secret block "
            f"{secret_name(block.bucket, block.prefix)} signs its records, and opens nothing"
        )
    objects = block.key_objects()
    store_key, workspaces = objects.open(key).store_key, _workspaces(name)
    if check and not key.opens:
        check_sealed_with(objects.store, store_key, _names(workspaces), all_fit=all_fit)
    return _Opened(name, block, key, objects, store_key, workspaces)


def _workspaces(name: str) -> list[Workspace]:
    """The workspaces whose block names this store."""
    from blocks import Workspace
    from blocks.reference import load_named, saved_names

    found = []
    for one in saved_names(Workspace):
        with suppress(TorporError):  # damaged, or deleted meanwhile
            workspace = load_named(Workspace, one, of="torpor store")
            if workspace.store.rpartition("/")[2] == name:
                found.append(workspace)
    return found


def _users(found: _Opened, key: str) -> list[str]:
    """The blocks of this store, on this Prefect server, that have the key of this id."""
    from blocks import ObjectStore
    from blocks.reference import load_named, saved_names

    users = []
    for one in saved_names(ObjectStore):
        with suppress(InvalidInput):  # damaged
            block = load_named(ObjectStore, one, of="torpor store")
            own = block.user_key()
            if own is not None and own.id == key and _same_store(block, found.block):
                users.append(one)
    return users


def _names(workspaces: list[Workspace]) -> list[WorkspaceName]:
    return [WorkspaceName(one.name) for one in workspaces]


def _row(found: _Opened, one: Listed) -> dict[str, str]:
    from torpor.control.store.key_objects import day

    used = "here" if one.id == found.key.id else ""
    if not one.genuine:
        used = "never: not made with a key of this store, here"
    if one.found is None:
        return {"key": one.id[:8], "label": "?", "made": "?", "used": used}
    label, made = plain(one.found.label), day(one.found.made_unix)
    return {"key": one.id[:8], "label": label, "made": made, "used": used}


def _say_of_snapshots(found: _Opened) -> None:
    from torpor.control.store.key_check import check_sealed_with

    names = _names(found.workspaces)
    sealed = check_sealed_with(found.objects.store, found.store_key, names, all_fit=False)
    if sealed.fits:
        say(f"The newest snapshots of {', '.join(sealed.fits)} were sealed with this store's key.")
    if sealed.others:
        say(f"Those of {', '.join(sealed.others)} were sealed with another key.")


def _chosen(ids: list[str], start: str) -> str:
    fitting = [one for one in ids if one.startswith(start.lower())]
    if len(start) < _LEAST_ID or len(fitting) != 1:
        said = "a key" if start.startswith("torpor-") else repr(start)  # no error repeats a key
        raise InvalidInput(
            f"{said} is the beginning of {len(fitting)} ids of keys: give {_LEAST_ID} digits or "
            "more of one that `torpor store keys` lists"
        )
    return fitting[0]


def _saving(name: str, old: UserKey) -> Callable[[str, UserKey], None]:
    """Save a new key in the block, in each other block of the same store that has the old key, and
    in their key files: they would open nothing."""

    def put(gone: str, new: UserKey) -> None:
        from blocks import ObjectStore
        from blocks.reference import load_named, saved_names
        from torpor_cli.key_files import keep_key

        mine = load_named(ObjectStore, name, of="torpor store rotate")
        for one in saved_names(ObjectStore):
            try:
                block = load_named(ObjectStore, one, of="torpor store rotate")
            except InvalidInput:  # damaged: it opens nothing
                if one == name:
                    raise
                continue
            key = block.user_key()
            if one == name and key not in (old, new) and (key is None or key.id != gone):
                raise InvalidInput(
                    f"object-store/{name} has another key since this command began: nothing was "
                    "removed. `torpor store keys` lists the keys"
                )
            if one != name and (not key or not key.opens or key.id != gone):
                continue
            if one != name and not _same_store(block, mine):
                say(f"key         object-store/{one} has the old key at another address: it stays")
                continue
            if key != new:
                if key is not None:
                    keep_key(one, key)  # it may be in this block alone
                _give(block, one, new)
            keep_key(one, new)

    def save(gone: str, new: UserKey) -> None:
        try:
            put(gone, new)
        except BaseException:  # also Ctrl-C
            if new != old:
                say(
                    f"key         The new key {new.id[:8]} opens the store beside the old one, and "
                    f"object-store/{name} may not have it. Give the command again. If `torpor "
                    f"store keys {name}` lists {new.id[:8]} then, nobody has it: `torpor store "
                    f"remove-key {name} {new.id[:8]}`"
                )
            raise

    return save


def _same_store(one: ObjectStore, other: ObjectStore) -> bool:
    """Whether both blocks are of one bucket and prefix at one address. Asks the store nothing: one
    block's access key may be revoked, or its store away."""
    from torpor.control.store.signatures import place_of

    places = []
    for block in (one, other):
        try:
            places.append((place_of(block.bucket, block.prefix), block.reach().endpoint_url))
        except InvalidInput:  # no access key
            return False
    return places[0] == places[1]


def _give(block: ObjectStore, name: str, key: UserKey) -> None:
    from pydantic import SecretStr

    from blocks import ObjectStore
    from blocks.reference import load_named

    block.encryption_key = SecretStr(key.text)
    block.save(name, overwrite=True)
    if load_named(ObjectStore, name, of="torpor store rotate").user_key() != key:
        raise TorporError(
            f"object-store/{name} does not read back with its new key: no key was removed. Give "
            "the command again"
        )


def _sheet(name: str) -> str:
    from torpor.shared.format.user_keys import UserKey

    found = _open(name)
    block, reach = found.block, found.block.reach()
    today = datetime.now(UTC).date().isoformat()
    key = UserKey(found.store_key, opens=False)
    head, *groups = _lines(key.text)
    names = _names(found.workspaces)
    first = names[0] if names else "WORKSPACE"
    there = _ON_EACH_HOST_ELSE if name == _ON_EACH_HOST else name
    words = ["torpor", "recover", "--store", there]
    words += ["--flavour", block.flavour, "--bucket", block.bucket]
    for option, value in (
        ("--prefix", block.prefix),
        ("--endpoint", reach.endpoint_url or ""),
        ("--region", "" if reach.endpoint_url else reach.region),
    ):
        words += [option, value] if value else []
    rows = [
        ("Bucket", block.bucket),
        ("Prefix", block.prefix or "none"),
        ("Endpoint", reach.endpoint_url or "AWS"),
        ("Region", reach.region),
        ("Kind", block.flavour),
        ("Access", "an access key that lists, reads, writes and deletes in this bucket."),
        ("", f"It is not on this sheet; the one of today has the id {reach.access_key}."),
        ("Key", head),
        *(("", line) for line in groups),
        ("", "The last letters are a checksum."),
        ("", "It is the store key: it opens every copy, and nothing takes it away."),
        *(
            ("Workspaces" if not at else "", f"{one.name}: {' '.join(one.paths)}")
            for at, one in enumerate(found.workspaces)
        ),
    ]
    lines = [f"RECOVERY SHEET of the torpor store {name}, {today}", ""]
    lines += [f"{title:12}{text}" for title, text in rows]
    lines += [
        "",
        "To recover, on a host with torpor:",
        "  1. torpor up",
        f"  2. (umask 077; mkdir -p {_FOLDER}; set -C; cat > {_FOLDER}/{there})",
        "     Type the key, from torpor- on, on one line or several; then Ctrl-D.",
        f"  3. {shlex.join(words)} --key {_FOLDER}/{there}",
        f"  4. torpor snapshots {first}",
        f"     For a workspace that has no record: torpor init NAME --store {there}",
        f"     For a key of this host alone: torpor store rotate {there}",
        "",
        "Whoever has this sheet and can read the bucket reads everything in it.",
    ]
    return "\n".join(lines) + "\n"


_FOLDER: Final = "~/.local/state/torpor/keys"
_ON_EACH_HOST, _ON_EACH_HOST_ELSE = "default", "recovered"
"""`torpor up` makes a store block of this name on each host: the sheet names another."""
_ROW: Final = 5  # groups in a line


def _lines(text: str) -> list[str]:
    """The key's text, in lines of a few groups."""
    first, second, *groups = text.split("-")
    rows = [groups[at : at + _ROW] for at in range(0, len(groups), _ROW)]
    return [f"{first}-{second}", *("-".join(["", *row]).removeprefix("-") for row in rows)]


def _check_shown(into: str) -> None:
    """InvalidInput where a key would end in a log, or over a file."""
    if into and os.path.lexists(Path(into).expanduser()):
        raise InvalidInput(f"{into} is there already: name a new file")
    if not into and not sys.stdout.isatty():
        raise InvalidInput(
            "the output is no terminal, and a key does not belong in a log: add --into FILE"
        )


def _show(text: str, into: str) -> None:
    if not into:
        print(text, end="", flush=True)
        return
    file = Path(into).expanduser()
    try:
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "w") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(fd)
    except OSError as error:
        raise InvalidInput(f"{file} cannot be written: {error.strerror or error}") from None
    say(f"file        {file} is written; only you can read it")


def _place(found: _Opened) -> str:
    return found.objects.store.address
