"""Prepare requests in threads next to the loop: clients in turn, one request of each at a time.

One thread is kept free of requests that may take long. Whoever sends them may pose as many clients.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from localgen.backends.engine.embeddings import EmbeddingTask
from localgen.backends.engine.preparation_costs import AnyRequest, PreparationCosts
from localgen.backends.engine.stats import finished_event
from localgen.backends.errors import LocalgenError
from localgen.backends.runner.sequence import Sequence
from localgen.backends.sandbox import CallCancelled, Cancellation
from localgen.backends.types import Failed, Finished, Request, Timings, Tokenized

Prepared = Sequence | EmbeddingTask | Tokenized
Delivery = Prepared | Failed | Finished


@dataclass(frozen=True, slots=True)
class _Waiting:
    request: AnyRequest
    may_take_long: bool


class PreparationQueue:
    """Requests that wait to be prepared. Clients take turns; of each, one is prepared at a time.

    max_long: how many that may take long are prepared at a time.
    """

    def __init__(self, max_long: int = 1) -> None:
        self._max_long = max_long
        # in the order of their turns
        self._waiting: dict[str, deque[_Waiting]] = {}
        self._busy: dict[str, _Waiting] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, request: AnyRequest, *, may_take_long: bool = False) -> None:
        waiting = _Waiting(request, may_take_long)
        self._waiting.setdefault(request.client, deque()).append(waiting)

    def take(self) -> AnyRequest | None:
        """Take the next request whose client has none in preparation, or return None."""
        client = next(filter(self._may_begin, self._waiting), None)
        if client is None:
            return None
        requests = self._waiting.pop(client)
        self._busy[client] = taken = requests.popleft()
        if requests:
            self._waiting[client] = requests  # behind the others
        return taken.request

    def _may_begin(self, client: str) -> bool:
        if client in self._busy:
            return False
        num_long = sum(taken.may_take_long for taken in self._busy.values())
        return not self._waiting[client][0].may_take_long or num_long < self._max_long

    def done(self, request: AnyRequest) -> None:
        """The request that was taken has been prepared."""
        del self._busy[request.client]

    def remove(self, request: AnyRequest) -> bool:
        """Remove a waiting request. Returns False if it does not wait."""
        requests = self._waiting.get(request.client, deque())
        found = next((waiting for waiting in requests if waiting.request.id == request.id), None)
        if found is None:
            return False
        requests.remove(found)
        if not requests:
            del self._waiting[request.client]
        return True


class Preparer:
    """Prepares requests in threads; of several, one takes none that may take long. Thread-safe.

    prepare: returns the sequence or task of a request, or raises LocalgenError. deliver: gets the
    result of every request that was submitted, or how it ended, once.
    """

    def __init__(
        self,
        prepare: Callable[[AnyRequest], Prepared],
        deliver: Callable[[Delivery], None],
        *,
        threads: int,
        name: str,
    ) -> None:
        self._prepare = prepare
        self._deliver = deliver
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._num_threads = threads
        self._queue = PreparationQueue(max_long=max(1, threads - 1))
        self._costs = PreparationCosts()
        self._unfinished: dict[str, tuple[AnyRequest, Cancellation]] = {}
        self._num_attempts = 0  # calls of _prepare_next that have not begun
        self._lock = threading.Lock()

    @property
    def is_idle(self) -> bool:
        with self._lock:
            return not self._unfinished

    def submit(self, request: AnyRequest) -> None:
        with self._lock:
            self._unfinished[request.id] = (request, Cancellation())
            self._queue.put(request, may_take_long=self._costs.may_take_long(request))
            self._wake_threads(1)

    def cancel(self, request_id: str) -> bool:
        """Cancel a request that is not prepared yet. Returns False if there is none of this id."""
        with self._lock:
            if request_id not in self._unfinished:
                return False
            request, cancellation = self._unfinished[request_id]
            cancellation.cancel()
            if self._queue.remove(request):
                del self._unfinished[request_id]
                self._deliver(_cancelled(request, None))
            return True

    def close(self) -> None:
        """End without waiting: requests in preparation are not delivered any more."""
        with self._lock:
            for _, cancellation in self._unfinished.values():
                cancellation.cancel()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _wake_threads(self, most: int) -> None:
        """Let idle threads look for a request that may be prepared now."""
        for _ in range(min(most, self._num_threads - self._num_attempts)):
            self._num_attempts += 1
            self._executor.submit(self._prepare_next)

    def _prepare_next(self) -> None:
        with self._lock:
            self._num_attempts -= 1
            request = self._queue.take()
            if request is None:
                return
            _, cancellation = self._unfinished[request.id]
        result: Delivery | None
        started_s = time.monotonic()
        try:
            with cancellation:
                result = self._prepare(request)
        except CallCancelled:
            result = None
        except LocalgenError as error:
            result = Failed(request.id, error.code, error.message, error.param)
        except BaseException as error:  # a request must end whatever happens: libraries panic, too
            result = Failed(request.id, "internal_error", f"{type(error).__name__}: {error}")
        with self._lock:
            self._queue.done(request)
            if isinstance(result, Sequence):
                self._costs.record(request, time.monotonic() - started_s)
            del self._unfinished[request.id]
            if result is None or cancellation.is_cancelled:
                result = _cancelled(request, result)
            self._deliver(result)
            if self._queue:  # of this client, or like this one: they had to wait for it
                self._wake_threads(self._num_threads)


def _cancelled(request: AnyRequest, result: Delivery | None) -> Failed | Finished:
    """How a cancelled request ends. result: of its preparation, if it was prepared."""
    if isinstance(result, Failed | Finished):
        return result
    if isinstance(result, Sequence):
        return finished_event(result, "cancelled", stop=None, completion_tokens=0)
    if not isinstance(request, Request):
        return Failed(request.id, "cancelled", "the request was cancelled")
    return Finished(
        request_id=request.id,
        reason="cancelled",
        timings=Timings(),
        prompt_tokens=0,
        completion_tokens=0,
        ctx=0,
    )
