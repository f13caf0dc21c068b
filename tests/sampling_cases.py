"""Sampler settings, each with the distribution that its definition gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import sampling_reference as ref
from sampling_reference import Vector, softmax

Expected = Callable[[Vector, Any], Vector]


@dataclass(frozen=True)
class Case:
    """A setting and its expected distribution over tokens.

    history and the second argument of `expected` name tokens by rank: 0 is the most probable after
    the prompt, so that penalties act on likely tokens. NEWLINE is the rank of a newline.
    """

    name: str
    expected: Expected
    setting: dict[str, Any]
    history: tuple[int, ...] = ()


NEWLINE = 6
REPEATS = (0, 1, 0, 2, 0, 4, 5)
# the end (0 1 2) stood before 5, its last two before 3, its last one before 4
ECHO = (0, 1, 2, 5, 9, 1, 2, 3, 8, 2, 4, 0, 1, 2)
BROKEN_ECHO = (0, NEWLINE, 1, 2, 3, 9, 1, 2, NEWLINE, 8, 0, NEWLINE, 1, 2)


def plain(z: Vector, t: Any) -> Vector:
    return softmax(z)


def xtc(z: Vector, threshold: float, probability: float, temperature: float = 1.0) -> Vector:
    """XTC is applied at random, with its probability."""
    acts, rests = softmax(ref.xtc(z, threshold) / temperature), softmax(z / temperature)
    return np.asarray(probability * acts + (1 - probability) * rests)


def everything(z: Vector, t: Any) -> Vector:
    z = ref.bias(z, {t[1]: 1.5})
    z = ref.penalties(z, t[list(REPEATS)], repeat=1.1, presence=0.2, frequency=0.1)
    z = ref.dry(z, t[list(REPEATS)], multiplier=0.8, base=1.75, allowed=1)
    z = ref.top_k(ref.top_n_sigma(z, 2.0), 30)
    z = ref.min_p(ref.top_p(ref.typical(z, 0.95), 0.95), 0.02)
    return xtc(z, 0.1, 0.5, temperature=1.3)


CASES = [
    Case("plain", plain, {}),
    Case("temperature below 1", lambda z, t: softmax(z / 0.6), {"temperature": 0.6}),
    Case("temperature above 1", lambda z, t: softmax(z / 1.7), {"temperature": 1.7}),
    Case("top-k", lambda z, t: softmax(ref.top_k(z, 7)), {"top_k": 7}),
    Case("top-p", lambda z, t: softmax(ref.top_p(z, 0.8)), {"top_p": 0.8}),
    Case("min-p", lambda z, t: softmax(ref.min_p(z, 0.04)), {"min_p": 0.04}),
    Case("typical-p", lambda z, t: softmax(ref.typical(z, 0.5)), {"typical_p": 0.5}),
    Case("top-n-sigma", lambda z, t: softmax(ref.top_n_sigma(z, 1.5)), {"top_n_sigma": 1.5}),
    Case("xtc", lambda z, t: xtc(z, 0.05, 1), {"xtc_probability": 1.0, "xtc_threshold": 0.05}),
    Case("xtc half", lambda z, t: xtc(z, 0.1, 0.5), {"xtc_probability": 0.5}),
    Case(
        "dynatemp",
        lambda z, t: softmax(ref.dynamic_temperature(z, 1.0, 0.5)),
        {"dynatemp_range": 0.5},
    ),
    Case(
        "dynatemp exponent",
        lambda z, t: softmax(ref.dynamic_temperature(ref.top_k(z, 20), 0.8, 0.7, 2.0)),
        {"dynatemp_range": 0.7, "dynatemp_exponent": 2.0, "temperature": 0.8, "top_k": 20},
    ),
    Case("adaptive-p", lambda z, t: softmax(ref.adaptive(z, 0.1)), {"adaptive_target": 0.1}),
    Case(
        "logit bias",
        lambda z, t: softmax(ref.bias(z, {t[0]: -2.0, t[5]: 3.0, t[1]: -np.inf})),
        {"logit_bias": {0: -2.0, 5: 3.0, 1: -math.inf}},
    ),
    Case(
        "repeat penalty",
        lambda z, t: softmax(ref.penalties(z, t[list(REPEATS)], repeat=1.3)),
        {"repeat_penalty": 1.3},
        REPEATS,
    ),
    Case(
        "presence penalty",
        lambda z, t: softmax(ref.penalties(z, t[list(REPEATS)], presence=1.2)),
        {"presence_penalty": 1.2},
        REPEATS,
    ),
    Case(
        "frequency penalty",
        lambda z, t: softmax(ref.penalties(z, t[list(REPEATS)], frequency=0.7)),
        {"frequency_penalty": 0.7},
        REPEATS,
    ),
    Case(
        "penalties over the last 4",
        lambda z, t: softmax(ref.penalties(z, t[list(REPEATS[-4:])], repeat=1.2, frequency=0.5)),
        {"repeat_penalty": 1.2, "frequency_penalty": 0.5, "repeat_last_n": 4},
        REPEATS,
    ),
    Case(
        "dry",
        lambda z, t: softmax(ref.dry(z, t[list(ECHO)], multiplier=0.8, base=1.75, allowed=2)),
        {"dry_multiplier": 0.8},
        ECHO,
    ),
    Case(
        "dry over the last 10",
        lambda z, t: softmax(ref.dry(z, t[list(ECHO[-10:])], multiplier=2, base=2, allowed=1)),
        {
            "dry_multiplier": 2.0,
            "dry_base": 2.0,
            "dry_allowed_length": 1,
            "dry_penalty_last_n": 10,
        },
        ECHO,
    ),
    Case(
        "dry with breakers",
        lambda z, t: softmax(
            ref.dry(
                z,
                t[list(BROKEN_ECHO)],
                multiplier=0.8,
                base=1.75,
                allowed=2,
                breakers=frozenset({t[NEWLINE]}),
            )
        ),
        {"dry_multiplier": 0.8, "dry_sequence_breakers": ("\n",)},
        BROKEN_ECHO,
    ),
    Case(
        "the usual combination",
        lambda z, t: softmax(ref.min_p(ref.top_p(ref.top_k(z, 40), 0.95), 0.05) / 0.8),
        {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    ),
    Case(
        "truncation comes before temperature",
        lambda z, t: softmax(ref.top_p(z, 0.7) / 2),
        {"temperature": 2.0, "top_p": 0.7},
    ),
    Case(
        "typical-p without what a bias has banned",
        lambda z, t: softmax(ref.typical(ref.bias(z, {t[0]: -200.0, t[1]: -np.inf}), 0.5)),
        {"typical_p": 0.5, "logit_bias": {0: -200.0, 1: -math.inf}},
    ),
    Case(
        "typical-p within top-n-sigma",
        lambda z, t: softmax(ref.typical(ref.top_n_sigma(z, 1.8), 0.6)),
        {"top_n_sigma": 1.8, "typical_p": 0.6},
    ),
    Case(
        "everything",
        everything,
        {
            "logit_bias": {1: 1.5},
            "repeat_penalty": 1.1,
            "presence_penalty": 0.2,
            "frequency_penalty": 0.1,
            "dry_multiplier": 0.8,
            "dry_allowed_length": 1,
            "dry_sequence_breakers": (),
            "top_n_sigma": 2.0,
            "top_k": 30,
            "typical_p": 0.95,
            "top_p": 0.95,
            "min_p": 0.02,
            "xtc_probability": 0.5,
            "xtc_threshold": 0.1,
            "temperature": 1.3,
        },
        REPEATS,
    ),
]
