"""Compile Triton kernels: those of the first answer while the weights are loaded, then the others.

Triton caches compiled kernels on disk, and a marker file next to them says that those of a model
are complete. So this happens on the first load of a model on a machine, and is reported in a note.
The first ones are compiled in threads. The others are compiled in a child process, because Triton
holds the interpreter for up to 0.3 s at a time, and steps need it by then; see compile_process.
Kernels that are compiled during a step are logged.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from localgen.backends.cuda.device.options import CudaOptions
from localgen.backends.cuda.kernels.device import compute_capability, count_sms
from localgen.backends.cuda.kernels.launch import KernelLaunch
from localgen.backends.cuda.launch_plan import LaunchPlanner
from localgen.backends.cuda.parallel.worker_group import worker_environment
from localgen.backends.formats.architecture.sharding import ModelShard
from localgen.backends.kv_store.fingerprint import contents_fingerprint
from localgen.backends.messages import start_process

log = logging.getLogger(__name__)

_MAX_THREADS = 16
_COMPILE_MODULE = "localgen.backends.cuda.compile_process"
_LOCK_NAME = "localgen-compiling"
_THREAD_NAME_PREFIX = "compiling"


class KernelPrecompiler:
    """Compiles the kernels of the first answer, then all others; see LaunchPlanner.

    Never raises: a kernel that cannot be compiled here is compiled on first use.
    """

    def __init__(
        self, shard: ModelShard, options: CudaOptions, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Start compiling. shard: any rank's, all ranks use the same kernels. device: a GPU."""
        self._shard, self._options, self._dtype, self._device = shard, options, dtype, device
        self._elapsed_s = 0.0
        self._compiled: list[str] = []
        self._failure = ""
        self._first_kernels_ready = threading.Event()
        triton.knobs.compilation.listener = self._on_compile
        threading.Thread(target=self._run, daemon=True, name=_THREAD_NAME_PREFIX).start()

    def wait(self) -> tuple[str, ...]:
        """Wait until the kernels of the first answer are compiled. Returns notes for the user."""
        self._first_kernels_ready.wait()
        if self._failure:
            return (f"kernels are compiled when first used: {self._failure}",)
        if not self._compiled:
            return ()
        return (
            f"{len(self._compiled)} kernels were compiled for this GPU in {self._elapsed_s:.0f} s: "
            "they are cached for the next start",
        )

    def _run(self) -> None:
        try:
            self._compile()
        except Exception as error:  # a step raises it again if the kernel is needed
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
        threads = min(_MAX_THREADS, os.cpu_count() or 1)
        compile_launches(planner.first_answer_launches(), threads, self._device)
        self._elapsed_s = time.monotonic() - begun_s
        self._first_kernels_ready.set()
        try:
            lock = mark.with_name(_LOCK_NAME).open("wb")
        except OSError:  # nothing can be added to the cache: what it lacks is compiled when needed
            return
        # one process at a time: other engines on this machine may need the same kernels
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not mark.exists():
                _compile_later_launches(planner)
                mark.touch()

    def _on_compile(self, *, metadata: dict[str, Any], cache_hit: bool, **_: object) -> None:
        if cache_hit:
            return
        name = str(metadata.get("name", "a kernel"))
        if threading.current_thread().name.startswith(_THREAD_NAME_PREFIX):
            self._compiled.append(name)
        else:
            log.warning("a step waited for %s to be compiled for this GPU", name)


def compile_marker(
    shard: ModelShard, options: CudaOptions, dtype: torch.dtype, arch: int, num_sms: int
) -> Path:
    """Path of a marker file that exists once all kernels of this configuration are compiled."""
    sizes = (options.parallel, options.max_batch_tokens, options.ctx, options.cache_dtype)
    sources = contents_fingerprint(Path(__file__).parent, pattern="*.py")
    key = repr((shard, sizes, dtype, arch, num_sms, triton.__version__, sources)).encode()
    return Path(triton.knobs.cache.dir) / f"localgen-{hashlib.sha256(key).hexdigest()[:32]}"


def _compile_later_launches(planner: LaunchPlanner) -> None:
    """Compile them in a process that ends with this one. Raises RuntimeError."""
    process, messages = start_process(
        [sys.executable, "-P", "-m", _COMPILE_MODULE],
        stdin=subprocess.DEVNULL,
        env=worker_environment() | {"CUDA_VISIBLE_DEVICES": ""},
    )
    try:
        messages.send(pickle.dumps((planner, triton.runtime.driver.active.get_current_target())))
        failure = messages.receive().decode()
    except (EOFError, OSError):
        failure = f"the process that compiles them ended with status {process.wait()}"
    finally:
        messages.close()
    process.wait()
    if failure:
        raise RuntimeError(failure)


def compile_launches(
    launches: Sequence[KernelLaunch], threads: int, device: torch.device | None = None
) -> None:
    """Compile launches in threads, or load them from Triton's cache. Raises Triton's errors.

    device: a GPU; None if Triton's driver has been told what to compile for.
    """

    def compile_one(launch: KernelLaunch) -> None:
        compiled = launch.kernel.warmup(*launch.args, grid=(1,), **launch.options)
        # Up to Triton 3.6 this runs the C compiler, once for each signature; the first launch finds
        # the result in the cache. Not `compiled.run`: a step may launch the kernel meanwhile.
        build_launcher = getattr(triton.runtime.driver.active, "launcher_cls", None)
        if compiled is not None and build_launcher is not None:
            build_launcher(compiled.src, compiled.metadata)

    # the current device is per thread
    begin = partial(torch.cuda.set_device, device) if device is not None else None
    with ThreadPoolExecutor(threads, _THREAD_NAME_PREFIX, begin) as pool:
        for _ in pool.map(compile_one, launches):
            pass
