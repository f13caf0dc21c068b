"""The first part: three kernels alone, then replayed from a CUDA graph."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.gpu_parts.bench import GpuBench
from benchmarks.gpu_parts.case import BF16
from benchmarks.gpu_parts.device import relative_error
from benchmarks.gpu_parts.progress import case_begins
from benchmarks.gpu_parts.report import CorrectnessCheck
from localgen.backends.cuda.kernels import activation, norm
from localgen.backends.cuda.kernels.gemm import dense

_SIZE, _REPLAYS = 512, 3


@torch.inference_mode()
def smoke(bench: GpuBench) -> None:
    """Check the least that everything else needs. The report's `machine` describes the device."""
    x, norm_weight = bench.inputs.normal(1, 2 * _SIZE), bench.inputs.normal(2 * _SIZE)
    weight = bench.inputs.normal(_SIZE, _SIZE, std=0.02)

    def run() -> Tensor:
        normed, _ = norm.rms_norm(x, norm_weight, 1e-5, offset=False, residual=None)
        return dense.matmul(activation.gated_activation(normed, "silu"), weight)

    normed, _ = norm.rms_norm_reference(
        x.double(), norm_weight.double(), 1e-5, offset=False, residual=None
    )
    gated = activation.gated_activation_reference(normed, "silu")
    wanted = dense.matmul_reference(gated, weight.double())
    name = "three kernels"
    case_begins(name)
    bench.check(CorrectnessCheck(name, relative_error(run(), wanted), BF16))
    if bench.device.is_gpu:
        name = "three kernels from a CUDA graph"
        case_begins(name)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run()
        for _ in range(_REPLAYS):
            found.fill_(torch.nan)
            graph.replay()
        bench.check(CorrectnessCheck(name, relative_error(found, wanted), BF16))
