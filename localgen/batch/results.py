"""The output of a batch: a line per request, written once and whole, whenever the run is killed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from localgen.backends.errors import InvalidRequest
from localgen.client.responses import Reply

_ID = "batch_req_"
# how each line begins
_LINE_START = f'{{"id": "{_ID}'.encode()


class ResultFile:
    """A file that one run appends to.

    done: custom_ids that have a result. num_failed: how many of these are errors of the server.
    """

    def __init__(self, path: Path, fd: int, known: Collection[str]) -> None:
        self._path, self._fd = path, fd
        self.done: set[str] = set()
        self.num_failed = 0
        self._read(known)

    @classmethod
    @contextlib.contextmanager
    def opened(cls, path: Path, known: Collection[str]) -> Iterator[ResultFile]:
        """Open or create a file, and cut off a half-written last line. known: custom_ids.

        Raises InvalidRequest if it cannot be written, if another run writes it, or if it is not
        the output of this batch.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise InvalidRequest(f"--out {path}: {error.strerror}") from error
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise InvalidRequest(f"another run writes {path}: wait for its end") from error
            yield cls(path, fd, known)
        finally:
            os.close(fd)

    def append(self, custom_id: str, reply: Reply) -> None:
        """Write the result of a request. Raises OSError with the path of the file."""
        response = {
            "status_code": reply.status,
            "request_id": reply.request_id,
            "body": reply.body,
        }
        line = {
            "id": f"{_ID}{uuid.uuid4().hex[:24]}",
            "custom_id": custom_id,
            "response": response,
            "error": None,
        }
        left = json.dumps(line, ensure_ascii=False).encode(errors="replace") + b"\n"
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        self.done.add(custom_id)
        self.num_failed += reply.status != 200

    def _read(self, known: Collection[str]) -> None:
        whole_bytes = 0
        with self._path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if not text.endswith(b"\n"):
                    if text[: len(_LINE_START)] != _LINE_START[: len(text)]:
                        raise _not_a_result(self._path, number)
                    break  # the run was killed, or its disk full
                self._add(_parse(self._path, number, text), known)
                whole_bytes += len(text)
        if whole_bytes < self._path.stat().st_size:
            os.ftruncate(self._fd, whole_bytes)

    def _add(self, line: dict[str, Any], known: Collection[str]) -> None:
        custom_id = line["custom_id"]
        if custom_id not in known:
            raise InvalidRequest(
                f"{self._path} has a result of {custom_id!r}, which is not in this batch: "
                "give another --out, or remove it"
            )
        self.done.add(custom_id)
        self.num_failed += line["response"]["status_code"] != 200


def _parse(path: Path, number: int, text: bytes) -> dict[str, Any]:
    try:
        line = json.loads(text)
        if isinstance(line["custom_id"], str) and isinstance(line["response"]["status_code"], int):
            parsed: dict[str, Any] = line
            return parsed
    except (ValueError, KeyError, TypeError):
        pass
    raise _not_a_result(path, number)


def _not_a_result(path: Path, number: int) -> InvalidRequest:
    return InvalidRequest(f"{path}: line {number} is not the result of a batch: give another --out")
