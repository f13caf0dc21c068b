"""Request schema of /completion: llama-server's names for the fields of a text completion."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from localgen.backends.errors import InvalidRequest
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Infill, InfillFile, LineLimits
from localgen.server.openai.schema import CompletionRequest
from localgen.server.requests.body import (
    Int32,
    StrictModel,
    drop_fields,
    reject_unsupported_fields,
)

# accepted without effect: a context is never shifted, and no server limits the time of a prompt
_HARMLESS = ("n_keep", "n_discard", "t_max_prompt_ms")
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "min_keep": (0,),
    "post_sampling_probs": (False,),
    "timings_per_token": (False,),
    "return_progress": (False,),
    "logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "image_data": ([],),
    "multimodal_data": ([],),
}
# lower than any logit
_BANNED = -1e6


def _as_biases(value: Any) -> Any:
    """Convert pairs of a token id and a bias, which is false for a token that must not occur."""
    if not isinstance(value, list):
        return value
    biases: dict[str, Any] = {}
    for pair in value:
        if not isinstance(pair, list) or len(pair) != 2:
            raise InvalidRequest(
                "logit_bias: use pairs of a token id and a bias", param="logit_bias"
            )
        token, bias = pair
        if type(token) is not int:
            raise InvalidRequest(
                "logit_bias: use token ids, which /tokenize gives, not texts", param="logit_bias"
            )
        biases[str(token)] = _BANNED if bias is False else bias
    return biases


class NativeCompletionRequest(CompletionRequest):
    """POST /completion. n_cmpl is another name of n.

    return_tokens: give the ids of the answer. n_probs: logprobs of so many alternatives for each
    token. n_indent, t_max_predict_ms: see LineLimits. response_fields: those to return, all if it
    is empty, as a path such as timings/prompt_n.
    """

    n_indent: Annotated[int, Field(ge=0, lt=2**31)] = 0
    t_max_predict_ms: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    response_fields: list[str] = Field(default_factory=list)
    n_probs: Annotated[int, Field(ge=0, le=20)] = 0
    return_tokens: bool = False
    logit_bias: Annotated[
        dict[Annotated[Int32, Field(strict=False)], float] | None, BeforeValidator(_as_biases)
    ] = None

    @model_validator(mode="before")
    @classmethod
    def _drop_harmless(cls, body: Any) -> Any:
        body = drop_fields(reject_unsupported_fields(body, _UNSUPPORTED), _HARMLESS)
        if isinstance(body, dict) and "n" not in body and "n_cmpl" in body:
            body = {"n": body["n_cmpl"]} | drop_fields(body, ("n_cmpl",))
        return body

    @property
    def max_predicted(self) -> int | None:
        """Limit of generated tokens. None: no limit. Raises InvalidRequest."""
        return self._max_tokens("max_tokens")

    @property
    def line_limits(self) -> LineLimits:
        return LineLimits(min_indent=self.n_indent, time_ms=max(0, self.t_max_predict_ms))

    def to_sampling_params(self) -> SamplingParams:
        # the ids of the answer come with its logprobs
        wants_tokens = self.return_tokens or self.n_probs
        return self._to_sampling_params(
            max_tokens=self.max_predicted,
            logprobs=self.n_probs if wants_tokens else None,
            thinking_budget=self.chosen_thinking_budget(),
        )


class ExtraFile(StrictModel):
    """A part of another file, as context."""

    text: str
    filename: str = "tmp"

    @model_validator(mode="before")
    @classmethod
    def _drop_harmless(cls, body: Any) -> Any:
        return drop_fields(body, ("time",))  # when an editor saw it


class InfillRequest(NativeCompletionRequest):
    """POST /infill. prompt: the beginning of the answer, behind input_prefix.

    input_extra: other files.
    """

    prompt: str = ""
    input_prefix: str
    input_suffix: str
    input_extra: list[ExtraFile] = Field(default_factory=list)

    @property
    def prompts(self) -> list[str | list[int]]:
        return [self.input_prefix + self.prompt]

    @property
    def infill(self) -> Infill:
        files = tuple(InfillFile(each.filename, each.text) for each in self.input_extra)
        return Infill(self.input_suffix, files)
