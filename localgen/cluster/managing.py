"""Requests that manage models, which all replicas get: what is on disk, each machine once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localgen.backends.errors import LocalgenError
from localgen.cluster.posted import Place
from localgen.server.ollama.options import parse_ollama_keep_alive
from localgen.server.ollama.serializer import API_PREFIX
from localgen.server.requests.protocol import encode_json

_LOAD_PATH, _UNLOAD_PATH = "/v1/models/load", "/v1/models/unload"
# without any of these fields, they load a model only, or unload it
_PROMPT_FIELDS = {
    f"{API_PREFIX}chat": ("messages",),
    f"{API_PREFIX}generate": ("prompt", "suffix"),
}


@dataclass(frozen=True, slots=True)
class ReplicaRequest:
    """A request to replicas. body: JSON.

    once_per_machine: to one replica of each machine. answering_only: not to prompt replicas.
    """

    method: str
    path: str
    body: bytes
    once_per_machine: bool = False
    answering_only: bool = False

    def receivers(self, places: Collection[Place]) -> frozenset[Place]:
        """The replicas that get it."""
        if not self.once_per_machine:
            return frozenset(places)
        by_machine = {each.node: each for each in sorted(places, key=str, reverse=True)}
        return frozenset(by_machine.values())


@dataclass(frozen=True, slots=True)
class Plan:
    """The requests to replicas that a request means, one after the other until one fails.

    is_streamed: the replica that is chosen streams its progress meanwhile; there is one request.
    may_lack: of require_everywhere().
    """

    requests: Sequence[ReplicaRequest]
    is_streamed: bool = False
    may_lack: bool = False


def plan_for(
    method: str, path: str, fields: Mapping[str, Any], *, is_own_model: bool
) -> Plan | None:
    """What a request means for all replicas, or None if one of them answers it.

    fields: of its JSON body. is_own_model: the model is that of the cluster, which prompt replicas
    have as well.
    """

    def request(changes: Mapping[str, Any], **limits: bool) -> ReplicaRequest:
        return ReplicaRequest(method, path, encode_json({**fields, **changes}), **limits)

    quietly = {"stream": False}
    try:
        match method, path:
            case "POST", "/api/pull":
                return Plan([request(quietly)], is_streamed=True)
            case "POST", "/api/copy":
                return Plan([request({}, once_per_machine=True)])
            case "DELETE", "/api/delete":
                unload, remove = request({"keep_files": True}), request({}, once_per_machine=True)
                return Plan([unload, remove], may_lack=True)
            case "POST", _ if _is_unload(path, fields):
                return Plan([request({})])
            case "POST", _ if _is_load(path, fields):
                return Plan([request(quietly, answering_only=not is_own_model)], is_streamed=True)
    except UnicodeEncodeError:  # half of a surrogate pair: a replica refuses it
        pass
    return None


def _is_load(path: str, fields: Mapping[str, Any]) -> bool:
    """True for a request that loads a model only: by its path, or in Ollama's way."""
    if path == _LOAD_PATH:
        return True
    names = _PROMPT_FIELDS.get(path)
    return names is not None and not any(fields.get(name) for name in names)


def _is_unload(path: str, fields: Mapping[str, Any]) -> bool:
    """True for a request that unloads a model: by its path, or in Ollama's way."""
    if path == _UNLOAD_PATH:
        return True
    keep_alive = fields.get("keep_alive")
    if (
        path == _LOAD_PATH
        or not _is_load(path, fields)
        or not isinstance(keep_alive, int | float | str)
    ):
        return False
    try:
        found = parse_ollama_keep_alive(keep_alive)
    except (LocalgenError, OverflowError):  # a replica says why
        return False
    return found is not None and found.seconds == 0
