"""Runs a benchmark: in an engine of its own, or against a server at a URL."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from types import MappingProxyType
from typing import Any

from localgen.backends.errors import InvalidRequest, ServerUnavailable
from localgen.backends.model_info import LoadOptions, ModelInfo
from localgen.backends.units import format_count
from localgen.bench.datasets import trace_queries
from localgen.bench.goodput import MIN_REQUESTS, Goodput, Probe, find_goodput
from localgen.bench.load import (
    Load,
    LoadGenerator,
    Query,
    arrival_times,
    at_times,
    rate_name,
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
    Suite,
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
    machine: MachineState | None


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
    given = {name: value for name, value in asdict(options).items() if value is not None}
    # nothing is saved for later meanwhile, unless that is asked for
    options = replace(options, kv_ram=options.kv_ram or 0, kv_disk=options.kv_disk or 0)
    if plan.load is not None:  # as people have it, with drafts
        with _local(model, options, notify, on_load) as (_, bench):
            return run_load(bench, plan, plan.load, notify, given)
    undrafted = replace(options, draft="none")
    plain = replace(undrafted, prefix_cache=False)
    with _local(model, plain, notify, on_load) as (client, bench):

        def run(options: LoadOptions, tests: list[SpeedTest], share: float) -> None:
            deadline_s = bench.begin_s + share * plan.seconds
            if time.perf_counter() < deadline_s:
                client.unload(bench.info.name)
                client.load(model, options, on_load)
            suite.add(bench.runner.run(tests, deadline_s))

        suite = bench.runner.run(plain_tests(), bench.begin_s + _PLAIN_SHARE * plan.seconds)
        if options.prefix_cache is not False:
            run(undrafted, prefix_tests(), _PREFIX_SHARE)
        else:
            suite.left_out += [f"{test.name}: without a prefix cache" for test in prefix_tests()]
        if options.draft != "none":
            run(options, draft_tests(), _ALL)
        _require_some(suite)
        return BenchResult(bench.info, suite, plan.level, bench.machine, options=given)


def bench_remote(
    client: Client, model: str | None, plan: BenchPlan, notify: Notify = lambda line: None
) -> BenchResult | LoadResult:
    """Measure a server of OpenAI's protocol with the same prompts. Raises LocalgenError."""
    begin_s = time.perf_counter()
    client.connect()
    info = client.load(model, LoadOptions())
    bench = _warmed_up(client, model, info, begin_s, notify, None)
    if plan.load is not None:
        return run_load(bench, plan, plan.load, notify)
    tests = [*plain_tests(), *prefix_tests()]
    suite = bench.runner.run(tests, begin_s + plan.seconds)
    _require_some(suite)
    return BenchResult(info, suite, plan.level, None, client.url)


def run_load(
    bench: Bench,
    plan: BenchPlan,
    load: LoadPlan,
    notify: Notify,
    given: Mapping[str, Any] = MappingProxyType({}),
) -> LoadResult:
    """Put a load on the server. given: load options of the engine, for the report."""
    seconds = plan.seconds - (time.perf_counter() - bench.begin_s)
    if seconds <= 0:
        raise InvalidRequest(
            "loading and warming up took all of the time: give it more --time", param="time"
        )
    prefixes = [bench.prompts.make(load.prefix_tokens) for _ in range(load.num_prefixes)]
    queries: Iterator[Query] = cycle(load.queries)
    if not load.queries:
        queries = synthetic_queries(bench.prompts, load.input_tokens, load.output_tokens, prefixes)
    goodput, num_left_out = None, 0
    with closing(LoadGenerator(bench.target)) as generator:
        if load.trace:
            notify(f"the trace, for {seconds:.0f} s")
            timed = trace_queries(list(load.trace), bench.prompts, _random_seed())
            loads = [generator.open_loop("trace", timed, seconds)]
            num_left_out = len(load.trace) - len(loads[0].requests)
        elif load.rate is not None:
            notify(f"{load.rate:g} requests/s, for {seconds:.0f} s")
            times = arrival_times(load.rate, is_poisson=load.is_poisson)
            opened = generator.open_loop(f"{load.rate:g}/s", at_times(queries, times), seconds)
            loads = [replace(opened, rate=load.rate)]
        elif load.concurrency:
            loads = list(_at_once(generator, load.concurrency, queries, seconds, notify))
        else:
            loads, goodput = _search(generator, queries, plan.level, seconds, notify)
    url, requests = bench.client.url, [request for one in loads for request in one.requests]
    if all(request.error for request in requests):
        reason = requests[0].error if requests else "none was due within the time"
        raise ServerUnavailable(f"no request was answered: {reason}")
    plain = replace(load, queries=(), trace=())
    options = dict(given) | asdict(plain)
    return LoadResult(
        bench.info,
        tuple(loads),
        plan.level,
        bench.machine,
        goodput,
        url,
        options,
        num_left_out=num_left_out,
        is_interrupted=generator.is_interrupted,
    )


def _at_once(
    generator: LoadGenerator,
    numbers: Sequence[int],
    queries: Iterator[Query],
    seconds: float,
    notify: Notify,
) -> Iterator[Load]:
    """A load of each number; Ctrl+C ends them after the first."""
    for number in numbers:
        notify(f"{format_count(number, 'request')} at once")
        try:
            yield generator.closed_loop(number, queries, seconds / len(numbers))
        except KeyboardInterrupt:
            if number == numbers[0]:
                raise
            generator.is_interrupted = True
            return
        if generator.is_stopped:
            return


def _search(
    generator: LoadGenerator,
    queries: Iterator[Query],
    level: ServiceLevel,
    seconds: float,
    notify: Notify,
) -> tuple[list[Load], Goodput]:
    """Find the goodput; people come at random. Ctrl+C ends the search after the first rate."""
    end_s = time.perf_counter() + seconds
    notify("one request")
    loads = [generator.closed_loop(1, queries, 0.0)]
    if loads[0].requests[0].error:
        return loads, Goodput(SHARE)

    def probe(rate: float, goodput: Goodput) -> Probe | None:
        left_s = end_s - time.perf_counter()
        if left_s < MIN_REQUESTS / rate or generator.is_stopped:
            return None
        notify(f"requests at {rate_name(rate)}")
        times = arrival_times(rate, is_poisson=True, seed=len(loads))

        def is_enough(done: Sequence[MeasuredRequest]) -> bool:
            return goodput.is_enough(sum(map(level.is_kept, done)), len(done))

        name = rate_name(rate) + " again" * any(p.rate == rate for p in goodput.probes)
        try:
            load = generator.open_loop(name, at_times(queries, times), left_s, is_enough)
        except KeyboardInterrupt:
            if not goodput.probes:
                raise
            generator.is_interrupted = True
            return None
        loads.append(replace(load, rate=rate))
        return Probe(rate, sum(map(level.is_kept, load.requests)), len(load.requests))

    # one person who asks again at once keeps the server at half of its rate, or less
    return loads, find_goodput(probe, 0.5 / loads[0].took_s, SHARE)


@contextmanager
def _local(
    model: str | None, options: LoadOptions, notify: Notify, on_load: OnLoad
) -> Iterator[tuple[LocalClient, Bench]]:
    begin_s, machine = time.perf_counter(), MachineState.read()
    with private_settings() as settings, LocalClient(settings) as client:
        client.connect()
        info = client.load(model, options, on_load)
        if not info.generates:
            raise InvalidRequest(
                f"{info.name} makes embeddings only: there is no answer to measure"
            )
        yield client, _warmed_up(client, model, info, begin_s, notify, machine)


def _warmed_up(
    client: Client,
    model: str | None,
    info: ModelInfo,
    begin_s: float,
    notify: Notify,
    machine: MachineState | None,
) -> Bench:
    # words that no server has seen before: its prefix cache would answer for it
    prompts = WordPrompts(_random_seed())
    # a server at a URL may have chats only
    target = Target(client, model, info.ctx or None, is_chat=bool(client.url))
    runner = SuiteRunner(target, prompts, notify)
    if client.url:  # it is on another machine, as far as is known
        runner = SuiteRunner(target, prompts, notify, read_energy=dict)
    bench = Bench(client, info, target, runner, prompts, begin_s, machine)
    bench.runner.warm_up()
    return bench


def _require_some(suite: Suite) -> None:
    if not any(test.rounds for test in suite.tests):
        raise InvalidRequest(
            f"no test fits: give it more --time ({suite.left_out[0]})", param="time"
        )


def _random_seed() -> int:
    return int.from_bytes(os.urandom(8), "big")
