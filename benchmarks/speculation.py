"""What drafts gain on this machine, beside what they could gain at most.

python -m benchmarks.speculation [--backend llamacpp|cuda] [--quick]
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import step_curve
from benchmarks.answers import Answer
from benchmarks.measure import RATE, Report
from benchmarks.pairs import Pair, load_pair
from benchmarks.scripted import Counted, Scripted
from benchmarks.session import GREEDY, Session
from benchmarks.step_curve import Curve
from localgen.backends.engine.drafts.drafter import Drafter
from localgen.backends.engine.drafts.model import ModelDrafter
from localgen.backends.engine.drafts.ngram import NgramDrafter
from localgen.backends.errors import LocalgenError
from localgen.backends.types import SamplingParams

RESULTS = Path(__file__).parent / "results"
REACHED, HARMLESS = 0.9, 0.98
ACCEPTANCES = (0.5, 0.7, 0.9)
NO_ACCEPTANCE = 0.02
STREAMS = 16
PLAIN, DRAFTED = "plain", "drafts"
# the target says this for ever where the acceptance is scripted: what it says must be known
_SAID = 1000
_CERTAIN = 1000.0
_SCRIPTED = replace(GREEDY, logit_bias={_SAID: _CERTAIN})
_SAMPLED = SamplingParams(temperature=1.0, top_k=0, seed=3)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured. alone, together: tokens of an answer, of one and of many at once."""

    rounds: int
    curve_rounds: int
    prompt: int
    alone: int
    together: int


FULL = Plan(rounds=3, curve_rounds=7, prompt=64, alone=256, together=48)
QUICK = Plan(rounds=1, curve_rounds=1, prompt=16, alone=24, together=16)


@dataclass(frozen=True, slots=True)
class Case:
    """Answers with drafts beside the same without. prompts: of requests that run together."""

    name: str
    drafter: Callable[[], Drafter]
    params: SamplingParams
    prompts: Sequence[Sequence[int]]
    tokens: int
    draft_ms: float = 0.0


class Bench:
    """A pair of models, and what was found with it."""

    def __init__(self, pair: Pair, plan: Plan, report: Report) -> None:
        self.pair, self.plan, self.report = pair, plan, report
        self.curve: Curve = {}

    def measure_curve(self) -> None:
        """Steps of 1 to 64 tokens, half an answer behind the prompt."""
        context = self.plan.prompt + self.plan.alone // 2
        rounds = self.plan.curve_rounds
        found = step_curve.measure(
            self.pair.target, self.pair.vocab, context=context, rounds=rounds
        )
        for size, values in found.items():
            self.report.add(f"step of {size} tokens", self.pair.name, "ms", values)
        self.curve = step_curve.medians(found)

    def draft_step_ms(self) -> float:
        """A step of the draft model with one token."""
        context = self.plan.prompt + self.plan.alone // 2
        found = step_curve.measure(
            self.pair.draft, self.pair.vocab, context=context, rounds=self.plan.curve_rounds
        )[1]
        return self.report.add("step of 1 token", "draft model", "ms", found).median

    def compare(self, case: Case) -> Counted:
        """Rates of both sides, in turn."""
        print(case.name, file=sys.stderr, flush=True)
        counted = Counted(case.drafter())
        sides = {PLAIN: self._session([]), DRAFTED: self._session([counted])}
        rates: dict[str, list[float]] = {side: [] for side in sides}
        same = []
        for number in range(self.plan.rounds):
            texts = {}
            for side in list(sides)[:: 1 if number % 2 else -1]:
                answers = sides[side].ask(case.prompts, case.tokens, case.params)
                rates[side].append(_tokens_per_s(answers))
                texts[side] = [answer.text for answer in answers]
            joined = [["".join(text) for text in found] for found in texts.values()]
            same.append(sum(a == b for a, b in zip(*joined, strict=True)) / len(case.prompts))
        told = sides[DRAFTED].stats.speculation
        for session in sides.values():
            session.stop()
        for side, values in rates.items():
            self.report.add(case.name, side, RATE, values)
        self.report.add(case.name, "same text", "of the answers", same)
        self.report.add(case.name, "acceptance", "", [counted.acceptance])
        self.report.add(case.name, "speed-up as the engine has it", "", [told.speedup])
        return counted

    def _session(self, drafters: Sequence[Drafter]) -> Session:
        return Session(self.pair.target, self.pair.vocab, itl_target_ms=2000.0, drafters=drafters)

    def reached(self, case: Case, counted: Counted) -> None:
        """Check the speed-up against the best that any number of drafts could give."""
        drafts, most = step_curve.best(self.curve, counted.acceptance, case.draft_ms)
        plain, drafted = self._series(case.name, PLAIN), self._series(case.name, DRAFTED)
        gains = [ours / theirs for ours, theirs in zip(drafted, plain, strict=True)]
        self.report.add(case.name, "speed-up", "", gains)
        self.report.add(case.name, f"best possible, {drafts} drafts", "", [most])
        tokens = step_curve.tokens_per_step(counted.acceptance, drafts)
        self.report.add(case.name, "tokens a step there, expected", "", [tokens])
        shares = [gain / most for gain in gains]
        self.report.least(self.report.add(case.name, "reached of it", "", shares), REACHED)

    def harmless(self, case: Case) -> None:
        """Check that nobody is slower for it."""
        found = {s.side: s for s in self.report.series if s.test == case.name}
        self.report.ratio(found[DRAFTED], found[PLAIN], HARMLESS, at_least=True)

    def _series(self, test: str, side: str) -> tuple[float, ...]:
        return next(s.values for s in self.report.series if (s.test, s.side) == (test, side))

    def repeating(self, count: int) -> list[list[int]]:
        """Prompts after which a random model that is greedy soon says the same again."""
        return [[(7 * i + n) % 400 for i in range(6)] * 3 for n in range(1, count + 1)]

    def fresh(self, count: int) -> list[list[int]]:
        """Prompts without a repetition."""
        size = self.plan.prompt
        return [[100 + size * n + i for i in range(size)] for n in range(count)]


def _tokens_per_s(answers: Sequence[Answer]) -> float:
    """From the first token of all to the last."""
    tokens = sum(answer.finished.completion_tokens for answer in answers) - 1
    return tokens / (max(a.last_s for a in answers) - min(a.first_s for a in answers))


def run(bench: Bench) -> None:
    """Everything, in order."""
    bench.measure_curve()
    plan = bench.plan
    copy = Case("text that repeats", NgramDrafter, GREEDY, bench.repeating(1), plan.alone)
    bench.reached(copy, bench.compare(copy))
    _drafted_by_model(bench)
    for name, params, prompts in (
        ("text that does not repeat", _SAMPLED, bench.fresh(1)),
        (f"{STREAMS} streams that do not repeat", _SAMPLED, bench.fresh(STREAMS)),
        (f"{STREAMS} streams that repeat", GREEDY, bench.repeating(STREAMS)),
    ):
        tokens = plan.alone if len(prompts) == 1 else plan.together
        case = Case(name, NgramDrafter, params, prompts, tokens)
        bench.compare(case)
        bench.harmless(case)


def _drafted_by_model(bench: Bench) -> None:
    """A smaller model, right as often as it is told to be."""
    draft_ms = bench.draft_step_ms()
    for alpha in (*ACCEPTANCES, NO_ACCEPTANCE):

        def drafter(alpha: float = alpha) -> Drafter:
            return ModelDrafter(Scripted(bench.pair.draft, _SAID, alpha), "scripted")

        name = f"draft model, acceptance {alpha:g}"
        case = Case(name, drafter, _SCRIPTED, bench.fresh(1), bench.plan.alone, draft_ms)
        counted = bench.compare(case)
        if alpha == NO_ACCEPTANCE:
            bench.harmless(case)
        else:
            bench.reached(case, counted)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write; the status is 0 whether or not every target was met."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.speculation")
    parser.add_argument("--backend", choices=("llamacpp", "cuda"), default="llamacpp")
    parser.add_argument("--quick", action="store_true", help="tiny models and one short round")
    parser.add_argument("--rounds", type=int, help="rounds of each comparison")
    parser.add_argument("--threads", type=int, help="threads; localgen's default")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    plan = QUICK if options.quick else FULL
    if options.rounds:
        plan = replace(plan, rounds=options.rounds)
    try:
        pair = load_pair(options.backend, quick=options.quick, threads=options.threads)
    except LocalgenError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    report = Report(pair.line, plan.rounds, options.quick, pair.threads, {})
    report.commands.append(
        shlex.join(["python", "-m", "benchmarks.speculation", *(arguments or sys.argv[1:])])
    )
    run(Bench(pair, plan, report))
    pair.close()
    print(report.text())
    stamp = f"{datetime.now(UTC):%Y%m%d-%H%M%S}"
    target = options.output or RESULTS / f"speculation-{options.backend}-{stamp}.json"
    report.write(target)
    print(f"written to {target}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
