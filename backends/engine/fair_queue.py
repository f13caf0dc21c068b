"""Requests that wait, and whose turn it is."""

from __future__ import annotations

from collections.abc import Iterator

from localgen.backends.runner.sequence import Sequence

# a request gains one priority level for each of these, so that none waits for ever
AGING_S = 30.0
# a generated token costs a step of its own, a prompt token shares one
GENERATED_TOKEN_COST = 4.0


class FairQueue:
    """Highest priority first; among equals the client that has been served least.

    Service is counted in tokens (virtual token counter, Sheng et al. 2024, "Fairness in
    Serving Large Language Models"). A client that was away starts level with the least
    served one present: idling earns no credit.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, Sequence] = {}
        self._tokens_served: dict[str, float] = {}
        self._num_live: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting.values())

    def get(self, request_id: str) -> Sequence | None:
        """The waiting sequence of that id."""
        return self._waiting.get(request_id)

    def enter(self, seq: Sequence) -> None:
        """A new request arrives; its client is present until `leave`."""
        if not self._num_live.get(seq.client):
            self._tokens_served[seq.client] = min(self._tokens_served.values(), default=0.0)
        self._num_live[seq.client] = self._num_live.get(seq.client, 0) + 1
        self.push(seq)

    def push(self, seq: Sequence) -> None:
        """Wait: new, or preempted and back again."""
        self._waiting[seq.id] = seq

    def remove(self, seq: Sequence) -> None:
        """Stop waiting: admitted or ended."""
        del self._waiting[seq.id]

    def leave(self, seq: Sequence) -> None:
        """The request has ended."""
        self._num_live[seq.client] -= 1
        if not self._num_live[seq.client]:
            del self._num_live[seq.client], self._tokens_served[seq.client]

    def charge(self, seq: Sequence, prompt_tokens: int, generated_tokens: int) -> None:
        """Count service given to the client of a request that is present."""
        self._tokens_served[seq.client] += prompt_tokens + GENERATED_TOKEN_COST * generated_tokens

    def in_turn(self, now_s: float) -> list[Sequence]:
        """All waiting sequences, the one whose turn it is first."""
        return sorted(self._waiting.values(), key=lambda seq: self._key(seq, now_s))

    def _key(self, seq: Sequence, now_s: float) -> tuple[float, bool, float, float]:
        return (
            -effective_priority(seq, now_s),
            seq.num_preemptions == 0,
            self._tokens_served[seq.client],
            seq.arrived_s,
        )


def effective_priority(seq: Sequence, now_s: float) -> int:
    """Priority, raised by the time since arrival."""
    return seq.priority + int((now_s - seq.arrived_s) / AGING_S)
