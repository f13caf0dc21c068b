"""GGUF files of every type: llama.cpp's quantization, with and without an importance matrix."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from cuda_configs import CONVERTIBLE, write_config
from hf_folders import TINY, edit, write_safetensors
from llama_files import LlamaFile

from localgen.backends.errors import InvalidRequest, LoadFailed, LocalgenError, ModelNotFound
from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.formats.hf.config import read_hf_config
from localgen.backends.formats.hf.safetensors import NumpyCheckpoint
from localgen.backends.formats.hf.tensor_names import expected_shapes
from localgen.backends.messages import start_process
from localgen.hub.quant_choice import AvailableMemory
from localgen.quant.advice import estimate_methods
from localgen.quant.gguf import requantize
from localgen.quant.gguf.convert import convert_to_gguf
from localgen.quant.gguf.imatrix import ImatrixSource, read_imatrix, write_imatrix
from localgen.quant.gguf.requantize import estimate_gguf_bytes, make_gguf
from localgen.quant.request.events import ProgressEvent, QuantizeEvent
from localgen.quant.request.gguf_types import DIRECT_TYPES, GGUF_TYPES, resolve_gguf_type

QUESTION = "<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n<|im_start|>assistant\n"
NEEDY = [name for name, kind in GGUF_TYPES.items() if kind.needs_imatrix]


def importance_of(spec: ModelSpec, seed: int = 0) -> dict[str, tuple[Any, int]]:
    """Random sums of squares for every linear of the layers except routers."""
    random = np.random.default_rng(seed)
    return {
        name.removesuffix(".weight"): (random.random(shape[1], dtype=np.float32), 7)
        for name, shape in expected_shapes(spec).items()
        if len(shape) == 2 and ".layers." in name and not name.endswith(".gate.weight")
    }


@pytest.fixture(scope="module")
def importance() -> ImatrixSource:
    return importance_of(read_hf_config(TINY))


@pytest.mark.parametrize("file_type", ["Q4_K_M", "q6_k", "IQ4_XS", "Q8_0"])
@pytest.mark.parametrize("weighed", [False, True])
def test_every_type_loads_and_answers(
    file_type: str,
    weighed: bool,
    importance: ImatrixSource,
    tmp_path: Path,
    open_model: Callable[..., LlamaFile],
) -> None:
    target = tmp_path / "model.gguf"
    make_gguf(TINY, target, file_type, imatrix=importance if weighed else None)
    model = open_model(target)
    assert "42" in model.greedy(QUESTION)
    expected = GGUF_TYPES[file_type.upper()].file_type
    assert model.metadata("general.file_type") == str(int(expected))
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("file_type", NEEDY)
def test_very_low_bits_need_a_matrix(file_type: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=f"{file_type} needs an importance matrix"):
        make_gguf(TINY, tmp_path / "model.gguf", file_type)
    # llama.cpp itself would reject it
    convert_to_gguf(TINY, tmp_path / "wide.gguf", "F16")
    with pytest.raises(LoadFailed, match=f"cannot make {file_type} of it: .*requires an imatrix"):
        requantize.requantize(
            tmp_path / "wide.gguf", tmp_path / "m.gguf", file_type, None, lambda _: None
        )


def test_q2_k_s_is_made_with_a_matrix(
    importance: ImatrixSource, tmp_path: Path, open_model: Callable[..., LlamaFile]
) -> None:
    make_gguf(TINY, tmp_path / "model.gguf", "Q2_K_S", imatrix=importance)
    assert open_model(tmp_path / "model.gguf").greedy(QUESTION)


def weights(path: Path) -> dict[str, Any]:
    return {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}


def test_the_matrix_decides_how_weights_are_rounded(
    importance: ImatrixSource, tmp_path: Path
) -> None:
    """From our sums, and from the same file in the format of llama.cpp's tool."""
    plain, ours, filed = (tmp_path / f"{name}.gguf" for name in ("plain", "ours", "filed"))
    make_gguf(TINY, plain, "Q4_K_M")
    make_gguf(TINY, ours, "Q4_K_M", imatrix=importance)
    write_imatrix(tmp_path / "imatrix.gguf", read_hf_config(TINY), importance, "random")
    make_gguf(TINY, filed, "Q4_K_M", imatrix=tmp_path / "imatrix.gguf")
    assert weights(ours).keys() == weights(filed).keys()
    for name, values in weights(ours).items():
        assert np.array_equal(values, weights(filed)[name]), name
    before, after = weights(plain), weights(ours)
    for name in before:
        same = np.array_equal(before[name], after[name])
        assert same == ((".layers." not in name and "blk." not in name) or "norm" in name), name


def test_the_file_says_what_calibrated_it(importance: ImatrixSource, tmp_path: Path) -> None:
    """In the keys and types that llama-quantize writes."""
    make_gguf(
        TINY,
        tmp_path / "model.gguf",
        "Q4_K_M",
        imatrix=importance,
        dataset_name="my chats",
        chunk_tokens=2,
    )
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    keys = {name: field for name, field in fields.items() if name.startswith("quantize.imatrix.")}
    assert {name: field.contents() for name, field in keys.items()} == {
        "quantize.imatrix.file": "imatrix.gguf",
        "quantize.imatrix.dataset": "my chats",
        "quantize.imatrix.entries_count": len(importance),
        "quantize.imatrix.chunks_count": 4,
    }
    assert keys["quantize.imatrix.entries_count"].types == [gguf.GGUFValueType.UINT32]
    make_gguf(TINY, tmp_path / "plain.gguf", "Q4_K_M")
    assert not any("imatrix" in name for name in gguf.GGUFReader(tmp_path / "plain.gguf").fields)


@pytest.mark.parametrize("half", ["BF16", "F16"])
def test_sixteen_bits_in_between_are_those_of_the_model(
    half: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {}
    checkpoint = NumpyCheckpoint(folder)
    for name in checkpoint.names():
        values = checkpoint.read(name)
        upper = (values.view("<u4") >> 16).astype("<u2")
        packed = upper if half == "BF16" else values.astype("<f2")
        tensors[name] = (half, list(values.shape), packed.tobytes())
    write_safetensors(folder / "model.safetensors", tensors)
    asked: list[str] = []

    def watched(source: Path, target: Path, file_type: str, **options: Any) -> None:
        asked.append(file_type)
        convert_to_gguf(source, target, file_type, **options)

    monkeypatch.setattr(requantize, "convert_to_gguf", watched)
    make_gguf(folder, tmp_path / "model.gguf", "Q4_0")
    assert asked == [half]


def test_progress_of_conversion_and_rounding(tmp_path: Path) -> None:
    seen: list[QuantizeEvent] = []
    make_gguf(TINY, tmp_path / "model.gguf", "Q4_0", on_event=seen.append)
    events = [event for event in seen if isinstance(event, ProgressEvent)]
    converting = [event for event in events if event.step == "converting to GGUF"]
    rounding = [event for event in events if event.step == "rounding"]
    assert seen == converting + rounding
    assert converting[-1].done == converting[-1].total
    assert rounding == [ProgressEvent("rounding", done, 56, "tensors") for done in range(1, 57)]


@pytest.mark.parametrize("name", ["F16", "Q8_0", "Q6_K", "Q4_K_M", "Q3_K_M", "Q2_K"])
def test_the_estimate_is_about_right(name: str, tmp_path: Path) -> None:
    make_gguf(TINY, tmp_path / "model.gguf", name)
    real = (tmp_path / "model.gguf").stat().st_size
    assert 0.8 < estimate_gguf_bytes(read_hf_config(TINY), name) / real < 1.25
    advised = estimate_methods(TINY, AvailableMemory(ram_bytes=8 << 30))
    for one in advised:
        if one.option.endswith(f"--gguf {name}"):
            assert 0.92 < one.size_bytes / real < 1.03  # without the header, of 170 KB


# ---- mixtures of experts


@pytest.mark.parametrize("name", ["mixtral", "qwen3 moe"])
def test_experts_have_their_own_importance(name: str, tmp_path: Path) -> None:
    spec = read_hf_config(write_config(tmp_path / "hf", name))
    assert spec.moe is not None
    block, gate = ("block_sparse_moe", "w1") if name == "mixtral" else ("mlp", "gate_proj")
    known = importance_of(spec)
    unseen = f"model.layers.1.{block}.experts.2.{gate}"
    del known[unseen]
    known[f"model.layers.1.{block}.experts.3.{gate}"] = (np.full(64, 6.0, np.float32), 3)
    write_imatrix(tmp_path / "imatrix.gguf", spec, known, "random")
    means = read_imatrix(tmp_path / "imatrix.gguf")
    stack = means["blk.1.ffn_gate_exps.weight"].reshape(spec.moe.num_experts, spec.hidden_size)
    first = known[f"model.layers.1.{block}.experts.0.{gate}"][0]
    np.testing.assert_allclose(stack[0], first / 7)
    np.testing.assert_array_equal(stack[2], 1.0)
    np.testing.assert_array_equal(stack[3], 2.0)
    assert not [name for name in means if "ffn_gate_inp" in name]
    assert (
        means["blk.1.ffn_down_exps.weight"].size
        == spec.moe.num_experts * spec.moe.intermediate_size
    )
    names = {"attn_q", "attn_k", "attn_v", "attn_output"}
    names |= {f"ffn_{part}_exps" for part in ("gate", "up", "down")}
    assert set(means) == {f"blk.{i}.{own}.weight" for i in range(3) for own in names}


@pytest.mark.parametrize("name", sorted(CONVERTIBLE))
def test_every_linear_of_every_architecture_has_a_name(name: str, tmp_path: Path) -> None:
    spec = read_hf_config(write_config(tmp_path / "hf", name))
    write_imatrix(tmp_path / "imatrix.gguf", spec, importance_of(spec), "random")
    stacks = 7 if not spec.fused_projections else 4
    assert len(read_imatrix(tmp_path / "imatrix.gguf")) == stacks * spec.num_layers


def test_a_mixture_is_quantized_by_its_matrix(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from quant_models import model_folder

    folder = model_folder("mixtral", tmp_path / "hf")
    spec = read_hf_config(folder)
    make_gguf(folder, tmp_path / "plain.gguf", "Q4_0")
    make_gguf(folder, tmp_path / "weighed.gguf", "Q4_0", imatrix=importance_of(spec))
    before, after = (weights(tmp_path / f"{name}.gguf") for name in ("plain", "weighed"))
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    # rows of 48 cannot be packed by 32
    assert changed == {
        f"blk.{layer}.{own}.weight"
        for layer in range(3)
        for own in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate_exps", "ffn_up_exps")
    }


# ---- errors


def wrong(**entries: tuple[Any, int]) -> Callable[[ModelSpec], ImatrixSource]:
    return lambda spec: {name.replace("__", "."): value for name, value in entries.items()}


Q_PROJ = "model__layers__0__self_attn__q_proj"


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (wrong(), "no linear has an importance"),
        (wrong(**{Q_PROJ: (np.ones(3), 1)}), "q_proj has 256 inputs, the importance is of (3,)"),
        (wrong(**{Q_PROJ: (np.full(256, np.nan), 1)}), "q_proj is not finite"),
        (wrong(model__norm=(np.ones(256), 1)), "model.norm is not a linear of a Llama"),
        (wrong(model__layers__0__mlp=(np.ones(256), 1)), "mlp is not a linear"),
    ],
)
def test_invalid_importance_is_rejected(
    made: Callable[[ModelSpec], ImatrixSource], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(LoadFailed) as caught:
        make_gguf(TINY, tmp_path / "model.gguf", "Q4_0", imatrix=made(read_hf_config(TINY)))
    assert expected in caught.value.message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("source", "file_type", "error", "expected"),
    [
        (TINY, "Q9_Z", InvalidRequest, "unknown file type Q9_Z: use auto or one of F32"),
        (TINY, "MXFP4_MOE", InvalidRequest, "rounds experts, this model has none"),
        (TINY / "nowhere", "Q4_0", ModelNotFound, "is not a folder"),
        (TINY, "Q4_0", LoadFailed, "is not an importance matrix"),
    ],
)
def test_invalid_conversions_are_rejected(
    source: Path, file_type: str, error: type[LocalgenError], expected: str, tmp_path: Path
) -> None:
    matrix = tmp_path / "imatrix.gguf"
    matrix.write_bytes(b"no matrix at all")
    with pytest.raises(error) as caught:
        make_gguf(source, tmp_path / "model.gguf", file_type, imatrix=matrix)
    assert expected in caught.value.message
    assert list(tmp_path.iterdir()) == [matrix]


def test_model_as_importance_matrix_is_rejected(tmp_path: Path) -> None:
    make_gguf(TINY, tmp_path / "model.gguf", "F16")
    with pytest.raises(LoadFailed, match="it has no sums of squares"):
        read_imatrix(tmp_path / "model.gguf")


def test_importance_matrix_of_another_model_is_rejected(
    folder: Path, importance: ImatrixSource, tmp_path: Path
) -> None:
    edit(folder / "config.json", intermediate_size=512)
    spec = read_hf_config(folder)
    write_imatrix(tmp_path / "imatrix.gguf", spec, importance_of(spec), "random")
    with pytest.raises(LoadFailed, match="cannot make Q4_0 of it: imatrix size 512 is different"):
        make_gguf(TINY, tmp_path / "m.gguf", "Q4_0", imatrix=tmp_path / "imatrix.gguf")
    assert not (tmp_path / "m.gguf").exists()


def test_disk_space_is_checked_for_both_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=13_000_000))
    with pytest.raises(LoadFailed, match=r"15\.5 MB while it is made, its disk has"):
        make_gguf(TINY, tmp_path / "model.gguf", "Q4_0")
    assert list(tmp_path.iterdir()) == []


def test_an_interruption_keeps_the_old_file_and_ends_the_process(tmp_path: Path) -> None:
    target = tmp_path / "model.gguf"
    target.write_bytes(b"old")

    def stop(event: QuantizeEvent) -> None:
        if event == ProgressEvent("rounding", 3, 56, "tensors"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_gguf(TINY, target, "Q4_K_M", on_event=stop)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [
        ("model.gguf", b"old")
    ]


def test_leftovers_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    left = tmp_path / ".model.gguf.work"
    left.mkdir()
    (left / "16bit.gguf").write_bytes(b"half")
    make_gguf(TINY, tmp_path / "model.gguf", "Q4_0")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_abort_in_llama_cpp_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is llama.cpp's last output."""
    program = "import os, sys; print('GGML_ASSERT(n > 0) failed', file=sys.stderr); os.abort()"
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda _, **options: popen([sys.executable, "-c", program], **options)
    )
    with pytest.raises(LoadFailed, match=r"cannot make Q4_0 of it: GGML_ASSERT\(n > 0\) failed"):
        make_gguf(TINY, tmp_path / "model.gguf", "Q4_0")
    assert list(tmp_path.iterdir()) == []


def test_process_ends_with_its_reader(tmp_path: Path) -> None:
    make_gguf(TINY, tmp_path / "wide.gguf", "F16")
    module = "localgen.quant.gguf.requantize_process"
    file_type = int(GGUF_TYPES["IQ4_XS"].file_type)
    arguments = (tmp_path / "wide.gguf", tmp_path / "model.gguf", file_type, 1, "", "{}")
    command = [sys.executable, "-m", module, *map(str, arguments)]
    child, messages = start_process(command, stderr=subprocess.DEVNULL)
    messages.receive()
    messages.close()
    assert child.wait(60) == 1


def test_gguf_type_names() -> None:
    assert resolve_gguf_type("q4_k") == "Q4_K_M"
    assert resolve_gguf_type("iq4_xs") == "IQ4_XS"
    assert set(DIRECT_TYPES) < set(GGUF_TYPES)
    # in descending order, for lists
    assert [GGUF_TYPES[name].bits_per_weight for name in DIRECT_TYPES] == [32, 16, 16, 8.5]
