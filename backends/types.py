"""Requests and results that cross process boundaries.

All types are frozen, made of plain values, and serialized field by field. Times are seconds on the
system-wide monotonic clock; durations are milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

from localgen.backends.adapters import AdapterRef
from localgen.backends.engine_stats import KV_TIERS, EngineStats, kv_tier_name
from localgen.backends.prefix_break import PrefixBreak
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.units import format_count, format_elapsed

# of one sequence in one step: with the token before them they fill a kernel's tile
MAX_DRAFT_TOKENS = 63


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. parameters: JSON schema of its arguments, as text."""

    name: str
    description: str = ""
    parameters: str = '{"type": "object", "properties": {}}'


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call made by the model. arguments: a JSON object, as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """A chat message. role: system, user, assistant or tool.

    reasoning: the reasoning text of an assistant message. tool_calls: the calls of an assistant
    message. tool_call_id, name: the call and the function that a message of role tool answers.
    """

    role: str
    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class InfillFile:
    """A part of a file that the model reads before an infill prompt."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Infill:
    """The text around an infill answer, which follows the prompt and precedes the suffix.

    files: parts of other files.
    """

    suffix: str
    files: tuple[InfillFile, ...] = ()

    @property
    def num_chars(self) -> int:
        """Characters of all its texts."""
        return len(self.suffix) + sum(len(file.name) + len(file.text) for file in self.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class LineLimits:
    """Limits that end an answer at a line, as editors want them.

    min_indent: the answer ends before the text of a line, other than its first, that begins with
    fewer spaces and tabs. time_ms: it ends with the first line break later than this after the
    first token; 0 for no limit.
    """

    min_indent: int = 0
    time_ms: int = 0


NO_LINE_LIMITS = LineLimits()
# values of Request.on_overflow
OnOverflow = Literal["error", "drop-oldest"]
OVERFLOW_ERROR, OVERFLOW_DROP_OLDEST = get_args(OnOverflow)


CHUNK_HASH_BYTES = 8
# chunks in a report of what an engine holds: about half a million tokens
MAX_REPORTED_CHUNKS = 8192


@dataclass(frozen=True, slots=True)
class PromptChunks:
    """The text of a prompt, as the gateway of a cluster knows it.

    hashes: of its leading chunks, CHUNK_HASH_BYTES each; one stands for all text up to the end of
    its chunk. count: of all chunks.
    """

    hashes: tuple[bytes, ...]
    count: int


def split_hashes(joined: bytes) -> tuple[bytes, ...]:
    """Hashes of CHUNK_HASH_BYTES that were joined."""
    size = CHUNK_HASH_BYTES
    return tuple(joined[at : at + size] for at in range(0, len(joined), size))


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A generation request. Exactly one of messages, prompt and prompt_tokens is set.

    client: identifies the client; waiting clients are scheduled fairly.
    priority: higher runs first; below 0 it runs in the background (engine/background.py).
    ctx: limit on prompt + completion in tokens, or None for the model's context length.
    cache_salt: only requests with the same salt share cached prefixes.
    account: whose prompts it may be compared with; see engine/prefix_breaks.py.
    arrived_s: when the server received the request; TTFT and queue time are measured from here.
    on_overflow: of messages that do not fit the context: OVERFLOW_ERROR, or OVERFLOW_DROP_OLDEST
    (engine/overflow.py).
    stabilize: remove from the prompt what changes without a meaning (backends/text/stabilizer.py).
    tools: only with messages. tool_choice: auto, none, required or a function name.
    parallel_tool_calls: allow several tool calls in one answer.
    prefill: beginning of the answer, which the model continues; only with messages.
    thinking: enable or disable reasoning; reasoning_effort: none, low, medium or high.
    None: the default of the model's template.
    echo: return the prompt before the answer, with params.logprobs also the logprobs of its tokens;
    not with messages. Only then, or if prompt_only is set, may params.max_tokens be 0.
    prompt_only: compute the prompt for later requests.
    infill: only with prompt or prompt_tokens, which are then the text before the answer.
    line_limits: end the answer at a line.
    kv_peer: address of an engine that has computed the beginning of the prompt, as for --kv-peer.
    save_prefix: False: its tokens are in the KV cache only, never kept in RAM or on disk after it.
    chunks: of the prompt, to report which of them are held; see engine/held_prompts.py.
    block_hash_key: of Finished.block_hashes, at most 64 bytes; empty: there are none.
    adapters: LoRA adapters that change the model's weights for it.
    """

    id: str
    messages: tuple[Message, ...] | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    prefill: str = ""
    thinking: bool | None = None
    reasoning_effort: str | None = None
    prompt: str | None = None
    prompt_tokens: tuple[int, ...] | None = None
    echo: bool = False
    prompt_only: bool = False
    infill: Infill | None = None
    line_limits: LineLimits = NO_LINE_LIMITS
    params: SamplingParams = SamplingParams()
    client: str = ""
    priority: int = 0
    ctx: int | None = None
    cache_salt: str = ""
    account: str = ""
    arrived_s: float = 0.0
    stabilize: bool = False
    save_prefix: bool = True
    on_overflow: str = OVERFLOW_ERROR
    kv_peer: str = ""
    chunks: PromptChunks | None = None
    block_hash_key: bytes = field(default=b"", repr=False)
    adapters: tuple[AdapterRef, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedRequest:
    """An embedding request for texts or token lists. Other fields as in Request.

    query: rank the inputs, which are texts, by their relevance for it: the vectors are scores.
    """

    id: str
    inputs: tuple[str | tuple[int, ...], ...]
    query: str | None = None
    client: str = ""
    arrived_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """Asks for the prompt of a request as text and tokens, without generating.

    add_special: add the begin-of-sequence token if the model expects one.
    """

    request: Request
    add_special: bool = True

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def client(self) -> str:
        return self.request.client


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its text (invalid UTF-8 replaced) and its log probability."""

    token_id: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The token of one position, sampled or of a prompt, and the most likely tokens, best first.

    is_first: of a prompt; nothing comes before, so its logprob is 0 and `top` is empty.
    """

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]
    is_first: bool = False


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """An increment of the tool call at `index`. id and name are set in its first delta only.

    arguments: the next piece of the JSON text.
    """

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of one request. num_tokens: tokens generated so far. prompt_tokens: of its prompt.

    reasoning: new reasoning text, not included in `text`. With Request.echo, text and logprobs of
    the first delta begin with those of the prompt, which num_tokens does not count.
    """

    request_id: str
    text: str
    num_tokens: int
    logprobs: tuple[PositionLogprobs, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """Tokens of a prompt that are computed, the cached ones included, and their total number."""

    computed: int
    total: int


@dataclass(frozen=True, slots=True)
class RestoredTokens:
    """Tokens of a prompt whose keys and values came from outside of the KV cache.

    tier: as in KVTierStats. ms: time that it took. saved_ms: by how much longer computing them
    would have taken, or 0 if unknown.
    """

    tier: str
    tokens: int
    ms: float
    saved_ms: float

    def __str__(self) -> str:
        where = kv_tier_name(self.tier)
        saved = f" ({format_elapsed(self.saved_ms / 1e3)} saved)" if self.saved_ms >= 1e3 else ""
        took = f"{self.ms / 1e3:.1f} s" if self.ms >= 100 else f"{self.ms:.0f} ms"
        return f"{format_count(self.tokens, 'token')} from {where} in {took}{saved}"


def merged_restored(parts: Iterable[RestoredTokens]) -> tuple[RestoredTokens, ...]:
    """Sums by tier, from the nearest to the farthest."""
    given = list(parts)
    return tuple(
        RestoredTokens(
            tier,
            sum(part.tokens for part in same),
            sum(part.ms for part in same),
            sum(part.saved_ms for part in same),
        )
        for tier in KV_TIERS
        if (same := [part for part in given if part.tier == tier])
    )


def restored_text(restored: Iterable[RestoredTokens]) -> str:
    """The tokens restored from each KV tier as text; empty if there are none."""
    return ", ".join(map(str, restored))


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Timings of one request: llama-server's fields plus ttft, queue, template and draft fields.

    cache_n: prompt tokens found in the prefix cache; prompt_n: prompt tokens computed.
    prompt_ms: from admission to the first token, including cached_ms for reusing the cached prefix
    and first_step_ms for the step that sampled the first token.
    predicted_ms: from the first token to the last.
    draft_n: draft tokens verified; draft_n_accepted: draft tokens accepted.
    draft_steps: steps after the first token.
    draft_speedup: speedup over plain decode steps measured over the same period, or 0 if unknown.
    draft_reason: why most steps had no draft tokens.
    draft_by: drafters used (`n-gram` or the name of a draft model), the one with most tokens first.
    prefix_break: where the prompt parts from an earlier one, or None if it does not.
    restored: the part of cache_n that was no longer in the KV cache, by tier.
    """

    cache_n: int = 0
    prompt_n: int = 0
    prompt_ms: float = 0.0
    prompt_per_second: float = 0.0
    predicted_n: int = 0
    predicted_ms: float = 0.0
    predicted_per_second: float = 0.0
    ttft_ms: float = 0.0
    queue_ms: float = 0.0
    template_ms: float = 0.0
    cached_ms: float = 0.0
    first_step_ms: float = 0.0
    draft_n: int = 0
    draft_n_accepted: int = 0
    draft_steps: int = 0
    draft_speedup: float = 0.0
    draft_reason: str = ""
    draft_by: tuple[str, ...] = ()
    prefix_break: PrefixBreak | None = None
    restored: tuple[RestoredTokens, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Successful end of a request. reason: stop, length, tool_calls or cancelled.

    stop: the stop string or end token that was matched. ctx: the context limit applied.
    notes: messages for the user (preempted, context full). seed: seed that reproduces the text,
    or None if not reproducible, because draft tokens were sampled. block_hashes: of the prompt,
    see backends/block_hashes.py; empty unless Request.block_hash_key is set.
    """

    request_id: str
    reason: str
    timings: Timings
    prompt_tokens: int
    completion_tokens: int
    ctx: int
    seed: int | None = None
    stop: str | None = None
    notes: tuple[str, ...] = ()
    block_hashes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """Successful end of an EmbedRequest.

    vectors: float32 little-endian [inputs, width], normalized to length 1, or for a query the
    scores, [inputs, 1]. prompt_tokens: tokens of each input.
    """

    request_id: str
    vectors: bytes
    width: int
    prompt_tokens: tuple[int, ...]
    timings: Timings


@dataclass(frozen=True, slots=True)
class Tokenized:
    """Successful end of a TokenizeRequest. text: the rendered prompt; of given tokens, their text.

    pieces: bytes of each token in generated text; empty for control tokens.
    """

    request_id: str
    text: str
    tokens: tuple[int, ...]
    pieces: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """A request that failed. code and param as in LocalgenError."""

    request_id: str
    code: str
    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True)
class StepEvents:
    """All events of one step. Within a request, deltas come before its end.

    held_chunks: see HeldPrompts.take_report; None if they are the same as before.
    """

    deltas: tuple[Delta, ...] = ()
    finished: tuple[Finished, ...] = ()
    failed: tuple[Failed, ...] = ()
    stats: EngineStats | None = None
    embedded: tuple[Embedded, ...] = ()
    tokenized: tuple[Tokenized, ...] = ()
    held_chunks: bytes | None = None
