"""Each sampler's effect on a distribution, in numpy, from the definitions alone.

A sampler takes float64 logits [vocab] and returns them changed; a removed token is at -inf.
Sources: top-k Fan et al. 2018; top-p Holtzman et al. 2020; min-p Nguyen et al. 2024; typical
Meister et al. 2023; top-n-sigma Tang et al. 2024; mirostat Basu et al. 2021; repetition
penalty Keskar et al. 2019; presence and frequency penalties as OpenAI documents them; XTC and
DRY as their author p-e-w describes them; adaptive-p and dynatemp as llama.cpp documents them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


def softmax(logits: Vector) -> Vector:
    """Probabilities; a token at -inf has probability 0."""
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum())


def keep(logits: Vector, tokens: Iterable[int] | NDArray[np.int64]) -> Vector:
    """Remove all other tokens."""
    kept = np.full_like(logits, -np.inf)
    index = np.fromiter(tokens, np.int64)
    kept[index] = logits[index]
    return kept


def entropy(p: Vector) -> float:
    """Entropy in nats."""
    p = p[p > 0]
    return float(-(p * np.log(p)).sum())


def best_first(values: Vector) -> NDArray[np.int64]:
    return np.argsort(-values, kind="stable")


def top_k(logits: Vector, k: int) -> Vector:
    return keep(logits, best_first(logits)[:k])


def top_p(logits: Vector, mass: float) -> Vector:
    """Keep the fewest most probable tokens with at least this total probability."""
    p = softmax(logits)
    order = best_first(p)
    count = int(np.searchsorted(np.cumsum(p[order]), mass)) + 1
    return keep(logits, order[:count])


def infill(logits: Vector, pieces: Sequence[bytes], ends: Iterable[int]) -> Vector:
    """As llama.cpp documents it: an end token where it is likely or nothing else is.

    A token and one that begins with it count as one. The rest keeps tokens of at least 20 %, then
    those above the average.
    """
    p, ends = softmax(logits), set(ends)
    left = [int(token) for token in best_first(p) if p[token] > 0]
    end_mass = sum(p[token] for token in left if token in ends)
    if 3 * end_mass * len(left) > 1 - end_mass:
        return keep(logits, [token for token in left if token in ends])
    for short in left:
        for longer in left:
            starts = pieces[short] and pieces[longer].startswith(pieces[short])
            if short != longer and starts and p[short] > 0 and p[longer] > 0:
                into, gone = (longer, short) if p[longer] > p[short] else (short, longer)
                p[into], p[gone] = p[into] + p[gone], 0.0
    left = [token for token in left if p[token] >= 0.2 or token in ends]
    texts = [token for token in left if token not in ends]
    mass = sum(p[token] for token in left)
    fair = mass / (len(texts) + 1)
    return keep(logits, [token for token in left if p[token] >= fair or token in ends])


def min_p(logits: Vector, share: float) -> Vector:
    p = softmax(logits)
    return keep(logits, np.flatnonzero(p >= share * p.max()))


def typical(logits: Vector, mass: float) -> Vector:
    """Keep tokens whose surprise is nearest to the entropy, up to this total probability."""
    p = softmax(logits)
    alive = np.flatnonzero(p > 0)
    distance = np.abs(-np.log(p[alive]) - entropy(p))
    order = alive[np.argsort(distance, kind="stable")]
    count = int(np.searchsorted(np.cumsum(p[order]), mass, side="right")) + 1
    return keep(logits, order[:count])


def top_n_sigma(logits: Vector, n: float) -> Vector:
    finite = logits[np.isfinite(logits)]
    return keep(logits, np.flatnonzero(logits >= finite.max() - n * finite.std()))


def xtc(logits: Vector, threshold: float) -> Vector:
    """Remove all tokens at or above the threshold except the least probable of them."""
    p = softmax(logits)
    top = np.flatnonzero(p >= threshold)
    if len(top) < 2:
        return logits
    last = top[np.argmin(p[top])]
    return keep(logits, np.setdiff1d(np.flatnonzero(p > 0), np.setdiff1d(top, [last])))


def dynamic_temperature(
    logits: Vector, middle: float, spread: float, exponent: float = 1.0
) -> Vector:
    """Temperature between middle ± spread, by the ratio of the entropy to its maximum."""
    low, high = max(0.0, middle - spread), middle + spread
    share = entropy(softmax(logits)) / np.log(np.isfinite(logits).sum())
    return np.asarray(logits / (low + (high - low) * share**exponent))


def bias(logits: Vector, biases: dict[int, float]) -> Vector:
    changed = logits.copy()
    for token, value in biases.items():
        changed[token] += value
    return changed


def penalties(
    logits: Vector,
    history: Sequence[int],
    *,
    repeat: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
) -> Vector:
    changed = logits.copy()
    for token, count in Counter(history).items():
        value = changed[token]
        value = value / repeat if value > 0 else value * repeat
        changed[token] = value - presence - frequency * count
    return changed


def dry(
    logits: Vector,
    history: Sequence[int],
    *,
    multiplier: float,
    base: float,
    allowed: int,
    breakers: frozenset[int] = frozenset(),
) -> Vector:
    """Penalize tokens that would extend a repetition of at least `allowed` tokens.

    Where the end of the history also occurs earlier, the token after that place would continue the
    repetition; a repetition does not cross a breaker.
    """
    end = len(history)
    longest: dict[int, int] = {}
    for place in range(1, end):
        length = 0
        while (
            length < place
            and history[place - 1 - length] == history[end - 1 - length]
            and history[end - 1 - length] not in breakers
        ):
            length += 1
        if length >= allowed and history[place] not in breakers:
            longest[history[place]] = max(length, longest.get(history[place], 0))
    changed = logits.copy()
    for token, length in longest.items():
        changed[token] -= multiplier * base ** (length - allowed)
    return changed


def mirostat_1(logits: Vector, tau: float, *, candidates: int) -> Vector:
    """First step (mu = 2 tau): s estimated from the best candidates, k from s and mu."""
    p = np.sort(softmax(logits))[::-1][:candidates]
    rank = np.arange(1, candidates)
    t = np.log((rank + 1) / rank)
    b = np.log(p[:-1] / p[1:])
    s = float((t * b).sum() / (t * t).sum())
    epsilon, mu = s - 1, 2 * tau
    k = (epsilon * 2**mu / (1 - len(logits) ** (-epsilon))) ** (1 / s)
    return top_k(logits, max(int(k), 1))


def mirostat_2(logits: Vector, tau: float) -> Vector:
    """First step (mu = 2 tau): tokens with a surprise of at most mu bits."""
    p = softmax(logits)
    surprise = -np.log2(np.where(p > 0, p, np.nan))
    kept = np.flatnonzero(surprise <= 2 * tau)
    return keep(logits, kept) if len(kept) else top_k(logits, 1)


def adaptive(logits: Vector, target: float) -> Vector:
    """First step: prefers tokens with a probability near the target."""
    alive = np.isfinite(logits)
    distance = np.abs(softmax(logits) - target) / 0.3
    return np.where(alive, 5 - 10 * distance**2 / (1 + distance), -np.inf)
