"""Messages of a chat as requests hold them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from localgen.backends.errors import InvalidRequest
from localgen.backends.types import Message
from localgen.server.openai.tools import MessageCall, calls_of
from localgen.server.requests.body import Strict, without_unsupported

_UNSUPPORTED_IN_MESSAGES: dict[str, tuple[object, ...]] = {
    "refusal": (),
    "function_call": (),
    "audio": (),
    "annotations": ([],),
}


# fields that are for one role
_OWNERS = {
    "tool_calls": "assistant",
    "reasoning_content": "assistant",
    "tool_call_id": "tool",
    "name": "tool",
}


class TextPart(Strict):
    """A part of a message; text is the only kind there is."""

    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    """One turn. `developer` is what newer clients call `system`.

    reasoning_content: what an assistant thought before. name: of the function that a message of
    role tool answers for; other roles have no use for it.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    reasoning_content: str | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, body: Any) -> Any:
        return without_unsupported(body, _UNSUPPORTED_IN_MESSAGES)

    def to_message(self, at: int) -> Message:
        """at: its place among the messages. InvalidRequest: it has not what its role needs."""
        place = f"messages[{at}]"
        if self.content is None and not self.tool_calls:
            raise InvalidRequest(f"{place}.content is missing", param=f"{place}.content")
        if self.role == "tool" and self.tool_call_id is None:
            where = f"{place}.tool_call_id"
            raise InvalidRequest(f"{where} is missing: which call is answered?", param=where)
        for field, role in _OWNERS.items():
            if getattr(self, field) and self.role != role:
                where = f"{place}.{field}"
                raise InvalidRequest(f"{where} is for the role {role}: leave it out", param=where)
        return Message(
            "system" if self.role == "developer" else self.role,
            _text_of(self.content),
            self.reasoning_content,
            calls_of(self.tool_calls or (), f"{place}.tool_calls"),
            self.tool_call_id,
            self.name,
        )


def _text_of(content: str | list[TextPart] | None) -> str:
    if isinstance(content, list):
        return "".join(part.text for part in content)
    return content or ""


class TemplateSettings(Strict):
    """Variables of a chat template that a request may set."""

    enable_thinking: bool | None = None
