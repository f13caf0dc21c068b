"""Precompiled kernels are those that steps launch."""

from __future__ import annotations

import importlib
import pkgutil
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_configs import write_config
from torch import Tensor

from localgen.backends.cuda import kernels, launch_plan
from localgen.backends.cuda.device.options import CudaOptions
from localgen.backends.cuda.embeddings import Pooler
from localgen.backends.cuda.kernels.decode_inputs import advance_decode_inputs
from localgen.backends.cuda.kernels.launch import KernelLaunch, Launcher, record_launches
from localgen.backends.cuda.kv.page_pool import PAGE_TOKENS
from localgen.backends.cuda.kv.paged_cache import PagedCache
from localgen.backends.cuda.launch_plan import FakeTensorParallelGroup, LaunchPlanner
from localgen.backends.cuda.model.batch import build_step_inputs, inputs_to_device
from localgen.backends.cuda.model.decoder import Decoder, KVCache
from localgen.backends.cuda.model.weights import random_weights
from localgen.backends.cuda.runner import CudaRunner, cuda_limits
from localgen.backends.cuda.steps.cuda_graphs import DeviceExecutor, graph_shape
from localgen.backends.cuda.steps.sampler import SamplingRow, sample_rows, sample_with_probs
from localgen.backends.formats.architecture.model_spec import ModelSpec, QuantizationConfig
from localgen.backends.formats.architecture.sharding import ModelShard
from localgen.backends.formats.hf.config import read_hf_config
from localgen.backends.runner.interface import Chunk
from localgen.backends.runner.sequence import Sequence
from localgen.backends.sampling_params import BASE_SAMPLING, SamplingParams

# the interpreter's device, as in kernels.device
ARCH, UNITS, DTYPE = 80, 4, torch.float16
ROWS = (8, 16, 64, 128)
META = torch.device("meta")
OPTIONS = CudaOptions(parallel=4, max_batch_tokens=128, cache_type_k="int8", cache_type_v="int8")
GREEDY = replace(BASE_SAMPLING, temperature=0.0)
PENALIZED = replace(BASE_SAMPLING, temperature=1.0, repeat_penalty=1.2, repeat_last_n=8)

Key = tuple[Any, ...]


def key(launch: KernelLaunch) -> Key:
    """The values that determine whether Triton compiles again."""
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
    """Records kernel launches instead of running them; results are arbitrary."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.launches: list[KernelLaunch] = []
        self.unaligned: set[tuple[str, str]] = set()
        for found in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
            module = importlib.import_module(found.name)
            if hasattr(module, "can_use_triton"):
                patch.setattr(module, "can_use_triton", lambda x: True)

        def record(launcher: Launcher, grid: tuple[int, ...], *args: Any) -> None:
            kernel = launcher.kernel
            kinds = tuple(arg.dtype if isinstance(arg, Tensor) else arg for arg in args)
            self.launches.append(KernelLaunch(kernel, kinds, launcher.options))
            anywhere = kernel.kwargs.get("do_not_specialize_on_alignment") or ()
            for name, arg in zip(kernel.arg_names, args, strict=False):
                if isinstance(arg, Tensor) and arg.data_ptr() % 16 and name not in anywhere:
                    self.unaligned.add((kernel.fn.__name__, name))
                if name == "sampled_tokens":
                    arg.zero_()  # a token that there is

        patch.setattr(Launcher, "__call__", record)


def spec_of(name: str, folder: Path) -> ModelSpec:
    changes: dict[str, Any] = {"num_hidden_layers": 2}
    if "moe" in name:
        changes["moe_intermediate_size"] = 48
    if "int4" in name:
        changes |= {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
    spec = read_hf_config(write_config(folder, name.removesuffix(" int4"), **changes))
    if "int4" in name:
        quant = QuantizationConfig(method="awq", bits=4, group_size=32, zero_point=True)
        spec = replace(spec, quant=quant)
    return spec


def answer(runner: CudaRunner, prompt: int, params: SamplingParams) -> None:
    """A prompt in one chunk, then two tokens one by one."""
    seq = Sequence(
        id="s", tokens=[3] * prompt, num_prompt=prompt, params=params, ctx=500, max_len=500
    )
    seq.num_computed = runner.admit(seq, spare=0)
    for _ in range(3):
        assert runner.grow(seq, seq.num_uncomputed)
        owed = seq.tokens[seq.num_computed :]
        chunk = Chunk(seq=seq, start=seq.num_computed, tokens=owed, is_sampled=True)
        (sampled,) = runner.collect(runner.launch([chunk]))
        seq.num_computed = len(seq.tokens)
        seq.tokens += sampled.tokens
    runner.release(seq, keep=False)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("name", "tp"),
    [
        ("llama biases", 1),
        ("llama tied int4", 1),
        ("gemma2", 1),
        ("qwen3 moe", 1),
        ("llama", 2),
        ("gemma2", 2),
    ],
)
def test_first_answers_launch_the_planned_kernels(
    name: str, tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = ModelShard(spec_of(name, tmp_path), 0, tp)
    planned = LaunchPlanner(shard, OPTIONS, DTYPE, arch=ARCH, num_sms=UNITS).first_answer_launches()
    recorder = Recorder(monkeypatch)
    weights = random_weights(shard.local_spec, device="cpu", dtype=DTYPE, seed=1)
    cache = KVCache.zeros(shard.local_spec, 20, device="cpu", dtype=OPTIONS.cache_dtype)
    decoder = Decoder(shard.local_spec, weights, 512, FakeTensorParallelGroup(shard))
    runner = CudaRunner(
        DeviceExecutor(decoder, cache, use_cuda_graphs=True),
        PagedCache(20, prefix_cache=False),
        cuda_limits(
            max_seqs=4, max_batch_tokens=128, max_len=320, kv_tokens=320, prefix_cache=False
        ),
        str,
        run_ahead=True,
        pooler=Pooler(),
    )
    for rows in ROWS:
        answer(runner, rows, GREEDY)
    answer(runner, 5, PENALIZED)
    answer(runner, 33, GREEDY)
    launched, expected = ({key(each) for each in of} for of in (recorder.launches, planned))
    assert launched == expected
    # otherwise each number of rows would compile again
    assert not recorder.unaligned


def test_later_answers_have_more_of_the_same_kernels(tmp_path: Path) -> None:
    planner = LaunchPlanner(
        ModelShard(spec_of("llama", tmp_path)), OPTIONS, DTYPE, arch=90, num_sms=132
    )
    first, later = (
        {key(each) for each in part}
        for part in (planner.first_answer_launches(), planner.later_launches())
    )
    assert {one[0] for one in later - first} >= {
        "_decode_attention_kernel",
        "_combine_splits_kernel",
    }
    with record_launches(90, 132) as launched:
        for rows, size in ((1, 1), (3, 4), (16, 16), (200, 208)):
            inputs = inputs_to_device(launch_plan.decode_inputs(size, 3000), META).decode_inputs
            tokens = torch.empty(rows, dtype=torch.int64, device=META)
            for pages in (None, torch.empty(rows, dtype=torch.int32, device=META)):
                advance_decode_inputs(inputs, tokens, pages, PAGE_TOKENS)
    assert {key(each) for each in launched.launches} == {
        one for one in later if one[0] == "_advance_kernel"
    }


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_sampled_drafts_launch_planned_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts of two sequences, sampled with their probabilities, and their verification."""
    shard = ModelShard(spec_of("llama", tmp_path))
    planner = LaunchPlanner(shard, OPTIONS, DTYPE, arch=ARCH, num_sms=UNITS)
    planned = {key(each) for each in (*planner.first_answer_launches(), *planner.later_launches())}
    recorder = Recorder(monkeypatch)
    logits = torch.zeros(6, shard.spec.vocab_size)
    row = SamplingRow(replace(BASE_SAMPLING, temperature=0.7), [1, 2])
    _, probs = sample_with_probs(logits[:2], [row] * 2, [0, 1])
    drafted = [replace(row, draft_probs=probs[at]) for at in (0, 1, 1)]
    sample_rows(logits, [*drafted[:2], row, *drafted[2:], row, row])
    launched = {key(each) for each in recorder.launches}
    assert {name for name, *_ in launched} >= {
        "_sum_exps_kernel",
        "_sampling_probs_kernel",
        "_rejection_sample_kernel",
        "_combine_chunks_kernel",
    }
    assert launched <= planned
    assert not recorder.unaligned


@pytest.mark.parametrize("tp", [1, 2])
def test_steps_that_have_no_graph_launch_planned_kernels(tp: int, tmp_path: Path) -> None:
    """Drafts of many sequences, and prompts beside decoding sequences."""
    shard, rng = ModelShard(spec_of("llama", tmp_path), 0, tp), random.Random(tp)
    options = replace(OPTIONS, parallel=256, max_batch_tokens=512)
    planner = LaunchPlanner(shard, options, DTYPE, arch=90, num_sms=132)
    planned = {key(x) for x in (*planner.first_answer_launches(), *planner.later_launches())}

    def chunk(rows: int) -> Chunk:
        return launch_plan._chunk(rng.randint(1, 500 - rows), rows)

    drafts = [[chunk(rng.randint(1, 8)) for _ in range(n)] for n in (17, 30, 40, 64, 150, 256)]
    prompts = [
        [*(chunk(1) for _ in range(n)), chunk(rng.randint(9, 90))]
        for n in (1, 2, 3, 7, 20, 60, 200)
    ]
    steps = [build_step_inputs(chunks, launch_plan._page_table) for chunks in drafts + prompts]
    assert all(graph_shape(step) is None for step in steps)
    launched = planner._record_launches(steps, [SamplingRow(BASE_SAMPLING, [0])])
    assert {key(each) for each in launched} <= planned
