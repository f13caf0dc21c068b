"""`--gguf auto`: types by measured loss, exact sizes, targets, resuming, rejected options."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from hf_folders import TINY

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

import gguf
import torch
from llama_files import LlamaFile
from quant_models import MODELS, model_folder
from transformers import AutoModelForCausalLM

from localgen.backends.errors import InvalidRequest
from localgen.backends.formats.hf.config import read_hf_config
from localgen.cli import errors
from localgen.cli.main import run_command_line
from localgen.quant.gguf import convert
from localgen.quant.gguf.ggml_rounding import UNWEIGHED_TYPES, WEIGHED_TYPES, round_trip
from localgen.quant.gguf.gptq_rounding import GgufRounding
from localgen.quant.gguf.requantize import make_gguf
from localgen.quant.job import QuantizeJob
from localgen.quant.mixed import sensitivity
from localgen.quant.mixed.groups import GPTQ_LAYER_TYPES, plan_file
from localgen.quant.mixed.sensitivity import SensitivityProbes
from localgen.quant.mixed_job import MeasureKl, MixedGgufJob
from localgen.quant.preflight import prepare_quantization
from localgen.quant.request.events import (
    MixtureEvent,
    NoteEvent,
    OnEvent,
    ProgressEvent,
    QuantizeEvent,
    StoppedEvent,
)
from localgen.quant.request.gguf_types import CODE_TYPES
from localgen.quant.request.recipe import CalibrationConfig, Recipe
from localgen.quant.request.request import GGUF_CALIBRATION_RECIPE
from localgen.quant.request.target import GgufTarget

INVALID = errors.EXIT_STATUS_BY_CODE["invalid_request"]
CALIBRATION = CalibrationConfig(samples=6, seq_len=32)
# between the losses of the small model with the fewest and with the most bits
TARGET_KL = 5e-4
QUICK = ("--samples", "4", "--seq-len", "64", "--eval-samples", "2")


@pytest.fixture(autouse=True)
def few_values(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Errors from few rows, which takes seconds, in a folder without a server."""
    monkeypatch.setattr(sensitivity, "_SAMPLED_VALUES", 1 << 11)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCALGEN_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr("localgen.quant.run.measure_tokens_per_s", lambda path: None)


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose files are written in a second."""
    with pytest.MonkeyPatch.context() as patch:
        family, changes = MODELS["llama"]
        patch.setitem(MODELS, "llama", (family, changes | {"intermediate_size": 64}))
        return model_folder("llama", tmp_path_factory.mktemp("small"))


def unmeasured(path: Path, on_event: object) -> float:
    raise AssertionError(path)


def mixed_job_of(
    target: GgufTarget,
    out: Path,
    folder: Path = TINY,
    measure_kl: MeasureKl = unmeasured,
    *,
    by_gptq: bool = False,
) -> MixedGgufJob:
    recipe = Recipe(method="gptq", group_size=None) if by_gptq else GGUF_CALIBRATION_RECIPE
    ready = prepare_quantization(folder, recipe, CALIBRATION, "cpu")
    shape = plan_file(folder, ready.source.spec, GPTQ_LAYER_TYPES if by_gptq else WEIGHED_TYPES)
    calibration = QuantizeJob("tiny", ready, out, mode="observe")
    return MixedGgufJob(target, shape, calibration, measure_kl)


def test_size_of_a_file_is_known_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_imatrix = plan_file(TINY, read_hf_config(TINY))
    monkeypatch.setattr(convert, "LONGEST_IMATRIX_KEYS", {})  # the file below has none
    shape = plan_file(TINY, read_hf_config(TINY))
    assert shape.header_bytes < with_imatrix.header_bytes
    draw = random.Random(0)
    chosen = {
        group.name: draw.choice([name for name in group.types if name in UNWEIGHED_TYPES])
        for group in shape.groups
    }
    types = {name: chosen[group.name] for group in shape.groups for name, _, _ in group.tensors}
    make_gguf(TINY, tmp_path / "m.gguf", "Q8_0", types=types)
    size = sum(group.num_bytes(chosen[group.name]) for group in shape.groups)
    expected = shape.header_bytes + shape.other_bytes + size
    assert (tmp_path / "m.gguf").stat().st_size == expected
    written = {one.name: one.tensor_type.name for one in gguf.GGUFReader("m.gguf").tensors}
    assert {name: written[name] for name in types} == types
    assert shape.num_weights == sum(one.n_elements for one in gguf.GGUFReader("m.gguf").tensors)


@pytest.mark.parametrize("type_name", ["IQ2_XS", "IQ3_S", "Q3_K", "Q4_1", "Q6_K"])
def test_rounding_is_that_of_the_file(type_name: str, tmp_path: Path) -> None:
    names = [f"blk.{i}.ffn_up.weight" for i in range(6)]
    ffn_up = "model.layers.{}.mlp.up_proj"
    squares = np.random.default_rng(0).random(256, np.float32)
    importance = {ffn_up.format(i): (squares * 8, 8) for i in range(6)}
    make_gguf(
        TINY, tmp_path / "m.gguf", "Q8_0", types=dict.fromkeys(names, type_name),
        imatrix=importance,
    )  # fmt: skip
    tensors = {one.name: one for one in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    stored = tensors[names[3]]
    expected = gguf.dequantize(stored.data, stored.tensor_type)
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    weight = model.model.layers[3].mlp.up_proj.weight.detach().numpy()
    assert np.array_equal(round_trip(weight, type_name, squares), expected)


@pytest.mark.parametrize("group", ["blk.1.attn_q", "blk.4.ffn_up", "token_embd"])
def test_probe_is_the_loss_of_the_whole_model(group: str, tmp_path: Path) -> None:
    """Against transformers, with the group's weights rounded in the whole model."""
    job = mixed_job_of(GgufTarget(bits_per_weight=4), tmp_path / "m.gguf")
    calibration = job.calibration
    calibration.run(lambda event: None, resume=False)
    prepared = calibration.prepared
    assert prepared.windows is not None
    probes = SensitivityProbes(
        prepared.source,
        job.shape.groups,
        prepared.windows.ids,
        calibration.work_folder,
        prepared.device,
    )
    measured = probes.run(lambda event: None)[group]
    changed = {
        "blk.1.attn_q": ["model.layers.1.self_attn.q_proj"],
        "blk.4.ffn_up": ["model.layers.4.mlp.gate_proj", "model.layers.4.mlp.up_proj"],
        "token_embd": ["model.embed_tokens"],
    }[group]
    importance = calibration.input_importance()
    ids = prepared.windows.ids
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
        before = model(ids).logits.log_softmax(-1)
        weights = dict(model.named_parameters())
        for name in changed:
            weight = weights[f"{name}.weight"]
            sums = importance.get(name)
            squares = None if sums is None else sums[0] / np.float32(sums[1])
            kept = round_trip(weight.numpy().copy(), measured.probe_type, squares)
            weight.copy_(torch.from_numpy(kept))
        after = model(ids).logits.log_softmax(-1)
    expected = float((before.exp() * (before - after)).sum(-1).mean())
    # embeddings are rounded to the model's bfloat16 after the probe type
    assert measured.kl == pytest.approx(expected, rel=0.02 if group == "token_embd" else 1e-3)


class Stopped(Exception):
    pass


def test_resumed_run_keeps_finished_groups(tmp_path: Path, small_model: Path) -> None:
    target = GgufTarget(bits_per_weight=5.5)
    whole, again = tmp_path / "whole.gguf", tmp_path / "again.gguf"
    mixed_job_of(target, whole, small_model).run(lambda event: None, resume=False)

    def stop(event: QuantizeEvent) -> None:
        if isinstance(event, ProgressEvent) and event.unit == "steps" and event.done > 12:
            raise Stopped

    with pytest.raises(Stopped):
        mixed_job_of(target, again, small_model).run(stop, resume=False)
    seen: list[int] = []

    def note(event: QuantizeEvent) -> None:
        if isinstance(event, ProgressEvent) and event.step == "measuring sensitivity":
            seen.append(event.done)
        if isinstance(event, NoteEvent):
            notes.append(event.text)

    notes: list[str] = []
    mixed_job_of(target, again, small_model).run(note, resume=True)
    assert notes[0].startswith("measuring the other 6 of 20 groups")
    assert seen[0] == 14
    assert seen[-1] == 20
    assert again.read_bytes() == whole.read_bytes()
    assert not (tmp_path / "again.gguf.partial").exists()


def test_gptq_chooses_the_codes_of_the_chosen_types(
    tmp_path: Path, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside llama.cpp's file of the same types, nothing outside of layers differs."""
    plain, ours = tmp_path / "plain.gguf", tmp_path / "ours.gguf"
    publish = GgufRounding.publish

    def keeping(self: GgufRounding, layer_files: Iterable[Path], output: Path) -> None:
        shutil.copy(self.path, plain)
        publish(self, layer_files, output)

    monkeypatch.setattr(GgufRounding, "publish", keeping)
    job = mixed_job_of(GgufTarget(bits_per_weight=5.5), ours, small_model, by_gptq=True)
    seen: list[QuantizeEvent] = []
    job.run(seen.append, resume=False)
    assert not (tmp_path / "ours.gguf.partial").exists()
    (mixture,) = (one for one in seen if isinstance(one, MixtureEvent))
    assert mixture.by_gptq
    assert mixture.size_bytes == plain.stat().st_size == ours.stat().st_size
    before, after = (gguf.GGUFReader(path).tensors for path in (plain, ours))
    assert {one.tensor_type.name for one in before} & set(CODE_TYPES)
    for tensor, changed in zip(before, after, strict=True):
        assert (tensor.name, tensor.tensor_type) == (changed.name, changed.tensor_type)
        is_same = np.array_equal(tensor.data, changed.data)
        in_layer = tensor.name.startswith("blk.") and "norm" not in tensor.name
        if in_layer and tensor.tensor_type.name in CODE_TYPES:
            assert not is_same, tensor.name
        elif not in_layer:  # Q8_0 in a layer has weights that correct its inputs
            assert is_same, tensor.name


@pytest.mark.parametrize("target", [GgufTarget(bits_per_weight=5.5), GgufTarget(kl=TARGET_KL)])
def test_run_that_was_stopped_in_gptq_goes_on(
    target: GgufTarget, tmp_path: Path, small_model: Path
) -> None:
    whole, again = tmp_path / "whole.gguf", tmp_path / "again.gguf"

    def run(out: Path, on_event: OnEvent, *, resume: bool = False) -> None:
        job = mixed_job_of(target, out, small_model, lambda *_: 0.95 * TARGET_KL, by_gptq=True)
        job.run(on_event, resume=resume)

    run(whole, lambda event: None)

    def interrupt(event: QuantizeEvent) -> None:
        seen.append(event)
        if isinstance(event, ProgressEvent) and (event.step, event.done) == ("quantizing", 1):
            raise KeyboardInterrupt

    seen: list[QuantizeEvent] = []
    with pytest.raises(KeyboardInterrupt):
        run(again, interrupt)
    assert not again.exists()
    stopped = [one for one in seen if isinstance(one, StoppedEvent)]
    assert [(one.done, one.unit) for one in stopped] == [(1, "layers")]
    with pytest.raises(InvalidRequest, match="another recipe"):
        mixed_job_of(target, again, small_model).run(interrupt, resume=True)
    seen.clear()
    run(again, seen.append, resume=True)
    steps = [one for one in seen if isinstance(one, ProgressEvent) and one.step == "quantizing"]
    assert steps[0].done == 1
    notes = [one.text for one in seen if isinstance(one, NoteEvent)]
    assert not any(text.startswith("measuring") for text in notes), "all groups are measured"
    assert again.read_bytes() == whole.read_bytes()
    assert not (tmp_path / "again.gguf.partial").exists()


@pytest.mark.parametrize("step", ["calibrating", "measuring sensitivity", "converting"])
def test_another_run_waits_outside_to_the_end(step: str, tmp_path: Path, small_model: Path) -> None:
    out, target = tmp_path / "m.gguf", GgufTarget(bits_per_weight=5.5)
    refusals: list[object] = []

    def resume_in_between(event: QuantizeEvent) -> None:
        if isinstance(event, ProgressEvent) and event.step.startswith(step) and not refusals:
            with pytest.raises(InvalidRequest, match="another localgen is writing to") as refused:
                mixed_job_of(target, out, small_model).run(lambda event: None, resume=True)
            refusals.append(refused)

    mixed_job_of(target, out, small_model).run(resume_in_between, resume=False)
    assert refusals
    assert out.exists()


def test_another_target_takes_nothing_of_a_candidate(tmp_path: Path, small_model: Path) -> None:
    """The first run is stopped in GPTQ, and the second one has other types."""
    whole, again = tmp_path / "whole.gguf", tmp_path / "again.gguf"

    def run(bits: float, out: Path, on_event: OnEvent = lambda event: None) -> None:
        target = GgufTarget(bits_per_weight=bits)
        mixed_job_of(target, out, small_model, by_gptq=True).run(on_event, resume=True)

    def interrupt(event: QuantizeEvent) -> None:
        if isinstance(event, ProgressEvent) and (event.step, event.done) == ("quantizing", 1):
            raise Stopped

    with pytest.raises(Stopped):
        run(5.2, again, interrupt)
    run(6, again)
    run(6, whole)
    assert again.read_bytes() == whole.read_bytes()


def test_file_that_is_being_measured_is_not_made_again(tmp_path: Path, small_model: Path) -> None:
    def job(measure_kl: MeasureKl) -> MixedGgufJob:
        target = GgufTarget(kl=TARGET_KL)
        return mixed_job_of(target, tmp_path / "m.gguf", small_model, measure_kl, by_gptq=True)

    def interrupted(*_: object) -> float:
        raise Stopped

    with pytest.raises(Stopped):
        job(interrupted).run(lambda event: None, resume=False)
    seen: list[QuantizeEvent] = []
    job(lambda *_: 0.95 * TARGET_KL).run(seen.append, resume=True)
    assert not [one for one in seen if isinstance(one, ProgressEvent) and one.step == "quantizing"]
    assert len(predicted(seen)) == 1
    assert (tmp_path / "m.gguf").is_file()


@pytest.mark.parametrize("by_gptq", [False, True])
@pytest.mark.parametrize(
    ("name", "role"), [("qwen3 moe", "ffn_up"), ("phi3", "attn_qkv"), ("llama", "output")]
)
def test_experts_fused_tensors_and_outputs(
    name: str,
    role: str,
    by_gptq: bool,
    tmp_path: Path,
    open_model: Callable[..., LlamaFile],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, out = tmp_path / "model", tmp_path / "m.gguf"
    folder.mkdir()
    family, changes = MODELS[name]
    sizes = {"intermediate_size": 64, "moe_intermediate_size": 64}
    monkeypatch.setitem(MODELS, name, (family, changes | sizes))
    target, model = GgufTarget(bits_per_weight=6), model_folder(name, folder)
    job = mixed_job_of(target, out, model, by_gptq=by_gptq)
    seen: list[QuantizeEvent] = []
    job.run(seen.append, resume=False)
    (mixture,) = (one for one in seen if isinstance(one, MixtureEvent))
    assert role in mixture.types
    tensors = gguf.GGUFReader(out).tensors
    bits = 8 * sum(int(one.n_bytes) for one in tensors) / sum(one.n_elements for one in tensors)
    assert 5.5 < bits <= 6.01
    opened = open_model(out)
    assert len(opened.greedy_tokens(opened.tokenize("a"), 4)) == 4


def test_rows_that_no_type_divides_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    model_folder("qwen3 moe", folder)
    assert run_command_line(["quantize", str(folder), "--gguf", "auto"]) == INVALID
    assert "blk.0.ffn_down_exps.weight has rows of 40 values" in capsys.readouterr().err


def test_targets_of_size_and_bits(
    tmp_path: Path, open_model: Callable[..., LlamaFile], capsys: pytest.CaptureFixture[str]
) -> None:
    size = ("--target-size", "2300K", "--out", "a.gguf", "--json")
    assert run_command_line(["quantize", "tiny", "--gguf", "auto", *size, *QUICK]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["models"][1]["size_bytes"] <= (tmp_path / "a.gguf").stat().st_size
    assert 0.99 * 2300 * 1024 < (tmp_path / "a.gguf").stat().st_size <= 2300 * 1024
    assert record["mixture"]["predicted_kl"] > 0
    assert len(record["mixture"]["types"]["attn_v"]) == 6
    assert open_model(tmp_path / "a.gguf").greedy("Once upon a time")
    bits = ("--target-bpw", "3.0", "--no-eval", *QUICK[:4])
    assert run_command_line(["quantize", "tiny", "--gguf", "AUTO", *bits]) == 0
    out, err = capsys.readouterr()
    row = out.splitlines()[2].split()
    assert row[0] == "tiny-auto-3bpw.gguf"
    assert 2.97 < float(row[3]) <= 3.0
    assert "types by layer" in err


def test_gptq_with_a_target(
    tmp_path: Path, open_model: Callable[..., LlamaFile], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--target-bpw", "3.2", "--rounding-steps", "2", "--out", "a.gguf", *QUICK)
    assert run_command_line(["quantize", "tiny", "--gguf", "auto", "--gptq", *options]) == 0
    err = capsys.readouterr().err
    assert "types chosen by loss for 3.2 bits per weight, codes by gptq" in err
    assert ", rounding learned in 2 steps" in err
    assert "after the importance matrix and before GPTQ" in err
    assert "calibrating 6 layers takes about" in err
    assert "quantizing 6 layers takes about" in err
    assert " before GPTQ; types by layer:" in err
    assert " on the calibration text before GPTQ, measured " in err
    written = gguf.GGUFReader(tmp_path / "a.gguf").tensors
    layers = [one for one in written if one.name.startswith("blk.") and "norm" not in one.name]
    assert {one.tensor_type.name for one in layers} <= set(GPTQ_LAYER_TYPES)
    assert open_model(tmp_path / "a.gguf").greedy("Once upon a time")


def test_loss_that_misses_is_corrected(tmp_path: Path, small_model: Path) -> None:
    """Losses that are measured at half more than predicted: the second file meets the target."""
    seen: list[QuantizeEvent] = []
    job = mixed_job_of(
        GgufTarget(kl=TARGET_KL),
        tmp_path / "m.gguf",
        small_model,
        lambda *_: 1.5 * predicted(seen)[-1],
    )
    job.run(seen.append, resume=False)
    first, second = predicted(seen)
    assert first <= TARGET_KL < 1.5 * first
    assert 1.5 * second <= TARGET_KL
    assert (tmp_path / "m.gguf").is_file()
    assert not (tmp_path / "m.gguf.partial").exists()
    assert not any("missed" in one.text for one in seen if isinstance(one, NoteEvent))


def test_search_for_a_loss_resumes_with_the_next_file(tmp_path: Path, small_model: Path) -> None:
    """Interrupted between the first file and the second, which is to be its correction."""
    target, out = GgufTarget(kl=TARGET_KL), tmp_path / "m.gguf"
    seen: list[QuantizeEvent] = []

    def interrupted(*_: object) -> float:
        if len(predicted(seen)) > 1:
            raise Stopped
        return 1.5 * predicted(seen)[-1]

    with pytest.raises(Stopped):
        mixed_job_of(target, out, small_model, interrupted).run(seen.append, resume=False)
    assert not out.exists()
    again: list[QuantizeEvent] = []
    job = mixed_job_of(target, out, small_model, lambda *_: 1.5 * predicted(again)[-1])
    job.run(again.append, resume=True)
    assert predicted(again) == predicted(seen)[1:]
    assert out.is_file()
    assert not (tmp_path / "m.gguf.partial").exists()


def test_loss_that_no_file_meets_is_said(tmp_path: Path, small_model: Path) -> None:
    seen: list[QuantizeEvent] = []
    # files get larger, but are measured no better
    job = mixed_job_of(
        GgufTarget(kl=TARGET_KL),
        tmp_path / "m.gguf",
        small_model,
        lambda *_: (2 + 0.1 * len(predicted(seen))) * TARGET_KL,
    )
    job.run(seen.append, resume=False)
    assert "is missed by the best of 3 files" in seen[-1].text  # type: ignore[union-attr]
    # the first one was measured best
    assert len(predicted(seen)) == 4
    assert predicted(seen)[-1] == predicted(seen)[0]
    told = [one.text for one in seen if isinstance(one, NoteEvent) and "KL" in one.text]
    assert [text.endswith("; a better size is tried") for text in told[:3]] == [True, True, False]
    assert told[0].startswith("KL divergence 0.001")


def test_bounds_that_are_named_can_be_targets(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as refused:
        mixed_job_of(GgufTarget(bits_per_weight=40), tmp_path / "m.gguf")
    bounds = re.findall(r"\d\.\d\d", refused.value.message)
    assert len(bounds) == 2
    for bound in map(float, bounds):
        mixed_job_of(GgufTarget(bits_per_weight=bound), tmp_path / "m.gguf")


def predicted(seen: list[QuantizeEvent]) -> list[float]:
    return [one.predicted_kl for one in seen if isinstance(one, MixtureEvent)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target-bpw", "3"], "--target-bpw goes with --gguf auto"),
        (["--gguf", "Q4_K_M", "--target-kl", "0.1"], "--target-kl goes with --gguf auto"),
        (
            ["--gguf", "auto", "--target-size", "3M", "--target-kl", "0.1"],
            "--target-size and --target-kl exclude each other",
        ),
        (["--gguf", "auto", "--target-bpw", "1"], "have 1.78 to 8.51 bits per weight, not 1\n"),
        (["--gguf", "auto", "--target-bpw", "40"], "have 1.78 to 8.51 bits per weight, not 40\n"),
        (["--gguf", "auto", "--target-size", "1M"], "files of this model have 1,4"),
        (["--gguf", "auto", "--target-size", "3.4G"], "bytes, not 3,650,722,"),
        (["--gguf", "Q9"], "unknown file type Q9: use auto or one of F32"),
        (["--gguf", "auto", "--target-size", "big"], "--target-size=big: give a size such as"),
        (
            ["--gguf", "auto", "--target-bpw", "nan"],
            "--target-bpw nan: give a finite number above 0",
        ),
        (["--gguf", "auto", "--target-kl", "0"], "--target-kl 0: give a finite number above 0"),
        (
            ["--gguf", "auto", "--awq"],
            "--awq and --gguf auto exclude each other; --gptq goes with it",
        ),
        (
            ["--gguf", "auto", "--gptq", "--target-bpw", "2"],
            "have 2.65 to 8.51 bits per weight, not 2\n",
        ),
        (["--gguf", "auto", "--target-kl", "0.1", "--no-eval"], "leave out --no-eval"),
    ],
)
def test_wrong_options_are_one_line(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(["quantize", "tiny", *options]) == INVALID
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
