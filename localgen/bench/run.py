"""Runs a benchmark: in an engine of its own, or against a server at a URL."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle

from localgen.backends.errors import InvalidRequest
from localgen.backends.model_info import LoadOptions, ModelInfo
from localgen.bench.datasets import trace_queries
from localgen.bench.goodput import MIN_REQUESTS, Goodput, Probe, find_goodput
from localgen.bench.load import (
    Load,
    LoadGenerator,
    Query,
    arrival_times,
    at_times,
    synthetic_queries,
)
from localgen.bench.load_plan import LoadPlan
from localgen.bench.load_report import LoadResult
from localgen.bench.machine_state import MachineState
from localgen.bench.measured_request import MeasuredRequest, Target
from localgen.bench.private_server import private_settings
from localgen.bench.prompts import WordPrompts
from localgen.bench.report import BenchResult
from localgen.bench.service_level import SHARE, ServiceLevel
from localgen.bench.suite import (
    SpeedTest,
    SuiteRunner,
    draft_tests,
    plain_tests,
    prefix_tests,
)
from localgen.client import Client, LocalClient

# of the time, until which the tests without a prefix cache, without drafts, and all run
_PLAIN_SHARE, _PREFIX_SHARE, _ALL = 0.55, 0.75, 0.95
Notify = Callable[[str], None]
OnLoad = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """seconds: for everything, loading included. level: what a person should get. load: instead of
    the tests of one stream."""

    seconds: float
    level: ServiceLevel
    load: LoadPlan | None = None


@dataclass(slots=True)
class Bench:
    """A server that has been warmed up. Times of time.perf_counter()."""

    client: Client
    info: ModelInfo
    target: Target
    runner: SuiteRunner
    prompts: WordPrompts
    begin_s: float
    machine: MachineState = field(default_factory=MachineState.read)


def bench_local(
    model: str | None,
    options: LoadOptions,
    plan: BenchPlan,
    notify: Notify = lambda line: None,
    on_load: OnLoad = lambda share: None,
) -> BenchResult | LoadResult:
    """Measure a model of this machine, in an engine that no other program uses.

    notify: called with what is measured now. on_load: called with the share that is loaded.
    Raises LocalgenError.
    """
    # nothing is saved for later meanwhile
    options = replace(options, kv_ram=0, kv_disk=0)
    if plan.load is not None:  # as people have it, with drafts
        with _local(model, options, notify, on_load) as (_, bench):
            return run_load(bench, plan, plan.load, notify)
    undrafted = replace(options, draft="none")
    plain = replace(undrafted, prefix_cache=False)
    with _local(model, plain, notify, on_load) as (client, bench):

        def run(options: LoadOptions, tests: list[SpeedTest], share: float) -> None:
            client.unload(bench.info.name)
            client.load(model, options, on_load)
            suite.add(bench.runner.run(tests, bench.begin_s + share * plan.seconds))

        suite = bench.runner.run(plain_tests(), bench.begin_s + _PLAIN_SHARE * plan.seconds)
        if options.prefix_cache is not False:
            run(undrafted, prefix_tests(), _PREFIX_SHARE)
        if options.draft != "none":
            run(options, draft_tests(), _ALL)
        return BenchResult(bench.info, suite, plan.level, bench.machine)


def bench_remote(
    client: Client, model: str | None, plan: BenchPlan, notify: Notify = lambda line: None
) -> BenchResult | LoadResult:
    """Measure a server of OpenAI's protocol with the same prompts. Raises LocalgenError."""
    begin_s = time.perf_counter()
    client.connect()
    info = client.load(model, LoadOptions())
    bench = _warmed_up(client, model, info, begin_s, notify)
    if plan.load is not None:
        return run_load(bench, plan, plan.load, notify)
    tests = [*plain_tests(), *prefix_tests()]
    suite = bench.runner.run(tests, begin_s + plan.seconds)
    return BenchResult(info, suite, plan.level, bench.machine, client.url)


def run_load(bench: Bench, plan: BenchPlan, load: LoadPlan, notify: Notify) -> LoadResult:
    """Put a load on the server."""
    seconds = plan.seconds - (time.perf_counter() - bench.begin_s)
    prefixes = [bench.prompts.make(load.prefix_tokens) for _ in range(load.num_prefixes)]
    queries: Iterator[Query] = cycle(load.queries)
    if not load.queries:
        queries = synthetic_queries(bench.prompts, load.input_tokens, load.output_tokens, prefixes)
    goodput: Goodput | None = None
    with closing(LoadGenerator(bench.target)) as generator:
        if load.trace:
            notify(f"the trace, for {seconds:.0f} s")
            timed = trace_queries(list(load.trace), bench.prompts, _random_seed())
            loads = [generator.open_loop("trace", timed, seconds)]
        elif load.rate is not None:
            notify(f"{load.rate:g} requests/s, for {seconds:.0f} s")
            times = arrival_times(load.rate, is_poisson=load.is_poisson)
            loads = [generator.open_loop(f"{load.rate:g}/s", at_times(queries, times), seconds)]
        elif load.concurrency:
            loads = []
            for number in load.concurrency:
                notify(f"{number} requests at once")
                share_s = seconds / len(load.concurrency)
                loads.append(generator.closed_loop(number, queries, share_s))
        else:
            loads, goodput = _search(generator, queries, plan.level, seconds, notify)
    url = bench.client.url
    return LoadResult(bench.info, tuple(loads), plan.level, bench.machine, goodput, url)


def _search(
    generator: LoadGenerator,
    queries: Iterator[Query],
    level: ServiceLevel,
    seconds: float,
    notify: Notify,
) -> tuple[list[Load], Goodput]:
    """Find the goodput; people come at random."""
    end_s = time.perf_counter() + seconds
    notify("one request")
    loads = [generator.closed_loop(1, queries, 0.0)]
    if loads[0].requests[0].error:
        return loads, Goodput(SHARE)

    def probe(rate: float, goodput: Goodput) -> Probe | None:
        left_s = end_s - time.perf_counter()
        if left_s < MIN_REQUESTS / rate:
            return None
        notify(f"{rate:.3g} requests/s")
        times = arrival_times(rate, is_poisson=True, seed=len(loads))

        def is_enough(done: Sequence[MeasuredRequest]) -> bool:
            return goodput.is_enough(sum(map(level.is_kept, done)), len(done))

        load = generator.open_loop(f"{rate:.3g}/s", at_times(queries, times), left_s, is_enough)
        loads.append(load)
        return Probe(rate, sum(map(level.is_kept, load.requests)), len(load.requests))

    # one person who asks again at once keeps the server at half of its rate, or less
    return loads, find_goodput(probe, 0.5 / loads[0].took_s, SHARE)


@contextmanager
def _local(
    model: str | None, options: LoadOptions, notify: Notify, on_load: OnLoad
) -> Iterator[tuple[LocalClient, Bench]]:
    begin_s = time.perf_counter()
    with private_settings() as settings, LocalClient(settings) as client:
        client.connect()
        info = client.load(model, options, on_load)
        if not info.generates:
            raise InvalidRequest(
                f"{info.name} makes embeddings only: there is no answer to measure"
            )
        yield client, _warmed_up(client, model, info, begin_s, notify)


def _warmed_up(
    client: Client, model: str | None, info: ModelInfo, begin_s: float, notify: Notify
) -> Bench:
    # words that no server has seen before: its prefix cache would answer for it
    prompts = WordPrompts(_random_seed())
    # a server at a URL may have chats only
    target = Target(client, model, info.ctx or None, is_chat=bool(client.url))
    runner = SuiteRunner(target, prompts, notify)
    if client.url:  # it is on another machine, as far as is known
        runner = SuiteRunner(target, prompts, notify, read_energy=dict)
    bench = Bench(client, info, target, runner, prompts, begin_s)
    bench.runner.warm_up()
    return bench


def _random_seed() -> int:
    return int.from_bytes(os.urandom(8), "big")
