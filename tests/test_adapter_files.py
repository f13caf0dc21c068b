"""Files of LoRA adapters that do not fit, are damaged or change: one line, and all others go on."""

from __future__ import annotations

import errno
import json
import os
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hf_folders import edit, write_safetensors
from models import TINY_GGUF, Bench, questions

from benchmarks.random_adapter import RandomAdapter, random_adapter
from localgen.backends.adapters import MAX_LOADED_ADAPTERS, AdapterRef
from localgen.backends.errors import LoadFailed, LocalgenError, ModelNotFound, OutOfMemory
from localgen.backends.formats.gguf import lora
from localgen.backends.formats.gguf.reader import GgufReader
from localgen.backends.llamacpp import adapter_files
from localgen.backends.llamacpp.adapter_files import AdapterFiles
from localgen.backends.llamacpp.runner import LlamaRunner
from localgen.backends.model_info import LoadOptions
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Failed

PARAMS = SamplingParams(temperature=0, max_tokens=4)
Q, A, B = "blk.0.attn_q.weight", ".lora_a", ".lora_b"


@pytest.fixture(scope="module")
def adapter() -> RandomAdapter:
    return random_adapter(1)


def read(path: Path) -> Any:
    return AdapterFiles(TINY_GGUF).read(AdapterRef("poet", str(path)))


def write_gguf(path: Path, tensors: dict[str, np.ndarray[Any, Any]], **keys: Any) -> Path:
    """An adapter of q in the first layer, with other tensors and keys; None leaves one out."""
    rng = np.random.default_rng(0)
    found = {
        f"{Q}{A}": rng.normal(size=(4, 256)).astype(np.float32),
        f"{Q}{B}": rng.normal(size=(256, 4)).astype(np.float32),
    } | tensors
    defaults: dict[str, Any] = {"general.type": "adapter", "adapter.type": "lora", "alpha": 4.0}
    keys = defaults | keys
    writer = gguf.GGUFWriter(path, str(keys.pop("architecture", "llama")))
    alpha = keys.pop("alpha")
    if isinstance(alpha, float):
        writer.add_float32("adapter.lora.alpha", alpha)
    else:
        writer.add_string("adapter.lora.alpha", str(alpha))
    for key, value in keys.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, tensor in found.items():
        if tensor.size:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def floats(*shape: int) -> np.ndarray[Any, Any]:
    return np.ones(shape, np.float32)


@pytest.mark.parametrize(
    ("tensors", "keys", "why"),
    [
        ({}, {"general.type": "model"}, "is no LoRA adapter: it is a model"),
        ({}, {"general.type": "imatrix"}, "general.type is 'imatrix'"),
        ({}, {"adapter.type": "control_vector"}, "adapter.type is 'control_vector'"),
        ({}, {"architecture": "qwen3"}, "the architecture qwen3, tiny is llama"),
        ({}, {"alpha": "four"}, "adapter.lora.alpha is not a 32-bit float"),
        ({}, {"adapter.alora.invocation_tokens": [1, 2]}, "is an activated LoRA"),
        ({f"{Q}{B}": floats(0)}, {}, f"has no tensor {Q}.lora_b"),
        ({f"{Q}{A}": floats(0), f"{Q}{B}": floats(0)}, {}, "has no tensors"),
        ({f"{Q}{A}": floats(4, 128)}, {}, rf"does not fit {Q} of tiny, \[256, 256\]"),
        ({f"{Q}{B}": floats(256, 8)}, {}, "does not fit"),
        ({f"{Q}{A}": floats(4)}, {}, "does not fit"),
        ({f"{Q}{A}": floats(2, 4, 256)}, {}, "does not fit"),
        ({"blk.9.attn_q.weight.lora_a": floats(4, 256)}, {}, "has no tensor blk.9"),
        (
            {f"blk.9.attn_q.weight{part}": floats(4, 4) for part in (A, B)},
            {},
            "changes blk.9.attn_q.weight, which tiny does not have",
        ),
        ({"output_norm.weight": floats(256)}, {}, "has no tensor output_norm.weight.lora_a"),
        ({f"{Q}{A}": np.ones((4, 256), np.int32)}, {}, "is of type I32"),
    ],
)
def test_gguf_files_that_do_not_fit(
    tmp_path: Path, tensors: dict[str, Any], keys: dict[str, Any], why: str
) -> None:
    path = write_gguf(tmp_path / "poet.gguf", tensors, **keys)
    with pytest.raises(LoadFailed, match=why) as caught:
        read(path)
    assert "adapter poet" in caught.value.message
    assert "\n" not in caught.value.message


def test_a_file_cut_short_at_any_place(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", {}).read_bytes()
    assert read(tmp_path / "whole.gguf").num_bytes == len(whole)
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, 400, 7), *range(400, len(whole), 251)]:
        cut.write_bytes(whole[:size])
        with pytest.raises(LoadFailed):
            read(cut)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"adapter poet: cannot read .*: No such file"):
        read(tmp_path / "nothing.gguf")
    with pytest.raises(ModelNotFound, match=r"has no adapter_config.json: give the folder"):
        read(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelNotFound, match=r"cannot read .*adapter_model.safetensors"):
        read(tmp_path)


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "LOHA"}, "peft_type is LOHA, only LORA can be used"),
    ({"use_dora": True}, "use_dora is True, which cannot be used: llama.cpp's convert_lora"),
    ({"bias": "all"}, "bias is 'all', which cannot be used"),
    ({"lora_alpha": None}, "has no lora_alpha"),
    ({"lora_alpha": "8"}, 'lora_alpha is "8", not a positive number'),
    ({"alpha_pattern": {"layers.[0-9]+.q": 4}}, "alpha_pattern has the expression"),
    ({"use_rslora": "yes"}, 'use_rslora is "yes", not true or false'),
]


@pytest.mark.parametrize(("changes", "why"), CONFIGS)
def test_peft_configs_that_do_more_than_lora(
    tmp_path: Path, adapter: RandomAdapter, changes: dict[str, Any], why: str
) -> None:
    adapter.write_peft(tmp_path / "peft")
    edit(tmp_path / "peft" / "adapter_config.json", **changes)
    with pytest.raises(LoadFailed, match=why):
        read(tmp_path / "peft")


MODULE = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("shapes", "why"),
    [
        ({f"{MODULE}.lora_A.weight": [4, 256]}, "has no .*q_proj.lora_B.weight"),
        ({"base_model.model.lm_head.weight": [4096, 256]}, "is not a LoRA matrix of a linear"),
        ({f"{MODULE}.lora_magnitude_vector": [256]}, "is not a LoRA matrix of a linear"),
        (
            {f"{MODULE}.lora_A.weight": [4, 256], f"{MODULE}.lora_B.weight": [256, 8]},
            "A has 4 rows, B has 8 columns",
        ),
        (
            {f"{MODULE}.lora_A.weight": [4, 256], f"{MODULE}.lora_B.weight": [254, 4]},
            "q_proj has 254 outputs for 4 heads",
        ),
        (
            {f"{MODULE}.lora_A.weight": [4], f"{MODULE}.lora_B.weight": [256, 4]},
            r"of shape \[4\], not a matrix",
        ),
        (
            {f"{MODULE.replace('q_proj', 'x_proj')}.lora_{part}.weight": [4, 4] for part in "AB"},
            "changes model.layers.0.self_attn.x_proj, which tiny does not have",
        ),
        ({}, "has no tensors"),
    ],
)
def test_peft_tensors_that_do_not_fit(
    tmp_path: Path, adapter: RandomAdapter, shapes: dict[str, list[int]], why: str
) -> None:
    adapter.write_peft(tmp_path / "peft")
    tensors = {n: ("F32", s, bytes(4 * int(np.prod(s)))) for n, s in shapes.items()}
    write_safetensors(tmp_path / "peft" / "adapter_model.safetensors", tensors)
    with pytest.raises(LoadFailed, match=why):
        read(tmp_path / "peft")


def test_peft_becomes_what_llama_cpp_s_converter_writes(
    tmp_path: Path, adapter: RandomAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter.write_gguf(tmp_path / "expected.gguf")
    adapter.write_peft(tmp_path / "peft")
    kept = tmp_path / "ours.gguf"
    write = lora.write_lora_file

    def keep(path: Path, *others: Any) -> None:
        write(path, *others)
        shutil.copy(path, kept)

    monkeypatch.setattr(adapter_files, "write_lora_file", keep)
    read(tmp_path / "peft")
    ours, expected = (
        {t.name: t.data.view(np.float32) for t in GgufReader(path).tensors}
        for path in (kept, tmp_path / "expected.gguf")
    )
    assert ours.keys() == expected.keys()
    for name, values in expected.items():
        factor = np.float32(adapter.scale) if name.endswith(B) else np.float32(1)
        np.testing.assert_allclose(ours[name], values * factor, rtol=1e-6)


def test_what_takes_more_than_the_free_memory(
    tmp_path: Path, adapter: RandomAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter.write_gguf(tmp_path / "poet.gguf")
    monkeypatch.setattr(adapter_files, "available_memory_bytes", lambda: 256 << 20)
    with pytest.raises(OutOfMemory, match="takes 473 KB, 0 B are free"):
        read(tmp_path / "poet.gguf")


def test_a_changed_file_is_another_adapter(tmp_path: Path) -> None:
    path, files = tmp_path / "poet.gguf", AdapterFiles(TINY_GGUF)
    keys = []
    for seed in (1, 2):
        random_adapter(seed).write_gguf(tmp_path / "new.gguf")
        (tmp_path / "new.gguf").replace(path)
        keys += [files.read(AdapterRef(name, str(path))).key for name in ("a", "b")]
    assert keys[0] == keys[1] != keys[2] == keys[3]


def test_converted_files_are_as_many_as_loaded_adapters(
    tmp_path: Path, adapter: RandomAdapter
) -> None:
    """They have no name, so only the open ones take space on the disk."""
    files, opened = AdapterFiles(TINY_GGUF), []
    for number in range(MAX_LOADED_ADAPTERS + 2):
        adapter.write_peft(tmp_path / str(number))
        content = files.read(AdapterRef("poet", str(tmp_path / str(number)))).content
        opened.append(weakref.ref(content.file))
    del content
    assert [each() is not None for each in opened] == [False] * 2 + [True] * MAX_LOADED_ADAPTERS


def test_a_loaded_adapter_does_not_keep_its_file_open(tmp_path: Path) -> None:
    bench, path = Bench(LoadOptions(threads=1)), tmp_path / "poet.gguf"
    random_adapter(1).write_gguf(path)
    ref = AdapterRef("poet", str(path))
    bench.run([bench.submit(questions(1)[0], PARAMS, adapters=(ref,))])
    assert isinstance(bench.model.runner, LlamaRunner)
    loaded = bench.model.runner._adapters._loaded.values()
    assert [adapter.content for adapter, _ in loaded] == [None]
    bench.close()


def test_a_full_disk_ends_the_request_only(
    tmp_path: Path, adapter: RandomAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    adapter.write_peft(tmp_path / "peft")
    monkeypatch.setattr(adapter_files, "write_lora_file", fail)
    said = "cannot convert adapter poet .*: No space left on device: make room for temporary files"
    with pytest.raises(LoadFailed, match=said):
        read(tmp_path / "peft")


def failure(bench: Bench, ref: AdapterRef) -> LocalgenError | Failed:
    (reply,) = bench.run([bench.submit(questions(1)[0], PARAMS, adapters=(ref,))])
    assert isinstance(reply.end, Failed)
    return reply.end


def _write_to_it(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


@pytest.mark.parametrize(
    ("damage", "code", "why"),
    [
        (lambda path: path.unlink(), "model_not_found", "No such file"),
        (lambda path: path.write_bytes(b"x"), "load_failed", "not a valid GGUF file"),
    ],
)
def test_other_requests_go_on(
    tmp_path: Path, damage: Callable[[Path], None], code: str, why: str
) -> None:
    bench, path = Bench(LoadOptions(threads=1)), tmp_path / "poet.gguf"
    random_adapter(1).write_gguf(path)
    damage(path)
    running = bench.submit(questions(1)[0], PARAMS)
    failed = failure(bench, AdapterRef("poet", str(path)))
    assert isinstance(failed, Failed)
    assert failed.code == code
    assert why in failed.message
    (reply,) = bench.run([running])
    assert reply.text
    bench.close()


def test_a_file_that_is_written_to_before_it_is_loaded(tmp_path: Path) -> None:
    bench, path = Bench(LoadOptions(threads=1)), tmp_path / "poet.gguf"
    random_adapter(1).write_gguf(path)
    assert bench.model.read_adapter is not None
    content = bench.model.read_adapter(AdapterRef("poet", str(path))).content
    _write_to_it(path)
    with pytest.raises(LoadFailed, match=r"poet.gguf changes: try again when it is complete"):
        content.descriptor()
    bench.close()


def test_a_refusal_of_llama_cpp_ends_the_request_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What our check overlooks, llama.cpp may still refuse."""
    monkeypatch.setattr(adapter_files, "check_lora_file", lambda *_: None)
    bench = Bench(LoadOptions(threads=1))
    path = write_gguf(tmp_path / "poet.gguf", {f"{Q}{A}": floats(4, 128)})
    failed = failure(bench, AdapterRef("poet", str(path)))
    assert isinstance(failed, Failed)
    assert failed.code == "load_failed"
    assert "cannot load the adapter poet" in failed.message
    (reply,) = bench.ask(questions(1), PARAMS)
    assert reply.text
    bench.close()


def test_the_cuda_backend_refuses() -> None:
    bench = Bench(LoadOptions(threads=1))
    processor = bench.engine._input_processor
    object.__setattr__(processor, "read_adapter", None)  # as in CUDA's LoadedModel
    failed = failure(bench, AdapterRef("poet", "/x/poet.gguf"))
    assert isinstance(failed, Failed)
    assert (failed.code, failed.message) == (
        "invalid_request",
        "poet is a LoRA adapter, which only the llama.cpp backend has: load the model with "
        "--backend llamacpp",
    )
    bench.close()


def test_random_adapters_are_written_as_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import random_adapter as script

    monkeypatch.setattr("sys.argv", ["random_adapter", str(tmp_path / "poet"), "--rank", "2"])
    script.main()
    assert read(tmp_path / "poet").key != read(tmp_path / "poet.gguf").key
    config = json.loads((tmp_path / "poet" / "adapter_config.json").read_text())
    assert config["r"] == 2
