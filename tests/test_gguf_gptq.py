"""GGUF files whose codes GPTQ chooses: only codes change, and the layers' outputs are closer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_folders import TINY
from llama_files import LlamaFile
from quant_models import model_folder

from localgen.backends.errors import InvalidRequest
from localgen.backends.formats.gguf.reader import GgufReader, GgufTensor
from localgen.backends.formats.hf.config import read_hf_config
from localgen.quant.calibrate.layer_forward import CalibrationLayer
from localgen.quant.gguf import code_bits
from localgen.quant.gguf.code_bits import group_grids, num_bits, with_codes
from localgen.quant.gguf.ggml_rounding import pack, unpack
from localgen.quant.gguf.gptq_rounding import GgufRounding
from localgen.quant.gguf.requantize import make_gguf
from localgen.quant.gguf.tensors import from_gguf_rows, to_gguf_rows
from localgen.quant.gguf_job import prepare_gguf_job
from localgen.quant.methods.layer import QuantizedLayer
from localgen.quant.request.events import NoteEvent, OnEvent, ProgressEvent, QuantizeEvent
from localgen.quant.request.gguf_types import CODE_TYPES, GPTQ_TYPES
from localgen.quant.request.recipe import CalibrationConfig, Recipe
from localgen.quant.request.request import QuantizeRequest

QUESTION = "<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n<|im_start|>assistant\n"
Tensors = Mapping[str, GgufTensor]


@pytest.mark.parametrize("kind", CODE_TYPES)
def test_values_are_the_base_of_their_group_and_steps_of_their_code(kind: str) -> None:
    random = np.random.default_rng(1)
    packed = pack(random.normal(size=(3, 512)).astype(np.float32), kind, None)
    codes = random.integers(0, 2 ** num_bits(kind), (3, 512), dtype=np.uint8)
    base, step = group_grids(packed, kind)
    size = 512 // base.shape[1]
    expected = base.repeat(size, 1) + step.repeat(size, 1) * codes
    # ggml multiplies in another order
    assert np.allclose(unpack(with_codes(packed, codes, kind), kind), expected, atol=1e-5)


@pytest.mark.parametrize("kind", CODE_TYPES)
def test_the_same_codes_give_the_same_bytes(kind: str) -> None:
    weight = np.random.default_rng(2).normal(size=(2, 256)).astype(np.float32)
    packed = pack(weight, kind, None)
    base, step = (each.repeat(256 // each.shape[1], 1) for each in group_grids(packed, kind))
    codes = np.rint((unpack(packed, kind) - base) / step).astype(np.uint8)
    assert np.array_equal(with_codes(packed, codes, kind), packed)


def test_codes_lie_where_ggml_has_them() -> None:
    """Q4_0: a byte has the codes of values i and i + 16."""
    packed = np.zeros((1, 18), np.uint8)
    codes = np.arange(32, dtype=np.uint8)[None] % 16
    codes[0, 16:] = 15 - codes[0, 16:]
    found = with_codes(packed, codes, "Q4_0")[0, 2:]
    assert found.tolist() == [low | (15 - low) << 4 for low in range(16)]
    assert code_bits._FIELDS.keys() == set(CODE_TYPES)


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3"])
def test_weights_come_back_from_the_rows_of_a_file(name: str, tmp_path: Path) -> None:
    spec = read_hf_config(model_folder(name, tmp_path))
    random = np.random.default_rng(3)
    for linear, heads in (("q_proj", spec.num_heads), ("k_proj", spec.num_kv_heads), ("up", 2)):
        weight = random.normal(size=(heads * spec.head_dim, 8)).astype(np.float32)
        rows = to_gguf_rows(spec, linear, weight)
        assert np.allclose(from_gguf_rows(spec, linear, rows), weight, atol=1e-6)
        moved = (name, linear) in {("llama", "q_proj"), ("llama", "k_proj"), ("gemma2", "q_proj")}
        assert moved is not np.array_equal(rows, weight)


def request_for(
    file_type: str, output: Path, *, steps: int = 0, samples: int = 4, resume: bool = False
) -> QuantizeRequest:
    request = QuantizeRequest(
        model=None,
        gguf=file_type,
        calibration=CalibrationConfig(samples=samples, seq_len=64),
        output=output,
        resume=resume,
        eval_set=None,
    )
    return request.with_method(["gptq"], rounding_steps=steps, calibrate=False)


def make(
    folder: Path,
    file_type: str,
    output: Path,
    *,
    steps: int = 0,
    samples: int = 4,
    resume: bool = False,
    on_event: OnEvent = lambda _: None,
) -> Path:
    request = request_for(file_type, output, steps=steps, samples=samples, resume=resume)
    job = prepare_gguf_job(request, "model", folder, "cpu", on_event)
    assert Path(job.run(on_event, resume=resume).path) == output
    assert list(output.parent.glob(f"*{output.name}.*")) == [], "work folders"
    return output


def tensors(path: Path) -> Tensors:
    return {tensor.name: tensor for tensor in GgufReader(path).tensors}


def test_only_codes_differ_from_llama_cpps_file(
    tmp_path: Path, open_model: Callable[..., LlamaFile]
) -> None:
    plain, ours = tmp_path / "plain.gguf", tmp_path / "ours.gguf"
    make_gguf(TINY, plain, "Q3_K_M")
    before, after = tensors(plain), tensors(make(TINY, "Q3_K_M", ours, samples=16))
    # metadata about the calibration text
    added = next(iter(after.values())).offset - next(iter(before.values())).offset
    assert 0 < added == ours.stat().st_size - plain.stat().st_size < 1000
    assert before.keys() == after.keys()
    changed = set()
    for name, tensor in before.items():
        assert tensor.type_name == after[name].type_name
        assert tensor.offset + added == after[name].offset
        if not np.array_equal(tensor.data, after[name].data):
            changed.add(name.split(".")[-2])
    assert changed == {
        *("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    }
    assert "42" in open_model(ours).greedy(QUESTION)
    reader, key = GgufReader(ours), "quantize.imatrix."
    assert reader.value(key + "dataset") == "built-in text"
    assert reader.value(key + "entries_count") == 7 * read_hf_config(TINY).num_layers
    assert reader.value(key + "chunks_count") == 16
    assert key + "file" not in reader, "there is none"


def weights(found: Tensors, name: str) -> Any:
    return unpack(np.array(found[name].data), found[name].type_name)


@pytest.mark.parametrize("file_type", ["Q2_K", "Q4_K_M", "Q4_0"])
def test_outputs_are_closer_than_those_of_llama_cpps_rounding(
    file_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the inputs of the first layer, which no rounding before it has changed."""
    seen: dict[str, Any] = {}
    original = GgufRounding.round_layer

    def spied(self: GgufRounding, layer: CalibrationLayer, recipe: Recipe) -> QuantizedLayer:
        if layer.index == 0:
            layer.run_inputs(lambda name, x: seen.setdefault(name, []).append(x))
        return original(self, layer, recipe)

    monkeypatch.setattr(GgufRounding, "round_layer", spied)
    ours = tensors(make(TINY, file_type, tmp_path / "ours.gguf"))
    for path, kind in (("wide.gguf", "F16"), ("plain.gguf", file_type)):
        make_gguf(TINY, tmp_path / path, kind)
    wide, plain = tensors(tmp_path / "wide.gguf"), tensors(tmp_path / "plain.gguf")
    for linear, role in {"self_attn.v_proj": "attn_v", "mlp.up_proj": "ffn_up"}.items():
        x, name = torch.cat(seen[linear]).float().numpy(), f"blk.0.{role}.weight"
        exact = x @ weights(wide, name).T
        errors = [
            float(np.square(x @ weights(each, name).T - exact).sum()) for each in (ours, plain)
        ]
        assert errors[0] < 0.7 * errors[1], (linear, errors)


@pytest.mark.parametrize("steps", [0, 2])
def test_an_interrupted_run_goes_on_and_gives_the_same_file(steps: int, tmp_path: Path) -> None:
    whole = make(TINY, "Q4_0", tmp_path / "whole.gguf", steps=steps)
    again = tmp_path / "again.gguf"
    layers: list[int] = []

    def interrupt(event: QuantizeEvent) -> None:
        if isinstance(event, ProgressEvent) and event.unit == "layers":
            layers.append(event.done)
            if event.done == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(TINY, "Q4_0", again, steps=steps, on_event=interrupt)
    with pytest.raises(InvalidRequest, match="another gguf"):
        make(TINY, "Q4_1", again, steps=steps, resume=True)
    with pytest.raises(InvalidRequest, match="--resume continues it"):
        make(TINY, "Q4_0", again, steps=steps)
    with pytest.raises(InvalidRequest, match="another"):
        make(TINY, "Q4_0", again, steps=steps + 1, resume=True)
    layers.clear()

    def note(event: QuantizeEvent) -> None:
        if isinstance(event, ProgressEvent) and event.unit == "layers":
            layers.append(event.done)

    make(TINY, "Q4_0", again, steps=steps, resume=True, on_event=note)
    assert layers[0] == 2
    assert again.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("name", ["mixtral", "phi3", "gemma2", "qwen3 moe"])
def test_every_architecture(name: str, tmp_path: Path) -> None:
    """Rows of these models are too short for types of 256 values: those of 32 take their place."""
    folder = model_folder(name, tmp_path / "model")
    make_gguf(folder, tmp_path / "plain.gguf", "Q4_0")
    before = tensors(tmp_path / "plain.gguf")
    after = tensors(make(folder, "Q4_0", tmp_path / "ours.gguf"))
    for tensor in before.values():
        same = np.array_equal(tensor.data, after[tensor.name].data)
        in_layer = tensor.name.startswith("blk.") and tensor.type_name in CODE_TYPES
        assert same is not in_layer, tensor.name


def test_linears_without_codes_are_told(tmp_path: Path) -> None:
    folder, seen = model_folder("llama", tmp_path / "model"), list[QuantizeEvent]()
    make(folder, "Q2_K", tmp_path / "ours.gguf", on_event=seen.append)
    told = [one.text for one in seen if isinstance(one, NoteEvent)]
    assert told == ["GPTQ leaves 3 of 21 linears, in F16 without codes, to ggml"]


@pytest.mark.parametrize("file_type", ["IQ4_XS", "Q8_0", "F16", "Q2_K_S", "MXFP4_MOE"])
def test_types_without_codes_are_refused(file_type: str, tmp_path: Path) -> None:
    assert file_type not in GPTQ_TYPES
    with pytest.raises(InvalidRequest, match=f"cannot choose the codes of {file_type}.*Q4_K_M"):
        make(TINY, file_type, tmp_path / "ours.gguf")
