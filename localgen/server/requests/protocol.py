"""What a protocol is to the parts of the server that serve all of them: shapes, and their frames.

Shapes are plain objects, encoded by msgspec.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from localgen.backends.types import Delta, Finished
from localgen.server.requests.choices import FinishedChoice

encode_json = msgspec.json.Encoder().encode
# codes of LocalgenError; anything else is our fault
_HTTP_STATUS_BY_CODE = {
    "invalid_request": 400,
    "context_length_exceeded": 400,
    "bad_setting": 400,
    "model_not_found": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    "model_busy": 409,
    "queue_full": 429,
    "load_failed": 500,
    "engine_died": 502,
    "server_unavailable": 503,
    "timeout": 504,
    "out_of_memory": 507,
    "hub_unavailable": 503,
    "access_denied": 403,
    "disk_full": 507,
    "download_failed": 502,
}


class Framing(Protocol):
    """How objects follow each other in a stream. terminator: what comes after a whole one."""

    content_type: str
    terminator: bytes

    def encode_event(self, value: object) -> bytes:
        """One object."""

    def encode_error(self, code: str, message: str, param: str | None = None) -> bytes:
        """The last of a stream that ends in an error."""


class ResponseSerializer(Protocol):
    """How the answers to one request are printed; several of them are told apart by an index.

    What a stream gets is a list, which may be empty: not everything is worth an event.
    """

    @property
    def framing(self) -> Framing: ...

    def choice_start(self, index: int) -> Sequence[object]:
        """What an answer starts with in a stream."""

    def choice_delta(self, index: int, delta: Delta) -> Sequence[object]:
        """More of an answer."""

    def choice_end(self, index: int, finished: Finished) -> Sequence[object]:
        """An answer is whole."""

    def stream_end(self, total: Finished) -> Sequence[object]:
        """All are. total: what they took together."""

    def full_response(self, choices: Sequence[FinishedChoice], total: Finished) -> object:
        """Everything in one object, for those who want no stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseMetadata:
    """A request that has found its model. load_ms: how long it waited for that."""

    id: str
    model: str
    arrived_s: float
    load_ms: float


def extension_fields(finished: Finished) -> dict[str, Any]:
    """What we add to a finished answer in every protocol: times, and how it was served."""
    return {
        "timings": finished.timings,
        "localgen": {
            "ctx": finished.ctx,
            "seed": finished.seed,
            "stop": finished.stop,
            "notes": finished.notes,
        },
    }


def http_status_for_code(code: str) -> int:
    """The status of a failure."""
    return _HTTP_STATUS_BY_CODE.get(code, 500)
