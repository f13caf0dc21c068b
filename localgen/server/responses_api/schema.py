"""Request schema of the Responses API. Unknown fields are rejected by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from localgen.backends.errors import InvalidRequest
from localgen.backends.sampling_params import ANY_JSON_OBJECT, SamplingParams
from localgen.backends.types import OVERFLOW_DROP_OLDEST, OVERFLOW_ERROR, Message
from localgen.server.openai.reasoning import Effort, TokenBudget
from localgen.server.openai.tools import (
    FunctionDefinition,
    FunctionTool,
    parse_tool_choice,
    parse_tools,
)
from localgen.server.requests.body import (
    RequestBody,
    StrictModel,
    drop_fields,
    reject_unsupported_fields,
)
from localgen.server.requests.turns import join_turns
from localgen.server.responses_api.items import (
    InputItem,
    qualified_name,
    to_messages,
)

# accepted without effect: none of them changes a token of the answer
_HARMLESS = (
    *("service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
    # of tools that the server runs: there are none
    *("client_metadata", "max_tool_calls"),
)
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
}


class NamespaceFunction(FunctionDefinition):
    """A function in a namespace."""

    type: Literal["function"]
    defer_loading: Literal[False] = False


class ResponseTool(FunctionDefinition):
    """A function of the client, or a namespace of some, seen by the model as NAMESPACE.NAME."""

    type: Literal["function", "namespace"]
    tools: list[NamespaceFunction] | None = None
    defer_loading: Literal[False] = False

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_types(cls, tool: Any) -> Any:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind not in ("function", "namespace"):
            raise InvalidRequest(
                f"tools: type {kind} is not supported, only functions of the client: leave it out",
                param="tools",
            )
        return tool

    def functions(self) -> list[FunctionTool]:
        """The functions, by the names that the model sees."""
        found: list[FunctionDefinition] = [self]
        if self.type == "namespace":
            found = [
                one.model_copy(update={"name": qualified_name(self.name, one.name)})
                for one in self.tools or ()
            ]
        return [FunctionTool(type="function", function=_definition(one)) for one in found]


def _definition(function: FunctionDefinition) -> FunctionDefinition:
    return FunctionDefinition(
        name=function.name, description=function.description, parameters=function.parameters
    )


class TextFormat(StrictModel):
    """json_object: any JSON object. json_schema: an object that is valid under the schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    def schema_text(self) -> str | None:
        """The schema as JSON text. None: no constraint. Raises InvalidRequest without a schema."""
        if self.type != "json_schema":
            return ANY_JSON_OBJECT if self.type == "json_object" else None
        if self.schema_ is None:
            raise InvalidRequest("text.format.schema is missing", param="text.format.schema")
        return json.dumps(self.schema_)


class TextOptions(StrictModel):
    """verbosity: no effect."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(StrictModel):
    """summary: no effect, reasoning is given whole. max_tokens: of reasoning, as in OpenRouter."""

    effort: Effort | None = None
    max_tokens: TokenBudget = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesStreamOptions(StrictModel):
    """include_obfuscation: no effect, events are not padded."""

    include_obfuscation: bool | None = None


class ResponsesRequest(RequestBody):
    """POST /v1/responses.

    reasoning.effort applies to models whose chat template has it, as in the other APIs.
    """

    model: str | None = None
    input: Annotated[str, Field(min_length=1)] | Annotated[list[InputItem], Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    # reasoning is given whole, without being asked for
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    top_logprobs: Literal[0] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_harmless(cls, body: Any) -> Any:
        return drop_fields(reject_unsupported_fields(body, _UNSUPPORTED), _HARMLESS)

    def to_conversation(self, earlier: Sequence[Message]) -> tuple[Message, ...]:
        """The messages before the answer, without the instructions. Raises InvalidRequest.

        earlier: messages up to the response of previous_response_id.
        """
        new = (
            [Message("user", self.input)]
            if isinstance(self.input, str)
            else to_messages(self.input, earlier)
        )
        return (*earlier, *new)

    def to_request_fields(self, conversation: Sequence[Message]) -> dict[str, Any]:
        """Keyword arguments for Request. Raises InvalidRequest."""
        head = [Message("system", self.instructions)] if self.instructions else []
        tools = parse_tools([one for tool in self.tools or () for one in tool.functions()])
        return {
            "messages": join_turns([*head, *conversation]),
            "tools": tools,
            "tool_choice": parse_tool_choice(self.tool_choice, tools),
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "on_overflow": OVERFLOW_DROP_OLDEST if self.truncation == "auto" else OVERFLOW_ERROR,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
        }

    def namespaces(self) -> dict[str, tuple[str, str]]:
        """The namespace and the name of each function in one, by the name that the model sees."""
        return {
            qualified_name(tool.name, one.name): (tool.name, one.name)
            for tool in self.tools or ()
            for one in tool.tools or ()
        }

    def to_sampling_params(self) -> SamplingParams:
        wanted = self.text.format if self.text else None
        return SamplingParams(
            max_tokens=self.max_output_tokens,
            thinking_budget=self.reasoning.max_tokens if self.reasoning else None,
            temperature=self.temperature,
            top_p=self.top_p,
            json_schema=None if wanted is None else wanted.schema_text(),
        )

    def echo_fields(self) -> dict[str, Any]:
        """The fields of the request that a response repeats."""
        defaults: dict[str, Any] = {
            "instructions": None,
            "max_output_tokens": None,
            "metadata": {},
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": True,
            "temperature": None,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": None,
            "truncation": "disabled",
            "user": None,
        }
        given = self.model_dump(
            mode="json", by_alias=True, exclude_none=True, include=set(defaults)
        )
        return {name: given.get(name, default) for name, default in defaults.items()}
