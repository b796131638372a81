"""The command that asks for a bucket, a market's key and a workspace, and checks each one live."""

from __future__ import annotations

import getpass
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

from cyclopts import Parameter

from deployments.terminal import say
from torpor.shared.errors import (
    InvalidInput,
    KeyDamaged,
    KeyUnknown,
    NoOffer,
    RunCancelled,
    WrongKey,
)
from torpor.shared.format.keys import KEY_BYTES
from torpor.shared.format.names import settings_prefix
from torpor.shared.plain_text import short
from torpor.shared.values import Want, WorkspaceName, machine_path, workspace_name
from torpor_cli.key_files import (
    check_key_file,
    keep_key,
    keep_object,
    kept_keys,
    key_file,
    say_key,
)
from torpor_cli.question import answer
from torpor_cli.server import connected

if TYPE_CHECKING:
    from prefect_aws import AwsCredentials

    from blocks import ObjectStore
    from blocks.access_keys import AccessKeys
    from torpor.control.store.key_objects import KeyObjects
    from torpor.control.store.s3 import S3Store
    from torpor.shared.format.user_keys import UserKey

Several = Annotated[list[str] | None, Parameter(negative=())]
STORE_VARIABLE: Final = "AWS_SECRET_ACCESS_KEY"
MARKET_VARIABLE: Final = "TORPOR_MARKET_KEY"
_KEEPS_WORKSPACE: Final = ("vast-provider/", "runpod-provider/")
"""Markets whose images keep work in /workspace."""
_ROOM: Final = 1.5
"""The suggested highest price, as a multiple of the best offer's price."""
_FLAVOURS: Final = {
    "s3": "aws-s3",
    "aws": "aws-s3",
    "r2": "cloudflare-r2",
    "cloudflare": "cloudflare-r2",
    "b2": "backblaze-b2",
    "backblaze": "backblaze-b2",
    "wasabi": "wasabi",
    "minio": "minio",
    "seaweedfs": "seaweedfs",
    "other": "other",
}
"""The kinds of store, by the names that people use."""
_STORE_KEYS: Final = {
    "aws-s3": "https://console.aws.amazon.com/iam/ (Users, access keys)",
    "cloudflare-r2": "https://dash.cloudflare.com/?to=/:account/r2/api-tokens",
    "backblaze-b2": "https://secure.backblaze.com/app_keys.htm (Read and Write)",
    "wasabi": "https://console.wasabisys.com (Access Keys)",
}
"""Where the access keys of a store are made."""
_MARKETS: Final = {"vast.ai": "vast", "runpod.io": "runpod", "datacrunch": "verda"}
"""Markets by other names that people use."""
_MARKET_KEYS: Final = {
    "vast": "https://cloud.vast.ai/manage-keys/",
    "runpod": "https://www.console.runpod.io/user/settings",
    "lambda": "https://cloud.lambda.ai/api-keys/cloud-api",
    "tensordock": "https://dashboard.tensordock.com",
    "hostkey": "https://invapi.hostkey.com",
    "verda": "https://console.verda.com",
}
"""Where the keys of a market are made."""

FIRST_LABEL: Final = "first key"
"""Of the key that a new store is made with."""

AnswerT = TypeVar("AnswerT")


def init(
    workspace: str = "",
    *,
    store: str = "",
    flavour: str = "",
    bucket: str = "",
    prefix: str = "",
    endpoint: str = "",
    region: str = "",
    access_key: str = "",
    market: str = "",
    provider: str = "",
    path: Several = None,
    gpu: str | None = None,
    max_price: float | None = None,
) -> None:
    """Make a workspace: ask for its bucket, its market and its directories, and check each one.

    What an option gives is not asked. Secrets are never options: they are asked, or read from
    AWS_SECRET_ACCESS_KEY and TORPOR_MARKET_KEY. Nothing that exists is changed, and where something
    is refused nothing stays of what was made.

    Args:
        workspace: The name of the new workspace.
        store: The Object Store block, if you have one; `default` is the store on this host.
        flavour: The kind of the new bucket's store: s3, r2, b2, wasabi, minio, seaweedfs or other.
        bucket: The bucket. It must exist.
        prefix: What the names of all objects in the bucket begin with; empty for none.
        endpoint: The store's address.
        region: The store's region.
        access_key: The id of the access key.
        market: The market to rent at: vast, runpod, lambda, tensordock, hostkey or verda; local
            makes machines on this host.
        provider: The provider block, as type/name, if you have one.
        path: A directory to keep. May be repeated.
        gpu: The GPUs, in order of preference, such as "RTX 4090, L40S", H100:8 or 24GB+; empty
            takes any machine.
        max_price: The highest price of a machine, in dollars an hour; 0 for no limit.
    """
    with connected(), ExitStack() as undo:
        from blocks import Workspace

        name = _answered(
            "Name of the workspace", "mywork", lambda said: _free_name(Workspace, said), workspace
        )
        chosen_store = store or _store(
            undo, name, flavour, bucket, prefix, endpoint, region, access_key
        )
        if chosen_store != name:
            try_store(chosen_store)
        chosen_provider = provider or _provider(undo, market)
        if provider:
            try_market(chosen_provider)
        paths = path or _answered(
            "Directories to keep, with spaces between",
            usual_path(chosen_provider),
            lambda said: [machine_path(one) for one in said.split()],
        )
        model = _answered(
            "GPUs, such as RTX 4090, L40S or 24GB+; empty takes any machine", "", _wished, gpu
        )
        limit = _limit(chosen_provider, model) if max_price is None else max_price
        block = made(
            lambda: Workspace(
                name=name,
                paths=paths,
                store=chosen_store,
                provider=chosen_provider,
                gpu=model,
                max_price_usd_h=limit or None,
            )
        )
        save_new(undo, block, name)
        undo.pop_all()
        keep_on_record(name)
        say_of_this_home(paths)
        say(f"workspace   {name} is saved")
        say(f"            `torpor offers {name}` shows what to rent")
        say(f"            `torpor create {name}` rents an empty machine")
        say(f"            `torpor hibernate {name} --machine USER@HOST` stores one of yours")
        say(f"            `torpor edit {name}` changes its settings")


def usual_path(provider: str) -> str:
    """The directory that a workspace at this provider keeps, unless its user names another."""
    return "/workspace" if provider.startswith(_KEEPS_WORKSPACE) else "~/workspace"


def _store(
    undo: ExitStack,
    name: str,
    flavour: str,
    bucket: str,
    prefix: str,
    endpoint: str,
    region: str,
    access_key: str,
) -> str:
    """The name of a new Object Store block, or of the one on this host. ``undo`` deletes what was
    made, but for the key: once the store has answered, another command may have stored something
    with it, and the next `init` of this name takes it again."""
    from prefect_aws import AwsCredentials

    from blocks import ObjectStore
    from torpor.control.store.key_objects import KeyObjects
    from torpor.control.store.s3 import S3Store

    kind: Any = "other" if bucket and not flavour else kind_of_store(flavour)
    if kind == "default":
        return "default"
    _check_free(ObjectStore, name)
    _check_free(AwsCredentials, name)
    check_key_file(name)
    said = asked_store(kind, bucket, prefix, endpoint, region, access_key)
    block = said.block(name)
    save_new(undo, said.login(), name)
    store = S3Store.connect(block.reach())
    _probe(store)
    file, key = _first_key(name, store)
    save_new(undo, said.block(name, key), name)
    keep_object(name, KeyObjects(store), key)
    say_key(file)
    say(f"            `torpor store sheet {name}` prints the store key, which opens any copy.")
    return name


@dataclass(frozen=True)
class StoreAnswers:
    """A bucket and its login, as the options and the person at the terminal name them."""

    kind: Any
    bucket: str
    prefix: str
    endpoint: str
    region: str
    access_key: str
    secret_key: str = field(repr=False)

    def login(self) -> AwsCredentials:
        from prefect_aws import AwsCredentials
        from pydantic import SecretStr

        return AwsCredentials(
            aws_access_key_id=self.access_key, aws_secret_access_key=SecretStr(self.secret_key)
        )

    def keys(self) -> AccessKeys:
        """What the login gives, before it is saved."""
        from blocks.access_keys import AccessKeys

        return AccessKeys(self.access_key, self.secret_key, None, "", None, False)

    def block(self, name: str, key: UserKey | None = None) -> ObjectStore:
        """The Object Store block. Without ``key``: of a plain store, or of one whose key is not
        known yet."""
        from pydantic import SecretStr

        from blocks import ObjectStore

        block: ObjectStore = made(
            lambda: ObjectStore(
                flavour=self.kind,
                bucket=self.bucket,
                prefix=self.prefix,
                endpoint_url=self.endpoint,
                region=self.region,
                credentials=f"aws-credentials/{name}",
                encryption_key=None if key is None else SecretStr(key.text),
            )
        )
        return block


def asked_store(
    kind: Any, bucket: str, prefix: str, endpoint: str, region: str, access_key: str
) -> StoreAnswers:
    """What the options do not give is asked; nothing is saved."""
    from torpor.control.store.s3 import bucket_name

    bucket = _answered("Bucket, which must exist", "", bucket_name, bucket or None)
    if not endpoint and not region:
        endpoint, region = _place(kind)
    _region_and_endpoint(kind, region, endpoint)  # before a key is made
    if kind in _STORE_KEYS and not (access_key and os.environ.get(STORE_VARIABLE)):
        say(f"Keys are made at {_STORE_KEYS[kind]}")
    access_key = access_key or _answered("Id of the access key", "", _something)
    secret = ask_secret("Secret access key", STORE_VARIABLE)
    return StoreAnswers(kind, bucket, prefix, endpoint, region, access_key, secret)


def _first_key(name: str, store: S3Store) -> tuple[Path, UserKey]:
    """The key of a new block, and its file: one of this host that opens the store, or, in a store
    without any, a new key with a new store key. A key is of one store and its copies."""
    from torpor.control.store.key_objects import KeyObjects
    from torpor.shared.format.user_keys import UserKey

    objects, own = KeyObjects(store), key_file(name)
    for file, key in kept_keys(name):
        if key.opens:
            with suppress(KeyUnknown, *([] if file == own else [KeyDamaged])):
                objects.open(key)
                return file, key
        elif file == own:
            _check_store_key(objects, key.secret)
            return file, key
    there = "keys" if objects.ids() else ""
    if not there and store.holds_any("workspaces/"):
        there = "snapshots that were sealed with a key of their own, or with none"
    if not there and store.holds_any(settings_prefix()):
        there = "settings of workspaces, which were sealed with a key of their own, or with none"
    if there:
        raise InvalidInput(
            f"{store.address} has {there}, and no key in {own.parent} opens it: write a key of "
            f"that store, such as the one of its recovery sheet, into {own}, and give the command "
            "again. If a store block of yours is of this bucket and prefix, name it in --store. "
            "For a new store, take another bucket or --prefix"
        )
    key, store_key = UserKey.new(), secrets.token_bytes(KEY_BYTES)
    keep_key(name, key)
    objects.add(key, store_key, FIRST_LABEL, time.time())
    if objects.ids() != [key.id]:
        objects.remove(key.id, UserKey(store_key, opens=False))
        raise InvalidInput(
            f"somebody else has made a store in {store.address} at the same moment: the key of "
            "this one was withdrawn. Give the command again once the other one is done"
        )
    return own, key


def _check_store_key(objects: KeyObjects, store_key: bytes) -> None:
    """WrongKey where the store has key objects or snapshots, and none of them was made with this
    store key."""
    from torpor.control.store.key_check import check_sealed_with

    names = {found.key.split("/")[1] for found in objects.store.list("workspaces/")}
    known = map(WorkspaceName, sorted(names))
    sealed = check_sealed_with(objects.store, store_key, known, all_fit=False)
    ids = objects.ids()
    if ids and not sealed.fits and not any(objects.read(one, store_key).genuine for one in ids):
        raise WrongKey(
            f"{objects.store.address} has keys, none of which was made with the store key in the "
            "key file: it is of another store. Nothing was changed"
        )


def kind_of_store(given: str) -> Any:
    """The kind of store, or `default` for the one on this host."""

    def known(said: str) -> str:
        kind = _FLAVOURS.get(said.lower(), said.lower())
        if kind not in {*_FLAVOURS.values(), "default"} or (given and kind == "default"):
            raise InvalidInput(f"{said!r} is none of {', '.join(_FLAVOURS)}")
        return kind

    if not given:
        say(
            "Kinds of store: s3, r2, b2, wasabi, minio, seaweedfs, other; `default` is the one on "
            "this host."
        )
    return _answered("Kind of store", "default", known, given)


def _place(kind: str) -> tuple[str, str]:
    """The address and the region of a new bucket."""
    from blocks.flavour import DEFAULTS

    defaults = DEFAULTS[kind]  # type: ignore[index]
    if defaults.optional or defaults.by_region:

        def checked(said: str) -> str:
            _region_and_endpoint(kind, said, "")
            return said

        return "", _answered("Region of the bucket", defaults.region, checked)

    def valid(said: str) -> str:
        _region_and_endpoint(kind, "", said)
        return said

    return _answered(f"Address, such as {defaults.example}", "", valid), ""


def _region_and_endpoint(kind: Any, region: str, endpoint: str) -> None:
    """InvalidInput where region and endpoint do not fit this kind of store, or each other."""
    from blocks.flavour import region_and_endpoint

    try:
        region_and_endpoint(kind, region, endpoint)
    except ValueError as error:
        raise InvalidInput(str(error)) from None


def _provider(undo: ExitStack, market: str) -> str:
    """The provider block of a market, saved now if it is new. ``undo`` deletes it again."""
    import blocks
    from blocks.reference import saved_names

    keyed = {
        kind.get_block_type_slug().removesuffix("-provider"): kind
        for kind in blocks.PROVIDERS
        if "api_key" in kind.model_fields
    }

    def known(said: str) -> str:
        named = _MARKETS.get(said.lower(), said.lower())
        if named not in (*keyed, "local"):
            raise InvalidInput(
                f"{said!r} is none of {', '.join(keyed)}, local. The blocks of EC2, GCP, Azure and "
                "Kubernetes are made on the UI's page Blocks: give one as --provider type/name"
            )
        return named

    if not market:
        say(f"Markets: {', '.join(keyed)}; `local` makes machines on this host.")
        say("The blocks of EC2, GCP, Azure and Kubernetes are made on the UI's page Blocks.")
    market = _answered("Market", "local", known, market)
    if market == "local":
        try_market("local-provider/default")
        return "local-provider/default"
    kind: Any = keyed[market]
    slug, fields = kind.get_block_type_slug(), kind.model_fields
    if "default" not in saved_names(kind):
        if market in _MARKET_KEYS and not os.environ.get(MARKET_VARIABLE):
            say(f"Keys are made at {_MARKET_KEYS[market]}")
        needed = [name for name, field in fields.items() if field.is_required()]
        needed.remove("api_key")
        more = {
            name: ask_secret(f"{fields[name].title} of {market}", f"TORPOR_MARKET_{name.upper()}")
            for name in needed
        }
        key = ask_secret(f"{fields['api_key'].title} of {market}", MARKET_VARIABLE)
        block = made(lambda: kind(api_key=key, **more))
        block.open().check("")
        save_new(undo, block, "default")
    try_market(f"{slug}/default")
    return f"{slug}/default"


def say_of_this_home(paths: Sequence[str]) -> None:
    """Warn where the shell has replaced ~ before torpor saw it, because a machine's home is another
    one."""
    home = Path.home()
    for path in paths:
        if Path(path).is_relative_to(home) and home != Path("/"):
            say(
                f"torpor: warning: {path} is below the home of this host. For the home of the "
                f"machine, write ~ in quotes: '~/{Path(path).relative_to(home)}'",
                sys.stderr,
            )


def try_store(name: str) -> None:
    from blocks import ObjectStore
    from blocks.reference import load

    _probe(load(name, (ObjectStore,), of="").open())


def _probe(opened: S3Store) -> None:
    opened.probe()
    say(f"store       {opened.address}: wrote, read, listed and deleted a scratch object")


def try_market(reference: str) -> None:
    from blocks import PROVIDERS
    from blocks.reference import load

    opened = load(reference, PROVIDERS, of="").open()
    account = opened.check("")
    balance = "" if account.balance_usd is None else f", balance {account.balance_usd:.2f} $"
    say(short(f"market      {opened.identity}: account {account.name}{balance}"))
    for note in account.notes:
        say(f"            {note}")


def keep_on_record(name: str) -> None:
    """Keep what the blocks of a workspace hold in its bucket, for `torpor recover`. Where that
    fails, the next flow does it."""
    from tasks.ownership import check_owner
    from tasks.workspace_blocks import open_workspace

    def warn(words: str) -> None:
        say(f"torpor: warning: {words}", sys.stderr)

    try:
        check_owner(open_workspace(name), warn)
    except Exception as error:  # noqa: BLE001 - the block is saved; Prefect's client raises any
        warn(f"the settings of {name} are not in its bucket: {error}")


def _limit(reference: str, gpu: str) -> float:
    """The highest price per hour that the user answers; 0 for no limit. Not asked where machines
    cost nothing."""
    from blocks import PROVIDERS
    from blocks.reference import load
    from torpor.control.rental.search import find_offers

    opened = load(reference, PROVIDERS, of="").open()
    suggested = ""
    try:
        fitting = find_offers([opened], Want(gpu=gpu or None)).fitting
    except NoOffer as error:
        say(f"offers      {error}")
    else:
        prices = [offer.bound_usd_h for offer in fitting]
        if not any(prices):
            return 0.0
        suggested = f"{max(0.01, _ROOM * prices[0]):.2f}"
        say(f"offers      {len(prices)} fit now, the best one at {prices[0]:.3f} $/h")
    return _answered(
        "Highest price of a machine in $ an hour; none for no limit", suggested or "none", _price
    )


def _price(said: str) -> float:
    """The price as a number, 0 for no limit; InvalidInput for text that is no price."""
    try:
        limit = 0.0 if said == "none" else float(said)
    except ValueError:
        limit = -1.0
    if not 0 <= limit < math.inf:
        raise InvalidInput(f"{said!r} is no price: give dollars an hour, such as 0.50, or none")
    return limit


def _wished(said: str) -> str:
    from torpor.control.providers.gpu_wishes import wishes_of

    wishes_of(Want(gpu=said or None))
    return said


def _something(said: str) -> str:
    if not said:
        raise InvalidInput("an answer is needed")
    return said


def _free_name(kind: Any, said: str) -> str:
    name = workspace_name(said)
    _check_free(kind, name)
    return name


def made(make: Callable[[], Any]) -> Any:
    """A block made of these fields; InvalidInput with the field and its fault, never with its
    value."""
    from pydantic import ValidationError

    try:
        return make()
    except ValidationError as error:
        faults = error.errors(include_input=False, include_url=False, include_context=False)
        said = "; ".join(
            f"{'.'.join(map(str, fault['loc']))}: {fault['msg'].removeprefix('Value error, ')}"
            for fault in faults
        )
        raise InvalidInput(said) from None


def _check_free(kind: Any, name: str) -> None:
    from blocks.reference import saved_names

    if name in saved_names(kind):
        slug = kind.get_block_type_slug()
        how = f"`torpor edit {name}`" if slug == "workspace" else "on the UI's page Blocks"
        raise InvalidInput(
            f"there is a block {slug}/{name} already, which stays as it is: "
            f"choose another name, or change it: {how}"
        )


def save_new(undo: ExitStack, block: Any, name: str) -> None:
    """Save a new block, which ``undo`` deletes; InvalidInput where somebody has just saved one."""
    from prefect.exceptions import ObjectAlreadyExists

    try:
        block.save(name)
    except BaseException as error:
        if isinstance(error.__cause__, ObjectAlreadyExists):
            raise InvalidInput(
                f"somebody has just saved a block {block.get_block_type_slug()}/{name}, which "
                "stays as it is: choose another name"
            ) from None
        _delete_block(type(block), name)  # the block may be there in spite of the error
        raise
    undo.callback(_delete_block, type(block), name)


def _delete_block(kind: Any, name: str) -> None:
    with suppress(ValueError):  # the block does not exist
        kind.delete(name)


def _answered(
    question: str, usual: str, check: Callable[[str], AnswerT], given: str | None = None
) -> AnswerT:
    """The checked value of an option; without the option, the answer of the person at the terminal,
    who is asked again after a wrong answer."""
    if given or (given is not None and not usual):
        return check(given)
    if not sys.stdin.isatty():
        raise InvalidInput(f"nobody is at the terminal to answer: {question}? Give it as an option")
    shown = f" [{usual}]" if usual else ""
    while True:
        try:
            return check(answer(f"{question}{shown}: ") or usual)
        except InvalidInput as error:
            say(f"torpor: {error}", sys.stderr)


def ask_secret(question: str, variable: str, *, needed: bool = True) -> str:
    """``needed``: else nothing is an answer, also where nobody is at the terminal."""
    if given := os.environ.get(variable):
        return given
    if not sys.stdin.isatty() and not needed:
        return ""
    if not sys.stdin.isatty():
        raise InvalidInput(f"nobody is at the terminal to answer: {question}? Set {variable}")
    try:
        return getpass.getpass(f"{question}: ").strip()
    except EOFError:
        raise RunCancelled("the input ended before an answer: nothing was done") from None
