"""What requests of Ollama's protocol may hold. Everything else is refused, by name."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from localgen.backends.errors import InvalidRequest
from localgen.backends.model_info import LoadOptions
from localgen.backends.types import Message, SamplingParams
from localgen.hub.resolve import require_name
from localgen.server.models.resident import KeepAlive
from localgen.server.ollama.messages import ChatMessage, ToolDefinition, to_messages
from localgen.server.ollama.options import Options, parse_ollama_keep_alive
from localgen.server.openai.tools import tools_of
from localgen.server.requests.body import Body, without_unsupported

# what only means something where prompts are cut or contexts shifted, which never happens here
_CUTTING: dict[str, tuple[object, ...]] = {"truncate": (False,), "shift": (False,)}
_UNSUPPORTED = _CUTTING | {"_debug_render_only": (False,)}
_UNSUPPORTED_IN_GENERATE = _UNSUPPORTED | {
    "suffix": ("",),
    "template": ("",),
    "context": ([],),
    "images": ([],),
    "width": (0,),
    "height": (0,),
    "steps": (0,),
}
Think = bool | Literal["low", "medium", "high"]


def _named(name: str) -> str:
    require_name(name)
    return name


Name = Annotated[str, AfterValidator(_named)]


class _Generate(Body):
    """What chat and generate share."""

    model: Annotated[Name, Field(min_length=1)]
    stream: bool | None = True
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: Options | None = None
    keep_alive: float | str | None = None
    think: Think | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def streams(self) -> bool:
        return self.stream is not False

    @property
    def idle(self) -> KeepAlive | None:
        """How long the model then stays; None: no change."""
        return parse_ollama_keep_alive(self.keep_alive)

    @property
    def ctx(self) -> int | None:
        return self.options.num_ctx if self.options else None

    def load(self) -> LoadOptions:
        return self.options.load() if self.options else LoadOptions()

    def to_params(self) -> SamplingParams:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        return SamplingParams(
            **(self.options or Options()).sampling(),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            json_schema=self._schema(),
        )

    def _thinking(self) -> dict[str, Any]:
        is_effort = isinstance(self.think, str)
        return {"reasoning_effort" if is_effort else "thinking": self.think}

    def _schema(self) -> str | None:
        if isinstance(self.format, dict):
            return json.dumps(self.format)
        return '{"type": "object"}' if self.format == "json" else None


class ChatRequest(_Generate):
    """POST /api/chat. Without messages the model is only loaded, or unloaded."""

    messages: list[ChatMessage] | None = None
    tools: list[ToolDefinition] | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, body: Any) -> Any:
        return without_unsupported(body, _UNSUPPORTED)

    def conversation(self) -> dict[str, Any]:
        """The fields of a Request that say what is asked. InvalidRequest."""
        messages = to_messages(self.messages or ())
        return {"messages": messages, "tools": tools_of(self.tools or ()), **self._thinking()}


class GenerateRequest(_Generate):
    """POST /api/generate. Without a prompt the model is only loaded, or unloaded.

    raw: the prompt is used as it is, not as a turn of a chat.
    """

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, body: Any) -> Any:
        return without_unsupported(body, _UNSUPPORTED_IN_GENERATE)

    def conversation(self) -> dict[str, Any]:
        """The fields of a Request that say what is asked. InvalidRequest."""
        if self.raw and self.system:
            raise InvalidRequest("a raw prompt has no system: put it into the prompt", param="raw")
        if self.raw and self.think:
            raise InvalidRequest("think is for chats, a raw prompt is none", param="think")
        if self.raw:
            return {"prompt": self.prompt}
        system = (Message("system", self.system),) if self.system else ()
        messages = (*system, Message("user", self.prompt or ""))
        return {"messages": messages, **self._thinking()}


class _OfModel(Body):
    """A request about a model, by its name; older clients call the field `name`."""

    model: Name = ""
    name: Name = ""

    @property
    def wanted(self) -> str:
        """InvalidRequest: neither, or both and different."""
        if self.model and self.name and self.model != self.name:
            raise InvalidRequest(
                f"model is {self.model} and name is {self.name}: give one", param="name"
            )
        if not self.model and not self.name:
            raise InvalidRequest("model is missing", param="model")
        return self.model or self.name


class ShowRequest(_OfModel):
    """POST /api/show."""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, body: Any) -> Any:
        same: dict[str, tuple[object, ...]] = {"system": ("",), "template": ("",), "options": ({},)}
        return without_unsupported(body, same | {"verbose": (False,)})


class DeleteRequest(_OfModel):
    """DELETE /api/delete."""


class PullRequest(_OfModel):
    """POST /api/pull."""

    stream: bool | None = True

    @model_validator(mode="before")
    @classmethod
    def _known(cls, body: Any) -> Any:
        same: dict[str, tuple[object, ...]] = {"insecure": (False,)}
        return without_unsupported(body, same | {"username": ("",), "password": ("",)})


class CopyRequest(Body):
    """POST /api/copy."""

    source: Annotated[Name, Field(min_length=1)]
    destination: str = Field(min_length=1)
