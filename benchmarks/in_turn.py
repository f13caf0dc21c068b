"""Engines that answer the same side by side, each for a moment in turn."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from benchmarks.answers import Answer
from benchmarks.session import OwnTime, Session
from localgen.backends.engine.speculation.drafter import Drafter
from localgen.backends.runner.interface import ModelRunner
from localgen.backends.sampling_params import SamplingParams

# a turn: one step, or as many as fit. An engine on its own computes step after step, and what
# another side has left (the processor's caches, llama.cpp's graph of another size) would make each
# of them dearer: those of a token by up to a half in a model of 6 M parameters
TURN_S = 0.01


@dataclass(frozen=True, slots=True)
class Side:
    """An engine, and a clock that goes while it works."""

    session: Session
    clock: OwnTime

    @classmethod
    def over(cls, runner: ModelRunner, vocab: int, drafters: Seq[Drafter]) -> Side:
        """An engine over a runner that others have too, and that must not look ahead: what was
        computed for one side would be lost with the next one's step."""
        assert not runner.limits.runs_ahead
        clock = OwnTime()
        session = Session(runner, vocab, itl_target_ms=2000.0, drafters=drafters, clock=clock)
        return cls(session, clock)

    def go_on(self, answers: Seq[Answer]) -> None:
        """A turn, or what is left of these answers."""
        until_s = self.clock() + TURN_S
        while self.clock() < until_s and not _are_done(answers):
            with self.clock:
                self.session.step()


def ask(
    sides: Seq[Side],
    prompts: Seq[Seq[int]],
    tokens: int,
    params: SamplingParams,
    chance: random.Random,
) -> list[Seq[Answer]]:
    """What each side says, all requests at once. Whoever has said least goes on by a turn: what
    delays the machine for longer delays them all. Of equals any one, for what another's turn has
    left helps or hinders the next; who reads a prompt first saves the others that. AnswerFailed."""
    asked = [[side.session.submit(prompt, tokens, params) for prompt in prompts] for side in sides]
    while going := [at for at, answers in enumerate(asked) if not _are_done(answers)]:
        said = {at: _num_said(asked[at]) for at in going}
        at = min(going, key=lambda at: (said[at], chance.random()))
        sides[at].go_on(asked[at])
    assert all(answer.finished for answers in asked for answer in answers)
    return list(asked)


def _are_done(answers: Seq[Answer]) -> bool:
    return all(answer.end is not None for answer in answers)


def _num_said(answers: Seq[Answer]) -> int:
    return sum(answer.arrivals[-1][1] for answer in answers if answer.arrivals)
