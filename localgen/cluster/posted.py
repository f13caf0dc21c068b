"""What replicas answer to a request that all of them get: downloads and unloads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localgen.backends.errors import LocalgenError
from localgen.backends.terminal_text import one_line
from localgen.hub.hf_client import DownloadFailed
from localgen.server.ollama.options import parse_ollama_keep_alive
from localgen.server.ollama.serializer import API_PREFIX

PULL_PATH, UNLOAD_PATH = f"{API_PREFIX}pull", "/v1/models/unload"
# without any of these fields, they load a model only, or unload it
_PROMPT_FIELDS = {
    f"{API_PREFIX}chat": ("messages",),
    f"{API_PREFIX}generate": ("prompt", "suffix"),
}
_ENDED = "the replica ended: try again"


@dataclass(frozen=True, slots=True)
class Posted:
    """The answer of a replica. machine: its name. status: of HTTP. body: JSON."""

    machine: str
    status: int
    body: bytes

    @classmethod
    def from_answer(cls, answer: Posted | BaseException) -> Posted:
        """answer: of a call of EngineReplica.post, or its exception."""
        if isinstance(answer, Posted):
            return answer
        return cls("", 503, json.dumps({"error": _ENDED}).encode())

    @property
    def is_success(self) -> bool:
        return self.status < 400

    @property
    def message(self) -> str:
        """The message of an error."""
        error = self._field("error")
        return one_line(str(error or f"it answered with status {self.status}"))

    @property
    def has_unloaded(self) -> bool:
        return self._field("unloaded") is True

    def _field(self, name: str) -> Any:
        try:
            found = json.loads(self.body)
        except ValueError:
            return None
        return found.get(name) if isinstance(found, dict) else None


def require_pulled(posted: Sequence[Posted]) -> None:
    """Raise DownloadFailed that names the first machine without the model, unless all lack it.

    Then the answer of any of them says why.
    """
    failed = [each for each in posted if not each.is_success]
    if failed and len(failed) < len(posted):
        where = f"machine {failed[0].machine}: " if failed[0].machine else ""
        raise DownloadFailed(f"{where}{failed[0].message}")


def is_unload(path: str, fields: Mapping[str, Any]) -> bool:
    """True for a request that unloads a model: by its path, or in Ollama's way."""
    if path == UNLOAD_PATH:
        return True
    names = _PROMPT_FIELDS.get(path)
    if names is None or any(fields.get(name) for name in names):
        return False
    keep_alive = fields.get("keep_alive")
    if not isinstance(keep_alive, int | float | str):
        return False
    try:
        found = parse_ollama_keep_alive(keep_alive)
    except LocalgenError:  # a replica says why
        return False
    return found is not None and found.seconds == 0


def unload_answer(posted: Sequence[Posted]) -> Posted | None:
    """The answer that counts for all: of a replica that has unloaded the model, if there is one."""
    return max(posted, key=lambda each: (each.has_unloaded, each.is_success), default=None)
