"""The table of kernels: complete, in order, as documented, and what operations choose from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from torch import Tensor

from localgen.backends.cuda.kernels import activation, dispatch, fp8_rows, norm, rope
from localgen.backends.cuda.kernels.attention import paged
from localgen.backends.cuda.kernels.attention.paged import paged_attention
from localgen.backends.cuda.kernels.attention_metadata import AttentionMetadata
from localgen.backends.cuda.kernels.dispatch import (
    ROUTES,
    Kernel,
    Operation,
    choose_kernel,
    kernels_of,
    max_rows,
    switch_off,
)
from localgen.backends.cuda.kernels.gemm import dense, fp8, int4
from localgen.backends.cuda.kernels.gemm.int4_format import pack_grid, pack_int4
from localgen.backends.cuda.kernels.kv_cache import LayerKV
from localgen.backends.cuda.kernels.launch import record_launches
from localgen.backends.cuda.kernels.sampling import rejection, sample
from localgen.backends.cuda.kernels.sampling.sample import SamplerOutput

LABELS: dict[Operation, str] = {
    "dense": "product, bf16 or fp16",
    "int4": "product, int4",
    "fp8": "product, FP8",
    "experts": "experts",
    "attention": "attention",
    "norm": "RMSNorm",
    "rope": "RoPE",
    "activation": "gated activation",
    "fp8_rows": "rounding to FP8",
    "sampling": "sampling",
    "drafts": "sampled drafts",
    "decode_inputs": "inputs of the next decode step",
}
META = torch.device("meta")


@pytest.fixture(autouse=True)
def all_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(dispatch, "_switched_off", set())
    yield
    dispatch._look_up.cache_clear()


def rows_of(count: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(count, 256, dtype=dtype, device=META)


def chosen(operation: Operation, rows: int, arch: int = 90, **unsuited: object) -> Kernel:
    with record_launches(arch, 132):
        return choose_kernel(operation, rows_of(rows), **unsuited)  # type: ignore[arg-type]


def documented() -> Iterator[str]:
    for operation, label in LABELS.items():
        first = 1
        for route in (route for route in ROUTES if route.operation == operation):
            last = route.max_rows
            if last is None:
                rows = "any" if first == 1 else "more"
            else:
                rows = "1" if last == 1 else f"{first} to {last}"
            first = (last or 0) + 1
            yield f"  | {label} | {rows} | {route.kernel} | {route.how} |"


def test_every_operation_has_kernels_and_every_kernel_an_operation() -> None:
    assert set(LABELS) == set(get_args(Operation)) == {route.operation for route in ROUTES}
    assert {*Kernel} == {route.kernel for route in ROUTES} | {Kernel.REFERENCE}


def test_docs_show_the_table() -> None:
    docs = (Path(__file__).parents[1] / "docs/gpu.md").read_text(encoding="utf-8").splitlines()
    head = docs.index("  | operation | rows | kernel | how |")
    assert docs[head + 2 : head + 3 + len(ROUTES)] == [*documented(), ""]


@pytest.mark.parametrize("operation", LABELS)
def test_each_number_of_rows_has_the_first_kernel_that_serves_it(operation: Operation) -> None:
    """Larger numbers come later, and the last kernel takes any."""
    routes = [route for route in ROUTES if route.operation == operation]
    limits = [route.max_rows or 1 << 30 for route in routes]
    assert limits == sorted(set(limits))
    assert routes[-1].max_rows is None
    for route, before in zip(routes, [0, *limits], strict=False):
        for rows in (before + 1, route.max_rows or before + 9):
            assert chosen(operation, rows) is route.kernel


def test_what_the_kernels_do_not_serve() -> None:
    assert chosen("fp8", 1, arch=80) is Kernel.REFERENCE
    assert chosen("int4", 1, fits=False) is Kernel.REFERENCE
    assert chosen("experts", 1, unfit=(Kernel.SMALL_BATCH_EXPERTS,)) is Kernel.GROUPED_EXPERTS
    assert chosen("dense", 0) is Kernel.REFERENCE
    assert choose_kernel("dense", torch.zeros(1, 256).bfloat16()) is Kernel.REFERENCE  # on a CPU
    with record_launches(90, 132):
        wide = rows_of(1, torch.float32)
        assert choose_kernel("int4", wide) is Kernel.INT4_DEQUANTIZE
        assert choose_kernel("fp8", wide) is Kernel.REFERENCE
    assert max_rows(Kernel.INT4_WIDE) == 256
    with pytest.raises(AssertionError, match="any number"):
        max_rows(Kernel.GROUPED_EXPERTS)


def launched(rows: int, weights: Operation) -> set[str]:
    """Names of the kernels that a product launches."""
    x, outs = rows_of(rows), 64
    with record_launches(90, 132) as recording:
        if weights == "dense":
            dense.matmul(x, torch.empty(outs, 256, dtype=x.dtype, device=META))
        elif weights == "int4":
            codes = torch.empty(outs, 256, dtype=torch.uint8, device=META)
            grid = pack_grid(torch.empty(outs, 2, device=META), codes[:, :2])
            int4.int4_matmul(x, pack_int4(codes), grid)
        else:
            weight = torch.empty(outs, 256, dtype=torch.float8_e4m3fn, device=META)
            fp8.fp8_matmul(x, weight, torch.empty(outs, device=META))
    return {launch.kernel.fn.__name__ for launch in recording.launches}


@pytest.mark.parametrize(
    ("weights", "rows", "kernel"),
    [
        ("dense", 1, "_gemv_kernel"),
        ("dense", 8, "_skinny_gemm_kernel"),
        ("dense", 9, ""),
        ("int4", 1, "_int4_gemv_kernel"),
        ("int4", 16, "_int4_gemm_kernel"),
        ("int4", 256, "_int4_wide_kernel"),
        ("int4", 257, "_dequantize_int4_kernel"),
        ("fp8", 32, "_skinny_gemm_kernel"),
        ("fp8", 33, "_quantize_rows_kernel"),
    ],
)
def test_products_launch_what_the_table_says(weights: Operation, rows: int, kernel: str) -> None:
    assert launched(rows, weights) == ({kernel} if kernel else set())


def test_a_kernel_that_is_switched_off_leaves_the_others() -> None:
    switch_off([Kernel.INT4_WIDE])
    assert launched(65, "int4") == {"_dequantize_int4_kernel"}
    assert launched(16, "int4") == {"_int4_gemm_kernel"}
    switch_off([Kernel.GEMV])
    assert launched(1, "dense") == {"_skinny_gemm_kernel"}
    switch_off(kernels_of("int4"))
    assert launched(1, "int4") == launched(65, "int4") == set()
    assert launched(8, "dense") == {"_skinny_gemm_kernel"}


def attention_inputs(rows: list[int]) -> tuple[Tensor, LayerKV, AttentionMetadata]:
    """Sequences of 32 tokens of which so many are queries."""
    made = torch.empty(sum(rows), 4, 64, dtype=torch.bfloat16, device=META)
    keys = torch.empty(9, 2, 16, 64, dtype=torch.bfloat16, device=META)
    tables = torch.empty(len(rows), 3, dtype=torch.int32, device=META)
    starts = torch.empty(len(rows) + 1, dtype=torch.int32, device=META)
    return made, LayerKV(keys, keys), AttentionMetadata(tables, starts, starts[1:], max(rows), 32)


def attend(rows: list[int]) -> set[str]:
    """Names of the attention kernels that are launched."""
    with record_launches(90, 132) as recording:
        paged_attention(*attention_inputs(rows), scale=1.0, window=None, softcap=None)
    return {launch.kernel.fn.__name__ for launch in recording.launches}


def test_attention_launches_what_the_table_says() -> None:
    most = max_rows(Kernel.DECODE_ATTENTION)
    assert attend([1]) == attend([most]) == {"_decode_attention_kernel"}
    assert attend([most + 1]) == {"_prefill_attention_kernel"}
    both = {"_decode_attention_kernel", "_prefill_attention_kernel"}
    assert attend([1, most + 1]) == both
    switch_off([Kernel.DECODE_ATTENTION])
    assert attend([1]) == attend([1, most + 1]) == {"_prefill_attention_kernel"}


def test_decoding_does_without_the_prefill_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    switch_off([Kernel.PREFILL_ATTENTION])
    assert attend([1]) == {"_decode_attention_kernel"}
    by_torch = []
    monkeypatch.setattr(
        paged, "paged_attention_reference", lambda *args, **options: by_torch.append(args)
    )
    assert attend([1, 9]) == set()
    assert len(by_torch) == 1


_X = torch.empty(4, 256, dtype=torch.bfloat16, device=META)
_WEIGHT = torch.empty(256, dtype=torch.bfloat16, device=META)


@pytest.mark.parametrize(
    ("operation", "compute"),
    [
        ("norm", lambda: norm.rms_norm(_X, _WEIGHT, 1e-5, offset=False, residual=None)),
        ("norm", lambda: norm.rms_norm_fp8(_X, _WEIGHT, 1e-5, offset=False, residual=None)),
        ("activation", lambda: activation.gated_activation(_X, "silu")),
        ("fp8_rows", lambda: fp8_rows.quantize_rows_fp8(_X)),
    ],
)
def test_any_kernel_can_be_switched_off(
    operation: Operation, compute: Callable[[], object]
) -> None:
    with record_launches(90, 132) as recording:
        compute()
    assert len(recording.launches) == 1
    switch_off(kernels_of(operation))
    with record_launches(90, 132) as recording:
        compute()
    assert not recording.launches


def test_sampling_and_rope_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors with data, which their references need."""
    monkeypatch.setattr(dispatch, "can_use_triton", lambda x: True)
    monkeypatch.setattr(rope, "rope_and_store_kv_triton", lambda *args: "kernel")
    monkeypatch.setattr(rope, "rope_and_store_kv_reference", lambda *args: "torch")
    monkeypatch.setattr(sample, "sample_tokens_triton", lambda *args: "kernel")
    monkeypatch.setattr(sample, "sample_tokens_reference", lambda *args: "torch")
    monkeypatch.setattr(rejection, "rejection_sample_triton", lambda *args: "kernel")
    monkeypatch.setattr(rejection, "rejection_sample_reference", lambda *args: "torch")
    x, rest = torch.zeros(1, 8), torch.zeros(1)
    sampled = SamplerOutput(rest, x, rest)
    calls: dict[Operation, Callable[[], object]] = {
        "rope": lambda: rope.rope_and_store_kv(x, *[rest] * 5),  # type: ignore[arg-type]
        "sampling": lambda: sample.sample_tokens(x, rest),  # type: ignore[arg-type]
        "drafts": lambda: rejection.rejection_sample(sampled, rest, rest),  # type: ignore[arg-type]
    }
    for operation, compute in calls.items():
        assert compute() == "kernel"
        switch_off(kernels_of(operation))
        assert compute() == "torch"
