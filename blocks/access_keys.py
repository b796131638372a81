"""The access key of a store, read from a block of prefect_aws.

prefect_aws takes as long to import as the rest of a command. A block that holds its key itself is
therefore read as a document; any other one, and whatever is wrong, is left to prefect_aws.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from msgspec import Struct
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound

from blocks.reference import load, loaded_once
from torpor.shared.errors import InvalidInput

if TYPE_CHECKING:
    from prefect_aws.credentials import AwsCredentials, MinIOCredentials

_FIELDS: Final = {
    "aws-credentials": ("aws_access_key_id", "aws_secret_access_key"),
    "minio-credentials": ("minio_root_user", "minio_root_password"),
}
"""Where each type of block holds its access key and its secret key; the first type is the
default."""
_LOGS_IN_ELSEWHERE: Final = ("profile_name", "assume_role_arn")
_PARAMETERS: Final = {"api_version", "use_ssl", "verify", "endpoint_url", "config"}
"""Client parameters that this module reads, or that do not matter to signing."""


class AccessKeys(Struct, frozen=True):
    """``verify_tls``: as in S3Settings."""

    access_key: str
    secret_key: str
    session_token: str | None
    endpoint_url: str
    verify_tls: Literal[False] | str | None
    virtual_host: bool

    def __repr__(self) -> str:
        return f"AccessKeys({self.access_key!r})"


def access_keys(reference: str, *, of: str) -> AccessKeys:
    """The key that the block gives; InvalidInput where it gives none. ``of``: as in load()."""
    slug, _, name = reference.rpartition("/")
    slug = slug or next(iter(_FIELDS))
    if slug in _FIELDS:
        held = loaded_once((slug, name), lambda: _held(slug, name))
        if held is not None:
            return held
    return _given(reference, of)


def _held(slug: str, name: str) -> AccessKeys | None:
    """The key that the block itself holds; None where only prefect_aws can say which key the block
    gives."""
    with get_client(sync_client=True) as client:
        try:
            document = client.read_block_document_by_name(name, slug, include_secrets=True)
        except ObjectNotFound:
            return None
    data: dict[str, Any] = document.data
    access_key, secret_key = (data.get(field) for field in _FIELDS[slug])
    parameters = data.get("aws_client_parameters") or {}
    if not isinstance(parameters, dict):
        return None
    given = {field for field, value in parameters.items() if value is not None}
    elsewhere = any(data.get(field) for field in _LOGS_IN_ELSEWHERE)
    if not (access_key and secret_key) or elsewhere or not given <= _PARAMETERS:
        return None
    verify = parameters.get("verify")
    if not isinstance(verify, bool | None):
        return None
    return AccessKeys(
        access_key=access_key,
        secret_key=secret_key,
        session_token=data.get("aws_session_token"),
        endpoint_url=parameters.get("endpoint_url") or "",
        verify_tls=False if verify is False else None,
        virtual_host=_is_virtual(parameters.get("config")),
    )


def _given(reference: str, of: str) -> AccessKeys:
    """What prefect_aws finds for the block: its own key, a profile's, a role's or the host's."""
    from prefect_aws.credentials import AwsCredentials, MinIOCredentials

    kinds: tuple[type[AwsCredentials | MinIOCredentials], ...] = (AwsCredentials, MinIOCredentials)
    block = load(reference, kinds, of=of)
    parameters = block.aws_client_parameters
    found = block.get_boto3_session().get_credentials()
    if found is None:
        raise InvalidInput(
            f"{of}: neither the block {reference} nor the environment has an access key: fill in "
            "the block's access key and secret"
        )
    keys = found.get_frozen_credentials()
    checked, bundle = parameters.verify, parameters.verify_cert_path
    if bundle is None and isinstance(checked, Path):
        bundle = checked  # an older way to name the file
    return AccessKeys(
        access_key=keys.access_key or "",
        secret_key=keys.secret_key or "",
        session_token=keys.token,
        endpoint_url=parameters.endpoint_url or "",
        verify_tls=False if checked is False else None if bundle is None else str(bundle),
        virtual_host=_is_virtual(parameters.config),
    )


def _is_virtual(config: dict[str, Any] | None) -> bool:
    return bool(((config or {}).get("s3") or {}).get("addressing_style") == "virtual")
