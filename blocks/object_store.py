"""The block of an object store: its address, its credentials and its encryption key."""

from __future__ import annotations

import base64
import dataclasses
import secrets
from collections.abc import Callable
from functools import partial
from typing import Final, Self
from urllib.parse import urlsplit

from prefect.blocks.core import Block
from pydantic import ConfigDict, Field, HttpUrl, SecretStr, field_validator, model_validator

from blocks.access_keys import AccessKeys, access_keys
from blocks.connection import see_that_it_is_of_this_host
from blocks.flavour import Flavour, region_and_endpoint
from blocks.records_key import records_key
from blocks.reference import LOGOS, Reference
from torpor.control.own_server import is_this_host
from torpor.control.store.key_objects import KeyObjects, opened_key
from torpor.control.store.s3 import RootOf, S3Settings, S3Store
from torpor.control.store_prices import StorePrice, price_of
from torpor.shared.errors import InvalidInput
from torpor.shared.format.keys import KEY_BYTES
from torpor.shared.format.user_keys import UserKey
from torpor.shared.values import Away

MOST_PATIENCE_MIN: Final = 720  # a grant of an hour is renewed, a night's bill is not


class ObjectStore(Block):
    """A bucket and prefix in S3, R2, B2, Wasabi, SeaweedFS or any S3-compatible store.

    Snapshots are stored here. With an encryption key, everything is sealed before it leaves a
    machine. **Without the key the snapshots are lost**, so keep a copy of it elsewhere.

    Example:
        Make a sealed store, and load it later:
        ```python
        from blocks import ObjectStore
        from prefect_aws import AwsCredentials

        AwsCredentials(aws_access_key_id="KEY", aws_secret_access_key="SECRET").save("r2")
        ObjectStore(
            flavour="cloudflare-r2",
            bucket="my-snapshots",
            endpoint_url="https://ACCOUNT_ID.r2.cloudflarestorage.com",
            credentials="aws-credentials/r2",
            encryption_key=ObjectStore.new_encryption_key(),
        ).save("default")

        store = ObjectStore.load("BLOCK_NAME")
        store.open().probe()
        ```
    """

    model_config = ConfigDict(hide_input_in_errors=True)

    _block_type_name = "Object Store"
    _block_type_slug = "object-store"
    _logo_url = HttpUrl(f"{LOGOS}/filesystem.png")
    _documentation_url = HttpUrl("https://docs.prefect.io/v3/concepts/blocks")

    flavour: Flavour = Field(
        default="aws-s3",
        description="The kind of store. Sets defaults and checks the endpoint.",
    )
    bucket: str = Field(description="The bucket's name. The bucket must exist.")
    credentials: Reference = Field(
        default="aws-credentials/default",
        description=(
            "The block with the access key: aws-credentials/NAME or minio-credentials/NAME. "
            "AWS credentials work for every store."
        ),
    )
    prefix: str = Field(
        default="", description="The prefix of all object names in the bucket. May stay empty."
    )
    region: str = Field(
        default="",
        description="The store's region. Empty: the endpoint's, or the flavour's default.",
    )
    endpoint_url: str = Field(
        default="",
        title="Endpoint URL",
        description=(
            "The store's address, for example https://ACCOUNT_ID.r2.cloudflarestorage.com. "
            "Leave it empty for AWS, and for B2 and Wasabi if you give the region."
        ),
    )
    encryption_key: SecretStr | None = Field(
        default=None,
        description=(
            "32 bytes in base64 or hexadecimal, which seal the snapshots; or a key of "
            "`torpor store add-key NAME --label escrow`, which opens the store. Snapshots are "
            "sealed before they leave a machine. Keep a copy elsewhere: without a key they are "
            "lost. None: snapshots stay plain."
        ),
    )

    patience_min: float = Field(
        default=30.0,
        ge=0,
        le=MOST_PATIENCE_MIN,
        title="Patience (minutes)",
        description=(
            "How long a run, and its agent on the machine, waits for a store that answers 500 or "
            "503, resets connections or times out, before it gives up. The machine costs money "
            "meanwhile. 0: five attempts, which take seconds."
        ),
    )
    price_gb_month_usd: float | None = Field(
        default=None,
        ge=0,
        title="Price per GB and month",
        description=(
            "What you pay to store one GB for a month, in dollars, for `benchmark` and `spend`. "
            "None: the flavour's list price, if it has one."
        ),
    )
    price_egress_gb_usd: float | None = Field(
        default=None,
        ge=0,
        title="Price per GB downloaded",
        description="What you pay to read one GB, in dollars. None: the flavour's list price.",
    )

    @staticmethod
    def new_encryption_key() -> SecretStr:
        """A random key. Keep a copy of its ``get_secret_value()`` outside of Prefect."""
        return SecretStr(base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode())

    def open(self, on_away: Callable[[Away], None] | None = None) -> S3Store:
        """The store, ready to use on the control side. Raises InvalidInput. Nothing is sent.
        ``on_away`` hears of each wait for a store that is away."""
        return S3Store.connect(self.settings(), on_away)

    def settings(self) -> S3Settings:
        """Address and keys of the store, and what signs its records, as ``open`` reads it."""
        root = self.store_key() or records_key(self.bucket, self.prefix)
        return dataclasses.replace(self.reach(), root=root)

    def reach(self, given: AccessKeys | None = None) -> S3Settings:
        """Address and access keys of the store: what reads and writes objects, but no record. Loads
        the credentials block, where no keys are ``given``, and asks the store nothing; raises
        InvalidInput."""
        me = f"object store {self._block_document_name or self.bucket}"
        keys = given or access_keys(self.credentials, of=me)
        region, endpoint_url = region_and_endpoint(
            self.flavour, self.region, self.endpoint_url or keys.endpoint_url
        )
        if is_this_host(urlsplit(endpoint_url or "").hostname or ""):
            see_that_it_is_of_this_host(f"{me} at {endpoint_url}")
        return S3Settings(
            bucket=self.bucket,
            access_key=keys.access_key,
            secret_key=keys.secret_key,
            session_token=keys.session_token,
            endpoint_url=endpoint_url,
            region=region,
            prefix=self.prefix,
            patience_s=60 * self.patience_min,
            virtual_host=keys.virtual_host,
            verify_tls=keys.verify_tls,
        )

    def key_objects(self) -> KeyObjects:
        """The key objects of the store."""
        return KeyObjects(S3Store.connect(self.reach()))

    def price(self) -> StorePrice | None:
        """What it costs: its own prices, where it has none its flavour's; None if unknown."""
        return price_of(self.flavour, self.price_gb_month_usd, self.price_egress_gb_usd)

    def store_key(self) -> bytes | RootOf | None:
        """The store key, which seals snapshots, or what reads it from the store, where the block's
        key opens a key object; None if snapshots stay plain."""
        user_key = self.user_key()
        if user_key is None or not user_key.opens:
            return None if user_key is None else user_key.secret
        return partial(opened_key, user_key)

    def key(self) -> bytes | None:
        """The store key itself; None if snapshots stay plain. Where the block's key opens a key
        object, this process reads that once: raises KeyUnknown where there is none, and as the
        store does."""
        found = self.store_key()
        return found(self.open()) if callable(found) else found

    def user_key(self) -> UserKey | None:
        """The key of the block; None if snapshots stay plain."""
        if self.encryption_key is None:
            return None
        return UserKey.of(self.encryption_key.get_secret_value())

    @field_validator("bucket", "prefix", "region", "endpoint_url", mode="after")
    @classmethod
    def _trimmed(cls, value: str) -> str:
        return value.strip()

    @field_validator("encryption_key", mode="after")
    @classmethod
    def _whole_key(cls, value: SecretStr | None) -> SecretStr | None:
        if value is None or not value.get_secret_value().strip():
            return None
        try:
            UserKey.of(value.get_secret_value())
        except InvalidInput as error:
            raise ValueError(str(error)) from None
        return value

    @model_validator(mode="after")
    def _placed(self) -> Self:
        # Without an endpoint here, the credentials block may have one.
        if self.endpoint_url:
            region_and_endpoint(self.flavour, self.region, self.endpoint_url)
        return self
