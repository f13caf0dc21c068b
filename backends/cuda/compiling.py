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

from localgen.backends.cuda.kernels.device import arch_of, units_of
from localgen.backends.cuda.kernels.launch import Launch
from localgen.backends.cuda.options import Settings
from localgen.backends.cuda.planning import Planner
from localgen.backends.cuda.spec import ModelSpec

log = logging.getLogger(__name__)

_MOST_THREADS = 16
# what their names begin with
_THREADS = "compiling"


class Compiling:
    """Compiles what the first answers need, then what comes later; see Planner."""

    def __init__(
        self, spec: ModelSpec, options: Settings, dtype: torch.dtype, device: torch.device
    ) -> None:
        """device: a GPU. Begins at once."""
        self._device = device
        arch, units = arch_of(device), units_of(device)
        self._planner = Planner(spec, options, dtype, arch=arch, units=units)
        self._mark = mark_of(spec, options, dtype, arch, units)
        self._took_s = 0.0
        self._compiled: list[str] = []
        self._failure = ""
        self._first_is_done = threading.Event()
        triton.knobs.compilation.listener = self._listen
        if self._mark.exists():
            self._first_is_done.set()
        else:
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
        begun_s = time.monotonic()
        try:
            with torch.cuda.device(self._device):
                compile_all(self._planner.first())
                self._took_s = time.monotonic() - begun_s
                self._first_is_done.set()
                compile_all(self._planner.later())
            with suppress(OSError):  # then it is looked for again the next time
                self._mark.touch()
        except Exception as error:  # a step will say it again, if it has to
            self._failure = str(error).partition("\n")[0] or type(error).__name__
            log.warning("kernels are compiled when first used: %s", error)
        finally:
            self._first_is_done.set()

    def _listen(self, *, metadata: dict[str, Any], cache_hit: bool, **_: object) -> None:
        if cache_hit:
            return
        name = str(metadata.get("name", "a kernel"))
        if threading.current_thread().name.startswith(_THREADS):
            self._compiled.append(name)
        else:
            log.warning("a step waited until %s was compiled for this GPU", name)


def mark_of(spec: ModelSpec, options: Settings, dtype: torch.dtype, arch: int, units: int) -> Path:
    """A file that is there once all these kernels are."""
    asked = (options.parallel, options.max_batch_tokens, options.ctx, options.cache_dtype)
    key = hashlib.sha256(repr((spec, asked, dtype, arch, units, triton.__version__)).encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        key.update(path.read_bytes())
    return Path(triton.knobs.cache.dir) / f"localgen-{key.hexdigest()[:32]}"


def compile_all(launches: Sequence[Launch]) -> None:
    """Compile them in threads, or read what was compiled before. Raises what Triton raises."""
    threads = min(_MOST_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, _THREADS) as pool, triton.AsyncCompileMode(pool):
        for launch in launches:
            launch.kernel.warmup(*launch.args, grid=(1,), **launch.options)
