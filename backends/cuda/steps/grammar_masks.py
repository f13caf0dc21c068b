"""Token masks of grammars, applied to the logits of a step."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from localgen.backends.cuda.model.host_copy import to_device
from localgen.backends.runner.interface import Chunk


def apply_grammar_masks(chunks: Seq[Chunk], logits: Tensor) -> Tensor:
    """Return the logits with tokens that the grammars forbid set to -inf.

    The masks are computed and sent while the device computes the logits.
    """
    starts, banned, row = [], [], 0
    for chunk in chunks:
        if chunk.is_sampled and chunk.seq.matcher is not None:
            drafts = chunk.tokens[len(chunk) - chunk.num_drafts :]
            allowed = chunk.seq.matcher.draft_masks(drafts, chunk.seq.banned_tokens)
            starts.append(row + chunk.num_scored)
            banned.append(~np.stack(allowed))
        row += chunk.num_outputs
    if not banned:
        return logits
    held = logits.clone()
    for start, mask in zip(starts, to_device(banned, logits.device), strict=True):
        held[start : start + len(mask)].masked_fill_(mask, -torch.inf)
    return held
