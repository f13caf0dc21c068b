"""Damaged and unsupported GGUF files are rejected in one line that names the file."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from cuda_gguf_files import tiny_folder, write_gguf
from gguf import GGMLQuantizationType as Kind

from localgen.backends.cuda.model.source import open_gguf_source
from localgen.backends.cuda.model.weights import DecoderWeights
from localgen.backends.errors import LoadFailed
from localgen.backends.formats.gguf.reader import GgufReader


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder("llama 3.1", tmp_path_factory.mktemp("hf"))


def load(path: Path) -> DecoderWeights:
    return open_gguf_source(path).load_weights(device="cpu", dtype=torch.float32)


def reason(path: Path) -> str:
    with pytest.raises(LoadFailed) as failure:
        load(path)
    text = str(failure.value)
    assert str(path) in text
    assert "\n" not in text
    return text


ROPE = "llama.rope."


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.block_count": None}, "has no llama.block_count"),
        ({"llama.embedding_length": None}, "has no llama.embedding_length"),
        ({"llama.attention.head_count": None}, "has no llama.attention.head_count"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "has no llama.attention.layer_norm_rms"),
        ({"llama.context_length": "long"}, 'llama.context_length is "long", not a positive int'),
        ({"llama.block_count": 0}, "llama.block_count is 0, not a positive integer"),
        ({"llama.block_count": 4}, "has no tensor blk.3.attn_norm.weight"),
        ({"llama.block_count": 2}, "blk.2.attn_k.weight is not part of LlamaForCausalLM"),
        ({"llama.attention.head_count_kv": 3}, "4 attention heads cannot share 3 key-value heads"),
        ({"llama.attention.head_count_kv": 4}, "attn_k.weight is of shape [32, 64], not [64, 64]"),
        ({"llama.attention.value_length": 8}, "value_length is 8, not 16, the length of keys"),
        ({"llama.attention.causal": False}, "this is an encoder"),
        ({"llama.expert_count": 4}, "has no llama.expert_used_count"),
        ({"llama.expert_count": 4, "llama.expert_used_count": 5}, "expert_used_count is 5, not up"),
        ({f"{ROPE}dimension_count": 7}, "7 rotary dimensions do not fit heads of 16"),
        ({f"{ROPE}dimension_count": 12}, "rope_freqs.weight is of shape [8], not [6]"),
        ({f"{ROPE}freq_base": 1.0}, "freq_base is 1.0, it must be above 1"),
        ({f"{ROPE}scaling.type": "ntk"}, "rope scaling 'ntk' is not supported, only linear, yarn"),
        (
            {f"{ROPE}scaling.type": "yarn", f"{ROPE}scaling.yarn_ext_factor": 0.5},
            "yarn_ext_factor is 0.5, not 1",
        ),
        ({f"{ROPE}scaling.type": "yarn"}, "yarn together with rope_freqs.weight is not supported"),
        ({"split.count": 2}, "is one of 2 parts, 1 found by name"),
    ],
)
def test_bad_metadata_is_rejected(
    changes: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "bad.gguf"
    write_gguf(folder, path, changes=changes)
    assert message in reason(path)


def test_unknown_architecture_is_rejected(folder: Path, tmp_path: Path) -> None:
    path = write_gguf(folder, tmp_path / "m.gguf")
    size = len("llama").to_bytes(8, "little")
    path.write_bytes(path.read_bytes().replace(size + b"llama", size + b"bloom"))
    text = "architecture 'bloom' is not supported, only llama, qwen2, qwen3, qwen3moe, gemma2"
    assert text in reason(path)


def test_experts_in_an_unsupported_architecture_are_rejected(tmp_path: Path) -> None:
    path = write_gguf(
        tiny_folder("qwen2", tmp_path / "hf"),
        tmp_path / "m.gguf",
        changes={"qwen2.expert_count": 4},
    )
    assert "qwen2 with experts is not supported" in reason(path)


def damaged(folder: Path, path: Path, damage: Callable[[bytearray, Any], object]) -> str:
    """Why the file is rejected after `damage` to its bytes, given a reader of the whole one."""
    content = bytearray(write_gguf(folder, path).read_bytes())
    damage(content, gguf.GGUFReader(path))
    path.write_bytes(content)
    return reason(path)


def tensor_type(content: bytearray, reader: Any, kind: int) -> None:
    """Overwrite the type of the tensor blk.0.attn_norm.weight."""
    field = next(t.field for t in reader.tensors if t.name == "blk.0.attn_norm.weight")
    at = field.offset + sum(part.nbytes for part in field.parts[:4])
    content[at : at + 4] = struct.pack("<I", kind)


def test_truncated_file_is_rejected(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    text = damaged(folder, path, lambda content, _: content.__delitem__(slice(-5000, None)))
    assert "is cut short: " in text
    assert text.endswith(": download it again")


def test_unsupported_tensor_type_is_rejected(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "type.gguf"
    text = damaged(folder, path, lambda content, reader: tensor_type(content, reader, 77))
    assert "blk.0.attn_norm.weight is of unknown type 77" in text
    text = damaged(folder, path, lambda content, reader: tensor_type(content, reader, Kind.I32))
    assert "blk.0.attn_norm.weight is of type I32, which is not supported" in text


def test_files_that_are_not_gguf_are_rejected(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    assert "cannot be read: No such file" in reason(path)
    path.touch()
    assert "is not a valid GGUF file" in reason(path)
    path.write_bytes(b"PK\3\4" + bytes(1000))
    assert "it does not begin with GGUF" in reason(path)
    write_gguf(folder, path, endianess=gguf.GGUFEndian.BIG)
    assert "it is big-endian" in reason(path)


def test_strings_that_are_not_utf8_are_rejected(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    write_gguf(folder, path, changes={"general.name": "plain name"})
    path.write_bytes(path.read_bytes().replace(b"plain name", b"plain\xffname"))
    assert "general.name is not UTF-8" in reason(path)


def test_damaged_headers_load_or_are_rejected(folder: Path, tmp_path: Path) -> None:
    """Header bytes changed or removed: the file loads, or is rejected as above."""
    path = tmp_path / "m.gguf"
    words = ["one", "two", "three", "four"]
    write_gguf(folder, path, changes={"tokenizer.ggml.tokens": words})
    content, chance = path.read_bytes(), random.Random(1)
    header = GgufReader(path).data_offset
    reasons = []
    for _ in range(400):
        bad = bytearray(content)
        for _ in range(chance.randint(1, 3)):
            bad[chance.randrange(header)] = chance.choice([0, 1, 0x7F, 0xFF, chance.randrange(256)])
        if chance.random() < 0.3:
            del bad[chance.randrange(len(bad)) :]
        path.write_bytes(bad)
        try:
            load(path)
        except LoadFailed as error:
            reasons.append(str(error))
    assert len(reasons) > 100
    assert [text for text in reasons if str(path) not in text or "\n" in text] == []


def test_values_equal_those_of_the_gguf_package(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "values.gguf"
    changes: dict[str, Any] = {
        "some.words": ["one", "", "drei ▁", "x" * 1000],
        "some.numbers": [1, -2, 3],
        "some.reals": [0.5, -1.25],
        "some.flags": [True, False, True],
    }
    write_gguf(folder, path, changes=changes)
    theirs, mine = gguf.GGUFReader(path), GgufReader(path)
    fields = {key: f for key, f in theirs.fields.items() if not key.startswith("GGUF.")}
    assert list(mine) == list(fields)
    for key, field in fields.items():
        assert mine.value(key) == field.contents(), key
    for ours, other in zip(mine.tensors, theirs.tensors, strict=True):
        assert (ours.name, ours.type_name) == (other.name, other.tensor_type.name)
        assert ours.shape == tuple(other.shape.tolist()[::-1])
        assert ours.data.tobytes() == other.data.tobytes()
