"""Values that cross folders: what is asked of an engine, and what it answers.

All are frozen, made of plain types, and travel between processes as they are.
Times are seconds on the system-wide monotonic clock, durations are milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from localgen.backends.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. parameters: the JSON schema of its arguments, as text."""

    name: str
    description: str = ""
    parameters: str = '{"type": "object", "properties": {}}'


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made. arguments: a JSON object, as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat. role: system, user, assistant or tool.

    reasoning: what an assistant thought before its content. tool_calls: the calls it made.
    tool_call_id, name: which call, of which function, a message of role tool answers.
    """

    role: str
    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One generation. Exactly one of messages, prompt and prompt_tokens is given.

    client: who asks; waiting clients are served in turn. priority: higher goes first.
    ctx: cap on prompt + answer in tokens; None is the model's limit.
    arrived_s: when the server received it; TTFT and queue time start there.
    tools: only with messages. tool_choice: auto, none, required, or the name of the one to call.
    parallel_tool_calls: whether an answer may make several calls.
    thinking: whether to think first; reasoning_effort: how much (none, low, medium, high).
    None: as the model's template does it.
    """

    id: str
    messages: tuple[Message, ...] | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    thinking: bool | None = None
    reasoning_effort: str | None = None
    prompt: str | None = None
    prompt_tokens: tuple[int, ...] | None = None
    params: SamplingParams = SamplingParams()
    client: str = ""
    priority: int = 0
    ctx: int | None = None
    arrived_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedRequest:
    """Texts, or their tokens, of which vectors are wanted. The rest as in Request."""

    id: str
    inputs: tuple[str | tuple[int, ...], ...]
    client: str = ""
    arrived_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its text (bytes that are not UTF-8 replaced) and its log probability."""

    token_id: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The chosen token of one position and the best alternatives, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of the call at `index` of an answer. id and name come once, with its first delta.

    arguments: the next piece of a JSON text.
    """

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of one request. num_tokens of its answer are now generated in all.

    reasoning: new text of what the model thinks before it answers; no part of `text`.
    """

    request_id: str
    text: str
    num_tokens: int
    logprobs: tuple[PositionLogprobs, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where the time of one request went, in llama-server's terms plus ttft, queue and template.

    cache_n: prompt tokens taken from the cache; prompt_n: prompt tokens computed.
    prompt_ms: from admission to the first token; cached_ms of it went into taking the cached part,
    first_step_ms into the last step. predicted_ms: from the first token to the last.
    draft_n: tokens that were proposed and computed; draft_n_accepted: how many of them were right.
    draft_steps: steps that the answer took after its first token. draft_speedup: against plain
    steps, by what those took meanwhile; 0: not known. draft_reason: why nothing was drafted.
    draft_by: who proposed, n-gram (the text itself) or a model, the one with most tokens first.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The one good end of a request. reason: stop, length, tool_calls or cancelled.

    stop: the stop string or end token that ended it. ctx: the limit it ran under.
    notes: what a user should know of how it was served (preempted, context full).
    seed: what gives this text again; None: nothing does (drafts were drawn).
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """The one good end of an EmbedRequest.

    vectors: float32 little-endian [inputs, width], each of length 1. prompt_tokens: of each input.
    """

    request_id: str
    vectors: bytes
    width: int
    prompt_tokens: tuple[int, ...]
    timings: Timings


@dataclass(frozen=True, slots=True)
class Failed:
    """The one bad end of a request. code and param as in LocalgenError."""

    request_id: str
    code: str
    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPhases:
    """Milliseconds of a request's life, in order; what has not begun is 0.

    cached: taking the known beginning of its prompt from the cache; prefill: the steps of the rest
    but the last one; first_step: that one, which gives the first token; decode: since then.
    """

    template_ms: float = 0.0
    queue_ms: float = 0.0
    cached_ms: float = 0.0
    prefill_ms: float = 0.0
    first_step_ms: float = 0.0
    decode_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStats:
    """One request as the engine sees it now. state: queued, prefill or decode.

    ttft_ms: None before its first token.
    """

    request_id: str
    client: str
    state: str
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    generated_tokens: int
    ctx: int
    age_s: float
    draft_tokens: int = 0
    accepted_tokens: int = 0
    ttft_ms: float | None = None
    phases: RequestPhases = RequestPhases()


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationStats:
    """How drafts do: recently, then totals since the engine started.

    drafters: who may propose. share: of the recent steps that had drafts. reason: why most had
    none. acceptance: share of the recent drafts that were kept. tokens_per_step: of one sequence.
    speedup: against plain steps of as many sequences, by what those took. drafting_steps_total:
    verified at once for any number of sequences.
    """

    drafters: tuple[str, ...] = ()
    share: float = 0.0
    reason: str = ""
    acceptance: float = 0.0
    tokens_per_step: float = 0.0
    speedup: float = 0.0
    drafting_steps_total: int = 0
    draft_tokens_total: int = 0
    accepted_tokens_total: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot: gauges of this moment, then totals since the engine started.

    kv_*: tokens of the pool; kv_used by running requests, kv_cached kept as prefixes.
    step_sequences[n]: how many steps computed n sequences at once (index 0 unused).
    step_tokens: how many steps by their tokens, in the classes of engine.stats.STEP_TOKENS_BOUNDS.
    *_per_s, ttft_* and itl_* are over the last minute at most; *_last_ms: the newest, 0 before
    there is one. context_tokens_total: over all steps, tokens in the cache that each one's
    sequences look at.
    """

    running: int = 0
    waiting: int = 0
    kv_tokens: int = 0
    kv_used: int = 0
    kv_cached: int = 0
    kv_free: int = 0
    token_budget: int = 0
    step_ms: float = 0.0
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    ttft_last_ms: float = 0.0
    ttft_p50_ms: float = 0.0
    ttft_p99_ms: float = 0.0
    itl_last_ms: float = 0.0
    itl_p50_ms: float = 0.0
    itl_p99_ms: float = 0.0
    steps_total: int = 0
    step_tokens_total: int = 0
    context_tokens_total: int = 0
    step_sequences: tuple[int, ...] = ()
    step_tokens: tuple[int, ...] = ()
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    prefix_cache_queries_total: int = 0
    prefix_cache_hits_total: int = 0
    num_preemptions_total: int = 0
    requests_total: dict[str, int] = field(default_factory=dict)
    speculation: SpeculationStats = SpeculationStats()
    sequences: tuple[SequenceStats, ...] = ()


@dataclass(frozen=True, slots=True)
class StepEvents:
    """Everything one step had to say, in one message. Within a request: deltas, then its end."""

    deltas: tuple[Delta, ...] = ()
    finished: tuple[Finished, ...] = ()
    failed: tuple[Failed, ...] = ()
    stats: EngineStats | None = None
    embedded: tuple[Embedded, ...] = ()
