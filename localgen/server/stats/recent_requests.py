"""The most recently ended requests, with the time spent in each phase."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace

from localgen.backends.engine_stats import RequestPhases
from localgen.backends.machine_stats import EndedRequest
from localgen.backends.types import Finished, Timings, restored_text
from localgen.server.stats.request_log import GONE, UNKNOWN_MODEL, RequestRecord

MAX_RECENT_REQUESTS = 50


class RecentRequests:
    """Observer of the request log that keeps the latest MAX_RECENT_REQUESTS answers."""

    def __init__(self) -> None:
        self._ended: deque[tuple[float, EndedRequest]] = deque(maxlen=MAX_RECENT_REQUESTS)

    def on_request_end(self, record: RequestRecord) -> None:
        for each in _ended_requests(record):
            self._ended.appendleft((record.ended_s, each))

    def requests(self, *, with_prompts: bool = False) -> list[EndedRequest]:
        """Return ended requests, newest first. with_prompts: with excerpts of their prompts."""
        now_s = time.monotonic()
        return [
            replace(
                each,
                ended_ago_s=now_s - at_s,
                prefix_break=each.prefix_break if with_prompts else "",
            )
            for at_s, each in self._ended
        ]


def _ended_requests(record: RequestRecord) -> list[EndedRequest]:
    model = record.requested_model if record.model == UNKNOWN_MODEL else record.model
    ends = record.finished or ([record.total] if record.total else [])
    if ends:
        return [_from_finished(end, model, record) for end in ends]
    cut = EndedRequest(
        request_id=record.id,
        model=model,
        client=record.client,
        outcome=record.outcome,
        ended_ago_s=0.0,
        generated_tokens=record.num_tokens,
    )
    return [cut]


def _from_finished(finished: Finished, model: str, record: RequestRecord) -> EndedRequest:
    timings = finished.timings
    is_gone = finished.reason == "cancelled" and record.outcome == GONE
    return EndedRequest(
        request_id=finished.request_id,
        model=model,
        client=record.client,
        outcome=GONE if is_gone else finished.reason,
        ended_ago_s=0.0,
        prompt_tokens=finished.prompt_tokens,
        cached_tokens=timings.cache_n,
        generated_tokens=finished.completion_tokens,
        ctx=finished.ctx,
        ttft_ms=timings.ttft_ms or None,
        tokens_per_s=timings.predicted_per_second or None,
        draft_tokens=timings.draft_n,
        accepted_tokens=timings.draft_n_accepted,
        phases=_phases(timings),
        prefix_break=str(timings.prefix_break or ""),
        restored=restored_text(timings.restored),
    )


def _phases(timings: Timings) -> RequestPhases:
    rest_ms = timings.prompt_ms - timings.cached_ms - timings.first_step_ms
    return RequestPhases(
        template_ms=timings.template_ms,
        queue_ms=timings.queue_ms,
        cached_ms=timings.cached_ms,
        prefill_ms=max(0.0, rest_ms),
        first_step_ms=timings.first_step_ms,
        decode_ms=timings.predicted_ms,
    )
