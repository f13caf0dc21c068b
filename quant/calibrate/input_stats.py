"""Statistics of linears' inputs, accumulated batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import count

import torch
from torch import Tensor

from localgen.backends.errors import LoadFailed
from localgen.quant.calibrate.layer_forward import CalibrationLayer

# smaller models take minutes in float32 anyway
_MIN_BF16_HIDDEN = 1024
# rows of a large Gram matrix that are accumulated together, from the diagonal on
_STRIPE_ROWS = 1024


def calibration_dtype(device: torch.device, hidden_size: int) -> torch.dtype:
    """Dtype of the matrix multiplications: bfloat16 if the model has at least _MIN_BF16_HIDDEN
    hidden units and the hardware multiplies bfloat16 several times faster than float32 (every
    supported GPU, and CPUs with AVX-512 BF16), else float32.

    With bfloat16 the inputs of linears are rounded to it, as in the engine.
    """
    fast = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if fast and hidden_size >= _MIN_BF16_HIDDEN else torch.float32


@contextmanager
def reduced_precision_matmul() -> Iterator[None]:
    """Let float32 matmuls round their factors to bfloat16 or TF32 where that is faster.

    Factors that bfloat16 can hold stay exact; sums are float32.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class InputStats:
    """Float32 statistics of the inputs x of one linear.

    sum_squares, sum_abs: [in], sums of x² and of |x|. max_abs: [in], maximum of |x|. mismatch:
    [in, in], sums of (x₀ - x) xᵀ, with x₀ the same input in the original model; None if not
    collected.
    """

    def __init__(
        self,
        ins: int,
        block: int | None,
        device: torch.device | str = "cpu",
        *,
        with_mismatch: bool = False,
    ) -> None:
        """block: inputs per Gram block; None for no Gram blocks."""
        self.num_tokens = 0
        self.sum_squares = torch.zeros(ins, device=device)
        self.sum_abs = torch.zeros(ins, device=device)
        self.max_abs = torch.zeros(ins, device=device)
        size = block or 0
        self._gram_blocks = torch.zeros(ins // size if size else 0, size, size, device=device)
        self._mirrored = True
        self.mismatch = torch.zeros(ins, ins, device=device) if with_mismatch else None

    def add(self, x: Tensor, original: Tensor | None = None) -> None:
        """x: float32 or bfloat16 [tokens, in]. Products of bfloat16 are exact, and faster.

        original: likewise, x₀ of the mismatch; needed if that is collected.
        """
        if not len(x):
            return
        is_bf16 = x.dtype is torch.bfloat16
        x = x.float()
        self.num_tokens += len(x)
        magnitudes = x.abs()
        self.sum_squares += x.square().sum(0)
        self.sum_abs += magnitudes.sum(0)
        self.max_abs = torch.maximum(self.max_abs, magnitudes.amax(0))
        with reduced_precision_matmul() if is_bf16 else nullcontext():
            self._add_gram(x)
            if self.mismatch is not None:
                assert original is not None
                self.mismatch.addmm_((original.float() - x).t(), x)

    def _add_gram(self, x: Tensor) -> None:
        if len(self._gram_blocks) == 1:
            for start, rows in self._row_stripes():
                rows[:, start:].addmm_(x[:, start : start + _STRIPE_ROWS].t(), x[:, start:])
            self._mirrored = False
        elif len(self._gram_blocks):
            parts = x.reshape(len(x), len(self._gram_blocks), -1).transpose(0, 1)
            self._gram_blocks.baddbmm_(parts.transpose(1, 2), parts)

    def _row_stripes(self) -> Iterator[tuple[int, Tensor]]:
        """First row number and rows of each stripe of the only block."""
        return zip(
            count(0, _STRIPE_ROWS), torch.split(self._gram_blocks[0], _STRIPE_ROWS), strict=False
        )

    @property
    def gram_blocks(self) -> Tensor:
        """[in / block, block, block], sums of x xᵀ within each block of inputs; empty if block is
        None. A single block is half the Hessian of the linear's squared error."""
        if not self._mirrored:
            for start, rows in self._row_stripes():
                end = start + len(rows)
                self._gram_blocks[0, end:, start:end] = rows[:, end:].t()
            self._mirrored = True
        return self._gram_blocks

    @property
    def hessian(self) -> Tensor:
        """[in, in], if there is a single block."""
        return self.gram_blocks.squeeze(0)

    def diagonal_blocks(self, size: int) -> Tensor:
        """[in / size, size, size]: diagonal blocks of the Gram blocks; `size` divides theirs."""
        blocks, wide = len(self.gram_blocks), self.gram_blocks.shape[1]
        parts = self.gram_blocks.view(blocks, wide // size, size, wide // size, size)
        return parts.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).flatten(0, 1)


def collect_input_stats(layer: CalibrationLayer, stats: Mapping[str, InputStats]) -> None:
    """Run all inputs through the layer and accumulate the inputs of the linears in `stats`.

    Raises LoadFailed for NaN or infinite activations.
    """
    paired = {name for name, found in stats.items() if found.mismatch is not None}
    originals: dict[str, Tensor] = {}

    def keep_original(name: str, x: Tensor) -> None:
        if name in paired:
            originals[name] = x

    def hook(name: str, x: Tensor) -> None:
        if name in stats:
            stats[name].add(x, originals.pop(name, None))

    layer.run_inputs(hook, keep_original if paired else None)
    for name, found in stats.items():
        if not found.sum_squares.isfinite().all():
            raise LoadFailed(
                f"{layer.full_name(name)} sees NaN or infinite values in the calibration "
                "text: the checkpoint is damaged, or its config.json is another model's"
            )
