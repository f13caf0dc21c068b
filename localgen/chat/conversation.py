"""What has been said: a value that each turn, undo or load replaces by a new one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from localgen.backends.errors import InvalidRequest
from localgen.backends.types import Message


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt and its answer. stopped: it was cut short, by the user or by a fault.

    reasoning: what the model thought before. summary: how it was served, for people to read.
    """

    prompt: str
    answer: str
    stopped: bool = False
    reasoning: str = ""
    summary: str = ""

    @property
    def is_unanswered(self) -> bool:
        """Whether it was cut short before its first word."""
        return self.stopped and not self.answer and not self.reasoning


@dataclass(frozen=True, slots=True)
class Conversation:
    """A system prompt, if any, and the turns so far."""

    system: str | None = None
    turns: tuple[Turn, ...] = ()

    def messages(self, *, with_reasoning: bool = False) -> tuple[Message, ...]:
        """Everything said so far, oldest first; what was thought only if asked for.

        Prompts that were never answered are left out.
        """
        said = [Message("system", self.system)] if self.system else []
        for turn in self.turns:
            if turn.is_unanswered:
                continue
            thought = turn.reasoning if with_reasoning and turn.reasoning else None
            said += [Message("user", turn.prompt), Message("assistant", turn.answer, thought)]
        return tuple(said)

    def messages_with_prompt(
        self, prompt: str, *, with_reasoning: bool = False
    ) -> tuple[Message, ...]:
        """The messages of a request for an answer to this prompt."""
        return (*self.messages(with_reasoning=with_reasoning), Message("user", prompt))

    def with_turn(self, turn: Turn) -> Conversation:
        return replace(self, turns=(*self.turns, turn))

    def with_system(self, system: str | None) -> Conversation:
        return replace(self, system=system or None)

    def undo(self, turns: int = 1) -> Conversation:
        """Without the last turns. InvalidRequest: there are not that many."""
        if not 1 <= turns <= len(self.turns):
            raise InvalidRequest(f"cannot undo {turns} of {len(self.turns)} turns")
        return replace(self, turns=self.turns[:-turns])

    def cleared(self) -> Conversation:
        """No turns; the system prompt stays."""
        return replace(self, turns=())


def conversation_from_messages(
    messages: Sequence[Message], stopped_indices: frozenset[int]
) -> Conversation:
    """The conversation of a list of messages; stopped_indices: indices of answers that were cut
    short.

    InvalidRequest: not an optional system message, then user and assistant in turn.
    """
    system = messages[0].content if messages and messages[0].role == "system" else None
    first = 0 if system is None else 1
    spoken = messages[first:]
    expected = ("user", "assistant") * (len(spoken) // 2)
    if tuple(message.role for message in spoken) != expected:
        raise InvalidRequest("user and assistant do not take turns in it")
    turns = [
        Turn(
            spoken[at].content,
            spoken[at + 1].content,
            first + at + 1 in stopped_indices,
            spoken[at + 1].reasoning or "",
        )
        for at in range(0, len(spoken), 2)
    ]
    return Conversation(system, tuple(turns))
