"""Embeddings of llama.cpp models equal those of llama_cpp's high-level class."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf_files as files
import llama_cpp
import numpy as np
import psutil
import pytest
from models import TINY_GGUF, Bench, questions
from test_engine_embedding import VectorLog, found, run

from localgen.backends.engine.embeddings import l2_normalize
from localgen.backends.engine.engine import Engine
from localgen.backends.engine.input_processor import InputProcessor
from localgen.backends.engine.loaded_model import LoadedModel
from localgen.backends.errors import InvalidRequest, OutOfMemory
from localgen.backends.llamacpp import embeddings
from localgen.backends.llamacpp.free_cores import FreeCores
from localgen.backends.llamacpp.loader import load_llamacpp_model
from localgen.backends.llamacpp.runner import LlamaRunner
from localgen.backends.memory.system import RESERVED_BYTES
from localgen.backends.model_info import LoadOptions, ModelLoadRequest
from localgen.backends.runner.interface import Embedder, EmbeddingArray
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import EmbedRequest

TEXTS = (
    "The sun is a star.",
    "a",
    "How many legs has a spider? Eight, I think, but please do count them.",
    "<|im_end|> is text here, ünïcode 🙂 too",
)
MEAN = llama_cpp.LLAMA_POOLING_TYPE_MEAN
CLS = llama_cpp.LLAMA_POOLING_TYPE_CLS
LAST = llama_cpp.LLAMA_POOLING_TYPE_LAST
RANK = llama_cpp.LLAMA_POOLING_TYPE_RANK
# products and cached values have 16 bits and are added in another order
TOLERANCE = 1e-3


def loaded(path: Path, **options: Any) -> LoadedModel:
    asked = LoadOptions(threads=1, **options)
    return load_llamacpp_model(ModelLoadRequest("m", str(path), asked), lambda _share: None)


def causal(target: Path, pooling: int | None = None) -> Path:
    changes: dict[str, files.Change] = {}
    if pooling is not None:
        changes["llama.pooling_type"] = (pooling, files.UINT32)
    return files.rewrite(target, changes)


def theirs(path: Path, texts: tuple[str, ...], pooling: int) -> EmbeddingArray:
    model = llama_cpp.Llama(
        str(path),
        embedding=True,
        verbose=False,
        n_threads=1,
        n_ctx=0,
        n_batch=2048,  # it cuts longer texts off without a word
        n_ubatch=2048,
        pooling_type=pooling,
    )
    vectors = np.array(model.embed(list(texts), normalize=True), np.float32)
    model.close()
    return vectors


def ours(model: LoadedModel, texts: tuple[str, ...], most: int = 512) -> EmbeddingArray:
    assert isinstance(model.runner, Embedder)
    inputs = [model.tokenizer.encode_for_embedding(text) for text in texts]
    *_, last = model.runner.embed(inputs, lambda: most)
    assert last.vectors is not None
    return l2_normalize(last.vectors)


@pytest.mark.parametrize("pooling", [None, MEAN, CLS, LAST])
@pytest.mark.parametrize("make", [causal, files.bert])
def test_vectors_equal_llama_cpp_python(
    tmp_path: Path, make: Callable[[Path, int | None], Path], pooling: int | None
) -> None:
    path = make(tmp_path / "model.gguf", pooling)
    model = loaded(path)
    found = ours(model, TEXTS)
    assert found.shape == (len(TEXTS), model.info.embedding_width)
    reference = theirs(path, TEXTS, MEAN if pooling is None else pooling)
    np.testing.assert_allclose(found, reference, atol=TOLERANCE)
    # and what it is compared with depends on text and pooling
    assert np.abs(reference[0] - reference[2]).max() > 0.05
    model.runner.close()


def test_pooling_is_seen(tmp_path: Path) -> None:
    vectors = []
    for pooling in (MEAN, CLS, LAST):
        model = loaded(causal(tmp_path / "model.gguf", pooling))
        vectors.append(ours(model, TEXTS[:1])[0])
        model.runner.close()
    assert np.abs(vectors[0] - vectors[1]).max() > 0.05
    assert np.abs(vectors[1] - vectors[2]).max() > 0.05


@pytest.fixture(scope="module")
def tiny() -> Iterator[LoadedModel]:
    model = loaded(TINY_GGUF)
    yield model
    model.runner.close()


@pytest.mark.parametrize("most", [1, 7, 100])
def test_vectors_do_not_depend_on_slicing(tiny: LoadedModel, most: int) -> None:
    np.testing.assert_allclose(ours(tiny, TEXTS, most), ours(tiny, TEXTS), atol=TOLERANCE)


def test_vectors_do_not_depend_on_batch_mates(tmp_path: Path, tiny: LoadedModel) -> None:
    for model in (tiny, loaded(files.bert(tmp_path / "bert.gguf"))):
        alone = np.concatenate([ours(model, (text,)) for text in TEXTS])
        np.testing.assert_allclose(ours(model, TEXTS), alone, atol=TOLERANCE)


def test_inputs_longer_than_a_slice_and_the_first_context_equal_llama_cpp_python(
    tiny: LoadedModel,
) -> None:
    long = ("one two three four five six seven eight nine ten " * 60,)
    tokens = len(tiny.tokenizer.encode_for_embedding(long[0]))
    assert tokens > max(embeddings.SLICE_TOKENS, embeddings.MIN_CONTEXT_TOKENS)
    reference = theirs(TINY_GGUF, long, MEAN)
    np.testing.assert_allclose(ours(tiny, long, 10_000), reference, atol=TOLERANCE)
    np.testing.assert_allclose(ours(tiny, TEXTS), theirs(TINY_GGUF, TEXTS, MEAN), atol=TOLERANCE)


def test_closing_early_leaves_no_state(tiny: LoadedModel) -> None:
    assert isinstance(tiny.runner, Embedder)
    tokens = tiny.tokenizer.encode_for_embedding(TEXTS[2])
    slices = tiny.runner.embed([tokens, tokens], lambda: 5)
    next(slices)
    next(slices)
    slices.close()
    np.testing.assert_allclose(ours(tiny, TEXTS), theirs(TINY_GGUF, TEXTS, MEAN), atol=TOLERANCE)


def test_no_context_is_made_before_it_is_needed_and_a_long_one_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(embeddings, "MAX_KEPT_CONTEXT_TOKENS", 600)
    model = loaded(TINY_GGUF)
    assert isinstance(model.runner, LlamaRunner)
    vectors = model.runner._embedder
    assert vectors._handle is None
    ours(model, TEXTS)
    assert vectors._handle
    ours(model, ("word " * 700,))
    assert vectors._handle is None
    ours(model, TEXTS)
    model.runner.close()
    assert vectors._handle is None


def test_as_many_threads_compute_as_there_are_free_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FreeCores, "count", lambda self: 2)
    request = ModelLoadRequest("m", str(TINY_GGUF), LoadOptions())
    model = load_llamacpp_model(request, lambda _share: None)
    assert isinstance(model.runner, LlamaRunner)
    ours(model, TEXTS)
    assert llama_cpp.llama_n_threads(model.runner._embedder._handle) == 2
    model.runner.close()


def test_without_memory_it_is_refused_with_both_numbers(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Little:
        available = RESERVED_BYTES + 1000

    monkeypatch.setattr(psutil, "virtual_memory", Little)
    with pytest.raises(
        OutOfMemory, match=r"embedding 1,\d+ tokens at once: needs \d\.\d MB, 1\.0 KB"
    ):
        ours(tiny, ("word " * 1400,))


def test_memory_is_flat() -> None:
    model, process = loaded(TINY_GGUF), psutil.Process()
    for number in range(1, 61):
        ours(model, (*TEXTS, "word " * (10 * number)))
        if number == 30:
            before = process.memory_info().rss
    assert process.memory_info().rss - before < 20e6
    model.runner.close()


def test_a_causal_model_that_ranks_says_so(tmp_path: Path) -> None:
    model = loaded(causal(tmp_path / "rank.gguf", RANK))
    with pytest.raises(InvalidRequest, match=r"rank\.gguf is a reranking model without"):
        ours(model, TEXTS)
    model.runner.close()


# -- in an engine -----------------------------------------------------------------------------


def test_vectors_and_answers_do_not_affect_each_other() -> None:
    bench = Bench(LoadOptions(threads=1))
    greedy = SamplingParams(temperature=0, max_tokens=60)
    chats = questions(4)
    alone = [reply.text for reply in bench.ask(chats, greedy)]
    log = VectorLog()
    publish = bench.engine._outbox.publish_events

    def both(events: Any) -> None:
        publish(events)
        log(events)

    bench.engine._outbox.publish_events = both
    names = [bench.submit(chat, greedy) for chat in chats]
    bench.engine.submit_embedding(
        EmbedRequest(id="v", inputs=TEXTS * 5, arrived_s=time.monotonic())
    )
    replies = bench.run(names)
    run(bench.engine, log, 1)
    different = sum(a.text != b for a, b in zip(replies, alone, strict=True))
    assert different <= 1, "rounding may tip one, see test_llamacpp_runner"
    reference = theirs(TINY_GGUF, TEXTS, MEAN)
    np.testing.assert_allclose(found(log, "v"), np.tile(reference, (5, 1)), atol=TOLERANCE)
    bench.close()


def test_an_encoder_in_an_engine(tmp_path: Path) -> None:
    path = files.bert(tmp_path / "bert.gguf", CLS)
    model, log = loaded(path), VectorLog()
    intake = InputProcessor(
        limits=model.runner.limits,
        tokenizer=model.tokenizer,
        template=model.template,
        defaults=model.info.sampling,
    )
    engine = Engine(model.runner, intake, itl_target_ms=1000, max_queue=9, publish=log)
    engine.submit_embedding(EmbedRequest(id="v", inputs=TEXTS * 10))
    engine.submit_embedding(EmbedRequest(id="full", inputs=((5,) * 64,)))
    engine.submit_embedding(EmbedRequest(id="long", inputs=((5,) * 65,)))
    run(engine, log, 3)
    reference = theirs(path, TEXTS, CLS)
    np.testing.assert_allclose(found(log, "v"), np.tile(reference, (10, 1)), atol=TOLERANCE)
    assert found(log, "full").shape == (1, 32)
    (end,) = log.ends["long"]
    assert "input is 65 tokens, the context is 64" in getattr(end, "message", "")
    model.runner.close()
