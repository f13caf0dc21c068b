"""Inputs of a decode step made on the device equal those that the host would send."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from localgen.backends.cuda.kernels.decode_inputs import (
    DecodeInputs,
    advance_decode_inputs,
    advance_decode_inputs_reference,
    advance_decode_inputs_triton,
)
from localgen.backends.cuda.kv.page_pool import PAGE_TOKENS

PAGES = 6


def inputs_at(positions: np.ndarray[Any, Any], tables: np.ndarray[Any, Any]) -> DecodeInputs:
    """A step of these positions, with two rows of padding after them."""
    pages = tables[np.arange(len(positions)), positions // PAGE_TOKENS]
    slots = pages.astype(np.int64) * PAGE_TOKENS + positions % PAGE_TOKENS
    return DecodeInputs(
        tokens=torch.full((len(positions) + 2,), 7),
        slot_mapping=torch.from_numpy(np.append(slots, [-1, -1])),
        positions=torch.from_numpy(np.append(positions, [0, 0]).astype(np.int32)),
        seq_lens=torch.from_numpy(np.append(positions + 1, [0, 0]).astype(np.int32)),
        page_tables=torch.from_numpy(np.vstack([tables, np.zeros((2, PAGES), np.int32)])),
    )


@pytest.mark.parametrize("rows", [1, 3, 130])
@pytest.mark.parametrize(
    "advance",
    [advance_decode_inputs, advance_decode_inputs_reference, advance_decode_inputs_triton],
)
def test_steps_follow_from_the_one_before(advance: Any, rows: int) -> None:
    rng = np.random.default_rng(rows)
    whole = rng.permutation(rows * PAGES).astype(np.int32).reshape(rows, PAGES)
    positions = rng.integers(0, 20, rows)
    known = np.arange(PAGES) <= (positions // PAGE_TOKENS)[:, None]
    ours = inputs_at(positions, np.where(known, whole, 0))
    begun = 0
    for _ in range(40):
        positions = positions + 1
        begins = positions % PAGE_TOKENS == 0
        begun += begins.sum()
        pages = np.where(begins, whole[np.arange(rows), positions // PAGE_TOKENS], -1)
        known |= np.arange(PAGES) == (positions // PAGE_TOKENS)[:, None]
        sampled = torch.from_numpy(rng.integers(0, 99, rows))
        new = torch.from_numpy(pages.astype(np.int32)) if begins.any() else None
        advance(ours, sampled, new, PAGE_TOKENS)
        exact = inputs_at(positions, np.where(known, whole, 0))
        exact.tokens[:rows] = sampled
        for name in DecodeInputs.__dataclass_fields__:
            assert getattr(ours, name).equal(getattr(exact, name)), name
    assert begun >= 2 * rows
