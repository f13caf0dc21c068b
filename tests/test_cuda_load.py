"""Options, sizes and memory shortages of the CUDA runner."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hf_folders import TINY, edit
from test_cuda_runner import CHATS, PLAIN, CudaBench, texts
from torch import Tensor

from localgen.backends.cuda.device import sizing
from localgen.backends.cuda.device.options import CudaOptions, resolve_cuda_options, resolve_device
from localgen.backends.cuda.loader import load_cuda_model
from localgen.backends.cuda.model.batch import StepInputs
from localgen.backends.cuda.model.decoder import KVCache
from localgen.backends.cuda.steps.cuda_graphs import PreviousStepTokens
from localgen.backends.engine.loaded_model import LoadedModel
from localgen.backends.errors import InvalidRequest, LoadFailed, LocalgenError, OutOfMemory
from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.formats.hf.config import read_hf_config
from localgen.backends.model_info import LoadOptions, ModelLoadRequest
from localgen.backends.sampling_params import SamplingParams

CPU = torch.device("cpu")
SPEC = read_hf_config(TINY)
GB = 10**9


def loaded(folder: Path = TINY, memory: int | None = None, **options: object) -> LoadedModel:
    asked = LoadOptions(backend="cuda", device="cpu", **options)  # type: ignore[arg-type]
    return load_cuda_model(
        ModelLoadRequest("tiny", str(folder), asked, memory), lambda _share: None
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu_layers": 3}, "--gpu-layers is not an option of the cuda backend"),
        ({"mmap": True}, "--mmap is not an option"),
        ({"kv_unified": False}, "--kv-unified is not an option"),
        ({"parallel": 0}, "--parallel is 0, it must be at least 1"),
        ({"itl_target_ms": float("nan")}, "--itl-target-ms is nan"),
        ({"parallel": 9, "max_batch_tokens": 8}, "--batch-size 8 is less than --parallel 9"),
        ({"cache_type_k": "q8_0"}, "'q8_0', for this model it must be one of f32, int8, fp8"),
        ({"cache_type_k": "int8"}, "needs the same type for both"),
        ({"ctx": 4096}, "the model was trained for 2,048 tokens"),
        ({"ctx": 512, "kv_tokens": 300}, "300 tokens is too small for the context of 512"),
        ({"chat_template": "{% if %}"}, "template"),
    ],
)
def test_unsupported_options_are_rejected(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        loaded(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "mps", "cuda:128"])
def test_unknown_device_is_rejected(device: str) -> None:
    with pytest.raises(InvalidRequest, match="it must be cuda, cuda:N or cpu"):
        resolve_device(LoadOptions(device=device))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_way_out_is_named() -> None:
    with pytest.raises(InvalidRequest, match="--device cpu"):
        resolve_device(LoadOptions())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 3}, "--tp 3 needs 3 GPUs, there are 2"),
        ({"tp": 2, "device": "cuda:1"}, "--tp 2 uses the first 2 GPUs"),
        ({"device": "cuda:2"}, "only 2 GPUs were found"),
    ],
)
def test_more_gpus_than_exist_are_rejected(
    options: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InvalidRequest, match=message):
        resolve_device(LoadOptions(**options))  # type: ignore[arg-type]
    two = resolve_device(LoadOptions(tp=2))
    assert resolve_cuda_options(LoadOptions(tp=2), torch.bfloat16, two).device == "cuda"


def settings(**options: object) -> CudaOptions:
    return resolve_cuda_options(LoadOptions(**options), torch.bfloat16, torch.device("cuda", 0))  # type: ignore[arg-type]


def llama_8b() -> ModelSpec:
    changes = {
        "num_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_len": 131072,
        "sliding_windows": (None,) * 32,
        "tied_embeddings": False,
    }
    return replace(SPEC, **changes)  # type: ignore[arg-type]


def test_params_and_bytes_of_a_model_everybody_knows() -> None:
    spec = llama_8b()
    assert spec.num_params == pytest.approx(8.03e9, rel=1e-3)
    assert sizing.kv_bytes_per_token(spec, torch.bfloat16) == 131072
    # eight bits and a scale of 32 for each of 128
    assert sizing.kv_bytes_per_token(spec, torch.int8) == 131072 * (1 + 4 / 128) / 2


def test_cache_fills_the_gpu_memory() -> None:
    size = sizing.choose_cuda_kv_size(llama_8b(), settings(), free_bytes=100 * GB)
    assert size.ctx == 131072
    assert 0.899 < size.kv_tokens * 131072 / (100 * GB) <= 0.9
    assert size.notes == ()


def test_a_small_gpu_gets_the_context_that_fits_and_says_so() -> None:
    size = sizing.choose_cuda_kv_size(llama_8b(), settings(), free_bytes=4 * GB)
    assert size.ctx == size.kv_tokens == pytest.approx(0.9 * 4 * GB / 131072, abs=16)
    assert size.notes == (f"context {size.ctx:,} of 131,072: the most that fits on cuda:0",)


def test_a_context_that_does_not_fit_is_refused_with_both_numbers() -> None:
    message = r"65,536 tokens needs 8.6 GB, 4.0 GB are free on cuda:0 .* at most --ctx 30,"
    with pytest.raises(OutOfMemory, match=message):
        sizing.choose_cuda_kv_size(llama_8b(), settings(ctx=65536), free_bytes=4 * GB)


def test_a_limit_of_memory_is_kept() -> None:
    with pytest.raises(OutOfMemory, match="0 B are free on cpu"):
        loaded(memory=30_000_000)


def test_a_pool_that_the_driver_refuses_becomes_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = KVCache.zeros
    refused: list[int] = []

    def twice_too_large(spec: ModelSpec, pages: int, **more: object) -> KVCache:
        if len(refused) < 2:
            refused.append(pages)
            raise torch.OutOfMemoryError
        return zeros(spec, pages, **more)  # type: ignore[arg-type]

    # so little memory is free that it limits the pool
    monkeypatch.setattr(sizing, "device_free_bytes", lambda *_: 30 * 10**6)
    monkeypatch.setattr(KVCache, "zeros", twice_too_large)
    info = loaded().info
    assert info.kv_tokens // 16 < refused[1] < refused[0]
    assert info.ctx == info.kv_tokens


def test_a_pool_that_never_fits_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> KVCache:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(KVCache, "zeros", never)
    with pytest.raises(OutOfMemory, match="use a smaller --kv-tokens"):
        loaded()


def test_the_models_own_sampling_defaults(folder: Path) -> None:
    edit(
        folder / "generation_config.json",
        do_sample=True,
        temperature=0.3,
        top_k=7,
        repetition_penalty=1.2,
    )
    assert loaded(folder).info.sampling == SamplingParams(
        temperature=0.3, top_k=7, repeat_penalty=1.2
    )
    edit(folder / "generation_config.json", temperature="warm")
    info = loaded(folder).info
    assert info.sampling == SamplingParams()
    assert any("'warm'" in note for note in info.notes)
    edit(folder / "generation_config.json", do_sample=False)
    assert loaded(folder).info.sampling == SamplingParams(temperature=0.0)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model.safetensors"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(LoadFailed, match=name):
        loaded(folder)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": 3}', "null"])
def test_a_damaged_tokenizer_is_named(folder: Path, content: str) -> None:
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(LoadFailed, match=r"tokenizer\.json"):
        loaded(folder)


def test_info_says_what_is_in_force() -> None:
    info = loaded(parallel=5).info
    assert (info.backend, info.processor, info.max_seqs) == ("cuda", "100% CPU", 5)
    assert info.options.parallel == 5
    assert info.options.device == "cpu"
    assert info.options.mmap is None
    assert info.kv_bytes == info.kv_tokens * sizing.kv_bytes_per_token(SPEC, torch.float32)


def test_out_of_memory_in_a_step_loses_no_answer() -> None:
    bench = CudaBench()
    expected = texts(bench.ask(CHATS[:6], PLAIN))
    run, calls = bench.runner._executor.run, [0]

    def sometimes(inputs: StepInputs, token_source: PreviousStepTokens | None = None) -> Tensor:
        calls[0] += 1
        if calls[0] % 5 == 3 and len(inputs.seq_lens) > 1:
            raise torch.OutOfMemoryError
        return run(inputs, token_source)

    bench.runner._executor.run = sometimes  # type: ignore[method-assign]
    assert texts(bench.ask(CHATS[:6], PLAIN)) == expected
    assert bench.stats.num_preemptions_total > 0
    bench.close()


def test_every_error_is_one_of_ours() -> None:
    with pytest.raises(LocalgenError, match="does not exist"):
        loaded(Path("/nowhere/at/all"))
