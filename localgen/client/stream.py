"""An answer of another server, from the events of its stream, timed here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from localgen.backends.types import Timings
from localgen.client.endpoints import Endpoint
from localgen.client.errors import EndpointUnavailable, said
from localgen.client.responses import Answer, Text
from localgen.client.sse import DONE

_FILTERED = "the server's content filter ended the answer"


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


class _AnswerDetails(msgspec.Struct):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _AnswerDetails | None = None


class _Served(msgspec.Struct):
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
    localgen: _Served | None = None
    error: Any = None


class Arrivals:
    """The pieces of a body as the network delivers them. last_s: when the last of them came.

    What comes together has one time: how fast it is then read says nothing of the server.
    """

    def __init__(
        self, chunks: Iterable[bytes], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._chunks = chunks
        self._clock = clock
        self.last_s = 0.0

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._chunks:
            self.last_s = self._clock()
            yield chunk


class AnswerReader:
    """Reads one answer. endpoint: whose it is. sent_s: when its request was sent.

    arrivals: what the events are read from, on the same clock.
    """

    def __init__(self, model: str, endpoint: Endpoint, sent_s: float, arrivals: Arrivals) -> None:
        self._model = model
        self._endpoint = endpoint
        self._sent_s = sent_s
        self._arrivals = arrivals
        self._first_s = self._last_s = sent_s
        self._pieces = self._first_pieces = 0
        self._reasoned = False
        self._tools: list[str] = []
        self._reason: str | None = None
        self._usage = _Usage()
        self._timings: dict[str, Any] = {}
        self._served = _Served()

    def read(self, events: Iterator[bytes]) -> Iterator[Text | Answer]:
        """Its text, then its end. LocalgenError: the server tells of one, or breaks off."""
        ended = False
        for event in events:
            if event == DONE:
                ended = True
                break
            yield from self._texts(self._decoded(event))
        # some say why they stop, then hang up without the closing event
        if not ended and self._reason is None:
            raise EndpointUnavailable(
                f"the answer of {self._endpoint.where} broke off in the middle"
            )
        yield self._answer()

    def _decoded(self, event: bytes) -> _Chunk:
        try:
            chunk = msgspec.json.decode(event, type=_Chunk)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            # as this may be a plain sentence of the server, show how it starts
            start = event[:80].decode(errors="replace")
            raise EndpointUnavailable(
                f"{self._endpoint.where} sends what is not OpenAI's protocol: {start!r} ({error})"
            ) from error
        if chunk.error is not None:
            raise EndpointUnavailable(
                f"{self._endpoint.where} ended the answer: {said(event, self._endpoint)}"
            )
        return chunk

    def _texts(self, chunk: _Chunk) -> Iterator[Text]:
        self._model = chunk.model or self._model
        self._usage = chunk.usage or self._usage
        self._timings = chunk.timings or self._timings
        self._served = chunk.localgen or self._served
        for choice in chunk.choices or ():
            self._reason = choice.finish_reason or self._reason
            delta = choice.delta or choice.message
            if delta is not None:
                yield from self._text(delta)

    def _text(self, delta: _Delta) -> Iterator[Text]:
        text = delta.content or delta.refusal or ""
        reasoning = delta.reasoning_content or delta.reasoning or ""
        calls = [call.function.name for call in delta.tool_calls or () if call.function]
        self._tools += [name for name in calls if name]
        if not (text or reasoning or delta.tool_calls):
            return
        self._last_s = self._arrivals.last_s
        if not self._pieces:
            self._first_s = self._last_s
        self._pieces += 1
        self._first_pieces += self._last_s == self._first_s
        self._reasoned = self._reasoned or bool(reasoning)
        counted = self._served.num_tokens
        yield Text(text, counted or self._pieces, reasoning, estimated=counted is None)

    def _answer(self) -> Answer:
        usage, served = self._usage, self._served
        details = usage.prompt_tokens_details
        cached = details.cached_tokens if details is not None else None
        ours = served.ctx is not None
        cached = self._timings.get("cache_n") if cached is None else cached
        return Answer(
            model=self._model,
            finish_reason=self._reason or "unknown",
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=cached,
            completion_tokens=self._completion_tokens,
            timings=msgspec.convert(self._timings, Timings) if ours else self._measured(cached),
            ctx=served.ctx,
            seed=served.seed,
            stop=served.stop,
            notes=(*served.notes, *self._notes()),
            estimated=usage.completion_tokens is None,
            measured_here=not ours,
        )

    @property
    def _completion_tokens(self) -> int:
        counted = self._usage.completion_tokens
        return self._pieces if counted is None else counted

    def _measured(self, cached: int | None) -> Timings:
        """TTFT and speed as they were seen here, the network included."""
        span_s = self._last_s - self._first_s
        tokens = self._completion_tokens - self._hidden_tokens()
        # the first arrival is where the measuring starts: its tokens do not count
        later = self._pieces - self._first_pieces
        timed = tokens * later / self._pieces if self._pieces else 0.0
        return Timings(
            cache_n=cached or 0,
            prompt_n=max(0, (self._usage.prompt_tokens or 0) - (cached or 0)),
            predicted_n=self._completion_tokens,
            predicted_ms=span_s * 1000,
            predicted_per_second=timed / span_s if span_s > 0 else 0.0,
            ttft_ms=(self._first_s - self._sent_s) * 1000,
        )

    def _hidden_tokens(self) -> int:
        """Tokens of reasoning that were counted and never sent."""
        details = self._usage.completion_tokens_details
        if self._reasoned or details is None:
            return 0
        return details.reasoning_tokens or 0

    def _notes(self) -> Iterator[str]:
        if self._reason == "content_filter":
            yield _FILTERED
        if self._tools:
            yield f"the model wants to call {', '.join(self._tools)}: nothing here does that"
