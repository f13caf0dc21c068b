"""lm-evaluation-harness scores a served model as transformers does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip(
    "lm_eval.models.openai_completions",
    reason="lm-evaluation-harness is not installed, which needs 500 MB: pip install 'lm_eval[api]'",
)

import torch
from lm_eval.api.instance import Instance  # type: ignore[import-not-found]
from lm_eval.models.openai_completions import (  # type: ignore[import-not-found]
    LocalCompletionsAPI,
)
from real_server import real_server
from transformers import AutoModelForCausalLM, AutoTokenizer

TINY = Path(__file__).parents[1] / "localgen/models/tiny"
NOISE_PER_TOKEN = 0.02  # llama.cpp keeps keys and values in 16 bits
PAIRS = [
    ("What is 17 + 25?", " The answer is 42."),
    ("Once upon a time", " there was a cat."),
    ("17 + 25 =", " 42"),
    ("The cat", " sat on the mat, and the dog ran."),
]
TEXTS = ["Once upon a time there was a cat. " * 3, "17 + 25 = 42"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with real_server() as server:
        yield f"{server.url}/v1/completions"


class Forced:
    """The model in transformers."""

    def __init__(self) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(TINY)
        self._model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def score(self, tokens: list[int], start: int) -> tuple[float, bool]:
        """Logprob of the tokens from `start` on, and whether each is the most likely one."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([tokens])).logits[0, start - 1 : -1]
        after = torch.tensor(tokens[start:])
        logprobs = torch.log_softmax(logits.double(), -1).gather(-1, after[:, None])
        return float(logprobs.sum()), bool((logits.argmax(-1) == after).all())


@pytest.mark.parametrize("tokenized", [True, False], ids=["tokens", "text"])
def test_its_likelihoods_are_those_of_transformers(url: str, tokenized: bool) -> None:
    forced = Forced()
    harness = LocalCompletionsAPI(
        base_url=url,
        model="tiny",
        tokenizer=str(TINY),
        tokenizer_backend="huggingface",
        tokenized_requests=tokenized,
        max_length=512,
        batch_size=2,
    )
    asked = [Instance("loglikelihood", {}, pair, at) for at, pair in enumerate(PAIRS)]
    for (context, text), (logprob, is_greedy) in zip(
        PAIRS, harness.loglikelihood(asked), strict=True
    ):
        tokens, start = forced.encode(context + text), len(forced.encode(context))
        exact, is_best = forced.score(tokens, start)
        assert logprob == pytest.approx(exact, abs=NOISE_PER_TOKEN * (len(tokens) - start))
        assert is_greedy == is_best
    rolling = [Instance("loglikelihood_rolling", {}, (text,), at) for at, text in enumerate(TEXTS)]
    for text, logprob in zip(TEXTS, harness.loglikelihood_rolling(rolling), strict=True):
        tokens = [harness.prefix_token_id, *forced.encode(text)]
        exact, _ = forced.score(tokens, 1)
        assert logprob == pytest.approx(exact, abs=NOISE_PER_TOKEN * len(tokens))
