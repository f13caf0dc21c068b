"""Weights of a checkpoint as linears, norms and experts, whichever layout they are stored in."""

from __future__ import annotations

import torch
from torch import Tensor

from localgen.backends.cuda.model.dequantize import packed_size, plain_weight, widened_gptq
from localgen.backends.cuda.model.int4_repack import from_awq, from_gptq, group_order
from localgen.backends.cuda.model.linear import DenseLinear, Fp8Linear, Int4Linear, Linear
from localgen.backends.formats.architecture.model_spec import ModelSpec, Quant
from localgen.backends.formats.hf.checkpoint import FLOATS, Checkpoint

# in files of some tools, of no use here: tables, and scales for activations and the KV cache
_NOT_WEIGHTS = (
    "rotary_emb.inv_freq",
    ".input_scale",
    ".input_scale_ub",
    ".output_scale",
    ".k_scale",
    ".v_scale",
)


class StoredTensors:
    """The Tensors of a checkpoint. dtype: of all that is not quantized."""

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._spec = spec
        self._dtype = dtype

    def norm(self, name: str, size: int) -> Tensor:
        return self._read(f"{name}.weight", (size,))

    def embedding(self, name: str, rows: int, size: int) -> Tensor:
        return self._read(f"{name}.weight", (rows, size))

    def linear(self, name: str, ins: int, outs: int, *, bias: bool = False) -> Linear:
        """A linear of the kind that the checkpoint has under this name.

        A bias is read wherever there is one: GPTQ files may have one where the model has none.
        """
        has_bias = bias or f"{name}.bias" in self._checkpoint
        b = self._read(f"{name}.bias", (outs,)) if has_bias else None
        quant = self._spec.quant
        if f"{name}.qweight" in self._checkpoint:
            if quant is not None and quant.widened:
                return DenseLinear(self._gptq(name, ins, outs, quant), b)
            return self._int4(name, ins, outs, b)
        weight = f"{name}.weight"
        if weight in self._checkpoint and self._checkpoint.dtype(weight) == "F8_E4M3":
            return self._fp8(name, ins, outs, b)
        if weight in self._checkpoint and self._checkpoint.dtype(weight) == "I8":
            return DenseLinear(self._int8(name, ins, outs), b)
        return DenseLinear(self._read(weight, (outs, ins)), b)

    def experts(self, layer: str) -> tuple[Tensor, Tensor, Tensor]:
        spec, moe = self._spec, self._spec.moe
        assert moe is not None
        block = f"{layer}.mlp"
        if f"{layer}.block_sparse_moe.gate.weight" in self._checkpoint:
            block = f"{layer}.block_sparse_moe"
        router = self._read(f"{block}.gate.weight", (moe.experts, spec.hidden))
        gate_up_shape = (moe.experts, 2 * moe.intermediate, spec.hidden)
        down_shape = (moe.experts, spec.hidden, moe.intermediate)
        # transformers 5 keeps all experts in one tensor, and can save them so
        if f"{block}.experts.gate_up_proj" in self._checkpoint:
            gate_up = self._read(f"{block}.experts.gate_up_proj", gate_up_shape)
            return router, gate_up, self._read(f"{block}.experts.down_proj", down_shape)
        gate_up, down = router.new_empty(gate_up_shape), router.new_empty(down_shape)
        for index in range(moe.experts):
            self._expert(f"{block}.experts.{index}", gate_up[index], down[index])
        return router, gate_up, down

    def check_all_read(self) -> None:
        """LoadFailed: a tensor is left that such a model does not have."""
        for name in self._checkpoint.unread():
            # a tied head is the embedding once more
            copy = self._spec.tied and name == "lm_head.weight"
            if not copy and not name.endswith(_NOT_WEIGHTS):
                raise self._checkpoint.refusal(
                    name, f"is not part of {self._spec.architecture} as config.json describes it"
                )

    def _expert(self, expert: str, gate_up: Tensor, down: Tensor) -> None:
        names = ("gate_proj", "up_proj", "down_proj")
        if any(f"{expert}.w1.{part}" in self._checkpoint for part in ("weight", "qweight")):
            names = ("w1", "w3", "w2")
        size = down.shape[1]
        for name, target in zip(names, (gate_up[:size], gate_up[size:], down), strict=True):
            outs, ins = target.shape
            linear = self.linear(f"{expert}.{name}", ins, outs)
            target.copy_(plain_weight(linear, self._dtype))

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._checkpoint.read(name, shape, dtype=self._dtype)

    def _int4(self, name: str, ins: int, outs: int, bias: Tensor | None) -> Int4Linear:
        quant = self._spec.quant
        if quant is None or quant.method not in ("awq", "gptq"):
            reason = "is int4, but config.json has no quantization_config of awq or gptq"
            raise self._checkpoint.refusal(f"{name}.qweight", reason)
        size = quant.group_size or ins
        if ins % size or outs % 8 or ins % 8:
            reason = f"of {ins} inputs and {outs} outputs does not fit groups of {size}"
            raise self._checkpoint.refusal(f"{name}.qweight", reason)
        groups = ins // size
        zeros = self._words(f"{name}.qzeros", (groups, outs // 8))
        # scales keep their dtype: the dequantized weights are rounded to dtype, once
        scales = self._checkpoint.read(f"{name}.scales", (groups, outs), stored=FLOATS)
        if quant.method == "awq":
            words = self._words(f"{name}.qweight", (ins, outs // 8))
            return from_awq(words, zeros, scales, bias)
        words = self._words(f"{name}.qweight", (ins // 8, outs))
        order = self._order(f"{name}.g_idx", ins, groups, quant)
        return from_gptq(words, zeros, scales, bias, order=order, zero_offset=quant.zero_offset)

    def _gptq(self, name: str, ins: int, outs: int, quant: Quant) -> Tensor:
        """A weight of another width than four bits, widened."""
        size, bits = quant.group_size or ins, quant.bits
        in_words, out_words = packed_size(ins, bits), packed_size(outs, bits)
        if in_words is None or out_words is None or ins % size:
            reason = (
                f"of {ins} inputs and {outs} outputs does not fit {bits} bits in groups of {size}"
            )
            raise self._checkpoint.refusal(f"{name}.qweight", reason)
        groups = ins // size
        words = self._words(f"{name}.qweight", (in_words, outs))
        zeros = self._words(f"{name}.qzeros", (groups, out_words))
        scales = self._checkpoint.read(f"{name}.scales", (groups, outs), stored=FLOATS)
        g_idx = torch.arange(ins, device=words.device) // size
        if f"{name}.g_idx" in self._checkpoint:
            g_idx = self._checkpoint.read(f"{name}.g_idx", (ins,), stored=("I32", "I64"))
        if not 0 <= int(g_idx.min()) <= int(g_idx.max()) < groups:
            raise self._checkpoint.refusal(f"{name}.g_idx", f"names groups beyond {groups}")
        offset = quant.zero_offset
        weight = widened_gptq(words, zeros, scales, g_idx, bits=bits, zero_offset=offset)
        return weight.to(self._dtype)

    def _int8(self, name: str, ins: int, outs: int) -> Tensor:
        quant = self._spec.quant
        if quant is None or quant.method != "int8":
            reason = "is int8, but config.json has no quantization_config of such"
            raise self._checkpoint.refusal(f"{name}.weight", reason)
        weight = self._checkpoint.read(f"{name}.weight", (outs, ins), stored=("I8",))
        scales = self._row_scales(f"{name}.weight_scale", outs)
        return (weight.float() * scales[:, None]).to(self._dtype)

    def _words(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._checkpoint.read(name, shape, stored=("I32",))

    def _order(self, name: str, ins: int, groups: int, quant: Quant) -> Tensor | None:
        if not quant.desc_act and name not in self._checkpoint:
            return None
        g_idx = self._checkpoint.read(name, (ins,), stored=("I32", "I64"))
        try:
            # those of a shard go on where the rank before ends
            return group_order(g_idx - g_idx.min(), groups)
        except ValueError as error:
            raise self._checkpoint.refusal(name, str(error)) from None

    def _fp8(self, name: str, ins: int, outs: int, bias: Tensor | None) -> Fp8Linear:
        if self._spec.quant is None or self._spec.quant.method != "fp8":
            reason = "is FP8, but config.json has no quantization_config of such"
            raise self._checkpoint.refusal(f"{name}.weight", reason)
        weight = self._checkpoint.read(f"{name}.weight", (outs, ins), stored=("F8_E4M3",))
        return Fp8Linear(weight, self._row_scales(f"{name}.weight_scale", outs), bias)

    def _row_scales(self, name: str, outs: int) -> Tensor:
        shape = self._checkpoint.shape(name)
        if shape not in ((outs, 1), (outs,), (1,), ()):
            wanted = f"[{outs}, 1], [{outs}] or a single number"
            raise self._checkpoint.refusal(name, f"is of shape {list(shape)}, not {wanted}")
        scale = self._checkpoint.read(name, shape, dtype=torch.float32)
        return scale.flatten().expand(outs).contiguous()
