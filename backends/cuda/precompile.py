"""Kernels compiled in threads while the weights are read: Triton would do it at their first use.

Triton keeps what it has compiled on disk, and a mark beside it says that a model's kernels are
there: so this happens at the first start of such a model on a machine, and a note says so. What is
compiled after that, in a step, stands in the log.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import triton

from localgen.backends.cuda.device.options import CudaOptions
from localgen.backends.cuda.kernels.device import compute_capability, count_sms
from localgen.backends.cuda.kernels.launch import KernelLaunch
from localgen.backends.cuda.launch_plan import LaunchPlanner
from localgen.backends.formats.architecture.sharding import ModelShard

log = logging.getLogger(__name__)

_MAX_THREADS = 16
# beside steps, which need the interpreter too
_BACKGROUND_THREADS = 2
# what their names begin with
_THREAD_NAME_PREFIX = "compiling"


class KernelPrecompiler:
    """Compiles what the first answers need, then what comes later; see LaunchPlanner.

    It never fails: what could not be compiled here is compiled at its first use.
    """

    def __init__(
        self, shard: ModelShard, options: CudaOptions, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Begin. shard: of any rank, whose kernels are those of all. device: a GPU."""
        self._shard, self._options, self._dtype, self._device = shard, options, dtype, device
        self._elapsed_s = 0.0
        self._compiled: list[str] = []
        self._failure = ""
        self._first_kernels_ready = threading.Event()
        triton.knobs.compilation.listener = self._on_compile
        threading.Thread(target=self._run, daemon=True, name=_THREAD_NAME_PREFIX).start()

    def wait(self) -> tuple[str, ...]:
        """Until the first answer can be given. What to tell of it, if anything."""
        self._first_kernels_ready.wait()
        if self._failure:
            return (f"kernels are compiled when first used: {self._failure}",)
        if not self._compiled:
            return ()
        return (
            f"{len(self._compiled)} kernels were compiled for this GPU in {self._elapsed_s:.0f} s: "
            "the next start finds them done",
        )

    def _run(self) -> None:
        try:
            self._compile()
        except Exception as error:  # a step will say it again, if it has to
            self._failure = str(error).partition("\n")[0] or type(error).__name__
            log.warning("kernels are compiled when first used: %s", error)
        finally:
            self._first_kernels_ready.set()

    def _compile(self) -> None:
        begun_s = time.monotonic()
        arch, units = compute_capability(self._device), count_sms(self._device)
        mark = compile_marker(self._shard, self._options, self._dtype, arch, units)
        if mark.exists():
            return
        planner = LaunchPlanner(self._shard, self._options, self._dtype, arch=arch, num_sms=units)
        most = min(_MAX_THREADS, os.cpu_count() or 1)
        compile_launches(planner.first_answer_launches(), self._device, threads=most)
        self._elapsed_s = time.monotonic() - begun_s
        self._first_kernels_ready.set()
        compile_launches(
            planner.later_launches(), self._device, threads=min(most, _BACKGROUND_THREADS)
        )
        with suppress(OSError):  # then it is looked for again the next time
            mark.touch()

    def _on_compile(self, *, metadata: dict[str, Any], cache_hit: bool, **_: object) -> None:
        if cache_hit:
            return
        name = str(metadata.get("name", "a kernel"))
        if threading.current_thread().name.startswith(_THREAD_NAME_PREFIX):
            self._compiled.append(name)
        else:
            log.warning("a step waited until %s was compiled for this GPU", name)


def compile_marker(
    shard: ModelShard, options: CudaOptions, dtype: torch.dtype, arch: int, num_sms: int
) -> Path:
    """A file that is there once all these kernels are."""
    asked = (options.parallel, options.max_batch_tokens, options.ctx, options.cache_dtype)
    key = hashlib.sha256(repr((shard, asked, dtype, arch, num_sms, triton.__version__)).encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        key.update(path.read_bytes())
    return Path(triton.knobs.cache.dir) / f"localgen-{key.hexdigest()[:32]}"


def compile_launches(
    launches: Sequence[KernelLaunch], device: torch.device, *, threads: int
) -> None:
    """Compile them in threads, or read what was compiled before. Raises what Triton raises."""

    def compile_one(launch: KernelLaunch) -> None:
        launch.kernel.warmup(*launch.args, grid=(1,), **launch.options)

    # a thread's device is its own
    with ThreadPoolExecutor(threads, _THREAD_NAME_PREFIX, torch.cuda.set_device, (device,)) as pool:
        for _ in pool.map(compile_one, launches):
            pass
