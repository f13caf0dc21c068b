"""How much of a known prefix to reuse: sometimes computing more of the prompt takes less time."""

from __future__ import annotations

from dataclasses import dataclass

from localgen.backends.llamacpp.native import Model
from localgen.backends.llamacpp.options import Settings

# From this many rows on, llama.cpp's flash attention on the CPU works on whole blocks.
BLOCK_ROWS = 64
# Its cost for a row and a token of context, with blocks and without, as a multiple of the cost
# of a multiplication with weights; measured with 1.2 B parameters in Q4_K_M on two AVX-512 cores.
_IN_BLOCKS, _ROW_BY_ROW = 10.0, 41.0
# below this the attention is too small a part of the work for the choice to matter
_LEAST_CONTEXT = 512


@dataclass(frozen=True, slots=True)
class Reuse:
    """attention: multiplications per token of context, relative to those with weights.

    0: rows cost the same, however many there are.
    """

    attention: float

    @classmethod
    def of(cls, model: Model, options: Settings) -> Reuse:
        """What holds for this model under these options."""
        types = {options.cache_type_k, options.cache_type_v}
        in_blocks = options.flash_attn != "off" and types in ({"f16"}, {"f32"})
        if options.gpu_layers or not in_blocks:
            return cls(0.0)
        return cls(model.layers * model.width / max(1, model.num_params))

    def length(self, known: int, total: int) -> int:
        """How many of `known` tokens to reuse for a prompt of `total`.

        All of them, unless the rest is a little short of a block, behind a long context.
        """
        rows = total - known
        if known < _LEAST_CONTEXT or rows >= BLOCK_ROWS:
            return known
        context = self.attention * total
        in_block = BLOCK_ROWS * (1 + _IN_BLOCKS * context)
        return total - BLOCK_ROWS if in_block < rows * (1 + _ROW_BY_ROW * context) else known
