"""What methods want to know of a linear's inputs, summed up batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from localgen.backends.errors import LoadFailed
from localgen.backends.formats.hf.tensor_names import LayerTensors
from localgen.quant.calibrate.layer_forward import LayerForward

# a model of fewer inputs is done in minutes anyway
_MIN_BF16_HIDDEN = 1024
# a layer's input, float32 [sequences, length, hidden] at a time; each call begins again
LayerInputs = Callable[[], Iterable[Tensor]]
# rows of a large matrix of products that are added up together, from the diagonal on
_STRIPE_ROWS = 1024


def calibration_dtype(device: torch.device, hidden_size: int) -> torch.dtype:
    """bfloat16 where it saves hours: in models of at least _MIN_BF16_HIDDEN hidden states, on
    hardware that multiplies it several times as fast as float32. Every GPU that the engine runs
    on does, and CPUs with AVX-512 for it.

    The inputs of linears are rounded to it then, as they are where the model runs.
    """
    fast = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if fast and hidden_size >= _MIN_BF16_HIDDEN else torch.float32


@contextmanager
def reduced_precision_matmul() -> Iterator[None]:
    """Products of float32 matrices round their factors, to bfloat16 or TF32, where that is faster.
    Those that bfloat16 has anyway stay as they are, and sums are in float32 as ever."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass(frozen=True, slots=True, eq=False)
class InputImportance:
    """sum_squares: float32 [in], sums of a linear's squared inputs over `count` tokens."""

    sum_squares: Tensor
    num_tokens: int


class InputStats:
    """Sums over the tokens a linear has seen, in float32.

    num_tokens: of tokens. sum_squares, sum_abs: [in], sums of x² and of |x|. max_abs: [in],
    greatest |x|.
    """

    def __init__(self, ins: int, block: int | None, device: torch.device | str = "cpu") -> None:
        self.num_tokens = 0
        self.sum_squares = torch.zeros(ins, device=device)
        self.sum_abs = torch.zeros(ins, device=device)
        self.max_abs = torch.zeros(ins, device=device)
        size = block or 0
        self._gram_blocks = torch.zeros(ins // size if size else 0, size, size, device=device)
        self._mirrored = True

    def add(self, x: Tensor) -> None:
        """x: float32 or bfloat16 [tokens, in]. Products of the latter are exact, and faster."""
        if not len(x):
            return
        short = x.dtype is torch.bfloat16
        x = x.float()
        self.num_tokens += len(x)
        magnitudes = x.abs()
        self.sum_squares += x.square().sum(0)
        self.sum_abs += magnitudes.sum(0)
        self.max_abs = torch.maximum(self.max_abs, magnitudes.amax(0))
        with reduced_precision_matmul() if short else nullcontext():
            self._add_gram(x)

    def _add_gram(self, x: Tensor) -> None:
        if len(self._gram_blocks) == 1:
            for start, rows in self._row_stripes():
                rows[:, start:].addmm_(x[:, start : start + _STRIPE_ROWS].t(), x[:, start:])
            self._mirrored = False
        elif len(self._gram_blocks):
            parts = x.reshape(len(x), len(self._gram_blocks), -1).transpose(0, 1)
            self._gram_blocks.baddbmm_(parts.transpose(1, 2), parts)

    def _row_stripes(self) -> Iterator[tuple[int, Tensor]]:
        """Some rows of the one block at a time, and the first one's number."""
        return zip(
            count(0, _STRIPE_ROWS), torch.split(self._gram_blocks[0], _STRIPE_ROWS), strict=False
        )

    @property
    def gram_blocks(self) -> Tensor:
        """[in / block, block, block], sums of x xᵀ within each block of inputs; none for
        block=None. One block of all inputs is the Hessian of a linear's squared error, halved."""
        if not self._mirrored:
            for start, rows in self._row_stripes():
                end = start + len(rows)
                self._gram_blocks[0, end:, start:end] = rows[:, end:].t()
            self._mirrored = True
        return self._gram_blocks

    @property
    def hessian(self) -> Tensor:
        """[in, in], where products is a single block."""
        return self.gram_blocks.squeeze(0)

    def diagonal_blocks(self, size: int) -> Tensor:
        """[in / size, size, size]: products in blocks of `size`, which divides theirs."""
        blocks, wide = len(self.gram_blocks), self.gram_blocks.shape[1]
        parts = self.gram_blocks.view(blocks, wide // size, size, wide // size, size)
        return parts.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).flatten(0, 1)


def collect_input_stats(
    forward: LayerForward,
    index: int,
    tensors: LayerTensors,
    inputs: LayerInputs,
    stats: Mapping[str, InputStats],
) -> None:
    """Run all inputs through layer `index` and add up what the linears in `stats` see.

    LoadFailed: activations that are NaN or infinite.
    """

    def tap(name: str, x: Tensor) -> None:
        if name in stats:
            stats[name].add(x)

    for hidden in inputs():
        forward.run(index, tensors, hidden, tap)
    for name, moments in stats.items():
        if not moments.sum_squares.isfinite().all():
            raise LoadFailed(
                f"model.layers.{index}.{name} sees NaN or infinite values in the calibration "
                "text: the checkpoint is damaged, or its config.json is another model's"
            )
