"""Perplexity and KL divergence, streamed, equal the plain computation."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hf_folders import TINY
from models import TINY_GGUF

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

import torch
from cuda_models import Model, make, random_text
from torch import Tensor

from localgen.backends.errors import InvalidRequest, LoadFailed, ModelNotFound
from localgen.backends.formats.hf.tokenizer import HfTokenizer
from localgen.quant import evaluate
from localgen.quant.calibrate.text_windows import calibration_windows, held_out_windows
from localgen.quant.evaluate_gguf import gguf_metrics
from localgen.quant.files.layerwise_checkpoint import LayerwiseCheckpoint
from localgen.quant.job import QuantizeJob
from localgen.quant.preflight import prepare_quantization
from localgen.quant.request.recipe import CalibrationConfig, Recipe

VOCAB = 4096


@pytest.fixture(scope="module")
def tokenizer() -> HfTokenizer:
    return HfTokenizer.from_folder(TINY, VOCAB)


@pytest.fixture(scope="module")
def ids(tokenizer: HfTokenizer) -> Tensor:
    return held_out_windows(None, tokenizer, 64, 5).ids


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("rounded") / "tiny-rtn"
    ready = prepare_quantization(TINY, Recipe(method="rtn"), CalibrationConfig(), "cpu")
    QuantizeJob("tiny", ready, out).run(lambda _: None, resume=False)
    return out


def all_logits(folder: Path, ids: Tensor) -> Tensor:
    """By the engine's own decoder: float64 [windows, length, vocab]."""
    model = Model(folder)
    found = [model.step([(n % 4, 0, row)])[0] for n, row in enumerate(ids.tolist())]
    return torch.stack(found).double()


def plain(ids: Tensor, original: Tensor, other: Tensor) -> tuple[float, float]:
    """Perplexity of the other, and mean KL(original || other)."""
    p, q = original[:, :-1].log_softmax(-1), other[:, :-1].log_softmax(-1)
    likelihood = q.gather(-1, ids[:, 1:, None])
    return math.exp(-float(likelihood.mean())), float((p.exp() * (p - q)).sum(-1).mean())


def test_losses_are_those_of_the_plain_computation(
    ids: Tensor, rounded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "_HEAD_ROWS", 1000)
    monkeypatch.setattr(evaluate, "_HEAD_TOKENS", 50)
    monkeypatch.setattr(evaluate, "_BATCH_TOKENS", 128)
    original, other = (
        evaluate.compute_final_states(LayerwiseCheckpoint(path), ids) for path in (TINY, rounded)
    )
    first, second = evaluate.compute_metrics([original, other])
    logits = [all_logits(path, ids) for path in (TINY, rounded)]
    assert first.kl is None
    assert first.perplexity == pytest.approx(plain(ids, logits[0], logits[0])[0], rel=1e-4)
    perplexity, kl = plain(ids, *logits)
    assert second.perplexity == pytest.approx(perplexity, rel=1e-4)
    assert second.kl == pytest.approx(kl, rel=1e-3)
    assert kl > 0.01


@pytest.mark.parametrize("name", ["gemma2", "qwen3 moe", "phi4 mini"])
def test_perplexity_of_other_architectures(name: str, tmp_path: Path) -> None:
    make(name, tmp_path)
    ids = torch.tensor([random_text(seed=n, length=30) for n in range(3)])
    (loss,) = evaluate.compute_metrics(
        [evaluate.compute_final_states(LayerwiseCheckpoint(tmp_path), ids)]
    )
    logits = all_logits(tmp_path, ids)
    assert loss.perplexity == pytest.approx(plain(ids, logits, logits)[0], rel=1e-3)


def test_models_with_different_tokens_have_no_kl(ids: Tensor, rounded: Path) -> None:
    original = evaluate.compute_final_states(LayerwiseCheckpoint(TINY), ids)
    other = evaluate.compute_final_states(LayerwiseCheckpoint(rounded), ids[:3])
    assert evaluate.compute_metrics([original, other])[1].kl is None


def test_a_gguf_file_by_its_own_logits(ids: Tensor) -> None:
    original = evaluate.compute_final_states(LayerwiseCheckpoint(TINY), ids)
    (loss,) = evaluate.compute_metrics([original])
    seen: list[int] = []
    found = gguf_metrics(TINY_GGUF, original, on_window=seen.append)
    assert found.perplexity == pytest.approx(loss.perplexity, rel=5e-3)
    assert found.kl is not None
    assert 0 <= found.kl < 1e-3
    assert seen == [1, 2, 3, 4, 5]


def test_file_that_is_not_gguf_is_rejected(ids: Tensor, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + b"\0" * 100)
    with pytest.raises(LoadFailed, match=r"x\.gguf"):
        gguf_metrics(path, evaluate.compute_final_states(LayerwiseCheckpoint(TINY), ids))


def test_equal_seeds_give_equal_windows(tokenizer: HfTokenizer) -> None:
    asked = CalibrationConfig(samples=8, seq_len=128, seed=3)
    one, again = (calibration_windows(asked, tokenizer) for _ in range(2))
    other = calibration_windows(CalibrationConfig(samples=8, seq_len=128, seed=4), tokenizer)
    assert one.ids.shape == (8, 128)
    assert torch.equal(one.ids, again.ids)
    assert one.digest == again.digest != other.digest


def test_calibration_text_from_a_file(tokenizer: HfTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("The tide turned at six. " * 40)
    windows = calibration_windows(CalibrationConfig(path=path, samples=99, seq_len=16), tokenizer)
    assert windows.source == "notes.txt"
    # all of the text, in whole windows only
    assert 10 < len(windows.ids) < 99


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        (b"Short.", InvalidRequest, "bad.txt has 4 tokens, one sequence has 64"),
        (b"caf\xe9" * 1000, InvalidRequest, "not UTF-8 text at byte 3"),
        (None, ModelNotFound, "cannot read the text"),
    ],
)
def test_unusable_texts_are_rejected(
    content: bytes | None,
    kind: type[Exception],
    message: str,
    tokenizer: HfTokenizer,
    tmp_path: Path,
) -> None:
    path = tmp_path / "bad.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(kind, match=message):
        calibration_windows(CalibrationConfig(path=path, seq_len=64), tokenizer)
