"""What one request has said so far: tokens to text, stop strings, logprobs held with their text."""

from __future__ import annotations

from localgen.backends.engine.scheduler import Output
from localgen.backends.engine.sequence import Sequence
from localgen.backends.text.detokenize import Detokenizer
from localgen.backends.text.stop import StopMatcher
from localgen.backends.text.tokenizer import Tokenizer
from localgen.backends.types import Delta, PositionLogprobs


class Answer:
    """The text side of a sequence. `stopped`: the stop string that its text has reached."""

    def __init__(self, seq: Sequence, tokenizer: Tokenizer) -> None:
        self.seq = seq
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer()
        self._matcher = StopMatcher(seq.params.stop)
        self._logprobs: list[PositionLogprobs] = []
        self.num_tokens = 0

    @property
    def stopped(self) -> str | None:
        """The stop string that was reached, if any."""
        return self._matcher.matched

    def take(self, output: Output) -> Delta | None:
        """New text of an output; None while it is held back."""
        text = []
        for token in output.tokens:
            if self.stopped is not None:
                break
            self.num_tokens += 1
            if not (output.reason == "stop" and token in self.seq.stop_ids):
                piece = self._detokenizer.feed(self._tokenizer.piece(token))
                # what comes before min_tokens is no part of a stop string
                early = self.num_tokens <= self.seq.params.min_tokens
                text.append(piece if early else self._matcher.feed(piece))
        self._logprobs += output.logprobs
        if output.reason and self.stopped is None:
            text.append(self._matcher.flush())
        return self._delta("".join(text))

    def rest(self) -> Delta | None:
        """Text still held back when a request is cancelled."""
        return self._delta(self._matcher.flush())

    def _delta(self, text: str) -> Delta | None:
        if not text and not self._logprobs:
            return None
        logprobs, self._logprobs = tuple(self._logprobs), []
        return Delta(self.seq.id, text, self.num_tokens, logprobs)
