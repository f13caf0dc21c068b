"""A conversation as an immutable value: changes return a new one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from localgen.backends.errors import InvalidRequest
from localgen.backends.types import Message, ToolCall
from localgen.mcp_tools.call_arguments import parse_arguments


@dataclass(frozen=True, slots=True)
class ToolStep:
    """A part of an answer that ends with tool calls. results: of the calls, in their order."""

    text: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    results: tuple[str, ...]

    def __post_init__(self) -> None:
        """Raise ValueError unless each call has a result."""
        if len(self.calls) != len(self.results):
            raise ValueError(f"{len(self.calls)} tool calls have {len(self.results)} results")

    def messages(self, *, with_reasoning: bool = False) -> tuple[Message, ...]:
        """The message with the calls, and one for each result.

        Arguments that are not a JSON object are `{}`, also without any: servers refuse others, and
        the result of such a call has them.
        """
        calls = tuple(
            call
            if call.arguments and parse_arguments(call.arguments) is not None
            else replace(call, arguments="{}")
            for call in self.calls
        )
        thought = self.reasoning if with_reasoning and self.reasoning else None
        results = (
            Message("tool", result, tool_call_id=call.id, name=call.name)
            for call, result in zip(self.calls, self.results, strict=True)
        )
        return (Message("assistant", self.text, thought, calls), *results)


# of the turn that replaces those before it
SUMMARY_PROMPT = (
    "Summarize our conversation so far, so that it can be continued from the summary alone: what "
    "was asked, what was found and decided, names, numbers and code that matter, what is open."
)


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt and its answer.

    stopped: the answer was cut short by the user or an error. reasoning: the model's reasoning
    before the answer. summary: one line of statistics, shown under the answer. steps: tool calls
    and their results, before the answer.
    """

    prompt: str
    answer: str
    stopped: bool = False
    reasoning: str = ""
    summary: str = ""
    steps: tuple[ToolStep, ...] = ()

    @property
    def is_unanswered(self) -> bool:
        """True if the answer was stopped before any text, reasoning or tool call."""
        return self.stopped and not (self.answer or self.reasoning or self.steps)

    @property
    def num_chars(self) -> int:
        """Characters of the prompt, the answer and the tool calls, without reasoning."""
        steps = (message for step in self.steps for message in step.messages())
        return len(self.prompt + self.answer) + sum(map(message_chars, steps))


def message_chars(message: Message) -> int:
    """Characters of the content and the tool calls of a message, without reasoning."""
    calls = sum(len(call.name) + len(call.arguments) for call in message.tool_calls)
    return len(message.content) + calls


@dataclass(frozen=True, slots=True)
class Conversation:
    """A system prompt, if any, and the turns so far."""

    system: str | None = None
    turns: tuple[Turn, ...] = ()

    def messages(self, *, with_reasoning: bool = False) -> tuple[Message, ...]:
        """Return the messages, oldest first. with_reasoning: include the reasoning of answers.

        Unanswered prompts are left out.
        """
        messages = [Message("system", self.system)] if self.system else []
        for turn in self.turns:
            if turn.is_unanswered:
                continue
            thought = turn.reasoning if with_reasoning and turn.reasoning else None
            messages.append(Message("user", turn.prompt))
            for step in turn.steps:
                messages += step.messages(with_reasoning=with_reasoning)
            messages.append(Message("assistant", turn.answer, thought))
        return tuple(messages)

    def messages_with_prompt(
        self, prompt: str, *, with_reasoning: bool = False
    ) -> tuple[Message, ...]:
        """Return the messages of a request: the conversation and a new prompt."""
        return (*self.messages(with_reasoning=with_reasoning), Message("user", prompt))

    def with_turn(self, turn: Turn) -> Conversation:
        return replace(self, turns=(*self.turns, turn))

    def with_system(self, system: str | None) -> Conversation:
        return replace(self, system=system or None)

    def undo(self, turns: int = 1) -> Conversation:
        """Return the conversation without its last turns.

        Raises InvalidRequest if there are fewer turns than that.
        """
        if not 1 <= turns <= len(self.turns):
            raise InvalidRequest(f"cannot undo {turns} of {len(self.turns)} turns")
        return replace(self, turns=self.turns[:-turns])

    def cleared(self) -> Conversation:
        """Return a conversation with the same system prompt and no turns."""
        return replace(self, turns=())


def conversation_from_messages(
    messages: Sequence[Message],
    stopped_indices: frozenset[int],
    steps: Mapping[int, tuple[ToolStep, ...]],
) -> Conversation:
    """Build a conversation from messages. stopped_indices: messages that were cut short.

    steps: tool calls before a message, by its index.

    Raises InvalidRequest unless the messages are an optional system message, then user and
    assistant messages in turn.
    """
    system = messages[0].content if messages and messages[0].role == "system" else None
    first = 0 if system is None else 1
    spoken = messages[first:]
    expected = ("user", "assistant") * (len(spoken) // 2)
    if tuple(message.role for message in spoken) != expected:
        raise InvalidRequest("user and assistant turns do not alternate")
    turns = [
        Turn(
            spoken[at].content,
            spoken[at + 1].content,
            first + at + 1 in stopped_indices,
            spoken[at + 1].reasoning or "",
            steps=steps.get(first + at + 1, ()),
        )
        for at in range(0, len(spoken), 2)
    ]
    return Conversation(system, tuple(turns))
