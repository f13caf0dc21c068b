"""The requests that ended last, for those who want to know where their time went."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace

from localgen.backends.machine_stats import EndedRequest
from localgen.backends.types import Finished, Phases, Timings
from localgen.server.stats.request_log import UNKNOWN, Entry

MOST = 50


class Recent:
    """Observes the journal; an entry for each answer of a request."""

    def __init__(self) -> None:
        self._ended: deque[tuple[float, EndedRequest]] = deque(maxlen=MOST)

    def ended(self, entry: Entry) -> None:
        """A request has ended, however it did."""
        for each in _of(entry):
            self._ended.appendleft((entry.ended_s, each))

    def requests(self) -> list[EndedRequest]:
        """Newest first."""
        now_s = time.monotonic()
        return [replace(each, ended_ago_s=now_s - at_s) for at_s, each in self._ended]


def _of(entry: Entry) -> list[EndedRequest]:
    model = entry.asked if entry.model == UNKNOWN else entry.model
    ends = entry.ends or ([entry.end] if entry.end else [])
    if ends:
        return [_finished(end, model, entry.client) for end in ends]
    cut = EndedRequest(
        request_id=entry.id,
        model=model,
        client=entry.client,
        outcome=entry.outcome,
        ended_ago_s=0.0,
        generated_tokens=entry.num_tokens,
    )
    return [cut]


def _finished(end: Finished, model: str, client: str) -> EndedRequest:
    timings = end.timings
    return EndedRequest(
        request_id=end.request_id,
        model=model,
        client=client,
        outcome=end.reason,
        ended_ago_s=0.0,
        prompt_tokens=end.prompt_tokens,
        cached_tokens=timings.cache_n,
        generated_tokens=end.completion_tokens,
        ctx=end.ctx,
        ttft_ms=timings.ttft_ms or None,
        tokens_per_s=timings.predicted_per_second or None,
        draft_tokens=timings.draft_n,
        accepted_tokens=timings.draft_n_accepted,
        phases=_phases(timings),
    )


def _phases(timings: Timings) -> Phases:
    rest_ms = timings.prompt_ms - timings.cached_ms - timings.first_step_ms
    return Phases(
        template_ms=timings.template_ms,
        queue_ms=timings.queue_ms,
        cached_ms=timings.cached_ms,
        prefill_ms=max(0.0, rest_ms),
        first_step_ms=timings.first_step_ms,
        decode_ms=timings.predicted_ms,
    )
