"""The result of a benchmark: llama-bench's table, the sessions, the verdict, and JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from localgen.backends.model_info import ModelInfo
from localgen.backends.units import format_duration, format_rate
from localgen.bench.estimates import deviation, percentile
from localgen.bench.machine_state import MachineState
from localgen.bench.measured_request import MeasuredRequest
from localgen.bench.service_level import People, ServiceLevel, people_served
from localgen.bench.suite import PP, TG, WARM, SpeedTest, Suite, output_rate, rows
from localgen.bench.tables import fits, markdown_table, wrapped
from localgen.bench.vllm_names import vllm_figures

# llama-bench's widths and alignments
_COLUMNS = (("model", -30), ("size", 10), ("params", 10), ("backend", -10), ("threads", 7))
_TEST_COLUMNS = (("test", 15), ("t/s", 20))
_SESSION_COLUMNS = (
    ("sessions", 8),
    ("t/s each", 9),
    ("t/s together", 12),
    ("first token p50", 15),
    ("p95", 9),
)


@dataclass(frozen=True, slots=True)
class BenchResult:
    """The tests of a model and their rounds.

    url: of the server, empty for an engine of this machine. machine: None for a server at a URL.
    options: the load options that were given.
    """

    info: ModelInfo
    suite: Suite
    level: ServiceLevel
    machine: MachineState | None
    url: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    is_interrupted: ClassVar[bool] = False  # an interrupted minute has no result
    chart: ClassVar[None] = None

    @property
    def people(self) -> People | None:
        return people_served(self.suite.by_sessions, self.level)

    def text(self, width: int | None = None) -> str:
        """Markdown tables, what was left out, the machine, and the verdict as the last line.

        width: of the terminal in columns, or None if the output has none.
        """
        head, speeds = self._head(), self._speeds()
        table = markdown_table((*_COLUMNS, *_TEST_COLUMNS), [(*head, *speed) for speed in speeds])
        if not fits(table, width):
            table = " · ".join(head) + " threads\n\n" + markdown_table(_TEST_COLUMNS, speeds)
        parts = [
            table,
            markdown_table(_SESSION_COLUMNS, self._session_rows()),
            "\n".join(self._notes()),
            self.verdict(),
        ]
        return wrapped("\n\n".join(part for part in parts if part), width)

    def verdict(self) -> str:
        """One sentence for one person and one for several."""
        one, pp, people = self.suite.find(TG), self.suite.find(PP), self.people
        sentences = []
        if one is not None:
            sentences.append(f"One person: {format_rate(statistics.fmean(one.rates))} tok/s.")
        elif pp is not None:
            sentences.append(f"Prompts: {format_rate(statistics.fmean(pp.rates))} tok/s.")
        if people is not None:
            sentences.append(_people_sentence(people, self.level))
        return " ".join(sentences)

    def _head(self) -> tuple[str, ...]:
        """The model and the processor, as in llama-bench's columns."""
        return (
            self.info.description or self.info.name,
            f"{self.info.size_bytes / 2**20:.2f} MiB" if self.info.size_bytes else "-",
            _params_text(self.info.params),
            self.info.processor.split()[-1] if self.info.processor else "-",
            str(self.info.options.threads or "-"),
        )

    def _speeds(self) -> list[tuple[str, ...]]:
        return [
            (test.name, f"{statistics.fmean(test.rates):.2f} ± {deviation(test.rates):.2f}")
            for test in rows(self.suite)
            if test.sessions == 1 and not test.repeats and "session" not in test.name
        ]

    def _session_rows(self) -> list[tuple[str, ...]]:
        return [
            (
                str(test.sessions),
                format_rate(_each(test.requests)),
                format_rate(statistics.fmean(output_rate(one) for one in test.rounds)),
                _ttft(test.requests, 0.5),
                _ttft(test.requests, 0.95),
            )
            for test in rows(self.suite)
            if "session" in test.name and any(not r.error for r in test.requests)
        ]

    def _notes(self) -> Iterator[str]:
        cold, warm = self.suite.find(PP), self.suite.find(WARM)
        if cold is not None and warm is not None:
            shares = [r.cached_tokens / r.prompt_tokens for r in warm.requests if r.prompt_tokens]
            hit = f", {statistics.fmean(shares):.0%} of it cached" if shares else ""
            yield (
                f"first token of a prompt of {_tokens(cold)} tokens: {_ttft(cold.requests, 0.5)}; "
                f"of the same one again: {_ttft(warm.requests, 0.5)}{hit}"
            )
        energy = [
            f"{test.name} {used:.3g}"
            for test in rows(self.suite)
            if (used := test.joules_per_token) is not None
        ]
        if energy:
            yield f"joules per token: {', '.join(energy)}"
        for test in rows(self.suite):
            failed = [r.error for r in test.requests if r.error]
            if failed:
                yield f"{test.name}: {len(failed)} requests failed: {failed[0]}"
        yield from (f"not measured: {line}" for line in self.suite.left_out)
        if self.machine is not None:
            yield from self.machine.lines()

    def record(self) -> dict[str, Any]:
        """As JSON: llama-bench's field names for its tests, vLLM's for the sessions."""
        people = self.people
        return {
            "model": self.info.name,
            "url": self.url,
            "options": self.options,
            "machine": self.machine.record() if self.machine is not None else {},
            "tests": [
                self._test_record(test) for test in rows(self.suite) if "session" not in test.name
            ],
            "sessions": [
                _session_record(test) for test in rows(self.suite) if "session" in test.name
            ],
            "left_out": self.suite.left_out,
            "slo": {"ttft_ms": self.level.ttft_s * 1e3, "tpot_ms": self.level.tpot_s * 1e3},
            "people": None
            if people is None
            else {"count": people.count, "low": people.low, "high": people.high},
            "verdict": self.verdict(),
        }

    def _test_record(self, test: SpeedTest) -> dict[str, Any]:
        return {
            "test": test.name,
            "model_type": self.info.description,
            "model_size": self.info.size_bytes,
            "model_n_params": self.info.params,
            "backends": self.info.processor,
            "n_threads": self.info.options.threads,
            "n_prompt": _tokens(test) if test.is_prefill or test.repeats else 0,
            "n_gen": 0 if test.is_prefill or test.repeats else _answer_tokens(test),
            "n_depth": test.depth,
            "avg_ts": 0.0 if test.repeats else statistics.fmean(test.rates),
            "stddev_ts": 0.0 if test.repeats else deviation(test.rates),
            "samples_ts": [] if test.repeats else test.rates,
            "ttft_ms": [r.ttft_s * 1e3 for r in test.requests],
            "joules_per_token": test.joules_per_token,
        }


def _people_sentence(people: People, level: ServiceLevel) -> str:
    interval = "" if people.low == people.high else f" (95 %: {people.low}–{people.high})"
    if not people.count:
        return f"Not even one person gets {level.text()}{interval}."
    who = "1 person gets" if people.count == 1 else f"{people.count} people who ask at once get"
    begin = "At least " if people.is_minimum else "Up to " if people.count > 1 else "Only "
    return f"{begin}{who} {level.text()}{interval}."


def _session_record(test: SpeedTest) -> dict[str, Any]:
    took_s = sum(max(r.ended_s for r in one) - min(r.sent_s for r in one) for one in test.rounds)
    return {
        "test": test.name,
        "max_concurrency": test.sessions,
        "samples_ts": test.rates,
        "joules_per_token": test.joules_per_token,
    } | vllm_figures(test.requests, took_s)


def _params_text(params: int) -> str:
    if not params:
        return "-"
    return f"{params / 1e9:.2f} B" if params >= 1e9 else f"{params / 1e6:.2f} M"


def _tokens(test: SpeedTest) -> int:
    return round(statistics.fmean(r.prompt_tokens for r in test.requests))


def _answer_tokens(test: SpeedTest) -> int:
    """Fewer than were asked for, where a server ends its answers earlier."""
    return round(statistics.fmean(r.completion_tokens for r in test.requests))


def _each(requests: Sequence[MeasuredRequest]) -> float:
    """Tokens/s of one session after its first token, the median."""
    times = [r.tpot_s for r in requests if not r.error and r.tpot_s]
    return 1 / statistics.median(times) if times else 0.0


def _ttft(requests: Sequence[MeasuredRequest], share: float) -> str:
    return format_duration(percentile([r.ttft_s for r in requests if not r.error], share) * 1e3)
