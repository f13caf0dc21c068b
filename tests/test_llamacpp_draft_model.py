"""Draft models on llama.cpp: which ones are accepted, and that answers stay the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draft_models import DRAFT_GGUF, other_end, other_token, short_context
from drafting import always_draft
from gguf_files import bert, short_convolutions
from models import TINY_GGUF, LoadedBench, noisy, questions

from localgen.backends.engine.draft_loading import create_drafters
from localgen.backends.engine.loaded_model import LoadedModel
from localgen.backends.errors import LocalgenError
from localgen.backends.llamacpp.loader import load_llamacpp_model
from localgen.backends.llamacpp.runner import LlamaRunner
from localgen.backends.model_info import DraftModelRequest, LoadOptions, ModelLoadRequest
from localgen.backends.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=60, logprobs=2)
NOISE, MAX_NOISY = 0.02, 2


def loaded(
    path: Path, target: Path = TINY_GGUF, *, optional: bool = False, **options: object
) -> LoadedModel:
    asked = LoadOptions(draft=str(path), threads=2, **options)  # type: ignore[arg-type]
    draft = DraftModelRequest("small", str(path), optional)
    return load_llamacpp_model(
        ModelLoadRequest("tiny", str(target), asked, draft=draft), lambda share: None
    )


def refusal(path: Path, **more: object) -> str:
    with pytest.raises(LocalgenError) as raised:
        loaded(path, **more)  # type: ignore[arg-type]
    assert "\n" not in raised.value.message
    return raised.value.message


@pytest.mark.parametrize("options", [{}, {"parallel": 4, "ctx": 512}])
def test_answers_are_the_same_in_fewer_steps(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    always_draft(monkeypatch)
    plain = LoadedBench(
        load_llamacpp_model(
            ModelLoadRequest("tiny", str(TINY_GGUF), LoadOptions(threads=2)), lambda _: None
        )
    )
    expected = plain.ask(questions(12), GREEDY)
    plain.close()
    model = loaded(DRAFT_GGUF, **options)
    bench = LoadedBench(model, create_drafters(model))
    replies = bench.ask(questions(12), GREEDY)
    assert noisy(replies, expected, NOISE) <= MAX_NOISY
    told = bench.stats.speculation
    assert told.drafters == ("n-gram", "small")
    assert told.accepted_tokens_total > 0.4 * told.draft_tokens_total > 0
    assert {name for reply in replies for name in reply.finished.timings.draft_by} >= {"small"}
    bench.engine.stop()
    bench.engine.run()
    assert model.draft is not None
    assert model.draft.runner.usage().used == 0, "its pool is whole"
    bench.close()


def test_one_thread_computes_for_both() -> None:
    model = loaded(DRAFT_GGUF)
    assert model.draft is not None
    target, draft = model.runner, model.draft.runner
    assert isinstance(target, LlamaRunner)
    assert isinstance(draft, LlamaRunner)
    assert target._context.executor is draft._context.executor
    draft.close()
    assert target._context.executor.submit(int).result() == 0, "it is the target's to end"
    target.close()


def test_it_is_as_large_as_the_target_and_counted_apart() -> None:
    model = loaded(DRAFT_GGUF, kv_tokens=4096, parallel=8)
    assert model.draft is not None
    own, other = model.runner.limits, model.draft.runner.limits
    assert (own.max_seqs, own.kv_tokens, own.max_len) == (
        other.max_seqs,
        other.kv_tokens,
        other.max_len,
    )
    info = model.info.draft
    assert info is not None
    assert info.memory.kv == info.kv_bytes == model.info.kv_bytes // 3  # 2 layers of 6
    assert model.info.memory.kv == model.info.kv_bytes
    assert info.memory.weights == pytest.approx(info.size_bytes, rel=0.01)


def test_the_pools_are_sized_together() -> None:
    def room(path: Path | None) -> int:
        options = LoadOptions(parallel=1, threads=1, ctx=2048, draft=str(path or "ngram"))
        draft = DraftModelRequest("small", str(path)) if path else None
        request = ModelLoadRequest("tiny", str(TINY_GGUF), options, 90_000_000, draft)
        return load_llamacpp_model(request, lambda share: None).info.kv_tokens

    assert 2048 <= room(TINY_GGUF) < 0.7 * room(None)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (other_token, "small cannot draft for tiny: token 1 is '<|sesame|>' there and"),
        (other_end, "its EOS token is <|endoftext|>, that of tiny <|im_end|>"),
        (bert, "small cannot draft: it is an embedding model"),
        (short_convolutions, "keeps recurrent state that cannot be rewound"),
        (lambda path: path, "no.gguf"),
        (lambda path: Path(__file__), "test_llamacpp_draft_model.py"),
    ],
)
def test_unsuitable_draft_models_are_rejected_with_a_reason(
    make: Callable[[Path], Path], said: str, tmp_path: Path
) -> None:
    path = make(tmp_path / "no.gguf")
    assert said in refusal(path)
    model = loaded(path, optional=True)
    assert model.draft is None
    assert model.info.draft is None
    assert model.info.options.draft == "ngram"
    (note,) = (note for note in model.info.notes if "n-gram drafter" in note)
    assert said in note
    model.runner.close()


def test_targets_without_drafting_reject_a_draft_model(tmp_path: Path) -> None:
    encoder, recurrent = bert(tmp_path / "bert.gguf"), short_convolutions(tmp_path / "lfm.gguf")
    assert "cannot use a draft model" in refusal(DRAFT_GGUF, target=encoder)
    assert "lfm.gguf, which keeps recurrent state" in refusal(DRAFT_GGUF, target=recurrent)
    assert "--no-prefix-cache" in refusal(DRAFT_GGUF, prefix_cache=False)
    assert loaded(DRAFT_GGUF, encoder, optional=True).info.options.draft == "ngram"


def test_unusual_draft_models_leave_a_note(tmp_path: Path) -> None:
    assert "small is no smaller than the target model" in " ".join(loaded(TINY_GGUF).info.notes)
    short = loaded(short_context(tmp_path / "short.gguf", 256))
    assert "small was trained for 256 tokens and does not draft beyond them" in short.info.notes
    assert short.draft is not None
    assert short.draft.runner.limits.max_len == 256
