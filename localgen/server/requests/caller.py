"""Who asks."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Request as HttpRequest
from starlette.types import Scope

# how a connection over the Unix socket calls its client
LOCAL_CLIENT = "local"
# how an account begins that is a key
KEY_ACCOUNT_PREFIX = "key-"


@dataclass(frozen=True, slots=True)
class Caller:
    """client: who takes turns with others. account: who pays for tokens. arrived_s: when the
    request came (monotonic). is_local: over the Unix socket."""

    client: str
    account: str
    arrived_s: float
    is_local: bool

    @classmethod
    def from_request(cls, http: HttpRequest, user: str | None = None) -> Caller:
        """Whoever sent a request. user: for whom, as it says itself."""
        account: str = http.scope["account"]
        client = user or _client_name(http, account)
        return cls(client, account, http.scope["arrived_s"], is_local_request(http.scope))


def _client_name(http: HttpRequest, account: str) -> str:
    """The key; without one the session that our clients name, else the connection."""
    if account.startswith(KEY_ACCOUNT_PREFIX):
        return account
    session = http.headers.get("x-localgen-session")
    if session:
        return session
    return f"{http.client.host}:{http.client.port}" if http.client else ""


def is_local_request(scope: Scope) -> bool:
    """Whether the request came over the Unix socket."""
    return scope["client"] is not None and scope["client"][0] == LOCAL_CLIENT
