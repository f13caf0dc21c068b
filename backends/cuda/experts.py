"""Mixture of experts: each row goes to the few experts that its router prefers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from localgen.backends.cuda.kernels.activation import gated
from localgen.backends.cuda.spec import Activation, Moe
from localgen.backends.cuda.weights import Experts


def route(x: Tensor, experts: Experts, moe: Moe) -> tuple[Tensor, Tensor]:
    """Shares, float32, and ids of the chosen experts, both [rows, top_k]."""
    shares, chosen = experts.router(x).float().softmax(-1).topk(moe.top_k)
    if moe.normalize:
        shares = shares / shares.sum(-1, keepdim=True)
    return shares, chosen


def mixture(x: Tensor, experts: Experts, moe: Moe, activation: Activation) -> Tensor:
    """Weighted sum of the chosen experts' answers. x: [rows, hidden]."""
    shares, chosen = route(x, experts, moe)
    out = torch.zeros_like(x)
    for expert in sorted(set(chosen.flatten().tolist())):
        rows, place = (chosen == expert).nonzero(as_tuple=True)
        inner = gated(linear(x[rows], experts.gate_up[expert]), activation)
        answer = linear(inner, experts.down[expert])
        out.index_add_(0, rows, answer * shares[rows, place, None].to(x.dtype))
    return out
