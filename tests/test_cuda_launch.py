"""Launches that go to a compiled kernel directly are those that Triton would make."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import fast_interpreter
import pytest
import torch
import triton
import triton.language as tl
from cuda_configs import write_config
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import jit

from benchmarks.gpu_parts.host_eager import NoOpDriver
from localgen.backends.cuda.device.options import CudaOptions
from localgen.backends.cuda.kernels.launch import (
    argument_kind,
    ceil_div,
    launch,
    next_power_of_2,
)
from localgen.backends.cuda.launch_plan import LaunchPlanner
from localgen.backends.formats.architecture.sharding import ModelShard
from localgen.backends.formats.hf.config import read_hf_config


def _scale(x, out, by, count, offset: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, block)
    tl.store(out + at, tl.load(x + at, mask=at < count) * by + offset, mask=at < count)


# triton.jit would give an interpreted function in the tests
_scale_kernel = jit.JITFunction(_scale)


class RecordingDriver(NoOpDriver):
    """Its launchers list their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded = 0
        self.calls: list[tuple[Any, ...]] = []
        self.utils.load_binary = self._load

    def _load(self, *_: object) -> tuple[int, ...]:
        self.loaded += 1
        return 1, self.loaded, 32, 0, 1024

    def launcher_cls(self, src: object, metadata: object) -> Callable[..., None]:
        return lambda *args: self.calls.append(args)


@pytest.fixture
def driver() -> Iterator[RecordingDriver]:
    fast_interpreter.restore_language()
    recording = RecordingDriver()
    triton.runtime.driver.set_active(recording)
    yield recording
    _scale_kernel.device_caches.clear()
    gc.collect()  # kernels are unloaded by this driver
    triton.runtime.driver.set_active(None)


def test_later_launches_are_those_of_triton(driver: RecordingDriver) -> None:
    x = torch.ones(64)
    launches: list[tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = [
        ((1,), (x, x, 2.0, 32), {"block": 64, "offset": 1, "num_warps": 4}),
        ((3, 2), (x, torch.ones(64), 3.0, 48), {"block": 64, "offset": 1, "num_warps": 4}),
        ((1,), (x, x, 2.0, 33), {"block": 64, "offset": 1, "num_warps": 4}),
        ((1,), (x, x, 2.0, 1), {"block": 64, "offset": 1, "num_warps": 4}),
        ((1,), (x, x[1:], 2.0, 32), {"block": 64, "offset": 1, "num_warps": 4}),
        ((1,), (x, x.half(), 2.0, 32), {"block": 64, "offset": 1, "num_warps": 4}),
        ((1,), (x, x, 2.0, 32), {"block": 32, "offset": 1, "num_warps": 4}),
        ((1,), (x, x, 2.0, 32), {"block": 64, "offset": 1, "num_warps": 8}),
    ]
    kernels_of: list[list[int]] = []
    for _ in range(3):
        driver.calls.clear()
        for grid, args, options in launches:
            launch(_scale_kernel, grid)(*args, **options)
            _scale_kernel[grid](*args, **options)
        for ours, theirs in zip(driver.calls[::2], driver.calls[1::2], strict=True):
            assert len(ours) == len(theirs) == 9 + 6
            # grid, stream, kernel and its metadata; after the hooks: the arguments
            for one, other in zip((*ours[:6], *ours[9:]), (*theirs[:6], *theirs[9:]), strict=True):
                assert one is other or one == other
        kernels_of.append([call[4] for call in driver.calls[::2]])
    first, second, *others = kernels_of[0]
    assert first == second, "48 is a multiple of 16, as 32 is"
    assert len({first, *others}) == len(launches) - 1 == driver.loaded
    assert kernels_of[1:] == kernels_of[:1] * 2


def test_kinds_of_arguments_are_at_least_as_fine_as_tritons() -> None:
    numbers = [0, 1, -1, 2, 15, 16, 17, 32, -16, 2**31 - 1, 2**31 - 16, 2**31, 2**31 + 16, 2**40]
    numbers += [-(2**31), -(2**31) - 1, 2**62, 2**63 - 1, 2**63]
    dtypes = (torch.float32, torch.bfloat16, torch.int8, torch.int64, torch.float8_e4m3fn)
    whole = [torch.zeros(64, dtype=dtype) for dtype in dtypes]
    args: list[Any] = [*numbers, None, True, False, 0.0, 1.0, 2.5, *whole, *(x[1:] for x in whole)]
    backend = make_backend(GPUTarget("cuda", 90, 32))
    theirs = [jit.native_specialize_impl(backend, arg, False, True, True) for arg in args]
    kinds = [argument_kind(arg) for arg in args]
    for (kind, found), (other_kind, other_found) in combinations(
        zip(kinds, theirs, strict=True), 2
    ):
        assert kind != other_kind or found == other_found
    assert argument_kind(torch.zeros(4)) == argument_kind(torch.zeros(8))
    assert argument_kind(torch.nn.Parameter(torch.zeros(4))) == argument_kind(torch.zeros(8))
    assert argument_kind(3) == argument_kind(5)


@pytest.mark.parametrize(
    ("name", "changes"), [("llama", {}), ("qwen3 moe", {"moe_intermediate_size": 48})]
)
def test_all_launches_can_be_direct(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Their arguments are in order, and only constants are given by name."""
    spec = read_hf_config(write_config(tmp_path, name, **changes))
    options = CudaOptions(parallel=4, max_batch_tokens=128)
    planner = LaunchPlanner(ModelShard(spec), options, torch.float16, arch=90, num_sms=132)
    launches = [*planner.first_answer_launches(), *planner.later_launches()]
    assert launches
    for each in launches:
        params = inspect.signature(each.kernel.fn).parameters.values()
        is_constant = ["constexpr" in str(param.annotation) for param in params]
        assert is_constant == sorted(is_constant), each.kernel
        assert is_constant.count(False) == len(each.args), each.kernel
        assert isinstance(each.args[0], torch.dtype), "a tensor names the device"


def test_sizes_equal_tritons() -> None:
    for number in range(1, 200):
        assert next_power_of_2(number) == triton.next_power_of_2(number)
        assert ceil_div(number, 7) == triton.cdiv(number, 7)


def test_known_launches_keep_no_tensors(driver: RecordingDriver) -> None:
    x: Tensor | None = torch.ones(64)
    alive = weakref.ref(x)
    for _ in range(2):
        launch(_scale_kernel, (1,))(x, x, 2.0, 32, block=64, offset=2, num_warps=4)
    assert len(driver.calls) == 2
    driver.calls.clear()
    x = None
    gc.collect()
    assert alive() is None
