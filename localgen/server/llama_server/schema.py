"""Request schemas of /tokenize, /detokenize and /apply-template."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import model_validator

from localgen.backends.errors import InvalidRequest
from localgen.server.openai.messages import ChatMessage
from localgen.server.openai.schema import ChatPrompt
from localgen.server.requests.body import Int32, RequestBody


class TokenizeBody(RequestBody):
    """POST /tokenize, with llama-server's fields (content) or vLLM's (prompt or messages).

    add_special, add_special_tokens: add the begin-of-sequence token if the model expects one; by
    default false and true. with_pieces: also return the text of each token.
    """

    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: Literal[True] = True
    with_pieces: bool = False
    add_generation_prompt: Literal[True] = True

    @model_validator(mode="after")
    def _require_one(self) -> Self:
        given = [self.content is not None, self.prompt is not None, self.messages is not None]
        if sum(given) != 1:
            raise InvalidRequest("give exactly one of content, prompt and messages")
        for option, field in (("add_special", "content"), ("add_special_tokens", "prompt")):
            if getattr(self, option) is not None and getattr(self, field) is None:
                raise InvalidRequest(f"{option} needs {field}: leave it out", param=option)
        return self

    def to_request_fields(self) -> dict[str, Any]:
        """Keyword arguments for Caller.new_tokenize_request. Raises InvalidRequest."""
        if self.messages is not None:
            messages = tuple(one.to_message(at) for at, one in enumerate(self.messages))
            return {"messages": messages}
        if self.prompt is not None:
            return {"prompt": self.prompt, "add_special": self.add_special_tokens is not False}
        return {"prompt": self.content, "add_special": self.add_special is True}


class DetokenizeBody(RequestBody):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[Int32]


class ApplyTemplateBody(ChatPrompt):
    """POST /apply-template."""

    model: str | None = None
