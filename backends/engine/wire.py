"""Wire protocol between the server and an engine process, over a socket pair.

A frame is a 4-byte little-endian length followed by msgpack of [tag, body]. The server sends one
ModelLoadRequest, then Submit, SubmitEmbedding and Cancel. The engine sends LoadProgress messages,
at least one per second, then LoadComplete or LoadError, then StepEvents, at most one per step. The
engine process exits when either side closes the socket.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

import msgspec

from localgen.backends.model_info import ModelInfo, ModelLoadRequest
from localgen.backends.types import EmbedRequest, Request, StepEvents

MAX_FRAME_BYTES = 256 * 1024 * 1024
_HEADER_BYTES = 4
_READ_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Submit:
    """Submit a request; it ends with exactly one Finished or Failed event."""

    request: Request


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel a request; its final event follows. Unknown ids are ignored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Loading progress, 0 to 1. It is repeated each second: the engine is alive."""

    progress: float


@dataclass(frozen=True, slots=True)
class LoadComplete:
    """The model is loaded and ready."""

    info: ModelInfo


@dataclass(frozen=True, slots=True)
class LoadError:
    """Loading failed; the engine process exits. code: as in LocalgenError."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class SubmitEmbedding:
    """Submit an embedding request; it ends with exactly one Embedded or Failed event."""

    request: EmbedRequest


WireMessage = (
    ModelLoadRequest
    | Submit
    | Cancel
    | LoadProgress
    | LoadComplete
    | LoadError
    | StepEvents
    | SubmitEmbedding
)

_MESSAGE_TYPES: tuple[type, ...] = get_args(WireMessage)
_TAGS = {kind: tag for tag, kind in enumerate(_MESSAGE_TYPES)}
_BODY_DECODERS: list[msgspec.msgpack.Decoder[WireMessage]] = [
    msgspec.msgpack.Decoder(kind) for kind in _MESSAGE_TYPES
]
_TAG_DECODER = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])
_ENCODER = msgspec.msgpack.Encoder()


def encode_message(message: WireMessage) -> bytes:
    """Return the frame of a message."""
    body = _ENCODER.encode((_TAGS[type(message)], message))
    return len(body).to_bytes(_HEADER_BYTES, "little") + body


class MessageDecoder:
    """Incremental decoder; buffers incomplete frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, received: bytes) -> Iterator[WireMessage]:
        """Yield the messages completed by these bytes.

        Raises ValueError if a frame is too large or not of this protocol.
        """
        self._buffer += received
        while len(self._buffer) >= _HEADER_BYTES:
            size = int.from_bytes(self._buffer[:_HEADER_BYTES], "little")
            if size > MAX_FRAME_BYTES:
                raise ValueError(f"frame of {size} bytes, limit {MAX_FRAME_BYTES}")
            end = _HEADER_BYTES + size
            if len(self._buffer) < end:
                return
            frame = bytes(self._buffer[_HEADER_BYTES:end])
            del self._buffer[:end]
            tag, body = _TAG_DECODER.decode(frame)
            if not 0 <= tag < len(_MESSAGE_TYPES):
                raise ValueError(f"unknown message kind {tag}")
            yield _BODY_DECODERS[tag].decode(body)


def receive_messages(sock: socket.socket) -> Iterator[WireMessage]:
    """Yield messages from a blocking socket until the peer closes it."""
    decoder = MessageDecoder()
    while received := sock.recv(_READ_BYTES):
        yield from decoder.feed(received)
