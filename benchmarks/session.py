"""localgen's engine in the benchmark's thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType

from benchmarks.answers import Answer, NumberTokenizer
from localgen.backends.engine.engine import Engine
from localgen.backends.engine.input_processor import InputProcessor
from localgen.backends.engine.speculation.drafter import Drafter
from localgen.backends.engine_stats import EngineStats
from localgen.backends.kv_store.store import PrefixStore
from localgen.backends.runner.interface import ModelRunner
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.text.grammar import GrammarCompiler
from localgen.backends.types import Failed, Finished, Request, StepEvents

GREEDY = SamplingParams(temperature=0.0)


class OwnTime:
    """A clock, in seconds, that only runs within its `with` blocks."""

    def __init__(self) -> None:
        self._gone_s = 0.0
        self._since_s: float | None = None

    def __call__(self) -> float:
        running_s = 0.0 if self._since_s is None else time.monotonic() - self._since_s
        return self._gone_s + running_s

    def __enter__(self) -> None:
        self._since_s = time.monotonic()

    def __exit__(self, *raised: object) -> None:
        self._gone_s, self._since_s = self(), None


class Session:
    """An in-process engine. As a context manager it closes the runner at the end.

    clock: returns seconds; used for the times of answers.
    """

    def __init__(
        self,
        runner: ModelRunner,
        vocab: int,
        *,
        itl_target_ms: float,
        drafters: Sequence[Drafter] = (),
        clock: Callable[[], float] = time.monotonic,
        grammar_compiler: GrammarCompiler | None = None,
        prefix_store: PrefixStore | None = None,
    ) -> None:
        self.runner, self._clock = runner, clock
        self._answers: dict[str, Answer] = {}
        self._count = 0
        self.stats = EngineStats()
        intake = InputProcessor(
            limits=runner.limits,
            tokenizer=NumberTokenizer(vocab),
            template=None,
            defaults=SamplingParams(),
            grammar_compiler=grammar_compiler,
        )
        self.engine = Engine(
            runner,
            intake,
            itl_target_ms=itl_target_ms,
            max_queue=100_000,
            publish=self._take,
            drafters=drafters,
            prefix_store=prefix_store,
        )

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        self.runner.close()

    def stop(self) -> None:
        """Stop the engine; the runner remains usable by another one."""
        self.engine.stop()
        # returns at once, after the threads that prepare requests are shut down
        self.engine.run()

    def _take(self, events: StepEvents) -> None:
        self.stats = events.stats or self.stats
        now_s = self._clock()
        for delta in events.deltas:
            answer = self._answers[delta.request_id]
            answer.arrivals.append((now_s, delta.num_tokens))
            answer.text.append(delta.text)
        ends: tuple[Finished | Failed, ...] = (*events.finished, *events.failed)
        for end in ends:
            self._answers.pop(end.request_id).end = end

    def submit(
        self, prompt: Sequence[int], max_tokens: int, params: SamplingParams = GREEDY
    ) -> Answer:
        """Submit a request for exactly `max_tokens` tokens.

        Fewer if one of stop_token_ids or a JSON schema ends the answer.
        """
        answer = Answer(self._clock())
        self._count += 1
        name = f"r{self._count}"
        self._answers[name] = answer
        ignore_eos = params.json_schema is None
        requested = replace(params, ignore_eos=ignore_eos, max_tokens=max_tokens)
        request = Request(
            id=name, prompt_tokens=tuple(prompt), params=requested, arrived_s=time.monotonic()
        )
        self.engine.submit(request)
        return answer

    def step(self) -> None:
        """Run one iteration of the engine loop; blocks while there is nothing to do."""
        self.engine.step(wait=True)

    def run(self, answers: Sequence[Answer]) -> Sequence[Answer]:
        """Step until these answers have ended. Raises AnswerFailed."""
        while any(answer.end is None for answer in answers):
            self.step()
        for answer in answers:
            assert answer.finished.completion_tokens
        self.prepare()
        return answers

    def prepare(self) -> None:
        """Make later steps faster at once, not while the next request waits."""
        while self.engine._prepare_runners():
            pass

    def ask(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int | Sequence[int],
        params: SamplingParams = GREEDY,
    ) -> Sequence[Answer]:
        """Submit all prompts at the same time; run until all answers end. Raises AnswerFailed."""
        counts = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
        return self.run([self.submit(p, n, params) for p, n in zip(prompts, counts, strict=True)])

    def cancel(self, answers: Sequence[Answer]) -> None:
        """Cancel these answers."""
        names = {id(answer): name for name, answer in self._answers.items()}
        for answer in answers:
            if answer.end is None:
                self.engine.cancel(names[id(answer)])
        while any(answer.end is None for answer in answers):
            self.step()
