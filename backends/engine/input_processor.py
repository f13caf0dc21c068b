"""Convert requests to sequences: render the template, tokenize, validate parameters and limits."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field, replace

from localgen.backends import sampling_params
from localgen.backends.adapters import ReadAdapter, prefix_salt, read_adapters
from localgen.backends.block_hashes import block_hashes
from localgen.backends.engine.embeddings import EmbeddingTask
from localgen.backends.engine.overflow import answer_room, drop_oldest
from localgen.backends.engine.prefix_breaks import RecentPrompts
from localgen.backends.errors import SHORTEN_PROMPT, ContextExceeded, InvalidRequest
from localgen.backends.runner.interface import Limits
from localgen.backends.runner.sequence import Sequence
from localgen.backends.sampling_params import BASE_SAMPLING, SamplingParams
from localgen.backends.text.grammar import GrammarCompiler
from localgen.backends.text.prompt_renderer import PromptRenderer, RenderedPrompt
from localgen.backends.text.response_parser import ResponseParser
from localgen.backends.text.stabilizer import stabilize
from localgen.backends.text.template import PromptTemplate
from localgen.backends.text.tokenizer import PairTokenizer, Tokenizer
from localgen.backends.types import (
    OVERFLOW_DROP_OLDEST,
    EmbedRequest,
    Infill,
    Message,
    Request,
    Tokenized,
    TokenizeRequest,
)
from localgen.backends.units import format_count

MAX_STOP_STRINGS = 64
MAX_LOGPROBS = 100
# upper bound of characters per token: longer text is rejected before it is tokenized
MAX_CHARS_PER_TOKEN = 256
# Claude Code and litellm know an exceeded context by "prompt is too long"
_TOO_LONG = "the prompt is too long"
NO_INFILL_SAMPLER_NOTE = (
    "samplers: infill is left out, which only the llama.cpp backend has, for models with infill"
)
NO_REASONING_NOTE = "there is no reasoning in this answer: the thinking budget has no effect"


@dataclass(frozen=True, slots=True, kw_only=True)
class InputProcessor:
    """Converts requests for one loaded model to sequences. Thread-safe.

    grammar_compiler: compiles grammars, or None if requests are not constrained by a grammar.
    ctx_train: the context length the model was trained with, which may exceed the loaded one.
    read_adapter: reads LoRA adapters, or None if the backend has none.
    """

    limits: Limits
    tokenizer: Tokenizer
    template: PromptTemplate | None
    defaults: SamplingParams
    grammar_compiler: GrammarCompiler | None = None
    ctx_train: int = 0
    read_adapter: ReadAdapter | None = None
    _recent_prompts: RecentPrompts = field(init=False, default_factory=RecentPrompts)
    _prompt_renderer: PromptRenderer | None = field(init=False)

    def __post_init__(self) -> None:
        dialect = PromptRenderer(self.template, self.tokenizer) if self.template else None
        object.__setattr__(self, "_prompt_renderer", dialect)

    def prepare(self, request: Request) -> Sequence:
        """Return the sequence of a request.

        Raises InvalidRequest or ContextExceeded; for its adapters ModelNotFound or LoadFailed.
        """
        started_s = time.monotonic()
        if not self.limits.can_generate:
            raise InvalidRequest(
                "this is a reranking model, which does not generate text: "
                "use another model, or POST /v1/rerank"
                if self.limits.can_rank
                else "this is an embedding model, which does not generate text: "
                "use another model, or POST /v1/embeddings",
                param="model",
            )
        if request.echo and request.messages is not None:
            raise InvalidRequest("echo is for plain prompts, not for messages", param="echo")
        params, left_out = self._without_infill_sampler(request)
        least = 0 if request.echo or request.prompt_only else 1
        params = self._resolve_params(params, min_tokens=least)
        sampling_params.validate_sampling_params(params)
        ctx = self._resolve_ctx(request.ctx)
        request, changes = stabilize(request) if request.stabilize else (request, ())
        request, shortening = self._without_overflow(request, params, ctx)
        self._require_few_messages(request, ctx)
        adapters = read_adapters(request.adapters, self.read_adapter)
        request = replace(request, cache_salt=prefix_salt(request.cache_salt, adapters))
        opening = self._render(request)
        tokens = self._tokenize(request, opening, ctx)
        has_seed = request.params.seed is not None or self.defaults.seed is not None
        # a prompt without an answer may fill the context
        self._require_prompt_fits(request, len(tokens), ctx + (params.max_tokens == 0))
        self._require_min_tokens_fit(len(tokens), params.min_tokens, ctx)
        wanted = ctx if params.max_tokens is None else len(tokens) + params.max_tokens
        ends = frozenset() if params.ignore_eos else self.tokenizer.eos_token_ids
        return Sequence(
            id=request.id,
            tokens=tokens,
            num_prompt=len(tokens),
            params=params,
            matcher=self.grammar_compiler.compile(params, opening.response_grammar)
            if self.grammar_compiler
            else None,
            response_parser=opening.response_parser,
            echo=self._prompt_text(request, tokens) if request.echo else None,
            notes=(
                *changes,
                *shortening,
                *left_out,
                *opening.notes,
                *_budget_notes(request, params, opening.response_parser),
            ),
            # prompts with a suffix part in their middle each time
            prefix_break=self._recent_prompts.compare(request, opening.text, tokens)
            if self.limits.can_rewind and request.infill is None
            else None,
            line_limits=request.line_limits,
            ctx=ctx,
            max_len=min(ctx, wanted),
            stop_ids=ends | frozenset(params.stop_token_ids),
            client=request.client,
            priority=request.priority,
            cache_salt=request.cache_salt,
            adapters=adapters,
            save_prefix=request.save_prefix,
            kv_peer=request.kv_peer,
            chunks=request.chunks,
            block_hashes=block_hashes(tokens, request.block_hash_key, request.cache_salt)
            if request.block_hash_key
            else (),
            can_sample_drafts=self.limits.can_sample_drafts
            and not has_seed
            and params.temperature != 0,
            arrived_s=request.arrived_s or started_s,
            template_ms=(time.monotonic() - started_s) * 1e3,
        )

    def tokenize(self, message: TokenizeRequest) -> Tokenized:
        """Return the prompt of a request as text and tokens; it may exceed the context.

        Raises InvalidRequest, or ContextExceeded for a prompt of far more characters.
        """
        request = stabilize(message.request)[0] if message.request.stabilize else message.request
        ctx = self._resolve_ctx(request.ctx)
        rendered = self._render(request)
        is_empty = not (rendered.text or request.prompt_tokens)
        tokens = [] if is_empty else self._tokenize(request, rendered, ctx)
        if not message.add_special and not rendered.text.startswith(self.tokenizer.bos or "\0"):
            tokens = tokens[len(self.tokenizer.encode("")) :]
        pieces = tuple(map(self.tokenizer.piece, tokens))
        text = rendered.text
        if request.prompt_tokens is not None:
            text = self._prompt_text(request, tokens)
        return Tokenized(request.id, text, tuple(tokens), pieces)

    def _prompt_text(self, request: Request, tokens: list[int]) -> str:
        """The prompt as it was given, or the text of its tokens."""
        if request.prompt is not None:
            return request.prompt
        return b"".join(map(self.tokenizer.piece, tokens)).decode(errors="replace")

    def prepare_embedding(self, request: EmbedRequest) -> EmbeddingTask:
        """Return a request's tokenized inputs. Raises InvalidRequest or ContextExceeded."""
        started_s = time.monotonic()
        if not request.inputs:
            raise InvalidRequest("input is empty: give a text", param="input")
        self._require_ranking(request.query is not None)
        inputs = [
            self._tokenize_input(given, request.query, at if len(request.inputs) > 1 else None)
            for at, given in enumerate(request.inputs)
        ]
        return EmbeddingTask(
            id=request.id,
            inputs=inputs,
            arrived_s=request.arrived_s or started_s,
            tokenize_ms=(time.monotonic() - started_s) * 1e3,
            is_ranked=request.query is not None,
        )

    def _require_ranking(self, wanted: bool) -> None:
        """Raise InvalidRequest if the model is (wanted: is not) a reranking model."""
        if wanted and not self.limits.can_rank:
            raise InvalidRequest(
                "this is no reranking model: use the GGUF file of one (pooling type rank, with a "
                "classifier), such as bge-reranker-v2-m3",
                param="model",
            )
        if self.limits.can_rank and not wanted:
            raise InvalidRequest(
                "this is a reranking model and has no embeddings: use an embedding model, or "
                "POST /v1/rerank",
                param="model",
            )

    def _tokenize_input(
        self, text_or_tokens: str | tuple[int, ...], query: str | None, at: int | None
    ) -> list[int]:
        """Return the tokens of one input, with a query of the pair.

        at: its number, or None for a single one.
        """
        name = "input" if query is None else "documents"
        param = name if at is None else f"{name}[{at}]"
        most = self.limits.max_len
        size = len(text_or_tokens) + len(query or "")
        if size > most * (MAX_CHARS_PER_TOKEN if isinstance(text_or_tokens, str) else 1):
            what = "characters" if isinstance(text_or_tokens, str) else "tokens"
            raise ContextExceeded(
                f"{param} is {size:,} {what}, the context is {most:,} tokens: shorten it",
                param=param,
            )
        if query is not None:
            assert isinstance(text_or_tokens, str)
            assert isinstance(self.tokenizer, PairTokenizer)
            tokens = self.tokenizer.encode_pair(query, text_or_tokens)
            param = f"{param} with the query"
        elif isinstance(text_or_tokens, str):
            tokens = self.tokenizer.encode_for_embedding(text_or_tokens) if text_or_tokens else []
        else:
            tokens = list(text_or_tokens)
        tokens = self._validate_tokens(tokens, param)
        if len(tokens) > most:
            raise ContextExceeded(
                f"{param} is {len(tokens):,} tokens, the context is {most:,}: shorten it",
                param=param,
            )
        return tokens

    def _without_infill_sampler(self, request: Request) -> tuple[SamplingParams, tuple[str, ...]]:
        """The parameters without a sampler that editors ask every model for, and a note of that.

        Raises InvalidRequest for messages.
        """
        params = request.params
        if params.infill_sampler and request.messages is not None:
            raise InvalidRequest(
                "samplers: infill is for plain prompts, not for messages", param="samplers"
            )
        if not params.infill_sampler or "infill_sampler" not in self.limits.unsupported:
            return params, ()
        return replace(params, infill_sampler=False), (NO_INFILL_SAMPLER_NOTE,)

    def _resolve_params(self, requested: SamplingParams, *, min_tokens: int) -> SamplingParams:
        """Validate the requested parameters and fill in defaults, including a random seed.

        min_tokens: least max_tokens.
        """
        sampling_params.reject_mirostat_conflicts(requested)
        for name in self.limits.unsupported:
            if getattr(requested, name) not in (None, getattr(BASE_SAMPLING, name)):
                raise InvalidRequest(f"this backend does not support {name}", param=name)
        params = requested.with_defaults(self.defaults).with_defaults(BASE_SAMPLING)
        if params.max_tokens is not None and params.max_tokens < min_tokens:
            raise InvalidRequest(
                f"max_tokens must be at least {min_tokens}"
                + (", or 0 for a prompt with echo: true" if min_tokens else ""),
                param="max_tokens",
            )
        if params.min_tokens < 0:
            raise InvalidRequest("min_tokens must be at least 0", param="min_tokens")
        if params.max_tokens is not None and params.min_tokens > params.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {params.min_tokens:,}, more than max_tokens, which is "
                f"{params.max_tokens:,}: lower it",
                param="min_tokens",
            )
        if params.thinking_budget is not None and params.thinking_budget < 0:
            raise InvalidRequest("thinking_budget must be at least 0", param="thinking_budget")
        if len(params.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"more than {MAX_STOP_STRINGS} stop strings", param="stop")
        if params.logprobs is not None and not 0 <= params.logprobs <= MAX_LOGPROBS:
            raise InvalidRequest(f"logprobs must be 0 to {MAX_LOGPROBS}", param="logprobs")
        for name in ("logit_bias", "stop_token_ids"):
            for token in getattr(params, name):
                self._validate_token_id(token, name)
        if params.seed is None:
            params = replace(params, seed=random.getrandbits(31))
        return params

    def _resolve_ctx(self, requested: int | None) -> int:
        most = self.limits.max_len
        if requested is None:
            return most
        if requested < 1:
            raise InvalidRequest("ctx must be at least 1", param="ctx")
        if requested > most:
            raise InvalidRequest(
                f"ctx {requested:,} is more than the {most:,} tokens this model is loaded with: "
                f"request at most {most:,}, or load the model with a larger --ctx",
                param="ctx",
            )
        return requested

    def _without_overflow(
        self, request: Request, params: SamplingParams, ctx: int
    ) -> tuple[Request, tuple[str, ...]]:
        """The request without its oldest turns, if it allows that and must, and a note of that."""
        if request.on_overflow != OVERFLOW_DROP_OLDEST or not request.messages:
            return request, ()
        room = answer_room(ctx, params.max_tokens)

        def count_tokens(messages: tuple[Message, ...]) -> int | None:
            part = replace(request, messages=messages)
            try:
                self._require_few_messages(part, ctx)
                num_tokens = len(self._tokenize(part, self._render(part), ctx))
            except ContextExceeded:
                return None
            return num_tokens if num_tokens + room <= ctx else None

        if count_tokens(request.messages) is not None:
            return request, ()
        kept = drop_oldest(request.messages, ctx, count_tokens)
        if not kept.num_left_out:
            return request, ()
        note = (
            f"the oldest {kept.num_left_out:,} of {len(request.messages):,} messages were left out "
            f"to fit the context of {ctx:,} tokens"
        )
        return replace(request, messages=kept.messages), (note,)

    def _render(self, request: Request) -> RenderedPrompt:
        """Return the prompt text and how to parse the response."""
        given = [request.messages is not None, request.prompt is not None]
        if sum(given) + (request.prompt_tokens is not None) != 1:
            raise InvalidRequest("give exactly one of messages, prompt and prompt_tokens")
        if request.messages is None:
            return RenderedPrompt(request.prompt or "")
        return self._render_chat(request)

    def _tokenize(self, request: Request, rendered: RenderedPrompt, ctx: int) -> list[int]:
        text = rendered.text
        num_chars = len(text) + (request.infill.num_chars if request.infill else 0)
        if num_chars > ctx * MAX_CHARS_PER_TOKEN:
            raise ContextExceeded(
                f"{_TOO_LONG}: {num_chars:,} characters, far more than {ctx:,} tokens of context: "
                "shorten it",
                param="prompt",
            )
        if request.infill is not None:
            return self._infill_prompt(request, request.infill)
        if request.prompt_tokens is not None:
            return self._validate_tokens(list(request.prompt_tokens))
        return self._validate_tokens(self.tokenizer.encode(text))

    def _infill_prompt(self, request: Request, infill: Infill) -> list[int]:
        """The tokens of a prompt whose answer precedes a suffix. Raises InvalidRequest."""
        if request.messages is not None or request.echo:
            raise InvalidRequest("a suffix is for plain prompts, without echo", param="suffix")
        known = self.tokenizer.infill_tokens
        if known is None:
            raise InvalidRequest(
                "this model has no tokens for infill (fill in the middle), so it cannot write in "
                "front of a suffix: use a code model that was trained for it",
                param="suffix",
            )
        bos = self.tokenizer.encode("")

        def encode(text: str) -> list[int]:
            return self.tokenizer.encode(text)[len(bos) :]

        before = (
            encode(request.prompt or "")
            if request.prompt_tokens is None
            else self._validate_tokens(list(request.prompt_tokens))
        )
        return bos + known.prompt(before, infill, encode)

    def _validate_token_id(self, token: int, param: str) -> None:
        if not 0 <= token < self.tokenizer.vocab_size:
            raise InvalidRequest(
                f"token id {token} is outside the vocabulary of {self.tokenizer.vocab_size}",
                param=param,
            )

    def _validate_tokens(self, tokens: list[int], param: str = "prompt") -> list[int]:
        named = "the prompt" if param == "prompt" else param
        if not tokens:
            raise InvalidRequest(f"{named} is empty", param=param)
        if min(tokens) < 0 or max(tokens) >= self.tokenizer.vocab_size:
            raise InvalidRequest(
                f"a token of {named} is outside the vocabulary of {self.tokenizer.vocab_size}",
                param=param,
            )
        return tokens

    def _render_chat(self, request: Request) -> RenderedPrompt:
        if not request.messages:
            raise InvalidRequest("messages is empty", param="messages")
        if self._prompt_renderer is None:
            raise InvalidRequest(
                "this model has no chat template: load it with --chat-template FILE, "
                "or use plain completion",
                param="messages",
            )
        return self._prompt_renderer.render(request)

    def _require_few_messages(self, request: Request, ctx: int) -> None:
        """Raise ContextExceeded, before any work, if the messages are certainly too many."""
        count = len(request.messages or ())
        if count > ctx:
            raise ContextExceeded(
                f"{_TOO_LONG}: {count:,} messages of at least one token each, the context is "
                f"{ctx:,} tokens: send fewer messages{self._fit_hint(ctx)}",
                param="messages",
            )

    def _require_prompt_fits(self, request: Request, prompt_tokens: int, ctx: int) -> None:
        if prompt_tokens < ctx:
            return
        of_tools, fewer_tools = "", ""
        if request.tools and request.tool_choice != "none":
            bare = replace(request, tools=(), tool_choice="auto")
            num_bare = len(self._tokenize(bare, self._render(bare), ctx))
            tools = format_count(len(request.tools), "tool")
            of_tools = f" ({prompt_tokens - num_bare:,} of them describe {tools})"
            fewer_tools = " or offer fewer tools"
        raise ContextExceeded(
            f"{_TOO_LONG}: {prompt_tokens:,} tokens{of_tools}, the context is {ctx:,} and must "
            f"hold the answer too: {SHORTEN_PROMPT}{fewer_tools}{self._fit_hint(ctx)}",
            param="messages",
        )

    def _fit_hint(self, ctx: int) -> str:
        """Return how to raise the context limit, for an error message. ctx: the request's limit."""
        most = self.limits.max_len
        if ctx < most:
            return f", or raise ctx (up to {most:,})"
        if most < self.ctx_train:
            way = "--ctx, or /set ctx in a chat"
            return f", or load the model with a larger context ({way}; up to {self.ctx_train:,})"
        return ""

    def _require_min_tokens_fit(self, prompt_tokens: int, min_tokens: int, ctx: int) -> None:
        if prompt_tokens + min_tokens > ctx:
            raise ContextExceeded(
                f"the prompt is {prompt_tokens:,} tokens and min_tokens {min_tokens:,}, "
                f"the context is {ctx:,}: lower min_tokens, or shorten the prompt",
                param="min_tokens",
            )


def _budget_notes(
    request: Request, params: SamplingParams, parser: ResponseParser | None
) -> tuple[str, ...]:
    """A note on a thinking budget that nothing is limited by, unless reasoning was switched off."""
    is_off = request.thinking is False or request.reasoning_effort == "none"
    has_reasoning = parser is not None and parser.reasoning is not None
    if params.thinking_budget is None or has_reasoning or is_off:
        return ()
    return (NO_REASONING_NOTE,)
