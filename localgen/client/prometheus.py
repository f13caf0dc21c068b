"""Parse the /metrics page of any known server."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from prometheus_client.parser import text_string_to_metric_families

from localgen.backends.engine_stats import SpeculationStats
from localgen.backends.errors import ServerUnavailable
from localgen.client.metric_names import (
    BUSY_SLOTS_PER_STEP,
    KNOWN_SERVERS,
    VLLM_CACHE_INFO,
    MetricNames,
)
from localgen.client.snapshot import LatencyStats, ModelCounters, ModelSnapshot, ServerSnapshot

# for percentiles
PERCENTILE_WINDOW_S = 60.0


@dataclass(slots=True)
class _ModelSamples:
    """The samples of one model: values by name, histogram buckets by name and bound.

    counts: how many samples were added up for each value.
    """

    values: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    buckets: dict[str, dict[float, float]] = field(default_factory=lambda: defaultdict(dict))
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def total(self, names: Iterable[str]) -> float | None:
        """Sum of all samples of the first name present; None if none is."""
        return next((self.values[name] for name in names if name in self.values), None)

    def mean(self, names: Iterable[str]) -> float | None:
        """Mean of all samples of the first name present; None if none is."""
        found = next((name for name in names if name in self.values), None)
        return None if found is None else self.values[found] / self.counts[found]


@dataclass(frozen=True, slots=True)
class _Histogram:
    """A Prometheus histogram. buckets: cumulative counts by upper bound in seconds."""

    buckets: dict[float, float]
    sum_s: float
    count: float

    def since(self, earlier: _Histogram) -> _Histogram:
        """The observations made after `earlier`."""
        buckets = {le: n - earlier.buckets.get(le, 0.0) for le, n in self.buckets.items()}
        return _Histogram(buckets, self.sum_s - earlier.sum_s, self.count - earlier.count)

    def quantile_ms(self, quantile: float) -> float | None:
        """Interpolated within a bucket, at most the largest finite bound; None if empty."""
        if self.count <= 0:
            return None
        rank, below, low = quantile * self.count, 0.0, 0.0
        for bound, cumulative in sorted(self.buckets.items()):
            if cumulative >= rank:
                if math.isinf(bound):
                    break
                within = (rank - below) / (cumulative - below) if cumulative > below else 1.0
                return (low + (bound - low) * within) * 1e3
            below, low = cumulative, bound
        return low * 1e3


class _LatencyWindow:
    """The last minute of a histogram."""

    def __init__(self) -> None:
        self._history: deque[tuple[float, _Histogram]] = deque()
        self._last_ms: float | None = None

    def update(self, now_s: float, histogram: _Histogram) -> LatencyStats:
        """Add the current histogram and return the statistics of the window."""
        if self._history:
            new = histogram.since(self._history[-1][1])
            if new.count < 0:  # the server was restarted
                self._history.clear()
            elif new.count > 0:
                self._last_ms = new.sum_s / new.count * 1e3
        self._history.append((now_s, histogram))
        while len(self._history) > 2 and self._history[1][0] <= now_s - PERCENTILE_WINDOW_S:
            self._history.popleft()
        lately = histogram.since(self._history[0][1])
        return LatencyStats(
            last_ms=self._last_ms,
            p50_ms=lately.quantile_ms(0.5),
            p99_ms=lately.quantile_ms(0.99),
        )


class MetricsParser:
    """Parses successive pages of one server; percentiles of a minute need the earlier pages."""

    def __init__(self) -> None:
        self._latency_windows: dict[tuple[str, str], _LatencyWindow] = defaultdict(_LatencyWindow)

    def parse(self, text: str, now_s: float) -> ServerSnapshot:
        """Parse a page. now_s: monotonic clock.

        Raises ServerUnavailable if the page is invalid or not from a known server.
        """
        try:
            families = list(text_string_to_metric_families(text))
        except Exception as error:  # the parser does not document its errors
            raise ServerUnavailable(
                f"/metrics is not in the Prometheus text format: {error}"
            ) from error
        named = [family.name for family in families]
        names = next(
            (each for each in KNOWN_SERVERS if any(n.startswith(each.prefix) for n in named)), None
        )
        if names is None:
            raise ServerUnavailable(
                "/metrics has no metrics of vLLM, SGLang, llama-server or localgen"
            )
        by_model: dict[str, _ModelSamples] = defaultdict(_ModelSamples)
        caches: dict[str, str] = {}
        for family in families:
            for sample in family.samples:
                if sample.name == VLLM_CACHE_INFO:
                    caches = sample.labels
                elif sample.name.startswith(names.prefix):
                    _add_sample(by_model, names, sample.name, sample.labels, sample.value)
        models = tuple(
            self._model_snapshot(names, *each, now_s) for each in sorted(by_model.items())
        )
        if len(models) == 1:
            models = (_with_cache_size(models[0], caches),)
        return ServerSnapshot(server_type=names.server_type, models=models)

    def _model_snapshot(
        self, metrics: MetricNames, model: str, samples: _ModelSamples, now_s: float
    ) -> ModelSnapshot:
        tokens_per_step = samples.mean(metrics.tokens_per_step)
        used, tokens = samples.mean(metrics.kv_used), samples.mean(metrics.kv_tokens)
        return ModelSnapshot(
            name=model or metrics.server_type,
            running=_round(samples.total(metrics.running)),
            waiting=_round(samples.total(metrics.waiting)),
            kv_tokens=_round(tokens),
            kv_used=_round(used),
            kv_usage=samples.mean(metrics.kv_usage),
            ttft=self._latency(model, metrics.ttft, samples, now_s),
            itl=self._latency(model, metrics.itl, samples, now_s),
            counters=_counters(metrics, samples),
            speculation=(
                SpeculationStats(tokens_per_step=tokens_per_step) if tokens_per_step else None
            ),
        )

    def _latency(
        self, model: str, names: tuple[str, ...], samples: _ModelSamples, now_s: float
    ) -> LatencyStats:
        name = next((each for each in names if samples.buckets.get(each)), None)
        if name is None:
            return LatencyStats()
        histogram = _Histogram(
            samples.buckets[name], samples.values[f"{name}_sum"], samples.values[f"{name}_count"]
        )
        return self._latency_windows[model, name].update(now_s, histogram)


def _add_sample(
    by_model: dict[str, _ModelSamples],
    metrics: MetricNames,
    name: str,
    labels: dict[str, str],
    value: float,
) -> None:
    if math.isnan(value) or (metrics.rank_label and labels.get(metrics.rank_label, "0") != "0"):
        return
    found = by_model[labels.get(metrics.model_label, "")]
    if name.endswith("_bucket") and "le" in labels:
        buckets, bound = found.buckets[name.removesuffix("_bucket")], float(labels["le"])
        buckets[bound] = buckets.get(bound, 0.0) + value
        return
    found.values[name] += value
    found.counts[name] += 1


def _counters(metrics: MetricNames, samples: _ModelSamples) -> ModelCounters:
    totals = {name: samples.total(candidates) for name, candidates in metrics.counters.items()}
    busy, steps = samples.total((BUSY_SLOTS_PER_STEP,)), totals.get("steps")
    if busy is not None and steps is not None:
        totals["step_sequences"] = busy * steps
    if metrics.counts_at_end:  # a token for each sequence of a step, meanwhile
        totals["generated_tokens"] = totals.get("step_sequences") or steps
    return ModelCounters(**totals)


def _round(value: float | None) -> int | None:
    return None if value is None else round(value)


def _with_cache_size(model: ModelSnapshot, labels: dict[str, str]) -> ModelSnapshot:
    """Add the size of vLLM's KV cache, which it reports in labels."""
    blocks, each = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
    if not (blocks.isdecimal() and each.isdecimal()):
        return model
    tokens = int(blocks) * int(each)
    used = None if model.kv_usage is None else round(model.kv_usage * tokens)
    return replace(model, kv_tokens=tokens, kv_used=used)
