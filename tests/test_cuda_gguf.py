"""GGUF files in the CUDA engine equal the folder they were made from, and llama.cpp."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import gguf_files
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from cuda_checkpoints import shapes
from cuda_gguf_files import tiny_folder, write_gguf
from gguf import GGMLQuantizationType as Kind
from models import TINY_GGUF, questions
from torch import Tensor

from benchmarks.gguf_model import llama_cpp_logits, our_logits
from localgen.backends.cuda.model.linear import DenseLinear
from localgen.backends.cuda.model.source import GgufModelSource, open_gguf_source
from localgen.backends.cuda.model.weights import DecoderWeights, load_weights
from localgen.backends.errors import LoadFailed
from localgen.backends.formats.gguf import file as gguf_file
from localgen.backends.formats.gguf.file import GgufFile
from localgen.backends.formats.hf.config import read_hf_config
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.text.template import ChatTemplate
from localgen.quant.gguf.convert import convert_to_gguf

# llama.cpp's smallest
CTX = 256
VOCAB = 96
# GGUF has no field for another query scale
GEMMA = {"query_pre_attn_scalar": 32}
LONG = {"original_max_position_embeddings": CTX, "max_position_embeddings": 4 * CTX}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama first files": {},
    "llama biases": {},
    "llama tied": {},
    "llama 3.1": {},
    "llama linear": {},
    "mistral": {},
    "qwen2": {},
    "qwen2 yarn": {},
    "qwen3": {},
    "gemma2": GEMMA,
    "gemma3": GEMMA,
    "phi3": {},
    "phi3 longrope": LONG,
    "phi4 mini": LONG,
    "mixtral": {},
    "qwen3 moe": {},
}
# fields that the two formats express differently
REWORDED = {"rope", "norm_eps", "architecture"}


@dataclasses.dataclass(frozen=True)
class Pair:
    name: str
    folder: Path
    gguf: Path


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tiny_folder(
        request.param, tmp_path_factory.mktemp("model") / "hf", **MODELS[request.param]
    )
    return Pair(request.param, folder, write_gguf(folder, folder.parent / "model.gguf"))


def random_text(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    tokens: list[int] = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
    return tokens


def weights_of(checkpoint: GgufModelSource, dtype: torch.dtype = torch.float32) -> DecoderWeights:
    return checkpoint.load_weights(device="cpu", dtype=dtype)


def furthest(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max())


def test_the_model_is_that_of_the_folder(pair: Pair) -> None:
    ours, theirs = open_gguf_source(pair.gguf).spec, read_hf_config(pair.folder)
    for field in dataclasses.fields(ours):
        if field.name not in REWORDED:
            assert getattr(ours, field.name) == getattr(theirs, field.name), field.name
    assert ours.norm_eps == pytest.approx(theirs.norm_eps, rel=1e-6)
    architecture = theirs.architecture.replace("Mistral", "Llama")
    assert ours.architecture == architecture
    for length in (64, 512):
        for table, other in zip(
            ours.rope.cos_sin_table(length), theirs.rope.cos_sin_table(length), strict=True
        ):
            torch.testing.assert_close(table, other, rtol=0, atol=3e-5)


def test_logits_are_those_of_the_folder(pair: Pair) -> None:
    checkpoint, spec = open_gguf_source(pair.gguf), read_hf_config(pair.folder)
    theirs = load_weights(pair.folder, spec, device="cpu", dtype=torch.float32)
    ours, text = weights_of(checkpoint), random_text(90)
    assert shapes(ours) == shapes(theirs)
    logits = our_logits(spec, theirs, text, CTX)
    assert logits.abs().max() > 0.5
    assert furthest(our_logits(checkpoint.spec, ours, text, CTX), logits) < 1e-5


# beyond their training length, some models use other factors
@pytest.mark.parametrize("ctx", [CTX, 2 * CTX])
def test_logits_are_those_of_llama_cpp(pair: Pair, ctx: int) -> None:
    # llama.cpp ignores Phi-3's window, so the text must fit in one
    text = random_text(24 if pair.name == "phi3" else 90)
    checkpoint = open_gguf_source(pair.gguf)
    ours = our_logits(checkpoint.spec, weights_of(checkpoint), text, ctx)
    # its GELU is a table of float16 values
    tolerance = 6e-3 if pair.name.startswith("gemma") else 1e-5
    assert furthest(ours, llama_cpp_logits(pair.gguf, text, ctx)) < tolerance


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3 moe"])
def test_logits_in_bfloat16_are_those_of_the_folder(name: str, tmp_path: Path) -> None:
    folder = tiny_folder(name, tmp_path / "hf", **MODELS[name])
    checkpoint, spec = (
        open_gguf_source(write_gguf(folder, tmp_path / "m.gguf")),
        read_hf_config(folder),
    )
    ours = weights_of(checkpoint, torch.bfloat16)
    theirs = load_weights(folder, spec, device="cpu", dtype=torch.bfloat16)
    assert shapes(ours) == shapes(theirs)
    text = random_text(40)
    # GGUF stores Gemma's norm weights plus 1: subtracting it rounds, too
    rounded = our_logits(spec, theirs, text, CTX).float()
    assert furthest(our_logits(checkpoint.spec, ours, text, CTX).float(), rounded) < 1e-5


def test_gemma_3_without_a_pattern_has_a_global_layer_in_six(tmp_path: Path) -> None:
    folder = tiny_folder("gemma3", tmp_path / "hf", num_hidden_layers=3)
    changes = {"gemma3.attention.sliding_window_pattern": None, "gemma3.block_count": 7}
    path = write_gguf(folder, tmp_path / "m.gguf", changes=changes)
    assert open_gguf_source(path).spec.sliding_windows == (24, 24, 24, 24, 24, None, 24)
    changes = {"gemma3.attention.sliding_window": 0}
    path = write_gguf(folder, tmp_path / "m.gguf", changes=changes)
    assert open_gguf_source(path).spec.sliding_windows == (None, None, None)


@pytest.mark.parametrize(("layers", "scale"), [(26, 32**-0.5), (46, (96 // 4) ** -0.5)])
def test_the_largest_gemma_2_scales_its_queries_otherwise(
    layers: int, scale: float, tmp_path: Path
) -> None:
    folder = tiny_folder("gemma2", tmp_path / "hf")
    changes = {"gemma2.block_count": layers, "gemma2.embedding_length": 96}
    path = write_gguf(folder, tmp_path / "m.gguf", changes=changes)
    assert open_gguf_source(path).spec.attn_scale == scale


# ---- quantized tensors


def quantized_bytes(kind: Kind, rows: int, columns: int) -> Any:
    """Random blocks whose float16 scales are finite."""
    shape = gguf.quant_shape_to_byte_shape((rows, columns), kind)
    random = np.random.default_rng(int(kind))
    return random.integers(0, 0x3C, shape, dtype=np.uint8)


@pytest.mark.parametrize(
    "kind",
    [Kind.Q4_0, Kind.Q5_1, Kind.Q8_0, Kind.Q2_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_XS],
)
def test_quantized_tensors_are_what_gguf_makes_of_them(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # several steps, the last of them smaller
    monkeypatch.setattr(gguf_file, "_CHUNK_VALUES", 3 * 512)
    stored = quantized_bytes(kind, 7, 512)
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_tensor("some.weight", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "q.gguf")
    where = torch.device("cpu")
    expected = torch.from_numpy(gguf.dequantize(stored, kind))
    assert expected.isfinite().all()
    assert expected.std() > 0
    ours = file.read("some.weight", (7, 512), device=where, dtype=torch.float32)
    assert torch.equal(ours, expected)
    ours = file.read("some.weight", (7, 512), device=where, dtype=torch.bfloat16)
    assert torch.equal(ours, expected.to(torch.bfloat16))


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0])
def test_quantized_model_is_close_to_the_original(kind: Kind, tmp_path: Path) -> None:
    folder = tiny_folder("mixtral", tmp_path / "hf")
    checkpoint = open_gguf_source(write_gguf(folder, tmp_path / "m.gguf", kind))
    spec, text = read_hf_config(folder), random_text(40)
    plain = load_weights(folder, spec, device="cpu", dtype=torch.float32)
    exact = our_logits(spec, plain, text, CTX)
    ours = our_logits(checkpoint.spec, weights_of(checkpoint), text, CTX)
    assert 1e-6 < furthest(ours, exact) < 0.2


# ---- files in parts


def test_any_part_of_a_split_file_stands_for_all(tmp_path: Path) -> None:
    gguf_files.rewrite(tmp_path / "tiny.gguf", {}, split_max_tensors=20)
    parts = sorted(tmp_path.iterdir())
    assert [part.name[-20:] for part in parts] == [f"-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    whole = weights_of(open_gguf_source(TINY_GGUF))
    for part in parts:
        checkpoint = open_gguf_source(part)
        assert checkpoint.path == parts[0]
        for ours, theirs in zip(weights_of(checkpoint).layers, whole.layers, strict=True):
            assert ours.input_norm is not None
            assert theirs.input_norm is not None
            assert torch.equal(ours.input_norm, theirs.input_norm)
            assert isinstance(ours.qkv, DenseLinear)
            assert isinstance(theirs.qkv, DenseLinear)
            assert torch.equal(ours.qkv.weight, theirs.qkv.weight)
        assert checkpoint.load_tokenizer().encode("Hello")
    parts[1].rename(tmp_path / "elsewhere")
    with pytest.raises(LoadFailed, match=f"has no {parts[1].name}: download all 3 parts"):
        open_gguf_source(parts[2])
    with pytest.raises(LoadFailed, match="is one of 3 parts, 1 found by name"):
        open_gguf_source(parts[0].rename(tmp_path / "renamed.gguf"))


# ---- the built-in model


def test_built_in_model_has_the_logits_of_llama_cpp() -> None:
    """Over prompts and llama.cpp's greedy answers: the same logits, and the same best tokens."""
    checkpoint = open_gguf_source(TINY_GGUF)
    tokenizer, weights = checkpoint.load_tokenizer(), weights_of(checkpoint)
    template = ChatTemplate(checkpoint.chat_template or "", bos=tokenizer.bos, eos=tokenizer.eos)
    sure_of = 0
    for chat in questions(4):
        text = tokenizer.encode(template.render(chat))
        for _ in range(12):
            text.append(int(llama_cpp_logits(TINY_GGUF, text, CTX)[-1].argmax()))
        theirs = llama_cpp_logits(TINY_GGUF, text, CTX)
        ours = our_logits(checkpoint.spec, weights, text, CTX)
        assert furthest(ours, theirs) < 0.05  # its products are of float16
        best = theirs.topk(2).values
        sure = best[:, 0] - best[:, 1] > 0.05
        assert torch.equal(ours.argmax(-1)[sure], theirs.argmax(-1)[sure])
        sure_of += int(sure.sum())
    assert sure_of > 100


def test_sampling_defaults_and_chat_template_are_read() -> None:
    checkpoint = open_gguf_source(TINY_GGUF)
    assert checkpoint.sampling_defaults() == (SamplingParams(temperature=0.0), ())
    assert checkpoint.chat_template is not None
    assert "<|im_start|>" in checkpoint.chat_template


def test_our_converter_and_this_reader_agree(tmp_path: Path) -> None:
    folder = TINY_GGUF.parent / "tiny"
    convert_to_gguf(folder, tmp_path / "tiny.gguf", "F32")
    ours = weights_of(open_gguf_source(tmp_path / "tiny.gguf"))
    theirs = load_weights(folder, read_hf_config(folder), device="cpu", dtype=torch.float32)
    text = random_text(50)
    spec = open_gguf_source(tmp_path / "tiny.gguf").spec
    assert furthest(our_logits(spec, ours, text, CTX), our_logits(spec, theirs, text, CTX)) == 0
