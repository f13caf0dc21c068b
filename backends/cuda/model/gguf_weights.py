"""Load and dequantize the weights of a GGUF file."""

from __future__ import annotations

import torch
from torch import Tensor

from localgen.backends.cuda.model.linear import DenseLinear, Linear
from localgen.backends.formats.architecture.sharding import ModelShard
from localgen.backends.formats.gguf.file import GgufFile
from localgen.backends.formats.gguf.rope import ROPE_FACTOR_TENSORS
from localgen.backends.formats.gguf.spec import read_gguf_architecture


class GgufWeightLoader:
    """WeightLoader for a GGUF file; reads tensor by tensor straight to the device.

    Raises LoadFailed if a tensor is missing, has the wrong shape, or has an unsupported type.
    """

    def __init__(
        self, file: GgufFile, shard: ModelShard, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        import gguf

        self._file = file
        self._shard = shard
        spec = self._spec = shard.local_spec
        self._device = device
        self._dtype = dtype
        name = read_gguf_architecture(file)
        kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
        self._names = gguf.get_tensor_name_map(kinds[name], spec.num_layers)
        # only llama stores the rows of q and k with interleaved RoPE pairs
        self._interleaved_heads = (
            {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads} if name == "llama" else {}
        )
        self._unread_tensors = set(file.tensor_names())

    def norm(self, name: str, size: int) -> Tensor:
        if not self._spec.norm_offset:
            return self._read(f"{self._gguf_name(name)}.weight", (size,))
        # GGUF stores 1 + weight, the engine expects weight
        stored = self._read(f"{self._gguf_name(name)}.weight", (size,), torch.float32)
        return (stored - 1.0).to(self._dtype)

    def embedding(self, name: str, rows: int, size: int) -> Tensor:
        return self._read(f"{self._gguf_name(name)}.weight", (rows, size))

    def linear(
        self, name: str, in_features: int, out_features: int, *, bias: bool = False
    ) -> Linear:
        stored = self._gguf_name(name)
        heads = self._interleaved_heads.get(name.rpartition(".")[2])
        weight = self._read(f"{stored}.weight", (out_features, in_features))
        b = None
        if bias or f"{stored}.bias" in self._file:
            b = self._read(f"{stored}.bias", (out_features,))
        if heads is not None:
            weight, b = (
                _deinterleave_rope(weight, heads),
                None if b is None else _deinterleave_rope(b, heads),
            )
        return DenseLinear(weight, b)

    def experts(self, layer: str) -> tuple[Tensor, Tensor, Tensor]:
        spec, moe = self._spec, self._spec.moe
        assert moe is not None
        block = f"blk.{layer.rpartition('.')[2]}"
        router = self._read(f"{block}.ffn_gate_inp.weight", (moe.num_experts, spec.hidden_size))
        shape = (moe.num_experts, moe.intermediate_size, spec.hidden_size)
        gate_up = router.new_empty(moe.num_experts, 2 * moe.intermediate_size, spec.hidden_size)
        gate_up[:, : moe.intermediate_size] = self._read(f"{block}.ffn_gate_exps.weight", shape)
        gate_up[:, moe.intermediate_size :] = self._read(f"{block}.ffn_up_exps.weight", shape)
        down_shape = (moe.num_experts, spec.hidden_size, moe.intermediate_size)
        return router, gate_up, self._read(f"{block}.ffn_down_exps.weight", down_shape)

    def check_all_read(self) -> None:
        """Raise LoadFailed if the file has a tensor that is not part of the architecture."""
        for name in sorted(self._unread_tensors.difference(ROPE_FACTOR_TENSORS)):
            raise self._file.load_error(
                name, f"is not part of {self._spec.architecture} as the metadata describe it"
            )

    def _gguf_name(self, name: str) -> str:
        """GGUF name of a Hugging Face tensor name, both without `.weight`."""
        stored = self._names.get_name(name)
        assert stored is not None, name
        return stored

    def _read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        self._unread_tensors.discard(name)
        cut = self._shard.slice_of(name, self._file.shape(name))
        read = self._file.read(
            name, shape, device=self._device, dtype=dtype or self._dtype, shard_slice=cut
        )
        return read if self._shard.contributes(name) else torch.zeros_like(read)


def _deinterleave_rope(rows: Tensor, heads: int) -> Tensor:
    """Reorder rows [heads * head_dim, …] from interleaved RoPE pairs to two halves.

    llama.cpp rotates row 2i of a head with row 2i + 1, the engine row i with row i + head_dim/2.
    """
    pairs = rows.view(heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
