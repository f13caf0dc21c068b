"""Engine statistics: counters, latency samples, token rates, and snapshots of them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence as Seq

from localgen.backends.engine.scheduler import Scheduler, SequenceOutput
from localgen.backends.engine.speculation.drafter import DecayedRatio
from localgen.backends.engine.speculation.policy import Speculation
from localgen.backends.engine_stats import (
    STEP_TOKENS_BOUNDS,
    EngineStats,
    RequestPhases,
    SequenceStats,
    SpeculationStats,
)
from localgen.backends.kv_store.store import PrefixStore
from localgen.backends.runner.decode_step import DecodeStep
from localgen.backends.runner.interface import (
    AdapterRunner,
    Chunk,
    ModelRunner,
    ThreadedRunner,
    ThreadUsage,
)
from localgen.backends.runner.sequence import Sequence, SequenceState
from localgen.backends.types import Finished, Timings, restored_text

WINDOW_S = 60.0
MAX_SAMPLES = 4096
# a step of fewer prompt tokens takes longer for each than one of a whole prompt
MIN_RATE_TOKENS = 64
# sorting more samples than this on every call would delay steps: sort once per interval instead
MAX_ALWAYS_SORTED = 256
SORT_INTERVAL_S = 1.0


class RecentSamples:
    """Samples of the last minute."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=MAX_SAMPLES)
        self._sorted: list[float] = []
        self._sorted_at_s = -math.inf
        self.last = 0.0

    def add(self, now_s: float, *values: float) -> None:
        """Record samples."""
        if values:
            self.last = values[-1]
            self._samples.extend([(now_s, value) for value in values])

    def values(self, now_s: float) -> list[float]:
        """Return the samples of the last minute, sorted.

        With more than MAX_ALWAYS_SORTED samples the result may be up to SORT_INTERVAL_S old.
        """
        if len(self._samples) > MAX_ALWAYS_SORTED and now_s < self._sorted_at_s + SORT_INTERVAL_S:
            return self._sorted
        while self._samples and self._samples[0][0] < now_s - WINDOW_S:
            self._samples.popleft()
        self._sorted, self._sorted_at_s = sorted(value for _, value in self._samples), now_s
        return self._sorted


class TokenRate:
    """Token throughput over compute time, with exponential decay."""

    def __init__(self, half_life_s: float = 2.0) -> None:
        self._half_life_s = half_life_s
        self._tokens = 0.0
        self._busy_s = 0.0

    def add(self, tokens: int, busy_s: float) -> None:
        """Record a step."""
        decay = math.exp2(-busy_s / self._half_life_s)
        self._tokens = self._tokens * decay + tokens
        self._busy_s = self._busy_s * decay + busy_s

    @property
    def per_s(self) -> float:
        """Tokens per second."""
        return self._tokens / self._busy_s if self._busy_s else 0.0


def percentile(sorted_values: list[float], fraction: float) -> float:
    """Nearest-rank percentile of sorted values; 0 if there are none."""
    if not sorted_values:
        return 0.0
    return sorted_values[max(0, math.ceil(fraction * len(sorted_values)) - 1)]


class StatsRecorder:
    """Records steps and request ends cheaply; statistics are computed in `snapshot`."""

    def __init__(self) -> None:
        self._steps, self._busy_s = 0, 0.0
        self._step_tokens = 0
        self._context_tokens = 0
        self._step_ms = 0.0
        self._step_sequences: Counter[int] = Counter()
        self._step_buckets = [0] * (len(STEP_TOKENS_BOUNDS) + 1)
        self._requests: Counter[str] = Counter()
        self._prefill, self._decode = TokenRate(), TokenRate()
        # the first tokens of a prompt are computed faster than its last ones
        self._whole_prompts = TokenRate(half_life_s=300.0)
        self._ttft_ms, self._itl_ms = RecentSamples(), RecentSamples()
        self._last_token_s: dict[str, float] = {}
        self._drafting_share, self._acceptance, self._tokens_per_step = (
            DecayedRatio(decay=DecayedRatio.RECENT) for _ in range(3)
        )

    def record_step(
        self, now_s: float, step_ms: float, chunks: Seq[Chunk], outputs: list[SequenceOutput]
    ) -> None:
        """Record a finished step.

        The full duration of a step with prefill and decode tokens counts for both rates.
        """
        self._steps += 1
        self._busy_s += step_ms / 1e3
        if isinstance(chunks, DecodeStep):
            tokens, context, drafts, prompts = len(chunks), sum(chunks.starts), 0, list[Chunk]()
        else:
            tokens = sum([len(chunk.tokens) for chunk in chunks])
            context = sum([chunk.start for chunk in chunks])
            drafts = sum([chunk.num_drafts for chunk in chunks])
            prompts = [chunk for chunk in chunks if chunk.start < chunk.seq.num_prompt]
        self._step_tokens += tokens
        self._context_tokens += tokens + context
        self._step_buckets[bisect_left(STEP_TOKENS_BOUNDS, tokens)] += 1
        self._step_ms = step_ms
        self._step_sequences[len(chunks)] += 1
        prompt_tokens = sum(map(len, prompts))
        first_tokens = sum(chunk.is_sampled and chunk.seq.num_generated > 0 for chunk in prompts)
        decoded = sum([len(output.tokens) for output in outputs]) - first_tokens
        if prompt_tokens:
            self._prefill.add(prompt_tokens, step_ms / 1e3)
            if prompt_tokens >= MIN_RATE_TOKENS:
                self._whole_prompts.add(prompt_tokens, step_ms / 1e3)
        if decoded:
            self._decode.add(decoded, step_ms / 1e3)
        # neither a prompt, nor tokens that are computed again after a preemption
        if not prompts and tokens == len(outputs) + drafts:
            self._drafting_share.add(drafts > 0)
            self._acceptance.add(decoded - len(chunks), drafts)
            self._tokens_per_step.add(decoded, len(chunks))
        self._record_tokens([output.seq for output in outputs], now_s)

    def _record_tokens(self, seqs: list[Sequence], now_s: float) -> None:
        """Record the latencies of sequences with new tokens."""
        last_s, names = self._last_token_s, [seq.id for seq in seqs]
        gaps_ms = [(now_s - last_s[name]) * 1e3 for name in names if name in last_s]
        self._itl_ms.add(now_s, *gaps_ms)
        if len(gaps_ms) < len(names):
            new = [seq for seq in seqs if seq.id not in last_s]
            self._ttft_ms.add(now_s, *[(now_s - seq.arrived_s) * 1e3 for seq in new])
        last_s.update(dict.fromkeys(names, now_s))

    def record_end(self, request_id: str, reason: str) -> None:
        """Record the end of a request."""
        self._requests[reason] += 1
        self._last_token_s.pop(request_id, None)

    def snapshot(
        self,
        now_s: float,
        scheduler: Scheduler,
        runner: ModelRunner,
        token_budget: int,
        speculation: Speculation,
        prefix_store: PrefixStore | None,
    ) -> EngineStats:
        """Return the current statistics."""
        if prefix_store is not None:
            prefix_store.prefill_per_s = self._whole_prompts.per_s
        ttft_ms, itl_ms = self._ttft_ms.values(now_s), self._itl_ms.values(now_s)
        usage = runner.usage()
        threads = runner.threads() if isinstance(runner, ThreadedRunner) else ThreadUsage(0, 0)
        widest = max(self._step_sequences, default=0)
        running, counters = scheduler.running, scheduler.counters
        share = self._drafting_share.value
        return EngineStats(
            running=len(running),
            waiting=len(scheduler.queue),
            kv_tokens=usage.used + usage.cached + usage.free,
            kv_used=usage.used,
            kv_cached=usage.cached,
            kv_free=usage.free,
            kv_page_tokens=runner.limits.page_tokens,
            token_budget=token_budget,
            threads=threads.now,
            threads_max=threads.most,
            step_ms=self._step_ms,
            prefill_tokens_per_s=self._prefill.per_s,
            decode_tokens_per_s=self._decode.per_s,
            ttft_last_ms=self._ttft_ms.last,
            ttft_p50_ms=percentile(ttft_ms, 0.5),
            ttft_p99_ms=percentile(ttft_ms, 0.99),
            itl_last_ms=self._itl_ms.last,
            itl_p50_ms=percentile(itl_ms, 0.5),
            itl_p99_ms=percentile(itl_ms, 0.99),
            steps_total=self._steps,
            busy_s_total=self._busy_s,
            step_tokens_total=self._step_tokens,
            context_tokens_total=self._context_tokens,
            step_tokens=tuple(self._step_buckets),
            step_sequences=tuple(self._step_sequences[n] for n in range(widest + 1)),
            prompt_tokens_total=counters.prompt_tokens,
            generation_tokens_total=counters.generated_tokens,
            prefix_cache_queries_total=counters.prefix_queries,
            prefix_cache_hits_total=counters.prefix_hits,
            num_preemptions_total=counters.preemptions,
            requests_total=dict(self._requests),
            speculation=SpeculationStats(
                drafters=tuple(each.name for each in speculation.drafters if not each.failure),
                share=share,
                reason="" if share >= 0.5 else speculation.reason,
                acceptance=self._acceptance.value,
                tokens_per_step=self._tokens_per_step.value,
                speedup=speculation.speedup.value,
                drafting_steps_total=counters.drafting_steps,
                draft_tokens_total=counters.drafted_tokens,
                accepted_tokens_total=counters.accepted_tokens,
            ),
            kv_tiers=prefix_store.stats() if prefix_store is not None else (),
            sequences=tuple(_sequence_stats(seq, now_s) for seq in [*running, *scheduler.queue]),
            adapters=runner.adapters() if isinstance(runner, AdapterRunner) else (),
        )


def _sequence_stats(seq: Sequence, now_s: float) -> SequenceStats:
    state = "decode" if seq.is_decoding else "prefill"
    return SequenceStats(
        request_id=seq.id,
        client=seq.client,
        state="queued" if seq.state is SequenceState.QUEUED else state,
        prompt_tokens=seq.num_prompt,
        cached_tokens=seq.num_cached,
        computed_tokens=seq.num_computed,
        generated_tokens=seq.num_generated,
        ctx=seq.ctx,
        age_s=now_s - seq.arrived_s,
        draft_tokens=seq.num_drafted,
        accepted_tokens=seq.num_accepted,
        ttft_ms=_elapsed_ms(seq.arrived_s, seq.first_token_s),
        phases=request_phases(seq, now_s),
        restored=restored_text(seq.restored),
    )


def _elapsed_ms(start_s: float, end_s: float | None) -> float | None:
    return None if end_s is None else (end_s - start_s) * 1e3


def _queue_ms(seq: Sequence, admitted_s: float) -> float:
    """Time from arrival to admission, without the time spent rendering the template."""
    return max(0.0, (admitted_s - seq.arrived_s) * 1e3 - seq.template_ms)


def request_phases(seq: Sequence, now_s: float) -> RequestPhases:
    """Return the time spent in each phase of a live sequence so far."""
    admitted_s = now_s if seq.admitted_s is None else seq.admitted_s
    first_s = now_s if seq.first_token_s is None else seq.first_token_s
    prompt_ms = (first_s - admitted_s) * 1e3
    return RequestPhases(
        template_ms=seq.template_ms,
        queue_ms=_queue_ms(seq, admitted_s),
        cached_ms=seq.cached_ms,
        prefill_ms=max(0.0, prompt_ms - seq.cached_ms - seq.first_step_ms),
        first_step_ms=seq.first_step_ms,
        decode_ms=(now_s - first_s) * 1e3,
    )


def request_timings(seq: Sequence, no_drafts_reason: str = "") -> Timings:
    """Return the timings of a finished sequence. no_drafts_reason: why steps had none lately."""
    admitted_s = seq.admitted_s if seq.admitted_s is not None else seq.arrived_s
    first_s = seq.first_token_s if seq.first_token_s is not None else admitted_s
    last_s = seq.last_token_s if seq.last_token_s is not None else first_s
    prompt_n = seq.num_prompt - seq.num_cached if seq.first_token_s is not None else 0
    prompt_s, predicted_s = first_s - admitted_s, last_s - first_s
    gaps = seq.num_generated - 1
    parted = seq.prefix_break if prompt_n else None
    has_drafts = 2 * seq.num_drafting_steps >= max(1, seq.num_decode_steps)
    return Timings(
        cache_n=seq.num_cached,
        prompt_n=prompt_n,
        prompt_ms=prompt_s * 1e3,
        prompt_per_second=prompt_n / prompt_s if prompt_s > 0 else 0.0,
        predicted_n=seq.num_generated,
        predicted_ms=predicted_s * 1e3,
        predicted_per_second=gaps / predicted_s if predicted_s > 0 else 0.0,
        ttft_ms=(first_s - seq.arrived_s) * 1e3 if seq.first_token_s is not None else 0.0,
        queue_ms=_queue_ms(seq, admitted_s),
        template_ms=seq.template_ms,
        cached_ms=seq.cached_ms,
        first_step_ms=seq.first_step_ms,
        draft_n=seq.num_drafted,
        draft_n_accepted=seq.num_accepted,
        draft_steps=seq.num_decode_steps,
        draft_speedup=seq.plain_decode_ms / (seq.decode_ms or math.inf),
        draft_reason="" if has_drafts else no_drafts_reason,
        draft_by=tuple(name for name, _ in seq.drafted_by.most_common()),
        prefix_break=parted.place.measured(
            held=seq.num_earlier_cached, computed=prompt_n, prompt_ms=prompt_s * 1e3
        )
        if parted
        else None,
        restored=seq.restored,
    )


def finished_event(
    seq: Sequence,
    reason: str,
    *,
    stop: str | None,
    completion_tokens: int,
    no_drafts_reason: str = "",
) -> Finished:
    """Return the Finished event of a sequence, with notes for the user."""
    notes = [*seq.notes]
    if seq.num_preemptions:
        notes.append(f"preempted {seq.num_preemptions}× (KV cache full), recomputed")
    if reason == "length" and len(seq.tokens) >= seq.ctx:
        notes.append(f"context full: {seq.ctx:,} tokens")
    return Finished(
        request_id=seq.id,
        reason=reason,
        timings=request_timings(seq, no_drafts_reason),
        prompt_tokens=seq.num_prompt,
        completion_tokens=completion_tokens,
        ctx=seq.ctx,
        # with sampled drafts the seed alone does not reproduce the text
        seed=None if seq.used_sampled_drafts else seq.params.seed,
        stop=stop,
        notes=tuple(notes),
        block_hashes=seq.block_hashes,
    )
