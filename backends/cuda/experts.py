"""Mixture of experts: each row goes to the few experts that its router prefers."""

from __future__ import annotations

from torch import Tensor

from localgen.backends.cuda.kernels.experts import mixture as mixed
from localgen.backends.cuda.kernels.experts_many import Chosen
from localgen.backends.cuda.weights import Experts
from localgen.backends.formats.architecture.model_spec import Activation, Moe


def route(x: Tensor, experts: Experts, moe: Moe) -> Chosen:
    """The experts of each row and their shares."""
    shares, ids = experts.router(x).float().softmax(-1).topk(moe.top_k)
    if moe.normalize:
        shares = shares / shares.sum(-1, keepdim=True)
    return Chosen(ids, shares)


def mixture(x: Tensor, experts: Experts, moe: Moe, activation: Activation) -> Tensor:
    """Weighted sum of the chosen experts' answers. x: [rows, hidden]."""
    return mixed(x, experts.gate_up, experts.down, route(x, experts, moe), activation)
