"""One request as its client saw it, and the client that makes it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from localgen.backends.errors import LocalgenError
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Message, Timings
from localgen.client import Client, Completion, TextDelta

# a text to be continued, or a conversation
Prompt = str | Sequence[Message]


@dataclass(frozen=True, slots=True)
class MeasuredRequest:
    """Times in seconds of the client's clock.

    arrivals: time of each piece of the answer, reasoning included, and the tokens received by then.
    text_s: when the first text came that is not reasoning, or None.
    prompt_tokens, completion_tokens: as the server counts them. timings: the engine's own, or None
    if the server does not report them. text: of the answer, without its reasoning. error: why there
    is no answer, else empty.
    """

    sent_s: float
    ended_s: float
    arrivals: tuple[tuple[float, int], ...] = ()
    text_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    timings: Timings | None = None
    text: str = ""
    error: str = ""

    @property
    def first_s(self) -> float:
        """Time of the first piece of the answer, which there is."""
        return self.arrivals[0][0]

    @property
    def last_s(self) -> float:
        """Time of the last piece of the answer, which there is."""
        return self.arrivals[-1][0]

    @property
    def ttft_s(self) -> float:
        """From sending the request to the first text of the answer; the whole time if it has none.

        Reasoning is no text of the answer.
        """
        return (self.ended_s if self.text_s is None else self.text_s) - self.sent_s

    @property
    def e2e_s(self) -> float:
        """From sending the request to the last text of the answer, as vLLM counts it."""
        return (self.last_s if self.arrivals else self.ended_s) - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Time per token after the first; 0 for a single token.

        As vLLM counts it, but from the first reasoning on. The tokens of an answer that comes in
        one piece share the whole time.
        """
        if self.completion_tokens < 2:
            return 0.0
        if len(self.arrivals) < 2:
            return self.e2e_s / self.completion_tokens
        return (self.last_s - self.first_s) / (self.completion_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Times between two pieces of text (inter-token latencies, if each has one token)."""
        return [late - early for (early, _), (late, _) in pairwise(self.arrivals)]

    @property
    def prefill_rate(self) -> float:
        """Computed prompt tokens/s, of the engine if it reports them."""
        if self.timings is not None:
            return self.timings.prompt_per_second
        return (self.prompt_tokens - self.cached_tokens) / self.ttft_s

    @property
    def decode_rate(self) -> float:
        """Tokens/s after the first, of the engine if it reports them; 0 for a single token."""
        if self.timings is not None:
            return self.timings.predicted_per_second
        return 1 / self.tpot_s if self.tpot_s else 0.0


class Target:
    """The server and model that are measured. Thread-safe.

    context: tokens of prompt and answer, or None if the server does not report it. is_chat: prompts
    are messages, which each server takes; else texts that are continued.
    """

    def __init__(
        self,
        client: Client,
        model: str | None,
        context: int | None,
        *,
        is_chat: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._client, self._model, self.context, self._clock = client, model, context, clock
        self._is_chat, self._can_ignore_eos = is_chat, True

    def ask(
        self, prompt: Prompt, max_tokens: int, json_schema: str | None = None
    ) -> MeasuredRequest:
        """A greedy answer, of exactly max_tokens tokens where the server can. Errors are in it.

        json_schema: that the answer follows; it may then end earlier.
        """
        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=self._can_ignore_eos and json_schema is None,
            json_schema=json_schema,
        )
        arrivals: list[tuple[float, int]] = []
        texts: list[str] = []
        sent_s, text_s, end = self._clock(), None, None
        try:
            for part in self._parts(prompt, params):
                now_s = self._clock()
                if isinstance(part, Completion):
                    end = part
                elif part.text or part.reasoning:
                    arrivals.append((now_s, part.num_tokens))
                    texts.append(part.text)
                    text_s = now_s if text_s is None and part.text else text_s
        except LocalgenError as error:
            if params.ignore_eos and "ignore_eos" in error.message:  # a server that refuses it
                self._can_ignore_eos = False
                return self.ask(prompt, max_tokens, json_schema)
            return MeasuredRequest(sent_s, self._clock(), error=error.message)
        ended_s = self._clock()
        if end is None:
            return MeasuredRequest(sent_s, ended_s, error="the answer has no end")
        return MeasuredRequest(
            sent_s,
            ended_s,
            tuple(arrivals),
            text_s,
            end.prompt_tokens or _num_words(prompt),  # not each server counts
            end.cached_tokens or 0,
            end.completion_tokens,
            None if end.client_measured else end.timings,
            "".join(texts),
        )

    def abort(self) -> None:
        """From another thread: end all requests, now and in future."""
        self._client.abort()

    def _parts(self, prompt: Prompt, params: SamplingParams) -> Iterator[TextDelta | Completion]:
        if isinstance(prompt, str) and not self._is_chat:
            return self._client.complete(self._model, prompt, params)
        messages = [Message("user", prompt)] if isinstance(prompt, str) else prompt
        return self._client.chat(self._model, messages, params)


def _num_words(prompt: Prompt) -> int:
    texts = [prompt] if isinstance(prompt, str) else [message.content for message in prompt]
    return sum(len(text.split()) for text in texts)
