"""The queue of waiting requests, ordered by priority and fairness between clients."""

from __future__ import annotations

from collections.abc import Iterator

from localgen.backends.engine.background import is_background
from localgen.backends.runner.sequence import Sequence

# waiting this long raises a request by one priority level, so that none starves
AGING_S = 30.0
# relative cost of a generated token, which needs a step of its own, to a prompt token
GENERATED_TOKEN_COST = 4.0


class FairQueue:
    """Orders requests by effective priority, preempted ones first, then by least served client.

    Service is counted in tokens (virtual token counter, Sheng et al. 2024, "Fairness in
    Serving Large Language Models"). A client without requests earns no credit: when it returns, it
    starts with the count of the least served active client.
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
        """Return the waiting sequence with this id, or None."""
        return self._waiting.get(request_id)

    def enter(self, seq: Sequence) -> None:
        """Add a new request; it counts as active for its client until `leave`."""
        if not self._num_live.get(seq.client):
            self._tokens_served[seq.client] = min(self._tokens_served.values(), default=0.0)
        self._num_live[seq.client] = self._num_live.get(seq.client, 0) + 1
        self.push(seq)

    def push(self, seq: Sequence) -> None:
        """Add a new or preempted sequence."""
        self._waiting[seq.id] = seq

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence that was admitted or has ended."""
        del self._waiting[seq.id]

    def leave(self, seq: Sequence) -> None:
        """Unregister a request that has ended."""
        self._num_live[seq.client] -= 1
        if not self._num_live[seq.client]:
            del self._num_live[seq.client], self._tokens_served[seq.client]

    def charge(self, seq: Sequence, prompt_tokens: int, generated_tokens: int) -> None:
        """Add a step's tokens to the service count of the client."""
        self._tokens_served[seq.client] += prompt_tokens + GENERATED_TOKEN_COST * generated_tokens

    def in_turn(self, now_s: float) -> list[Sequence]:
        """Return all waiting sequences, next to be admitted first."""
        return sorted(self._waiting.values(), key=lambda seq: self._key(seq, now_s))

    def _key(self, seq: Sequence, now_s: float) -> tuple[float, bool, float, float]:
        return (
            -effective_priority(seq, now_s),
            seq.num_preemptions == 0,
            self._tokens_served[seq.client],
            seq.arrived_s,
        )


def effective_priority(seq: Sequence, now_s: float) -> int:
    """Return the priority, raised by one level per AGING_S since arrival.

    A background sequence stays one, however long it waits.
    """
    aged = seq.priority + int((now_s - seq.arrived_s) / AGING_S)
    return min(-1, aged) if is_background(seq) else aged
