"""What one request has said so far: tokens to text, thoughts, calls, stop strings, logprobs.

Logprobs are held with their text.
"""

from __future__ import annotations

from localgen.backends.engine.scheduler import Output
from localgen.backends.runner.sequence import Sequence
from localgen.backends.text.detokenize import Detokenizer
from localgen.backends.text.response_parser import Parts
from localgen.backends.text.stop import StopMatcher
from localgen.backends.text.tokenizer import Tokenizer
from localgen.backends.types import Delta, PositionLogprobs, ToolCallDelta


class Answer:
    """The text side of a sequence. `stopped`: the stop string that its text has reached."""

    def __init__(self, seq: Sequence, tokenizer: Tokenizer) -> None:
        self.seq = seq
        self._piece = tokenizer.piece if seq.reader is None else self._read_piece
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer()
        self._reasoning: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._matcher = StopMatcher(seq.params.stop)
        self._logprobs: list[PositionLogprobs] = []
        self.num_tokens = 0

    @property
    def stopped(self) -> str | None:
        """The stop string that was reached, if any."""
        return self._matcher.matched

    @property
    def has_called(self) -> bool:
        """Whether it has made a call."""
        return self.seq.reader is not None and self.seq.reader.has_called

    def take(self, output: Output) -> Delta | None:
        """New text of an output; None while it is held back."""
        text, before = [], self.num_tokens
        for token in output.tokens:
            if self.stopped is not None:
                break
            self.num_tokens += 1
            if not (output.reason == "stop" and token in self.seq.stop_ids):
                new = self._detokenizer.feed(self._piece(token))
                if self.seq.reader is not None:
                    new = self._content(self.seq.reader.feed(new))
                # what comes before min_tokens is no part of a stop string
                early = self.num_tokens <= self.seq.params.min_tokens
                text.append(new if early else self._matcher.feed(new))
        self._logprobs += output.logprobs[: self.num_tokens - before]
        if output.reason and self.stopped is None:
            text.append(self._held_back())
        return self._delta("".join(text))

    def rest(self) -> Delta | None:
        """Text still held back when a request is cancelled."""
        return self._delta(self._held_back())

    def _held_back(self) -> str:
        if self.seq.reader is None:
            return self._matcher.flush()
        text = self._matcher.feed(self._content(self.seq.reader.finish()))
        return text + self._matcher.flush()

    def _read_piece(self, token: int) -> bytes:
        assert self.seq.reader is not None
        return self.seq.reader.pieces.get(token) or self._tokenizer.piece(token)

    def _content(self, parts: Parts) -> str:
        """The content among the parts; the others are kept for the next delta."""
        self._reasoning.append(parts.reasoning)
        self._calls += parts.tool_calls
        return parts.content

    def _delta(self, text: str) -> Delta | None:
        reasoning, calls = "".join(self._reasoning), tuple(self._calls)
        if not (text or self._logprobs or reasoning or calls):
            return None
        logprobs, self._logprobs = tuple(self._logprobs), []
        self._reasoning, self._calls = [], []
        return Delta(self.seq.id, text, self.num_tokens, logprobs, reasoning, calls)
