"""Builds gauge samples from snapshots: rates from counters, and histories for the plots."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import TypeVar

from localgen.backends.engine_stats import KVTierStats
from localgen.backends.terminal_text import escape_name
from localgen.client.snapshot import ModelCounters, ModelSnapshot, ServerSnapshot
from localgen.tui.gauges.samples import (
    BandwidthSample,
    LatencySample,
    MemorySample,
    ServerSample,
    SpeculationSample,
    ThroughputSample,
    model_memory,
)

# averaging period of rates; shorter periods jump with each step of a slow model
RATE_WINDOW_S = 2.0
# seconds between two points of a plot
PLOT_INTERVAL_S = 0.5
MAX_PLOT_POINTS = 1800
_LONG_WINDOW_S = 20.0
_Number = TypeVar("_Number", int, float)
_COUNTER_NAMES = tuple(field.name for field in fields(ModelCounters))


class TimeSeriesBuffer:
    """The last MAX_PLOT_POINTS values of one figure, oldest first."""

    def __init__(self) -> None:
        self._values: deque[float | None] = deque(maxlen=MAX_PLOT_POINTS)

    def add(self, value: float | None) -> None:
        self._values.append(value)

    @property
    def values(self) -> tuple[float | None, ...]:
        return tuple(self._values)


class NewValuesBuffer(TimeSeriesBuffer):
    """The same for the last measured value, with a gap where none was measured since the last.

    The first one is a gap too: it may have been measured long before.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last: float | None = None
        self._has_begun = False

    def add(self, value: float | None) -> None:
        is_new = self._has_begun and value != self._last
        super().add(value if is_new else None)
        self._last, self._has_begun = value, True


class CounterRates:
    """Growth rates of a model's counters."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, ModelCounters]] = deque()

    def add(self, now_s: float, counters: ModelCounters) -> None:
        """Add a reading. A counter that decreased means a restarted engine: start over."""
        if self._points and _was_reset(counters, self._points[-1][1]):
            self._points.clear()
        self._points.append((now_s, counters))
        while len(self._points) > 2 and self._points[0][0] < now_s - _LONG_WINDOW_S:
            self._points.popleft()

    def increase(self, counter: str, period_s: float = RATE_WINDOW_S) -> tuple[float, float] | None:
        """Return (growth, seconds) of a counter over about period_s, or None if unknown."""
        if len(self._points) < 2:
            return None
        now_s, last = self._points[-1]
        before_s, before = next(
            (each for each in reversed(self._points) if each[0] <= now_s - period_s),
            self._points[0],
        )
        new, old = getattr(last, counter), getattr(before, counter)
        if new is None or old is None or now_s <= before_s:
            return None
        return new - old, now_s - before_s

    def rate(self, counter: str) -> float | None:
        """Growth per second, or None if unknown."""
        grown = self.increase(counter)
        return None if grown is None else grown[0] / grown[1]

    def rate_while_busy(self, counter: str, *, in_a_step: bool = False) -> float | None:
        """Growth per second of steps; per second, if the time of the steps is unknown.

        in_a_step: a step is being computed. If none has ended lately, it is one that takes longer
        than the averaging period, and the rate is that of the steps before it.
        """
        grown, busy = self.increase(counter), self.increase("busy_s")
        if grown is None or busy is None:
            return self.rate(counter)
        if in_a_step and not busy[0]:
            grown = self.increase(counter, _LONG_WINDOW_S) or grown
            busy = self.increase("busy_s", _LONG_WINDOW_S) or busy
        return grown[0] / busy[0] if busy[0] else 0.0

    def ratio(
        self, numerator: str, denominator: str, period_s: float = RATE_WINDOW_S
    ) -> float | None:
        """Growth of the numerator divided by that of the denominator; None if unknown."""
        parts, wholes = self.increase(numerator, period_s), self.increase(denominator, period_s)
        if parts is None or wholes is None or not wholes[0]:
            return None
        return parts[0] / wholes[0]


class SampleBuilder:
    """Builds a ServerSample from each snapshot. Keeps the history of one connection."""

    def __init__(self) -> None:
        self._counter_rates: dict[str, CounterRates] = {}
        self._last_point_s: float | None = None
        self._decode_series, self._prefill_series = TimeSeriesBuffer(), TimeSeriesBuffer()
        self._utilization_series = TimeSeriesBuffer()
        # TTFT and ITL per model: values of different models must not be mixed in one plot
        self._latency_series: dict[str, tuple[NewValuesBuffer, NewValuesBuffer]] = {}

    def add_snapshot(self, now_s: float, snapshot: ServerSnapshot) -> ServerSample:
        """Add a snapshot and return the gauges' sample. now_s: a monotonic time."""
        models = snapshot.models
        for model in models:
            self._counter_rates.setdefault(_key(model), CounterRates()).add(now_s, model.counters)
        decode, prefill = (
            self._total_rate(models, "generated_tokens"),
            self._total_rate(models, "prompt_tokens"),
        )
        busiest = max(models, key=self._activity, default=None)
        bandwidth = self._bandwidth_sample(models)
        if self._is_point_due(now_s):
            self._decode_series.add(decode)
            self._prefill_series.add(prefill)
            self._add_latency_points(models)
            self._utilization_series.add(bandwidth.utilization)
        return ServerSample(
            snapshot=snapshot,
            throughput=ThroughputSample(
                decode_per_s=decode,
                prefill_per_s=prefill,
                running=_sum_known(model.running for model in models),
                waiting=_sum_known(model.waiting for model in models),
                batch_size=self._from_rates(
                    busiest, lambda each: each.ratio("step_sequences", "steps")
                ),
                decode_series=self._decode_series.values,
                prefill_series=self._prefill_series.values,
            ),
            latency=self._latency_sample(busiest),
            bandwidth=bandwidth,
            memory=MemorySample(
                models=tuple(map(model_memory, models)),
                machine=snapshot.machine,
                server_bytes=snapshot.rss_bytes,
                kv_tiers=_total_tiers(models),
            ),
            speculation=self._speculation_sample(busiest),
        )

    def _is_point_due(self, now_s: float) -> bool:
        """True if PLOT_INTERVAL_S has passed since the last plot point."""
        if self._last_point_s is not None and now_s < self._last_point_s + PLOT_INTERVAL_S * 0.9:
            return False
        self._last_point_s = now_s
        return True

    def _add_latency_points(self, models: Iterable[ModelSnapshot]) -> None:
        before, self._latency_series = self._latency_series, {}
        for model in models:
            tracks = before.get(_key(model)) or (NewValuesBuffer(), NewValuesBuffer())
            tracks[0].add(model.ttft.last_ms)
            tracks[1].add(model.itl.last_ms)
            self._latency_series[_key(model)] = tracks

    def _latency_sample(self, model: ModelSnapshot | None) -> LatencySample:
        if model is None:
            return LatencySample()
        ttft, itl = self._latency_series.get(_key(model)) or (NewValuesBuffer(), NewValuesBuffer())
        return LatencySample(
            model=escape_name(model.name),
            ttft=model.ttft,
            itl=model.itl,
            ttft_series_ms=ttft.values,
            itl_series_ms=itl.values,
        )

    def _rates_of(self, model: ModelSnapshot) -> CounterRates:
        return self._counter_rates[_key(model)]

    def _activity(self, model: ModelSnapshot) -> tuple[float, float, float]:
        grown = self._rates_of(model).increase("generated_tokens", _LONG_WINDOW_S)
        lately = grown[0] if grown else 0.0
        return (model.running or 0, lately, model.counters.generated_tokens or 0)

    def _from_rates(
        self, model: ModelSnapshot | None, compute: Callable[[CounterRates], float | None]
    ) -> float | None:
        return None if model is None else compute(self._rates_of(model))

    def _total_rate(self, models: Iterable[ModelSnapshot], counter: str) -> float | None:
        return _sum_known(
            self._rates_of(model).rate_while_busy(counter, in_a_step=bool(model.running))
            for model in models
        )

    def _bandwidth_sample(self, models: Iterable[ModelSnapshot]) -> BandwidthSample:
        """Bandwidth of the memory with the highest utilization; models in it are added up."""
        found: dict[str, BandwidthSample] = {}
        for model in models:
            use = self._model_bandwidth(model)
            if use is None:
                continue
            before = found.get(use.medium)
            read = (use.read_bytes_per_s or 0.0) + (
                before.read_bytes_per_s or 0.0 if before else 0.0
            )
            found[use.medium] = BandwidthSample(
                utilization=read / use.limit_bytes_per_s if use.limit_bytes_per_s else None,
                read_bytes_per_s=read,
                limit_bytes_per_s=use.limit_bytes_per_s,
                medium=use.medium,
                reason=use.reason,
            )
        most = max(
            found.values(), key=lambda use: use.utilization or 0.0, default=BandwidthSample()
        )
        return BandwidthSample(
            utilization=most.utilization,
            read_bytes_per_s=most.read_bytes_per_s,
            limit_bytes_per_s=most.limit_bytes_per_s,
            medium=most.medium,
            reason=most.reason,
            utilization_series=self._utilization_series.values,
        )

    def _model_bandwidth(self, model: ModelSnapshot) -> BandwidthSample | None:
        """Memory read per second: weights once per step, KV cache once per sequence and step."""
        growth, cost = self._rates_of(model), model.read_cost
        if cost is None:
            return None
        steps, contexts = growth.rate("steps"), growth.rate("context_tokens")
        read = (steps or 0.0) * cost.weights_bytes + (contexts or 0.0) * cost.kv_token_bytes
        return BandwidthSample(
            read_bytes_per_s=None if steps is None else read,
            limit_bytes_per_s=cost.bytes_per_s,
            medium=cost.medium,
            reason=cost.how,
        )

    def _speculation_sample(self, model: ModelSnapshot | None) -> SpeculationSample:
        if model is None:
            return SpeculationSample()
        growth = self._rates_of(model)
        return SpeculationSample(
            stats=model.speculation,
            acceptance_rate=growth.ratio("accepted_tokens", "draft_tokens", _LONG_WINDOW_S),
            prefix_hit_rate=growth.ratio("prefix_hits", "prefix_queries", _LONG_WINDOW_S),
            preemptions=model.counters.preemptions,
        )


def _key(model: ModelSnapshot) -> str:
    return model.id or model.name


def _sum_known(values: Iterable[_Number | None]) -> _Number | None:
    """Sum of the known values; None if there is none."""
    known = [value for value in values if value is not None]
    return sum(known[1:], start=known[0]) if known else None


def _total_tiers(models: Iterable[ModelSnapshot]) -> tuple[KVTierStats, ...]:
    """The tiers of all models together. They share the limit of the disk."""
    totals: dict[str, KVTierStats] = {}
    for each in (tier for model in models for tier in model.kv_tiers):
        before = totals.get(each.tier)
        totals[each.tier] = each if before is None else _add_tiers(before, each)
    return tuple(totals.values())


def _add_tiers(a: KVTierStats, b: KVTierStats) -> KVTierStats:
    limits = (a.limit_bytes, b.limit_bytes)
    return replace(
        a,
        blocks=a.blocks + b.blocks,
        num_bytes=a.num_bytes + b.num_bytes,
        limit_bytes=max(limits) if a.tier == "disk" else sum(limits),
        hit_tokens_total=a.hit_tokens_total + b.hit_tokens_total,
        saved_s_total=a.saved_s_total + b.saved_s_total,
        refused_total=a.refused_total + b.refused_total,
        error=a.error or b.error,
        unsaved_tokens=a.unsaved_tokens + b.unsaved_tokens,
        unwritten_tokens_total=a.unwritten_tokens_total + b.unwritten_tokens_total,
    )


def _was_reset(new: ModelCounters, old: ModelCounters) -> bool:
    pairs = ((getattr(new, name), getattr(old, name)) for name in _COUNTER_NAMES)
    return any(a is not None and b is not None and a < b for a, b in pairs)
