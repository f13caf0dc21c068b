"""Background sequences, of negative priority: they compute only in the time that others leave.

While a sequence of another kind runs, its steps may last a tenth longer for them, as measured. On a
GPU, which reads all weights for one row as for ten, that is room for several; on a CPU it is often
none, and they wait. Alone they compute in short steps, so that a new request waits for little.
"""

from __future__ import annotations

from localgen.backends.engine.step_costs import StepCosts
from localgen.backends.runner.sequence import Sequence

MAX_SLOWDOWN = 0.1
# of a step with background prompts alone
MAX_STEP_MS = 200.0


def is_background(seq: Sequence) -> bool:
    """True for a sequence of negative priority."""
    return seq.priority < 0


def rows_beside(costs: StepCosts, num_tokens: int, most: int) -> int:
    """The number of rows, at most `most`, for which a decode step of num_tokens may wait.

    Only sizes that were measured count: none, until there are larger ones.
    """
    limit_ms = costs.ms(num_tokens) * (1 + MAX_SLOWDOWN)
    rows = 0
    for tokens in range(num_tokens + 1, min(costs.largest, num_tokens + most) + 1):
        if costs.ms(tokens) > limit_ms:
            break
        rows += 1
    return rows
