"""Embeddings of the CUDA runner, on the CPU: means of transformers' last hidden states."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda_models import make, random_text
from models import TINY_GGUF, questions
from test_cuda_prefix_cache import MODELS
from test_cuda_runner import CudaBench
from test_engine_embedding import VectorLog, found, run
from test_llamacpp_embedding import TEXTS as WORDS
from test_llamacpp_embedding import loaded, ours

from localgen.backends.cuda.embeddings import Pooler, embed_sequences
from localgen.backends.cuda.kv.page_pool import PAGE_TOKENS
from localgen.backends.cuda.kv.paged_cache import PagedCache
from localgen.backends.cuda.model.decoder import Decoder, KVCache
from localgen.backends.cuda.model.weights import load_weights
from localgen.backends.cuda.steps.cuda_graphs import DeviceExecutor
from localgen.backends.engine.embeddings import l2_normalize
from localgen.backends.formats.hf.config import read_hf_config
from localgen.backends.runner.interface import EmbeddingArray, NoRoom
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import EmbedRequest, Failed

TOLERANCE = 2e-4
PAGES = 24
TEXTS = [random_text(seed=seed, length=length) for seed, length in ((1, 90), (2, 7), (3, 33))]
POOLINGS = {
    "mean": {},
    "last": {"pooling_mode_lasttoken": True},
    "cls": {"pooling_mode_cls_token": True},
}


class Loaded:
    """A random transformers model, and the same in our decoder."""

    def __init__(self, name: str, folder: Path, pooler: Pooler | None = None) -> None:
        self.theirs = make(name, folder)
        spec = read_hf_config(folder)
        weights = load_weights(folder, spec, device="cpu", dtype=torch.float32)
        cache = KVCache.zeros(spec, PAGES, device="cpu", dtype=torch.float32)
        for tensor in (part for layer in cache.layers for part in layer.tensors):
            tensor.fill_(torch.nan)  # nothing may be read before it is written
        self.steps = DeviceExecutor(
            Decoder(spec, weights, PAGES * PAGE_TOKENS), cache, use_cuda_graphs=False
        )
        self.room = PagedCache(PAGES, prefix_cache=True)
        self.pooler = pooler or Pooler()

    def vectors(self, texts: list[list[int]], most: int = 1000) -> EmbeddingArray:
        *_, last = embed_sequences(self.steps, self.room, self.pooler, texts, lambda: most)
        assert last.vectors is not None
        self.room.check()
        assert self.room.usage().used == 0
        return last.vectors

    def states(self, text: list[int]) -> Any:
        with torch.inference_mode():
            out = self.theirs.model(torch.tensor([text]))
        return out.last_hidden_state[0].float().numpy()


@pytest.mark.parametrize("name", MODELS)
def test_vectors_are_the_mean_of_transformers_states(name: str, tmp_path: Path) -> None:
    model = Loaded(name, tmp_path)
    means = np.stack([model.states(text).mean(axis=0) for text in TEXTS])
    for most in (1000, 16, 5):
        vectors = model.vectors(TEXTS, most)
        assert np.abs(vectors - means).max() < TOLERANCE
    assert np.abs(l2_normalize(vectors) - l2_normalize(means)).max() < TOLERANCE
    assert vectors.dtype == np.float32


@pytest.mark.parametrize("kind", POOLINGS)
@pytest.mark.parametrize("most", [1000, 6])
def test_pooling_as_sentence_transformers_write_it_down(
    kind: str, most: int, tmp_path: Path
) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(POOLINGS[kind]))
    pooler = Pooler.from_folder(tmp_path)
    assert pooler.pooling == kind
    model = Loaded("llama", tmp_path, pooler)
    counted = {"mean": slice(None), "last": slice(-1, None), "cls": slice(1)}[kind]
    expected = np.stack([model.states(text)[counted].mean(axis=0) for text in TEXTS])
    assert np.abs(model.vectors(TEXTS, most) - expected).max() < TOLERANCE


def test_pages_are_given_back_when_it_ends_early(tmp_path: Path) -> None:
    model = Loaded("llama", tmp_path)
    slices = embed_sequences(model.steps, model.room, model.pooler, TEXTS, lambda: 20)
    next(slices)
    assert model.room.usage().used == (6 + 1 + 3) * PAGE_TOKENS
    slices.close()
    model.room.check()
    assert model.room.usage().free == PAGES * PAGE_TOKENS


def test_inputs_larger_than_the_pool_raise_no_room(tmp_path: Path) -> None:
    model = Loaded("llama", tmp_path)
    with pytest.raises(NoRoom):
        next(embed_sequences(model.steps, model.room, model.pooler, TEXTS * 3, lambda: 1000))
    model.room.check()
    assert model.room.usage().free == PAGES * PAGE_TOKENS


@pytest.mark.parametrize("as_on_gpu", [False, True])
def test_vectors_and_answers_do_not_affect_each_other(as_on_gpu: bool) -> None:
    """Sequences with run-ahead steps, in a pool too small for all requests."""
    chats = questions(6)
    greedy = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    bench = CudaBench(as_on_gpu=as_on_gpu, ctx=160, kv_tokens=600)
    alone = [reply.text for reply in bench.ask_one_by_one(chats, greedy)]
    log, publish = VectorLog(), bench.engine._outbox.publish_events

    def both(events: Any) -> None:
        publish(events)
        log(events)

    bench.engine._outbox.publish_events = both
    texts = ("The sun is a star.", "a", "word " * 100)
    bench.engine.submit_embedding(
        EmbedRequest(id="before", inputs=texts, arrived_s=time.monotonic())
    )
    run(bench.engine, log, 1)
    names = [bench.submit(chat, greedy) for chat in chats]
    while not bench.replies[names[0]].text:
        bench.engine.step(wait=True)
    bench.engine.submit_embedding(
        EmbedRequest(id="beside", inputs=texts * 4, arrived_s=time.monotonic())
    )
    replies = bench.run(names)
    run(bench.engine, log, 2 + len(names))
    different = sum(a.text != b for a, b in zip(replies, alone, strict=True))
    assert different <= 1, "rounding may tip one, see test_cuda_runner"
    np.testing.assert_allclose(
        found(log, "beside"), np.tile(found(log, "before"), (4, 1)), atol=TOLERANCE
    )
    bench.close()


def test_input_longer_than_the_context_is_rejected() -> None:
    bench, log = CudaBench(ctx=160), VectorLog()
    bench.engine._outbox.publish_events = log
    bench.engine.submit_embedding(EmbedRequest(id="fits", inputs=((5,) * 160,)))
    bench.engine.submit_embedding(EmbedRequest(id="long", inputs=((5,) * 161,)))
    run(bench.engine, log, 2)
    assert "fits" in log.vectors
    (end,) = log.ends["long"]
    assert isinstance(end, Failed)
    assert end.code == "context_length_exceeded"
    assert "161 tokens, the context is 160" in end.message
    bench.close()


def test_vectors_equal_the_llama_cpp_backends() -> None:
    model, bench, log = loaded(TINY_GGUF), CudaBench(), VectorLog()
    bench.engine._outbox.publish_events = log
    bench.engine.submit_embedding(EmbedRequest(id="v", inputs=WORDS[:3]))
    run(bench.engine, log, 1)
    # theirs are quantized to eight bits
    np.testing.assert_allclose(found(log, "v"), ours(model, WORDS[:3]), atol=0.02)
    model.runner.close()
    bench.close()
