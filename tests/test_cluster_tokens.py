"""Token limits of a cluster: what replicas have counted is charged once, to the right account."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from tcp_server import tcp_server

from localgen.cluster.token_charges import TokenCharges
from localgen.server.http.access import RateLimit
from localgen.server.http.rate_limit import RateLimiter
from localgen.server.requests.caller import ACCOUNT_HEADER, GATEWAY_HEADER


class Replica:
    """A replica that counts tokens, and a gateway that may fail to charge them."""

    def __init__(self) -> None:
        self.totals: dict[str, int] = {}
        self.charged = Counter[str]()
        self.reading_fails: Exception | None = None
        self.charging_fails: Exception | None = None
        self.charges = TokenCharges(self.read, self.charge)

    async def read(self) -> dict[str, int]:
        if self.reading_fails:
            raise self.reading_fails
        return self.totals

    async def charge(self, tokens: Mapping[str, int]) -> None:
        assert all(tokens.values())
        if self.charging_fails:
            raise self.charging_fails
        self.charged.update(tokens)

    def charge_new(self) -> None:
        with contextlib.suppress(OSError):
            asyncio.run(self.charges.charge_new())


def test_what_is_new_is_charged_once() -> None:
    replica = Replica()
    for totals in ({}, {"x": 100}, {"x": 110, "y": 3}, {"x": 110, "y": 3}):
        replica.totals = totals
        replica.charge_new()
        assert replica.charged == totals


@pytest.mark.parametrize("failing", ["reading_fails", "charging_fails"])
def test_what_could_not_be_charged_is_charged_with_the_next(failing: str) -> None:
    replica = Replica()
    replica.totals = {"x": 100}
    replica.charge_new()
    setattr(replica, failing, OSError("the gateway has ended"))
    replica.totals = {"x": 110}
    replica.charge_new()
    assert replica.charged == {"x": 100}
    setattr(replica, failing, None)
    replica.totals = {"x": 115, "y": 1}
    replica.charge_new()
    assert replica.charged == replica.totals


def test_charging_goes_on_after_a_failure_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("localgen.cluster.token_charges._PERIOD_S", 0.0)
    replica, tries = Replica(), 0
    replica.totals = {"x": 7}

    async def charge(tokens: Mapping[str, int]) -> None:
        nonlocal tries
        tries += 1
        if tries < 4:
            raise KeyError("no such\naccount")
        replica.charged.update(tokens)
        running[0].cancel()

    async def run() -> None:
        running.append(asyncio.create_task(TokenCharges(replica.read, charge).run()))
        await asyncio.wait(running, timeout=30.0)

    running: list[asyncio.Task[Any]] = []
    asyncio.run(run())
    assert (tries, replica.charged) == (4, {"x": 7})
    assert capsys.readouterr().err.count("tokens are charged later: ") == 1


def test_an_account_waits_when_its_tokens_are_used_up() -> None:
    limiter = RateLimiter(RateLimit(tokens=60), clock=lambda: 0.0)
    assert limiter.admit("x") is None
    limiter.charge("x", 70)
    assert limiter.admit("x") == 11
    assert limiter.admit("y") is None


def test_the_gateway_charges_what_a_replica_tells() -> None:
    pytest.importorskip("ray", reason="Ray is not installed, which needs 500 MB: make test-cluster")
    from localgen.cluster.deployment import GatewayServer

    gateway = object.__new__(GatewayServer)
    gateway._rates = RateLimiter(RateLimit(tokens=60), clock=lambda: 0.0)
    asyncio.run(gateway.charge({"x": 70, "y": 10}))
    assert gateway._rates.admit("x") == 11
    assert gateway._rates.admit("y") is None


def test_a_replica_counts_the_tokens_of_the_gateways_accounts() -> None:
    with tcp_server(gateway_secret="secret") as server:

        def counted(**headers: str) -> dict[str, int] | None:
            found = server.http.get("/v1/stats", headers=headers).json()
            return found.get("tokens_by_account")  # type: ignore[no-any-return]

        gateway = {GATEWAY_HEADER: "secret"}
        server.chat(**{ACCOUNT_HEADER: "key-1"})
        assert counted(**gateway) == {"127.0.0.1": 2}, "without the secret it is not obeyed"
        server.chat(**gateway, **{ACCOUNT_HEADER: "key-1"})
        server.chat(**gateway, **{ACCOUNT_HEADER: "key-1"})
        assert counted(**gateway) == {"127.0.0.1": 2, "key-1": 4}
        assert counted() is None
