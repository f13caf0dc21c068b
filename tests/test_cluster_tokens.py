"""Token limits of a cluster: what replicas have counted is charged once, to the right account."""

from __future__ import annotations

from tcp_server import tcp_server

from localgen.cluster.token_charges import TokenCharges
from localgen.server.http.access import RateLimit
from localgen.server.http.rate_limit import RateLimiter
from localgen.server.requests.caller import ACCOUNT_HEADER, GATEWAY_HEADER


def test_what_is_new_is_charged_once() -> None:
    charged: list[tuple[str, int]] = []
    charges = TokenCharges(lambda account, tokens: charged.append((account, tokens)))
    charges.read([("a", {"x": 100})])
    assert charged == [], "before this gateway was there"
    charges.read([("a", {"x": 110, "y": 3}), ("b", {"x": 50})])
    assert sorted(charged) == [("x", 10), ("y", 3)]
    charged.clear()
    charges.read([("b", {"x": 57})])
    assert charged == [("x", 7)]
    charges.read([("a", {"x": 999}), ("b", {"x": 57})])
    assert charged == [("x", 7)], "a did not answer before"


def test_an_account_waits_when_its_tokens_are_used_up() -> None:
    limiter = RateLimiter(RateLimit(tokens=60), clock=lambda: 0.0)
    assert limiter.admit("x") is None
    limiter.charge("x", 70)
    assert limiter.admit("x") == 11
    assert limiter.admit("y") is None


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
