"""Estimated memory of models equals what llama.cpp and the CUDA engine allocate."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf_files as files
import llama_cpp.llama_cpp as C
import pytest
import torch
from cuda_configs import CONFIGS, write_config
from cuda_gguf_files import tiny_folder, write_gguf
from gguf import GGUFReader
from models import TINY_GGUF

from localgen.backends.cuda.device import sizing
from localgen.backends.cuda.device.options import CACHE_DTYPES
from localgen.backends.cuda.model.decoder import KVCache
from localgen.backends.errors import LoadFailed
from localgen.backends.formats.architecture.model_shape import (
    LayerCacheShape,
    ModelShape,
    kv_cache_bytes_per_token,
    kv_cache_read_bytes,
    shape_from_spec,
)
from localgen.backends.formats.gguf.reader import parse_gguf_header, read_gguf_header
from localgen.backends.formats.gguf.shape import shape_from_gguf
from localgen.backends.formats.hf.config import read_hf_config, shape_from_hf_config
from localgen.backends.formats.model_files import model_file, model_folder
from localgen.backends.formats.weight_sizes import read_weight_sizes
from localgen.backends.llamacpp.library import CACHE_TYPES as LLAMACPP_CACHE_TYPES
from localgen.backends.llamacpp.library import BufferSizes, llama_library
from localgen.backends.memory.compute_buffers import (
    llamacpp_fixed_bytes,
    llamacpp_work_bytes_per_token,
)
from localgen.backends.model_info import MemoryUsage

CELLS = 8192
STEP = 64
SEQUENCES = 3
# llama.cpp reports its sizes to a hundredth of a MiB
EXACT = (1 << 20) / 100
FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "mixtral", "qwen3 moe")
ODD = (files.short_convolutions, files.latent_attention)


def named(model: object) -> str:
    """A name that is the same in every process that runs tests."""
    return model if isinstance(model, str) else getattr(model, "__name__", "")


def shape_of(path: Path) -> ModelShape:
    shape = shape_from_gguf(read_gguf_header(path))
    assert shape is not None
    return shape


def allocated(path: Path, kind: str) -> MemoryUsage:
    """What llama.cpp allocates for a model and CELLS tokens of cache, loaded as localgen does."""
    log = llama_library()
    log.buffers = BufferSizes()
    model_params = C.llama_model_default_params()
    model_params.use_extra_bufts = False
    model = C.llama_model_load_from_file(str(path).encode(), model_params)
    assert model, log.reason()
    params = C.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = CELLS, STEP, STEP
    params.n_seq_max = params.n_outputs_max = SEQUENCES
    params.kv_unified = params.swa_full = True
    params.type_k = params.type_v = LLAMACPP_CACHE_TYPES[kind]
    params.flash_attn_type = 1
    context = C.llama_init_from_model(model, params)
    assert context, log.reason()
    C.llama_free(context)
    C.llama_model_free(model)
    return log.buffers.usage()


@pytest.fixture(scope="module", params=[*FAMILIES, *ODD], ids=named)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    if request.param in ODD:
        make: Callable[[Path], Path] = request.param
        return make(folder / "model.gguf")
    return write_gguf(tiny_folder(request.param, folder / "hf"), folder / "model.gguf")


@pytest.mark.parametrize("other", [False, True])
def test_the_cache_is_as_large_as_llama_cpp_makes_it(model: Path, other: bool) -> None:
    shape = shape_of(model)
    blocks = all(cache.key_dim % 32 == 0 for cache in shape.layer_caches)
    kind = ("q8_0" if blocks else "f32") if other else "f16"
    estimate = (
        CELLS * kv_cache_bytes_per_token(shape.layer_caches, kind, kind)
        + SEQUENCES * shape.state_bytes
    )
    measured = allocated(model, kind).kv
    assert measured
    assert estimate == pytest.approx(measured, abs=2 * EXACT)


def test_buffers_are_about_as_large_as_llama_cpp_makes_them(model: Path) -> None:
    shape = shape_of(model)
    fixed = llamacpp_fixed_bytes(shape, max_batch_tokens=STEP, num_seqs=SEQUENCES)
    growing = CELLS * llamacpp_work_bytes_per_token(shape, max_batch_tokens=STEP)
    measured = allocated(model, "f16").work
    assert measured
    # an overestimate, by no more than the reserve for small buffers
    assert 0.9 * measured < fixed - SEQUENCES * shape.state_bytes + growing
    assert fixed + growing < 1.5 * measured + (4 << 20)


def test_weights_are_the_tensors_of_the_file(model: Path) -> None:
    tensors = GGUFReader(model).tensors
    weights = read_weight_sizes(model_file(model), shape_of(model))
    assert weights.size_bytes == sum(int(tensor.n_bytes) for tensor in tensors)
    assert weights.params == sum(int(tensor.n_elements) for tensor in tensors)
    assert weights.read_bytes <= weights.size_bytes


def test_of_experts_the_active_ones_are_read(tmp_path: Path) -> None:
    folder = tiny_folder("mixtral", tmp_path / "hf")
    file = write_gguf(folder, tmp_path / "model.gguf")
    shape = shape_of(file)
    assert (shape.num_experts, shape.num_active_experts) == (4, 2)
    expert_bytes = embedding_bytes = 0
    for tensor in GGUFReader(file).tensors:
        expert_bytes += int(tensor.n_bytes) * ("_exps" in tensor.name)
        embedding_bytes += int(tensor.n_bytes) * (tensor.name == "token_embd.weight")
    weights = read_weight_sizes(model_file(file), shape)
    # and one row of an embedding that is not tied to the head
    assert weights.read_bytes == weights.size_bytes - expert_bytes // 2 - embedding_bytes
    in_folder = read_weight_sizes(model_folder(folder), shape_from_hf_config(config_of(folder)))
    assert in_folder.size_bytes == weights.size_bytes
    assert in_folder.read_bytes == weights.read_bytes


def config_of(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "config.json").read_text())
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_tells_the_shape_that_our_engine_takes(name: str, tmp_path: Path) -> None:
    folder = write_config(tmp_path, name)
    assert shape_from_hf_config(config_of(folder)) == shape_from_spec(read_hf_config(folder))


@pytest.mark.parametrize(
    "odd",
    [
        {"rope_scaling": 3},
        {"rope_parameters": ["yarn"]},
        {"rope_scaling": {"type": "yarn", "factor": "4"}},
        {"rope_scaling": {"type": "yarn", "factor": float("inf")}},
        {"text_config": True},
        {"layer_types": [[], {}, None]},
    ],
)
def test_odd_values_of_a_config_do_not_matter(odd: dict[str, object], tmp_path: Path) -> None:
    config = config_of(write_config(tmp_path, "llama"))
    assert shape_from_hf_config(config | odd) == shape_from_hf_config(config)


@pytest.mark.parametrize("kind", ["f32", "bf16", "int8", "fp8"])
def test_the_cache_is_as_large_as_our_engine_makes_it(kind: str, tmp_path: Path) -> None:
    spec = read_hf_config(write_config(tmp_path, "gemma2"))
    cache = KVCache.zeros(spec, 3, device="cpu", dtype=CACHE_DTYPES[kind])
    made = sum(tensor.nbytes for layer in cache.layers for tensor in layer.tensors)
    assert made == 3 * 16 * sizing.kv_bytes_per_token(spec, CACHE_DTYPES[kind])
    assert CACHE_DTYPES["bf16"] is torch.bfloat16


def header(architecture: str, **values: object) -> dict[str, object]:
    keys = {key.replace("__", "."): value for key, value in values.items()}
    named = {f"{architecture}.{key}": value for key, value in keys.items()}
    return {"general.architecture": architecture, **named}


@pytest.mark.parametrize(
    ("metadata", "token"),
    [
        # DeepSeek-V3: 61 layers of 512 + 64 elements
        (
            header(
                "deepseek2",
                block_count=61,
                embedding_length=7168,
                attention__head_count=128,
                attention__head_count_kv=1,
                attention__key_length=576,
                attention__value_length=512,
                attention__key_length_mla=192,
                attention__value_length_mla=128,
            ),
            61 * 576 * 2,
        ),
        # Qwen3.5 0.8B: one layer in four attends
        (
            header(
                "qwen35",
                block_count=24,
                embedding_length=1024,
                attention__head_count=8,
                attention__head_count_kv=2,
                attention__key_length=256,
                attention__value_length=256,
                full_attention_interval=4,
            ),
            6 * 2 * 2 * 256 * 2,
        ),
        # as Gemma 4: the last layers use the caches of others, those with a window are narrower
        (
            header(
                "gemma4",
                block_count=6,
                embedding_length=64,
                attention__head_count=4,
                attention__head_count_kv=[2, 2, 1, 2, 2, 1],
                attention__key_length=64,
                attention__value_length=64,
                attention__key_length_swa=32,
                attention__value_length_swa=32,
                attention__sliding_window=512,
                attention__sliding_window_pattern=[True, True, False, True, True, False],
                attention__shared_kv_layers=2,
            ),
            (3 * 2 * 2 * 32 + 2 * 64) * 2,
        ),
        # a model without attention
        (header("mamba", block_count=4, embedding_length=64), 0),
    ],
    ids=["latent", "hybrid", "shared", "recurrent"],
)
def test_shapes_of_models_too_large_to_make(metadata: dict[str, object], token: int) -> None:
    shape = shape_from_gguf(metadata)
    assert shape is not None
    assert kv_cache_bytes_per_token(shape.layer_caches, "f16", "f16") == token


def test_a_window_bounds_what_is_read_and_not_what_is_kept() -> None:
    caches = (LayerCacheShape(2, 64, 64, window=100), LayerCacheShape(2, 64, 64))
    assert kv_cache_bytes_per_token(caches, "f16", "f16") == 2 * 512
    assert kv_cache_read_bytes(caches, "f16", "f16", 50) == 50 * 1024
    assert kv_cache_read_bytes(caches, "f16", "f16", 1000) == (100 + 1000) * 512


@pytest.mark.parametrize("size", [64, 1000, 4096])
def test_the_beginning_of_a_file_is_enough(size: int) -> None:
    whole, found = read_gguf_header(TINY_GGUF), {}
    try:
        found = parse_gguf_header(TINY_GGUF.read_bytes()[:size], "tiny")
    except LoadFailed:
        assert size == 64, "the name of the architecture is further back"
    assert found.items() <= whole.items()
    assert (shape_from_gguf(found) == shape_from_gguf(whole)) == (size >= 1000)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGML" + bytes(60), b"\xff" * 200])
def test_file_that_is_not_gguf_is_rejected(content: bytes) -> None:
    with pytest.raises(LoadFailed, match="it is not a valid GGUF file"):
        parse_gguf_header(content, "it")


@pytest.mark.parametrize(
    "metadata",
    [
        header("llama"),
        header("llama", block_count=2**31 - 1, embedding_length=64),
        header("llama", block_count="many", embedding_length=64),
        header("llama", block_count=-1, embedding_length=64),
        header("llama", block_count=4, embedding_length=float("nan")),
    ],
)
def test_invalid_metadata_has_no_shape(metadata: dict[str, object]) -> None:
    assert shape_from_gguf(metadata) is None


@pytest.mark.parametrize("heads", [[], ["x"] * 4, [2**40] * 4, [-1] * 4])
def test_odd_lists_are_bounded(heads: list[object]) -> None:
    shape = shape_from_gguf(
        header(
            "llama",
            block_count=4,
            embedding_length=64,
            attention__head_count=4,
            attention__head_count_kv=heads,
        )
    )
    assert shape is not None
    assert kv_cache_bytes_per_token(shape.layer_caches, "f16", "f16") <= 4 * 2 * 64 * 2
