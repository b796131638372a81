"""The command that asks for a bucket, a market's key and a workspace, and checks each one live."""

from __future__ import annotations

import getpass
import math
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, cast

from cyclopts import Parameter

from deployments.installation import secret_file
from torpor.control.own_server import state_folder
from torpor.control.rental.search import find_offers
from torpor.shared.errors import InvalidInput, NoOffer, TorporError
from torpor.shared.values import Want, workspace_name
from torpor_cli.server import connected

Several = Annotated[list[str] | None, Parameter(negative=())]
STORE_VARIABLE: Final = "AWS_SECRET_ACCESS_KEY"
MARKET_VARIABLE: Final = "TORPOR_MARKET_KEY"
_KEEPS_WORKSPACE: Final = ("vast-provider/", "runpod-provider/")
"""Markets whose images keep work in /workspace."""
_ROOM: Final = 1.5
"""The highest price that is suggested, by the best offer's."""
_FLAVOURS: Final = ("aws-s3", "cloudflare-r2", "backblaze-b2", "wasabi", "minio", "other")


def init(
    workspace: str = "",
    *,
    store: str = "",
    flavour: Literal[
        "aws-s3", "cloudflare-r2", "backblaze-b2", "wasabi", "seaweedfs", "minio", "other"
    ]
    | None = None,
    bucket: str = "",
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
    AWS_SECRET_ACCESS_KEY and TORPOR_MARKET_KEY. Nothing that exists is changed.

    Args:
        workspace: The name of the new workspace.
        store: The Object Store block, if you have one; `default` is the store on this host.
        flavour: The kind of the new bucket's store.
        bucket: The bucket. It must exist.
        endpoint: The store's address.
        region: The store's region.
        access_key: The id of the access key.
        market: The market to rent at, such as vast; local makes machines on this host.
        provider: The provider block, as type/name, if you have one.
        path: A directory to keep. May be repeated.
        gpu: The GPUs, in order of preference, such as "RTX 4090, L40S", H100:8 or 24GB+; empty
            takes any machine.
        max_price: The highest price of a machine, in dollars an hour; 0 for no limit.
    """
    with connected():
        from blocks import Workspace

        name = workspace_name(workspace or _ask("Name of the workspace", "mywork"))
        _check_free(Workspace, name)
        chosen_store = store or _store(name, flavour or "", bucket, endpoint, region, access_key)
        if chosen_store != name:
            _try_store(chosen_store)
        chosen_provider = provider or _provider(market)
        _try_market(chosen_provider)
        usual = "/workspace" if chosen_provider.startswith(_KEEPS_WORKSPACE) else "~/workspace"
        paths = path or _ask("Directories to keep, with spaces between", usual).split()
        model = (
            _ask("GPUs, such as RTX 4090, L40S; empty takes any machine", "")
            if gpu is None
            else gpu
        )
        limit = _limit(chosen_provider, model) if max_price is None else max_price
        Workspace(
            name=name,
            paths=paths,
            store=chosen_store,
            provider=chosen_provider,
            gpu=model,
            max_price_usd_h=limit or None,
        ).save(name)
        print(f"workspace   {name} is saved. `torpor offers {name}` shows what to rent, and")
        print(f"            `torpor create {name}` rents an empty machine. For a machine of yours:")
        print(f"            `torpor hibernate {name} --machine USER@HOST` stores what is there.")


def _store(
    name: str, flavour: str, bucket: str, endpoint: str, region: str, access_key: str
) -> str:
    """The name of a new Object Store block, or of the one on this host."""
    from prefect_aws import AwsCredentials
    from pydantic import SecretStr

    from blocks import ObjectStore

    if not flavour and not bucket:
        print(f"Kinds of store: {', '.join(_FLAVOURS)}; `default` is the store on this host.")
        flavour = _ask("Kind of store", "default")
    if flavour == "default":
        return "default"
    _check_free(ObjectStore, name)
    _check_free(AwsCredentials, name)
    bucket = bucket or _ask("Bucket", "")
    if not endpoint and not region:
        endpoint = _ask("Address of the store; empty if the region says it", "")
        region = "" if endpoint else _ask("Region", "")
    access_key = access_key or _ask("Id of the access key", "")
    secret = _secret("Secret access key", STORE_VARIABLE)
    key_file = state_folder() / "keys" / name
    key = secret_file(key_file, lambda: ObjectStore.new_encryption_key().get_secret_value())
    block = _made(
        lambda: ObjectStore(
            flavour=cast(Any, flavour or "other"),
            bucket=bucket,
            endpoint_url=endpoint,
            region=region,
            credentials=f"aws-credentials/{name}",
            encryption_key=SecretStr(key),
        )
    )
    AwsCredentials(aws_access_key_id=access_key, aws_secret_access_key=SecretStr(secret)).save(name)
    block.save(name)
    try:
        _try_store(name)
    except TorporError:
        for saved in (block, AwsCredentials):
            saved.delete(name)
        raise
    print(f"key         {key_file} seals the snapshots. Keep a copy: without it they are lost.")
    return name


def _provider(market: str) -> str:
    """The provider block of a market, saved now if it is new."""
    import blocks
    from blocks.reference import saved_names

    keyed = {
        kind.get_block_type_slug().removesuffix("-provider"): kind
        for kind in blocks.PROVIDERS
        if "api_key" in kind.model_fields
    }
    if not market:
        print(f"Markets: {', '.join(keyed)}; `local` makes machines on this host.")
        print("The blocks of EC2, GCP, Azure and Kubernetes are made on the UI's page Blocks.")
        market = _ask("Market", "local")
    if market == "local":
        return "local-provider/default"
    if market not in keyed:
        raise InvalidInput(f"{market!r} is none of {', '.join(keyed)}, local")
    kind: Any = keyed[market]
    slug, fields = kind.get_block_type_slug(), kind.model_fields
    if "default" in saved_names(kind):
        return f"{slug}/default"
    needed = [name for name, field in fields.items() if field.is_required() and name != "api_key"]
    more = {
        name: _secret(f"{fields[name].title} of {market}", f"TORPOR_MARKET_{name.upper()}")
        for name in needed
    }
    key = _secret(f"{fields['api_key'].title} of {market}", MARKET_VARIABLE)
    block = _made(lambda: kind(api_key=key, **more))
    block.open().check("")
    block.save("default")
    return f"{slug}/default"


def _try_store(name: str) -> None:
    from blocks import ObjectStore
    from blocks.reference import load

    opened = load(name, (ObjectStore,), of="torpor init").open()
    opened.probe()
    print(f"store       {opened.address}: wrote, read, listed and deleted a scratch object")


def _try_market(reference: str) -> None:
    from blocks import PROVIDERS
    from blocks.reference import load

    opened = load(reference, PROVIDERS, of="torpor init").open()
    account = opened.check("")
    balance = "" if account.balance_usd is None else f", balance {account.balance_usd:.2f} $"
    print(f"market      {opened.identity}: account {account.name}{balance}")
    for note in account.notes:
        print(f"            {note}")


def _limit(reference: str, gpu: str) -> float:
    """The highest price per hour that the user answers; 0 for no limit. Not asked where machines
    cost nothing."""
    from blocks import PROVIDERS
    from blocks.reference import load

    opened = load(reference, PROVIDERS, of="torpor init").open()
    suggested = ""
    try:
        fitting = find_offers([opened], Want(gpu=gpu or None)).fitting
    except NoOffer as error:
        print(f"offers      {error}")
    else:
        prices = [offer.bound_usd_h for offer in fitting]
        if not any(prices):
            return 0.0
        suggested = f"{max(0.01, _ROOM * prices[0]):.2f}"
        print(f"offers      {len(prices)} fit now, the best one at {prices[0]:.3f} $/h")
    said = _ask("Highest price of a machine in $ an hour; none for no limit", suggested or "none")
    try:
        limit = 0.0 if said == "none" else float(said)
    except ValueError:
        limit = -1.0
    if not 0 <= limit < math.inf:
        raise InvalidInput(f"{said!r} is no price: give dollars an hour, such as 0.50, or none")
    return limit


def _made(make: Callable[[], Any]) -> Any:
    """The block; InvalidInput with the field and its fault, never with its value."""
    from pydantic import ValidationError

    try:
        return make()
    except ValidationError as error:
        faults = error.errors(include_input=False, include_url=False, include_context=False)
        said = "; ".join(
            f"{'.'.join(str(step) for step in fault['loc'])}: {fault['msg']}" for fault in faults
        )
        raise InvalidInput(said) from None


def _check_free(kind: Any, name: str) -> None:
    from blocks.reference import saved_names

    if name in saved_names(kind):
        raise InvalidInput(
            f"there is a block {kind.get_block_type_slug()}/{name} already, which stays as it is: "
            "choose another name, or edit it on the UI's page Blocks"
        )


def _ask(question: str, usual: str) -> str:
    if not sys.stdin.isatty():
        raise InvalidInput(f"nobody is at the terminal to answer: {question}? Give it as an option")
    shown = f" [{usual}]" if usual else ""
    return input(f"{question}{shown}: ").strip() or usual


def _secret(question: str, variable: str) -> str:
    if given := os.environ.get(variable):
        return given
    if not sys.stdin.isatty():
        raise InvalidInput(f"nobody is at the terminal to answer: {question}? Set {variable}")
    return getpass.getpass(f"{question}: ").strip()
