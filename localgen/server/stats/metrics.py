"""/metrics: Prometheus metrics of requests and engines, with vLLM's names under our prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from localgen.backends.engine_stats import (
    STEP_TOKENS_BOUNDS,
    EngineStats,
    KVTierStats,
    SpeculationStats,
)
from localgen.backends.types import Finished
from localgen.server.stats.metric_aliases import AliasCollector
from localgen.server.stats.request_log import EMBEDDED_REASON, GONE, RequestRecord

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LABEL = "model_name"
_TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_ITL_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 10, 20, 40, 80),
)
_REQUEST_BUCKETS_S = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5),
    *(5, 10, 15, 20, 30, 40, 60, 120, 960),
)
_TOKEN_COUNT_BUCKETS = (
    *(1, 2, 5, 10, 20, 50, 100, 200, 500),
    *(1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000),
)
_N_BUCKETS = (1, 2, 5, 10, 20)

# yields (model name, engine statistics) of each loaded model
EngineStatsSource = Callable[[], Iterable[tuple[str, EngineStats]]]


class Metrics:
    """Metrics since server start.

    engine_stats: current statistics of the loaded engines. count_waiting: requests that wait for
    memory, by model name.
    """

    def __init__(
        self, engine_stats: EngineStatsSource, count_waiting: Callable[[], Mapping[str, int]]
    ) -> None:
        self._registry = CollectorRegistry()
        self._aliases = CollectorRegistry(auto_describe=False)
        self._aliases.register(AliasCollector(self._registry))
        self._registry.register(_EngineCollector(engine_stats))
        self._registry.register(_WaitingCollector(count_waiting))
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "Time to first token in seconds.", _TTFT_BUCKETS_S
        )
        self._itl = self._histogram(
            "inter_token_latency_seconds", "Time between tokens in seconds.", _ITL_BUCKETS_S
        )
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time per output token in seconds.",
            _ITL_BUCKETS_S,
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds",
            "End-to-end request latency in seconds.",
            _REQUEST_BUCKETS_S,
        )
        self._queue = self._histogram(
            "request_queue_time_seconds", "Time in the queue in seconds.", _REQUEST_BUCKETS_S
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "Prefill time in seconds.", _REQUEST_BUCKETS_S
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "Decode time in seconds.", _REQUEST_BUCKETS_S
        )
        self._inference = self._histogram(
            "request_inference_time_seconds", "Prefill and decode in seconds.", _REQUEST_BUCKETS_S
        )
        self._prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens per request.", _TOKEN_COUNT_BUCKETS
        )
        self._generation_tokens = self._histogram(
            "request_generation_tokens", "Generated tokens per request.", _TOKEN_COUNT_BUCKETS
        )
        self._longest_answer = self._histogram(
            "request_max_num_generation_tokens",
            "Generated tokens of the longest answer of a request.",
            _TOKEN_COUNT_BUCKETS,
        )
        self._computed_tokens = self._histogram(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens per request that were not in the prefix cache.",
            _TOKEN_COUNT_BUCKETS,
        )
        self._params_n = self._histogram(
            "request_params_n", "Answers per prompt that a request asks for.", _N_BUCKETS
        )
        self._params_max_tokens = self._histogram(
            "request_params_max_tokens", "max_tokens of the requests with it.", _TOKEN_COUNT_BUCKETS
        )
        self._prompt_tokens_total = self._counter("prompt_tokens", "Prompt tokens.")
        self._generation_tokens_total = self._counter("generation_tokens", "Generated tokens.")
        self._cache_queries = self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self._cache_hits = self._counter(
            "prefix_cache_hits", "Prompt tokens found in the prefix cache."
        )
        self._success = self._counter("request_success", "Finished requests.", "finished_reason")
        self._failure = self._counter(
            "request_failure", "Requests that failed or lost their client.", "outcome"
        )
        self._loads = self._counter("model_loads", "Model loads by outcome.", "outcome")
        self._load_s = self._histogram(
            "model_load_time_seconds", "Model load time in seconds.", _REQUEST_BUCKETS_S
        )

    def _histogram(self, name: str, documentation: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(
            f"localgen:{name}", documentation, (_LABEL,), buckets=buckets, registry=self._registry
        )

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(
            f"localgen:{name}", documentation, (_LABEL, *labels), registry=self._registry
        )

    def on_request_end(self, record: RequestRecord) -> None:
        """Record an ended request."""
        model = record.model
        self.on_tokens(record)
        self._e2e.labels(model).observe(record.ended_s - record.arrived_s)
        if record.total is None or record.outcome == GONE:
            self._failure.labels(model, record.outcome).inc()
            return
        for answer in record.finished:
            if answer.completion_tokens > 1:
                each_s = answer.timings.predicted_ms / 1e3 / (answer.completion_tokens - 1)
                self._tpot.labels(model).observe(each_s)
        left = record.total.completion_tokens - record.num_tokens
        self._generation_tokens_total.labels(model).inc(max(0, left))
        self._success.labels(model, record.total.reason).inc()
        self._record_finished(model, record.total)
        if record.finished:  # not of embeddings
            self._record_parameters(model, record)

    def on_tokens(self, record: RequestRecord) -> None:
        """Record the tokens that a request has got since the last call."""
        model, gaps_s = record.model, record.token_gaps_s
        if record.num_counted == record.num_tokens:
            return
        if not record.num_counted and record.first_token_s is not None:
            self._ttft.labels(model).observe(record.first_token_s - record.arrived_s)
        self._generation_tokens_total.labels(model).inc(record.num_tokens - record.num_counted)
        itl = self._itl.labels(model)
        for gap_s, tokens in gaps_s:
            for _ in range(tokens):
                itl.observe(gap_s)
        gaps_s.clear()
        record.num_counted = record.num_tokens

    def on_load(self, model: str, outcome: str, load_s: float) -> None:
        """Record a model load. outcome: `loaded` or an error code."""
        self._loads.labels(model, outcome).inc()
        if outcome == "loaded":
            self._load_s.labels(model).observe(load_s)

    def _record_finished(self, model: str, finished: Finished) -> None:
        timings = finished.timings
        self._queue.labels(model).observe(timings.queue_ms / 1e3)
        self._prefill.labels(model).observe(timings.prompt_ms / 1e3)
        self._prompt_tokens.labels(model).observe(finished.prompt_tokens)
        self._prompt_tokens_total.labels(model).inc(finished.prompt_tokens)
        self._computed_tokens.labels(model).observe(timings.prompt_n)
        if finished.reason == EMBEDDED_REASON:  # no generated tokens, no prefix cache
            return
        self._decode.labels(model).observe(timings.predicted_ms / 1e3)
        self._inference.labels(model).observe((timings.prompt_ms + timings.predicted_ms) / 1e3)
        self._generation_tokens.labels(model).observe(finished.completion_tokens)
        self._cache_queries.labels(model).inc(finished.prompt_tokens)
        self._cache_hits.labels(model).inc(timings.cache_n)

    def _record_parameters(self, model: str, record: RequestRecord) -> None:
        self._longest_answer.labels(model).observe(
            max(answer.completion_tokens for answer in record.finished)
        )
        self._params_n.labels(model).observe(record.n)
        if record.max_tokens is not None:
            self._params_max_tokens.labels(model).observe(record.max_tokens)

    def render(self) -> bytes:
        """Return all metrics in the Prometheus text format, then again by other servers' names."""
        return generate_latest(self._registry) + generate_latest(self._aliases)


class _EngineCollector(Collector):
    """Metrics that engines keep, read on each scrape."""

    def __init__(self, engine_stats: EngineStatsSource) -> None:
        self._engine_stats = engine_stats

    def collect(self) -> Iterator[Metric]:
        found = list(self._engine_stats())
        gauges: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
            "num_requests_running": ("Running requests.", lambda s: s.running),
            "num_requests_waiting": ("Waiting requests.", lambda s: s.waiting),
            "num_threads": (
                "Threads on cores that other processes leave free.",
                lambda s: s.threads,
            ),
            "kv_cache_usage_perc": (
                "Fraction of the KV cache used by running requests, 0 to 1.",
                lambda s: s.kv_used / s.kv_tokens if s.kv_tokens else 0.0,
            ),
            "kv_cache_tokens": ("Tokens of running requests in the KV cache.", lambda s: s.kv_used),
            "prefill_tokens_per_second": (
                "Prompt tokens per second of the latest steps with prompts.",
                lambda s: s.prefill_tokens_per_s,
            ),
            "decode_tokens_per_second": (
                "Generated tokens per second of the latest steps with answers.",
                lambda s: s.decode_tokens_per_s,
            ),
            "sequences_per_step": ("Mean number of sequences per step.", _sequences_per_step),
        }
        for name, (says, value) in gauges.items():
            gauge = GaugeMetricFamily(f"localgen:{name}", says, labels=[_LABEL])
            for model, stats in found:
                gauge.add_metric([model], value(stats))
            yield gauge
        preempted = CounterMetricFamily(
            "localgen:num_preemptions", "Preempted requests.", labels=[_LABEL]
        )
        steps = HistogramMetricFamily(
            "localgen:iteration_tokens_total", "Tokens per engine step.", labels=[_LABEL]
        )
        for model, stats in found:
            preempted.add_metric([model], stats.num_preemptions_total)
            steps.add_metric([model], _cumulative_buckets(stats), stats.step_tokens_total)
        yield from (preempted, steps)
        yield from _speculation_counters(found)
        yield from _tier_metrics(found)
        yield _cache_config(found)


class _WaitingCollector(Collector):
    """Requests that no engine has yet, read on each scrape."""

    def __init__(self, count_waiting: Callable[[], Mapping[str, int]]) -> None:
        self._count_waiting = count_waiting

    def collect(self) -> Iterator[Metric]:
        gauge = GaugeMetricFamily(
            "localgen:num_requests_waiting_for_memory",
            "Requests that wait until memory of other models is free.",
            labels=[_LABEL],
        )
        for model, count in self._count_waiting().items():
            gauge.add_metric([model], count)
        yield gauge


def _cache_config(engines: Iterable[tuple[str, EngineStats]]) -> Metric:
    """The size of the KV cache in vLLM's form: 1, with the size in labels."""
    gauge = GaugeMetricFamily(
        "localgen:cache_config_info",
        "Blocks of the KV cache, and tokens per block.",
        labels=[_LABEL, "block_size", "num_gpu_blocks"],
    )
    for model, stats in engines:
        blocks = stats.kv_tokens // stats.kv_page_tokens
        gauge.add_metric([model, str(stats.kv_page_tokens), str(blocks)], 1)
    return gauge


def _sequences_per_step(stats: EngineStats) -> float:
    sequences = sum(n * steps for n, steps in enumerate(stats.step_sequences))
    return sequences / stats.steps_total if stats.steps_total else 0.0


def _speculation_counters(engines: Iterable[tuple[str, EngineStats]]) -> Iterator[Metric]:
    totals: dict[str, tuple[str, Callable[[SpeculationStats], int]]] = {
        "num_drafts": ("Steps that verified draft tokens.", lambda s: s.drafting_steps_total),
        "num_draft_tokens": ("Draft tokens.", lambda s: s.draft_tokens_total),
        "num_accepted_tokens": ("Accepted draft tokens.", lambda s: s.accepted_tokens_total),
    }
    for name, (says, value) in totals.items():
        counter = CounterMetricFamily(f"localgen:spec_decode_{name}", says, labels=[_LABEL])
        for model, stats in engines:
            counter.add_metric([model], value(stats.speculation))
        yield counter


def _tier_metrics(engines: Iterable[tuple[str, EngineStats]]) -> Iterator[Metric]:
    """Prefixes that are kept outside of the KV cache, by model and tier."""
    gauges: dict[str, tuple[str, Callable[[KVTierStats], float]]] = {
        "bytes": ("Bytes of the prefixes of a model in a tier.", lambda s: s.num_bytes),
        "limit_bytes": (
            "Limit of a tier in bytes; that of the disk is for all models together.",
            lambda s: s.limit_bytes,
        ),
        "blocks": ("Stored blocks of the prefixes of a model in a tier.", lambda s: s.blocks),
    }
    counters: dict[str, tuple[str, Callable[[KVTierStats], float]]] = {
        "hit_tokens": ("Prompt tokens restored from a tier.", lambda s: s.hit_tokens_total),
        "saved_seconds": (
            "Seconds by which computing them would have taken longer.",
            lambda s: s.saved_s_total,
        ),
        "refused": (
            "Files of a tier that were damaged, of somebody else, or of another model.",
            lambda s: s.refused_total,
        ),
    }
    tiers = [(model, tier) for model, stats in engines for tier in stats.kv_tiers]
    for family, metrics in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
        for name, (says, value) in metrics.items():
            metric = family(f"localgen:kv_tier_{name}", says, labels=[_LABEL, "tier"])
            for model, tier in tiers:
                metric.add_metric([model, tier.tier], value(tier))
            yield metric


def _cumulative_buckets(stats: EngineStats) -> list[tuple[str, float]]:
    """Return (upper bound, cumulative number of steps) of the step-size histogram."""
    counted, so_far = [], 0
    bounds = [*map(str, map(float, STEP_TOKENS_BOUNDS)), "+Inf"]
    # empty until the first step of an engine
    for bound, steps in zip(bounds, stats.step_tokens or [0] * len(bounds), strict=True):
        so_far += steps
        counted.append((bound, float(so_far)))
    return counted
