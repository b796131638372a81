"""The EC2 block opens with the login that it names, and refuses what AWS does not write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from prefect_aws.client_parameters import AwsClientParameters
from prefect_aws.credentials import AwsCredentials
from pydantic import SecretStr, ValidationError

from blocks import Ec2Provider
from blocks.reference import load_named
from deployments.market import described
from deployments.server import Server
from tests.markets.ec2 import REGION, FakeEc2
from torpor.shared.errors import InvalidInput
from torpor.shared.values import Want
from torpor.shared.wire.job import NoticeSource

SECRET = "never-to-be-seen-again"


@pytest.fixture
def fake() -> Iterator[FakeEc2]:
    fake = FakeEc2()
    yield fake
    fake.close()


def test_saved_and_loaded_it_shows_what_the_account_may_rent(
    prefect_server: Server, fake: FakeEc2, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The address of an object store, in the environment of many who use one.
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    AwsCredentials(
        aws_access_key_id=fake.key,
        aws_secret_access_key=SecretStr(SECRET),
        aws_client_parameters=AwsClientParameters(endpoint_url=fake.url),
    ).save("ec2", overwrite=True)
    Ec2Provider(
        account=f"{fake.account[:4]}-{fake.account[4:8]}-{fake.account[8:]}",
        credentials="ec2",
        region=REGION,
        types=["g5.xlarge"],
        metadata_url="http://[fd00:ec2::254]",
    ).save("ec2", overwrite=True)
    provider = load_named(Ec2Provider, "ec2", of="test").open()
    assert provider.abilities.notices == (NoticeSource("aws", "http://[fd00:ec2::254]"),)
    assert provider.identity == f"ec2://{fake.account}/{REGION}"
    text = "\n".join(described(provider, Want(gpu="A10G", disk_gib=20, spot="allowed")))
    assert f"account   AWS account {fake.account}" in text
    assert "8 vCPUs" in text
    assert "g5.xlarge/us-east-1a/spot" in text
    assert SECRET not in text
    assert fake.market.rented == []


def test_credentials_that_are_missing_or_of_no_profile_are_named(
    prefect_server: Server,
) -> None:
    block = Ec2Provider(account="123456789012", credentials="gone")
    with pytest.raises(InvalidInput, match="no block aws-credentials/gone"):
        block.open()
    AwsCredentials(profile_name="no-such-profile").save("profile", overwrite=True)
    with pytest.raises(InvalidInput, match="no-such-profile"):
        Ec2Provider(account="123456789012", credentials="profile").open()


@pytest.mark.parametrize(
    "fields",
    [
        {"account": "12345"},
        {"region": "virginia"},
        {"image": "ubuntu:24.04"},
        {"subnets": ["subnet-0123456789abcdef0", "vpc-0123456789abcdef0"]},
        {"security_group": "default"},
        {"ssh_from": "myhost"},
        {"types": ["g5 xlarge"]},
        {"instance_profile": "a role"},
        {"instance_profile": "arn:aws:iam::123456789012:role/reader"},
        {"ports": [8000]},
        {"ports": [22], "ssh_from": "203.0.113.7/32"},
        {"ports": [8000], "ssh_from": "203.0.113.7/32", "security_group": "sg-0123456789abcdef0"},
        {"metadata_url": "https://169.254.169.254/latest"},
    ],
)
def test_what_aws_does_not_write_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Ec2Provider(**{"account": "123456789012", **fields})
