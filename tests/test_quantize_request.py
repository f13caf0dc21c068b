"""Requests and events of a quantization: encoding for another process, and the form."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hf_folders import TINY, edit

from localgen.backends.errors import InvalidRequest
from localgen.quant import originals
from localgen.quant.originals import scan_originals
from localgen.quant.report import eval_table, verdict_lines, verdict_markdown
from localgen.quant.request.events import (
    EstimateEvent,
    EvalEvent,
    EvalRow,
    FailedEvent,
    FinishedEvent,
    LayersEstimateEvent,
    MethodEstimate,
    NoteEvent,
    ProgressEvent,
    QuantizeEvent,
    RecommendationEvent,
    StoppedEvent,
    UnfinishedEvent,
    combine_estimates,
)
from localgen.quant.request.form import (
    GGUF_CALIBRATIONS,
    QuantizeForm,
    invalid_value_reason,
    method_option,
    unavailable_reason,
    with_option,
)
from localgen.quant.request.recipe import CalibrationConfig, Recipe
from localgen.quant.request.request import (
    EVENT_CODEC,
    REQUEST_CODEC,
    QuantizeRequest,
    default_output,
)
from localgen.quant.request.target import GgufTarget

NEEDS = EstimateEvent("tiny", "awq", "out", 10, 4, 2, 100, 1000, 8, 2000)
EVENTS: tuple[QuantizeEvent | FailedEvent, ...] = (
    NEEDS,
    UnfinishedEvent(2, 6),
    RecommendationEvent(
        (MethodEstimate("--awq", 1, 2, None, "some"), MethodEstimate("--fp8", 3, 4, "GPU", "none")),
        "--fp8",
    ),
    ProgressEvent("measuring tïny", 1, 2, "steps"),
    ProgressEvent("quantizing", 1, 2, "layers", 0.25),
    NoteEvent("a\nb"),
    LayersEstimateEvent("quantizing", 6, 1.4),
    FinishedEvent("out", 6, 0, 1.5, 1.4, 0.2, 7, 8),
    FinishedEvent("out.gguf"),
    EvalEvent((EvalRow("a", "/a", 1, 16.0), EvalRow("b", "/b", 2, 4.0, 1.5, 0.1, None))),
    StoppedEvent(3, 6),
    FailedEvent("no disk", "disk_full"),
)


def test_what_is_finished_can_be_resumed() -> None:
    assert StoppedEvent(1, 6).can_resume
    assert not StoppedEvent(0, 6).can_resume
    assert StoppedEvent(0, 37, "groups of tensors").can_resume, "all layers are done before"


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_events_survive_encoding(event: QuantizeEvent | FailedEvent) -> None:
    assert EVENT_CODEC.decode(EVENT_CODEC.encode(event)) == event


@pytest.mark.parametrize(
    "choice",
    [
        QuantizeForm(),
        QuantizeForm(method="gptq", bits=3, group_size=-1, text="~/mine.txt", out="/x/y"),
        QuantizeForm(method="GGUF", gguf="IQ2_M", is_measured=False),
    ],
)
def test_requests_survive_encoding(choice: QuantizeForm) -> None:
    asked = choice.to_request(resume=True)
    assert REQUEST_CODEC.decode(REQUEST_CODEC.encode(asked)) == asked
    assert asked.resume


def test_invalid_request_is_rejected_when_decoded() -> None:
    content = REQUEST_CODEC.encode(QuantizeForm().to_request())
    assert content.count(b"bits\x04") == 1
    with pytest.raises(InvalidRequest, match="not 5"):
        REQUEST_CODEC.decode(content.replace(b"bits\x04", b"bits\x05"))


def asked(choice: QuantizeForm) -> tuple[Recipe | None, str | None, str]:
    found = choice.to_request()
    return found.recipe, found.gguf, found.mode


FOLDED = Recipe(method="awq", bits=4, group_size=32)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (QuantizeForm(), (Recipe(method="awq", rounding_steps=50), None, "round")),
        (QuantizeForm(is_learned=False), (Recipe(method="awq"), None, "round")),
        (
            QuantizeForm(method="gptq", bits=2, is_learned=False),
            (Recipe(method="gptq", bits=2), None, "round"),
        ),
        (
            QuantizeForm(method="fp8", bits=3, group_size=32, is_learned=False),
            (Recipe(method="fp8", bits=8), None, "round"),
        ),
        (QuantizeForm(method="rtn", bits=8), (Recipe(method="rtn", bits=8), None, "round")),
        (QuantizeForm(method="GGUF"), (None, "Q4_K_M", "observe")),
        (QuantizeForm(method="GGUF", gguf_calibration="scales"), (FOLDED, "Q4_K_M", "fold")),
        (QuantizeForm(method="GGUF", gguf_calibration="importance"), (FOLDED, "Q4_K_M", "observe")),
        (
            QuantizeForm(method="GGUF", gguf_calibration="gptq"),
            (Recipe(method="gptq", group_size=None), "Q4_K_M", "gguf"),
        ),
        (
            QuantizeForm(method="GGUF", gguf="IQ3_S", gguf_calibration="gptq"),
            (FOLDED, "IQ3_S", "observe"),
        ),
        (QuantizeForm(method="GGUF", gguf="IQ1_S"), (FOLDED, "IQ1_S", "observe")),
        (QuantizeForm(method="GGUF", gguf="auto 3 bits"), (FOLDED, "auto", "observe")),
        (
            QuantizeForm(method="GGUF", gguf="F16", gguf_calibration="scales"),
            (None, "F16", "observe"),
        ),
    ],
)
def test_form_is_converted_to_a_request(
    choice: QuantizeForm, expected: tuple[Recipe | None, str | None, str]
) -> None:
    assert asked(choice) == expected


def test_fields_available_per_method() -> None:
    fields = ("gguf", "gguf_calibration", "bits", "group_size", "is_learned", "text")
    closed = {
        method: [
            field for field in fields if unavailable_reason(QuantizeForm(method=method), field)
        ]
        for method in ("awq", "rtn", "fp8", "smoothquant", "GGUF")
    }
    assert closed == {
        "awq": ["gguf", "gguf_calibration"],
        "rtn": ["gguf", "gguf_calibration", "is_learned", "text"],
        "fp8": ["gguf", "gguf_calibration", "bits", "group_size", "is_learned", "text"],
        "smoothquant": ["gguf", "gguf_calibration", "bits", "group_size", "is_learned"],
        "GGUF": ["bits", "group_size", "is_learned", "text"],
    }
    needy = QuantizeForm(method="GGUF", gguf="IQ1_M")
    assert "importance matrix" in invalid_value_reason(needy, "gguf_calibration", "nothing")
    assert invalid_value_reason(needy, "gguf_calibration", "importance") == ""
    assert unavailable_reason(needy, "text") == ""
    assert "GPTQ cannot" in invalid_value_reason(needy, "gguf_calibration", "gptq")
    plain = QuantizeForm(method="GGUF", gguf="Q3_K_S")
    assert invalid_value_reason(plain, "gguf_calibration", "gptq") == ""


def test_choices_have_the_names_of_advice() -> None:
    names = [
        method_option(QuantizeForm(method="gptq", bits=3)),
        method_option(QuantizeForm(method="fp8", bits=3)),
        method_option(QuantizeForm(method="GGUF", gguf="Q8_0")),
        method_option(QuantizeForm(method="GGUF", gguf_calibration="scales")),
        method_option(QuantizeForm(method="GGUF", gguf_calibration="gptq")),
    ]
    assert names == [
        "--gptq --bits 3",
        "--fp8",
        "--gguf Q8_0",
        "--awq --gguf Q4_K_M",
        "--gptq --gguf Q4_K_M",
    ]
    assert with_option(QuantizeForm(), names[-1]).to_request().mode == "gguf"


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("tiny", "tiny-awq-4bit"),
        ("meta-llama/Llama-3.2-1B", "Llama-3.2-1B-awq-4bit"),
        ("llama3.2:1b:safetensors", "llama3.2-1b-awq-4bit"),
        ("/m/qwen/", "qwen-awq-4bit"),
    ],
)
def test_default_output_names(model: str, name: str) -> None:
    assert default_output(model, Recipe(method="awq"), None) == Path(name)


def test_names_of_gguf_files_tell_methods_apart() -> None:
    request = QuantizeRequest(
        model="tiny",
        gguf="q4_k_m",
        calibration=CalibrationConfig(),
        output=None,
        resume=False,
        eval_set=None,
    )
    names = [request.with_method([], calibrate=False).file_type]
    names += [request.with_method([one], calibrate=False).file_type for one in ("awq", "gptq")]
    assert names == ["Q4_K_M", "awq-Q4_K_M", "gptq-Q4_K_M"]
    chosen = replace(request, gguf="auto", target=GgufTarget(bits_per_weight=4))
    assert chosen.with_method(["gptq"], calibrate=False).file_type == "gptq-auto-4bpw"


def test_gguf_output_is_named_for_its_type() -> None:
    assert QuantizeForm(method="GGUF", gguf="Q6_K").output_path == Path("tiny-Q6_K.gguf")
    assert QuantizeForm(out=" ~/x ").output_path == Path("~/x").expanduser()


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("auto", GgufTarget(bits_per_weight=4.5)),
        ("auto 3.4G", GgufTarget(size_bytes=int(3.4 * 2**30))),
        ("AUTO 4 bits", GgufTarget(bits_per_weight=4)),
        ("auto  KL 0.05", GgufTarget(kl=0.05)),
    ],
)
def test_targets_are_chosen_in_one_text(text: str, target: GgufTarget) -> None:
    form = QuantizeForm(method="GGUF", gguf=text)
    assert form.to_request().target == target
    assert form.output_path == Path(f"tiny-auto-{target.label}.gguf")
    assert (form.effective_calibration, form.is_resumable) == ("importance", True)
    assert form.to_request().mode == "observe"
    by_gptq = replace(form, gguf_calibration="gptq")
    assert (by_gptq.to_request().target, by_gptq.to_request().mode) == (target, "gguf")
    assert not unavailable_reason(form, "gguf_calibration")
    reasons = [invalid_value_reason(form, "gguf_calibration", one) for one in GGUF_CALIBRATIONS]
    assert list(map(bool, reasons)) == [True, False, True, False]
    assert QuantizeForm(gguf=text).to_request().target is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("auto 4 bit", "give auto, auto 3.4G, auto 4 bits or auto KL 0.05"),
        ("auto KL small", "give auto, auto 3.4G"),
        ("auto much", "--target-size=much: give a size"),
        ("auto -1 bits", "give a finite number above 0"),
        ("Q4_X", "unknown file type Q4_X"),
    ],
)
def test_wrong_targets_are_said(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        QuantizeForm(method="GGUF", gguf=text).to_request()


def test_combined_estimates() -> None:
    file = EstimateEvent("tiny", "Q4_K_M", "out.gguf", 10, 4, 0, None, 1000, 30, 2000)
    calibration = EstimateEvent("tiny", "weighed", "out.gguf", 10, None, 5, 100, 1000, 20, 2000)
    together = combine_estimates(combine_estimates(None, file), calibration)
    assert (together.description, together.output_bytes) == ("Q4_K_M", 4)
    assert (together.memory_bytes, together.disk_bytes, together.states_bytes) == (100, 30, 5)


def test_empty_columns_are_omitted() -> None:
    rows = (EvalRow("a", "/a", 2_000_000, 16.0, 2.0), EvalRow("b", "/b", 1_000_000, 8.0, 2.1, 0.1))
    assert eval_table(rows) == [
        ("MODEL", "SIZE", "BITS/WEIGHT", "KL", "PERPLEXITY"),
        ("a", "2.0 MB", "16.00", "–", "2.000"),
        ("b", "1.0 MB", "8.00", "0.1000", "2.100 (+5.00 %)"),
    ]
    few = EvalEvent(rows, 3)
    assert verdict_markdown(few)[1] == "| --- | --- | --- | --- | --- |"
    assert verdict_lines(few) == [
        "3 sequences are too few for an interval: raise --eval-samples, or give a longer text"
    ]
    assert verdict_lines(EvalEvent(rows[:1])) == []


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """The built-in model as `tiny` in the working folder, in a cache, and under an alias."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCALGEN_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("LOCALGEN_HF_HUB_CACHE", str(tmp_path / "cache"))
    snapshot = tmp_path / "cache/models--user--repo/snapshots/abc"
    snapshot.mkdir(parents=True)
    for path in folder.iterdir():
        (snapshot / path.name).symlink_to(path)
    (tmp_path / "state").mkdir()
    (tmp_path / "state/models.toml").write_text(f'mine = "{folder}"\nodd = "user/repo"\n')
    return folder


def test_originals_are_found(models: Path) -> None:
    size = (TINY / "model.safetensors").stat().st_size
    found = [(one.name, one.size_bytes, one.source) for one in scan_originals()]
    assert found == [
        ("tiny", size, "built-in"),
        ("mine", size, str(models)),
        ("user/repo", size, "cache"),
        ("./tiny", size, "here"),
    ]


def test_quantized_and_damaged_models_are_not_originals(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(originals, "BUILT_IN_PATH", models / "nowhere.gguf")
    edit(models / "config.json", quantization_config={"quant_method": "awq"})
    assert scan_originals() == []
    (models / "config.json").write_text("{")
    assert scan_originals() == []
    (models.parent / "state/models.toml").write_text("{")
    assert scan_originals() == []
