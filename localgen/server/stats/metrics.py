"""/metrics: Prometheus figures of requests and engines, named as vLLM's are, with our prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from localgen.backends.engine.stats import STEP_TOKENS_BOUNDS
from localgen.backends.types import EngineStats, Finished, SpeculationStats
from localgen.server.stats.request_log import EMBEDDED_REASON, RequestRecord

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

# engines by the name of their model
EngineStatsSource = Callable[[], Iterable[tuple[str, EngineStats]]]


class Metrics:
    """Figures since the server started. engine_stats: what those loaded now say of themselves."""

    def __init__(self, engine_stats: EngineStatsSource) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine_stats))
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "Arrival to token.", _TTFT_BUCKETS_S
        )
        self._itl = self._histogram(
            "inter_token_latency_seconds", "Token to token.", _ITL_BUCKETS_S
        )
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean of a request.", _ITL_BUCKETS_S
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "Arrival to end.", _REQUEST_BUCKETS_S
        )
        self._queue = self._histogram("request_queue_time_seconds", "Waiting.", _REQUEST_BUCKETS_S)
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "Prompts.", _REQUEST_BUCKETS_S
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "Answers.", _REQUEST_BUCKETS_S
        )
        self._prompt_tokens = self._histogram(
            "request_prompt_tokens", "Tokens of prompts.", _TOKEN_COUNT_BUCKETS
        )
        self._generation_tokens = self._histogram(
            "request_generation_tokens", "Tokens of answers.", _TOKEN_COUNT_BUCKETS
        )
        self._prompt_tokens_total = self._counter("prompt_tokens", "Tokens of prompts.")
        self._generation_tokens_total = self._counter("generation_tokens", "Tokens of answers.")
        self._cache_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up.")
        self._cache_hits = self._counter("prefix_cache_hits", "Prompt tokens found in the cache.")
        self._success = self._counter("request_success", "Finished.", "finished_reason")
        self._failure = self._counter("request_failure", "Ended by an error or left.", "outcome")
        self._loads = self._counter("model_loads", "Loaded, or why not.", "outcome")
        self._load_s = self._histogram(
            "model_load_time_seconds", "To load a model.", _REQUEST_BUCKETS_S
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
        """Count a request."""
        model = record.model
        for gap_s, tokens in record.token_gaps_s:
            for _ in range(tokens):
                self._itl.labels(model).observe(gap_s)
        self._e2e.labels(model).observe(record.ended_s - record.arrived_s)
        if record.total is None:
            self._failure.labels(model, record.outcome).inc()
            self._generation_tokens_total.labels(model).inc(record.num_tokens)
            return
        for answer in record.finished:
            if answer.completion_tokens > 1:
                each_s = answer.timings.predicted_ms / 1e3 / (answer.completion_tokens - 1)
                self._tpot.labels(model).observe(each_s)
        self._success.labels(model, record.total.reason).inc()
        self._record_finished(model, record.total)

    def on_load(self, model: str, outcome: str, load_s: float) -> None:
        """Count a load. outcome: loaded, or the code of what went wrong."""
        self._loads.labels(model, outcome).inc()
        if outcome == "loaded":
            self._load_s.labels(model).observe(load_s)

    def _record_finished(self, model: str, finished: Finished) -> None:
        timings = finished.timings
        if finished.completion_tokens:
            self._ttft.labels(model).observe(timings.ttft_ms / 1e3)
        self._queue.labels(model).observe(timings.queue_ms / 1e3)
        self._prefill.labels(model).observe(timings.prompt_ms / 1e3)
        self._prompt_tokens.labels(model).observe(finished.prompt_tokens)
        self._prompt_tokens_total.labels(model).inc(finished.prompt_tokens)
        if finished.reason == EMBEDDED_REASON:  # it has no answer, and looks nothing up
            return
        self._decode.labels(model).observe(timings.predicted_ms / 1e3)
        self._generation_tokens.labels(model).observe(finished.completion_tokens)
        self._generation_tokens_total.labels(model).inc(finished.completion_tokens)
        self._cache_queries.labels(model).inc(finished.prompt_tokens)
        self._cache_hits.labels(model).inc(timings.cache_n)

    def render(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """What engines know themselves, read when somebody asks."""

    def __init__(self, engine_stats: EngineStatsSource) -> None:
        self._engine_stats = engine_stats

    def collect(self) -> Iterator[Metric]:
        found = list(self._engine_stats())
        gauges: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
            "num_requests_running": ("Requests being computed.", lambda s: s.running),
            "num_requests_waiting": ("Requests in the queue.", lambda s: s.waiting),
            "kv_cache_usage_perc": (
                "Share of the KV cache that running requests use, 0 to 1.",
                lambda s: s.kv_used / s.kv_tokens if s.kv_tokens else 0.0,
            ),
        }
        for name, (says, value) in gauges.items():
            gauge = GaugeMetricFamily(f"localgen:{name}", says, labels=[_LABEL])
            for model, stats in found:
                gauge.add_metric([model], value(stats))
            yield gauge
        preempted = CounterMetricFamily(
            "localgen:num_preemptions", "Requests sent back to the queue.", labels=[_LABEL]
        )
        steps = HistogramMetricFamily(
            "localgen:iteration_tokens_total", "Tokens computed in a step.", labels=[_LABEL]
        )
        for model, stats in found:
            preempted.add_metric([model], stats.num_preemptions_total)
            steps.add_metric([model], _cumulative_buckets(stats), stats.step_tokens_total)
        yield from (preempted, steps)
        yield from _speculation_counters(found)


def _speculation_counters(engines: Iterable[tuple[str, EngineStats]]) -> Iterator[Metric]:
    totals: dict[str, tuple[str, Callable[[SpeculationStats], int]]] = {
        "num_drafts": ("Steps that verified drafts.", lambda s: s.drafting_steps_total),
        "num_draft_tokens": ("Tokens proposed.", lambda s: s.draft_tokens_total),
        "num_accepted_tokens": ("Proposed tokens kept.", lambda s: s.accepted_tokens_total),
    }
    for name, (says, value) in totals.items():
        counter = CounterMetricFamily(f"localgen:spec_decode_{name}", says, labels=[_LABEL])
        for model, stats in engines:
            counter.add_metric([model], value(stats.speculation))
        yield counter


def _cumulative_buckets(stats: EngineStats) -> list[tuple[str, float]]:
    """Steps of at most so many tokens, for each bound."""
    counted, so_far = [], 0
    bounds = [*map(str, map(float, STEP_TOKENS_BOUNDS)), "+Inf"]
    # an engine that has just begun has not said anything yet
    for bound, steps in zip(bounds, stats.step_tokens or [0] * len(bounds), strict=True):
        so_far += steps
        counted.append((bound, float(so_far)))
    return counted
