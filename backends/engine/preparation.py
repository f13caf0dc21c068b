"""Prepare requests in threads next to the loop: clients in turn, one request of each at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from localgen.backends.engine.embeddings import EmbeddingTask
from localgen.backends.engine.stats import finished_event
from localgen.backends.errors import LocalgenError
from localgen.backends.runner.sequence import Sequence
from localgen.backends.sandbox import CallCancelled, Cancellation
from localgen.backends.types import EmbedRequest, Failed, Finished, Request, Timings

AnyRequest = Request | EmbedRequest
Prepared = Sequence | EmbeddingTask
Delivery = Prepared | Failed | Finished


class PreparationQueue:
    """Requests that wait to be prepared. Clients take turns; of each, one is prepared at a time."""

    def __init__(self) -> None:
        # in the order of their turns
        self._waiting: dict[str, deque[AnyRequest]] = {}
        self._busy: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, request: AnyRequest) -> None:
        self._waiting.setdefault(request.client, deque()).append(request)

    def take(self) -> AnyRequest | None:
        """Take the next request whose client has none in preparation, or return None."""
        client = next((name for name in self._waiting if name not in self._busy), None)
        if client is None:
            return None
        requests = self._waiting.pop(client)
        request = requests.popleft()
        if requests:
            self._waiting[client] = requests  # behind the others
        self._busy.add(client)
        return request

    def done(self, request: AnyRequest) -> None:
        """The request that was taken has been prepared."""
        self._busy.remove(request.client)

    def remove(self, request: AnyRequest) -> bool:
        """Remove a waiting request. Returns False if it does not wait."""
        requests = self._waiting.get(request.client, deque())
        if request not in requests:
            return False
        requests.remove(request)
        if not requests:
            del self._waiting[request.client]
        return True


class Preparer:
    """Prepares requests in threads. Thread-safe.

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
        self._queue = PreparationQueue()
        self._unfinished: dict[str, tuple[AnyRequest, Cancellation]] = {}
        self._lock = threading.Lock()

    @property
    def is_idle(self) -> bool:
        with self._lock:
            return not self._unfinished

    def submit(self, request: AnyRequest) -> None:
        with self._lock:
            self._unfinished[request.id] = (request, Cancellation())
            self._queue.put(request)
        self._executor.submit(self._prepare_next)

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

    def _prepare_next(self) -> None:
        with self._lock:
            request = self._queue.take()
            if request is None:
                return
            _, cancellation = self._unfinished[request.id]
        result: Delivery | None
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
            del self._unfinished[request.id]
            if result is None or cancellation.is_cancelled:
                result = _cancelled(request, result)
            self._deliver(result)
            has_more = bool(self._queue)
        if has_more:  # perhaps of this client, whose turn could not come before
            self._executor.submit(self._prepare_next)


def _cancelled(request: AnyRequest, result: Delivery | None) -> Failed | Finished:
    """How a cancelled request ends. result: of its preparation, if it was prepared."""
    if isinstance(result, Failed | Finished):
        return result
    if isinstance(result, Sequence):
        return finished_event(result, "cancelled", stop=None, completion_tokens=0)
    if isinstance(request, EmbedRequest):
        return Failed(request.id, "cancelled", "the request was cancelled")
    return Finished(
        request_id=request.id,
        reason="cancelled",
        timings=Timings(),
        prompt_tokens=0,
        completion_tokens=0,
        ctx=0,
    )
