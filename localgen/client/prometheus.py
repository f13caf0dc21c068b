"""A server's figures from its /metrics, whoever made it."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from prometheus_client.parser import text_string_to_metric_families

from localgen.backends.errors import ServerUnavailable
from localgen.backends.types import SpeculationStats
from localgen.client.metric_names import ALL, BUSY_PER_STEP, VLLM_CACHE, Names
from localgen.client.snapshot import Latency, ModelSnapshot, Snapshot, Totals

# percentiles are of the answers of this time
WINDOW_S = 60.0


@dataclass(slots=True)
class _Samples:
    """What a server says of one model: values by name, histograms' buckets by their bounds."""

    values: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    buckets: dict[str, dict[float, float]] = field(default_factory=lambda: defaultdict(dict))
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def first(self, names: Iterable[str]) -> float | None:
        """The sum of whatever has the first name that is there."""
        return next((self.values[name] for name in names if name in self.values), None)

    def mean(self, names: Iterable[str]) -> float | None:
        """The same, averaged over those that say it."""
        found = next((name for name in names if name in self.values), None)
        return None if found is None else self.values[found] / self.counts[found]


@dataclass(frozen=True, slots=True)
class _Histogram:
    """Cumulative counts by upper bounds in seconds, as Prometheus has them."""

    buckets: dict[float, float]
    sum_s: float
    count: float

    def since(self, before: _Histogram) -> _Histogram:
        """What has come since."""
        buckets = {le: n - before.buckets.get(le, 0.0) for le, n in self.buckets.items()}
        return _Histogram(buckets, self.sum_s - before.sum_s, self.count - before.count)

    def quantile_ms(self, share: float) -> float | None:
        """Within its bucket as if all lay evenly; above the last bound, that bound."""
        if self.count <= 0:
            return None
        rank, below, low = share * self.count, 0.0, 0.0
        for bound, upto in sorted(self.buckets.items()):
            if upto >= rank:
                if math.isinf(bound):
                    break
                within = (rank - below) / (upto - below) if upto > below else 1.0
                return (low + (bound - low) * within) * 1e3
            below, low = upto, bound
        return low * 1e3


class _Recent:
    """A histogram's last minute."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, _Histogram]] = deque()
        self._last_ms: float | None = None

    def latency(self, now_s: float, found: _Histogram) -> Latency:
        """Enter what it is now."""
        if self._seen:
            new = found.since(self._seen[-1][1])
            if new.count < 0:  # the server has started anew
                self._seen.clear()
            elif new.count > 0:
                self._last_ms = new.sum_s / new.count * 1e3
        self._seen.append((now_s, found))
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - WINDOW_S:
            self._seen.popleft()
        lately = found.since(self._seen[0][1])
        return Latency(
            last_ms=self._last_ms,
            p50_ms=lately.quantile_ms(0.5),
            p99_ms=lately.quantile_ms(0.99),
        )


class MetricsReader:
    """Reads one server's pages, one after another: a minute's percentiles need the earlier ones."""

    def __init__(self) -> None:
        self._recent: dict[tuple[str, str], _Recent] = defaultdict(_Recent)

    def read(self, text: str, now_s: float) -> Snapshot:
        """What a page says. ServerUnavailable: no figures of a server that we know, or damaged."""
        try:
            families = list(text_string_to_metric_families(text))
        except Exception as error:  # the parser raises whatever happens to it
            raise ServerUnavailable(f"/metrics there is no Prometheus text: {error}") from error
        named = [family.name for family in families]
        names = next((each for each in ALL if any(n.startswith(each.prefix) for n in named)), None)
        if names is None:
            raise ServerUnavailable(
                "/metrics there has no figures of vLLM, SGLang, llama-server or localgen"
            )
        by_model: dict[str, _Samples] = defaultdict(_Samples)
        caches: dict[str, str] = {}
        for family in families:
            for sample in family.samples:
                if sample.name == VLLM_CACHE:
                    caches = sample.labels
                elif sample.name.startswith(names.prefix):
                    _enter(by_model, names, sample.name, sample.labels, sample.value)
        models = tuple(self._model(names, *each, now_s) for each in sorted(by_model.items()))
        if len(models) == 1:
            models = (_with_cache(models[0], caches),)
        return Snapshot(kind=names.kind, models=models)

    def _model(self, names: Names, model: str, found: _Samples, now_s: float) -> ModelSnapshot:
        tokens_per_step = found.mean(names.tokens_per_step)
        used, tokens = found.mean(names.kv_used), found.mean(names.kv_tokens)
        return ModelSnapshot(
            name=model or names.kind,
            running=_whole(found.first(names.running)),
            waiting=_whole(found.first(names.waiting)),
            kv_tokens=_whole(tokens),
            kv_used=_whole(used),
            kv_share=found.mean(names.kv_share),
            ttft=self._latency(model, names.ttft, found, now_s),
            itl=self._latency(model, names.itl, found, now_s),
            totals=_totals(names, found),
            speculation=(
                SpeculationStats(tokens_per_step=tokens_per_step) if tokens_per_step else None
            ),
        )

    def _latency(
        self, model: str, candidates: tuple[str, ...], found: _Samples, now_s: float
    ) -> Latency:
        name = next((each for each in candidates if found.buckets.get(each)), None)
        if name is None:
            return Latency()
        histogram = _Histogram(
            found.buckets[name], found.values[f"{name}_sum"], found.values[f"{name}_count"]
        )
        return self._recent[model, name].latency(now_s, histogram)


def _enter(
    by_model: dict[str, _Samples], names: Names, name: str, labels: dict[str, str], value: float
) -> None:
    if math.isnan(value) or (names.rank and labels.get(names.rank, "0") != "0"):
        return
    found = by_model[labels.get(names.model, "")]
    if name.endswith("_bucket") and "le" in labels:
        buckets, bound = found.buckets[name.removesuffix("_bucket")], float(labels["le"])
        buckets[bound] = buckets.get(bound, 0.0) + value
        return
    found.values[name] += value
    found.counts[name] += 1


def _totals(names: Names, found: _Samples) -> Totals:
    totals = {name: found.first(candidates) for name, candidates in names.totals.items()}
    busy, steps = found.first((BUSY_PER_STEP,)), totals.get("steps")
    if busy is not None and steps is not None:
        totals["step_sequences"] = busy * steps
    return Totals(**totals)


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _with_cache(model: ModelSnapshot, labels: dict[str, str]) -> ModelSnapshot:
    """With the size of vLLM's cache, which it tells in labels."""
    blocks, each = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
    if not (blocks.isdecimal() and each.isdecimal()):
        return model
    tokens = int(blocks) * int(each)
    used = None if model.kv_share is None else round(model.kv_share * tokens)
    return replace(model, kv_tokens=tokens, kv_used=used)
