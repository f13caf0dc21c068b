"""What drafts gain on this machine, beside what they could gain at most.

python -m benchmarks.speculation [--backend llamacpp|tiny|cuda] [--quick]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks import replay, step_curve
from benchmarks.gain import Bench, Case, Groups, Text
from benchmarks.measure import Report, command
from benchmarks.pairs import BACKENDS, Pair, load_pair
from benchmarks.scripted import SAID, SCRIPTED, Scripted
from benchmarks.session import GREEDY
from localgen.backends.engine.speculation.draft_model import ModelDrafter
from localgen.backends.engine.speculation.ngram import NgramDrafter
from localgen.backends.errors import LocalgenError

RESULTS = Path(__file__).parent / "results"
ACCEPTANCES = (0.5, 0.7, 0.9)
NO_ACCEPTANCE = 0.02
STREAMS = 16
# of a copy's tokens; how long it goes on unchanged is chance, of which a few texts have enough
EDITED, EDITED_TEXTS = 1 / 40, 4
# where a step takes a millisecond, what stands around it counts: numbers that are tried as they are
INSISTED, INSISTED_COPIES = (1, 2, 3, 4, 7), (7, 15, 31, 63)
# and rounds are short
SMALL_ROUNDS = 8


class Effort(NamedTuple):
    """Rounds of crowds and of short answers, for one of the rest; and of prices."""

    crowd: int
    short: int
    prices: int


# two short answers of the built-in model take a tenth of a second; few of the twins' steps fit into
# a row, so that their prices need more rows
LARGE, TRAINED, TWINS = Effort(1, 2, 3), Effort(3, 48, 3), Effort(6, 12, 12)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured. Tokens of a prompt (prompt, long_prompt) and of an answer: a copy, one
    alone, one of many (compared in crowd_rounds), a short one (in many_rounds)."""

    rounds: int
    many_rounds: int
    crowd_rounds: int
    price_rounds: int
    prompt: int
    long_prompt: int
    copy: int
    alone: int
    together: int
    short: int


FULL = Plan(
    rounds=3,
    many_rounds=6,
    crowd_rounds=3,
    price_rounds=3,
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
    crowd_rounds=1,
    price_rounds=1,
    prompt=16,
    long_prompt=100,
    copy=24,
    alone=24,
    together=16,
    short=16,
)


def run(bench: Bench, plan: Plan) -> None:
    """Everything, in order."""
    _copies(bench, plan)
    _drafted_by_model(bench, plan)
    _harmless(bench, plan)


def fresh(pair: Pair, count: int, size: int, *, first: int = 0) -> list[Text]:
    """Prompts without a repetition, from the one of that number on."""
    most = pair.vocab - 100
    return [
        ([100 + (size * n + i) % most for i in range(size)], None)
        for n in range(first, first + count)
    ]


def always(groups: Groups) -> Callable[[int], Groups]:
    """The same in each round."""
    return lambda _: groups


def twice(texts: Seq[Text]) -> Callable[[int], Groups]:
    """Asked two times in each round: an answer is computed in those places of the cache which the
    one before it left free, and two after one another have had both halves of it."""
    return always([texts, texts])


def ever_new(pair: Pair, size: int) -> Callable[[int], Groups]:
    """Two prompts in each round that nobody has read before."""
    return lambda number: [[text] for text in fresh(pair, 2, size, first=2 * (number + 1))]


def scripted(pair: Pair, alpha: float) -> ModelDrafter:
    """The smaller model, right as often as it is told to be."""
    return ModelDrafter(Scripted(pair.draft, SAID, alpha), "scripted")


def _copies(bench: Bench, plan: Plan) -> None:
    """Answers that say the prompt again."""
    size, insisted = plan.copy, INSISTED_COPIES if bench.pair.is_small else ()
    copy = replay.copies(size, bench.pair.vocab, edited=0.0, seed=1)
    changed = [
        replay.copies(size, bench.pair.vocab, edited=EDITED, seed=1 + number)
        for number in range(EDITED_TEXTS)
    ]
    groups = {"a copy": twice([copy]), "a copy with changes": always([[text] for text in changed])}
    cases = [
        Case(name, NgramDrafter, GREEDY, asked, size, plan.rounds) for name, asked in groups.items()
    ]
    prices, _ = bench.between_prices("copies", size + size // 2, cases, insisted, by_model=False)
    for case, texts in zip(cases, ([copy], changed), strict=True):
        bench.reached(case, *replay.best(prices.curve, texts))
        if insisted:
            bench.of_fixed(case, insisted)


def _drafted_by_model(bench: Bench, plan: Plan) -> None:
    """Drafts that are right as often as they are told to be, and those of a trained model."""
    pair, insisted = bench.pair, INSISTED if bench.pair.is_small else ()
    told = [
        Case(
            f"draft model, acceptance {alpha:g}",
            partial(scripted, pair, alpha),
            SCRIPTED,
            twice(fresh(pair, 1, plan.prompt)),
            plan.alone,
            plan.rounds,
        )
        for alpha in ACCEPTANCES
    ]
    cases = [*told, *_trained(pair, plan)]
    # half an answer behind the prompt
    context = plan.prompt + plan.alone // 2
    prices, measured = bench.between_prices("short prompt", context, cases, insisted, by_model=True)
    alphas = [*ACCEPTANCES, *measured[len(told) :]]
    for case, alpha in zip(cases, alphas, strict=True):
        drafts, most = step_curve.best(prices.curve, alpha, prices.draft_ms)
        bench.reached(case, drafts, most)
        if insisted:
            bench.of_fixed(case, insisted)


def _trained(pair: Pair, plan: Plan) -> list[Case]:
    """Answers of a trained target to the beginnings of real texts, with a trained draft model."""
    encode = pair.encode
    if encode is None:
        return []
    words = replay.HELD_OUT.read_text(encoding="utf-8").split()
    return [
        Case(
            f"trained models, text {number + 1}",
            lambda: ModelDrafter(replay.Reciting(pair.draft), "draft"),
            GREEDY,
            twice([(encode(" ".join(words[500 * number : 500 * number + 60])), None)]),
            plan.alone,
            plan.rounds,
        )
        for number in range(4)
    ]


def _harmless(bench: Bench, plan: Plan) -> None:
    """Where there is nothing to gain, or everybody is served at once."""
    pair, vocab = bench.pair, bench.pair.vocab
    useless = partial(scripted, pair, NO_ACCEPTANCE)
    alone = partial(Case, tokens=plan.short, rounds=plan.many_rounds)
    together = partial(Case, tokens=plan.together, rounds=plan.crowd_rounds)
    prose = twice(replay.natural(plan.prompt, plan.short, 1, vocab=vocab))
    crowd = twice(replay.natural(plan.prompt, plan.together, STREAMS, vocab=vocab))
    copies = [replay.copies(plan.together, vocab, edited=0.0, seed=n) for n in range(STREAMS)]
    short, many = (twice(fresh(pair, count, plan.prompt)) for count in (1, STREAMS))
    equals = alone("prose, plain on both sides", None, GREEDY, prose)
    bench.compare(equals)
    bench.noise(equals)
    behind = f"a useless draft model, {plan.long_prompt:,} tokens before"
    for case in (
        alone("prose", NgramDrafter, GREEDY, prose),
        alone("a useless draft model", useless, SCRIPTED, short),
        alone(behind, useless, SCRIPTED, ever_new(pair, plan.long_prompt)),
        together(f"prose, {STREAMS} streams", NgramDrafter, GREEDY, crowd),
        together(f"copies, {STREAMS} streams", NgramDrafter, GREEDY, twice(copies)),
        together(f"a useless draft model, {STREAMS} streams", useless, SCRIPTED, many),
    ):
        bench.compare(case)
        bench.harmless(case)


def _plan(quick: bool, rounds: int | None, pair: Pair) -> Plan:
    plan = QUICK if quick else FULL
    effort = LARGE
    if pair.is_small and not quick:
        rounds = rounds or SMALL_ROUNDS
        effort = TRAINED if pair.encode else TWINS
        plan = replace(plan, price_rounds=effort.prices)
    if rounds is None:
        return plan
    crowd, short = rounds * effort.crowd, rounds * effort.short
    return replace(plan, rounds=rounds, crowd_rounds=crowd, many_rounds=short)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write; the status is 0 whether or not every target was met."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.speculation")
    parser.add_argument("--backend", choices=BACKENDS, default="llamacpp")
    parser.add_argument("--quick", action="store_true", help="tiny models and one short round")
    parser.add_argument("--rounds", type=int, help="rounds of each comparison")
    parser.add_argument("--threads", type=int, help="threads; localgen's default")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    try:
        pair = load_pair(options.backend, quick=options.quick, threads=options.threads)
    except LocalgenError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    plan = _plan(options.quick, options.rounds, pair)
    report = Report(pair.line, plan.rounds, options.quick, pair.threads, {})
    report.commands.append(command("benchmarks.speculation", arguments))
    run(Bench(pair, report, price_rounds=plan.price_rounds), plan)
    pair.close()
    print(report.text())
    stamp = f"{datetime.now(UTC):%Y%m%d-%H%M%S}"
    target = options.output or RESULTS / f"speculation-{options.backend}-{stamp}.json"
    report.write(target)
    print(f"written to {target}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
