"""A draft model beside a target model in the CUDA runner, on the CPU."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from draft_models import DRAFT_GGUF, other_token
from drafting import always_draft
from fake_capture import FakeCapture
from hf_folders import TINY, edit
from models import LoadedBench, noisy, questions
from test_cuda_runner import texts

from localgen.backends.cuda.loader import load_cuda_model
from localgen.backends.cuda.runner import CudaRunner
from localgen.backends.cuda.steps.cuda_graphs import DeviceExecutor
from localgen.backends.engine.draft_loading import create_drafters
from localgen.backends.engine.loaded_model import LoadedModel
from localgen.backends.errors import LocalgenError
from localgen.backends.model_info import DraftModelRequest, LoadOptions, ModelLoadRequest
from localgen.backends.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=40, logprobs=2)


def loaded(path: Path, *, optional: bool = False, **options: object) -> LoadedModel:
    asked = LoadOptions(device="cpu", draft=str(path), **options)  # type: ignore[arg-type]
    draft = DraftModelRequest("small", str(path), optional)
    return load_cuda_model(
        ModelLoadRequest("tiny", str(TINY), asked, draft=draft), lambda share: None
    )


def refusal(path: Path, **options: object) -> str:
    with pytest.raises(LocalgenError) as raised:
        loaded(path, **options)  # type: ignore[arg-type]
    assert "\n" not in raised.value.message
    return raised.value.message


def test_answers_are_the_same_in_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    always_draft(monkeypatch)
    options = LoadOptions(device="cpu")
    plain = LoadedBench(
        load_cuda_model(ModelLoadRequest("tiny", str(TINY), options), lambda share: None)
    )
    expected = plain.ask(questions(6), GREEDY)
    plain.close()
    model = loaded(DRAFT_GGUF)
    assert model.info.draft is not None
    assert model.info.draft.description.startswith("Llama 2.6M")
    bench = LoadedBench(model, create_drafters(model))
    replies = bench.ask(questions(6), GREEDY)
    assert noisy(replies, expected, 0.02) <= 1
    told = bench.stats.speculation
    assert told.drafters == ("n-gram", "small")
    assert told.accepted_tokens_total > 0.4 * told.draft_tokens_total > 0
    bench.engine.stop()
    bench.engine.run()
    assert model.draft is not None
    assert model.draft.runner.usage().used == 0, "its pool is whole"
    bench.close()


def test_an_idle_engine_captures_steps_of_the_draft_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    always_draft(monkeypatch)
    model, capture = loaded(DRAFT_GGUF), FakeCapture()
    assert model.draft is not None
    assert isinstance(model.draft.runner, CudaRunner)
    executor = model.draft.runner._executor
    assert isinstance(executor, DeviceExecutor)
    executor._use_cuda_graphs, executor._capture = True, capture
    bench = LoadedBench(model, create_drafters(model)[1:])
    expected = bench.ask(questions(1), replace(GREEDY, max_tokens=12))
    assert capture.captures == 0
    while bench.engine._prepare_while_idle():
        pass
    assert capture.captures > 0
    assert texts(bench.ask(questions(1), replace(GREEDY, max_tokens=12))) == texts(expected)
    assert capture.replays > 0
    bench.close()


def test_draft_model_from_a_folder_has_a_pool_as_large(folder: Path) -> None:
    model = loaded(folder, kv_tokens=2048, parallel=4, cache_type_k="int8", cache_type_v="int8")
    assert model.draft is not None
    own, other = model.runner.limits, model.draft.runner.limits
    assert (own.max_seqs, own.kv_tokens, own.max_len) == (4, other.kv_tokens, other.max_len)
    assert model.draft.info.kv_bytes == model.info.kv_bytes, "in the same type"
    assert "small is no smaller than the target model" in " ".join(model.info.notes)


def test_unsuitable_draft_models_are_rejected_with_a_reason(folder: Path, tmp_path: Path) -> None:
    assert "token 1 is '<|sesame|>' there" in refusal(other_token(tmp_path / "other.gguf"))
    assert "does not exist" in refusal(tmp_path / "none")
    assert "small cannot be a draft model with --tp 2" in refusal(DRAFT_GGUF, tp=2)
    assert "--no-prefix-cache" in refusal(DRAFT_GGUF, prefix_cache=False)
    edit(folder / "config.json", architectures=["BertModel"], model_type="bert")
    assert "config.json" in refusal(folder)


def test_missing_optional_draft_model_leaves_a_note(tmp_path: Path) -> None:
    model = loaded(tmp_path / "none", optional=True)
    assert model.draft is None
    assert model.info.options.draft == "ngram"
    assert any("using the n-gram drafter" in note for note in model.info.notes)


def test_a_damaged_draft_model_is_named(tmp_path: Path) -> None:
    damaged = Path(shutil.copy(DRAFT_GGUF, tmp_path / "damaged.gguf"))
    damaged.write_bytes(damaged.read_bytes()[:1_000_000])
    assert "damaged.gguf" in refusal(damaged)
