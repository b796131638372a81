"""The network of machines of GCP: which ports its firewall rules open, and to whom."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Sequence
from ipaddress import IPv4Network, ip_network
from typing import Final

import msgspec

from torpor.control.providers.gcp.client import GcpClient, Operation
from torpor.control.providers.market_client import Refusal
from torpor.shared.errors import ProviderDenied

TAG: Final = "torpor"
"""The network tag of machines, which a firewall rule may name."""
_OURS: Final = rf"{TAG}-[0-9a-f]{{12}}"
_RULES: Final = "/global/firewalls"
_SSH: Final = 22


class _Allowed(msgspec.Struct):
    protocol: str = msgspec.field(name="IPProtocol")
    ports: list[str] = []


class _Firewall(msgspec.Struct, rename="camel"):
    name: str
    network: str
    direction: str = "INGRESS"
    disabled: bool = False
    allowed: list[_Allowed] = []
    source_ranges: list[str] = []
    target_tags: list[str] = []
    target_service_accounts: list[str] = []


class GcpNetwork:
    """It changes nothing without ``ssh_from``: the addresses, as a CIDR, for which ``open`` makes a
    rule that opens port 22 and ``ports`` to machines with ``TAG``, where no rule does. It changes
    and deletes no rule."""

    def __init__(
        self, client: GcpClient, name: str, ssh_from: str = "", ports: Sequence[int] = ()
    ) -> None:
        self.name = name
        self._client, self._ssh_from, self._ports = client, ssh_from, (_SSH, *ports)

    def check(self) -> list[str]:
        """ProviderDenied unless SSH reaches a machine there, or ``open`` sees to it. Changes
        nothing. Returns what the first rental will change, and which rules of torpor's the block
        does not ask for."""
        rules = self._rules()
        if not self._ssh_from:
            if not _opened(_SSH, [rule for rule in rules if rule.source_ranges]):
                raise ProviderDenied(
                    f"project {self._client.project} cannot rent: no firewall rule of the network "
                    f"{self.name} opens port 22 to machines with the tag {TAG}. What is needed: "
                    f"gcloud compute firewall-rules create {TAG} --network {self.name} --allow "
                    f"tcp:22 --target-tags {TAG} --source-ranges ADDRESS/32, with the address of "
                    "the host of the flows; or let torpor make one: write that address into SSH "
                    "from of the provider block"
                )
            return []
        closed = self._closed(rules)
        ports = ", ".join(map(str, closed))
        notes = [f"the first rental opens port {ports} to {self._ssh_from}"] if closed else []
        return notes + [
            f"firewall rule {rule.name} opens ports to {', '.join(rule.source_ranges)}, which this "
            f"block does not name: gcloud compute firewall-rules delete {rule.name} closes them"
            for rule in rules
            if re.fullmatch(_OURS, rule.name) and not _reaches(rule, self._ssh_from)
        ]

    def open(self) -> None:
        """Make the rule that ``ssh_from`` asks for, where no rule does."""
        if not self._ssh_from or not (closed := self._closed(rules := self._rules())):
            return
        opened = [str(port) for port in closed]
        told = msgspec.json.encode([self.name, self._ssh_from, opened])
        name = f"{TAG}-{hashlib.blake2b(told, digest_size=6).hexdigest()}"
        doing = f"open port {', '.join(opened)} of the network {self.name} to {self._ssh_from}"
        if any(rule.name == name for rule in rules):
            raise ProviderDenied(
                f"{self._client.identity} does not {doing}: somebody changed or disabled torpor's "
                f"firewall rule {name}. Restore it, or delete it: torpor makes it again"
            )
        body = {
            "name": name,
            "description": "Made by torpor for its machines",
            "network": f"global/networks/{self.name}",
            "direction": "INGRESS",
            "sourceRanges": [self._ssh_from],
            "targetTags": [TAG],
            "allowed": [{"IPProtocol": "tcp", "ports": opened}],
        }
        path = f"{_RULES}?requestId={uuid.uuid4()}"
        answer = self._client.ask("POST", path, Operation, body=body)
        if isinstance(answer, Refusal):
            # another run makes it at this moment, and has not been answered either
            if answer.status != 409 or not any(rule.name == name for rule in self._rules()):
                raise self._client.refused(answer, doing)
            return
        fault = self._client.settled(answer).fault
        if fault is not None:
            raise ProviderDenied(f"{self._client.identity} did not {doing}: {fault}")

    def _rules(self) -> list[_Firewall]:
        return self._client.listed(_Firewall, _RULES, f'network eq ".*/networks/{self.name}"')

    def _closed(self, rules: Sequence[_Firewall]) -> list[int]:
        open_to_it = [rule for rule in rules if _reaches(rule, self._ssh_from)]
        return [port for port in self._ports if not _opened(port, open_to_it)]


def _reaches(rule: _Firewall, wanted: str) -> bool:
    """Whether a rule is for all addresses of the CIDR ``wanted``, however Google writes them."""
    asked = IPv4Network(wanted)
    places = (ip_network(place, strict=False) for place in rule.source_ranges)
    return any(isinstance(place, IPv4Network) and asked.subnet_of(place) for place in places)


def _opened(port: int, rules: Sequence[_Firewall]) -> bool:
    """Whether one of the rules opens the port to machines with our tag."""
    return any(
        rule.direction == "INGRESS"
        and not rule.disabled
        and not rule.target_service_accounts
        and (not rule.target_tags or TAG in rule.target_tags)
        and any(_covers(allowed, port) for allowed in rule.allowed)
        for rule in rules
    )


def _covers(allowed: _Allowed, port: int) -> bool:
    return allowed.protocol in ("all", "tcp", "6") and (
        not allowed.ports or any(_has(ports, port) for ports in allowed.ports)
    )


def _has(ports: str, port: int) -> bool:
    first, _, last = ports.partition("-")
    return first.isdigit() and int(first) <= port <= int(last or first)
