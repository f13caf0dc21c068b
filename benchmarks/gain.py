"""Answers with drafts beside the same without, and beside the most that drafts could gain."""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from benchmarks import in_turn, replay, step_curve
from benchmarks.answers import Answer
from benchmarks.in_turn import Side
from benchmarks.measure import RATE, Report
from benchmarks.pairs import Pair
from benchmarks.scripted import Counted, Insisting, acceptance
from benchmarks.step_curve import Curve, Measured
from localgen.backends.engine.speculation.drafter import Drafter
from localgen.backends.sampling_params import SamplingParams

REACHED, HARMLESS = 0.9, 0.98
PLAIN, DRAFTED, AGAIN = "plain", "drafts", "plain again"
# a prompt, and what is said after it; None: what the model says
Text = tuple[Seq[int], Seq[int] | None]
# texts of requests that run together, one group after the other
Groups = Seq[Seq[Text]]


@dataclass(frozen=True, slots=True)
class Case:
    """Answers with drafts beside the same without. groups: of a round, the first of which is −1 and
    not measured. drafter: None for plain answers on both sides, which shows what the comparison is
    worth."""

    name: str
    drafter: Callable[[], Drafter] | None
    params: SamplingParams
    groups: Callable[[int], Groups]
    tokens: int
    rounds: int

    @property
    def other(self) -> str:
        """The side beside the plain one."""
        return DRAFTED if self.drafter else AGAIN


@dataclass(frozen=True, slots=True)
class Prices:
    """Milliseconds of a step of the target, by its tokens, and of a draft."""

    curve: Curve
    draft_ms: float


class Bench:
    """A pair of models, and what was found with it."""

    def __init__(self, pair: Pair, report: Report, *, price_rounds: int) -> None:
        self.pair, self.report, self._price_rounds = pair, report, price_rounds
        self._target = replay.Reciting(pair.target)
        self._chance = random.Random(0)

    def between_prices(
        self, name: str, context: int, cases: Seq[Case], insisted: Seq[int], *, by_model: bool
    ) -> tuple[Prices, list[float]]:
        """What steps take behind so many tokens, and each case's share of drafts that were right.
        by_model: a draft model makes the drafts.

        Prices are asked before each case and after it: a machine is not the same a few minutes
        later.
        """
        asked, alphas = [self._steps(context, by_model)], []
        for case in cases:
            alphas.append(self.compare(case, insisted))
            asked.append(self._steps(context, by_model))
        found = {size: [ms for one in asked for ms in one.steps[size]] for size in asked[0].steps}
        for size, values in found.items():
            self.report.add(f"step of {size} tokens, {name}", self.pair.name, "ms", values)
        draft_ms = 0.0
        if by_model:
            values = [ms for one in asked for ms in one.drafts]
            test = f"step of 1 token, {name}"
            draft_ms = self.report.add(test, "draft model", "ms", values).median
        return Prices(step_curve.medians(found), draft_ms), alphas

    def _steps(self, context: int, by_model: bool) -> Measured:
        return step_curve.measure(
            self.pair.target,
            self.pair.vocab,
            context=context,
            rounds=self._price_rounds,
            draft=self.pair.draft if by_model else None,
        )

    def compare(self, case: Case, insisted: Seq[int] = ()) -> float:
        """Rates of all sides, each for a moment in turn; the share of drafts that were right. The
        first answers, from which drafters learn, are not measured. insisted: numbers of drafts that
        are made wherever they may be, on sides of their own: these try so many more that they alone
        count for the share."""
        print(case.name, file=sys.stderr, flush=True)
        make = case.drafter
        drafters = [Counted(make())] if make else []
        sides = {PLAIN: self._side([]), case.other: self._side(drafters[:])}
        if make:
            for drafts in insisted:
                drafters.append(Counted(Insisting(make(), drafts)))
                sides[f"{drafts} drafts"] = self._side(drafters[-1:])
        rates: dict[str, list[float]] = {side: [] for side in sides}
        same, a_step, steps = [], [], 0
        for number in range(-1, case.rounds):
            asked = self._ask(sides, case, number)
            texts = {name: [_text(a) for found in asked[name] for a in found] for name in asked}
            same.append(sum(map(str.__eq__, texts[PLAIN], texts[case.other])) / len(texts[PLAIN]))
            if number < 0:
                for drafter in drafters:
                    drafter.lengths.clear()
                continue
            for name, values in rates.items():
                values.append(_tokens_per_s(asked[name]))
            if drafters:
                a_step.append(_tokens_per_step(asked[DRAFTED]))
                steps += _num_steps(asked[DRAFTED])
        told = sides[case.other].session.stats.speculation
        for side in sides.values():
            side.session.stop()
        for name, values in rates.items():
            self.report.add(case.name, name, RATE, values)
        self.report.add(case.name, "same text", "of the answers", same)
        if not drafters:
            return 0.0
        alpha = acceptance(drafters[1:] or drafters)
        self.report.add(case.name, "acceptance", "", [alpha])
        self.report.add(case.name, "tokens a step", "", a_step)
        expected = 1 + sum(
            step_curve.tokens_per_step(alpha, drafts) - 1 for drafts in drafters[0].lengths
        ) / max(1, steps)
        self.report.add(case.name, "tokens a step, expected of the acceptance", "", [expected])
        self.report.add(case.name, "speed-up as the engine has it", "", [told.speedup])
        return alpha

    def _ask(self, sides: dict[str, Side], case: Case, number: int) -> dict[str, list[Seq[Answer]]]:
        """Answers of each side to all groups of a round."""
        groups = case.groups(number)
        for prompt, answer in (text for group in groups for text in group):
            if answer is not None:
                self._target.learn(prompt, answer)
        asked = [
            in_turn.ask(
                list(sides.values()),
                [prompt for prompt, _ in group],
                case.tokens,
                case.params,
                self._chance,
            )
            for group in groups
        ]
        return dict(zip(sides, map(list, zip(*asked, strict=True)), strict=True))

    def _side(self, drafters: Seq[Drafter]) -> Side:
        return Side.over(self._target, self.pair.vocab, drafters)

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


def _text(answer: Answer) -> str:
    return "".join(answer.text)


def _tokens_per_s(asked: Seq[Seq[Answer]]) -> float:
    """From the first token of those asked together to their last."""
    tokens = sum(answer.finished.completion_tokens for found in asked for answer in found)
    took_s = sum(max(a.last_s for a in found) - min(a.first_s for a in found) for found in asked)
    return (tokens - len(asked)) / took_s


def _tokens_per_step(asked: Seq[Seq[Answer]]) -> float:
    tokens = sum(answer.finished.completion_tokens - 1 for found in asked for answer in found)
    return tokens / max(1, _num_steps(asked))


def _num_steps(asked: Seq[Seq[Answer]]) -> int:
    return sum(answer.finished.timings.draft_steps for found in asked for answer in found)
