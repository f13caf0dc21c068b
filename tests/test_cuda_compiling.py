"""What is compiled ahead is what steps launch; compiling for real, for a GPU that is not there."""

from __future__ import annotations

import importlib
import os
import pkgutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_configs import write_config
from torch import Tensor

from localgen.backends.cuda import kernels
from localgen.backends.cuda.cache import PagedCache
from localgen.backends.cuda.decoder import Decoder, KVCache
from localgen.backends.cuda.graphs import DeviceSteps
from localgen.backends.cuda.kernels.launch import Launch
from localgen.backends.cuda.options import Settings
from localgen.backends.cuda.planning import Planner
from localgen.backends.cuda.quantization import Quant
from localgen.backends.cuda.runner import CudaRunner, limits
from localgen.backends.cuda.spec import ModelSpec, read_config
from localgen.backends.cuda.weights import random_weights
from localgen.backends.engine.runner import Chunk
from localgen.backends.engine.sequence import Sequence
from localgen.backends.types import BASE_SAMPLING, SamplingParams

# an interpreter's device, as kernels.device has it
ARCH, UNITS, DTYPE = 80, 4, torch.float16
ROWS = (8, 16, 64, 128)
OPTIONS = Settings(parallel=4, max_batch_tokens=128, cache_type_k="int8", cache_type_v="int8")
GREEDY = replace(BASE_SAMPLING, temperature=0.0)
PENALIZED = replace(BASE_SAMPLING, temperature=1.0, repeat_penalty=1.2, repeat_last_n=8)

Key = tuple[Any, ...]


def key(launch: Launch) -> Key:
    """What decides whether Triton compiles anew."""
    free = launch.kernel.kwargs.get("do_not_specialize") or ()
    kinds = []
    for name, arg in zip(launch.kernel.arg_names, launch.args, strict=False):
        kind = arg
        if isinstance(arg, int) and not isinstance(arg, bool):
            kind = "int" if name in free else 1 if arg == 1 else "int16" if arg % 16 == 0 else "int"
        elif isinstance(arg, float):
            kind = "float"
        kinds.append(str(kind))
    options = sorted((name, str(value)) for name, value in launch.options.items())
    return (launch.kernel.fn.__name__, *kinds, *options)


class Recorder:
    """Kernels are written down instead of run, on real tensors; what they make is anything."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.launches: list[Launch] = []
        self.unaligned: set[tuple[str, str]] = set()
        for found in pkgutil.iter_modules(kernels.__path__):
            module = importlib.import_module(f"{kernels.__name__}.{found.name}")
            if hasattr(module, "has_kernels"):
                patch.setattr(module, "has_kernels", lambda x: True)
            if found.name != "launch" and hasattr(module, "launch"):
                patch.setattr(module, "launch", self.launch)

    def launch(self, kernel: Any, grid: tuple[int, ...]) -> Any:
        def recorded(*args: Any, **options: Any) -> None:
            kinds = tuple(arg.dtype if isinstance(arg, Tensor) else arg for arg in args)
            self.launches.append(Launch(kernel, kinds, options))
            anywhere = kernel.kwargs.get("do_not_specialize_on_alignment") or ()
            for name, arg in zip(kernel.arg_names, args, strict=False):
                if isinstance(arg, Tensor) and arg.data_ptr() % 16 and name not in anywhere:
                    self.unaligned.add((kernel.fn.__name__, name))
                if name == "chosen":
                    arg.zero_()  # a token that there is

        return recorded


def spec_of(name: str, folder: Path) -> ModelSpec:
    changes: dict[str, Any] = {"num_hidden_layers": 2}
    if "moe" in name:
        changes["moe_intermediate_size"] = 48
    if "int4" in name:
        changes |= {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
    spec = read_config(write_config(folder, name.removesuffix(" int4"), **changes))
    if "int4" in name:
        quant = Quant(method="awq", bits=4, group_size=32, zero_point=True)
        spec = replace(spec, quant=quant)
    return spec


def answer(runner: CudaRunner, prompt: int, params: SamplingParams) -> None:
    """A prompt in one chunk, then two tokens one by one."""
    seq = Sequence(
        id="s", tokens=[3] * prompt, num_prompt=prompt, params=params, ctx=500, limit=500
    )
    seq.num_computed = runner.admit(seq, spare=0)
    for _ in range(3):
        assert runner.grow(seq, seq.num_owed)
        owed = seq.tokens[seq.num_computed :]
        chunk = Chunk(seq=seq, start=seq.num_computed, tokens=owed, samples=True)
        (sampled,) = runner.collect(runner.launch([chunk]))
        seq.num_computed = len(seq.tokens)
        seq.tokens += sampled.tokens
    runner.release(seq, keep=False)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", ["llama biases", "llama tied int4", "gemma2", "qwen3 moe"])
def test_first_answers_launch_what_was_planned(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(name, tmp_path)
    planned = Planner(spec, OPTIONS, DTYPE, arch=ARCH, units=UNITS).first()
    recorder = Recorder(monkeypatch)
    weights = random_weights(spec, device="cpu", dtype=DTYPE, seed=1)
    cache = KVCache.zeros(spec, 20, device="cpu", dtype=OPTIONS.cache_dtype)
    runner = CudaRunner(
        DeviceSteps(Decoder(spec, weights, 512), cache, graphs=True),
        PagedCache(20, share=False),
        limits(max_seqs=4, max_batch_tokens=128, max_len=320, kv_tokens=320, share=False),
        str,
        ahead=True,
    )
    for rows in ROWS:
        answer(runner, rows, GREEDY)
    answer(runner, 5, PENALIZED)
    answer(runner, 33, GREEDY)
    assert {key(launch) for launch in recorder.launches} == {key(launch) for launch in planned}
    # or another compilation would come with each number of rows
    assert not recorder.unaligned


def test_later_answers_have_more_of_the_same_kernels(tmp_path: Path) -> None:
    planner = Planner(spec_of("llama", tmp_path), OPTIONS, DTYPE, arch=90, units=132)
    first, later = ({key(each) for each in part} for part in (planner.first(), planner.later()))
    assert {one[0] for one in later - first} >= {"_decode", "_combine"}


COMPILE = """
import sys, contextlib, types
import torch, triton
from triton.backends.compiler import GPUTarget
from localgen.backends.cuda import compiling
from localgen.backends.cuda.options import Settings
from localgen.backends.cuda.planning import Planner
from localgen.backends.cuda.spec import read_config
from pathlib import Path

driver = types.SimpleNamespace(
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
)
triton.runtime.driver.set_active(driver)
torch.cuda.device = lambda device: contextlib.nullcontext()
compiling.arch_of, compiling.units_of = (lambda device: 90), (lambda device: 132)
first = Planner.first
few = ("_rms_norm", "_one_row", "_rope_and_store")
Planner.first = lambda self: [l for l in first(self) if l.kernel.fn.__name__ in few][:4]
Planner.later = lambda self: []
spec = read_config(Path(sys.argv[1]))
work = compiling.Compiling(spec, Settings(), torch.bfloat16, torch.device("cuda", 0))
print("NOTES", *work.wait())
"""


def test_compiling_happens_once_and_says_so(tmp_path: Path) -> None:
    write_config(tmp_path / "model", "llama")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("TRITON_INTERPRET")

    def start() -> str:
        done = subprocess.run(
            [sys.executable, "-c", COMPILE, str(tmp_path / "model")],
            cwd=Path(__file__).parents[1],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return next(line for line in done.stdout.splitlines() if line.startswith("NOTES"))

    assert start().startswith("NOTES 4 kernels were compiled for this GPU in ")
    assert start().strip() == "NOTES"
