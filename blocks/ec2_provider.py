"""The block of AWS EC2: an account, a region, and where machines are placed in it."""

from __future__ import annotations

import re
from typing import Final, Self

from botocore.exceptions import BotoCoreError, ClientError
from prefect.blocks.core import Block
from pydantic import Field, HttpUrl, ValidationInfo, field_validator, model_validator

from blocks.container import Ports, SshFrom
from blocks.reference import LOGOS, Reference, load
from torpor.control.providers.ec2 import provider as ec2
from torpor.shared.errors import InvalidInput

_IDS: Final = {
    "region": r"[a-z]{2}(?:-[a-z]+)+-\d",
    "image": r"(?:ami-[0-9a-f]{8,17})?",
    "subnets": r"subnet-[0-9a-f]{8,17}",
    "security_group": r"(?:sg-[0-9a-f]{8,17})?",
    "instance_profile": r"(?:arn:aws[\w-]*:iam::\d{12}:instance-profile/)?[\w+=,.@/-]{0,512}",
    "types": r"[a-z0-9-]+\.[a-z0-9-]+",
}


class Ec2Provider(Block):
    """One region of an AWS account: EC2 machines with NVIDIA GPUs, on demand and spot.

    The account needs a default VPC (or subnets named here) and a security group called torpor (or
    one named here) that opens port 22 to the host of the flows. torpor creates neither, unless the
    block says from where SSH may come: then it makes the security group.

    Example:
        List what is on sale:
        ```python
        from blocks import Ec2Provider
        from torpor.shared.values import Want

        provider = Ec2Provider.load("BLOCK_NAME").open()
        print(provider.check(), provider.offers(Want(gpu="L4", spot="allowed")))
        ```
    """

    _block_type_name = "EC2 Provider"
    _block_type_slug = "ec2-provider"
    _logo_url = HttpUrl(f"{LOGOS}/process.png")
    _documentation_url = HttpUrl("https://docs.aws.amazon.com/AWSEC2/latest/UserGuide")

    account: str = Field(
        description=(
            "The number of the AWS account, 12 digits. torpor asks nothing of another account, "
            "whatever the credentials are."
        )
    )
    credentials: Reference = Field(
        default="aws-credentials/default",
        description="The block with the login: aws-credentials/NAME.",
    )
    region: str = Field(
        default="us-east-1", description="The AWS region. Make a block for each that you use."
    )
    image: str = Field(
        default="",
        description=(
            "The AMI of new machines: Linux with cloud-init and Python 3.10 or newer. Empty: the "
            "newest Deep Learning Base AMI of AWS, which has NVIDIA's driver and CUDA."
        ),
    )
    subnets: list[str] = Field(
        default_factory=list,
        description=(
            "The subnets of new machines, one for each zone, with a route to the internet. Empty: "
            "those of the default VPC."
        ),
    )
    security_group: str = Field(
        default="",
        description=(
            "The security group of new machines. It must open port 22 to the host where the flows "
            "run. Empty: the group called torpor."
        ),
    )
    ssh_from: SshFrom = Field(
        default="",
        description=(
            "The addresses from which SSH may come, as a CIDR: 203.0.113.7/32 for one host, "
            "0.0.0.0/0 for all. The first rental makes the security group called torpor where it "
            "is missing, and opens port 22 in it for them; a change here closes nothing. Empty: "
            "torpor makes and opens nothing. A security group that is named above is never changed."
        ),
    )
    ports: Ports = Field(
        default_factory=list,
        description=(
            "TCP ports that torpor opens beside port 22, for the same addresses, on all its "
            "machines in the VPC. It closes none again. It needs SSH from."
        ),
    )
    private: bool = Field(
        default=False,
        title="Private addresses",
        description=(
            "Whether machines have private addresses only, at which the host of the flows must "
            "reach them. Their subnets need a way to the object store, such as a NAT gateway."
        ),
    )
    instance_profile: str = Field(
        default="",
        description=(
            "The name or ARN of the instance profile of machines. Every program on a machine gets "
            "its role. The login of the block needs iam:PassRole. Empty: machines get no AWS role."
        ),
    )
    types: list[str] = Field(
        default_factory=list,
        title="Instance types",
        description="The instance types to rent, such as g6.xlarge. Empty: all with NVIDIA GPUs.",
    )

    metadata_url: str = Field(
        default=ec2.METADATA_URL,
        title="Metadata service",
        description=(
            "Where a machine asks whether AWS will take it away: the address of the instance "
            "metadata service, which a network with IPv6 alone has at http://[fd00:ec2::254]."
        ),
        pattern=r"^http://[^/\s]+$",
    )

    def open(self) -> ec2.Ec2Provider:
        """The provider, ready to use. Raises InvalidInput."""
        # importing it takes as long as importing all else
        from prefect_aws.credentials import AwsCredentials

        me = f"EC2 provider {self._block_document_name or self.account}"
        block = load(self.credentials, (AwsCredentials,), of=me)
        try:
            session = block.get_boto3_session()
        except (BotoCoreError, ClientError) as cause:
            raise InvalidInput(
                f"{me}: the block {self.credentials} gives no login: {cause}"
            ) from cause
        return ec2.Ec2Provider(
            session,
            self.account,
            self.region,
            image=self.image,
            subnets=self.subnets,
            security_group=self.security_group,
            ssh_from=self.ssh_from,
            ports=self.ports,
            private=self.private,
            instance_profile=self.instance_profile,
            types=self.types,
            metadata_url=self.metadata_url,
            url=block.aws_client_parameters.endpoint_url,
        )

    @model_validator(mode="after")
    def _opens_for_somebody(self) -> Self:
        if self.ports and (self.security_group or not self.ssh_from):
            raise ValueError(
                "ports: torpor opens ports only in the security group that it makes: write SSH "
                "from, and leave the security group empty, or open them in yours"
            )
        return self

    @field_validator("account", mode="after")
    @classmethod
    def _numbered(cls, value: str) -> str:
        digits = re.sub(r"[\s-]", "", value)
        if not re.fullmatch(r"\d{12}", digits):
            raise ValueError(f"{value!r} is not the number of an AWS account, which has 12 digits")
        return digits

    @field_validator("region", "image", "security_group", "instance_profile", mode="after")
    @classmethod
    def _named(cls, value: str, info: ValidationInfo) -> str:
        return _checked(value, info.field_name or "")

    @field_validator("subnets", "types", mode="after")
    @classmethod
    def _listed(cls, value: list[str], info: ValidationInfo) -> list[str]:
        return [_checked(item, info.field_name or "") for item in value]


def _checked(text: str, field: str) -> str:
    text = text.strip()
    if not re.fullmatch(_IDS[field], text):
        raise ValueError(f"{text!r} is not what AWS writes for {field.replace('_', ' ')}")
    return text
