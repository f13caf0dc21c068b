"""Workloads of localgen's engine: single requests, batches, mixed lengths, shared prefix, chats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from operator import add

from benchmarks.answers import Answer, computed_tokens, decode_tok_s, serving_metrics
from benchmarks.gpu_parts.bench import GpuBench, Side
from benchmarks.gpu_parts.clock import Budget
from benchmarks.gpu_parts.loaded import Loaded
from benchmarks.gpu_parts.plan import RequestGroup
from benchmarks.gpu_parts.progress import case_begins
from benchmarks.gpu_parts.report import Figures
from benchmarks.gpu_parts.shapes import Shape
from benchmarks.session import GREEDY, Session
from localgen.backends.cuda.steps.cuda_graphs import CAPTURE_SIZES, MIN_GRAPH_LEN
from localgen.backends.sampling_params import SamplingParams

# standard deviation of the logarithm of lengths, as in published chat data sets
_SPREAD = 1.0
_SAMPLED = SamplingParams(temperature=0.8, seed=1)
_CURVE_ROUNDS = 3
_ROOM = 64  # extra tokens of the KV cache
_FEW = 8  # tokens of prompts and answers that only have graphs captured


def single(bench: GpuBench, budget: Budget, side: str) -> None:
    """Single requests to a model: after a short prompt, and after a long context."""
    plan, answer, shape = bench.plan, bench.plan.alone.answer, bench.plan.shape(side)
    longest = max(plan.depths, default=0) + plan.alone.prompt + 2 * answer + _ROOM
    short = 4 * (plan.alone.prompt + answer + _ROOM)
    # room for two long texts: one for warm-up and the measured one
    with (
        bench.session(shape, 2 * longest) as session,
        bench.dependent_session(shape, short) as dependent,
    ):
        test = f"{plan.alone.prompt} in/{plan.alone.answer} out"
        for params in (GREEDY, _SAMPLED):  # warm-up: compile and capture
            session.ask([bench.prompt(shape, plan.alone.prompt)], answer, params)
        sides = {shape.name: _alone(bench, session, shape)}
        if shape == plan.plain:
            sides[f"{shape.name}, sampled"] = _alone(bench, session, shape, _SAMPLED)
        if dependent is not None:
            dependent.ask([bench.prompt(shape, plan.alone.prompt)], answer)
            sides[f"{shape.name}, dependent launch"] = _alone(bench, dependent, shape)
        bench.rounds("single", test, sides, plan.rounds, budget)
        for depth in plan.depths:
            name = f"{test} at {depth:,}"
            if budget.fits(name):
                _deep(bench, session, shape, name, depth, budget)


def large(bench: GpuBench, budget: Budget) -> None:
    """Single requests to a model that fills most of the device's memory."""
    shape, group = bench.plan.large, bench.plan.alone
    test = f"{group.prompt} in/{group.answer} out"
    with bench.session(shape, 4 * (group.prompt + group.answer + _ROOM)) as session:
        session.ask([bench.prompt(shape, group.prompt)], group.answer)
        sides = {shape.name: _alone(bench, session, shape)}
        bench.rounds("large", test, sides, bench.plan.rounds, budget)


def _alone(
    bench: GpuBench, session: Session, shape: Shape, params: SamplingParams = GREEDY
) -> Side:
    return lambda: alone(bench, session, shape, params)


def alone(
    bench: GpuBench, session: Session, shape: Shape, params: SamplingParams = GREEDY
) -> Figures:
    """Measure a single request."""
    group = bench.plan.alone
    answers = session.ask([bench.prompt(shape, group.prompt)], group.answer, params)
    return decode_figures(bench, bench.model(shape), answers, group.prompt)


def at_once(bench: GpuBench, session: Session, shape: Shape, group: RequestGroup) -> Figures:
    """Measure requests submitted at the same time."""
    return serving_metrics(_ask_group(bench, session, shape, group))


def _deep(
    bench: GpuBench, session: Session, shape: Shape, test: str, depth: int, budget: Budget
) -> None:
    """Measure TTFT of a new long text once, then decoding after the same text in the cache.

    The rounds need no prefill.
    """
    answer_tokens, model = bench.plan.alone.answer, bench.model(shape)
    session.ask([bench.prompt(shape, depth)], 4)  # warm-up: compile
    text = bench.prompt(shape, depth)
    case_begins(f"{test}, cold: {shape.name}")
    (answer,) = session.ask([text], 4)
    ttft_ms = (answer.first_s - answer.sent_s) * 1e3
    figures = {"ttft_p50_ms": ttft_ms, "ttft_p99_ms": ttft_ms}
    figures["prompt_tok_s"] = depth / ttft_ms * 1e3
    bench.report.add("single", f"{test}, cold", shape.name, [figures])
    session.ask([text], 8)  # warm-up: capture

    def run() -> Figures:
        return cached_figures(bench, model, session.ask([text], answer_tokens), depth)

    bench.rounds("single", test, {shape.name: run}, bench.plan.rounds, budget)


def decode_figures(
    bench: GpuBench, model: Loaded, answers: Sequence[Answer], prompt: float
) -> dict[str, float]:
    """Figures of sequences that decode in the same steps, with the memory bandwidth of a step.

    prompt: mean tokens of the prompts.
    """
    rate = decode_tok_s(answers)
    tokens = prompt + answers[0].finished.completion_tokens / 2
    step_bytes = model.read_bytes(len(answers)) + len(answers) * model.kv_bytes(tokens)
    shares = bench.ceilings.shares(rate / len(answers) * step_bytes)
    return {"decode_tok_s": rate, **serving_metrics(answers), **shares}


def cached_figures(
    bench: GpuBench, model: Loaded, answers: Sequence[Answer], prompt: float
) -> Figures:
    """decode_figures after prompts that were in the cache: without TTFT."""
    found = decode_figures(bench, model, answers, prompt)
    return {name: value for name, value in found.items() if "ttft" not in name}


def curve(bench: GpuBench, budget: Budget, side: str) -> None:
    """Decode throughput by batch size."""
    _by_batch(bench, budget, "curve", bench.plan.shape(side), bench.plan.batches)


def mixture(bench: GpuBench, budget: Budget) -> None:
    """Decode throughput of a mixture of experts by batch size."""
    _by_batch(bench, budget, "mixture", bench.plan.mixture, bench.plan.mixture_batches)


def _by_batch(
    bench: GpuBench, budget: Budget, part: str, shape: Shape, batches: Sequence[int]
) -> None:
    plan = bench.plan
    room = max(batches) * (plan.each.prompt + plan.each.answer + _ROOM)
    with bench.session(shape, 2 * room) as session:
        for batch in batches:
            test = f"{plan.each.prompt} in/{plan.each.answer} out × {batch}"
            if not budget.fits(test):
                continue
            case_begins(f"{test}: warm-up of {shape.name}")
            _ask_group(bench, session, shape, replace(plan.each, requests=batch))
            sides = {shape.name: _batch(bench, session, shape, batch)}
            bench.rounds(part, test, sides, min(plan.rounds, _CURVE_ROUNDS), budget)


def _ask_group(
    bench: GpuBench, session: Session, shape: Shape, group: RequestGroup
) -> Sequence[Answer]:
    prompts = bench.prompts(shape, [group.prompt] * group.requests)
    return session.ask(prompts, group.answer)


def _batch(bench: GpuBench, session: Session, shape: Shape, batch: int) -> Side:
    group = replace(bench.plan.each, requests=batch)

    def run() -> Figures:
        answers = _ask_group(bench, session, shape, group)
        return decode_figures(bench, bench.model(shape), answers, group.prompt)

    return run


def load(bench: GpuBench, budget: Budget, side: str) -> None:
    """Throughput and latency of many requests submitted at the same time."""
    plan, shape = bench.plan, bench.plan.shape(side)
    low, high = plan.mixed_tokens
    overload, chats = plan.overload, plan.lognormal
    tests: list[tuple[str, tuple[Shape, ...], list[int], list[int]]] = [
        (
            f"{overload.requests} × {overload.prompt} in/{overload.answer} out",
            (plan.plain, plan.int4, plan.fp8),
            [overload.prompt] * overload.requests,
            [overload.answer] * overload.requests,
        ),
        (
            f"{plan.mixed_requests} × {low}–{high} in and out",
            (plan.plain, plan.fp8),
            [bench.random.randint(low, high) for _ in range(plan.mixed_requests)],
            [bench.random.randint(low, high) for _ in range(plan.mixed_requests)],
        ),
        (
            f"{chats.requests} × lognormal, mean {chats.prompt} in/{chats.answer} out",
            (plan.plain,),
            _lognormal(bench, chats.prompt, chats.requests),
            _lognormal(bench, chats.answer, chats.requests),
        ),
    ]
    for test, shapes, ins, outs in tests:
        if shape in shapes and budget.fits(test):
            _loaded(bench, test, shape, ins, outs, budget)


def _loaded(
    bench: GpuBench, test: str, shape: Shape, ins: list[int], outs: list[int], budget: Budget
) -> None:
    bench.device.reset_peak()
    with bench.session(shape, bench.plan.kv_tokens) as session:

        def run() -> Figures:
            answers = session.ask(bench.prompts(shape, ins), outs)
            return {**serving_metrics(answers), "peak_gb": bench.device.peak_gb()}

        case_begins(f"{test}: warm-up of {shape.name}")
        _capture(bench, session, shape, len(ins), longest=max(map(add, ins, outs)))
        bench.rounds("load", test, {shape.name: run}, 3, budget)
    bench.device.free()


def _capture(
    bench: GpuBench, session: Session, shape: Shape, requests: int, *, longest: int
) -> None:
    """Capture the CUDA graphs of so many requests of at most `longest` tokens.

    Those of all batch sizes for short sequences, and of the largest for long ones.
    """
    sizes = [size for size in CAPTURE_SIZES if size <= requests]
    for size in sizes:
        session.ask(bench.prompts(shape, [_FEW] * size), _FEW)
    length = 2 * MIN_GRAPH_LEN
    while length < 2 * longest:
        others = [_FEW] * (sizes[-1] - 1)
        session.ask(bench.prompts(shape, [min(length, longest) - _FEW, *others]), _FEW)
        length *= 2


def _lognormal(bench: GpuBench, mean: int, count: int) -> list[int]:
    """Sample lengths from a lognormal distribution with this mean; outliers are clipped."""
    middle = math.log(mean) - _SPREAD**2 / 2
    drawn = [bench.random.lognormvariate(middle, _SPREAD) for _ in range(count)]
    return [min(max(int(length), 4), 8 * mean) for length in drawn]


def prefix(bench: GpuBench, budget: Budget) -> None:
    """Requests submitted at the same time with a new long prefix, which is computed once."""
    plan, shape, group = bench.plan, bench.plan.plain, bench.plan.with_prefix
    test = f"{group.requests} × {group.prompt} in/{group.answer} out over {plan.prefix:,}"
    with bench.session(shape, plan.kv_tokens) as session:

        def run() -> Figures:
            shared = bench.prompt(shape, plan.prefix)
            prompts = [
                [*shared, *own] for own in bench.prompts(shape, [group.prompt] * group.requests)
            ]
            answers = session.ask(prompts, group.answer)
            return {**serving_metrics(answers), "computed_tokens": computed_tokens(answers)}

        run()
        bench.rounds("prefix", test, {shape.name: run}, plan.rounds, budget)


def chats(bench: GpuBench, budget: Budget) -> None:
    """Concurrent chats: each turn sends the whole conversation and a new question."""
    plan, shape, turn = bench.plan, bench.plan.plain, bench.plan.turn
    test = f"{plan.chats} chats × {plan.turns} turns of {turn.prompt} in/{turn.answer} out"
    with bench.session(shape, plan.kv_tokens) as session:

        def run() -> Figures:
            answers = _talk(bench, session, shape)
            return {**serving_metrics(answers), "computed_tokens": computed_tokens(answers)}

        run()
        bench.rounds("chats", test, {shape.name: run}, 2, budget)


def _talk(bench: GpuBench, session: Session, shape: Shape) -> Sequence[Answer]:
    """Run all chats; each sends its next question after its answer."""
    plan, turn = bench.plan, bench.plan.turn
    texts = bench.prompts(shape, [turn.prompt] * plan.chats)
    current = [session.submit(text, turn.answer) for text in texts]
    answers, asked = list(current), [1] * plan.chats
    while any(answer.end is None for answer in current):
        session.step()
        for i, answer in enumerate(current):
            if answer.end is not None and asked[i] < plan.turns:
                texts[i] += answer.tokens + bench.prompt(shape, turn.prompt)
                current[i] = session.submit(texts[i], turn.answer)
                answers.append(current[i])
                asked[i] += 1
    return session.run(answers)
