"""An answer of another server, from the events of its stream, timed here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from localgen.backends.types import Timings
from localgen.client.endpoints import Endpoint
from localgen.client.errors import EndpointUnavailable, error_message
from localgen.client.responses import Completion, TextDelta
from localgen.client.sse import DONE

_CONTENT_FILTER_NOTE = "the server's content filter ended the answer"


class _Function(msgspec.Struct):
    name: str | None = None


class _ToolCall(msgspec.Struct):
    function: _Function | None = None


class _Delta(msgspec.Struct):
    """New text. Servers disagree on what reasoning is called."""

    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    message: _Delta | None = None
    finish_reason: str | None = None


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
    """What localgen adds: tokens so far with each piece, the rest at the end."""

    num_tokens: int | None = None
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


class TimedChunks:
    """The pieces of a body as the network delivers them. last_arrival_s: when the last of them
    came.

    What comes together has one time: how fast it is then read says nothing of the server.
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
    """Reads one answer. endpoint: whose it is. sent_s: when its request was sent.

    chunks: what the events are read from, on the same clock.
    """

    def __init__(self, model: str, endpoint: Endpoint, sent_s: float, chunks: TimedChunks) -> None:
        self._model = model
        self._endpoint = endpoint
        self._sent_s = sent_s
        self._chunks = chunks
        self._first_delta_s = self._last_delta_s = sent_s
        self._num_deltas = self._num_first_deltas = 0
        self._has_reasoning = False
        self._tool_names: list[str] = []
        self._finish_reason: str | None = None
        self._usage = _Usage()
        self._timings: dict[str, Any] = {}
        self._localgen = _LocalgenFields()

    def parse(self, events: Iterator[bytes]) -> Iterator[TextDelta | Completion]:
        """Its text, then its end. LocalgenError: the server tells of one, or breaks off."""
        ended = False
        for event in events:
            if event == DONE:
                ended = True
                break
            yield from self._parse_chunk(self._decode(event))
        # some say why they stop, then hang up without the closing event
        if not ended and self._finish_reason is None:
            raise EndpointUnavailable(
                f"the answer of {self._endpoint.display_name} broke off in the middle"
            )
        yield self._completion()

    def _decode(self, event: bytes) -> _Chunk:
        try:
            chunk = msgspec.json.decode(event, type=_Chunk)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            # as this may be a plain sentence of the server, show how it starts
            start = event[:80].decode(errors="replace")
            raise EndpointUnavailable(
                f"{self._endpoint.display_name} sends what is not OpenAI's protocol: "
                f"{start!r} ({error})"
            ) from error
        if chunk.error is not None:
            raise EndpointUnavailable(
                f"{self._endpoint.display_name} ended the answer: "
                f"{error_message(event, self._endpoint)}"
            )
        return chunk

    def _parse_chunk(self, chunk: _Chunk) -> Iterator[TextDelta]:
        self._model = chunk.model or self._model
        self._usage = chunk.usage or self._usage
        self._timings = chunk.timings or self._timings
        self._localgen = chunk.localgen or self._localgen
        for choice in chunk.choices or ():
            self._finish_reason = choice.finish_reason or self._finish_reason
            delta = choice.delta or choice.message
            if delta is not None:
                yield from self._parse_delta(delta)

    def _parse_delta(self, delta: _Delta) -> Iterator[TextDelta]:
        text = delta.content or delta.refusal or ""
        reasoning = delta.reasoning_content or delta.reasoning or ""
        calls = [call.function.name for call in delta.tool_calls or () if call.function]
        self._tool_names += [name for name in calls if name]
        if not (text or reasoning or delta.tool_calls):
            return
        self._last_delta_s = self._chunks.last_arrival_s
        if not self._num_deltas:
            self._first_delta_s = self._last_delta_s
        self._num_deltas += 1
        self._num_first_deltas += self._last_delta_s == self._first_delta_s
        self._has_reasoning = self._has_reasoning or bool(reasoning)
        counted = self._localgen.num_tokens
        yield TextDelta(text, counted or self._num_deltas, reasoning, estimated=counted is None)

    def _completion(self) -> Completion:
        usage, served = self._usage, self._localgen
        details = usage.prompt_tokens_details
        cached = details.cached_tokens if details is not None else None
        ours = served.ctx is not None
        cached = self._timings.get("cache_n") if cached is None else cached
        return Completion(
            model=self._model,
            finish_reason=self._finish_reason or "unknown",
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=cached,
            completion_tokens=self._completion_tokens,
            timings=msgspec.convert(self._timings, Timings)
            if ours
            else self._client_timings(cached),
            ctx=served.ctx,
            seed=served.seed,
            stop=served.stop,
            notes=(*served.notes, *self._notes()),
            estimated=usage.completion_tokens is None,
            client_measured=not ours,
        )

    @property
    def _completion_tokens(self) -> int:
        counted = self._usage.completion_tokens
        return self._num_deltas if counted is None else counted

    def _client_timings(self, cached_tokens: int | None) -> Timings:
        """TTFT and speed as they were seen here, the network included."""
        span_s = self._last_delta_s - self._first_delta_s
        tokens = self._completion_tokens - self._hidden_reasoning_tokens()
        # the first arrival is where the measuring starts: its tokens do not count
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
        """Tokens of reasoning that were counted and never sent."""
        details = self._usage.completion_tokens_details
        if self._has_reasoning or details is None:
            return 0
        return details.reasoning_tokens or 0

    def _notes(self) -> Iterator[str]:
        if self._finish_reason == "content_filter":
            yield _CONTENT_FILTER_NOTE
        if self._tool_names:
            yield f"the model wants to call {', '.join(self._tool_names)}: nothing here does that"
