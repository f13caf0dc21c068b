"""Load the weights of a safetensors checkpoint in any of the supported layouts."""

from __future__ import annotations

import torch
from torch import Tensor

from localgen.backends.cuda.model.dequantize import (
    dense_weight,
    dequantize_gptq,
    dequantize_packed,
    num_packed_words,
)
from localgen.backends.cuda.model.int4_repack import (
    act_order,
    repack_awq,
    repack_gptq,
    repack_packed,
)
from localgen.backends.cuda.model.linear import DenseLinear, Fp8Linear, Int4Linear, Linear
from localgen.backends.formats.architecture.model_spec import ModelSpec, QuantizationConfig
from localgen.backends.formats.hf.checkpoint import SafetensorsCheckpoint
from localgen.backends.formats.hf.safetensors import FLOAT_DTYPES

# unused tensors that some tools write: RoPE tables, activation scales and KV cache scales, and the
# shape of a packed weight, which config.json gives
_IGNORED_SUFFIXES = (
    "rotary_emb.inv_freq",
    ".input_scale",
    ".input_scale_ub",
    ".activation_scale",
    ".output_scale",
    ".k_scale",
    ".v_scale",
    ".weight_shape",
)


class SafetensorsWeightLoader:
    """WeightLoader for a checkpoint. dtype: of all weights that are not quantized."""

    def __init__(
        self, checkpoint: SafetensorsCheckpoint, spec: ModelSpec, dtype: torch.dtype
    ) -> None:
        self._checkpoint = checkpoint
        self._spec = spec
        self._dtype = dtype

    def norm(self, name: str, size: int) -> Tensor:
        return self._read(f"{name}.weight", (size,))

    def embedding(self, name: str, rows: int, size: int) -> Tensor:
        return self._read(f"{name}.weight", (rows, size))

    def linear(
        self, name: str, in_features: int, out_features: int, *, bias: bool = False
    ) -> Linear:
        """Load a linear in the layout that the checkpoint stores under this name.

        A bias is loaded if present, because GPTQ files may have one where the model has none.
        """
        has_bias = bias or f"{name}.bias" in self._checkpoint
        b = self._read(f"{name}.bias", (out_features,)) if has_bias else None
        quant = self._spec.quant
        if f"{name}.qweight" in self._checkpoint:
            if quant is not None and quant.dequantized_on_load:
                return DenseLinear(
                    self._load_dequantized_gptq(name, in_features, out_features, quant), b
                )
            return self._load_int4(name, in_features, out_features, b)
        if f"{name}.weight_packed" in self._checkpoint:
            return self._load_packed(name, in_features, out_features, b)
        weight = f"{name}.weight"
        if weight in self._checkpoint and self._checkpoint.dtype(weight) == "F8_E4M3":
            return self._load_fp8(name, in_features, out_features, b)
        if weight in self._checkpoint and self._checkpoint.dtype(weight) == "I8":
            return DenseLinear(self._load_dequantized_int8(name, in_features, out_features), b)
        return DenseLinear(self._read(weight, (out_features, in_features)), b)

    def experts(self, layer: str) -> tuple[Tensor, Tensor, Tensor]:
        spec, moe = self._spec, self._spec.moe
        assert moe is not None
        block = f"{layer}.mlp"
        if f"{layer}.block_sparse_moe.gate.weight" in self._checkpoint:
            block = f"{layer}.block_sparse_moe"
        router = self._read(f"{block}.gate.weight", (moe.num_experts, spec.hidden_size))
        gate_up_shape = (moe.num_experts, 2 * moe.intermediate_size, spec.hidden_size)
        down_shape = (moe.num_experts, spec.hidden_size, moe.intermediate_size)
        # transformers 5 can save all experts as one tensor
        if f"{block}.experts.gate_up_proj" in self._checkpoint:
            gate_up = self._read(f"{block}.experts.gate_up_proj", gate_up_shape)
            return router, gate_up, self._read(f"{block}.experts.down_proj", down_shape)
        gate_up, down = router.new_empty(gate_up_shape), router.new_empty(down_shape)
        for index in range(moe.num_experts):
            self._load_expert(f"{block}.experts.{index}", gate_up[index], down[index])
        return router, gate_up, down

    def check_all_read(self) -> None:
        """Raise LoadFailed if the checkpoint has a tensor that is not part of the architecture."""
        for name in self._checkpoint.unread_tensors():
            # a tied head may be stored as a copy of the embedding
            copy = self._spec.tied_embeddings and name == "lm_head.weight"
            if not copy and not name.endswith(_IGNORED_SUFFIXES):
                raise self._checkpoint.load_error(
                    name, f"is not part of {self._spec.architecture} as config.json describes it"
                )

    def _load_expert(self, expert: str, gate_up: Tensor, down: Tensor) -> None:
        names = ("gate_proj", "up_proj", "down_proj")
        if any(f"{expert}.w1.{part}" in self._checkpoint for part in ("weight", "qweight")):
            names = ("w1", "w3", "w2")
        size = down.shape[1]
        for name, target in zip(names, (gate_up[:size], gate_up[size:], down), strict=True):
            outs, ins = target.shape
            linear = self.linear(f"{expert}.{name}", ins, outs)
            target.copy_(dense_weight(linear, self._dtype))

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._checkpoint.read(name, shape, dtype=self._dtype)

    def _load_int4(
        self, name: str, in_features: int, out_features: int, bias: Tensor | None
    ) -> Int4Linear:
        quant = self._spec.quant
        if quant is None or quant.method not in ("awq", "gptq"):
            reason = "is int4, but config.json has no quantization_config for awq or gptq"
            raise self._checkpoint.load_error(f"{name}.qweight", reason)
        size = quant.group_size or in_features
        if in_features % size or out_features % 8 or in_features % 8:
            raise self._checkpoint.load_error(
                f"{name}.qweight", _misfit(in_features, out_features, 4, size)
            )
        groups = in_features // size
        zeros = self._read_packed(f"{name}.qzeros", (groups, out_features // 8))
        # scales of 16 bits keep their dtype, so that dequantized weights are rounded only once
        scales = self._checkpoint.read(
            f"{name}.scales", (groups, out_features), allowed_dtypes=FLOAT_DTYPES
        )
        if quant.method == "awq":
            words = self._read_packed(f"{name}.qweight", (in_features, out_features // 8))
            return repack_awq(words, zeros, scales, bias)
        words = self._read_packed(f"{name}.qweight", (in_features // 8, out_features))
        order = self._read_input_order(f"{name}.g_idx", in_features, groups, quant)
        return repack_gptq(words, zeros, scales, bias, order=order, zero_offset=quant.zero_offset)

    def _load_packed(
        self, name: str, in_features: int, out_features: int, bias: Tensor | None
    ) -> Linear:
        """Load a pack-quantized weight of compressed-tensors; dequantize it unless of 4 bits."""
        quant, packed = self._spec.quant, f"{name}.weight_packed"
        if quant is None or quant.method != "pack-quantized":
            reason = "is packed, but config.json has no quantization_config for pack-quantized"
            raise self._checkpoint.load_error(packed, reason)
        in_words = num_packed_words(in_features, quant.bits)
        out_words = num_packed_words(out_features, quant.bits)
        size = quant.group_size or in_features
        if in_words is None or out_words is None or in_features % size:
            raise self._checkpoint.load_error(
                packed, _misfit(in_features, out_features, quant.bits, size)
            )
        groups = in_features // size
        words = self._read_packed(packed, (out_features, in_words))
        scales = self._checkpoint.read(
            f"{name}.weight_scale", (out_features, groups), allowed_dtypes=FLOAT_DTYPES
        )
        zeros = None
        if quant.zero_point:
            zeros = self._read_packed(f"{name}.weight_zero_point", (out_words, groups))
        if quant.bits == 4:
            return repack_packed(words, zeros, scales, bias)
        weight = dequantize_packed(words, zeros, scales, bits=quant.bits)
        return DenseLinear(weight.to(self._dtype), bias)

    def _load_dequantized_gptq(
        self, name: str, in_features: int, out_features: int, quant: QuantizationConfig
    ) -> Tensor:
        """Load and dequantize a GPTQ weight that is not 4 bits wide."""
        size, bits = quant.group_size or in_features, quant.bits
        in_words, out_words = (
            num_packed_words(in_features, bits),
            num_packed_words(out_features, bits),
        )
        if in_words is None or out_words is None or in_features % size:
            raise self._checkpoint.load_error(
                f"{name}.qweight", _misfit(in_features, out_features, bits, size)
            )
        groups = in_features // size
        words = self._read_packed(f"{name}.qweight", (in_words, out_features))
        zeros = self._read_packed(f"{name}.qzeros", (groups, out_words))
        scales = self._checkpoint.read(
            f"{name}.scales", (groups, out_features), allowed_dtypes=FLOAT_DTYPES
        )
        g_idx = torch.arange(in_features, device=words.device) // size
        if f"{name}.g_idx" in self._checkpoint:
            g_idx = self._checkpoint.read(
                f"{name}.g_idx", (in_features,), allowed_dtypes=("I32", "I64")
            )
        if not 0 <= int(g_idx.min()) <= int(g_idx.max()) < groups:
            raise self._checkpoint.load_error(f"{name}.g_idx", f"has group indices beyond {groups}")
        offset = quant.zero_offset
        weight = dequantize_gptq(words, zeros, scales, g_idx, bits=bits, zero_offset=offset)
        return weight.to(self._dtype)

    def _load_dequantized_int8(self, name: str, in_features: int, out_features: int) -> Tensor:
        quant = self._spec.quant
        if quant is None or quant.method != "int8":
            reason = "is int8, but config.json has no quantization_config for int8"
            raise self._checkpoint.load_error(f"{name}.weight", reason)
        weight = self._checkpoint.read(
            f"{name}.weight", (out_features, in_features), allowed_dtypes=("I8",)
        )
        scales = self._read_row_scales(f"{name}.weight_scale", out_features)
        return (weight.float() * scales[:, None]).to(self._dtype)

    def _read_packed(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._checkpoint.read(name, shape, allowed_dtypes=("I32",))

    def _read_input_order(
        self, name: str, in_features: int, groups: int, quant: QuantizationConfig
    ) -> Tensor | None:
        if not quant.desc_act and name not in self._checkpoint:
            return None
        g_idx = self._checkpoint.read(name, (in_features,), allowed_dtypes=("I32", "I64"))
        try:
            # the groups of a shard start where those of the previous rank end
            return act_order(g_idx - g_idx.min(), groups)
        except ValueError as error:
            raise self._checkpoint.load_error(name, str(error)) from None

    def _load_fp8(
        self, name: str, in_features: int, out_features: int, bias: Tensor | None
    ) -> Fp8Linear:
        if self._spec.quant is None or self._spec.quant.method != "fp8":
            reason = "is FP8, but config.json has no quantization_config for FP8"
            raise self._checkpoint.load_error(f"{name}.weight", reason)
        weight = self._checkpoint.read(
            f"{name}.weight", (out_features, in_features), allowed_dtypes=("F8_E4M3",)
        )
        # the scale of quant_method fp8, which has the name of its inverse, multiplies too
        inverse = f"{name}.weight_scale_inv"
        scale = inverse if inverse in self._checkpoint else f"{name}.weight_scale"
        return Fp8Linear(weight, self._read_row_scales(scale, out_features), bias)

    def _read_row_scales(self, name: str, out_features: int) -> Tensor:
        shape = self._checkpoint.shape(name)
        if shape not in ((out_features, 1), (out_features,), (1,), ()):
            wanted = f"[{out_features}, 1], [{out_features}] or a single number"
            raise self._checkpoint.load_error(name, f"is of shape {list(shape)}, not {wanted}")
        scale = self._checkpoint.read(name, shape, dtype=torch.float32)
        return scale.flatten().expand(out_features).contiguous()


def _misfit(in_features: int, out_features: int, bits: int, group_size: int) -> str:
    return (
        f"of {in_features} inputs and {out_features} outputs does not fit {bits} bits in groups of "
        f"{group_size}"
    )
