"""The blocks of GPU markets: the key of an account there."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any, Final, TypeVar
from urllib.parse import urlsplit

from prefect.blocks.core import Block
from pydantic import AfterValidator, ConfigDict, Field, HttpUrl, SecretStr, field_validator

from blocks.container import Containers
from blocks.reference import LOGOS, load_named, saved_names_of
from torpor.control.providers import lambda_cloud, runpod, tensordock, vast, verda
from torpor.control.providers.hostkey import provider as hostkey
from torpor.control.providers.provider import Provider
from torpor.shared.errors import InvalidInput

_ACCOUNT: Final = (
    "What torpor calls this account in its records, such as vast://0123456789abcdef: reconcile and "
    "spend show it. Empty: a hash of the API key. When you change the key, write here what the "
    "account was called before, so that rentals whose machines are gone are still closed. Never "
    "the name of another account."
)
_ADDRESS: Final = (
    "Where the market's API answers. Leave it as it is, unless your requests go through a gateway. "
    "The key is sent there."
)


def _trimmed(key: SecretStr) -> SecretStr:
    text = key.get_secret_value().strip()
    if not text.isascii() or not text.isprintable() or not text or " " in text:
        raise ValueError("an API key is one word of printable characters; this is not")
    return SecretStr(text)


def _safe(url: str) -> str:
    parts = urlsplit(url.strip())
    here = parts.hostname in ("127.0.0.1", "localhost", "::1")
    if not parts.hostname or (parts.scheme != "https" and not (here and parts.scheme == "http")):
        raise ValueError(
            "this is not where a key may be sent: begin with https://, or with http:// on this host"
        )
    if "@" in parts.netloc:
        raise ValueError("this is not where a key may be sent: no login may be in the address")
    return url.strip().rstrip("/")


def _account(name: str) -> str:
    name = name.strip()
    if name and not re.fullmatch(r"[a-z]+://[\w.-]{1,64}", name):
        raise ValueError(f"{name!r} is not what torpor calls an account: copy it from reconcile")
    return name


def _word(text: str) -> str:
    text = text.strip()
    if text and not re.fullmatch(r"[\w-]{1,100}", text):
        raise ValueError(f"{text!r} is no id: copy it from the market's console")
    return text


ApiKey = Annotated[SecretStr, AfterValidator(_trimmed)]
AccountName = Annotated[str, AfterValidator(_account)]
ApiUrl = Annotated[str, AfterValidator(_safe)]


_Adapter = TypeVar("_Adapter", bound=Provider)


def _address(url: str) -> Any:
    return Field(default=url, title="API address", description=_ADDRESS)


class KeyedProvider(Block):
    """An account at a market that asks for an API key."""

    model_config = ConfigDict(hide_input_in_errors=True)  # the input may be a secret

    api_key: ApiKey = Field(title="API key")

    account: AccountName = Field(default="", description=_ACCOUNT)

    url: ApiUrl = _address("")

    def open(self) -> Provider:
        """The provider, ready to use. Nothing is sent."""
        raise NotImplementedError

    def _opened(self, kind: Callable[..., _Adapter], **more: Any) -> _Adapter:
        return kind(self.api_key.get_secret_value(), account=self.account, url=self.url, **more)


class VastProvider(Containers, KeyedProvider):
    """An account at Vast.ai: containers on machines of many owners, on demand or by bid.

    Example:
        List what is on sale:
        ```python
        from blocks import VastProvider
        from torpor.shared.values import Want

        provider = VastProvider.load("BLOCK_NAME").open()
        print(provider.check(), provider.offers(Want(gpu="RTX 4090")))
        ```
    """

    _block_type_name = "Vast Provider"
    _block_type_slug = "vast-provider"
    _logo_url = HttpUrl(f"{LOGOS}/process.png")
    _documentation_url = HttpUrl("https://docs.vast.ai/api-reference")

    api_key: ApiKey = Field(
        title="API key", description="An API key that may read the account and manage instances."
    )

    url: ApiUrl = _address(vast.URL)

    image_login: SecretStr | None = Field(
        default=None,
        description=(
            "The login to the private registry of a workspace's image, as `docker login` takes it: "
            "-u USER -p PASSWORD ghcr.io. Empty: images are public."
        ),
    )

    @field_validator("volumes", mode="after")
    @classmethod
    def _numbered(cls, volumes: list[str]) -> list[str]:
        if not all(re.match(r"\s*\d+:", volume) for volume in volumes):
            raise ValueError("volumes: write the number of the volume, as in 12345:/data")
        return volumes

    @field_validator("image_login", mode="after")
    @classmethod
    def _as_docker_takes_it(cls, login: SecretStr | None) -> SecretStr | None:
        text = login.get_secret_value().strip() if login else ""
        if text and not re.fullmatch(r"-u \S+ -p \S+(?: \S+)?", text):
            raise ValueError("write the login as docker login takes it: -u USER -p PASSWORD SERVER")
        return SecretStr(text) if text else None

    def open(self) -> vast.VastProvider:
        login = self.image_login.get_secret_value() if self.image_login else ""
        return self._opened(vast.VastProvider, **self.terms(login))


class RunpodProvider(Containers, KeyedProvider):
    """An account at RunPod: containers on demand, in data centres and at community hosts.

    Example:
        List what is on sale:
        ```python
        from blocks import RunpodProvider
        from torpor.shared.values import Want

        provider = RunpodProvider.load("BLOCK_NAME").open()
        print(provider.check(), provider.offers(Want(gpu="RTX 4090")))
        ```
    """

    _block_type_name = "RunPod Provider"
    _block_type_slug = "runpod-provider"
    _logo_url = HttpUrl(f"{LOGOS}/process.png")
    _documentation_url = HttpUrl("https://docs.runpod.io/api-reference-v2")

    api_key: ApiKey = Field(title="API key", description="An API key that may read and write pods.")

    url: ApiUrl = _address(runpod.URL)

    registry: Annotated[str, AfterValidator(_word)] = Field(
        default="",
        description=(
            "The id of a login to a private registry that is stored at RunPod (Settings, Container "
            "Registry Auth). Empty: images are public."
        ),
    )

    def open(self) -> runpod.RunpodProvider:
        return self._opened(runpod.RunpodProvider, **self.terms(self.registry))


class LambdaProvider(KeyedProvider):
    """An account at Lambda: virtual machines on demand, with NVIDIA's driver and CUDA.

    Example:
        List what is on sale:
        ```python
        from blocks import LambdaProvider
        from torpor.shared.values import Want

        provider = LambdaProvider.load("BLOCK_NAME").open()
        print(provider.check(), provider.offers(Want(gpu="A10")))
        ```
    """

    _block_type_name = "Lambda Provider"
    _block_type_slug = "lambda-provider"
    _logo_url = HttpUrl(f"{LOGOS}/process.png")
    _documentation_url = HttpUrl("https://docs.lambda.ai/api/cloud")

    api_key: ApiKey = Field(title="API key", description="An API key of the account.")

    url: ApiUrl = _address(lambda_cloud.URL)

    def open(self) -> lambda_cloud.LambdaProvider:
        return self._opened(lambda_cloud.LambdaProvider)


class TensordockProvider(KeyedProvider):
    """An account at TensorDock: virtual machines on demand, on hosts of many owners.

    Example:
        List what is on sale:
        ```python
        from blocks import TensordockProvider
        from torpor.shared.values import Want

        provider = TensordockProvider.load("BLOCK_NAME").open()
        print(provider.check(), provider.offers(Want(gpu="RTX 4090")))
        ```
    """

    _block_type_name = "TensorDock Provider"
    _block_type_slug = "tensordock-provider"
    _logo_url = HttpUrl(f"{LOGOS}/process.png")
    _documentation_url = HttpUrl("https://dashboard.tensordock.com/api/docs")

    api_key: ApiKey = Field(
        title="API key", description="An API token of the organization, version 2 of the API."
    )

    url: ApiUrl = _address(tensordock.URL)

    def open(self) -> tensordock.TensorDockProvider:
        return self._opened(tensordock.TensorDockProvider)


class HostkeyProvider(KeyedProvider):
    """An account at HOSTKEY: dedicated and virtual servers with GPUs, billed by the hour.

    HOSTKEY refuses the login of an account without servers. Keep one there that is not torpor's.

    Example:
        List what is on sale:
        ```python
        from blocks import HostkeyProvider
        from torpor.shared.values import Want

        provider = HostkeyProvider.load("BLOCK_NAME").open()
        print(provider.check(), provider.offers(Want(gpu="RTX A5000")))
        ```
    """

    _block_type_name = "Hostkey Provider"
    _block_type_slug = "hostkey-provider"
    _logo_url = HttpUrl(f"{LOGOS}/process.png")
    _documentation_url = HttpUrl("https://hostkey.com/documentation/apidocs/")

    api_key: ApiKey = Field(
        title="API key", description="An API key for any server of the account."
    )

    url: ApiUrl = _address(hostkey.URL)

    def open(self) -> hostkey.HostkeyProvider:
        return self._opened(hostkey.HostkeyProvider)


class VerdaProvider(KeyedProvider):
    """An account at Verda, formerly DataCrunch: virtual machines, on demand and spot.

    Example:
        List what is on sale:
        ```python
        from blocks import VerdaProvider
        from torpor.shared.values import Want

        provider = VerdaProvider.load("BLOCK_NAME").open()
        print(provider.check(), provider.offers(Want(gpu="H100", spot="allowed")))
        ```
    """

    _block_type_name = "Verda Provider"
    _block_type_slug = "verda-provider"
    _logo_url = HttpUrl(f"{LOGOS}/process.png")
    _documentation_url = HttpUrl("https://api.verda.com/v1/docs")

    client_id: Annotated[str, AfterValidator(_word)] = Field(
        title="Client ID",
        description="Of credentials of the Cloud API, which Verda's console makes.",
    )

    api_key: ApiKey = Field(title="Client secret", description="The secret of these credentials.")

    url: ApiUrl = _address(verda.URL)

    def open(self) -> verda.VerdaProvider:
        return self._opened(verda.VerdaProvider, client_id=self.client_id)


def check_account_name(block: Block) -> None:
    """InvalidInput where the account that this block names is the one of another block, with
    another key: their machines would be taken for each other's."""
    if not isinstance(block, KeyedProvider) or not block.account:
        return
    from blocks import PROVIDERS

    keyed = [kind for kind in PROVIDERS if issubclass(kind, KeyedProvider)]
    for kind, name in saved_names_of(keyed):
        with suppress(InvalidInput):  # a block that cannot be used has no account name
            other = load_named(kind, name, of="a provider block")
            if other.api_key == block.api_key or other.open().identity != block.account:
                continue
            shared = f"{kind.get_block_type_slug()}/{name}"
            break
    else:
        return
    raise InvalidInput(
        f"the provider block {block._block_document_name or block.account} calls its account "
        f"{block.account}, which is the account of the block {shared}: two accounts cannot "
        "share a name. Delete the block with the old key, or clear `account` in one of them"
    )
