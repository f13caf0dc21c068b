"""Weights of a GGUF file as the engine lays them out, dequantized."""

from __future__ import annotations

import torch
from torch import Tensor

from localgen.backends.cuda.model.linear import DenseLinear, Linear
from localgen.backends.formats.architecture.sharding import Shard
from localgen.backends.formats.gguf.file import GgufFile
from localgen.backends.formats.gguf.rope import FACTORS
from localgen.backends.formats.gguf.spec import architecture


class GgufTensors:
    """The Tensors of a GGUF file, tensor by tensor straight to the device.

    LoadFailed: a tensor is missing, of the wrong shape or of a type that cannot be read.
    """

    def __init__(
        self, file: GgufFile, shard: Shard, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        import gguf

        self._file = file
        self._shard = shard
        spec = self._spec = shard.local
        self._device = device
        self._dtype = dtype
        name = architecture(file)
        kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
        self._names = gguf.get_tensor_name_map(kinds[name], spec.layers)
        # of this architecture alone, the rows of q and k are stored in another order
        self._interleaved = (
            {"q_proj": spec.heads, "k_proj": spec.kv_heads} if name == "llama" else {}
        )
        self._unread = set(file.names())

    def norm(self, name: str, size: int) -> Tensor:
        if not self._spec.norm_offset:
            return self._read(f"{self._name(name)}.weight", (size,))
        # files have the whole factor, the engine what it differs from 1 by
        stored = self._read(f"{self._name(name)}.weight", (size,), torch.float32)
        return (stored - 1.0).to(self._dtype)

    def embedding(self, name: str, rows: int, size: int) -> Tensor:
        return self._read(f"{self._name(name)}.weight", (rows, size))

    def linear(self, name: str, ins: int, outs: int, *, bias: bool = False) -> Linear:
        stored = self._name(name)
        heads = self._interleaved.get(name.rpartition(".")[2])
        weight = self._read(f"{stored}.weight", (outs, ins))
        b = None
        if bias or f"{stored}.bias" in self._file:
            b = self._read(f"{stored}.bias", (outs,))
        if heads is not None:
            weight, b = _halves(weight, heads), None if b is None else _halves(b, heads)
        return DenseLinear(weight, b)

    def experts(self, layer: str) -> tuple[Tensor, Tensor, Tensor]:
        spec, moe = self._spec, self._spec.moe
        assert moe is not None
        block = f"blk.{layer.rpartition('.')[2]}"
        router = self._read(f"{block}.ffn_gate_inp.weight", (moe.experts, spec.hidden))
        shape = (moe.experts, moe.intermediate, spec.hidden)
        gate_up = router.new_empty(moe.experts, 2 * moe.intermediate, spec.hidden)
        gate_up[:, : moe.intermediate] = self._read(f"{block}.ffn_gate_exps.weight", shape)
        gate_up[:, moe.intermediate :] = self._read(f"{block}.ffn_up_exps.weight", shape)
        down_shape = (moe.experts, spec.hidden, moe.intermediate)
        return router, gate_up, self._read(f"{block}.ffn_down_exps.weight", down_shape)

    def check_all_read(self) -> None:
        """LoadFailed: a tensor is left that such a model does not have."""
        for name in sorted(self._unread.difference(FACTORS)):
            raise self._file.refusal(
                name, f"is not part of {self._spec.architecture} as the metadata describe it"
            )

    def _name(self, name: str) -> str:
        """GGUF's name of what Hugging Face names so, both without `.weight`."""
        stored = self._names.get_name(name)
        assert stored is not None, name
        return stored

    def _read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        self._unread.discard(name)
        cut = self._shard.cut(name, self._file.shape(name))
        read = self._file.read(
            name, shape, device=self._device, dtype=dtype or self._dtype, cut=cut
        )
        return read if self._shard.counts(name) else torch.zeros_like(read)


def _halves(rows: Tensor, heads: int) -> Tensor:
    """Rows [heads * head_dim, …], the two of each rotated pair side by side, as two halves.

    llama.cpp rotates row 2 i of a head with row 2 i + 1, the engine row i with row
    i + head_dim / 2.
    """
    pairs = rows.view(heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
