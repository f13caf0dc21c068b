"""An eager forward pass whose kernels Triton compiles and launches, on a device that is not there.

Triton runs as with a GPU, up to the call of the launcher. Tensors are in main memory, and what
torch computes takes little because the layers are small.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace, TracebackType
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget

from benchmarks.gpu_parts.shapes import llama
from localgen.backends.cuda import kernels
from localgen.backends.cuda.kernels import launch as launch_module
from localgen.backends.cuda.kernels.launch import launch
from localgen.backends.cuda.kv.page_pool import PAGE_TOKENS, pages_for
from localgen.backends.cuda.model.batch import StepInputs, inputs_to_device
from localgen.backends.cuda.model.decoder import Decoder, KVCache
from localgen.backends.cuda.model.weights import random_weights

CPU = torch.device("cpu")
ARCH, NUM_SMS = 90, 132
_DEVICE = 99  # kernels of a GPU that is there have lower numbers
_LENGTH = 300  # tokens of each sequence
_REPEATS = 15
# another checkout may lack it
_LAUNCHER: Any = getattr(launch_module, "Launcher", None)


class NoOpDriver:
    """Triton's driver of a GPU that does nothing."""

    def __init__(self) -> None:
        self.utils = SimpleNamespace(
            # as in the driver: module, function, registers, spills, threads
            load_binary=lambda *_: (1, 1, 32, 0, 1024),
            get_device_properties=lambda _: {"max_shared_mem": 232_448},
            unload_module=lambda _: None,
        )

    def launcher_cls(self, src: object, metadata: object) -> Callable[..., None]:
        """Return a launcher."""
        return lambda *_: None

    def get_current_device(self) -> int:
        return _DEVICE

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", ARCH, 32)


class EagerForward:
    """A forward pass of single tokens through a Llama's layers, as a context manager."""

    def __init__(self, *, layers: int, sequences: int) -> None:
        spec = llama(
            layers=layers, hidden=512, intermediate=1024, heads=8, kv_heads=2, head_dim=64, vocab=64
        )
        weights = random_weights(spec, device=CPU, dtype=torch.bfloat16, seed=0)
        pages = pages_for(_LENGTH)
        self._decoder = Decoder(spec, weights, _LENGTH)
        self._cache = KVCache.zeros(spec, pages * sequences, device=CPU, dtype=torch.bfloat16)
        self._batch = inputs_to_device(_decode_inputs(sequences, pages), CPU)
        self._stack = ExitStack()
        self._launches_us: defaultdict[str, list[float]] = defaultdict(list)
        self._is_timing = False

    def __enter__(self) -> EagerForward:
        self._stack.callback(triton.runtime.driver.set_active, None)
        triton.runtime.driver.set_active(NoOpDriver())
        on_gpu: dict[str, Callable[..., object]] = {
            "can_use_triton": lambda _: True,
            "compute_capability": lambda _: ARCH,
            "count_sms": lambda _: NUM_SMS,
        }
        if _LAUNCHER is None:
            on_gpu["launch"] = self._launch
        for module_name, module in list(sys.modules.items()):
            if module_name.startswith(f"{kernels.__name__}."):
                for name in on_gpu.keys() & vars(module).keys():
                    self._stack.enter_context(mock.patch.object(module, name, on_gpu[name]))
        torch.set_num_threads(1)
        self._run()  # compiles the kernels
        self._time_launches()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _time_launches(self) -> None:
        if _LAUNCHER is None:
            self._is_timing = True
            self._run()
            self._is_timing = False
            return
        call = _LAUNCHER.__call__

        def timed(launcher: Any, *args: Any) -> None:
            begun_s = time.thread_time()
            call(launcher, *args)
            took_us = (time.thread_time() - begun_s) * 1e6
            self._launches_us[launcher.kernel.__name__].append(took_us)

        with mock.patch.object(_LAUNCHER, "__call__", timed):
            self._run()

    def _launch(self, kernel: Any, grid: tuple[int, ...]) -> Callable[..., object]:
        run = launch(kernel, grid)
        if not self._is_timing:
            return run

        def timed(*args: Any, **options: Any) -> None:
            begun_s = time.thread_time()
            run(*args, **options)
            self._launches_us[kernel.__name__].append((time.thread_time() - begun_s) * 1e6)

        return timed

    def _run(self) -> None:
        self._decoder.forward(self._batch, self._cache)

    def pass_ms(self) -> float:
        """Median processor time of a pass, in milliseconds."""
        times_ms = []
        for _ in range(_REPEATS):
            begun_s = time.thread_time()
            self._run()
            times_ms.append((time.thread_time() - begun_s) * 1e3)
        return statistics.median(times_ms)

    def launches_us(self) -> dict[str, tuple[int, float]]:
        """Number and median processor time in microseconds of the launches of a pass, by kernel."""
        return {
            name: (len(times_us), statistics.median(times_us))
            for name, times_us in self._launches_us.items()
        }


def _decode_inputs(sequences: int, pages: int) -> StepInputs:
    """One token of each sequence, after all but one of its tokens."""
    rows = np.arange(sequences)
    tables = np.arange(sequences * pages, dtype=np.int32).reshape(sequences, pages)
    last = _LENGTH - 1
    return StepInputs(
        tokens=np.zeros(sequences, np.int64),
        slot_mapping=tables[:, last // PAGE_TOKENS].astype(np.int64) * PAGE_TOKENS
        + last % PAGE_TOKENS,
        output_rows=rows,
        positions=np.full(sequences, last, np.int32),
        page_tables=tables,
        query_starts=np.arange(sequences + 1, dtype=np.int32),
        seq_lens=np.full(sequences, _LENGTH, np.int32),
        max_query_len=1,
        max_seq_len=_LENGTH,
    )
