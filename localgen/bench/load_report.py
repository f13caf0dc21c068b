"""The result of a load: a table, latencies over the load drawn, and the goodput."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from localgen.backends.model_info import ModelInfo
from localgen.backends.units import format_count, format_duration, format_rate
from localgen.bench.estimates import percentile, wilson_interval
from localgen.bench.goodput import Goodput
from localgen.bench.load import Load
from localgen.bench.load_chart import latency_chart
from localgen.bench.machine_state import MachineState
from localgen.bench.service_level import ServiceLevel
from localgen.bench.tables import fits, markdown_table, wrapped
from localgen.bench.vllm_names import vllm_figures
from localgen.charts import Chart, chart_text

# of the chart
_ROWS, _MAX_WIDTH = 12, 100
_COLUMNS = (
    ("load", -10),
    ("requests", 8),
    ("failed", 6),
    ("req/s", 6),
    ("t/s", 6),
    ("TTFT p50", 8),
    ("TTFT p95", 8),
    ("TPOT p50", 8),
    ("TPOT p95", 8),
    ("kept", 5),
)
# those that a narrow terminal shows
_FEW = (0, 1, 2, 3, 6, 8, 9)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The loads of a server and their requests.

    goodput: None if it was not searched for. machine: None for a server at a URL. options: those of
    the load, and the given load options of the engine. num_left_out: requests of a trace that
    came too late. is_interrupted: the user ended it early.
    """

    info: ModelInfo
    loads: tuple[Load, ...]
    level: ServiceLevel
    machine: MachineState | None
    goodput: Goodput | None = None
    url: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    num_left_out: int = 0
    is_interrupted: bool = False

    def text(self, width: int | None = None) -> str:
        """The loads in a table, their latencies drawn, the machine, and the goodput.

        width: of the terminal in columns, or None if the output has none.
        """
        lines = [self._row(load) for load in self._ordered()]
        table = markdown_table(_COLUMNS, lines)
        if not fits(table, width):
            few = [[line[at] for at in _FEW] for line in lines]
            table = markdown_table([_COLUMNS[at] for at in _FEW], few)
        chart = self.chart
        drawn = chart_text(chart, min(width or _MAX_WIDTH, _MAX_WIDTH), _ROWS) if chart else []
        notes = (wrapped(text, width) for text in ("\n".join(self._notes()), self.verdict()))
        return "\n\n".join(part for part in (table, "\n".join(drawn), *notes) if part)

    @property
    def chart(self) -> Chart | None:
        """Latencies over the load, or None for a single load."""
        goodput = self.goodput.rate if self.goodput is not None else None
        return latency_chart(self._ordered(), self.level, goodput)

    def verdict(self) -> str:
        """One sentence."""
        if self.goodput is not None:
            return self._goodput_sentence(self.goodput)
        if not self.loads:
            return ""
        last = self._ordered()[-1]
        return f"{last.name}: {self._share(last):.0%} of the people get {self.level.text()}."

    def record(self) -> dict[str, Any]:
        """As JSON, with vLLM's field names."""
        return {
            "model": self.info.name,
            "url": self.url,
            "options": self.options,
            "machine": self.machine.record() if self.machine is not None else {},
            "tests": [],
            "sessions": [],
            "loads": [self._record(load) for load in self._ordered() if load.requests],
            "slo": {"ttft_ms": self.level.ttft_s * 1e3, "tpot_ms": self.level.tpot_s * 1e3},
            "goodput": self._goodput_record(),
            "num_left_out": self.num_left_out,
            "verdict": self.verdict(),
        }

    def _ordered(self) -> list[Load]:
        """The loads by their number: first those of requests at once, then rates as they rise."""
        return sorted(
            self.loads, key=lambda load: (load.rate > 0, load.rate or load.concurrency or 0)
        )

    def _row(self, load: Load) -> tuple[str, ...]:
        answered = load.answered
        took_s = load.took_s or math.inf
        tokens = sum(request.completion_tokens for request in answered)
        latencies = [
            format_duration(percentile(times, share) * 1e3) if times else "-"
            for times in (
                [r.ttft_s for r in answered],
                [r.tpot_s for r in answered if r.completion_tokens > 1],
            )
            for share in (0.5, 0.95)
        ]
        return (
            load.name,
            str(len(load.requests)),
            str(len(load.requests) - len(answered)),
            f"{len(answered) / took_s:.2f}",
            format_rate(tokens / took_s),
            *latencies,
            f"{self._share(load):.0%}",
        )

    def _share(self, load: Load) -> float:
        kept = sum(map(self.level.is_kept, load.requests))
        return kept / len(load.requests) if load.requests else 0.0

    def _notes(self) -> Iterator[str]:
        if self.num_left_out:
            number = format_count(self.num_left_out, "request")
            yield f"left out, as it comes after the time (--time): {number} of the trace"
        if self.is_interrupted:
            yield "interrupted: the last load, and what would have followed, is left out"
        prompt = sum(r.prompt_tokens for load in self.loads for r in load.answered)
        cached = sum(r.cached_tokens for load in self.loads for r in load.answered)
        if prompt:
            yield f"{cached / prompt:.0%} of the prompt tokens were cached"
        for load in self.loads:
            errors = [r.error for r in load.requests if r.error]
            if errors:
                yield f"{load.name}: {len(errors)} failed, the first: {errors[0]}"
        if self.machine is not None:
            yield from self.machine.lines()

    def _record(self, load: Load) -> dict[str, Any]:
        kept = sum(map(self.level.is_kept, load.requests))
        low, high = wilson_interval(kept, len(load.requests))
        return vllm_figures(load.requests, load.took_s) | {
            "test": load.name,
            "max_concurrency": load.concurrency,
            "request_goodput": kept / load.took_s,
            "share_kept": kept / len(load.requests),
            "share_kept_low": low,
            "share_kept_high": high,
        }

    def _goodput_record(self) -> dict[str, Any] | None:
        found = self.goodput
        if found is None:
            return None
        high = None if math.isinf(found.high) else found.high
        return {"rate": found.rate, "low": found.low, "high": high}

    def _goodput_sentence(self, found: Goodput) -> str:
        if not found.probes:
            return "There was no time to try a rate: give it more --time."
        if not found.rate:
            return f"No rate that was tried gives 95 % of the people {self.level.text()}."
        interval = f"95 %: {found.low:.3g} to {found.high:.3g}"
        if math.isinf(found.high):
            interval = "too few requests for an interval: give it more --time"
        elif not found.low:
            interval = f"95 %: below {found.high:.3g}; a lower bound takes more --time"
        return (
            f"Goodput: {found.rate:.3g} requests/s ({interval}): of the people who ask at that "
            f"rate, 95 % get {self.level.text()}."
        )
