"""Read the server-sent events of one answer, and time their arrival."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from localgen.backends.typed_data import convert, decode_json
from localgen.backends.types import PromptProgress, Timings, ToolCall
from localgen.client.connection import (
    MAX_MESSAGE_BYTES,
    MessageTooLong,
    ServerResponse,
    join_chunks,
)
from localgen.client.errors import ServerErrors
from localgen.client.responses import Completion, TextDelta, TokenAlternative

DONE = b"[DONE]"
_SILENCE = re.compile(rb": engine silent for (\d{1,9}) s$")
_PROMPT = re.compile(rb": prompt (\d{1,9}) of (\d{1,9}) tokens$")


def iter_sse_data(
    chunks: Iterable[bytes], on_comment: Callable[[bytes], None] = lambda line: None
) -> Iterator[bytes]:
    """Yield the data of each event; other fields are ignored. on_comment: called with each comment.

    Only LF and CRLF end a line: text may contain other line breaks. An event without its blank
    line was cut off and is dropped, except for a final DONE. Raises MessageTooLong.
    """
    parts: list[bytes] = []
    num_bytes = 0
    for line in _iter_lines(chunks):
        if line.startswith(b"data:"):
            parts.append(line[5:].removeprefix(b" "))
            num_bytes += len(line)
            if num_bytes > MAX_MESSAGE_BYTES:
                raise MessageTooLong("an event")
        elif line.startswith(b":"):
            on_comment(line)
        if parts and (not line or parts == [DONE]):
            yield b"\n".join(parts)
            parts, num_bytes = [], 0


def _iter_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    line = bytearray()
    for chunk in chunks:
        *ends, begin = chunk.split(b"\n")
        for end in ends:
            line += end
            yield bytes(line).removesuffix(b"\r")
            line.clear()
        line += begin
        if len(line) > MAX_MESSAGE_BYTES:
            raise MessageTooLong("a line")
    if line:
        yield bytes(line)


def read_completion(
    response: ServerResponse,
    errors: ServerErrors,
    on_silence: Callable[[float], None],
    on_prompt: Callable[[PromptProgress], None],
) -> Iterator[TextDelta | Completion]:
    """Yield the text of a response as it arrives, then one Completion.

    on_silence: called when a localgen server reports how many seconds its engine has sent nothing.
    on_prompt: called when it reports the progress of the prompt.
    Raises an error if the server reports one, or if the response ends early or is malformed.
    """
    chunks = TimedChunks(response.iter_bytes())
    parser = CompletionStreamParser(chunks, response.sent_s, errors, response.wait_notes)
    match response.media_type:
        case "application/json":  # the server does not stream
            return parser.parse(iter((join_chunks(chunks), DONE)))
        case "text/event-stream" | "":
            return parser.parse(
                iter_sse_data(chunks, partial(_read_comment, on_silence, on_prompt))
            )
        case media_type:
            raise errors.not_openai(media_type)


def _read_comment(
    on_silence: Callable[[float], None], on_prompt: Callable[[PromptProgress], None], line: bytes
) -> None:
    if found := _SILENCE.match(line):
        on_silence(float(found[1]))
    elif found := _PROMPT.match(line):
        on_prompt(PromptProgress(int(found[1]), int(found[2])))


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    """A piece of a call. index: of the call; some servers send whole calls without it."""

    function: _Function | None = None
    id: str | None = None
    index: int | None = None


class _Delta(msgspec.Struct):
    """New text. Servers use different names for reasoning."""

    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    top_logprobs: list[_TokenLogprob] = []


class _Logprobs(msgspec.Struct):
    content: list[_TokenLogprob] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    message: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _CompletionDetails(msgspec.Struct):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None


class _LocalgenFields(msgspec.Struct):
    """localgen's extensions: tokens so far and of the prompt in each chunk, the rest at the end."""

    num_tokens: int | None = None
    prompt_tokens: int | None = None
    ctx: int | None = None
    seed: int | None = None
    stop: str | None = None
    notes: tuple[str, ...] = ()


class _Chunk(msgspec.Struct):
    model: str | None = None
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    timings: dict[str, Any] | None = None
    localgen: _LocalgenFields | None = None
    error: Any = None


def _alternatives(logprobs: _Logprobs | None) -> tuple[TokenAlternative, ...]:
    """The most probable tokens at the first place, the chosen one included."""
    if logprobs is None or not logprobs.content:
        return ()
    chosen = logprobs.content[0]
    listed = {token.token: token.logprob for token in (chosen, *chosen.top_logprobs)}
    ordered = sorted(listed.items(), key=lambda each: -each[1])
    return tuple(TokenAlternative(text, math.exp(min(0.0, value))) for text, value in ordered)


@dataclass(slots=True)
class _PartialCall:
    """A call that is being received. index: as the server gave it, or None."""

    index: int | None
    id: str = ""
    name: str = ""
    arguments: str = ""


class _CallBuilder:
    """Puts the tool calls of an answer together, in the order of their indexes.

    A piece belongs to the call of its index (OpenAI's `delta.tool_calls`), in any order; without an
    index, to the last call, unless it begins another one with an id or a name.
    """

    def __init__(self) -> None:
        self._calls: list[_PartialCall] = []

    def add(self, piece: _ToolCall) -> None:
        function = piece.function or _Function()
        call = self._find(piece)
        if call is None:
            call = _PartialCall(piece.index)
            self._calls.append(call)
        call.id = call.id or piece.id or ""
        call.name = call.name or function.name or ""
        call.arguments += function.arguments or ""

    def _find(self, piece: _ToolCall) -> _PartialCall | None:
        if piece.index is not None:
            same = (each for each in reversed(self._calls) if each.index == piece.index)
            found = next(same, None)
            # some servers send whole calls, all with the index 0; others a new id with each piece
            is_another = found is not None and piece.id and piece.id != found.id
            has_name = piece.function is not None and piece.function.name
            return None if is_another and has_name else found
        begins = piece.id or (piece.function is not None and piece.function.name)
        return self._calls[-1] if self._calls and not begins else None

    def calls(self) -> tuple[ToolCall, ...]:
        calls = sorted(self._calls, key=lambda call: call.index or 0)
        return tuple(
            ToolCall(call.id or f"call_{number}", call.name, call.arguments)
            for number, call in enumerate(calls)
            if call.name
        )


class TimedChunks:
    """Iterates over the chunks of a body as the network delivers them.

    last_arrival_s: when the current chunk arrived. All events of a chunk have this time: how fast
    they are parsed says nothing about the server.
    """

    def __init__(
        self, chunks: Iterable[bytes], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._chunks = chunks
        self._clock = clock
        self.last_arrival_s = 0.0

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._chunks:
            self.last_arrival_s = self._clock()
            yield chunk


class CompletionStreamParser:
    """Parses one answer of any OpenAI-compatible server.

    chunks: the body that the events are read from. sent_s: when the request was sent, on the same
    clock. notes: first notes of the Completion.
    """

    def __init__(
        self,
        chunks: TimedChunks,
        sent_s: float,
        errors: ServerErrors,
        notes: tuple[str, ...] = (),
    ) -> None:
        self._chunks = chunks
        self._sent_s = sent_s
        self._errors = errors
        self._notes = notes
        self._model = ""
        self._first_delta_s = self._last_delta_s = sent_s
        self._num_deltas = self._num_first_deltas = 0
        self._has_reasoning = False
        self._calls = _CallBuilder()
        self._finish_reason: str | None = None
        self._usage = _Usage()
        self._timings: dict[str, Any] = {}
        self._localgen = _LocalgenFields()

    def parse(self, events: Iterator[bytes]) -> Iterator[TextDelta | Completion]:
        """Yield the text, then the Completion. Raises as read_completion()."""
        for event in events:
            if event == DONE:
                break
            yield from self._parse_chunk(self._decode(event))
        else:
            # some servers close the connection after the finish reason, without DONE
            if self._finish_reason is None:
                raise self._errors.incomplete_stream()
        yield self._completion()

    def _decode(self, event: bytes) -> _Chunk:
        try:
            chunk = decode_json(event, _Chunk)
        except msgspec.DecodeError as error:
            raise self._errors.malformed_event(event, error) from error
        if chunk.error is not None:
            raise self._errors.stream_error(event)
        return chunk

    def _parse_chunk(self, chunk: _Chunk) -> Iterator[TextDelta]:
        self._model = chunk.model or self._model
        self._usage = chunk.usage or self._usage
        self._timings = chunk.timings or self._timings
        self._localgen = chunk.localgen or self._localgen
        for choice in chunk.choices or ():
            self._finish_reason = choice.finish_reason or self._finish_reason
            delta = choice.delta or choice.message or _Delta(choice.text)
            yield from self._parse_delta(delta, _alternatives(choice.logprobs))

    def _parse_delta(
        self, delta: _Delta, alternatives: tuple[TokenAlternative, ...]
    ) -> Iterator[TextDelta]:
        text = delta.content or delta.refusal or ""
        reasoning = delta.reasoning_content or delta.reasoning or ""
        for piece in delta.tool_calls or ():
            self._calls.add(piece)
        if not (text or reasoning or delta.tool_calls):
            return
        self._last_delta_s = self._chunks.last_arrival_s
        if not self._num_deltas:
            self._first_delta_s = self._last_delta_s
        self._num_deltas += 1
        self._num_first_deltas += self._last_delta_s == self._first_delta_s
        self._has_reasoning = self._has_reasoning or bool(reasoning)
        counted, prompt_tokens = self._localgen.num_tokens, self._localgen.prompt_tokens
        tokens = counted or self._num_deltas
        yield TextDelta(text, tokens, reasoning, counted is None, prompt_tokens, alternatives)

    def _completion(self) -> Completion:
        usage, served = self._usage, self._localgen
        details = usage.prompt_tokens_details
        cached = details.cached_tokens if details is not None else None
        is_localgen = served.ctx is not None
        cached = self._timings.get("cache_n") if cached is None else cached
        return Completion(
            model=self._model,
            finish_reason=self._finish_reason or "unknown",
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=cached,
            completion_tokens=self._completion_tokens,
            timings=(self._server_timings() if is_localgen else self._client_timings(cached)),
            ctx=served.ctx,
            seed=served.seed,
            stop=served.stop,
            notes=(*self._notes, *served.notes, *self._answer_notes()),
            estimated=usage.completion_tokens is None,
            client_measured=not is_localgen,
            tool_calls=self._calls.calls(),
        )

    def _server_timings(self) -> Timings:
        try:
            return convert(self._timings, Timings)
        except msgspec.MsgspecError as error:
            raise self._errors.malformed_event(b"timings", error) from error

    @property
    def _completion_tokens(self) -> int:
        counted = self._usage.completion_tokens
        return self._num_deltas if counted is None else counted

    def _client_timings(self, cached_tokens: int | None) -> Timings:
        """TTFT and speed as measured by this client, including the network."""
        span_s = self._last_delta_s - self._first_delta_s
        tokens = self._completion_tokens - self._hidden_reasoning_tokens()
        # the time span starts at the first arrival, so its tokens do not count
        later = self._num_deltas - self._num_first_deltas
        timed = tokens * later / self._num_deltas if self._num_deltas else 0.0
        return Timings(
            cache_n=cached_tokens or 0,
            prompt_n=max(0, (self._usage.prompt_tokens or 0) - (cached_tokens or 0)),
            predicted_n=self._completion_tokens,
            predicted_ms=span_s * 1000,
            predicted_per_second=timed / span_s if span_s > 0 else 0.0,
            ttft_ms=(self._first_delta_s - self._sent_s) * 1000,
        )

    def _hidden_reasoning_tokens(self) -> int:
        """Reasoning tokens that the server counted but did not send."""
        details = self._usage.completion_tokens_details
        if self._has_reasoning or details is None:
            return 0
        return details.reasoning_tokens or 0

    def _answer_notes(self) -> Iterator[str]:
        if self._finish_reason == "content_filter":
            yield "the server's content filter ended the answer"
