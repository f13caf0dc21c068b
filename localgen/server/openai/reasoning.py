"""Reasoning options of OpenAI requests: effort, and budgets under the names of several servers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from localgen.backends.errors import InvalidRequest
from localgen.server.openai.messages import ChatTemplateKwargs
from localgen.server.requests.body import RequestBody, StrictModel

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def no_limit_if_negative(max_tokens: Any) -> Any:
    """None for -1, as other servers have it."""
    return None if type(max_tokens) is int and max_tokens == -1 else max_tokens


# most tokens of reasoning; None: no limit
TokenBudget = Annotated[
    Annotated[int, Field(ge=0, lt=2**63)] | None, BeforeValidator(no_limit_if_negative)
]


class OpenRouterReasoning(StrictModel):
    """OpenRouter's `reasoning`. exclude: the answer always has its reasoning, so only false."""

    effort: Effort | None = None
    max_tokens: TokenBudget = None
    enabled: bool | None = None
    exclude: Literal[False] | None = None


class ThinkingBudgetFields(RequestBody):
    """The most tokens of reasoning, by the names of Qwen's API, of llama-server (two), of vLLM."""

    thinking_budget: TokenBudget = None
    thinking_budget_tokens: TokenBudget = None
    reasoning_budget_tokens: TokenBudget = None
    thinking_token_budget: TokenBudget = None

    def chosen_thinking_budget(self, *others: int | None) -> int | None:
        """The budget. others: given elsewhere. Raises InvalidRequest if there are several."""
        given = {*others, *(getattr(self, name) for name in ThinkingBudgetFields.model_fields)}
        given.discard(None)
        if len(given) > 1:
            raise InvalidRequest(
                f"thinking budgets of {' and '.join(map(str, sorted(given)))} tokens: give one",
                param="thinking_budget",
            )
        return next(iter(given), None)


class ReasoningFields(RequestBody):
    """Fields that switch reasoning on and off or set its effort.

    reasoning_effort is OpenAI's, reasoning OpenRouter's, chat_template_kwargs vLLM's and
    llama-server's.
    """

    reasoning_effort: Effort | None = None
    reasoning: OpenRouterReasoning | None = None
    chat_template_kwargs: ChatTemplateKwargs | None = None

    def reasoning_settings(self) -> tuple[bool | None, Effort | None]:
        """Return the switch and the effort, each None if not given.

        Raises InvalidRequest if the fields contradict each other.
        """
        settings = self.chat_template_kwargs or ChatTemplateKwargs()
        nested = self.reasoning or OpenRouterReasoning()
        thinking = nested.enabled if settings.enable_thinking is None else settings.enable_thinking
        if self.reasoning_effort and nested.effort and self.reasoning_effort != nested.effort:
            raise InvalidRequest(
                "give reasoning_effort or reasoning.effort, not both", param="reasoning_effort"
            )
        if None not in (settings.enable_thinking, nested.enabled) and thinking != nested.enabled:
            raise InvalidRequest(
                "give reasoning.enabled or enable_thinking, not both", param="reasoning"
            )
        effort = self.reasoning_effort or nested.effort
        if settings.enable_thinking is not None and effort is not None:
            raise InvalidRequest(
                "give reasoning_effort or enable_thinking, not both", param="reasoning_effort"
            )
        if effort is not None and thinking is (effort == "none"):
            raise InvalidRequest(
                f"reasoning.enabled is {str(thinking).lower()} and the effort {effort}: give one",
                param="reasoning",
            )
        return thinking, effort
