"""Embeddings computed between decode steps: correct, complete, fair, and answers continue."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import replace

import numpy as np
import pytest
from fake_runner import VOCAB, FakeRunner, generate, vector_of
from test_engine import LetterTokenizer, Log, expected_text, make, request, until_prepared

from localgen.backends.engine.embeddings import MAX_INPUTS
from localgen.backends.engine.engine import Engine
from localgen.backends.errors import OutOfMemory
from localgen.backends.runner.interface import EmbedSlice, NoRoom, StepFailed
from localgen.backends.types import Embedded, EmbedRequest, Failed, StepEvents


class VectorLog(Log):
    """Log that also keeps the events of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors: dict[str, list[Embedded]] = {}

    def __call__(self, events: StepEvents) -> None:
        super().__call__(events)
        for done in events.embedded:
            assert done.request_id not in self.ends
            self.vectors.setdefault(done.request_id, []).append(done)

    def ended(self) -> int:
        return len(self.ends) + len(self.vectors)


def texts(name: str, *inputs: str | tuple[int, ...]) -> EmbedRequest:
    return EmbedRequest(id=name, inputs=inputs, arrived_s=time.monotonic())


def run(engine: Engine, log: VectorLog, count: int) -> None:
    deadline_s = time.monotonic() + 30
    while log.ended() < count:
        assert time.monotonic() < deadline_s, "not all requests have ended"
        engine.step(wait=False)
    engine.step(wait=False)


def found(log: VectorLog, name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    (done,) = log.vectors[name]
    return np.frombuffer(done.vectors, "<f4").reshape(-1, done.width)


def expected(*inputs: str | tuple[int, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    letters = LetterTokenizer()
    rows = [vector_of(letters.encode(t) if isinstance(t, str) else list(t)) for t in inputs]
    return np.stack([row / np.linalg.norm(row.astype(np.float64)) for row in rows])


def test_vectors_are_normalized_and_in_input_order() -> None:
    log, runner = VectorLog(), FakeRunner()
    engine = make(runner, log)
    inputs = ("hello", (3, 4, 5), "world", "a" * 100)
    engine.submit_embedding(texts("v", *inputs))
    run(engine, log, 1)
    np.testing.assert_allclose(found(log, "v"), expected(*inputs), atol=1e-6)
    (done,) = log.vectors["v"]
    assert done.prompt_tokens == (5, 3, 5, 100)
    assert done.timings.prompt_n == 113
    assert log.stats.requests_total == {"embedded": 1}
    assert log.stats.prompt_tokens_total == 113
    runner.check()


def test_long_texts_are_cut_and_short_ones_computed_together() -> None:
    log, runner = VectorLog(), FakeRunner(batch=16)
    engine = make(runner, log)
    engine.submit_embedding(texts("long", "x" * 50))
    run(engine, log, 1)
    assert [sum(map(len, part)) for part in runner.slices] == [16, 16, 16, 2]
    runner.slices.clear()
    engine.submit_embedding(texts("short", *["abc"] * 11))
    run(engine, log, 2)
    assert [len(part) for part in runner.slices] == [5, 5, 1]
    runner.check()


def test_batch_has_at_most_max_inputs() -> None:
    log, runner = VectorLog(), FakeRunner(batch=128)
    engine = make(runner, log)
    engine.submit_embedding(texts("v", *["a"] * 100))
    run(engine, log, 1)
    assert max(len(part) for part in runner.slices) == MAX_INPUTS
    assert sum(len(part) for part in runner.slices) == 100


def test_large_request_does_not_block_others() -> None:
    log, runner = VectorLog(), FakeRunner(batch=16)
    engine = make(runner, log)
    engine.submit_embedding(texts("many", *["abcdefgh"] * 200))
    while len(runner.slices) < 5:
        engine.step(wait=False)
    engine.submit_embedding(texts("one", "hi"))
    until_prepared(engine)
    run(engine, log, 1)
    assert "one" in log.vectors
    assert len(runner.slices) < 100
    run(engine, log, 2)
    runner.check()


def test_answers_go_on_meanwhile_step_by_step() -> None:
    log, runner = VectorLog(), FakeRunner()
    engine = make(runner, log)
    for i in range(4):
        engine.submit(request(f"{i}", f"prompt {i}", max_tokens=60, ignore_eos=True))
    while not log.text:
        engine.step(wait=False)
    slices, steps = len(runner.slices), len(runner.steps)
    engine.submit_embedding(texts("v", *["word " * 10] * 8))
    until_prepared(engine)
    while "v" not in log.vectors:
        engine.step(wait=False)
        slices_now, steps_now = len(runner.slices) - slices, len(runner.steps) - steps
        assert slices_now <= steps_now, "never two slices between two steps"
    assert not log.ends, "the answers were not waited for"
    run(engine, log, 5)
    for i in range(4):
        whole = b"".join(LetterTokenizer().piece(t) for t in _answer(f"prompt {i}", 60))
        assert log.text[f"{i}"] == whole.decode()
    np.testing.assert_allclose(found(log, "v"), expected(*["word " * 10] * 8), atol=1e-6)
    runner.check()


def _answer(prompt: str, count: int) -> list[int]:
    tokens = LetterTokenizer().encode(prompt)
    return generate(tokens, len(tokens) + count, ends=False)


class SlowRunner(FakeRunner):
    """Takes a millisecond per token of a text."""

    def embed(
        self, inputs: list[list[int]], max_tokens: Callable[[], int]
    ) -> Generator[EmbedSlice, None, None]:
        for done in super().embed(inputs, max_tokens):
            time.sleep(done.num_tokens / 1000)
            yield done


def test_beside_answers_a_slice_takes_half_of_the_target() -> None:
    log, runner = VectorLog(), SlowRunner(batch=512, kv_tokens=2048)
    engine = make(runner, log, itl_target_ms=100)
    engine.submit(request("chat", "hello", max_tokens=100, ignore_eos=True))
    engine.submit_embedding(texts("first", "x" * 64))  # from which it learns
    engine.submit_embedding(texts("v", "y" * 1500))
    until_prepared(engine)
    run(engine, log, 3)
    cut = [sum(map(len, part)) for part in runner.slices]
    beside = [size for size in cut[3:] if size < 512]
    assert beside, cut
    # 50 ms are 50 tokens here; sleep() takes slightly longer
    assert all(16 <= size <= 50 for size in beside[:-1]), cut


@pytest.mark.parametrize(
    ("inputs", "code", "says"),
    [
        ((), "invalid_request", "input is empty"),
        (("",), "invalid_request", "input is empty"),
        (("a", ""), "invalid_request", "input[1] is empty"),
        (("a", (1, VOCAB)), "invalid_request", "input[1] is outside the vocabulary of 97"),
        (("x" * 257,), "context_length_exceeded", "input is 257 tokens, the context is 256"),
        (("a", (1,) * 300), "context_length_exceeded", "input[1] is 300 tokens"),
        (("x" * 70_000,), "context_length_exceeded", "70,000 characters, the context is 256"),
    ],
)
def test_bad_inputs_fail_with_a_reason(inputs: tuple[str, ...], code: str, says: str) -> None:
    log, runner = VectorLog(), FakeRunner()
    engine = make(runner, log)
    engine.submit_embedding(texts("bad", *inputs))
    engine.submit_embedding(texts("good", "hello"))
    run(engine, log, 2)
    (end,) = log.ends["bad"]
    assert isinstance(end, Failed)
    assert end.code == code
    assert says in end.message
    assert (end.param or "").startswith("input")
    assert "good" in log.vectors


def test_cancel_between_slices_ends_the_request() -> None:
    log, runner = VectorLog(), FakeRunner(batch=16)
    engine = make(runner, log)
    engine.submit_embedding(texts("goes", "x" * 200))
    while len(runner.slices) < 3:
        engine.step(wait=False)
    assert runner.embedding == 1
    engine.submit_embedding(texts("stays", "hello"))
    engine.cancel("goes")
    engine.cancel("unknown")
    run(engine, log, 2)
    (end,) = log.ends["goes"]
    assert isinstance(end, Failed)
    assert end.code == "cancelled"
    assert len(runner.slices) == 4, "nothing more was computed of it"
    assert "stays" in log.vectors
    assert log.stats.requests_total == {"cancelled": 1, "embedded": 1}
    runner.check()


def test_every_request_ends_once_under_random_cancels_from_other_threads() -> None:
    log, runner = VectorLog(), FakeRunner(kv_tokens=128, max_seqs=5, batch=24)
    engine = make(runner, log, max_queue=1000)

    def client(kind: str, count: int) -> None:
        rng = random.Random(kind)
        for i in range(count):
            name = f"{kind}{i}"
            if kind.startswith("v"):
                words = ["w" * rng.randint(1, 60) for _ in range(rng.randint(1, 9))]
                engine.submit_embedding(texts(name, *words))
            else:
                engine.submit(request(name, "p" * rng.randint(1, 60), max_tokens=20))
            if rng.random() < 0.4:
                time.sleep(rng.random() / 500)
                engine.cancel(name)
                engine.cancel(name)

    threads = [
        threading.Thread(target=client, args=(kind, 100), daemon=True)
        for kind in ("va", "vb", "c", "d")
    ]
    for thread in threads:
        thread.start()
    run(engine, log, 400)
    ends = [*map(len, log.ends.values()), *map(len, log.vectors.values())]
    assert ends == [1] * 400
    runner.check()


class CrowdedRunner(FakeRunner):
    """Has room for one text at a time, and none while an answer runs."""

    refusals = 0

    def embed(
        self, inputs: list[list[int]], max_tokens: Callable[[], int]
    ) -> Generator[EmbedSlice, None, None]:
        if self.cache or len(inputs) > 1:
            self.refusals += 1
            raise NoRoom
        yield from super().embed(inputs, max_tokens)


def test_without_room_batches_shrink_then_wait_for_answers() -> None:
    log, runner = VectorLog(), CrowdedRunner()
    engine = make(runner, log)
    engine.submit(request("chat", "hello", max_tokens=30, ignore_eos=True))
    while not log.text:
        engine.step(wait=False)
    engine.submit_embedding(texts("v", "a", "b", "c"))
    engine.submit_embedding(texts("w", "d"))
    until_prepared(engine)
    run(engine, log, 3)
    assert runner.refusals > 20
    assert log.text["chat"]
    np.testing.assert_allclose(found(log, "v"), expected("a", "b", "c"), atol=1e-6)
    np.testing.assert_allclose(found(log, "w"), expected("d"), atol=1e-6)
    runner.check()


class FullRunner(FakeRunner):
    def embed(
        self, inputs: list[list[int]], max_tokens: Callable[[], int]
    ) -> Generator[EmbedSlice, None, None]:
        if len(inputs[0]) > 9:
            raise OutOfMemory("too long for the memory there is")
        if len(inputs[0]) > 5:
            raise NoRoom
        yield from super().embed(inputs, max_tokens)


def test_input_that_never_fits_fails_alone() -> None:
    log, runner = VectorLog(), FullRunner()
    engine = make(runner, log)
    engine.submit_embedding(texts("long", "x" * 12))
    run(engine, log, 1)
    engine.submit_embedding(texts("none", "x" * 7))
    run(engine, log, 2)
    engine.submit_embedding(texts("good", "hi"))
    run(engine, log, 3)
    for name, says in (("long", "too long for"), ("none", "no room for the text")):
        (end,) = log.ends[name]
        assert isinstance(end, Failed)
        assert end.code == "out_of_memory"
        assert says in end.message
    assert "good" in log.vectors


class BrokenRunner(FakeRunner):
    def embed(
        self, inputs: list[list[int]], max_tokens: Callable[[], int]
    ) -> Generator[EmbedSlice, None, None]:
        for done in super().embed(inputs, max_tokens):
            yield done
            raise StepFailed("the device is gone")


def test_a_failed_slice_ends_every_request_with_the_reason() -> None:
    log, runner = VectorLog(), BrokenRunner()
    engine = make(runner, log)
    engine.submit(request("chat", "hello", max_tokens=200, ignore_eos=True))
    engine.submit_embedding(texts("v", "x" * 100))
    engine.submit_embedding(texts("w", "x"))
    until_prepared(engine)
    with pytest.raises(StepFailed, match="the device is gone"):
        engine.run()
    for name in ("chat", "v", "w"):
        (end,) = log.ends[name]
        assert isinstance(end, Failed)
        assert end.code == "engine_died"


class NanRunner(FakeRunner):
    def embed(
        self, inputs: list[list[int]], max_tokens: Callable[[], int]
    ) -> Generator[EmbedSlice, None, None]:
        for done in super().embed(inputs, max_tokens):
            yield done if done.vectors is None else replace(done, vectors=done.vectors * np.nan)


def test_vectors_that_are_not_numbers_are_an_error() -> None:
    log = VectorLog()
    engine = make(NanRunner(), log)
    engine.submit_embedding(texts("v", "hello", "world"))
    run(engine, log, 1)
    (end,) = log.ends["v"]
    assert isinstance(end, Failed)
    assert "NaN or infinity" in end.message


class NoEmbedder(FakeRunner):
    embed = None  # type: ignore[assignment]


def test_runner_without_embeddings_rejects_the_request() -> None:
    log = VectorLog()
    engine = make(NoEmbedder(), log)
    engine.submit_embedding(texts("v", "hello"))
    run(engine, log, 1)
    (end,) = log.ends["v"]
    assert isinstance(end, Failed)
    assert (end.code, end.param) == ("invalid_request", "model")


def test_more_requests_than_may_wait_are_refused() -> None:
    log = VectorLog()
    engine = make(FakeRunner(), log, max_queue=2)
    for i in range(5):
        engine.submit_embedding(texts(f"{i}", "hello"))
    until_prepared(engine)
    run(engine, log, 5)
    codes = [end.code for ends in log.ends.values() for end in ends if isinstance(end, Failed)]
    assert codes == ["queue_full"] * 3


def test_an_embedding_model_refuses_to_chat() -> None:
    log, runner = VectorLog(), FakeRunner()
    runner.limits = replace(runner.limits, can_generate=False)
    engine = make(runner, log)
    engine.submit(request("chat", "hello"))
    engine.submit_embedding(texts("v", "hello"))
    run(engine, log, 2)
    (end,) = log.ends["chat"]
    assert isinstance(end, Failed)
    assert (end.code, end.param) == ("invalid_request", "model")
    assert "is an embedding model" in end.message
    assert expected_text("hello", 6) not in log.text.values()
    assert "v" in log.vectors
