"""Decoder layers whose matrix products also compute what is before and after them.

With one row and a 16-bit KV cache, a layer is then six launches instead of nine (int4: ten): qkv
with its norm, RoPE and write to the KV cache; attention; the sum of its splits; output projection
and gate and up, with the residual stream and their norm; down with the residual stream. Other
caches, partial RoPE and QK norms keep the kernel of `rope`: seven. The sum of the splits is not
part of the output projection, each of whose thousand programs would read all splits, up to 0.5 MB,
from L2.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from localgen.backends.cuda.kernels.gemm.dense import MAX_SKINNY_ROWS
from localgen.backends.cuda.kernels.gemm.int4_qkv_rope import int4_project_and_store_kv
from localgen.backends.cuda.kernels.gemm.qkv_rope import project_and_store_kv
from localgen.backends.cuda.kernels.kv_cache import LayerKV
from localgen.backends.cuda.kernels.norm import RMSNorm
from localgen.backends.cuda.kernels.rope import QKNorm
from localgen.backends.cuda.model.batch import StepBatch
from localgen.backends.cuda.model.linear import DenseLinear, Int4Linear, gated_linear
from localgen.backends.cuda.model.weights import LayerWeights
from localgen.backends.formats.architecture.model_spec import Activation, ModelSpec

# with more rows, cuBLAS computes the products, and the sums are part of the norms
MAX_FUSED_ROWS = MAX_SKINNY_ROWS


@dataclass(frozen=True, slots=True, eq=False)
class FusedLayer:
    """Weights of a layer with nothing between its products but norms, sums and the activation."""

    input_norm: RMSNorm
    qkv: DenseLinear | Int4Linear
    qk_norm: QKNorm | None
    attention_out: DenseLinear | Int4Linear
    mlp_norm: RMSNorm
    gate_up: DenseLinear | Int4Linear
    down: DenseLinear | Int4Linear
    activation: Activation

    @classmethod
    def of(cls, layer: LayerWeights, spec: ModelSpec) -> FusedLayer | None:
        """Return None if the layer is in FP8, or has experts, scaled sums or other norms.

        And if inputs of int4 weights after a norm are in an order of their own.
        """
        if spec.residual_scale != 1 or spec.norm_offset or spec.wide_qk_norm:
            return None
        qk_norm = None
        if layer.q_norm is not None and layer.k_norm is not None:
            qk_norm = QKNorm(layer.q_norm, layer.k_norm, spec.norm_eps, spec.norm_offset)
        match layer:
            case LayerWeights(
                input_norm=Tensor() as input_norm,
                qkv=(DenseLinear() | Int4Linear(input_order=None)) as qkv,
                attention_out=(DenseLinear() | Int4Linear()) as attention_out,
                post_attention_norm=None,
                mlp_norm=Tensor() as mlp_norm,
                gate_up=(
                    DenseLinear(bias=None) | Int4Linear(bias=None, input_order=None)
                ) as gate_up,
                down=(DenseLinear() | Int4Linear()) as down,
                post_mlp_norm=None,
            ):
                return cls(
                    RMSNorm(input_norm, spec.norm_eps),
                    qkv,
                    qk_norm,
                    attention_out,
                    RMSNorm(mlp_norm, spec.norm_eps),
                    gate_up,
                    down,
                    spec.activation,
                )
        return None

    def store_kv(
        self,
        hidden: Tensor,
        batch: StepBatch,
        cos_sin: tuple[Tensor, Tensor],
        layer_kv: LayerKV,
    ) -> Tensor:
        """Return the rotated queries of the residual stream; write keys and values to the cache."""
        rest = (batch.positions, cos_sin, self.qk_norm, layer_kv, batch.slot_mapping)
        match self.qkv:
            case DenseLinear(weight, bias):
                return project_and_store_kv(hidden, self.input_norm, weight, bias, *rest)
            case Int4Linear(packed, grid, bias):
                return int4_project_and_store_kv(hidden, self.input_norm, packed, grid, bias, *rest)

    def add_attention(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        """The residual stream plus the output projection of mixed, [rows, heads * head size]."""
        return self.attention_out(mixed, hidden)

    def add_mlp(self, hidden: Tensor) -> Tensor:
        """The residual stream plus the MLP of its norm."""
        gated = gated_linear(self.gate_up, hidden, self.activation, self.mlp_norm)
        return self.down(gated, hidden)
