"""Stored responses: what previous_response_id continues, and GET /v1/responses/ID returns."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from localgen.backends.errors import NotFound
from localgen.backends.types import Message
from localgen.server.requests.protocol import encode_json

MAX_RESPONSES = 1024
# of all stored messages and bodies as JSON; a response holds the whole conversation up to it
MAX_CHARS = 64 << 20


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """account: only its requests see the response. conversation: up to and with the answer.

    num_chars: characters of both as JSON.
    """

    account: str
    conversation: tuple[Message, ...]
    body: dict[str, Any]
    num_chars: int = field(init=False)

    def __post_init__(self) -> None:
        size = len(encode_json(self.conversation)) + len(encode_json(self.body))
        object.__setattr__(self, "num_chars", size)


class ResponseStore:
    """The latest responses, in memory: they end with the server. Oldest are dropped first."""

    def __init__(self) -> None:
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_chars = 0

    def put(self, response_id: str, response: StoredResponse) -> None:
        self._responses[response_id] = response
        self._num_chars += response.num_chars
        while len(self._responses) > MAX_RESPONSES or self._num_chars > MAX_CHARS:
            _, dropped = self._responses.popitem(last=False)
            self._num_chars -= dropped.num_chars

    def get(self, response_id: str, account: str) -> StoredResponse:
        """Raises NotFound if there is none of this id for this account."""
        found = self._responses.get(response_id)
        if found is None or found.account != account:
            raise NotFound(
                f"response {response_id[:80]!r} is not stored: only the latest {MAX_RESPONSES:,} "
                "since the server started are, unless store is false"
            )
        return found

    def delete(self, response_id: str, account: str) -> None:
        """Raises NotFound as `get`."""
        self._num_chars -= self.get(response_id, account).num_chars
        del self._responses[response_id]
