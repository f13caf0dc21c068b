"""Request schema of /completion: llama-server's names for the fields of a text completion."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from localgen.backends.errors import InvalidRequest
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Infill, InfillFile
from localgen.server.openai.schema import CompletionRequest
from localgen.server.requests.body import (
    Int32,
    StrictModel,
    drop_fields,
    reject_unsupported_fields,
)

# accepted without effect: prompts are always cached, for every slot, and a context is never shifted
_HARMLESS = ("id_slot", "n_keep", "n_discard")
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "samplers": (),
    "min_keep": (0,),
    "t_max_predict_ms": (0, -1),
    "post_sampling_probs": (False,),
    "response_fields": ([],),
    "timings_per_token": (False,),
    "return_progress": (False,),
    "logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "lora": ([],),
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
    """POST /completion. n_predict: -1 for no limit. return_tokens: give the ids of the answer.

    n_probs: logprobs of so many alternatives for each token.
    """

    n: Literal[1] | None = None
    n_predict: Annotated[int, Field(ge=-1, lt=2**63)] | None = None
    n_probs: Annotated[int, Field(ge=0, le=20)] = 0
    return_tokens: bool = False
    logit_bias: Annotated[
        dict[Annotated[Int32, Field(strict=False)], float] | None, BeforeValidator(_as_biases)
    ] = None

    @model_validator(mode="before")
    @classmethod
    def _drop_harmless(cls, body: Any) -> Any:
        return drop_fields(reject_unsupported_fields(body, _UNSUPPORTED), _HARMLESS)

    @property
    def max_predicted(self) -> int | None:
        """Limit of generated tokens. None: no limit. Raises InvalidRequest."""
        if self.n_predict == 0:
            raise InvalidRequest(
                "n_predict is 0, it must be at least 1, or -1 for no limit", param="n_predict"
            )
        if self.n_predict is None:
            return self.max_tokens
        limit = None if self.n_predict == -1 else self.n_predict
        if "max_tokens" in self.model_fields_set and self.max_tokens != limit:
            raise InvalidRequest("give n_predict or max_tokens, not both", param="n_predict")
        return limit

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
