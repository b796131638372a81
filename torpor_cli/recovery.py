"""The command that makes the blocks of a bucket again on another host."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

from cyclopts import Parameter

from deployments.terminal import Waiting, say
from torpor.control.own_server import how_to_hibernate
from torpor.control.store.signatures import ROOT_BYTES
from torpor.shared.errors import InvalidInput, KeyDamaged, KeyUnknown
from torpor.shared.format.user_keys import UserKey
from torpor.shared.values import workspace_name
from torpor_cli import setup
from torpor_cli.exit_codes import FAILED
from torpor_cli.key_files import keep_key, keep_object, key_file, say_key
from torpor_cli.output import print_rows
from torpor_cli.question import agrees
from torpor_cli.server import connected

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blocks import ObjectStore
    from torpor.control.recovery import InBucket
    from torpor.control.store.s3 import S3Store
    from torpor.control.store.workspace_records import Settings

Flag = Annotated[bool, Parameter(negative=())]
KEY_VARIABLE: Final = "TORPOR_STORE_KEY"
_NEVER: Final = (
    "the keys of markets and all other logins: no record holds any",
    "notification blocks: make them on the UI's page Blocks, and name them: `torpor up --notify "
    "type/name`",
    "schedules and what becomes of idle machines: `torpor up --idle hibernate` switches `watch` "
    "on; the others are on the UI's page Deployments",
    "variables and automations of your own, Stack blocks, and Secret blocks that none of these "
    "jobs names",
)
"""What no bucket says."""


def recover(
    *workspace: str,
    store: str = "",
    flavour: str = "",
    bucket: str = "",
    endpoint: str = "",
    region: str = "",
    prefix: str = "",
    access_key: str = "",
    key: Path | None = None,
    plain: Flag = False,
    dry_run: Flag = False,
    wide: Flag = False,
) -> int:
    """Make the workspaces of a bucket again on this host, which owns them from then on.

    torpor recover --store mine --flavour r2 --bucket my-snapshots --endpoint https://... --key FILE

    Their old host is gone, or they move. Where it still runs, it ends, rents and deletes nothing of
    them any more. No block that is here is changed. Give the command again as often as you like:
    what is there stays as it is, and what failed is done. A machine that stands is found as before,
    once its market's key is here.

    Args:
        workspace: Only these workspaces. Without any, all of the bucket.
        store: The Object Store block: one that is here, or the name of the new one for the bucket.
        flavour: The kind of the bucket's store: s3, r2, b2, wasabi, minio, seaweedfs or other.
        bucket: The bucket, where no block of it is here.
        endpoint: The store's address.
        region: The store's region.
        prefix: The prefix of all names in the bucket, if the old host had one.
        access_key: The id of the access key. The secret is asked, or in AWS_SECRET_ACCESS_KEY.
        key: The file with a key that opens the store: the old host's, another of its keys, or the
            store key of its recovery sheet. Otherwise it is asked, or in TORPOR_STORE_KEY.
        plain: The store has no such key. The key is then the one that signs its records, from the
            old host's Secret block torpor-records-...
        dry_run: Show what is in the bucket, who owns it and what would be made. Change nothing.
        wide: Show the whole tables, however narrow the terminal is.
    """
    wanted = [workspace_name(one) for one in workspace]
    name = store or bucket
    if not name:
        raise InvalidInput("name the bucket (--bucket), or its Object Store block (--store)")
    with connected():
        from tasks.recovery import Recovery, lost_secrets
        from torpor.control.recovery import look_at_bucket
        from torpor.control.store.workspace_records import WorkspaceRecords

        given = _Given(name, flavour, bucket, endpoint, region, prefix, access_key, key, plain)
        here = _here(given)
        new = None
        if here is None:
            new = _asked(given)
            here = new.opened()
        opened, sealing = here
        with Waiting(f"looking at {opened.address}"):
            found, every = look_at_bucket(opened, sealing, wanted)
        print_rows([one.row() for one in found], f"{opened.address} holds", wide=wide)
        recovery = Recovery(found, every, name, _secret, _agree)
        recovery.plan()
        if dry_run:
            print_rows(recovery.show(), wide=wide)
            return _say_rest(found, recovery.unknown, whole=recovery.whole, name=name)
        recovery.ask()
        if new is not None:
            new.save([one.settings for one in found if one.settings is not None])
        recovery.make()
        recovery.take(WorkspaceRecords(opened, sealing))
        print_rows(recovery.done, wide=wide)
        if recovery.owns:
            say(f"owned here  {', '.join(recovery.owns)}")
            _say_of_watch()
        rest = [*recovery.unknown, *lost_secrets(found)]
        return _say_rest(found, rest, whole=recovery.whole, name=name)


def _say_rest(found: Sequence[InBucket], unknown: Sequence[str], *, whole: bool, name: str) -> int:
    """What is not as it was; the exit code."""
    from torpor.shared.format.names import settings_key

    for one in found:
        if one.settings is None and settings_key(one.name) not in one.unread:
            say(
                f"no block    workspace {one.name} has no record of its block: an older torpor "
                f"used it last. `torpor init {one.name} --store {name}` brings its snapshots back"
            )
        for error in one.unread.values():
            say(f"not read    {error}", sys.stderr)
            whole = False
    for words in unknown:
        say(f"to do       {words}")
    for words in _NEVER:
        say(f"not known   {words}")
    say("next        `torpor status` shows the workspaces")
    return 0 if whole else FAILED


def _say_of_watch() -> None:
    """What is needed for the recovered workspaces to be looked after."""
    from tasks.prefect_alerts import PrefectAlerts

    if off := PrefectAlerts().sleeping().off:
        say(
            f"to do       nothing here hibernates, saves or continues them by itself: {off}. "
            f"{how_to_hibernate()}"
        )


class _Given(NamedTuple):
    """The options that name a bucket."""

    name: str
    flavour: str
    bucket: str
    endpoint: str
    region: str
    prefix: str
    access_key: str
    key: Path | None
    plain: bool


@dataclass(frozen=True)
class _New:
    """A bucket that no block of this host is of. ``block``: with the key that the person gave,
    which need not be the store key; ``root``: what signs its records; ``store_key``: what seals its
    snapshots, None where they are plain."""

    said: setup.StoreAnswers
    block: ObjectStore
    root: bytes = field(repr=False)
    store_key: bytes | None = field(repr=False)
    name: str

    def opened(self) -> tuple[S3Store, bytes | None]:
        from torpor.control.store.s3 import S3Store

        reach = self.block.reach(self.said.keys())
        return S3Store.connect(replace(reach, root=self.root)), self.store_key

    def save(self, every: Sequence[Settings]) -> None:
        """The blocks of the store and its login. A save that was killed is gone on with."""
        from prefect.blocks.system import Secret
        from pydantic import SecretStr

        from blocks.records_key import secret_name
        from blocks.settings import OF_STORE

        block = self.block
        for fields in (_store_fields(settings) for settings in every):
            kept = {name: value for name, value in fields.items() if name in OF_STORE}
            block = block.model_copy(update=kept | {"flavour": block.flavour})
        key = block.user_key()
        if key is None:
            signs: Secret[str] = Secret(value=SecretStr(self.root.hex()))
            _save_once(signs, secret_name(block.bucket, block.prefix))
        else:
            keep_key(self.name, key)
            say_key(key_file(self.name))
            gone = ", in place of the one that you gave, which then opens nothing"
            say(f"            `torpor store rotate {self.name}` gives this host a key of its own"
                f"{gone if key.opens else ''}.")  # fmt: skip
        _save_once(self.said.login(), self.name)
        _save_once(block, self.name)
        say(f"made        object-store/{self.name} and its login")
        if key is not None:
            keep_object(self.name, block.key_objects(), key)


def _store_fields(settings: Settings) -> dict[str, Any]:
    """What the workspace's own store block held."""
    named = str(settings.blocks.get(settings.reference, {}).get("store", ""))
    return settings.blocks.get(f"object-store/{named.rpartition('/')[2]}", {})


def _save_once(block: Any, name: str) -> None:
    """Save a block that may be here already; InvalidInput where another one is."""
    from blocks.reference import load_named, saved_names

    kind = type(block)
    if name not in saved_names(kind):
        block.save(name)
    elif _held(load_named(kind, name, of="")) != _held(block):
        raise InvalidInput(
            f"there is another block {kind.get_block_type_slug()}/{name} here, which stays as it "
            "is: choose another name as --store"
        )


def _held(block: Any) -> object:
    """What tells a block of a store's keys from another one."""
    from prefect.blocks.system import Secret
    from prefect_aws import AwsCredentials

    if isinstance(block, Secret):
        return str(block.get())
    if isinstance(block, AwsCredentials):
        secret = block.aws_secret_access_key
        return block.aws_access_key_id, secret and secret.get_secret_value()
    return block.model_dump()


def _here(given: _Given) -> tuple[S3Store, bytes | None] | None:
    """The store of the block of that name, and what seals its snapshots; None if there is none."""
    from blocks import ObjectStore
    from blocks.reference import load, saved_names

    if given.name not in saved_names(ObjectStore):
        return None
    block = load(given.name, (ObjectStore,), of="")
    is_here = {
        "bucket": (given.bucket, block.bucket),
        "prefix": (given.prefix.strip("/"), block.prefix.strip("/")),
        "flavour": (given.flavour, block.flavour),
        "endpoint": (given.endpoint.rstrip("/"), block.endpoint_url.rstrip("/")),
        "region": (given.region, block.region),
    }
    others = [name for name, (said, held) in is_here.items() if said and said != held]
    key = block.user_key()
    if given.plain and key is not None:
        others.append("plain")
    if not others and given.key is not None and not _is_of(block, _key(given), plain=given.plain):
        others.append("key")
    if others:
        raise InvalidInput(
            f"the block object-store/{given.name} has another {', '.join(others)}, and stays as "
            "it is: leave the option out to use the block, or give another name as --store. If the "
            "key of the block was removed from the store, paste another one as its encryption key "
            "on the UI's page Blocks"
        )
    return block.open(), None if key is None else block.key_objects().open(key).store_key


def _is_of(block: ObjectStore, text: str, *, plain: bool) -> bool:
    """Whether this key opens what the block's key opens, as the store key of a sheet does after a
    rotation. Raises KeyUnknown where it opens nothing."""
    own = block.user_key()
    if plain or own is None:
        return plain and _signing(text) == block.settings().root
    key, objects = UserKey.of(text), block.key_objects()
    opened = objects.open(key).store_key
    with suppress(KeyUnknown, KeyDamaged):
        return objects.open(own).store_key == opened
    return False


def _asked(given: _Given) -> _New:
    """The bucket that the options name, what a person answers, and what the key opens there.
    Nothing is saved."""
    if not given.bucket:
        raise InvalidInput(f"there is no block object-store/{given.name}: give its --bucket too")
    from torpor.control.store.key_objects import KeyObjects
    from torpor.control.store.s3 import S3Store

    said = setup.asked_store(
        setup.kind_of_store(given.flavour or "other"),
        given.bucket,
        given.prefix,
        given.endpoint,
        given.region,
        given.access_key,
    )
    text = _key(given)
    if given.plain:
        return _New(said, said.block(given.name), _signing(text), None, given.name)
    if not text.strip():
        raise InvalidInput("the key is empty: give it, or --plain for a store without one")
    key = UserKey.of(text)
    block = said.block(given.name, key)
    store_key = KeyObjects(S3Store.connect(block.reach(said.keys()))).open(key).store_key
    return _New(said, block, store_key, store_key, given.name)


def _key(given: _Given) -> str:
    if given.key is None:
        what = "Key that signs its records" if given.plain else "Key that opens the store"
        return setup.ask_secret(what, KEY_VARIABLE)
    try:
        return given.key.expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        named = "a key" if str(given.key).startswith("torpor-") else given.key
        raise InvalidInput(f"--key is a file with the key; {named} cannot be read: {why}") from None


def _signing(text: str) -> bytes:
    """The key of a plain store's records. No error repeats it."""
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != ROOT_BYTES:
        raise InvalidInput(
            f"the key of a plain store's records is {ROOT_BYTES} bytes in hexadecimal, as the old "
            "host's Secret block torpor-records-... holds it"
        )
    return key


def _secret(reference: str, field: str) -> str:
    """What a person gives for a field that no record holds; empty for nothing."""
    from tasks.recovery import variable_of

    question = f"{field} of {reference} (nothing: later)"
    return setup.ask_secret(question, variable_of(reference, field), needed=False)


def _agree(question: str) -> bool:
    """Whether a person at the terminal says yes."""
    return sys.stdin.isatty() and agrees(question)
