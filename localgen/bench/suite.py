"""The tests of a benchmark, in the order in which they are worth their time."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from localgen.backends.errors import ServerUnavailable
from localgen.bench.energy import ReadCounters, joules_between, read_counters
from localgen.bench.measured_request import MeasuredRequest, Target
from localgen.bench.prompts import WordPrompts, code_edit

_MAX_CYCLES = 5
_WARM_UP_TOKENS, _WARM_UP_ANSWER = 256, 16
# tokens of prompt and answer of a person's request
_SESSION_PROMPT, _SESSION_ANSWER = 128, 32
_DEPTH = 4_096
_CODE_EDIT_TOKENS = 500
# a step of n sequences takes about n^0.6 times one of a single sequence, until it is measured
_BATCH_EXPONENT = 0.6
# the answer's own tokens, and what the words of a prompt may have more than was asked for
_CONTEXT_MARGIN = 1.1


@dataclass(slots=True)
class SpeedTest:
    """One test of the suite, and the requests of each of its rounds.

    name: as in llama-bench's table. prompt_tokens: computed in the test, behind `depth` tokens that
    are cached. sessions: requests sent at the same moment. text: the prompt instead of random
    words. repeats: the prompt has just been computed, and is cached. joules: of each round, where
    they can be read.
    """

    name: str
    prompt_tokens: int
    answer_tokens: int
    depth: int = 0
    sessions: int = 1
    text: str = ""
    repeats: bool = False
    rounds: list[tuple[MeasuredRequest, ...]] = field(default_factory=list)
    joules: list[float] = field(default_factory=list)
    cost_s: float | None = None

    @property
    def requests(self) -> list[MeasuredRequest]:
        return [request for one in self.rounds for request in one]

    @property
    def is_prefill(self) -> bool:
        """True for pp512: the speed of the prompt counts."""
        return self.answer_tokens == 1 and not self.repeats

    @property
    def rates(self) -> list[float]:
        """Tokens/s of each round: of the prompt, of an answer, or of all sessions together."""
        if self.sessions > 1:
            return [output_rate(one) for one in self.rounds]
        if self.is_prefill:
            return [request.prefill_rate for request in self.requests]
        return [request.decode_rate for request in self.requests]

    @property
    def joules_per_token(self) -> float | None:
        """Energy for a token: of the prompt, or of an answer.

        None where it cannot be read, and where other tokens are computed in a round as well.
        """
        if self.depth or self.repeats:
            return None
        tokens = sum(
            r.prompt_tokens - r.cached_tokens if self.is_prefill else r.completion_tokens
            for r in self.requests
        )
        return sum(self.joules) / tokens if self.joules and tokens else None

    def needed_context(self) -> int:
        tokens = self.depth + self.prompt_tokens + _CODE_EDIT_TOKENS * bool(self.text)
        return round(_CONTEXT_MARGIN * tokens) + self.answer_tokens


@dataclass(slots=True)
class Suite:
    """The tests that were run, and why others were not."""

    tests: list[SpeedTest] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def add(self, more: Suite) -> None:
        """Add the tests of another run."""
        self.tests += more.tests
        self.left_out += more.left_out

    def find(self, name: str) -> SpeedTest | None:
        return next((test for test in self.tests if test.name == name and test.rounds), None)

    @property
    def by_sessions(self) -> dict[int, list[MeasuredRequest]]:
        """Requests of people who ask at the same moment, by their number."""
        return {
            test.sessions: test.requests
            for test in self.tests
            if test.rounds and test.name.endswith(("session", "sessions"))
        }


PP, TG, WARM = "pp512", "tg128", "pp512 again"
CODE_EDIT, CODE_EDIT_DRAFTS = "tg128 code edit", "tg128 code edit, drafts"


def plain_tests() -> list[SpeedTest]:
    """The tests of llama-bench and of several sessions, each as often as it is worth it in a cycle.

    No prompt is used twice. A KV cache that keeps earlier prompts makes the steps slower.
    """
    pp, tg = SpeedTest(PP, 512, 1), SpeedTest(TG, 1, 128)
    one, four, sixteen = (
        SpeedTest(f"{n} session{'s' * (n > 1)}", _SESSION_PROMPT, _SESSION_ANSWER, sessions=n)
        for n in (1, 4, 16)
    )
    edit = SpeedTest(CODE_EDIT, 0, 128, text=code_edit())
    return [pp, tg, one, four, pp, tg, edit, sixteen]


def prefix_tests() -> list[SpeedTest]:
    """The tests that need a prefix cache."""
    return [
        SpeedTest(WARM, 512, 1, repeats=True),
        SpeedTest(f"{PP} @ d{_DEPTH}", 512, 1, depth=_DEPTH),
        SpeedTest(f"{TG} @ d{_DEPTH}", 1, 128, depth=_DEPTH),
    ]


def draft_tests() -> list[SpeedTest]:
    """The tests for an engine with drafts."""
    return [SpeedTest(CODE_EDIT_DRAFTS, 0, 128, text=code_edit())]


class SuiteRunner:
    """Runs tests against a target until a deadline. on_test: called with the name of each.

    clock: seconds; the deadline is of its time.
    """

    def __init__(
        self,
        target: Target,
        prompts: WordPrompts,
        on_test: Callable[[str], None] = lambda name: None,
        clock: Callable[[], float] = time.perf_counter,
        read_energy: ReadCounters = read_counters,
    ) -> None:
        self._target, self._prompts, self._read_energy = target, prompts, read_energy
        self._on_test, self._clock = on_test, clock
        self._prefix = ""
        self._prefill_rate = self._decode_rate = 0.0

    def warm_up(self) -> None:
        """Ask once, and learn the speed and the tokens of words. Raises ServerUnavailable."""
        self._on_test("warm-up")
        most = min(_WARM_UP_TOKENS, (self._target.context or _WARM_UP_TOKENS * 4) // 4)
        for tokens in (most // 4, most):
            prompt = self._prompts.make(tokens)
            request = self._asked(prompt, _WARM_UP_ANSWER)
            self._prompts.count(prompt, request.prompt_tokens)
        self._prefill_rate = request.prefill_rate or 1.0
        self._decode_rate = request.decode_rate or 1.0

    def run(
        self, tests: Sequence[SpeedTest], deadline_s: float, num_cycles: int = _MAX_CYCLES
    ) -> Suite:
        """Run the tests, which may be listed several times, in cycles of this order.

        Each runs once if it fits, and then again until the deadline. Raises ServerUnavailable.
        """
        distinct = list({id(test): test for test in tests}.values())
        suite = Suite(distinct)
        fitting = [test for test in tests if not self._reason_against(test)]
        for _ in range(num_cycles):
            ran = [self._run_if_it_fits(test, deadline_s) for test in fitting]
            if not any(ran):
                break
        for test in distinct:
            if not test.rounds:
                takes = f"it would take about {max(1, self._cost_s(test)):.0f} s (--time)"
                suite.left_out.append(f"{test.name}: {self._reason_against(test) or takes}")
        return suite

    def _reason_against(self, test: SpeedTest) -> str:
        """Why a test cannot be run here; empty if it can."""
        context = self._target.context
        if context is None:
            return "the server does not report its context" if test.depth else ""
        fits = test.needed_context() <= context
        return "" if fits else f"the context has {context:,} tokens"

    def _run_if_it_fits(self, test: SpeedTest, deadline_s: float) -> bool:
        begin_s = self._clock()
        if begin_s + self._cost_s(test) > deadline_s:
            return False
        self._on_test(test.name)
        before = self._read_energy()
        test.rounds.append(self._round(test))
        if (used := joules_between(before, self._read_energy())) is not None:
            test.joules.append(used)
        test.cost_s = self._clock() - begin_s
        return True

    def _cost_s(self, test: SpeedTest) -> float:
        """Expected seconds of the next round: those of the last one, else an estimate."""
        if test.cost_s is not None:
            return test.cost_s
        prompt = test.sessions * test.prompt_tokens + test.depth
        prompt += _CODE_EDIT_TOKENS * bool(test.text)
        step_s = math.pow(test.sessions, _BATCH_EXPONENT) / self._decode_rate
        return prompt / self._prefill_rate + test.answer_tokens * step_s

    def _round(self, test: SpeedTest) -> tuple[MeasuredRequest, ...]:
        if test.sessions > 1:
            prompts = [self._prompts.make(test.prompt_tokens) for _ in range(test.sessions)]
            return ask_at_once(self._target, prompts, test.answer_tokens)
        prompt = test.text or self._prompts.make(test.prompt_tokens)
        if test.depth:
            prompt = f"{self._cached_prefix(test.depth)} {prompt}"
        if test.repeats:
            self._asked(prompt, 1)
        return (self._asked(prompt, test.answer_tokens),)

    def _cached_prefix(self, tokens: int) -> str:
        self._prefix = self._prefix or self._prompts.make(tokens)
        self._asked(self._prefix, 1)
        return self._prefix

    def _asked(self, prompt: str, max_tokens: int) -> MeasuredRequest:
        request = self._target.ask(prompt, max_tokens)
        if request.error:
            raise ServerUnavailable(f"the server failed: {request.error}")
        return request


def ask_at_once(
    target: Target, prompts: Sequence[str], max_tokens: int
) -> tuple[MeasuredRequest, ...]:
    """Ask all prompts at the same moment."""
    start = threading.Barrier(len(prompts))

    def ask(prompt: str) -> MeasuredRequest:
        start.wait()
        return target.ask(prompt, max_tokens)

    with ThreadPoolExecutor(len(prompts)) as pool:
        try:
            return tuple(pool.map(ask, prompts))
        except KeyboardInterrupt:  # else the pool waits for the answers
            target.abort()
            raise


def output_rate(requests: Sequence[MeasuredRequest]) -> float:
    """Answer tokens/s of all requests, from the first one sent to the last one's end."""
    took_s = max(r.ended_s for r in requests) - min(r.sent_s for r in requests)
    return sum(r.completion_tokens for r in requests) / took_s


def rows(suite: Suite) -> Iterator[SpeedTest]:
    """The tests that have been run."""
    return (test for test in suite.tests if test.rounds)
