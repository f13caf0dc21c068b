"""The answers of live requests: the tokens of steps become events."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from localgen.backends.engine.outbox import Outbox
from localgen.backends.engine.output_processor import OutputProcessor
from localgen.backends.engine.scheduler import SequenceOutput
from localgen.backends.engine.stats import StatsRecorder, finished_event
from localgen.backends.runner.sequence import Sequence
from localgen.backends.text.tokenizer import Tokenizer
from localgen.backends.types import Failed


class Answers:
    """The output state of each live request. Events go to the outbox, ends also to the statistics.

    no_drafts_reason: returns why steps had no drafts lately.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        outbox: Outbox,
        stats: StatsRecorder,
        no_drafts_reason: Callable[[], str],
    ) -> None:
        self._tokenizer, self._outbox, self._stats = tokenizer, outbox, stats
        self._no_drafts_reason = no_drafts_reason
        self._processors: dict[str, OutputProcessor] = {}

    def __contains__(self, seq: Sequence) -> bool:
        """True if the request has not ended."""
        return seq.id in self._processors

    def start(self, seq: Sequence) -> None:
        """Add a request. It ends with exactly one Finished or Failed event."""
        self._processors[seq.id] = OutputProcessor(seq, self._tokenizer)

    def process(self, outputs: Seq[SequenceOutput]) -> list[Sequence]:
        """Process the new tokens of a step; return the sequences that their text ended."""
        stopped, unread = [], []
        for output in outputs:
            answer = self._processors.get(output.seq.id)
            if answer is None:  # cancelled meanwhile, or ended by its text
                continue
            if answer.can_wait and output.reason is None:
                unread.append(answer)
            elif self._process(answer, output) and not output.reason:
                stopped.append(output.seq)
        self._outbox.add_unread(unread)
        return stopped

    def _process(self, answer: OutputProcessor, output: SequenceOutput) -> bool:
        """Process the output of a sequence; True if the answer has ended."""
        delta = answer.process(output)
        if delta is not None:
            self._outbox.add(delta)
        reason = answer.end_reason or output.reason
        if reason == "stop" and answer.has_tool_calls:
            reason = "tool_calls"
        if reason is None:
            return False
        del self._processors[output.seq.id]
        self._finish(answer, reason)
        return True

    def cancel(self, seq: Sequence) -> None:
        """End a live request with the text so far."""
        answer = self._processors.pop(seq.id)
        rest = answer.flush()
        if rest:
            self._outbox.add(rest)
        self._finish(answer, "cancelled")

    def _finish(self, answer: OutputProcessor, reason: str) -> None:
        self._outbox.add(
            finished_event(
                answer.seq,
                reason,
                stop=None if reason == "cancelled" else answer.matched_stop,
                completion_tokens=answer.num_tokens,
                no_drafts_reason=self._no_drafts_reason(),
            )
        )
        self._stats.record_end(answer.seq.id, reason)

    def fail(self, seq: Sequence, code: str, message: str) -> None:
        """End a request with an error; it may not have been started."""
        self._processors.pop(seq.id, None)
        self._outbox.add(Failed(seq.id, code, message))
        self._stats.record_end(seq.id, "error")
