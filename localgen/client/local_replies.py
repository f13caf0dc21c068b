"""Replies of the local server: msgspec validates them as it decodes."""

from __future__ import annotations

from typing import Any

import msgspec

from localgen.backends.model_info import ModelInfo
from localgen.client.responses import ModelCard, RunningModel


class _Card(msgspec.Struct):
    id: str
    path: str
    size_bytes: int
    state: str
    source: str


class ModelList(msgspec.Struct):
    """GET /v1/models."""

    data: list[_Card]

    def cards(self) -> list[ModelCard]:
        return [
            ModelCard(card.id, card.path, card.size_bytes, card.state, card.source)
            for card in self.data
        ]


class RunningModels(msgspec.Struct):
    """GET /v1/stats, the fields of `localgen ps`."""

    models: list[RunningModel]


class Stats(msgspec.Struct):
    """GET /v1/stats, to be passed on as it is."""

    server: dict[str, Any]
    models: list[dict[str, Any]]


class PrivatePortReply(msgspec.Struct):
    """url: base URL of a loopback port, without a path. key: its API key. stabilize: its requests
    are stabilized, as asked or because the server does so with all."""

    url: str
    key: str
    stabilize: bool = False


class LoadEvent(msgspec.Struct):
    """An event of POST /v1/models/load: the progress, at last the model.

    waiting: why the model waits for memory, or empty if it does not. silent_s: how long the engine
    that loads it has sent nothing, or None if it is not silent.
    """

    progress: float = 0.0
    waiting: str = ""
    silent_s: float | None = None
    model: ModelInfo | None = None


class Unloaded(msgspec.Struct):
    """POST /v1/models/unload."""

    unloaded: bool


class Cancelled(msgspec.Struct):
    """POST /v1/requests/ID/cancel."""

    cancelled: bool


class _Embedding(msgspec.Struct):
    embedding: list[float]


class Embeddings(msgspec.Struct):
    """POST /v1/embeddings, in the order of the texts."""

    data: list[_Embedding]


class _Error(msgspec.Struct):
    code: str
    message: str
    param: str | None = None


class ErrorReply(msgspec.Struct):
    """A refused request, or the last event of a stream."""

    error: _Error
