"""Run the requests of a batch, several at once, and write each result as it comes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localgen.backends.errors import ServerUnavailable
from localgen.batch.lines import BatchLine, read_body
from localgen.batch.results import ResultFile
from localgen.client import Client
from localgen.client.responses import Reply

# the server is busy, or the engine died: the same request may succeed later
_RETRIED_STATUSES = (429, 502, 503, 504)
_RETRY_DELAYS_S = (1.0, 5.0, 15.0)
_POLL_S = 0.2


@dataclass(slots=True)
class Progress:
    """Counts of this run. generated_tokens: as the server reports them."""

    num_done: int = 0
    generated_tokens: int = 0


class BatchRun:
    """create_client: each thread has a client of its own. model: of all requests, or None for that
    of each. extra: fields that are added to bodies without them. on_progress: called from this
    thread, a few times a second.
    """

    def __init__(
        self,
        path: Path,
        results: ResultFile,
        create_client: Callable[[], Client],
        *,
        model: str | None,
        extra: dict[str, Any],
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._path, self._results, self._create_client = path, results, create_client
        self._model, self._extra, self._on_progress = model, extra, on_progress
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._clients: list[Client] = []
        self._error: Exception | None = None
        self.progress = Progress()

    def run(self, lines: Sequence[BatchLine], concurrency: int) -> None:
        """Compute all that have no result yet.

        Raises the error that stopped it: OSError if a result cannot be written, LocalgenError if
        the server is lost. After that and after KeyboardInterrupt, another run continues, as for
        requests that got only errors of _RETRIED_STATUSES.
        """
        waiting = iter([line for line in lines if line.custom_id not in self._results.done])
        threads = [
            threading.Thread(target=self._work, args=(waiting,), daemon=True)
            for _ in range(concurrency)
        ]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads):
                self._stop.wait(_POLL_S)
                self._on_progress(self.progress)
                if self._stop.is_set():
                    break
        finally:
            self._abort()
            for thread in threads:
                thread.join()
        self._on_progress(self.progress)
        if self._error is not None:
            raise self._error

    def _abort(self) -> None:
        with self._lock:
            self._stop.set()
            for client in self._clients:
                client.abort()

    def _work(self, waiting: Any) -> None:
        try:
            with self._create_client() as client:
                with self._lock:
                    self._clients.append(client)
                    if self._stop.is_set():
                        return
                while (line := self._next(waiting)) is not None:
                    self._record(line, self._answer(client, line))
        except Exception as error:  # raised in run()
            with self._lock:
                if not self._stop.is_set():
                    self._error = error
            self._stop.set()

    def _next(self, waiting: Any) -> BatchLine | None:
        with self._lock:
            line: BatchLine | None = None if self._stop.is_set() else next(waiting, None)
            return line

    def _answer(self, client: Client, line: BatchLine) -> Reply:
        body = self._extra | read_body(self._path, line)
        if self._model is not None:
            body["model"] = self._model
        path = line.url.removeprefix("/v1/")
        for delay_s in _RETRY_DELAYS_S:
            try:
                reply = client.send(path, body)
            except ServerUnavailable:
                if self._stop.wait(delay_s):
                    raise
                continue
            if reply.status not in _RETRIED_STATUSES or self._stop.wait(delay_s):
                return reply
        return client.send(path, body)

    def _record(self, line: BatchLine, reply: Reply) -> None:
        usage = reply.body.get("usage")
        tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
        with self._lock:
            if self._stop.is_set() and reply.status != 200:
                return  # the answer to a request that was given up
            if reply.status in _RETRIED_STATUSES:
                return  # another run asks again
            self._results.append(line.custom_id, reply)
            self.progress.num_done += 1
            self.progress.generated_tokens += tokens if isinstance(tokens, int) else 0
