"""The decoder's logits equal transformers', for every architecture and any chunks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cuda_models import ARCHITECTURES, VOCAB, Model, make
from torch import Tensor

TOLERANCE = 2e-4


@pytest.fixture(scope="module", params=ARCHITECTURES)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Model, list[list[int]], list[Tensor]]:
    """Our model, three texts, and transformers' logits after every token of each."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    theirs = make(request.param, folder)
    generator = torch.Generator().manual_seed(1)
    texts = [
        torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (90, 33, 7)
    ]
    with torch.inference_mode():
        logits = [theirs(torch.tensor([text])).logits[0].float() for text in texts]
    return Model(folder), texts, logits


def same(ours: Tensor, theirs: Tensor) -> None:
    error = (ours - theirs).abs().max().item()
    assert error < TOLERANCE, error


def test_whole_prompt_in_one_step(pair: tuple[Model, list[list[int]], list[Tensor]]) -> None:
    model, texts, logits = pair
    same(model.step([(0, 0, texts[0])])[0], logits[0])


def test_several_prompts_at_once(pair: tuple[Model, list[list[int]], list[Tensor]]) -> None:
    model, texts, logits = pair
    parts = [(number, 0, text) for number, text in enumerate(texts)]
    for ours, theirs in zip(model.step(parts), logits, strict=True):
        same(ours, theirs)


def test_ragged_steps_of_prompts_and_single_tokens(
    pair: tuple[Model, list[list[int]], list[Tensor]],
) -> None:
    """Chunks of all lengths; one text decodes while another's prompt is prefilled."""
    model, texts, logits = pair
    done = [0, 0, 0]
    for widths in ((17, 5, 7), (16, 1, 0), (31, 1, 0), (1, 20, 0), (1, 1, 0), (24, 5, 0)):
        parts = [
            (number, done[number], texts[number][done[number] : done[number] + width])
            for number, width in enumerate(widths)
            if width
        ]
        for (number, start, tokens), ours in zip(parts, model.step(parts), strict=True):
            same(ours, logits[number][start : start + len(tokens)])
            done[number] += len(tokens)
    assert done == [len(text) for text in texts]


def test_a_changed_token_changes_the_logits_after_it(
    pair: tuple[Model, list[list[int]], list[Tensor]],
) -> None:
    model, texts, logits = pair
    other = [*texts[1][:20], texts[1][20] - 1, *texts[1][21:]]
    ours = model.step([(3, 0, other)])[0]
    same(ours[:20], logits[1][:20])
    assert (ours[20:] - logits[1][20:]).abs().amax(-1).min() > TOLERANCE
