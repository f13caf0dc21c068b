"""The result of a load: latencies over the load, drawn, and the goodput."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from localgen.backends.model_info import ModelInfo
from localgen.backends.units import format_duration, format_rate
from localgen.bench.estimates import percentile, wilson_interval
from localgen.bench.goodput import Goodput
from localgen.bench.load import Load
from localgen.bench.machine_state import MachineState
from localgen.bench.service_level import SHARE, ServiceLevel
from localgen.bench.tables import markdown_table
from localgen.bench.vllm_names import vllm_figures

_COLUMNS = (
    ("load", -10),
    ("requests", 8),
    ("failed", 6),
    ("req/s", 6),
    ("t/s", 6),
    ("TTFT p50", 8),
    ("p95", 8),
    ("TPOT p50", 8),
    ("p95", 8),
    ("kept", 5),
)
_BAR_COLUMNS = 40
_EIGHTHS = " ▏▎▍▌▋▊▉"


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What was measured under load. goodput: if it was searched for."""

    info: ModelInfo
    loads: tuple[Load, ...]
    level: ServiceLevel
    machine: MachineState
    goodput: Goodput | None = None
    url: str = ""

    def text(self) -> str:
        """The loads in a table, their latencies as bars, the machine, and the goodput."""
        parts = [
            markdown_table(_COLUMNS, [self._row(load) for load in self._ordered()]),
            "\n".join(self.drawing()),
            "\n".join(self._notes()),
            self.verdict(),
        ]
        return "\n\n".join(part for part in parts if part)

    def drawing(self) -> Iterator[str]:
        """Latencies over the load: the time to the first token of 95 %, against the longest."""
        times = {
            load.name: percentile([r.ttft_s for r in load.answered], SHARE)
            for load in self._ordered()
            if load.answered
        }
        if len(times) < 2:
            return
        longest, width = max(times.values()), max(map(len, times))
        yield f"first token of 95 %, and the share that keeps {self.level.text()}"
        for load in self._ordered():
            if load.name in times:
                at = times[load.name]
                bar = _bar(at / longest)
                yield (
                    f"{load.name:<{width}} {bar} {format_duration(at * 1e3):>8} "
                    f"{self._share(load):>4.0%}"
                )

    def verdict(self) -> str:
        """One sentence."""
        if self.goodput is not None:
            return self._goodput_sentence(self.goodput)
        if not self.loads:
            return ""
        last = self._ordered()[-1]
        return f"{last.name}: {self._share(last):.0%} of the requests keep {self.level.text()}."

    def record(self) -> dict[str, Any]:
        """As JSON, with vLLM's field names."""
        return {
            "model": self.info.name,
            "url": self.url,
            "machine": self.machine.record(),
            "tests": [],
            "sessions": [self._record(load) for load in self._ordered() if load.requests],
            "slo": {"ttft_ms": self.level.ttft_s * 1e3, "tpot_ms": self.level.tpot_s * 1e3},
            "goodput": self._goodput_record(),
            "verdict": self.verdict(),
        }

    def _ordered(self) -> list[Load]:
        """The loads by their number: rates as they rise."""
        return sorted(self.loads, key=lambda load: _number(load.name))

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
        prompt = sum(r.prompt_tokens for load in self.loads for r in load.answered)
        cached = sum(r.cached_tokens for load in self.loads for r in load.answered)
        if prompt:
            yield f"{cached / prompt:.0%} of the prompt tokens were cached"
        for load in self.loads:
            errors = [r.error for r in load.requests if r.error]
            if errors:
                yield f"{load.name}: {len(errors)} failed, the first: {errors[0]}"
        yield from self.machine.lines()

    def _record(self, load: Load) -> dict[str, Any]:
        kept = sum(map(self.level.is_kept, load.requests))
        low, high = wilson_interval(kept, len(load.requests))
        record = vllm_figures(load.requests, load.took_s) | {
            "test": load.name,
            "request_goodput": kept / load.took_s,
            "share_kept": kept / len(load.requests),
            "share_kept_low": low,
            "share_kept_high": high,
        }
        rates = [1 / r.tpot_s for r in load.answered if r.tpot_s]
        return record | {"samples_ts": rates, "mean_ts": statistics.fmean(rates) if rates else 0.0}

    def _goodput_record(self) -> dict[str, Any] | None:
        found = self.goodput
        if found is None:
            return None
        high = None if math.isinf(found.high) else found.high
        return {"rate": found.rate, "low": found.low, "high": high}

    def _goodput_sentence(self, found: Goodput) -> str:
        high = "?" if math.isinf(found.high) else f"{found.high:.3g}"
        interval = f"(95 %: {found.low:.3g} to {high})"
        if not found.rate:
            return f"No rate that was tried gives 95 % of people {self.level.text()} {interval}."
        return (
            f"Goodput: {found.rate:.3g} requests/s {interval}: so many people per second get "
            f"{self.level.text()}, 95 % of them."
        )


def _number(name: str) -> float:
    try:
        return float(name.split("/")[0].split()[0])
    except ValueError:
        return 0.0


def _bar(share: float) -> str:
    eighths = round(share * _BAR_COLUMNS * 8)
    bar = "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
    return bar.ljust(_BAR_COLUMNS)
