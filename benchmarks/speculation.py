"""What drafts gain on this machine, beside what they could gain at most.

python -m benchmarks.speculation [--backend llamacpp|tiny|cuda] [--quick]
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from benchmarks import replay, step_curve
from benchmarks.answers import Answer
from benchmarks.measure import RATE, Report
from benchmarks.pairs import BACKENDS, Pair, load_pair
from benchmarks.scripted import SAID, SCRIPTED, Counted, Insisting, Scripted, acceptance
from benchmarks.session import GREEDY, Session
from benchmarks.step_curve import Curve, Steps
from localgen.backends.engine.drafts.drafter import Drafter
from localgen.backends.engine.drafts.model import ModelDrafter
from localgen.backends.engine.drafts.ngram import NgramDrafter
from localgen.backends.engine.runner import ModelRunner
from localgen.backends.errors import LocalgenError
from localgen.backends.types import SamplingParams

RESULTS = Path(__file__).parent / "results"
REACHED, HARMLESS = 0.9, 0.98
ACCEPTANCES = (0.5, 0.7, 0.9)
NO_ACCEPTANCE = 0.02
STREAMS = 16
EDITED = 1 / 40
# where a step takes a millisecond, what stands around it counts: numbers that are tried as they are
INSISTED, INSISTED_COPIES = (1, 2, 3, 4, 7), (7, 15, 31, 63)
PLAIN, DRAFTED, AGAIN = "plain", "drafts", "plain again"
# an answer is computed in those places of the cache which the one before it left free: two after
# one another have had both halves of it
ASKED = 2
# a prompt, and what is said after it; None: what the model says
Text = tuple[Seq[int], Seq[int] | None]


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured. Tokens of a prompt (prompt, long_prompt) and of an answer: a copy, one
    alone, one of many, a short one of those that are compared in many_rounds."""

    rounds: int
    many_rounds: int
    curve_rounds: int
    prompt: int
    long_prompt: int
    copy: int
    alone: int
    together: int
    short: int


FULL = Plan(
    rounds=3,
    many_rounds=6,
    curve_rounds=5,
    prompt=64,
    long_prompt=1024,
    copy=256,
    alone=96,
    together=24,
    short=48,
)
QUICK = Plan(
    rounds=1,
    many_rounds=1,
    curve_rounds=1,
    prompt=16,
    long_prompt=100,
    copy=24,
    alone=24,
    together=16,
    short=16,
)


@dataclass(frozen=True, slots=True)
class Case:
    """Answers with drafts beside the same without. texts: of requests that run together. drafter:
    None for plain answers on both sides, which shows what the comparison is worth."""

    name: str
    drafter: Callable[[], Drafter] | None
    params: SamplingParams
    texts: Seq[Text]
    tokens: int
    rounds: int

    @property
    def other(self) -> str:
        """The side beside the plain one."""
        return DRAFTED if self.drafter else AGAIN


class Bench:
    """A pair of models, and what was found with it."""

    def __init__(self, pair: Pair, plan: Plan, report: Report) -> None:
        self.pair, self.plan, self.report = pair, plan, report
        self.draft_ms = 0.0
        self.insisted = INSISTED if pair.encode else ()
        self._target = replay.Reciting(pair.target)

    def steps(self, context: int) -> Steps:
        """Steps of the target with 1 to 64 tokens behind so many."""
        return self._steps(self.pair.target, context)

    def curve(self, name: str, *measured: Steps) -> Curve:
        """What these say together."""
        found = {size: [ms for steps in measured for ms in steps[size]] for size in measured[0]}
        for size, values in found.items():
            self.report.add(f"step of {size} tokens, {name}", self.pair.name, "ms", values)
        return step_curve.medians(found)

    def measure_draft(self, context: int) -> None:
        """What proposing a draft takes."""
        values = self._steps(self.pair.draft, context)[1]
        self.draft_ms = self.report.add("step of 1 token", "draft model", "ms", values).median

    def _steps(self, runner: ModelRunner, context: int) -> Steps:
        rounds = self.plan.curve_rounds
        return step_curve.measure(runner, self.pair.vocab, context=context, rounds=rounds)

    def compare(self, case: Case, insisted: Seq[int] = ()) -> float:
        """Rates of all sides, in turn; the share of drafts that were right. The first answers, from
        which drafters learn, are not measured. insisted: numbers of drafts that are made in every
        step, on sides of their own: these try so many more that they alone count."""
        print(case.name, file=sys.stderr, flush=True)
        make = case.drafter
        drafters = [Counted(make())] if make else []
        sides = {PLAIN: self._session([]), case.other: self._session(drafters[:])}
        if make:
            for drafts in insisted:
                drafters.append(Counted(Insisting(make(), drafts)))
                sides[f"{drafts} drafts"] = self._session(drafters[-1:])
        rates: dict[str, list[float]] = {side: [] for side in sides}
        same, a_step = [], []
        for prompt, answer in case.texts:
            if answer is not None:
                self._target.learn(prompt, answer)
        for number in range(-1, case.rounds):
            texts = {}
            for side in list(sides)[:: 1 if number % 2 else -1]:
                answers = self._ask(sides[side], case, 1 if number < 0 else ASKED)
                texts[side] = ["".join(a.text) for found in answers for a in found]
                if number >= 0:
                    rates[side].append(_tokens_per_s(answers))
                if number >= 0 and side == DRAFTED:
                    a_step.append(_tokens_per_step(answers))
            same.append(sum(map(str.__eq__, texts[PLAIN], texts[case.other])) / len(texts[PLAIN]))
        told = sides[case.other].stats.speculation
        for session in sides.values():
            session.stop()
        for side, values in rates.items():
            self.report.add(case.name, side, RATE, values)
        self.report.add(case.name, "same text", "of the answers", same)
        if not drafters:
            return 0.0
        alpha = acceptance(drafters[1:] or drafters)
        self.report.add(case.name, "acceptance", "", [alpha])
        self.report.add(case.name, "tokens a step", "", a_step)
        self.report.add(case.name, "speed-up as the engine has it", "", [told.speedup])
        return alpha

    def _ask(self, session: Session, case: Case, times: int) -> list[Seq[Answer]]:
        prompts = [prompt for prompt, _ in case.texts]
        return [session.ask(prompts, case.tokens, case.params) for _ in range(times)]

    def _session(self, drafters: Seq[Drafter]) -> Session:
        return Session(self._target, self.pair.vocab, itl_target_ms=2000.0, drafters=drafters)

    def reached(self, case: Case, drafts: int, most: float) -> None:
        """Check the speed-up against the best that any number of drafts could give."""
        plain, drafted = self._series(case.name, PLAIN), self._series(case.name, DRAFTED)
        gains = [ours / theirs for ours, theirs in zip(drafted, plain, strict=True)]
        self.report.add(case.name, "speed-up", "", gains)
        self.report.add(case.name, f"best possible, {drafts} drafts", "", [most])
        shares = [gain / most for gain in gains]
        self.report.least(self.report.add(case.name, "reached of it", "", shares), REACHED)

    def of_fixed(self, case: Case, insisted: Seq[int]) -> None:
        """Check the rate against the best that was measured with a fixed number, none included."""
        sides = [PLAIN, *(f"{drafts} drafts" for drafts in insisted)]
        best = max((self._series(case.name, side) for side in sides), key=statistics.median)
        shares = [
            ours / fixed for ours, fixed in zip(self._series(case.name, DRAFTED), best, strict=True)
        ]
        name = "reached of the best fixed number, measured"
        self.report.least(self.report.add(case.name, name, "", shares), REACHED)

    def expected(self, case: Case, alpha: float, drafts: int) -> None:
        """What the closed form says of the tokens of a step, for so many drafts."""
        tokens = step_curve.tokens_per_step(alpha, drafts)
        self.report.add(case.name, f"tokens a step, expected of {drafts} drafts", "", [tokens])

    def harmless(self, case: Case) -> None:
        """Check that nobody is slower for it."""
        found = {s.side: s for s in self.report.series if s.test == case.name}
        self.report.ratio(found[DRAFTED], found[PLAIN], HARMLESS, at_least=True)

    def noise(self, case: Case) -> None:
        """What a comparison of equals says."""
        again, plain = self._series(case.name, AGAIN), self._series(case.name, PLAIN)
        ratios = [one / other for one, other in zip(again, plain, strict=True)]
        self.report.add(case.name, f"{AGAIN} ÷ {PLAIN}", "", ratios)

    def _series(self, test: str, side: str) -> tuple[float, ...]:
        return next(s.values for s in self.report.series if (s.test, s.side) == (test, side))

    def fresh(self, count: int, size: int) -> list[Text]:
        """Prompts without a repetition."""
        most = self.pair.vocab - 100
        return [([100 + (size * n + i) % most for i in range(size)], None) for n in range(count)]

    def scripted(self, alpha: float) -> ModelDrafter:
        """A smaller model, right as often as it is told to be."""
        return ModelDrafter(Scripted(self.pair.draft, SAID, alpha), "scripted")


def _tokens_per_s(asked: Seq[Seq[Answer]]) -> float:
    """From the first token of those asked together to their last."""
    tokens = sum(answer.finished.completion_tokens for found in asked for answer in found)
    took_s = sum(max(a.last_s for a in found) - min(a.first_s for a in found) for found in asked)
    return (tokens - len(asked)) / took_s


def _tokens_per_step(asked: Seq[Seq[Answer]]) -> float:
    ends = [answer.finished for found in asked for answer in found]
    steps = sum(end.timings.draft_steps for end in ends)
    return sum(end.completion_tokens - 1 for end in ends) / max(1, steps)


def run(bench: Bench) -> None:
    """Everything, in order. Prices are asked before and after what is held against them: a machine
    is not the same a few minutes later."""
    _copies(bench)
    # half an answer behind the prompt
    context = bench.plan.prompt + bench.plan.alone // 2
    before = bench.steps(context)
    bench.measure_draft(context)
    found = _drafted_by_model(bench)
    if bench.pair.encode:
        found += _real(bench, bench.pair.encode)
    curve = bench.curve("short prompt", before, bench.steps(context))
    for case, alpha in found:
        drafts, most = step_curve.best(curve, alpha, bench.draft_ms)
        bench.expected(case, alpha, drafts)
        bench.reached(case, drafts, most)
        if bench.insisted:
            bench.of_fixed(case, bench.insisted)
    _harmless(bench)


def _copies(bench: Bench) -> None:
    """Answers that say the prompt again."""
    size = bench.plan.copy
    insisted = INSISTED_COPIES if bench.insisted else ()
    before = bench.steps(size + size // 2)
    found: list[tuple[Case, Text]] = []
    for name, edited in (("a copy", 0.0), ("a copy with changes", EDITED)):
        text = replay.copies(size, bench.pair.vocab, edited=edited, seed=1)
        case = Case(name, NgramDrafter, GREEDY, [text], size, bench.plan.rounds)
        bench.compare(case, insisted)
        found.append((case, text))
    curve = bench.curve("copies", before, bench.steps(size + size // 2))
    for case, (prompt, answer) in found:
        assert answer is not None
        bench.reached(case, *replay.best(curve, prompt, answer))
        if insisted:
            bench.of_fixed(case, insisted)


def _drafted_by_model(bench: Bench) -> list[tuple[Case, float]]:
    """Drafts that are right as often as they are told to be, and how often that is."""
    plan = bench.plan
    cases = [
        Case(
            f"draft model, acceptance {alpha:g}",
            partial(bench.scripted, alpha),
            SCRIPTED,
            bench.fresh(1, plan.prompt),
            plan.alone,
            plan.rounds,
        )
        for alpha in ACCEPTANCES
    ]
    for case in cases:
        bench.compare(case, bench.insisted)
    return list(zip(cases, ACCEPTANCES, strict=True))


def _real(bench: Bench, encode: Callable[[str], list[int]]) -> list[tuple[Case, float]]:
    """Answers of a trained target to the beginnings of real texts, with a trained draft model, and
    how often that was right."""
    words = replay.HELD_OUT.read_text(encoding="utf-8").split()
    found = []
    for number in range(4):
        beginning = " ".join(words[500 * number : 500 * number + 60])
        case = Case(
            f"trained models, text {number + 1}",
            lambda: ModelDrafter(replay.Reciting(bench.pair.draft), "draft"),
            GREEDY,
            [(encode(beginning), None)],
            bench.plan.alone,
            bench.plan.rounds,
        )
        found.append((case, bench.compare(case, bench.insisted)))
    return found


def _harmless(bench: Bench) -> None:
    """Where there is nothing to gain, or everybody is served at once."""
    plan, vocab = bench.plan, bench.pair.vocab
    useless = partial(bench.scripted, NO_ACCEPTANCE)
    alone = partial(Case, tokens=plan.short, rounds=plan.many_rounds)
    together = partial(Case, tokens=plan.together, rounds=plan.rounds)
    prose = replay.natural(plan.prompt, plan.short, 1, vocab=vocab)
    crowd = replay.natural(plan.prompt, plan.together, STREAMS, vocab=vocab)
    copies = [replay.copies(plan.together, vocab, edited=0.0, seed=n) for n in range(STREAMS)]
    short, long = bench.fresh(1, plan.prompt), bench.fresh(1, plan.long_prompt)
    equals = alone("prose, plain on both sides", None, GREEDY, prose)
    bench.compare(equals)
    bench.noise(equals)
    behind = f"a useless draft model, {plan.long_prompt:,} tokens before"
    for case in (
        alone("prose", NgramDrafter, GREEDY, prose),
        alone("a useless draft model", useless, SCRIPTED, short),
        alone(behind, useless, SCRIPTED, long),
        together(f"prose, {STREAMS} streams", NgramDrafter, GREEDY, crowd),
        together(f"copies, {STREAMS} streams", NgramDrafter, GREEDY, copies),
        together(
            f"a useless draft model, {STREAMS} streams",
            useless,
            SCRIPTED,
            bench.fresh(STREAMS, plan.prompt),
        ),
    ):
        bench.compare(case)
        bench.harmless(case)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write; the status is 0 whether or not every target was met."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.speculation")
    parser.add_argument("--backend", choices=BACKENDS, default="llamacpp")
    parser.add_argument("--quick", action="store_true", help="tiny models and one short round")
    parser.add_argument("--rounds", type=int, help="rounds of each comparison")
    parser.add_argument("--threads", type=int, help="threads; localgen's default")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    plan = QUICK if options.quick else FULL
    if options.rounds:
        plan = replace(plan, rounds=options.rounds, many_rounds=2 * options.rounds)
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
