"""Kernels are compiled for a GPU that is not present, in the engine and in its child process."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import psutil
import pytest
from cuda_configs import write_config
from few_launches import FATE
from serving import wait_until
from triton.backends.compiler import GPUTarget

from localgen.backends.cuda import compile_process

COMPILE = """
import logging, sys, threading, types
from pathlib import Path
import torch, triton
from few_launches import FewLaunches
from triton.backends.compiler import GPUTarget
from localgen.backends.cuda import precompile
from localgen.backends.cuda.device.options import CudaOptions
from localgen.backends.formats.architecture.sharding import ModelShard
from localgen.backends.formats.hf.config import read_hf_config

logging.basicConfig(format="LOG %(message)s", stream=sys.stdout)
triton.runtime.driver.set_active(types.SimpleNamespace(
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
))
torch.cuda.set_device = lambda device: None
precompile.compute_capability, precompile.count_sms = (lambda device: 90), (lambda device: 132)
precompile.LaunchPlanner = FewLaunches
shard = ModelShard(read_hf_config(Path(sys.argv[1])))
key = (shard, CudaOptions(), torch.bfloat16)
planner = FewLaunches(*key, arch=90, num_sms=132)
found = planner.first_answer_launches()
later = planner.later()
mark = precompile.compile_marker(*key, 90, 132)
FewLaunches.first_answer_launches = lambda self: found
change(found)

def work():
    print("NOTES", *precompile.KernelPrecompiler(*key, torch.device("cuda", 0)).wait())

def work_to_the_end():
    work()
    for thread in threading.enumerate():
        if thread.name == "compiling":
            thread.join()
"""
COMPARE = """
work_to_the_end()
kept = lambda: sum(len(one.kernel.device_caches[0][0]) for one in found)
before = kept()
for one in found:
    args = [torch.empty(64, dtype=a) if isinstance(a, torch.dtype) else a for a in one.args]
    one.kernel.warmup(*args, grid=(1,), **one.options)
print("MISSED", kept() - before)
hits = []
triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
for one in later:
    one.kernel.warmup(*one.args, grid=(1,), **one.options)
print("HITS", hits == [True] * len(later), mark.exists())
"""
AS_IT_IS = "change = lambda found: None\n"


def start(folder: Path, change: str = AS_IT_IS, rest: str = COMPARE, fate: str = "") -> list[str]:
    """Output of a process that compiles for a GPU that is not present. fate: see few_launches."""
    with engine(folder, change + COMPILE + rest, fate) as process:
        out, errors = process.communicate(timeout=900)  # it has the lowest priority
    assert process.returncode == 0, errors
    return str(out).splitlines()


def engine(folder: Path, script: str, fate: str = "") -> subprocess.Popen[str]:
    """Start a process that runs the script. fate: see few_launches."""
    tests = Path(__file__).parent
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(folder / "cache"),
        "PYTHONPATH": os.pathsep.join([str(tests), os.environ["PYTHONPATH"]]),
        FATE: fate,
    }
    environment.pop("TRITON_INTERPRET")
    return subprocess.Popen(
        [sys.executable, "-c", script, str(write_config(folder / "model", "llama"))],
        cwd=tests.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_compiling_happens_once_and_says_so(tmp_path: Path) -> None:
    notes, missed, hits = start(tmp_path)
    assert notes.startswith("NOTES 4 kernels were compiled for this GPU in ")
    assert missed == "MISSED 0"  # real tensors find what was compiled for those without contents
    assert hits == "HITS True True"  # on disk, where the child has compiled them
    _, *facts = (tmp_path / "child").read_text().split()
    assert facts == ["19", "''"]
    (tmp_path / "child").unlink()
    assert start(tmp_path, rest="work_to_the_end()")[0].strip() == "NOTES"
    assert not (tmp_path / "child").exists()


def test_what_cannot_be_compiled_ahead_does_not_fail_a_load(tmp_path: Path) -> None:
    reason = "no PTX assembler"
    change = f"""
from dataclasses import replace
import types
def refuse(*args, **options):
    raise RuntimeError("{reason}\\nand more of it")
def change(found):
    found[:] = [replace(found[0], kernel=types.SimpleNamespace(warmup=refuse))]
"""
    notes = start(tmp_path, change, rest="work()")
    assert notes[-1] == f"NOTES kernels are compiled when first used: {reason}"


LAUNCHERS = """
built = []
def build(src, metadata):
    assert src.fn.__name__ == metadata.name
    built.append(metadata.name)
def change(found):
    triton.runtime.driver.active.launcher_cls = build
"""
COMPARE_LAUNCHERS = """
work()
print("BUILT", sorted(built) == sorted(one.kernel.fn.__name__ for one in found))
"""


def test_launchers_are_built_with_the_kernels(tmp_path: Path) -> None:
    assert start(tmp_path, LAUNCHERS, COMPARE_LAUNCHERS)[1] == "BUILT True"


def test_a_launcher_that_cannot_be_built_does_not_fail_a_load(tmp_path: Path) -> None:
    change = LAUNCHERS.replace("built.append(metadata.name)", "raise OSError('no C compiler')")
    notes = start(tmp_path, change, rest="work()")
    assert notes[-1] == "NOTES kernels are compiled when first used: no C compiler"


@pytest.mark.parametrize(
    ("fate", "reason"),
    [
        ("fails", ["no PTX assembler", "and more of it"]),
        ("dies", ["the process that compiles them ended with status 7"]),
    ],
)
def test_later_kernels_that_cannot_be_compiled_are_logged(
    fate: str, reason: list[str], tmp_path: Path
) -> None:
    rest = "work_to_the_end()\nprint(mark.exists())"
    notes, *rest_of_lines = start(tmp_path, rest=rest, fate=fate)
    assert notes.startswith("NOTES 4 kernels")
    logged = "LOG kernels are compiled when first used: "
    assert rest_of_lines == [logged + reason[0], *reason[1:], "False"]


WAIT = """
import fcntl
with (mark.parent / "localgen-compiling").open("wb") as held:
    fcntl.flock(held, fcntl.LOCK_EX)
    work()
    mark.touch()
work_to_the_end()
"""


def test_engines_compile_later_kernels_one_after_another(tmp_path: Path) -> None:
    """The second finds what the first has compiled."""
    (tmp_path / "cache").mkdir()
    notes = start(tmp_path, rest=WAIT)
    assert notes[0].startswith("NOTES 4 kernels")
    assert not (tmp_path / "child").exists()


def test_the_compiling_process_ends_with_the_engine(tmp_path: Path) -> None:
    with engine(tmp_path, AS_IT_IS + COMPILE + "work_to_the_end()", "hangs") as process:
        try:
            written = tmp_path / "child"
            wait_until(written.exists, 120.0)
            child = psutil.Process(int(written.read_text().split()[0]))
            assert child.ppid() == process.pid
        finally:
            process.kill()
    child.wait(10)


@pytest.mark.parametrize("has_launchers", [True, False])
def test_the_compiling_process_builds_launchers_where_triton_compiles_them(
    has_launchers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton_driver = types.SimpleNamespace(CudaLauncher=object())
    if has_launchers:
        triton_driver.make_launcher = None
    monkeypatch.setattr(compile_process, "nvidia_driver", triton_driver)
    driver = compile_process.driver_for(GPUTarget("cuda", 90, 32))
    assert getattr(driver, "launcher_cls", None) is (
        triton_driver.CudaLauncher if has_launchers else None
    )
