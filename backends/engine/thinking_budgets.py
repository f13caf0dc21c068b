"""Thinking budgets: reasoning that has taken its tokens is ended by tokens that nobody samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from localgen.backends.engine.scheduler import Scheduler, SequenceOutput
from localgen.backends.engine.speculation.drafter import DraftProposal
from localgen.backends.runner.sequence import Sequence, SequenceState
from localgen.backends.text.reasoning import ReasoningParser
from localgen.backends.text.tokenizer import Tokenizer

# of reasoning that is cut short: without it, models take the thought before it for their answer
LAST_WORDS = "\n\nI must answer now.\n"


@dataclass(slots=True)
class _Budget:
    """tokens: of reasoning. began_at: generated tokens before it, or None if it has not begun.

    next_check: number of generated tokens at which the answer is looked at again.
    """

    tokens: int
    began_at: int | None = None
    next_check: int = 0


class ThinkingBudgets:
    """The budgets of live requests whose reasoning has not ended.

    False if there are none: then steps need no look at their tokens.
    """

    def __init__(self, scheduler: Scheduler, tokenizer: Tokenizer) -> None:
        self._scheduler, self._tokenizer = scheduler, tokenizer
        self._budgets: dict[Sequence, _Budget] = {}

    def __bool__(self) -> bool:
        return bool(self._budgets)

    def set(self, seq: Sequence, tokens: int) -> None:
        """Set the budget of a live request; without effect on an answer without reasoning.

        tokens: of reasoning, in all, or 0 if it ends at once.
        """
        if _reasoning_of(seq) is not None:
            self._budgets[seq] = _Budget(tokens)

    def limited(self, seq: Sequence, proposal: DraftProposal) -> DraftProposal:
        """The draft tokens up to the next look at the answer, so that no budget is exceeded."""
        if seq not in self._budgets:
            return proposal
        most = max(0, self._budgets[seq].next_check - seq.num_generated - 1)
        return DraftProposal(proposal.tokens[:most], proposal.draft_probs[:most])

    def enforce(self, parse_all: Callable[[], None]) -> list[SequenceOutput]:
        """End reasoning whose budget is spent; returns the tokens for it. No step may be in flight.

        parse_all: parses the text of all tokens. Called only if an answer must be looked at.
        """
        for seq in [seq for seq in self._budgets if seq.state is SequenceState.ENDED]:
            del self._budgets[seq]
        due = [
            seq for seq, budget in self._budgets.items() if seq.num_generated >= budget.next_check
        ]
        if due:
            parse_all()
        return [output for output in map(self._enforce, due) if output is not None]

    def _enforce(self, seq: Sequence) -> SequenceOutput | None:
        budget, reasoning, length = self._budgets[seq], _reasoning_of(seq), seq.num_generated
        assert reasoning is not None
        if not reasoning.is_open and not reasoning.is_over:
            budget.next_check = length + 1
            return None
        if reasoning.is_open:
            budget.began_at = length if budget.began_at is None else budget.began_at
            budget.next_check = budget.began_at + budget.tokens
            if length < budget.next_check:
                return None
        output = None if reasoning.is_over else self._end_reasoning(seq, reasoning)
        if output is None and not reasoning.is_over:
            budget.next_check = length + 1  # a grammar forbids the end within a character
        else:
            del self._budgets[seq]
        return output

    def _end_reasoning(self, seq: Sequence, reasoning: ReasoningParser) -> SequenceOutput | None:
        text = (LAST_WORDS if reasoning.has_output else "") + reasoning.close_tag
        tokens = self._tokenizer.encode(text)[len(self._tokenizer.encode("")) :]
        note = f"the reasoning was ended after {seq.num_generated:,} tokens"
        return self._scheduler.append_tokens(seq, tokens, note)


def _reasoning_of(seq: Sequence) -> ReasoningParser | None:
    return None if seq.response_parser is None else seq.response_parser.reasoning
