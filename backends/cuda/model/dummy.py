"""Random weights (`--dummy`) in the layouts of real ones, to measure speed without a checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor

from localgen.backends.cuda.kernels.gemm.int4_format import pack_grid
from localgen.backends.cuda.model.linear import DenseLinear, Fp8Linear, Int4Linear, Linear
from localgen.backends.formats.architecture.model_spec import ModelSpec

# standard deviation, small enough for sums over any width to stay finite in float16
_STD = 0.02
# standard deviation of uniformly distributed integers from -8 to 7
_INT4_STD = 4.61


class DummyWeightLoader:
    """A WeightLoader of normally distributed random weights, quantized as in the spec."""

    def __init__(
        self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, seed: int
    ) -> None:
        self._spec = spec
        self._device = device
        self._dtype = dtype
        # the meta device has no random generator
        drawn = device.type != "meta"
        self._generator = torch.Generator(device).manual_seed(seed) if drawn else None

    def norm(self, name: str, size: int) -> Tensor:
        neutral = 0.0 if self._spec.norm_offset else 1.0
        return torch.full((size,), neutral, device=self._device, dtype=self._dtype)

    def embedding(self, name: str, rows: int, size: int) -> Tensor:
        return self._normal(rows, size)

    def linear(
        self, name: str, in_features: int, out_features: int, *, bias: bool = False
    ) -> Linear:
        b = self._normal(out_features) if bias else None
        quant = self._spec.quant
        if quant is None or quant.dequantized_on_load or name == "lm_head":
            return DenseLinear(self._normal(out_features, in_features), b)
        if quant.method == "fp8":
            scale = torch.full((out_features,), _STD, device=self._device)
            return Fp8Linear(
                self._normal(out_features, in_features, std=1.0).to(torch.float8_e4m3fn), scale, b
            )
        return self._int4(out_features, in_features, quant.group_size or in_features, b)

    def experts(self, layer: str) -> tuple[Tensor, Tensor, Tensor]:
        moe, hidden = self._spec.moe, self._spec.hidden_size
        assert moe is not None
        gate_up = self._normal(moe.num_experts, 2 * moe.intermediate_size, hidden)
        down = self._normal(moe.num_experts, hidden, moe.intermediate_size)
        return self._normal(moe.num_experts, hidden), gate_up, down

    def _normal(self, *shape: int, std: float = _STD) -> Tensor:
        values = torch.empty(shape, device=self._device, dtype=self._dtype)
        return values if values.is_meta else values.normal_(std=std, generator=self._generator)

    def _int4(
        self, out_features: int, in_features: int, group_size: int, bias: Tensor | None
    ) -> Int4Linear:
        shape = (out_features, in_features // group_size)
        packed = torch.empty(
            (out_features, in_features // 2), device=self._device, dtype=torch.uint8
        )
        if not packed.is_meta:
            packed.random_(256, generator=self._generator)
        scales = torch.full(shape, _STD / _INT4_STD, device=self._device, dtype=torch.float16)
        zeros = torch.full(shape, 8, device=self._device, dtype=torch.uint8)
        return Int4Linear(packed, pack_grid(scales, zeros), bias)


class DummyTokenizer:
    """Encodes bytes as tokens, and decodes every token to a letter to keep output readable."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.bos = self.eos = ""
        self.infill_tokens = None
        self.eos_token_ids: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        return [byte % self.vocab_size for byte in text.encode(errors="replace")]

    def encode_for_embedding(self, text: str) -> list[int]:
        return self.encode(text)

    def piece(self, token: int) -> bytes:
        return bytes([ord("a") + token % 26])

    def id_to_token(self, token: int) -> bytes:
        return self.piece(token)
