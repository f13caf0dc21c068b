"""Request schemas of the Ollama API. Unknown fields are rejected by name."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from localgen.backends.errors import InvalidRequest
from localgen.backends.model_info import LoadOptions
from localgen.backends.sampling_params import ANY_JSON_OBJECT, SamplingParams
from localgen.backends.types import Infill, Message
from localgen.server.models.resident import KeepAlive
from localgen.server.ollama.messages import OllamaChatMessage, OllamaTool, from_ollama_messages
from localgen.server.ollama.options import OllamaOptions, parse_ollama_keep_alive
from localgen.server.openai.tools import parse_tools
from localgen.server.requests.body import RequestBody, reject_unsupported_fields
from localgen.server.requests.parts import reject_images

# only meaningful where prompts are truncated or contexts shifted, which never happens here
_UNSUPPORTED_TRUNCATION: dict[str, tuple[object, ...]] = {"truncate": (False,), "shift": (False,)}
_UNSUPPORTED = _UNSUPPORTED_TRUNCATION | {"_debug_render_only": (False,)}
_UNSUPPORTED_IN_GENERATE = _UNSUPPORTED | {
    "template": ("",),
    "context": ([],),
    "images": ([],),
    "width": (0,),
    "height": (0,),
    "steps": (0,),
}
ThinkLevel = bool | Literal["low", "medium", "high"]


class _OllamaGenerationRequest(RequestBody):
    """Fields of chat and generate requests."""

    model: Annotated[str, Field(min_length=1)]
    stream: bool | None = True
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    keep_alive: float | str | None = None
    think: ThinkLevel | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def is_streaming(self) -> bool:
        return self.stream is not False

    @property
    def parsed_keep_alive(self) -> KeepAlive | None:
        """The new idle time of the model. None: no change."""
        return parse_ollama_keep_alive(self.keep_alive)

    @property
    def ctx(self) -> int | None:
        return self.options.num_ctx if self.options else None

    def to_load_options(self) -> LoadOptions:
        return self.options.to_load_options() if self.options else LoadOptions()

    def to_sampling_params(self) -> SamplingParams:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        return SamplingParams(
            **(self.options or OllamaOptions()).sampling_fields(),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            json_schema=self._json_schema_text(),
        )

    def _thinking_fields(self) -> dict[str, Any]:
        is_effort = isinstance(self.think, str)
        return {"reasoning_effort" if is_effort else "thinking": self.think}

    def _json_schema_text(self) -> str | None:
        if isinstance(self.format, dict):
            return json.dumps(self.format)
        return ANY_JSON_OBJECT if self.format == "json" else None


class OllamaChatRequest(_OllamaGenerationRequest):
    """POST /api/chat. Without messages the model is only loaded, or unloaded."""

    messages: list[OllamaChatMessage] | None = None
    tools: list[OllamaTool] | None = None

    @model_validator(mode="before")
    @classmethod
    def _reject_unsupported(cls, body: Any) -> Any:
        return reject_unsupported_fields(body, _UNSUPPORTED)

    def to_request_fields(self) -> dict[str, Any]:
        """Keyword arguments for Request. Raises InvalidRequest for invalid fields."""
        messages = from_ollama_messages(self.messages or ())
        return {
            "messages": messages,
            "tools": parse_tools(self.tools or ()),
            **self._thinking_fields(),
        }


class OllamaGenerateRequest(_OllamaGenerationRequest):
    """POST /api/generate. Without a prompt the model is only loaded, or unloaded.

    raw: use the prompt without the chat template. suffix: the text after the answer; the prompt is
    then the text before it, without the template.
    """

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _reject_unsupported(cls, body: Any) -> Any:
        return reject_unsupported_fields(reject_images(body), _UNSUPPORTED_IN_GENERATE)

    def to_request_fields(self) -> dict[str, Any]:
        """Keyword arguments for Request. Raises InvalidRequest for invalid fields."""
        if self.raw and self.system:
            raise InvalidRequest(
                "raw prompts take no system message: put it into the prompt", param="raw"
            )
        if self.raw and self.think:
            raise InvalidRequest("raw prompts do not support think: leave it out", param="think")
        if self.suffix:
            if self.system or self.think:
                raise InvalidRequest(
                    "a suffix is for plain prompts: leave system and think out", param="suffix"
                )
            return {"prompt": self.prompt or "", "infill": Infill(self.suffix)}
        if self.raw:
            return {"prompt": self.prompt}
        system = (Message("system", self.system),) if self.system else ()
        messages = (*system, Message("user", self.prompt or ""))
        return {"messages": messages, **self._thinking_fields()}


class _ModelNameRequest(RequestBody):
    """A request that names a model. Older clients call the field `name`."""

    model: str = ""
    name: str = ""

    @property
    def requested_name(self) -> str:
        """`model` or `name`. Raises InvalidRequest if both are missing or they differ."""
        if self.model and self.name and self.model != self.name:
            raise InvalidRequest(
                f"model is {self.model} and name is {self.name}: give one", param="name"
            )
        if not self.model and not self.name:
            raise InvalidRequest("model is missing", param="model")
        return self.model or self.name


class ShowRequest(_ModelNameRequest):
    """POST /api/show."""

    @model_validator(mode="before")
    @classmethod
    def _reject_unsupported(cls, body: Any) -> Any:
        same: dict[str, tuple[object, ...]] = {"system": ("",), "template": ("",), "options": ({},)}
        return reject_unsupported_fields(body, same | {"verbose": (False,)})


class DeleteRequest(_ModelNameRequest):
    """DELETE /api/delete. keep_files: only unload the model, if it is idle."""

    keep_files: bool = False


class PullRequest(_ModelNameRequest):
    """POST /api/pull."""

    stream: bool | None = True

    @model_validator(mode="before")
    @classmethod
    def _reject_unsupported(cls, body: Any) -> Any:
        same: dict[str, tuple[object, ...]] = {"insecure": (False,)}
        return reject_unsupported_fields(body, same | {"username": ("",), "password": ("",)})


class CopyRequest(RequestBody):
    """POST /api/copy."""

    source: str = Field(min_length=1)
    destination: str = Field(min_length=1)
