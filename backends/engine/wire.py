"""Wire protocol between the server and an engine process: backends/messages.py over a socket pair.

The server sends one ModelLoadRequest, then Submit, SubmitEmbedding, TokenizeRequest, Cancel and
AnswerNow. The engine sends LoadProgress messages, at least one per second, then LoadComplete or
LoadError, then StepEvents, at most one per step. The engine process exits when either side closes
the socket.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from localgen.backends.engine.inbox import AnswerNow as AnswerNow
from localgen.backends.engine.inbox import Cancel as Cancel
from localgen.backends.messages import MessageCodec
from localgen.backends.model_info import ModelInfo, ModelLoadRequest
from localgen.backends.types import EmbedRequest, Request, StepEvents, TokenizeRequest


@dataclass(frozen=True, slots=True)
class Submit:
    """Submit a request; it ends with exactly one Finished or Failed event."""

    request: Request


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
    | AnswerNow
    | LoadProgress
    | LoadComplete
    | LoadError
    | StepEvents
    | SubmitEmbedding
    | TokenizeRequest
)

CODEC: MessageCodec[WireMessage] = MessageCodec(get_args(WireMessage))
