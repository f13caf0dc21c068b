"""Interface of an API protocol: response serializer and stream framing.

Serializers return plain objects, which msgspec encodes as JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from localgen.backends.types import Delta, Finished
from localgen.server.models.request_stream import EngineNotice
from localgen.server.requests.choices import FinishedChoice

encode_json = msgspec.json.Encoder().encode
# error code of LocalgenError -> HTTP status; other codes are internal errors (500)
_HTTP_STATUS_BY_CODE = {
    "invalid_request": 400,
    "context_length_exceeded": 400,
    "bad_setting": 400,
    "model_not_found": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    "model_busy": 409,
    "queue_full": 429,
    "memory_in_use": 503,
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
    """Encodes the events of a stream. terminator: sent at the end of a complete stream."""

    content_type: str
    terminator: bytes

    def encode_event(self, value: object) -> bytes:
        """Encode one event."""

    def encode_error(self, code: str, message: str, param: str | None = None) -> bytes:
        """Encode the last event of a stream that ends with an error."""


def encode_named_event(value: object) -> bytes:
    """Encode a server-sent event whose name is its `type`."""
    assert isinstance(value, dict)
    return f"event: {value['type']}\n".encode() + b"data: " + encode_json(value) + b"\n\n"


class ResponseSerializer(Protocol):
    """Formats the response to one request. index: number of the choice.

    The stream methods return the events to send, possibly none.
    """

    @property
    def framing(self) -> Framing: ...

    def choice_start(self, index: int) -> Sequence[object]:
        """Events at the start of a choice."""

    def choice_delta(self, index: int, delta: Delta) -> Sequence[object]:
        """Events for new text of a choice."""

    def choice_end(self, index: int, finished: Finished) -> Sequence[object]:
        """Events at the end of a choice."""

    def stream_end(self, total: Finished) -> Sequence[object]:
        """Events after all choices. total: merged result."""

    def keep_alive(self) -> bytes:
        """Bytes that clients ignore, during a long prompt: many give up a stream without any."""

    def notice(self, notice: EngineNotice) -> bytes:
        """Encode what the engine does while it sends no text. Clients may ignore it."""

    def full_response(self, choices: Sequence[FinishedChoice], total: Finished) -> object:
        """The whole response as one object, without streaming."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseMetadata:
    """Metadata of a response. model: its name there. load_ms: time until the model was loaded."""

    id: str
    model: str
    arrived_s: float
    load_ms: float


def extension_fields(finished: Finished) -> dict[str, Any]:
    """localgen's extra fields of a finished answer, in every protocol."""
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
    return _HTTP_STATUS_BY_CODE.get(code, 500)
