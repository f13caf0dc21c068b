"""Long contexts in the KV cache: decoding over them, and a short turn after one."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.answers import computed_tokens, serving_metrics
from benchmarks.gpu_parts.bench import GpuBench
from benchmarks.gpu_parts.clock import Budget
from benchmarks.gpu_parts.progress import case_begins
from benchmarks.gpu_parts.report import Figures
from benchmarks.gpu_parts.shapes import Shape
from benchmarks.gpu_parts.workloads import cached_figures
from benchmarks.session import Session

PART = "contexts"
_ROUNDS = 3
_FEW = 8  # tokens of answers that only compute prompts and have graphs captured
_ROOM = 64  # extra tokens of the KV cache for each request


def contexts(bench: GpuBench, budget: Budget) -> None:
    """One long sequence among short ones, turns over the long one, and both kinds of KV cache."""
    plan = bench.plan
    _long(bench, budget)
    group = plan.by_cache
    test = f"{group.requests} × {group.prompt:,} cached/{group.answer} out"
    for shape in (plan.plain, plan.int8_cache):
        if budget.fits(f"{test}: {shape.name}"):
            lengths = [group.prompt] * group.requests
            with bench.session(shape, _kv_tokens(lengths, group.answer)) as session:
                prompts = bench.prompts(shape, lengths)
                _decode(bench, session, shape, test, prompts, group.answer, budget)
            bench.device.free()


def _long(bench: GpuBench, budget: Budget) -> None:
    plan, shape, others = bench.plan, bench.plan.plain, bench.plan.beside_long
    lengths = [plan.long, *[others.prompt] * others.requests]
    test = f"{plan.long:,} beside {others.requests} × {others.prompt:,} cached/{others.answer} out"
    with bench.session(shape, _kv_tokens(lengths, others.answer)) as session:
        prompts = bench.prompts(shape, lengths)
        _decode(bench, session, shape, test, prompts, others.answer, budget)
        _turns(bench, session, shape, prompts[0], budget)
    bench.device.free()


def _kv_tokens(lengths: Sequence[int], answer: int) -> int:
    """Room for the prompts and two answers to each: the last one and the current one."""
    return sum(lengths) + len(lengths) * (2 * answer + _ROOM)


def _decode(
    bench: GpuBench,
    session: Session,
    shape: Shape,
    test: str,
    prompts: Sequence[Sequence[int]],
    answer: int,
    budget: Budget,
) -> None:
    """Measure sequences that decode together. Their prompts are computed once, for all rounds.

    Skipped if the KV cache does not hold all of them.
    """
    lengths = [len(prompt) for prompt in prompts]
    needed, given = _kv_tokens(lengths, answer), session.runner.limits.kv_tokens
    if given < needed:
        reason = f"it needs a KV cache of {needed:,} tokens, the memory holds {given:,}"
        bench.report.skipped.append((f"{test}: {shape.name}", reason))
        return
    model = bench.model(shape)
    case_begins(f"{test}: warm-up of {shape.name}")
    for _ in range(2):  # the prompts; then all decode together, and their graph is captured
        session.ask(prompts, _FEW)

    def run() -> Figures:
        answers = session.ask(prompts, answer)
        return cached_figures(bench, model, answers, sum(lengths) / len(lengths))

    bench.rounds(PART, test, {shape.name: run}, min(bench.plan.rounds, _ROUNDS), budget)


def _turns(
    bench: GpuBench, session: Session, shape: Shape, text: Sequence[int], budget: Budget
) -> None:
    """Measure the TTFT of a short new turn over a text in the cache."""
    turn = bench.plan.long_turn
    test = f"turn of {turn.prompt} over {len(text):,} cached"

    def run() -> Figures:
        answers = session.ask([[*text, *bench.prompt(shape, turn.prompt)]], turn.answer)
        found = {name: value for name, value in serving_metrics(answers).items() if "ttft" in name}
        return found | {"computed_tokens": computed_tokens(answers)}

    case_begins(f"{test}: warm-up of {shape.name}")
    for _ in range(2):
        run()
    bench.rounds(PART, test, {shape.name: run}, turn.requests, budget)
