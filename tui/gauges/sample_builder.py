"""Snapshots to readings: rates from counters that grow, and the last minutes of each figure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import TypeVar

from localgen.backends.terminal_text import one_line
from localgen.client.snapshot import ModelSnapshot, Snapshot, Totals
from localgen.tui.gauges.samples import (
    BandwidthUse,
    Drafts,
    Latencies,
    Memory,
    Rates,
    Reading,
    memory_of,
)

# a rate is over this: shorter and it jumps with each step of a slow model
RATE_S = 2.0
# one sample of a plot
SAMPLE_S = 0.5
SAMPLES = 240
_SLOW_S = 20.0
_Number = TypeVar("_Number", int, float)
_NAMES = tuple(field.name for field in fields(Totals))


class Track:
    """Samples of one figure, oldest first."""

    def __init__(self) -> None:
        self._values: deque[float | None] = deque(maxlen=SAMPLES)

    def add(self, value: float | None) -> None:
        self._values.append(value)

    @property
    def values(self) -> tuple[float | None, ...]:
        return tuple(self._values)


class Growth:
    """How fast the counters of a model grow."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Totals]] = deque()

    def add(self, now_s: float, totals: Totals) -> None:
        """Enter the counters. An engine that has started anew begins a new series."""
        if self._seen and _is_less(totals, self._seen[-1][1]):
            self._seen.clear()
        self._seen.append((now_s, totals))
        while len(self._seen) > 2 and self._seen[0][0] < now_s - _SLOW_S:
            self._seen.popleft()

    def since(self, name: str, period_s: float = RATE_S) -> tuple[float, float] | None:
        """How much a counter has grown lately, and in how many seconds; None: not known."""
        if len(self._seen) < 2:
            return None
        now_s, last = self._seen[-1]
        before_s, before = next(
            (each for each in reversed(self._seen) if each[0] <= now_s - period_s), self._seen[0]
        )
        new, old = getattr(last, name), getattr(before, name)
        if new is None or old is None or now_s <= before_s:
            return None
        return new - old, now_s - before_s

    def per_s(self, name: str) -> float | None:
        """Its rate."""
        grown = self.since(name)
        return None if grown is None else grown[0] / grown[1]

    def ratio(self, part: str, whole: str, period_s: float = RATE_S) -> float | None:
        """How much one has grown for each of the other; None: the other has not."""
        parts, wholes = self.since(part, period_s), self.since(whole, period_s)
        if parts is None or wholes is None or not wholes[0]:
            return None
        return parts[0] / wholes[0]


class Record:
    """Everything that was seen of a server since it was last found."""

    def __init__(self) -> None:
        self._growth: dict[str, Growth] = {}
        self._sampled_s: float | None = None
        self._decode, self._prefill = Track(), Track()
        self._share = Track()
        # TTFT and ITL of each model: those of two are no history of one
        self._latency: dict[str, tuple[Track, Track]] = {}

    def read(self, now_s: float, snapshot: Snapshot) -> Reading:
        """Enter a snapshot; what the gauges draw now. now_s: a clock that never goes back."""
        models = snapshot.models
        for model in models:
            self._growth.setdefault(_key(model), Growth()).add(now_s, model.totals)
        decode, prefill = (
            self._per_s(models, "generated_tokens"),
            self._per_s(models, "prompt_tokens"),
        )
        busiest = max(models, key=self._business, default=None)
        bandwidth = self._bandwidth(models)
        if self._is_time(now_s):
            self._decode.add(decode)
            self._prefill.add(prefill)
            self._sample_latency(models)
            self._share.add(bandwidth.share)
        return Reading(
            snapshot=snapshot,
            rates=Rates(
                decode_per_s=decode,
                prefill_per_s=prefill,
                running=_sum(model.running for model in models),
                waiting=_sum(model.waiting for model in models),
                batch=self._of(busiest, lambda each: each.ratio("step_sequences", "steps")),
                decode=self._decode.values,
                prefill=self._prefill.values,
            ),
            latencies=self._latencies(busiest),
            bandwidth=bandwidth,
            memory=Memory(
                models=tuple(map(memory_of, models)),
                machine=snapshot.machine,
                server_bytes=snapshot.rss_bytes,
            ),
            drafts=self._drafts(busiest),
        )

    def _is_time(self, now_s: float) -> bool:
        """Whether the plots get another sample."""
        if self._sampled_s is not None and now_s < self._sampled_s + SAMPLE_S * 0.9:
            return False
        self._sampled_s = now_s
        return True

    def _sample_latency(self, models: Iterable[ModelSnapshot]) -> None:
        before, self._latency = self._latency, {}
        for model in models:
            tracks = before.get(_key(model)) or (Track(), Track())
            tracks[0].add(model.ttft.last_ms)
            tracks[1].add(model.itl.last_ms)
            self._latency[_key(model)] = tracks

    def _latencies(self, model: ModelSnapshot | None) -> Latencies:
        if model is None:
            return Latencies()
        ttft, itl = self._latency.get(_key(model)) or (Track(), Track())
        return Latencies(
            model=one_line(model.name),
            ttft=model.ttft,
            itl=model.itl,
            ttft_ms=ttft.values,
            itl_ms=itl.values,
        )

    def _growth_of(self, model: ModelSnapshot) -> Growth:
        return self._growth[_key(model)]

    def _business(self, model: ModelSnapshot) -> tuple[float, float, float]:
        grown = self._growth_of(model).since("generated_tokens", _SLOW_S)
        lately = grown[0] if grown else 0.0
        return (model.running or 0, lately, model.totals.generated_tokens or 0)

    def _of(
        self, model: ModelSnapshot | None, figure: Callable[[Growth], float | None]
    ) -> float | None:
        return None if model is None else figure(self._growth_of(model))

    def _per_s(self, models: Iterable[ModelSnapshot], name: str) -> float | None:
        return _sum(self._growth_of(model).per_s(name) for model in models)

    def _bandwidth(self, models: Iterable[ModelSnapshot]) -> BandwidthUse:
        """Of the medium that is used most: models in the same memory share it."""
        found: dict[str, BandwidthUse] = {}
        for model in models:
            use = self._reads(model)
            if use is None:
                continue
            before = found.get(use.medium)
            read = (use.read_per_s or 0.0) + (before.read_per_s or 0.0 if before else 0.0)
            found[use.medium] = BandwidthUse(
                share=read / use.limit_per_s if use.limit_per_s else None,
                read_per_s=read,
                limit_per_s=use.limit_per_s,
                medium=use.medium,
                why=use.why,
            )
        most = max(found.values(), key=lambda use: use.share or 0.0, default=BandwidthUse())
        return BandwidthUse(
            share=most.share,
            read_per_s=most.read_per_s,
            limit_per_s=most.limit_per_s,
            medium=most.medium,
            why=most.why,
            shares=self._share.values,
        )

    def _reads(self, model: ModelSnapshot) -> BandwidthUse | None:
        """What a model reads a second: weights once a step, the cache for each sequence in it."""
        growth, cost = self._growth_of(model), model.read
        if cost is None:
            return None
        steps, contexts = growth.per_s("steps"), growth.per_s("context_tokens")
        read = (steps or 0.0) * cost.weights_bytes + (contexts or 0.0) * cost.kv_token_bytes
        return BandwidthUse(
            read_per_s=None if steps is None else read,
            limit_per_s=cost.bytes_per_s,
            medium=cost.medium,
            why=cost.how,
        )

    def _drafts(self, model: ModelSnapshot | None) -> Drafts:
        if model is None:
            return Drafts()
        growth = self._growth_of(model)
        return Drafts(
            stats=model.speculation,
            acceptance=growth.ratio("accepted_tokens", "draft_tokens", _SLOW_S),
            prefix_hits=growth.ratio("prefix_hits", "prefix_queries", _SLOW_S),
            preemptions=model.totals.preemptions,
        )


def _key(model: ModelSnapshot) -> str:
    return model.id or model.name


def _sum(values: Iterable[_Number | None]) -> _Number | None:
    """None where nobody tells."""
    known = [value for value in values if value is not None]
    return sum(known[1:], start=known[0]) if known else None


def _is_less(new: Totals, old: Totals) -> bool:
    pairs = ((getattr(new, name), getattr(old, name)) for name in _NAMES)
    return any(a is not None and b is not None and a < b for a, b in pairs)
