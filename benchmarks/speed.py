"""Tokens/s and time to first token, compared with llama.cpp's own tools."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.llamacpp_tools import Tools
from benchmarks.measure import RATE, Report, Series
from benchmarks.random_vocabulary import random_words
from benchmarks.servers import Localgen, llama_server
from benchmarks.streams import (
    BenchClient,
    HttpBenchClient,
    LocalgenBenchClient,
    decode_rate,
    last_first_token_ms,
    longest_gap_ms,
    submit_concurrently,
)
from localgen.backends.llamacpp.slots import BLOCK_ROWS
from localgen.backends.model_info import LoadOptions
from localgen.backends.types import Message
from localgen.bench.measured_request import Prompt
from localgen.bench.private_server import private_settings
from localgen.bench.suite import output_rate

NEAR = 0.97  # target: share of the speed of llama.cpp's own loop
SHARED_PREFIX = 0.35
LOCALGEN, SPLIT = "localgen", "localgen -np N -c C"
BARE, BENCH = "bare loop", "llama-bench"
BATCHED, UNIFIED, SERVER = "llama-batched-bench", "llama-batched-bench -kvu", "llama-server"
# tokens that a chat turn may add to its words: those of the template, and the last token of the
# previous answer, whose KV was never computed
TURN_TOKENS = 32

# figures of one engine ("side") in one round, by name
Figures = dict[str, float]
Side = Callable[[int], Figures]


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """Sizes of the tests, in tokens except rounds and streams."""

    rounds: int
    alone: int
    prompt: int
    answer: int
    streams: tuple[int, ...]
    system: int
    history: int
    question: int

    @property
    def slot_ctx(self) -> int:
        """Context length that fits every request of the plan, rounded up to 256 as in llama.cpp."""
        longest = max(self.prompt + self.answer, self.system + 64, self.history + 2 * self.answer)
        return -(-(longest + self.question + 2 * TURN_TOKENS) // 256) * 256


FULL = CpuPlan(5, 128, 128, 128, (4, 16), 400, 1500, 32)
QUICK = CpuPlan(1, 64, 32, 256, (4,), 400, 300, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuBench:
    """State shared by the tests. tools: None: only localgen is measured."""

    plan: CpuPlan
    rounds_wanted: int
    report: Report
    model: Path
    threads: int
    localgen: Localgen
    tools: Tools | None

    @contextlib.contextmanager
    def split_cache_server(self, slots: int) -> Iterator[Localgen]:
        """Run a second localgen in the block, with a split KV cache as llama-server has."""
        options = LoadOptions(
            ctx=self.plan.slot_ctx, parallel=slots, threads=self.threads, draft="none"
        )
        with private_settings() as settings:
            server = Localgen(settings, self.model, options)
            yield server
            server.close()

    @contextlib.contextmanager
    def llama_server(self, slots: int) -> Iterator[httpx.Client | None]:
        """Run llama-server in the block; yields its HTTP client, or None without tools."""
        if self.tools is None:
            yield None
            return
        with llama_server(
            self.tools,
            self.model,
            slots=slots,
            slot_ctx=self.plan.slot_ctx,
            threads=self.threads,
        ) as http:
            yield http

    def rounds(self, sides: Mapping[str, Side]) -> dict[str, list[Figures]]:
        """Run every side once per round, in alternating order; return the figures by side."""
        found: dict[str, list[Figures]] = {name: [] for name in sides}
        for number in range(self.rounds_wanted):
            for name in list(sides) if number % 2 == 0 else reversed(list(sides)):
                found[name].append(sides[name](number))
                print(f"  round {number + 1} {name}: {_shown(found[name][-1])}", file=sys.stderr)
        return found

    def enter(
        self, test: str, unit: str, found: Mapping[str, list[Figures]], figure: str
    ) -> dict[str, Series]:
        """Add a figure to the report, for every side that has it."""
        return {
            side: self.report.add(test, side, unit, [figures[figure] for figures in rounds])
            for side, rounds in found.items()
            if figure in rounds[0]
        }

    def ratios(
        self, entered: Mapping[str, Series], other: str, target: float, *, at_least: bool
    ) -> None:
        """Compare both cache layouts of localgen with another side, if it was measured."""
        for side in (LOCALGEN, SPLIT):
            if other in entered:
                self.report.ratio(entered[side], entered[other], target, at_least=at_least)


def _clients(server: Localgen, count: int) -> list[BenchClient]:
    return [LocalgenBenchClient(server.client(), server.model) for _ in range(count)]


def _shown(figures: Figures) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in figures.items())


def alone(bench: CpuBench, *, when: str, fresh: bool) -> None:
    """Measure the decode speed of one stream. when: name of the state of localgen's KV cache.

    fresh: every side reloads the model and is alone in memory. Memory placement can change the
    speed by a tenth: all sides ran faster while another process held the model.
    """
    tokens, (client,) = bench.plan.alone, _clients(bench.localgen, 1)

    def localgen(number: int) -> Figures:
        bench.localgen.load()
        client.ask("ab", 8)  # warm-up; the tools do their own
        # tokens + 1, because the first token is sampled by the prefill step
        return {"rate": decode_rate([client.ask("ab", tokens + 1)])}

    def peer(measure: Callable[[], Figures]) -> Side:
        def run(number: int) -> Figures:
            if fresh:
                bench.localgen.unload()
            return measure()

        return run

    sides: dict[str, Side] = {LOCALGEN: localgen, BARE: peer(lambda: _bare(bench, tokens))}
    tools = bench.tools
    if tools:
        sides[BENCH] = peer(lambda: {"rate": tools.generation(bench.model, tokens, bench.threads)})
    entered = bench.enter(f"tg{tokens}, {when}", RATE, bench.rounds(sides), "rate")
    for other in (BENCH, BARE):
        if other in entered:
            bench.report.ratio(entered[LOCALGEN], entered[other], NEAR, at_least=True)


def _bare(bench: CpuBench, tokens: int) -> Figures:
    # in a separate process, because its threads must not outlive the measurement
    command = ["benchmarks.bare_loop", str(bench.model), str(tokens), str(bench.threads)]
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, check=True
    )
    return {"rate": float(done.stdout)}


def several(bench: CpuBench, count: int) -> None:
    """Measure several concurrent streams with different prompts, submitted at the same time.

    Every side reloads the model in each round and is alone in memory, as in `alone`.
    """

    def localgen(number: int) -> Figures:
        bench.localgen.load()
        figures = _streams(bench, _clients(bench.localgen, count), number)
        bench.localgen.unload()
        return figures

    def split(number: int) -> Figures:
        with bench.split_cache_server(count) as server:
            return _streams(bench, _clients(server, count), number)

    def server(number: int) -> Figures:
        with bench.llama_server(count) as http:
            assert http
            return _streams(bench, [HttpBenchClient(http)] * count, number)

    bench.localgen.unload()
    sides: dict[str, Side] = {LOCALGEN: localgen, SPLIT: split}
    tools = bench.tools
    if tools:
        sides[BATCHED] = lambda number: _batched(bench, tools, count, unified=False)
        sides[UNIFIED] = lambda number: _batched(bench, tools, count, unified=True)
        sides[SERVER] = server
    found = bench.rounds(sides)
    bench.localgen.load()
    decode = bench.enter(f"tg{bench.plan.answer} × {count}", RATE, found, "decode")
    whole = f"{bench.plan.prompt} in/{bench.plan.answer} out × {count}"
    output = bench.enter(whole, RATE, found, "output")
    bench.enter(f"{whole}, last first token", "ms", found, "first")
    bench.enter(f"{whole}, longest gap between tokens", "ms", found, "gap")
    bench.ratios(decode, BATCHED, NEAR, at_least=True)
    if UNIFIED in decode:
        bench.report.ratio(decode[LOCALGEN], decode[UNIFIED], NEAR, at_least=True)
    bench.ratios(decode, SERVER, 1.0, at_least=True)
    bench.ratios(output, SERVER, 1.0, at_least=True)


def _streams(bench: CpuBench, clients: list[BenchClient], number: int) -> Figures:
    plan = bench.plan
    prompts: list[Prompt] = [
        random_words(plan.prompt, f"{len(clients)} streams, round {number}, stream {i}")
        for i in range(len(clients))
    ]
    # warm-up; llama-batched-bench does its own
    submit_concurrently(clients, ["ab"] * len(clients), 8)
    streams = submit_concurrently(clients, prompts, plan.answer)
    return {
        "decode": decode_rate(streams),
        "output": output_rate(streams),
        "first": last_first_token_ms(streams),
        "gap": longest_gap_ms(streams),
    }


def _batched(bench: CpuBench, tools: Tools, count: int, *, unified: bool) -> Figures:
    plan = bench.plan
    line = tools.batched(
        bench.model, plan.prompt, plan.answer, count, bench.threads, unified=unified
    )
    return {"decode": line["speed_tg"], "output": count * plan.answer / line["t"]}


def shared_prefix(bench: CpuBench, count: int = 4) -> None:
    """Measure the last TTFT of concurrent requests with the same new system prompt."""
    with bench.split_cache_server(count) as split_server, bench.llama_server(count) as http:
        shared, split = _clients(bench.localgen, count), _clients(split_server, count)
        sides: dict[str, Side] = {
            LOCALGEN: lambda number: _cold(bench, shared, number),
            SPLIT: lambda number: _cold(bench, split, number),
        }
        if http:
            theirs: list[BenchClient] = [HttpBenchClient(http)] * count
            sides[SERVER] = lambda number: _cold(bench, theirs, number)
        found = bench.rounds(sides)
    test = f"last first token, {count} cold over {bench.plan.system}"
    entered = bench.enter(test, "ms", found, "ms")
    bench.ratios(entered, SERVER, SHARED_PREFIX, at_least=False)


def _cold(bench: CpuBench, clients: list[BenchClient], number: int) -> Figures:
    plan = bench.plan
    system = Message("system", random_words(plan.system, f"system prompt {number}"))
    prompts: list[Prompt] = [
        (system, Message("user", random_words(plan.question, f"question {number}, {i}")))
        for i in range(len(clients))
    ]
    return {"ms": last_first_token_ms(submit_concurrently(clients, prompts, 8))}


def second_turn(bench: CpuBench) -> None:
    """Measure the second turn of a long chat: time to first token, prompt tokens computed."""
    with bench.split_cache_server(4) as split_server, bench.llama_server(4) as http:
        (shared,), (split,) = _clients(bench.localgen, 1), _clients(split_server, 1)
        sides: dict[str, Side] = {
            LOCALGEN: lambda number: _next_turn(bench, shared, number),
            SPLIT: lambda number: _next_turn(bench, split, number),
        }
        if http:
            theirs = HttpBenchClient(http)
            sides[SERVER] = lambda number: _next_turn(bench, theirs, number)
        found = bench.rounds(sides)
    test = f"second turn after {bench.plan.history + bench.plan.answer}"
    ttft = bench.enter(f"{test}, TTFT", "ms", found, "ms")
    computed = bench.enter(f"{test}, prompt computed", "tokens", found, "computed")
    most = max(bench.plan.question + TURN_TOKENS, BLOCK_ROWS)
    for side in (LOCALGEN, SPLIT):
        bench.report.most(computed[side], most)
    bench.ratios(ttft, SERVER, 1.0, at_least=False)


def _next_turn(bench: CpuBench, client: BenchClient, number: int) -> Figures:
    plan = bench.plan
    first = (Message("user", random_words(plan.history, f"history {number}")),)
    answer = client.ask(first, plan.answer)
    question = Message("user", random_words(plan.question, f"second turn {number}"))
    second = client.ask((*first, Message("assistant", answer.text), question), 8)
    return {"ms": second.ttft_s * 1e3, "computed": second.prompt_tokens - second.cached_tokens}
