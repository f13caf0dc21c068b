"""The converter explains folders it cannot convert, and leaves no files behind."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from hf_folders import (
    BYTES,
    QWEN2,
    TINY,
    edit,
    edit_tokenizer,
    read_safetensors,
    write_safetensors,
)

from localgen.backends.errors import InvalidRequest, LoadFailed, LocalgenError, ModelNotFound
from localgen.quant.gguf.convert import convert_to_gguf
from localgen.quant.request.events import QuantizeEvent


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def change(name: str, **changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder / name, **changes)


def replace_text(name: str, text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_text(text)

    return write


def truncate(size: int) -> Callable[[Path], None]:
    def cut(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:size])

    return cut


def change_tensor(name: str, replacement: tuple[str, list[int], bytes] | None) -> Any:
    def rewrite(folder: Path) -> None:
        tensors = read_safetensors(folder / "model.safetensors")
        tensors.pop(name, None)
        if replacement is not None:
            tensors[name] = replacement
        write_safetensors(folder / "model.safetensors", tensors)

    return rewrite


def split_on_spaces(folder: Path) -> None:
    step = {**QWEN2, "pattern": {"Regex": " +"}}
    edit_tokenizer(folder / "tokenizer.json", [step, BYTES], False)


def change_token(content: Any) -> Callable[[Path], None]:
    def rename(folder: Path) -> None:
        added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
        first, *others = added
        edit(folder / "tokenizer.json", added_tokens=[{**first, "content": content}, *others])

    return rename


NORM = "model.norm.weight"
INDEX = "model.safetensors.index.json"
TOO_LARGE = np.full(4096 * 256, 1e6, "<f4").tobytes()
BAD_FOLDERS: list[tuple[Callable[[Path], None], type[LocalgenError], list[str]]] = [
    (remove("config.json"), ModelNotFound, ["config.json"]),
    (remove("tokenizer.json"), ModelNotFound, ["tokenizer.json"]),
    (remove("model.safetensors"), ModelNotFound, ["model.safetensors"]),
    (replace_text("config.json", "{"), LoadFailed, ["config.json"]),
    (replace_text("config.json", "[" * 100_000), LoadFailed, ["config.json"]),
    (replace_text("tokenizer.json", "[]"), LoadFailed, ["tokenizer.json", "no JSON object"]),
    (replace_text("tokenizer.json", "{}"), LoadFailed, ["tokenizer.json", "model"]),
    (replace_text(INDEX, "{}"), LoadFailed, [INDEX, "weight_map"]),
    (replace_text(INDEX, '{"weight_map": {"a": "b.safetensors"}}'), ModelNotFound, ["b.safe"]),
    (truncate(5), LoadFailed, ["model.safetensors"]),
    (truncate(2000), LoadFailed, ["model.safetensors"]),
    (truncate(1_000_000), LoadFailed, ["model.safetensors", "cut short", "1,000,000"]),
    (replace_text("model.safetensors", "x" * 4000), LoadFailed, ["model.safetensors"]),
    (change_tensor(NORM, None), LoadFailed, [NORM]),
    (change_tensor(NORM, ("F32", [128], bytes(512))), LoadFailed, [NORM, "128", "256"]),
    (change_tensor(NORM, ("I8", [256], bytes(256))), LoadFailed, [NORM, "I8"]),
    (change_tensor(NORM, ("F32", [256], bytes(512))), LoadFailed, [NORM, "512"]),
    (change_tensor("extra", ("F32", [1], bytes(4))), LoadFailed, ["extra"]),
    (
        change_tensor("model.embed_tokens.weight", ("F32", [4096, 256], TOO_LARGE)),
        LoadFailed,
        ["token_embd.weight", "BF16"],
    ),
    (change("config.json", architectures=["MambaForCausalLM"]), LoadFailed, ["MambaForCausalLM"]),
    (change("config.json", hidden_act="gelu"), LoadFailed, ["config.json", "gelu"]),
    (change("config.json", hidden_size=None), LoadFailed, ["config.json", "hidden_size"]),
    (change("config.json", hidden_size="big"), LoadFailed, ["config.json", "big"]),
    (change("config.json", rope_scaling={"type": "ntk"}), LoadFailed, ["config.json", "ntk"]),
    (change("config.json", rope_scaling={"type": "linear"}), LoadFailed, ["factor"]),
    (change("config.json", tie_word_embeddings=False), LoadFailed, ["lm_head.weight"]),
    (change("generation_config.json", eos_token_id=[0, 1, 2, 3]), LoadFailed, ["4 end tokens"]),
    (change("generation_config.json", eos_token_id="end"), LoadFailed, ["end"]),
    (
        change("generation_config.json", do_sample=True, temperature="hot"),
        LoadFailed,
        ["generation_config.json", "temperature"],
    ),
    (change("tokenizer.json", normalizer={"type": "Lowercase"}), LoadFailed, ["Lowercase"]),
    (change_token(1), LoadFailed, ["tokenizer.json", "not a valid tokenizer"]),
    (change_token("\ud800"), LoadFailed, ["tokenizer.json", "not a valid tokenizer"]),
    (split_on_spaces, LoadFailed, ["tokenizer.json", "pre-tokenizer", " +"]),
]


@pytest.mark.parametrize(("damage", "error", "words"), BAD_FOLDERS)
def test_bad_folders_are_explained_and_leave_nothing(
    damage: Callable[[Path], None],
    error: type[LocalgenError],
    words: list[str],
    folder: Path,
    tmp_path: Path,
) -> None:
    damage(folder)
    target = tmp_path / "out" / "model.gguf"
    target.parent.mkdir()
    with pytest.raises(error) as caught:
        convert_to_gguf(folder, target)
    assert type(caught.value) is error
    assert "\n" not in caught.value.message
    assert all(word in caught.value.message for word in words), caught.value.message
    assert list(target.parent.iterdir()) == []


def test_a_failed_conversion_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model.gguf"
    target.write_bytes(b"old")

    def full_disk(self: gguf.GGUFWriter, tensor: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", full_disk)
    with pytest.raises(LoadFailed, match=r"model\.gguf cannot be written: No space left"):
        convert_to_gguf(TINY, target)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [
        ("model.gguf", b"old")
    ]


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path) -> None:
    def stop(event: QuantizeEvent) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_to_gguf(TINY, tmp_path / "model.gguf", on_event=stop)
    assert list(tmp_path.iterdir()) == []


def test_bad_arguments_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"Q4_7.*F16"):
        convert_to_gguf(TINY, tmp_path / "model.gguf", "Q4_7")
    with pytest.raises(ModelNotFound, match="nowhere"):
        convert_to_gguf(tmp_path / "nowhere", tmp_path / "model.gguf")
    with pytest.raises(LoadFailed, match="missing"):
        convert_to_gguf(TINY, tmp_path / "missing" / "model.gguf")


def test_nan_and_infinite_weights_are_rejected(folder: Path, tmp_path: Path) -> None:
    broken = np.full(256, np.nan, "<f4").tobytes()
    change_tensor(NORM, ("F32", [256], broken))(folder)
    with pytest.raises(LoadFailed, match=r"output_norm\.weight has NaN or infinite values"):
        convert_to_gguf(folder, tmp_path / "model.gguf")
    assert list(tmp_path.glob("*.gguf")) == []


def test_too_little_disk_space_is_rejected_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out" / "model.gguf"
    target.parent.mkdir()
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    with pytest.raises(LoadFailed, match=r"takes 1\d\.\d MB, its disk has 1\.0 MB free: make room"):
        convert_to_gguf(TINY, target)
    assert list(target.parent.iterdir()) == []
