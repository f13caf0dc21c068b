"""From a request to a sequence: template, tokens, limits, checked settings."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field, replace

from localgen.backends import sampling_params
from localgen.backends.engine.embeddings import Texts
from localgen.backends.errors import ContextExceeded, InvalidRequest
from localgen.backends.runner.interface import Limits
from localgen.backends.runner.sequence import Sequence
from localgen.backends.text.grammar import Grammars
from localgen.backends.text.prompt_renderer import Dialect, Opening
from localgen.backends.text.template import ChatTemplate
from localgen.backends.text.tokenizer import Tokenizer
from localgen.backends.types import BASE_SAMPLING, EmbedRequest, Request, SamplingParams

MAX_STOP_STRINGS = 64
MAX_LOGPROBS = 100
# more characters than this cannot be a token's share: refuse before spending time on tokenizing
MAX_CHARS_PER_TOKEN = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """Turns requests for one loaded model into sequences. Safe to call from any thread.

    grammars: without them no request can ask for one. ctx_train: the model's own context, which may
    be larger than what it was loaded with.
    """

    limits: Limits
    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: SamplingParams
    grammars: Grammars | None = None
    ctx_train: int = 0
    _dialect: Dialect | None = field(init=False)

    def __post_init__(self) -> None:
        dialect = Dialect(self.template, self.tokenizer) if self.template else None
        object.__setattr__(self, "_dialect", dialect)

    def prepare(self, request: Request) -> Sequence:
        """A new sequence. InvalidRequest, ContextExceeded."""
        started_s = time.monotonic()
        if not self.limits.generates:
            raise InvalidRequest(
                "this model only makes embeddings and cannot write an answer: "
                "ask another model, or POST /v1/embeddings",
                param="model",
            )
        params = self._params(request.params)
        sampling_params.check(params)
        ctx = self._ctx(request.ctx)
        opening = self._opening(request)
        tokens = self._tokens(request, opening, ctx)
        has_seed = request.params.seed is not None or self.defaults.seed is not None
        self._fits(len(tokens), ctx)
        self._can_be_long(len(tokens), params.min_tokens, ctx)
        wanted = ctx if params.max_tokens is None else len(tokens) + params.max_tokens
        ends = frozenset() if params.ignore_eos else self.tokenizer.end_ids
        return Sequence(
            id=request.id,
            tokens=tokens,
            num_prompt=len(tokens),
            params=params,
            matcher=self.grammars.matcher(params, opening.frame) if self.grammars else None,
            reader=opening.reader,
            notes=opening.notes,
            ctx=ctx,
            limit=min(ctx, wanted),
            stop_ids=ends | frozenset(params.stop_token_ids),
            client=request.client,
            priority=request.priority,
            stochastic=self.limits.stochastic and not has_seed and params.temperature != 0,
            arrived_s=request.arrived_s or started_s,
            template_ms=(time.monotonic() - started_s) * 1e3,
        )

    def texts(self, request: EmbedRequest) -> Texts:
        """The tokens of its inputs. InvalidRequest, ContextExceeded."""
        started_s = time.monotonic()
        if not request.inputs:
            raise InvalidRequest("input is empty: give a text", param="input")
        one = len(request.inputs) == 1
        inputs = [
            self._text(given, "input" if one else f"input[{at}]")
            for at, given in enumerate(request.inputs)
        ]
        return Texts(
            id=request.id,
            inputs=inputs,
            arrived_s=request.arrived_s or started_s,
            tokenize_ms=(time.monotonic() - started_s) * 1e3,
        )

    def _text(self, given: str | tuple[int, ...], place: str) -> list[int]:
        """The tokens of one input, which is called `place`."""
        most = self.limits.max_len
        if len(given) > most * (MAX_CHARS_PER_TOKEN if isinstance(given, str) else 1):
            what = "characters" if isinstance(given, str) else "tokens"
            raise ContextExceeded(
                f"{place} is {len(given):,} {what}, the context is {most:,} tokens: shorten it",
                param=place,
            )
        if isinstance(given, str):
            tokens = self.tokenizer.encode_text(given) if given else []
        else:
            tokens = list(given)
        tokens = self._checked(tokens, place)
        if len(tokens) > most:
            raise ContextExceeded(
                f"{place} is {len(tokens):,} tokens, the context is {most:,}: shorten it",
                param=place,
            )
        return tokens

    def _params(self, asked: SamplingParams) -> SamplingParams:
        """The settings in force, none of them None."""
        sampling_params.check_asked(asked)
        for name in self.limits.unsupported:
            if getattr(asked, name) not in (None, getattr(BASE_SAMPLING, name)):
                raise InvalidRequest(f"this backend does not support {name}", param=name)
        params = asked.with_defaults(self.defaults).with_defaults(BASE_SAMPLING)
        if params.max_tokens is not None and params.max_tokens < 1:
            raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
        if params.min_tokens < 0:
            raise InvalidRequest("min_tokens must be at least 0", param="min_tokens")
        if params.max_tokens is not None and params.min_tokens > params.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {params.min_tokens:,}, more than max_tokens, which is "
                f"{params.max_tokens:,}: lower it",
                param="min_tokens",
            )
        if len(params.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"more than {MAX_STOP_STRINGS} stop strings", param="stop")
        if params.logprobs is not None and not 0 <= params.logprobs <= MAX_LOGPROBS:
            raise InvalidRequest(f"logprobs must be 0 to {MAX_LOGPROBS}", param="logprobs")
        for name in ("logit_bias", "stop_token_ids"):
            for token in getattr(params, name):
                self._check_token(token, name)
        if params.seed is None:
            params = replace(params, seed=random.getrandbits(31))
        return params

    def _ctx(self, asked: int | None) -> int:
        most = self.limits.max_len
        if asked is None:
            return most
        if asked < 1:
            raise InvalidRequest("ctx must be at least 1", param="ctx")
        if asked > most:
            raise InvalidRequest(
                f"ctx {asked:,} is more than the {most:,} tokens this model is loaded with: "
                f"ask for at most {most:,}, or stop the model and load it with a larger --ctx",
                param="ctx",
            )
        return asked

    def _opening(self, request: Request) -> Opening:
        """The text of the prompt, and how its answer is read."""
        given = [request.messages is not None, request.prompt is not None]
        if sum(given) + (request.prompt_tokens is not None) != 1:
            raise InvalidRequest("give exactly one of messages, prompt and prompt_tokens")
        if request.messages is None:
            return Opening(request.prompt or "")
        return self._put(request)

    def _tokens(self, request: Request, opening: Opening, ctx: int) -> list[int]:
        if request.prompt_tokens is not None:
            return self._checked(list(request.prompt_tokens))
        text = opening.prompt
        if len(text) > ctx * MAX_CHARS_PER_TOKEN:
            raise ContextExceeded(
                f"the prompt is {len(text):,} characters, far more than {ctx:,} tokens of context: "
                "shorten it",
                param="prompt",
            )
        return self._checked(self.tokenizer.encode(text))

    def _check_token(self, token: int, param: str) -> None:
        if not 0 <= token < self.tokenizer.vocab_size:
            raise InvalidRequest(
                f"token id {token} is outside the vocabulary of {self.tokenizer.vocab_size}",
                param=param,
            )

    def _checked(self, tokens: list[int], place: str = "prompt") -> list[int]:
        named = "the prompt" if place == "prompt" else place
        if not tokens:
            raise InvalidRequest(f"{named} is empty", param=place)
        if min(tokens) < 0 or max(tokens) >= self.tokenizer.vocab_size:
            raise InvalidRequest(
                f"a token of {named} is outside the vocabulary of {self.tokenizer.vocab_size}",
                param=place,
            )
        return tokens

    def _put(self, request: Request) -> Opening:
        if not request.messages:
            raise InvalidRequest("messages is empty", param="messages")
        if self._dialect is None:
            raise InvalidRequest(
                "this model has no chat template: load it with --chat-template FILE, "
                "or use plain completion",
                param="messages",
            )
        return self._dialect.open(request)

    def _fits(self, prompt_tokens: int, ctx: int) -> None:
        if prompt_tokens >= ctx:
            raise ContextExceeded(
                f"the prompt is {prompt_tokens:,} tokens, the context is {ctx:,} and must hold "
                f"the answer too: shorten the prompt{self._remedy(ctx)}",
                param="messages",
            )

    def _remedy(self, ctx: int) -> str:
        """How else a prompt would fit. ctx: that of the request."""
        most = self.limits.max_len
        if ctx < most:
            return f", or raise ctx (up to {most:,})"
        if most < self.ctx_train:
            return f", or load the model with a larger --ctx (up to {self.ctx_train:,})"
        return ""

    def _can_be_long(self, prompt_tokens: int, min_tokens: int, ctx: int) -> None:
        if prompt_tokens + min_tokens > ctx:
            raise ContextExceeded(
                f"the prompt is {prompt_tokens:,} tokens and min_tokens {min_tokens:,}, "
                f"the context is {ctx:,}: lower min_tokens, or shorten the prompt",
                param="min_tokens",
            )
