"""How the engine runs: with CUDA graphs or without, running ahead or not; chosen by the checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.gpu_parts.report import CorrectnessCheck, lost_unit
from localgen.backends.cuda.kernels.dispatch import Kernel, Operation, kernels_of

GRAPHS_CHECK = "logits with graphs, against eager steps"


@dataclass(frozen=True, slots=True)
class Mode:
    """graphs: replay CUDA graphs. ahead: launch steps before their tokens are known.

    dependent: use programmatic dependent launch, which users do not have.
    """

    graphs: bool
    ahead: bool
    dependent: bool = False

    @property
    def name(self) -> str:
        named = "graphs" if self.graphs else "eager"
        named += ", run-ahead" if self.ahead else ""
        return named + (", dependent launch" if self.dependent else "")

    @property
    def check(self) -> str:
        """Name of the check of the whole engine in this mode."""
        return f"greedy, {self.name}"


# operation of each function that the groups of kernel checks check
_CHECKED: dict[str, dict[str, Operation]] = {
    "products": {"matmul": "dense", "gated_matmul": "dense"},
    "fused": {"project_and_store_kv": "dense", "int4_project_and_store_kv": "int4"},
    "int4_products": {"int4_matmul": "int4", "int4_gated_matmul": "int4"},
    "fp8_products": {"fp8_matmul": "fp8"},
    "mixtures": {"fused_experts": "experts"},
    "norms": {"rms_norm": "norm", "rms_norm_fp8": "norm", "quantize_rows_fp8": "fp8_rows"},
    "gates": {"gated_activation": "activation"},
    "rotations": {"rope_and_store_kv": "rope"},
    "attentions": {"paged_attention": "attention"},
    "draws": {"sample_tokens": "sampling"},
    "advances": {"advance_decode_inputs": "decode_inputs"},
    "rejections": {"sampling_probs": "drafts", "rejection_sample": "drafts"},
}
# the fastest first
MODES = tuple(Mode(graphs, ahead) for graphs in (True, False) for ahead in (True, False))
# measured beside the default mode, never chosen: see kernels.dependent_launch
DEPENDENT_MODE = Mode(graphs=True, ahead=True, dependent=True)


@dataclass(frozen=True, slots=True)
class ChosenMode:
    """note: says if the mode has not passed its checks; otherwise empty."""

    mode: Mode
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.mode.name} ({self.note})" if self.note else self.mode.name


def wrong_operations(checks: Sequence[CorrectnessCheck]) -> list[Operation]:
    """Operations that failed a check: PyTorch computes them instead."""
    failed = [check.name for check in checks if not check.passed]
    found = [
        operation
        for group, functions in _CHECKED.items()
        for function, operation in functions.items()
        if {lost_unit(f"checks/{group}"), f"cases of {group}"} & {*failed}
        or any(name.startswith(f"{function}, ") for name in failed)
    ]
    return list(dict.fromkeys(found))


def kernels_without(operations: Sequence[Operation]) -> list[Kernel]:
    """Kernels to switch off if those of these operations are wrong."""
    return [kernel for operation in operations for kernel in kernels_of(operation)]


def best_mode(model: str, checks: Sequence[CorrectnessCheck]) -> ChosenMode:
    """Return the fastest mode in which all checks of this model passed.

    The users' default if the model was not checked; the slowest if no mode passed.
    """
    passed = {
        check.name: check.passed
        for check in checks
        if check.name.startswith(f"{model}: ") or check.name == lost_unit(f"modes/{model}")
    }
    if not passed:
        return ChosenMode(MODES[0], "not checked")
    for mode in MODES:
        needed = [mode.check, GRAPHS_CHECK] if mode.graphs else [mode.check]
        if all(passed.get(f"{model}: {name}", False) for name in needed):
            return ChosenMode(mode)
    return ChosenMode(MODES[-1], "failed its checks")
