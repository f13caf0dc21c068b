"""/v1/stats of a server at a URL, which may be another one than localgen's."""

from __future__ import annotations

from typing import Any

import msgspec

from localgen.backends.typed_data import decode_json
from localgen.client.connection import Connection, ServerResponse


def fetch_stats(connection: Connection) -> dict[str, Any] | None:
    """Server and models at this moment; None if the server is not one of localgen.

    Raises LocalgenError if it does not respond, or denies access.
    """
    with connection.get("stats") as reply:
        if isinstance(reply, ServerResponse):
            stats = try_decode_object(reply.read())
            is_localgen = stats is not None and {"server", "models"} <= stats.keys()
            return stats if is_localgen else None
    if reply.status in (401, 403) or reply.status >= 500:
        raise connection.errors.refusal(reply)
    return None


def try_decode_object(body: bytes) -> dict[str, Any] | None:
    """A JSON object; None for anything else."""
    try:
        decoded = decode_json(body)
    except msgspec.DecodeError:
        return None
    return decoded if isinstance(decoded, dict) else None
