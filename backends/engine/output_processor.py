"""Convert sampled tokens to deltas: text, reasoning, tool calls, logprobs; match stop strings."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

from localgen.backends.engine.scheduler import SequenceOutput
from localgen.backends.runner.sequence import Sequence
from localgen.backends.text.detokenize import Detokenizer
from localgen.backends.text.line_limiter import LineLimiter
from localgen.backends.text.response_parser import ParsedDelta
from localgen.backends.text.stop import StopStringMatcher
from localgen.backends.text.tokenizer import Tokenizer
from localgen.backends.types import (
    NO_LINE_LIMITS,
    Delta,
    PositionLogprobs,
    TokenLogprob,
    ToolCallDelta,
)


class OutputProcessor:
    """Output state of one request.

    can_wait: new tokens may be left to `read`, because no text can end the answer.
    """

    def __init__(self, seq: Sequence, tokenizer: Tokenizer) -> None:
        self.seq = seq
        self._token_bytes = (
            tokenizer.piece if seq.response_parser is None else self._token_bytes_with_control
        )
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer()
        self._reasoning: list[str] = []
        self._tool_calls: list[ToolCallDelta] = []
        self._stop_matcher = StopStringMatcher(seq.params.stop)
        self._line_limiter = LineLimiter(seq.line_limits)
        # all text of the model is content, and nothing but an incomplete character is held back
        can_end_answer = bool(seq.params.stop) or seq.line_limits != NO_LINE_LIMITS
        self._is_plain = seq.response_parser is None and not can_end_answer
        self._echoes_next = seq.echo is not None
        self.can_wait = self._is_plain and seq.params.logprobs is None and seq.echo is None
        self._logprobs: list[PositionLogprobs] = []
        self.num_tokens = 0

    @property
    def matched_stop(self) -> str | None:
        """The stop string found in the text, if any."""
        return self._stop_matcher.matched

    @property
    def end_reason(self) -> str | None:
        """The finish reason, if the text has ended the answer: by a stop string, or at a line."""
        if self.matched_stop is not None:
            return "stop"
        return "length" if self._line_limiter.has_ended else None

    @property
    def has_tool_calls(self) -> bool:
        """True if the answer contains a tool call."""
        return self.seq.response_parser is not None and self.seq.response_parser.has_tool_calls

    def process(self, output: SequenceOutput) -> Delta | None:
        """Return the delta for new tokens, or None if there is nothing to emit yet.

        Text is held back while it may be the start of a stop string or an incomplete character.
        """
        tokens, ends = output.tokens, output.reason == "stop"
        if self.can_wait:
            return self.read()
        text = [self._echo()] if self._echoes_next else []
        if self._is_plain:
            self._logprobs += output.logprobs
            return self._make_delta("".join(text) + self._plain_text(tokens))
        before = self.num_tokens
        for token in tokens:
            if self.end_reason is not None:
                break
            self.num_tokens += 1
            if not (ends and token in self.seq.stop_ids):
                new = self._detokenizer.feed(self._token_bytes(token))
                if self.seq.response_parser is not None:
                    new = self._collect(self.seq.response_parser.feed(new))
                # stop strings only match text generated after min_tokens
                early = self.num_tokens <= self.seq.params.min_tokens
                text.append(self._limit(new if early else self._stop_matcher.feed(new)))
        self._logprobs += output.logprobs[: self.num_tokens - before]
        if output.reason and self.end_reason is None:
            text.append(self._flush_text())
        return self._make_delta("".join(text))

    def _limit(self, text: str) -> str:
        started_s = self.seq.first_token_s
        elapsed_s = 0.0 if started_s is None else time.monotonic() - started_s
        return self._line_limiter.feed(text, elapsed_s * 1e3)

    def _echo(self) -> str:
        """Return the text of the prompt; its logprobs are kept for the next delta."""
        self._echoes_next = False
        assert self.seq.echo is not None
        if self.seq.is_scored:
            first = self.seq.tokens[0]
            text = self._token_bytes(first).decode("utf-8", "replace")
            start = PositionLogprobs(TokenLogprob(first, text, 0.0), (), is_first=True)
            self._logprobs = [start, *self.seq.scored]
        return self.seq.echo

    def read(self) -> Delta | None:
        """Return the delta for all tokens since the last one, if `can_wait`.

        None if there are none, or only a part of a character.
        """
        assert self.can_wait
        tokens = self.seq.tokens[self.seq.num_prompt + self.num_tokens :]
        return self._make_delta(self._plain_text(tokens)) if tokens else None

    def _plain_text(self, tokens: Seq[int]) -> str:
        """Text of new tokens; a stop token, which is the last one, has none."""
        self.num_tokens += len(tokens)
        if tokens and tokens[-1] in self.seq.stop_ids:
            tokens = tokens[:-1]
        return self._detokenizer.feed(b"".join([self._token_bytes(token) for token in tokens]))

    def flush(self) -> Delta | None:
        """Return the text still held back when a request is cancelled."""
        return self.read() if self.can_wait else self._make_delta(self._flush_text())

    def _flush_text(self) -> str:
        """The text still held back. The time cannot end an answer that has ended."""
        if self.seq.response_parser is None:
            return self._line_limiter.feed(self._stop_matcher.flush(), 0.0)
        text = self._stop_matcher.feed(self._collect(self.seq.response_parser.finish()))
        return self._line_limiter.feed(text + self._stop_matcher.flush(), 0.0)

    def _token_bytes_with_control(self, token: int) -> bytes:
        assert self.seq.response_parser is not None
        return self.seq.response_parser.control_pieces.get(token) or self._tokenizer.piece(token)

    def _collect(self, parsed: ParsedDelta) -> str:
        """Return the content; keep reasoning and tool calls for the next delta."""
        self._reasoning.append(parsed.reasoning)
        self._tool_calls += parsed.tool_calls
        return parsed.content

    def _make_delta(self, text: str) -> Delta | None:
        if self._is_plain and not self._logprobs:
            prompt = self.seq.num_prompt
            return Delta(self.seq.id, text, self.num_tokens, prompt_tokens=prompt) if text else None
        reasoning, calls = "".join(self._reasoning), tuple(self._tool_calls)
        if not (text or self._logprobs or reasoning or calls):
            return None
        logprobs, self._logprobs = tuple(self._logprobs), []
        self._reasoning, self._tool_calls = [], []
        return Delta(
            *(self.seq.id, text, self.num_tokens, logprobs, reasoning, calls, self.seq.num_prompt)
        )
