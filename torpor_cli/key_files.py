"""The key files of this host: ``keys/NAME`` in torpor's folder, for the Object Store block NAME of
its own Prefect server, and ``keys/HOST:PORT/NAME`` for a block of another server.

Nothing in them is ever overwritten: another key that was in a file is kept beside it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from deployments.installation import write_whole
from deployments.terminal import say
from torpor.control.own_server import USUAL_PORTS, choose_server, is_this_host, state_folder
from torpor.shared.errors import InvalidInput
from torpor.shared.format.user_keys import UserKey

if TYPE_CHECKING:
    from torpor.control.store.key_objects import KeyObjects

_KEYS: Final = "keys"
"""Their folder in torpor's own."""


def key_file(name: str) -> Path:
    """The file of this block's key. Each server has its own folder, as stores of the same name
    differ."""
    keys, choice = state_folder() / _KEYS, choose_server()
    if choice is None or choice.taken.source == "installation":
        return keys / name
    parts = urlsplit(choice.taken.api_url)
    return keys / f"{parts.hostname}:{parts.port or USUAL_PORTS[parts.scheme]}" / name


def kept_keys(name: str) -> Iterator[tuple[Path, UserKey]]:
    """The keys in the files of this server, the one of this block first. InvalidInput where the
    block's file holds no key."""
    own = key_file(name)
    with suppress(FileNotFoundError):
        yield own, UserKey.of(_text(own))
    for file in sorted(own.parent.glob("*")):
        if file != own:
            with suppress(OSError, InvalidInput):
                yield file, UserKey.of(_text(file))


def keep_key(name: str, key: UserKey) -> None:
    """Have the file of this block hold this key. Another one that it held is in NAME.before, or
    NAME.before2 where that is taken, and so on."""
    file = key_file(name)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # two commands at once lose neither's key
        with suppress(FileNotFoundError):
            held = _text(file)
            with suppress(InvalidInput):
                if UserKey.of(held) == key:
                    return
            _keep_beside(file, held)
        write_whole(file, f"{key.text}\n")
    finally:
        os.close(folder)


def keep_object(name: str, objects: KeyObjects, key: UserKey) -> None:
    """Keep the key object of this block's key beside its key file, as NAME.object: the key opens
    the store by it, and the bucket may have lost it. It opens nothing without the key."""
    if key.opens:
        file = key_file(name)
        write_whole(file.with_name(f"{file.name}.object"), objects.stored(key.id).decode())


def check_key_file(name: str) -> None:
    """Before a new store gets its first key: InvalidInput where nobody can say whether an earlier
    key of that name is this server's. A host that is given by PREFECT_API_URL once kept each key in
    ``keys`` itself."""
    choice, file = choose_server(), key_file(name)
    if choice is None or choice.taken.source == "installation":
        return
    # By `ssh -L`, an address of this host may be of several servers, one after the other.
    host = urlsplit(choice.taken.api_url).hostname or ""
    is_one = choice.taken.source != "connection" or not is_this_host(host)
    keys = state_folder() / _KEYS
    earlier = [one for one in (file, keys / name, *keys.glob(f"*/{name}")) if one.exists()]
    if earlier and not (is_one and earlier[0] == file):
        raise InvalidInput(
            f"{earlier[0]} is a key of a store {name}, perhaps one of another server than "
            f"{choice.taken.api_url}. Choose another name, or move that file to another place: a "
            "store that was made with this key needs it"
        )


def say_key(file: Path) -> None:
    """Tell a person where the key of a new store block is."""
    say(f"key         {file} opens the snapshots. Keep a copy: without it they are lost.")


def _keep_beside(file: Path, held: str) -> None:
    for number in count(1):
        before = file.with_name(f"{file.name}.before{number if number > 1 else ''}")
        if not before.exists():
            write_whole(before, held)
            return
        if _text(before) == held:
            return


def _text(file: Path) -> str:
    """InvalidInput where the file is no text."""
    try:
        return file.read_text()
    except UnicodeDecodeError:
        raise InvalidInput(
            f"{file} is the place of a key, and what it holds is no text: move it away, "
            "and copy the key file there from where you keep a copy"
        ) from None
