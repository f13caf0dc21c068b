"""Request schemas of the OpenAI and native APIs. Unknown fields are rejected by name."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from localgen.backends.adapters import AdapterRef
from localgen.backends.errors import InvalidRequest
from localgen.backends.model_info import LoadOptions
from localgen.backends.sampling_params import ANY_JSON_OBJECT, SAMPLERS, SamplingParams
from localgen.backends.types import OVERFLOW_ERROR, Infill, Message, OnOverflow
from localgen.config import BadSetting, parse_keep_alive
from localgen.hub.resolve import did_you_mean
from localgen.server.openai.messages import ChatMessage
from localgen.server.openai.reasoning import (
    ReasoningFields,
    ThinkingBudgetFields,
    no_limit_if_negative,
)
from localgen.server.openai.tools import FunctionTool, parse_tool_choice, parse_tools
from localgen.server.requests.body import (
    Int32,
    RequestBody,
    StrictModel,
    drop_fields,
    reject_unsupported_fields,
    with_sampler_fields,
)
from localgen.server.requests.choices import NUM_SEEDS
from localgen.server.requests.presets import find_lora
from localgen.server.requests.samplers import with_only_samplers

# integers of 64 bits on the wire to the engine
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=1, lt=2**63)]
MAX_N = 16
# limit of prompts times n in one request
MAX_CHOICES = 64

# fields that only other servers support, with their values that have no effect. Listed so that
# the error says "not supported" instead of "unknown".
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    # vLLM's and llama.cpp's, with what is always the case here
    "skip_special_tokens": (True,),
    "echo": (False,),
    "suffix": ("",),
}
# accepted without effect: none of them changes a token of an answer. Nothing is stored, prompts
# are always cached, for every slot, and fields of a response are chosen on llama-server's routes
_HARMLESS = (
    *("metadata", "service_tier", "store", "verbosity", "prediction"),
    *("prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
    *("cache_prompt", "id_slot", "response_fields"),
)


class StreamOptions(StrictModel):
    """include_usage: send a last chunk with usage and no choices.

    continuous_usage_stats: no effect, the chunks have localgen.num_tokens. include_obfuscation: no
    effect, chunks are not padded.
    """

    include_usage: bool = False
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(StrictModel):
    """A JSON schema for the answer. Always enforced: name, description and strict are ignored."""

    model_config = ConfigDict(populate_by_name=True)
    name: str = ""
    description: str | None = None
    body: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """json_object: any JSON object, or with `schema`, as llama-server has it, one that is valid.

    json_schema: an object that is valid under the schema.
    """

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    body: dict[str, Any] | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _require_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise InvalidRequest(
                "response_format: type json_schema needs json_schema, other types do not take it",
                param="response_format",
            )
        if self.body is not None and self.type != "json_object":
            raise InvalidRequest(
                "response_format: schema is only valid for type json_object",
                param="response_format",
            )
        return self

    def schema_text(self) -> str | None:
        """The schema as JSON text. None: no constraint."""
        body = self.json_schema.body if self.json_schema else self.body
        if body is not None:
            return json.dumps(body)
        return ANY_JSON_OBJECT if self.type == "json_object" else None


def _as_seed(seed: Any) -> Any:
    """None, a random seed, for -1; others are cut to 32 bits."""
    if type(seed) is not int:
        return seed
    return None if seed == -1 else seed % NUM_SEEDS


def _off_if_negative(top_k: Any) -> Any:
    return 0 if type(top_k) is int and top_k == -1 else top_k


def _as_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


if TYPE_CHECKING:
    _SamplerFields = RequestBody
else:
    _SamplerFields = with_sampler_fields(RequestBody, SAMPLERS)


class LoraScale(StrictModel):
    """An adapter of a request, as in llama-server. id: its name in models.toml."""

    id: str
    scale: float | None = None


class _GenerationRequest(ThinkingBudgetFields, _SamplerFields):
    """Fields of chat and completion requests. The engine validates sampling parameters.

    n_predict: llama-server's max_tokens; -1 for no limit, 0 to compute the prompt only, for later
    ones. save_prefix: see Request. samplers: only these choose a token. lora: adapters, in place of
    the one that `model` names.
    """

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    user: str | None = None
    priority: Int64 = 0
    ctx: Count | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    save_prefix: bool = True
    max_tokens: Annotated[Count | None, BeforeValidator(no_limit_if_negative)] = None
    n_predict: Annotated[int, Field(ge=-1, lt=2**63)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**63)] = 0
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_as_list)] | None = (
        None
    )
    stop_token_ids: list[Int32] = Field(default_factory=list)
    ignore_eos: bool = False
    seed: Annotated[int | None, BeforeValidator(_as_seed)] = None
    top_k: Annotated[Int32 | None, BeforeValidator(_off_if_negative)] = None
    repetition_penalty: float | None = None
    samplers: list[str] | None = None
    lora: list[LoraScale] | None = None
    logit_bias: dict[Annotated[Int32, Field(strict=False)], float] | None = None  # names in JSON
    response_format: ResponseFormat | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _reject_unsupported(cls, body: Any) -> Any:
        unsupported = {
            name: values for name, values in _UNSUPPORTED.items() if name not in cls.model_fields
        }
        harmless = tuple(name for name in _HARMLESS if name not in cls.model_fields)
        return drop_fields(reject_unsupported_fields(body, unsupported), harmless)

    @model_validator(mode="after")
    def _require_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream: true", param="stream_options")
        return self

    @property
    def adapters(self) -> tuple[AdapterRef, ...]:
        """The adapters of the request. Raises InvalidRequest for an unknown one."""
        return tuple([find_lora(each.id, each.scale) for each in self.lora or ()])

    def _max_tokens(self, *names: str) -> int | None:
        """The limit of generated tokens by n_predict or one of these fields; None for none.

        Raises InvalidRequest if they have different values.
        """
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.n_predict is not None:
            given["n_predict"] = None if self.n_predict == -1 else self.n_predict
        if len(set(given.values())) > 1:
            said = " and ".join(f"{name} is {getattr(self, name)}" for name in given)
            raise InvalidRequest(f"{said}: give one", param=next(reversed(given)))
        return next(iter(given.values()), None)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def _json_schema_text(self) -> str | None:
        """The JSON schema of the answer. Raises InvalidRequest if it is set twice."""
        wanted = None if self.response_format is None else self.response_format.schema_text()
        if self.json_schema is None:
            return wanted
        if wanted is not None:
            raise InvalidRequest(
                "give response_format or json_schema, not both", param="json_schema"
            )
        plain = isinstance(self.json_schema, str)
        return str(self.json_schema) if plain else json.dumps(self.json_schema)

    def _to_sampling_params(
        self, *, max_tokens: int | None, logprobs: int | None, thinking_budget: int | None
    ) -> SamplingParams:
        """Build sampling parameters. Raises InvalidRequest if two aliases have different values."""
        special = {
            "max_tokens": max_tokens,
            "logprobs": logprobs,
            "thinking_budget": thinking_budget,
            "repeat_penalty": _one_of_synonyms(self, "repeat_penalty", "repetition_penalty"),
            "stop": tuple(self.stop or ()),
            "logit_bias": self.logit_bias or {},
            "json_schema": self._json_schema_text(),
            "infill_sampler": False,
        }
        plain = {
            field.name: _as_tuple(getattr(self, field.name))
            for field in fields(SamplingParams)
            if field.name not in special
        }
        params = SamplingParams(**plain, **special)
        return params if self.samplers is None else with_only_samplers(params, self.samplers)


class ChatPrompt(ReasoningFields):
    """The fields of a chat request that make the prompt.

    continue_final_message: vLLM's: the last message, an assistant's, is the beginning of the
    answer, which then is the rest. add_generation_prompt: false with it, and only then.
    """

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    def to_request_fields(self) -> dict[str, Any]:
        """Keyword arguments for Request: messages, tools, reasoning."""
        tools = parse_tools(self.tools or ())
        thinking, effort = self.reasoning_settings()
        messages = tuple(turn.to_message(at) for at, turn in enumerate(self.messages))
        beginning = self._beginning_of_answer(messages[-1])
        return {
            "messages": messages if beginning is None else messages[:-1],
            "prefill": beginning or "",
            "tools": tools,
            "tool_choice": parse_tool_choice(self.tool_choice, tools),
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "thinking": thinking,
            "reasoning_effort": effort,
        }

    def _beginning_of_answer(self, last: Message) -> str | None:
        """The text of the last message if the answer is to continue it. Raises InvalidRequest."""
        if not self.continue_final_message:
            if self.add_generation_prompt is False:
                raise InvalidRequest(
                    "add_generation_prompt: false needs continue_final_message: true",
                    param="add_generation_prompt",
                )
            return None
        if self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other",
                param="add_generation_prompt",
            )
        if last.role != "assistant" or last.tool_calls:
            raise InvalidRequest(
                "continue_final_message needs an assistant message without tool calls at the end",
                param="continue_final_message",
            )
        return last.content


class ChatRequest(ChatPrompt, _GenerationRequest):
    """POST /v1/chat/completions. on_overflow: see Request."""

    on_overflow: OnOverflow = OVERFLOW_ERROR
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def to_sampling_params(self) -> SamplingParams:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        return self._to_sampling_params(
            max_tokens=self._max_tokens("max_tokens", "max_completion_tokens"),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            thinking_budget=self.chosen_thinking_budget(
                self.reasoning.max_tokens if self.reasoning else None
            ),
        )


class CompletionRequest(_GenerationRequest):
    """POST /v1/completions. prompt: a string, token ids, or a list of either.

    echo: answer and logprobs begin with those of the prompt; max_tokens may then be 0.
    suffix: the text after the answer, for models that have tokens for infill.
    """

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False
    suffix: str | None = None
    max_tokens: Annotated[
        Annotated[int, Field(ge=0, lt=2**63)] | None, BeforeValidator(no_limit_if_negative)
    ] = None

    @model_validator(mode="after")
    def _validate_prompts(self) -> Self:
        if len(self.prompts) * (self.n or 1) > MAX_CHOICES:
            raise InvalidRequest(
                f"prompt: {len(self.prompts)} prompts with {self.n or 1} choices each exceed the "
                f"limit of {MAX_CHOICES} choices per request",
                param="prompt",
            )
        for prompt in self.prompts:
            # not a pydantic constraint: the errors of a union type name every member
            if isinstance(prompt, list) and not all(0 <= token < 2**31 for token in prompt):
                raise InvalidRequest("prompt: a token id is out of range", param="prompt")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """`prompt` as a list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        tokens = [token for token in self.prompt if isinstance(token, int)]
        if len(tokens) == len(self.prompt):
            return [tokens]
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]

    @property
    def infill(self) -> Infill | None:
        """The text around the answer, or None for a plain continuation."""
        return Infill(self.suffix) if self.suffix else None

    def to_sampling_params(self) -> SamplingParams:
        return self._to_sampling_params(
            max_tokens=self._max_tokens("max_tokens"),
            logprobs=self.logprobs,
            thinking_budget=self.chosen_thinking_budget(),
        )


# these make room on the server's disk, remove what others have there, or open connections
_LOCAL_OPTIONS = ("kv_ram", "kv_disk", "kv_listen", "kv_peer")


class LoadRequest(RequestBody):
    """POST /v1/models/load. stream: send progress events, then the model.

    keep_alive: idle time until the model is unloaded, such as `30s`, or None for no change.
    """

    model: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    keep_alive: str | None = None
    stream: bool = False

    def keep_alive_s(self) -> float | None:
        """Parse keep_alive, which must be set. Returns seconds, or None to never unload.

        Raises InvalidRequest if it is not a duration.
        """
        try:
            return parse_keep_alive(self.keep_alive or "", "keep_alive")
        except BadSetting as error:
            raise InvalidRequest(error.message, param="keep_alive") from error

    def require_allowed(self, *, is_local: bool) -> None:
        """Raise InvalidRequest for options that only clients on the Unix socket may set."""
        denied = [name for name in _LOCAL_OPTIONS if self.options.get(name) is not None]
        if denied and not is_local:
            raise InvalidRequest(
                f"load option {denied[0]} is not for clients over TCP: it is one of localgen serve",
                param=f"options.{denied[0]}",
            )

    def to_load_options(self) -> LoadOptions:
        """Convert. Raises InvalidRequest for an unknown option or a wrong type."""
        import msgspec

        from localgen.backends.typed_data import convert

        known = {field.name: field.name for field in fields(LoadOptions)}
        for name, value in self.options.items():
            if name not in known:
                hint = did_you_mean(name, known)
                raise InvalidRequest(f"unknown load option {name}.{hint}", param=f"options.{name}")
            # all but sizes are 32-bit numbers in an engine
            limit = 2 ** (63 if name in ("kv_ram", "kv_disk") else 31)
            if isinstance(value, int) and not -limit <= value < limit:
                raise InvalidRequest(f"load option {name} is out of range", param=f"options.{name}")
        try:
            return convert(self.options, LoadOptions)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"load options: {error}", param="options") from error


class UnloadRequest(RequestBody):
    """POST /v1/models/unload."""

    model: str


def _one_of_synonyms(body: BaseModel, name: str, other: str) -> Any:
    value, alias = getattr(body, name), getattr(body, other)
    if value is not None and alias is not None and value != alias:
        raise InvalidRequest(f"{name} is {value} and {other} is {alias}: give one", param=other)
    return alias if value is None else value


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
