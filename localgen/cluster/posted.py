"""What replicas answer to a request that all of them get."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.responses import Response

from localgen.backends.errors import ServerUnavailable
from localgen.backends.terminal_text import one_line
from localgen.server.http.errors import error_response


@dataclass(frozen=True, slots=True)
class Place:
    """replica: its name. machine: host name of the machine on which it runs. node: Ray's id of
    that machine, as host names may be equal."""

    replica: str
    machine: str
    node: str

    def __str__(self) -> str:
        return f"replica {self.replica} on {self.machine}"


@dataclass(frozen=True, slots=True)
class Posted:
    """The answer of a replica. place: None if it is unknown. status: of HTTP. body: JSON.

    reason: why there is no answer; else empty.
    """

    place: Place | None
    status: int
    body: bytes
    reason: str = ""

    @classmethod
    def without_answer(cls, place: Place | None, reason: str) -> Posted:
        """Of a replica that has ended, or that hangs."""
        return cls(place, HTTPStatus.SERVICE_UNAVAILABLE, b"", reason)

    @property
    def is_success(self) -> bool:
        return self.status < HTTPStatus.BAD_REQUEST

    @property
    def message(self) -> str:
        """The message of an error, in the form of any API."""
        if self.reason:
            return f"{self.reason}: try again"
        error = self._field("error")
        text = error.get("message") if isinstance(error, dict) else error
        return one_line(str(text or f"it answered with status {self.status}"))

    @property
    def code(self) -> str:
        """The code of an error; Ollama's API has none."""
        error = self._field("error")
        code = error.get("code") if isinstance(error, dict) else None
        return str(code or ServerUnavailable.code)

    @property
    def has_unloaded(self) -> bool:
        return self._field("unloaded") is True

    def _field(self, name: str) -> Any:
        try:
            found = json.loads(self.body)
        except ValueError:
            return None
        return found.get(name) if isinstance(found, dict) else None


class NotEverywhere(Exception):
    """A replica has failed at what others have done. The message says which, and why."""

    def __init__(self, failed: Posted) -> None:
        where = "a replica" if failed.place is None else str(failed.place)
        super().__init__(f"{where}: {failed.message}")
        self.code, self._status = failed.code, failed.status

    def to_response(self, path: str) -> Response:
        return error_response(path, self.code, str(self), status=self._status)


def require_everywhere(posted: Sequence[Posted], *, may_lack: bool = False) -> None:
    """Raise NotEverywhere for the first failure, unless all answer with one: then each says why.

    may_lack: a replica that does not find the model is none, as it has nothing to remove.
    """
    failed = [each for each in posted if not each.is_success]
    if len(failed) == len(posted) and not any(each.reason for each in failed):
        return
    for each in failed:
        if not (may_lack and each.status == HTTPStatus.NOT_FOUND):
            raise NotEverywhere(each)


def common_answer(posted: Sequence[Posted]) -> Posted | None:
    """The answer that counts for all, None without any: of one that has unloaded the model, else of
    one that did not fail, else of one that has the model."""

    def rank(answer: Posted) -> tuple[bool, ...]:
        return answer.has_unloaded, answer.is_success, answer.status != HTTPStatus.NOT_FOUND

    return max(posted, key=rank, default=None)
