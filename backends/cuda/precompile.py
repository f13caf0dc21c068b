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

from localgen.backends.cuda.device.options import Settings
from localgen.backends.cuda.kernels.device import arch_of, units_of
from localgen.backends.cuda.kernels.launch import Launch
from localgen.backends.cuda.launch_plan import Planner
from localgen.backends.formats.architecture.sharding import Shard

log = logging.getLogger(__name__)

_MOST_THREADS = 16
# beside steps, which need the interpreter too
_THREADS_BESIDE_STEPS = 2
# what their names begin with
_THREADS = "compiling"


class Compiling:
    """Compiles what the first answers need, then what comes later; see Planner.

    It never fails: what could not be compiled here is compiled at its first use.
    """

    def __init__(
        self, shard: Shard, options: Settings, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Begin. shard: of any rank, whose kernels are those of all. device: a GPU."""
        self._shard, self._options, self._dtype, self._device = shard, options, dtype, device
        self._took_s = 0.0
        self._compiled: list[str] = []
        self._failure = ""
        self._first_is_done = threading.Event()
        triton.knobs.compilation.listener = self._listen
        threading.Thread(target=self._run, daemon=True, name=_THREADS).start()

    def wait(self) -> tuple[str, ...]:
        """Until the first answer can be given. What to tell of it, if anything."""
        self._first_is_done.wait()
        if self._failure:
            return (f"kernels are compiled when first used: {self._failure}",)
        if not self._compiled:
            return ()
        return (
            f"{len(self._compiled)} kernels were compiled for this GPU in {self._took_s:.0f} s: "
            "the next start finds them done",
        )

    def _run(self) -> None:
        try:
            self._compile()
        except Exception as error:  # a step will say it again, if it has to
            self._failure = str(error).partition("\n")[0] or type(error).__name__
            log.warning("kernels are compiled when first used: %s", error)
        finally:
            self._first_is_done.set()

    def _compile(self) -> None:
        begun_s = time.monotonic()
        arch, units = arch_of(self._device), units_of(self._device)
        mark = mark_of(self._shard, self._options, self._dtype, arch, units)
        if mark.exists():
            return
        planner = Planner(self._shard, self._options, self._dtype, arch=arch, units=units)
        most = min(_MOST_THREADS, os.cpu_count() or 1)
        compile_all(planner.first(), self._device, threads=most)
        self._took_s = time.monotonic() - begun_s
        self._first_is_done.set()
        compile_all(planner.later(), self._device, threads=min(most, _THREADS_BESIDE_STEPS))
        with suppress(OSError):  # then it is looked for again the next time
            mark.touch()

    def _listen(self, *, metadata: dict[str, Any], cache_hit: bool, **_: object) -> None:
        if cache_hit:
            return
        name = str(metadata.get("name", "a kernel"))
        if threading.current_thread().name.startswith(_THREADS):
            self._compiled.append(name)
        else:
            log.warning("a step waited until %s was compiled for this GPU", name)


def mark_of(shard: Shard, options: Settings, dtype: torch.dtype, arch: int, units: int) -> Path:
    """A file that is there once all these kernels are."""
    asked = (options.parallel, options.max_batch_tokens, options.ctx, options.cache_dtype)
    key = hashlib.sha256(repr((shard, asked, dtype, arch, units, triton.__version__)).encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        key.update(path.read_bytes())
    return Path(triton.knobs.cache.dir) / f"localgen-{key.hexdigest()[:32]}"


def compile_all(launches: Sequence[Launch], device: torch.device, *, threads: int) -> None:
    """Compile them in threads, or read what was compiled before. Raises what Triton raises."""

    def compile_one(launch: Launch) -> None:
        launch.kernel.warmup(*launch.args, grid=(1,), **launch.options)

    # a thread's device is its own
    with ThreadPoolExecutor(threads, _THREADS, torch.cuda.set_device, (device,)) as pool:
        for _ in pool.map(compile_one, launches):
            pass
