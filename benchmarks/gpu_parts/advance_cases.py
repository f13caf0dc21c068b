"""Cases of decode inputs made on the device: they must be exactly those of the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu_parts.case import KernelCase, Sizes, Tensors
from benchmarks.gpu_parts.inputs import Inputs
from localgen.backends.cuda.kernels.decode_inputs import (
    DecodeInputs,
    advance_decode_inputs,
    advance_decode_inputs_reference,
)
from localgen.backends.cuda.kv.page_pool import PAGE_TOKENS

_PAGES = 40


def advances(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    """Cases without and with pages that tokens begin; the last rows are padding."""
    for rows in (1, 5, 250):
        for has_pages in (False, True):
            yield _advance(make, rows, rows + 6, has_pages=has_pages)


def _advance(make: Inputs, rows: int, padded: int, *, has_pages: bool) -> KernelCase:
    positions = make.integers(0, (_PAGES - 1) * PAGE_TOKENS, padded, dtype=torch.int32)
    inputs = DecodeInputs(
        tokens=make.integers(0, 1000, padded),
        slot_mapping=make.integers(0, 1000, padded),
        positions=positions,
        seq_lens=positions + 1,
        page_tables=make.integers(0, 2**20, padded, _PAGES, dtype=torch.int32),
    )
    sampled = make.integers(0, 1000, rows)
    pages = make.integers(-1, 2**20, rows, dtype=torch.int32)
    pages[1::2] = -1

    def outputs(advance: Callable[..., None]) -> Tensors:
        own = {name: getattr(inputs, name).clone() for name in DecodeInputs.__dataclass_fields__}
        advance(DecodeInputs(**own), sampled, pages if has_pages else None, PAGE_TOKENS)
        found: list[Tensor] = [part.double() for part in own.values()]
        return found

    return KernelCase(
        "advance_decode_inputs",
        f"{rows} of {padded} rows{', new pages' if has_pages else ''}",
        partial(outputs, advance_decode_inputs),
        partial(outputs, advance_decode_inputs_reference),
        0.0,
    )
