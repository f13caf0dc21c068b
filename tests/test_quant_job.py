"""Quantization layer by layer: its result, rejected input, and resuming."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hf_folders import TINY, edit

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

import torch
from safetensors.torch import load_file, save_file

from localgen.backends.cuda.model.weights import load_weights
from localgen.backends.errors import (
    DiskFull,
    InvalidRequest,
    LoadFailed,
    LocalgenError,
    OutOfMemory,
)
from localgen.quant import preflight
from localgen.quant.files.layerwise_checkpoint import LayerwiseCheckpoint
from localgen.quant.job import QuantizeJob
from localgen.quant.preflight import prepare_quantization
from localgen.quant.request.events import ProgressEvent, QuantizeEvent
from localgen.quant.request.recipe import CalibrationConfig, LayerMode, Recipe

CALIBRATION = CalibrationConfig(samples=6, seq_len=32)
RTN, GPTQ, AWQ = (Recipe(method=method) for method in ("rtn", "gptq", "awq"))
FP8 = Recipe(method="fp8", bits=8)
SYMMETRIC = Recipe(method="gptq", asymmetry=0.0)
LEARNED = Recipe(method="gptq", bits=2, rounding_steps=4)
LEARNED_AWQ = Recipe(method="awq", bits=3, rounding_steps=4)
LAYERS = 6


def job(
    recipe: Recipe, out: Path, *, folder: Path = TINY, mode: LayerMode = "round"
) -> QuantizeJob:
    ready = prepare_quantization(folder, recipe, CALIBRATION, "cpu")
    return QuantizeJob("tiny", ready, out, mode=mode)


def run(recipe: Recipe, out: Path, *, resume: bool = False) -> list[int]:
    """Finished layers at each progress event."""
    seen: list[QuantizeEvent] = []
    job(recipe, out).run(seen.append, resume=resume)
    return [one.done for one in seen if isinstance(one, ProgressEvent) and one.unit == "layers"]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Stopped(Exception):
    pass


def stopped_at(recipe: Recipe, out: Path, layer: int) -> None:
    """Run until a layer begins, then end as a killed process does."""

    def stop(event: QuantizeEvent) -> None:
        if isinstance(event, ProgressEvent) and (event.unit, event.done) == ("layers", layer):
            raise Stopped

    with pytest.raises(Stopped):
        job(recipe, out).run(stop, resume=False)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the built-in model's folder that may be changed."""
    return Path(shutil.copytree(TINY, tmp_path / "model"))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Recipe], Path]:
    """The folder that a run of a recipe writes if nothing stops it, not to be changed."""

    @functools.cache
    def run_once(recipe: Recipe) -> Path:
        out = tmp_path_factory.mktemp("whole") / "whole"
        run(recipe, out)
        return out

    return run_once


@pytest.mark.parametrize("recipe", [RTN, AWQ, GPTQ, FP8], ids=lambda recipe: recipe.method)
def test_result_is_a_model_that_loads(recipe: Recipe, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(recipe, out) == list(range(LAYERS + 1))
    assert not list(tmp_path.glob("*.partial"))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == LAYERS + 1
    assert (out / "tokenizer.json").read_bytes() == (TINY / "tokenizer.json").read_bytes()
    assert (out / "generation_config.json").is_file()
    assert "base_model: tiny" in (out / "README.md").read_text()
    source = LayerwiseCheckpoint(out)
    # the engine's own loader, which checks every tensor and refuses any it does not know
    load_weights(out, source.spec, device="cpu", dtype=torch.float32)
    original = LayerwiseCheckpoint(TINY)
    for index_of_layer in (0, LAYERS - 1):
        before, after = original.read_layer(index_of_layer), source.read_layer(index_of_layer)
        assert before.keys() == after.keys()
    difference = (
        source.read_layer(2)["mlp.up_proj.weight"] - original.read_layer(2)["mlp.up_proj.weight"]
    )
    assert (
        0
        < difference.abs().mean()
        < 0.2 * original.read_layer(2)["mlp.up_proj.weight"].abs().mean()
    )


def test_output_size_estimates_hold(tmp_path: Path) -> None:
    for recipe in (RTN, FP8, GPTQ, Recipe(method="rtn", bits=3, group_size=64)):
        one = job(recipe, tmp_path / f"{recipe.method}{recipe.bits}")
        out = Path(one.run(lambda _: None, resume=False).path)
        size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
        # the estimate excludes the headers of the files
        assert 0 <= size - one.estimate.output_bytes < 4096 * (LAYERS + 1)


@pytest.mark.parametrize("recipe", [RTN, AWQ, SYMMETRIC, GPTQ, LEARNED, LEARNED_AWQ], ids=str)
def test_estimated_disk_space_suffices(recipe: Recipe, tmp_path: Path) -> None:
    one = job(recipe, tmp_path / "out")
    used: list[int] = []
    headers = 4096 * (LAYERS + 1)

    def measure(event: QuantizeEvent) -> None:
        work = one.work_folder.path
        if isinstance(event, ProgressEvent) and work.is_dir():
            used.append(sum(path.stat().st_size for path in work.iterdir()))

    one.run(measure, resume=False)
    assert max(used) < one.estimate.disk_bytes + headers
    states = 4 * 256 * CALIBRATION.samples * CALIBRATION.seq_len
    models = 0 if recipe.method == "rtn" else 2 if recipe.needs_originals else 1
    assert one.estimate.states_bytes == models * states
    assert one.estimate.disk_bytes == one.estimate.output_bytes + 2 * models * states


def test_only_layers_with_wrong_inputs_are_corrected(
    uninterrupted: Callable[[Recipe], Path], tmp_path: Path
) -> None:
    """The first layer's inputs are the original model's; later ones come from rounded layers."""
    run(SYMMETRIC, tmp_path / "symmetric")
    plain, corrected = files(tmp_path / "symmetric"), files(uninterrupted(GPTQ))
    same = [name for name in plain if plain[name] == corrected[name]]
    assert {"model-00001-of-00007.safetensors", "model-00002-of-00007.safetensors"} <= {*same}
    assert [name for name in same if name >= "model-00003" and name.endswith("rs")] == []


@pytest.mark.parametrize("recipe", [RTN, GPTQ, LEARNED, LEARNED_AWQ], ids=str)
@pytest.mark.parametrize("layer", [0, 1, LAYERS - 1])
def test_resumed_runs_give_the_same_files(
    recipe: Recipe, layer: int, uninterrupted: Callable[[Recipe], Path], tmp_path: Path
) -> None:
    parts = tmp_path / "parts"
    stopped_at(recipe, parts, layer)
    assert not parts.exists()
    assert run(recipe, parts, resume=True)[0] == layer
    assert files(uninterrupted(recipe)) == files(parts)


def test_progress_within_layers_whose_rounding_is_learned(tmp_path: Path) -> None:
    seen: list[QuantizeEvent] = []
    job(LEARNED, tmp_path / "out").run(seen.append, resume=False)
    layers = [one for one in seen if isinstance(one, ProgressEvent) and one.unit == "layers"]
    completed = [one.completed for one in layers]
    of_a_layer = [0.0, 0.2, 0.4, 0.6, 0.8]  # after each of four steps
    wanted = [index + each for index in range(LAYERS) for each in of_a_layer]
    assert completed == pytest.approx([*wanted, LAYERS])


def test_run_killed_while_writing_is_resumed(
    uninterrupted: Callable[[Recipe], Path], tmp_path: Path
) -> None:
    parts = tmp_path / "parts"
    stopped_at(GPTQ, parts, 3)
    work = tmp_path / "parts.partial"
    (work / ".model-00005-of-00007.safetensors.unfinished").write_bytes(b"half")
    # states after a layer whose file was not renamed yet
    (work / "states-00004.bin").write_bytes(b"cut")
    (work / "original-states-00004.bin").write_bytes(b"cut")
    run(GPTQ, parts, resume=True)
    assert files(uninterrupted(GPTQ)) == files(parts)


def refused(kind: type[LocalgenError], action: Callable[[], Any], *parts: str) -> None:
    with pytest.raises(kind) as failure:
        action()
    assert [part for part in parts if part not in failure.value.message] == []
    assert "\n" not in failure.value.message


def test_resume_with_another_recipe_is_rejected(tmp_path: Path) -> None:
    out = tmp_path / "out"
    stopped_at(GPTQ, out, 2)
    refused(InvalidRequest, lambda: run(GPTQ, out), "unfinished run of 2 layers", "--resume")
    other = Recipe(method="gptq", bits=3)
    refused(InvalidRequest, lambda: run(other, out, resume=True), "recipe bits", "4, now 3")
    run(GPTQ, out, resume=True)
    refused(InvalidRequest, lambda: run(GPTQ, out), "already exists")


def test_a_run_without_a_finished_layer_blocks_nothing(
    uninterrupted: Callable[[Recipe], Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    stopped_at(GPTQ, out, 0)
    left = tmp_path / "out.partial" / "of-gptq.bin"
    left.touch()
    found: list[QuantizeEvent] = []
    job(GPTQ, out).report_unfinished(found.append)
    assert not found
    stopped_at(RTN, out, 0)
    assert not left.exists(), "it is of another recipe"
    run(RTN, out)
    assert files(out) == files(uninterrupted(RTN))


def test_layers_of_a_model_with_more_of_them_are_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    stopped_at(GPTQ, out, 2)
    work = tmp_path / "out.partial"
    for path in work.glob("model-*"):
        path.rename(path.with_name(path.name.replace("-of-00007", "-of-00033")))
    plan = work / "plan.json"
    plan.write_text(json.dumps(json.loads(plan.read_text()) | {"model": {"bytes": 1}}))
    before = files(work)
    refused(InvalidRequest, lambda: run(GPTQ, out), "an unfinished run of another model: remove")
    refused(InvalidRequest, lambda: run(GPTQ, out, resume=True), "with another model: use")
    plan.unlink()
    refused(InvalidRequest, lambda: run(GPTQ, out, resume=True), "no plan.json that tells of what")
    del before["plan.json"]
    assert files(work) == before


def test_layers_are_kept_if_the_result_could_not_be_renamed(
    uninterrupted: Callable[[Recipe], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def fail(*arguments: object) -> None:
        raise PermissionError(1, "not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        with pytest.raises(LocalgenError):
            run(RTN, out)
    refused(InvalidRequest, lambda: run(GPTQ, out, resume=True), "another recipe method")
    assert run(RTN, out, resume=True) == [LAYERS]
    assert files(out) == files(uninterrupted(RTN))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"calibration": "0" * 64}, "another calibration text, --samples or --seq-len: use the"),
        ({"calibration": "0" * 64, "mode": "fold"}, "another mode (fold, now round): use the same"),
        ({"calibration": None, "model": {"bytes": 1}}, "another model: use the same"),
    ],
)
def test_what_differs_from_an_unfinished_run_is_named(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    stopped_at(GPTQ, out, 2)
    manifest = tmp_path / "out.partial" / "plan.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | changes))
    refused(InvalidRequest, lambda: run(GPTQ, out, resume=True), f"was started with {message}")


def test_resume_with_another_model_is_rejected(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    stopped_at(RTN, out, 2)
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] *= 2
    save_file(tensors, model / "model.safetensors")
    refused(
        InvalidRequest,
        lambda: job(RTN, out, folder=model).run(lambda _: None, resume=True),
        "another version of the model",
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinite_weights_are_rejected(value: float, model: Path, tmp_path: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.4.mlp.down_proj.weight"
    tensors[name][3, 5] = value
    save_file(tensors, model / "model.safetensors")
    out = tmp_path / "out"
    started = job(RTN, out, folder=model)
    refused(
        LoadFailed,
        lambda: started.run(lambda _: None, resume=False),
        name,
        "NaN or infinite",
        "download it again",
    )
    assert not started.work_folder.path.exists()


def test_quantized_model_is_rejected(tmp_path: Path) -> None:
    run(RTN, tmp_path / "once")
    refused(
        InvalidRequest,
        lambda: job(RTN, tmp_path / "twice", folder=tmp_path / "once"),
        "once is already quantized (awq)",
        "give the original",
    )


def test_unknown_architecture_is_rejected(model: Path, tmp_path: Path) -> None:
    edit(model / "config.json", architectures=["MambaForCausalLM"])
    refused(LoadFailed, lambda: job(RTN, tmp_path / "x", folder=model), "MambaForCausalLM", "Llama")


def test_group_size_that_does_not_divide_is_rejected(tmp_path: Path) -> None:
    odd = Recipe(method="rtn", group_size=512)
    refused(InvalidRequest, lambda: job(odd, tmp_path / "x"), "256 inputs", "--group-size")


def test_text_shorter_than_a_sequence_is_rejected(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("Too short.")
    short = CalibrationConfig(path=text, seq_len=512)
    refused(
        InvalidRequest,
        lambda: prepare_quantization(TINY, GPTQ, short, "cpu"),
        "short.txt has",
        "--seq-len",
    )
    long = CalibrationConfig(seq_len=4096)
    refused(
        InvalidRequest, lambda: prepare_quantization(TINY, GPTQ, long, "cpu"), "2,048", "--seq-len"
    )


def test_too_little_disk_space_is_rejected_before_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    started = job(RTN, tmp_path / "out")
    refused(DiskFull, lambda: started.check_disk_space(resume=False), "1.0 MB free", "make room")
    assert not started.work_folder.path.exists()


@pytest.mark.parametrize(
    ("recipe", "mode", "remedy"),
    [
        (AWQ, "round", "--rtn or --fp8 need less"),
        (LEARNED_AWQ, "round", "--rounding-steps 0 needs less"),
        (AWQ, "fold", "use --gguf Q4_K_M alone"),
    ],
)
def test_too_little_memory_is_rejected_before_work(
    recipe: Recipe, mode: LayerMode, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localgen.quant.job.total_memory_bytes", lambda: 1 << 20)
    started = job(recipe, tmp_path / "out", mode=mode)
    said = (remedy, "this machine has 1.0 MB", "a smaller --seq-len")
    refused(OutOfMemory, lambda: started.report_estimate(lambda _: None), *said)


def test_a_run_is_not_started_or_resumed_while_it_goes_on(tmp_path: Path) -> None:
    out, events = tmp_path / "out", 0

    def resume_in_between(event: object) -> None:
        nonlocal events
        if isinstance(event, ProgressEvent) and event.step == "quantizing":
            events += 1
            for resume in (True, False):
                again = partial(job(RTN, out).run, lambda _: None, resume=resume)
                refused(InvalidRequest, again, "another localgen is writing to", "--out")

    job(RTN, out).run(resume_in_between, resume=False)
    assert events
    run(RTN, tmp_path / "alone")
    assert files(out) == files(tmp_path / "alone")


def test_full_disk_during_a_run_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    started = job(RTN, out)

    def full(*_: object) -> None:
        raise OSError("3000 requested and 12 written")

    monkeypatch.setattr("localgen.quant.job.write_safetensors", full)
    refused(
        DiskFull,
        lambda: started.run(lambda _: None, resume=False),
        "3000 requested",
        "--resume",
    )
    monkeypatch.undo()
    run(RTN, out, resume=True)
    assert LayerwiseCheckpoint(out).spec.quant is not None


def test_float32_model_is_written_in_float16(model: Path, tmp_path: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    save_file({name: one.float() for name, one in tensors.items()}, model / "model.safetensors")
    out = tmp_path / "out"
    job(RTN, out, folder=model).run(lambda _: None, resume=False)
    assert LayerwiseCheckpoint(out).dtype is torch.float16
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "float16"


def test_all_weights_are_read_by_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checksum requires one pass over all weights."""
    seen: list[QuantizeEvent] = []
    preflight.check_finite_and_checksum(LayerwiseCheckpoint(TINY), seen.append)
    read = [event.done for event in seen if isinstance(event, ProgressEvent)]
    assert read == sorted(read)
    assert read[-1] == LayerwiseCheckpoint(TINY).size_bytes
