"""Answer the same requests with several engines, which alternate in short turns."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from benchmarks.answers import Answer
from benchmarks.session import OwnTime, Session
from localgen.backends.engine.speculation.drafter import Drafter
from localgen.backends.runner.interface import ModelRunner
from localgen.backends.sampling_params import SamplingParams

# duration of a turn, at least one step. Alternating after every step would make steps slower than
# in normal operation (cold processor caches, llama.cpp graphs of another size): one-token steps of
# a model of 6 M parameters by up to a half
TURN_S = 0.01


@dataclass(frozen=True, slots=True)
class EngineSide:
    """An engine and a clock that only runs while the engine computes."""

    session: Session
    clock: OwnTime

    @classmethod
    def from_runner(cls, runner: ModelRunner, vocab: int, drafters: Seq[Drafter]) -> EngineSide:
        """Create an engine with a runner shared with other sides.

        The runner must not run ahead: a step launched for one side would be discarded by the next.
        """
        assert not runner.limits.runs_ahead
        clock = OwnTime()
        session = Session(runner, vocab, itl_target_ms=2000.0, drafters=drafters, clock=clock)
        return cls(session, clock)

    def run_turn(self, answers: Seq[Answer]) -> None:
        """Run one turn, shorter if all answers end."""
        until_s = self.clock() + TURN_S
        while self.clock() < until_s and not _are_done(answers):
            with self.clock:
                self.session.step()


def ask(
    sides: Seq[EngineSide],
    prompts: Seq[Seq[int]],
    tokens: int,
    params: SamplingParams,
    chance: random.Random,
) -> list[Seq[Answer]]:
    """Submit all prompts to each side and alternate the sides; return the answers by side.

    The side with the fewest generated tokens runs next, so that disturbances of the machine affect
    all sides alike. Ties are broken at random, because a turn influences the next one, and because
    the side that computes a prompt first fills the prefix cache for the others. Raises
    AnswerFailed.
    """
    by_side = [
        [side.session.submit(prompt, tokens, params) for prompt in prompts] for side in sides
    ]
    while running := [at for at, answers in enumerate(by_side) if not _are_done(answers)]:
        generated = {at: _num_tokens(by_side[at]) for at in running}
        at = min(running, key=lambda at: (generated[at], chance.random()))
        sides[at].run_turn(by_side[at])
    assert all(answer.finished for answers in by_side for answer in answers)
    return list(by_side)


def _are_done(answers: Seq[Answer]) -> bool:
    return all(answer.end is not None for answer in answers)


def _num_tokens(answers: Seq[Answer]) -> int:
    return sum(answer.arrivals[-1][1] for answer in answers if answer.arrivals)
