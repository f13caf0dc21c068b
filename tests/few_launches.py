"""A LaunchPlanner of few kernels that the child of test_cuda_compile_process can import."""

from __future__ import annotations

import os
import time
from pathlib import Path

from localgen.backends.cuda.kernels.launch import KernelLaunch
from localgen.backends.cuda.launch_plan import LaunchPlanner

FIRST = ("_rms_norm_kernel", "_gemv_kernel", "_rope_and_store_kv_kernel")
LATER = ("_advance_kernel", "_sampling_probs_kernel")
# what becomes of the child: `fails`, `dies`, `hangs`, or nothing
FATE = "LOCALGEN_TEST_FATE"


class FewLaunches(LaunchPlanner):
    """The child writes its process id, priority and visible GPUs to a file beside the cache."""

    def first_answer_launches(self) -> list[KernelLaunch]:
        return _named(super().first_answer_launches(), FIRST)[:4]

    def later_launches(self) -> list[KernelLaunch]:
        facts = (os.getpid(), os.nice(0), repr(os.environ["CUDA_VISIBLE_DEVICES"]))
        written = Path(os.environ["TRITON_CACHE_DIR"]).with_name("child.new")
        written.write_text(" ".join(map(str, facts)))
        written.rename(written.with_name("child"))
        match os.environ.get(FATE):
            case "fails":
                raise RuntimeError("no PTX assembler\nand more of it")
            case "dies":
                os._exit(7)
            case "hangs":
                time.sleep(600)
        return self.later()

    def later(self) -> list[KernelLaunch]:
        return _named([*self._draft_sampling_launches(), *self._advance_launches()], LATER)


def _named(launches: list[KernelLaunch], names: tuple[str, ...]) -> list[KernelLaunch]:
    return [one for one in launches if one.kernel.fn.__name__ in names]
