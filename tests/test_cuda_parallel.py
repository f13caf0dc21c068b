"""Two ranks give transformers' logits, whatever the layout of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import numpy as np
import test_cuda_quantized
import torch
from cuda_configs import write_config
from cuda_gguf_files import tiny_folder, write_gguf
from cuda_models import random_text
from hf_folders import TINY
from test_cuda_prefix_cache import (  # noqa: F401  the same tests, with the fixture `bench` below
    MAX_LEN,
    MODELS,
    PAGES,
    DecoderBench,
    test_preempted_sequence_is_recomputed,
    test_prefix_of_an_ended_sequence_is_reused,
)
from test_cuda_quantized import Quantize, awq, fp8, gptq, packed, packed_config, quantized
from torch import Tensor
from tp_peer import SETTINGS, PairedSteps, Peer, peer

from localgen.backends.cuda.model.batch import build_step_inputs
from localgen.backends.cuda.model.source import open_model_source
from localgen.backends.cuda.parallel.rank_model import RankModel
from localgen.backends.cuda.runner import StepExecutor
from localgen.backends.cuda.steps.cuda_graphs import PreviousStepTokens
from localgen.backends.errors import InvalidRequest, OutOfMemory
from localgen.backends.formats.architecture.model_spec import ModelSpec, QuantizationConfig
from localgen.backends.formats.architecture.sharding import ModelShard, ensure_divisible
from localgen.backends.formats.hf.config import read_hf_config
from localgen.backends.runner.interface import Chunk
from localgen.backends.runner.sequence import Sequence
from localgen.backends.sampling_params import BASE_SAMPLING

CTX = 64
# a norm over all heads is not divided
DIVISIBLE = [name for name in MODELS if not name.startswith("olmo")]


@pytest.fixture(scope="module")
def other() -> Iterator[Peer]:
    with peer() as found:
        yield found


@pytest.fixture(scope="module", params=DIVISIBLE)
def bench(
    request: pytest.FixtureRequest, other: Peer, tmp_path_factory: pytest.TempPathFactory
) -> DecoderBench:
    class ParallelDecoderBench(DecoderBench):
        def make_steps(self, folder: Path) -> StepExecutor:
            return other.steps(folder, pages=PAGES, max_len=MAX_LEN)

    return ParallelDecoderBench(request.param, tmp_path_factory.mktemp(request.param))


def test_a_prompt_in_chunks_and_then_single_tokens(bench: DecoderBench) -> None:
    text = random_text(seed=30, length=60)
    seq = bench.admit(text[:1])
    for end in (40, 57, 58, 59, 60):
        seq.tokens = text[:end]
        bench.compute(seq)
    bench.room.release(seq, keep=False)


def step_logits(
    steps: StepExecutor, tokens: list[int], latest: PreviousStepTokens | None = None
) -> Tensor:
    """Logits after every token."""
    seq = Sequence(id="0", tokens=[], num_prompt=0, params=BASE_SAMPLING, ctx=CTX, max_len=CTX)
    chunk = Chunk(seq=seq, start=0, tokens=tokens, num_drafts=len(tokens) - 1, is_sampled=True)
    pages = np.arange(CTX // 16, dtype=np.int32)
    inputs = build_step_inputs([chunk], lambda _: pages)
    if latest is not None:  # the last token first
        inputs = replace(inputs, source_rows=np.arange(len(tokens) - 1, -1, -1, dtype=np.int32))
    return steps.run(inputs, latest).clone()


def test_hidden_states_are_those_of_one_rank(other: Peer, tmp_path: Path) -> None:
    folder = tiny_folder("llama", tmp_path)
    seq = Sequence(id="0", tokens=[], num_prompt=0, params=BASE_SAMPLING, ctx=CTX, max_len=CTX)
    tokens = [token % 96 for token in random_text(seed=2, length=CTX)]
    chunk = Chunk(seq=seq, start=0, tokens=tokens, num_drafts=CTX - 1, is_sampled=True)
    inputs = build_step_inputs([chunk], lambda _: np.arange(CTX // 16, dtype=np.int32))
    expected = alone(folder).hidden_states(inputs)
    found = other.steps(folder, pages=CTX // 16, max_len=CTX).hidden_states(inputs)
    assert (found - expected).abs().max() / expected.abs().max() < 1e-4


def alone(folder: Path) -> StepExecutor:
    source = open_model_source(folder)
    rank_model = RankModel(source, replace(SETTINGS, tp=1), torch.float32, ModelShard(source.spec))
    assert rank_model.allocate_cache(CTX // 16, CTX)
    return rank_model.executor


def assert_same(other: Peer, folder: Path) -> None:
    tokens = random_text(seed=1, length=CTX)
    tokens = [token % 96 for token in tokens]
    ours = step_logits(other.steps(folder, pages=CTX // 16, max_len=CTX), tokens)
    expected = step_logits(alone(folder), tokens)
    assert ours.shape == expected.shape
    error = (ours - expected).abs().max() / expected.abs().max()
    assert error < 1e-4, error


@pytest.mark.parametrize(
    ("quantize", "quantization"),
    [
        (awq, {"quant_method": "awq", "bits": 4, "group_size": 8}),
        (
            lambda ins, outs: gptq(ins, outs, group=8),
            {"quant_method": "gptq", "bits": 4, "group_size": 8},
        ),
        (
            lambda ins, outs: gptq(ins, outs, group=ins),
            {"quant_method": "gptq", "bits": 4, "group_size": -1},
        ),
        (packed, packed_config(symmetric=False, group_size=8)),
        (fp8, {"quant_method": "fbgemm_fp8"}),
        (lambda ins, outs: fp8(ins, outs, per_row=False), {"quant_method": "fbgemm_fp8"}),
    ],
    ids=["awq", "gptq", "gptq-one-group", "pack-quantized", "fp8", "fp8-one-scale"],
)
def test_quantized_weights_have_the_logits_of_one_rank(
    other: Peer,
    quantize: Quantize,
    quantization: dict[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(test_cuda_quantized, "GROUP", 8)
    quantized(tmp_path, quantize, **quantization)
    assert_same(other, tmp_path)


@pytest.mark.parametrize("name", ["llama biases", "llama tied", "qwen2", "phi3", "qwen3 moe"])
def test_gguf_files_have_the_logits_of_one_rank(other: Peer, name: str, tmp_path: Path) -> None:
    folder = tiny_folder(name, tmp_path / "hf")
    assert_same(other, write_gguf(folder, tmp_path / "model.gguf"))


def test_quantized_gguf_files_have_the_logits_of_one_rank(other: Peer) -> None:
    assert_same(other, TINY.with_suffix(".gguf"))


def test_tokens_that_only_the_device_of_rank_0_knows(other: Peer) -> None:
    steps = other.steps(TINY, pages=CTX // 16, max_len=CTX)
    assert isinstance(steps, PairedSteps)
    tokens = random_text(seed=4, length=20)
    latest = PreviousStepTokens(torch.tensor(tokens[::-1]))
    assert torch.equal(step_logits(steps, [0] * 20, latest), step_logits(steps, tokens))


def test_no_rank_holds_more_than_its_share() -> None:
    source = open_model_source(TINY)
    sizes = [
        RankModel(
            source, replace(SETTINGS, tp=tp), torch.float32, ModelShard(source.spec, rank, tp)
        )
        for tp, rank in ((1, 0), (2, 0), (2, 1))
    ]
    whole, *halves = (share.weight_bytes for share in sizes)
    norms = 4 * source.spec.hidden_size * (2 * source.spec.num_layers + 1)
    assert sum(halves) == whole + norms


SPEC = read_hf_config(TINY)  # 4 heads, 2 of keys and values, 768 wide


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        ({"num_heads": 8}, 3, "--tp 3: 8 heads cannot be divided by 3: use 1, 2, 4 or 8"),
        ({}, 8, "--tp 8: 4 heads cannot be divided by 8: use 1, 2 or 4"),
        ({"num_heads": 12, "num_kv_heads": 6}, 4, "6 key-value heads cannot be divided by 4"),
        ({"intermediate_size": 770}, 4, "an MLP of width 770 cannot be divided by 4: use 1 or 2"),
        (
            {"quant": QuantizationConfig(method="awq", bits=4, group_size=128)},
            4,
            "attention of width 256 in groups of 128 cannot be divided by 4: use 1 or 2",
        ),
        (
            {"quant": QuantizationConfig(method="gptq", bits=4, group_size=64, desc_act=True)},
            2,
            r"the order of activation \(desc_act\) cannot be divided by 2: use 1$",
        ),
        ({"vocab_size": 20}, 4, "a vocabulary of 20 cannot be divided by 4"),
        ({"wide_qk_norm": True}, 2, "a norm over all heads cannot be divided by 2: use 1$"),
    ],
)
def test_indivisible_models_are_rejected(changes: dict[str, object], tp: int, message: str) -> None:
    spec: ModelSpec = replace(SPEC, **changes)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=message) as failure:
        ensure_divisible(spec, tp)
    assert failure.value.param == "tp"
    ensure_divisible(spec, 1)


def test_experts_are_divided_by_their_width(tmp_path: Path) -> None:
    spec = read_hf_config(write_config(tmp_path, "qwen3 moe", moe_intermediate_size=42))
    with pytest.raises(InvalidRequest, match="experts of width 42 cannot be divided by 4"):
        ensure_divisible(spec, 4)


def test_memory_that_runs_out_in_a_step_names_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_model_source(TINY)
    rank_model = RankModel(source, SETTINGS, torch.float32, ModelShard(source.spec, 1, 2))
    assert rank_model.allocate_cache(1, 16)

    def full(*_: object) -> Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(rank_model.executor, "run", full)
    with pytest.raises(OutOfMemory, match="out of memory on cpu in a step of rank 1: load with"):
        step_logits(rank_model, [1])  # type: ignore[arg-type]
