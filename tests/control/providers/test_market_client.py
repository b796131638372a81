"""A hostile market's answers: of any length, at any pace, nested at will."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from torpor.control.providers import market_client
from torpor.control.providers.market_client import MarketClient
from torpor.shared.errors import CreateUncertain, ProviderUnavailable


def _endless() -> Iterator[bytes]:
    yield b'{"machines": ['
    while True:
        yield b"{}," * 20_000


def _slow() -> Iterator[bytes]:
    while True:
        yield b" "


def _nested() -> Iterator[bytes]:
    yield b"[" * 200_000


@pytest.mark.rule("H18")
@pytest.mark.parametrize("body", [_endless, _slow, _nested])
def test_no_answer_of_a_market_takes_more_memory_or_time_than_is_set(
    body: type[Iterator[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if body is _slow:
        monkeypatch.setattr(market_client, "MOST_S", 0.0)

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=body())

    client = MarketClient(
        "market:1",
        "https://market.example",
        "key",
        transport=httpx.MockTransport(answer),
        sleep=lambda seconds: None,
    )
    with pytest.raises(ProviderUnavailable, match=r"market:1\S* did not answer"):
        client.read(dict, "/machines")
    with pytest.raises(CreateUncertain):
        client.create("POST", "/machines", dict, {})
