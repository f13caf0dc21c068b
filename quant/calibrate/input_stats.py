"""What methods want to know of a linear's inputs, summed up batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from localgen.backends.errors import LoadFailed
from localgen.backends.formats.hf.tensor_names import Tensors
from localgen.quant.calibrate.layer_forward import LayerForward

# a model of fewer inputs is done in minutes anyway
_WIDE = 1024
# a layer's input, float32 [sequences, length, hidden] at a time; each call begins again
Inputs = Callable[[], Iterable[Tensor]]
# rows of a large matrix of products that are added up together, from the diagonal on
_ROWS = 1024


def multiplied_in(device: torch.device, hidden: int) -> torch.dtype:
    """bfloat16 where it saves hours: in models of at least _WIDE hidden states, on hardware that
    multiplies it several times as fast as float32. Every GPU that the engine runs on does, and
    CPUs with AVX-512 for it.

    The inputs of linears are rounded to it then, as they are where the model runs.
    """
    fast = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if fast and hidden >= _WIDE else torch.float32


@contextmanager
def short_factors() -> Iterator[None]:
    """Products of float32 matrices round their factors, to bfloat16 or TF32, where that is faster.
    Those that bfloat16 has anyway stay as they are, and sums are in float32 as ever."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass(frozen=True, slots=True, eq=False)
class Importance:
    """squares: float32 [in], sums of a linear's squared inputs over `count` tokens."""

    squares: Tensor
    count: int


class Moments:
    """Sums over the tokens a linear has seen, in float32.

    count: of tokens. squares, magnitudes: [in], sums of x² and of |x|. peaks: [in], greatest
    |x|.
    """

    def __init__(self, ins: int, block: int | None, device: torch.device | str = "cpu") -> None:
        self.count = 0
        self.squares = torch.zeros(ins, device=device)
        self.magnitudes = torch.zeros(ins, device=device)
        self.peaks = torch.zeros(ins, device=device)
        size = block or 0
        self._products = torch.zeros(ins // size if size else 0, size, size, device=device)
        self._mirrored = True

    def add(self, x: Tensor) -> None:
        """x: float32 or bfloat16 [tokens, in]. Products of the latter are exact, and faster."""
        if not len(x):
            return
        short = x.dtype is torch.bfloat16
        x = x.float()
        self.count += len(x)
        magnitudes = x.abs()
        self.squares += x.square().sum(0)
        self.magnitudes += magnitudes.sum(0)
        self.peaks = torch.maximum(self.peaks, magnitudes.amax(0))
        with short_factors() if short else nullcontext():
            self._multiply(x)

    def _multiply(self, x: Tensor) -> None:
        if len(self._products) == 1:
            for start, rows in self._stripes():
                rows[:, start:].addmm_(x[:, start : start + _ROWS].t(), x[:, start:])
            self._mirrored = False
        elif len(self._products):
            parts = x.reshape(len(x), len(self._products), -1).transpose(0, 1)
            self._products.baddbmm_(parts.transpose(1, 2), parts)

    def _stripes(self) -> Iterator[tuple[int, Tensor]]:
        """Some rows of the one block at a time, and the first one's number."""
        return zip(count(0, _ROWS), torch.split(self._products[0], _ROWS), strict=False)

    @property
    def products(self) -> Tensor:
        """[in / block, block, block], sums of x xᵀ within each block of inputs; none for
        block=None. One block of all inputs is the Hessian of a linear's squared error, halved."""
        if not self._mirrored:
            for start, rows in self._stripes():
                end = start + len(rows)
                self._products[0, end:, start:end] = rows[:, end:].t()
            self._mirrored = True
        return self._products

    @property
    def hessian(self) -> Tensor:
        """[in, in], where products is a single block."""
        return self.products.squeeze(0)

    def blocks(self, size: int) -> Tensor:
        """[in / size, size, size]: products in blocks of `size`, which divides theirs."""
        blocks, wide = len(self.products), self.products.shape[1]
        parts = self.products.view(blocks, wide // size, size, wide // size, size)
        return parts.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).flatten(0, 1)


def observe(
    forward: LayerForward,
    index: int,
    tensors: Tensors,
    inputs: Inputs,
    wanted: Mapping[str, Moments],
) -> None:
    """Run all inputs through layer `index` and add up what the linears in `wanted` see.

    LoadFailed: activations that are NaN or infinite.
    """

    def tap(name: str, x: Tensor) -> None:
        if name in wanted:
            wanted[name].add(x)

    for hidden in inputs():
        forward.run(index, tensors, hidden, tap)
    for name, moments in wanted.items():
        if not moments.squares.isfinite().all():
            raise LoadFailed(
                f"model.layers.{index}.{name} sees NaN or infinite values in the calibration "
                "text: the checkpoint is damaged, or its config.json is another model's"
            )
