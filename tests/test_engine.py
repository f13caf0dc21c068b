"""The engine loop: every request ends exactly once, with the right text."""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Sequence as Seq
from pathlib import Path

import pytest
from fake_runner import END, VOCAB, FakeRunner, generate
from kv_blocks import NAMESPACE, STATE_BYTES, disk_tier, state_of
from serving import wait_until

from localgen.backends.engine import engine as engine_loop
from localgen.backends.engine import stats
from localgen.backends.engine.engine import Engine
from localgen.backends.engine.input_processor import InputProcessor
from localgen.backends.engine.speculation.drafter import Drafter
from localgen.backends.engine_stats import EngineStats
from localgen.backends.kv_store import writer
from localgen.backends.kv_store.blocks import BLOCK_TOKENS
from localgen.backends.kv_store.store import PrefixStore
from localgen.backends.runner.interface import Chunk, NoRoom, SampledTokens, StepFailed
from localgen.backends.runner.sequence import Sequence
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.text.template import ChatTemplate
from localgen.backends.types import Failed, Finished, Message, Request, StepEvents


class LetterTokenizer:
    """A token is a letter; the same letter for every 26th id."""

    vocab_size = VOCAB
    eos_token_ids = frozenset({END})
    bos = ""
    eos = ""
    infill_tokens = None

    def encode(self, text: str) -> list[int]:
        return [1 + ord(letter) % (VOCAB - 1) for letter in text]

    def encode_for_embedding(self, text: str) -> list[int]:
        return self.encode(text)

    def piece(self, token: int) -> bytes:
        return bytes([ord("a") + token % 26])


class Log:
    """Events that an engine published."""

    def __init__(self) -> None:
        self.text: dict[str, str] = defaultdict(str)
        self.ends: dict[str, list[Finished | Failed]] = defaultdict(list)
        self.stats = EngineStats()

    def __call__(self, events: StepEvents) -> None:
        for delta in events.deltas:
            assert delta.request_id not in self.ends, "text after the end"
            self.text[delta.request_id] += delta.text
        ends: tuple[Finished | Failed, ...] = (*events.finished, *events.failed)
        for end in ends:
            self.ends[end.request_id].append(end)
        self.stats = events.stats or self.stats


def make(
    runner: FakeRunner,
    log: Log,
    *,
    max_queue: int = 100,
    itl_target_ms: float = 1e9,
    drafters: Seq[Drafter] = (),
    prefix_store: PrefixStore | None = None,
) -> Engine:
    intake = InputProcessor(
        limits=runner.limits,
        tokenizer=LetterTokenizer(),
        template=ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}"),
        defaults=SamplingParams(),
    )
    return Engine(
        runner,
        intake,
        itl_target_ms=itl_target_ms,
        max_queue=max_queue,
        publish=log,
        drafters=drafters,
        prefix_store=prefix_store,
    )


def run_until_ended(engine: Engine, log: Log, count: int) -> None:
    deadline_s = time.monotonic() + 30
    while len(log.ends) < count:
        assert time.monotonic() < deadline_s, "not all requests have ended"
        engine.step(wait=False)
    engine.step(wait=False)


def until_prepared(engine: Engine) -> None:
    """Wait until submitted requests are in the loop's inbox; other threads tokenize them."""
    deadline_s = time.monotonic() + 30
    while not (engine._request_preparer.is_idle and engine._embedding_preparer.is_idle):
        assert time.monotonic() < deadline_s, "requests are not prepared"
        time.sleep(0.001)


def request(name: str, prompt: str, **params: object) -> Request:
    given = SamplingParams(**params)  # type: ignore[arg-type]
    return Request(id=name, prompt=prompt, params=given, arrived_s=time.monotonic())


def test_first_token_and_text_are_sent_without_waiting_for_prefill() -> None:
    log, runner = Log(), FakeRunner()
    engine = make(runner, log)
    engine.submit(request("a", "first", max_tokens=150, ignore_eos=True))
    until_prepared(engine)
    engine.step(wait=False)
    (first,) = engine._scheduler.running
    engine.step(wait=False)
    assert len(log.text["a"]) == 1, "the first token is sent with the next step"
    for _ in range(20):
        engine.step(wait=False)
    assert len(log.text["a"]) < 20, "steps of microseconds are sent together"
    engine.submit(request("b", "x" * 40, max_tokens=20, ignore_eos=True))
    until_prepared(engine)
    while not log.text["b"]:
        engine.step(wait=False)
        assert len(log.text["a"]) == len(first.tokens) - first.num_prompt - 1
    assert len(log.text["b"]) == 1
    run_until_ended(engine, log, 2)
    assert [len(log.text[name]) for name in "ab"] == [150, 20]


def expected_text(prompt: str, limit: int) -> str:
    tokenizer = LetterTokenizer()
    tokens = generate(tokenizer.encode(prompt), limit)
    return b"".join(tokenizer.piece(t) for t in tokens if t != END).decode()


def test_answers_are_what_the_model_says() -> None:
    log, runner = Log(), FakeRunner()
    engine = make(runner, log)
    for i in range(10):
        engine.submit(request(f"{i}", f"prompt {i}", max_tokens=30))
    until_prepared(engine)
    run_until_ended(engine, log, 10)
    for i in range(10):
        prompt = f"prompt {i}"
        assert log.text[f"{i}"] == expected_text(prompt, len(prompt) + 30)
        (end,) = log.ends[f"{i}"]
        assert isinstance(end, Finished)
        assert end.prompt_tokens == len(prompt)
        assert end.timings.cache_n + end.timings.prompt_n == len(prompt)
        assert end.timings.predicted_n == end.completion_tokens
    runner.check()
    assert log.stats.running == log.stats.waiting == log.stats.kv_used == 0
    assert sum(log.stats.requests_total.values()) == 10
    assert log.stats.step_sequences[4] > 0, "up to four sequences in one step"


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_a_stop_string_over_several_tokens_ends_the_answer(length: int) -> None:
    log, runner = Log(), FakeRunner()
    engine = make(runner, log)
    whole = expected_text("hello", 60)
    stop = whole[7 : 7 + length]
    engine.submit(request("r", "hello", max_tokens=55, stop=(stop,)))
    run_until_ended(engine, log, 1)
    (end,) = log.ends["r"]
    assert isinstance(end, Finished)
    assert end.reason == "stop"
    assert end.stop == stop
    assert log.text["r"] == whole[: whole.index(stop)]
    runner.check()


def test_stop_token_ids_and_ignore_eos() -> None:
    log, runner = Log(), FakeRunner()
    engine = make(runner, log)
    tokens = generate(LetterTokenizer().encode("hello"), 60)
    engine.submit(request("id", "hello", max_tokens=50, stop_token_ids=(tokens[3],)))
    engine.submit(request("on", "hello", max_tokens=200, ignore_eos=True))
    run_until_ended(engine, log, 2)
    (by_id,), (on,) = log.ends["id"], log.ends["on"]
    assert isinstance(by_id, Finished)
    assert by_id.completion_tokens == tokens.index(tokens[3]) + 1
    assert isinstance(on, Finished)
    assert on.completion_tokens == 200


def test_the_context_is_a_cap_per_request() -> None:
    log, runner = Log(), FakeRunner()
    engine = make(runner, log)
    short = Request(id="r", prompt="hello", ctx=9, params=SamplingParams(ignore_eos=True))
    engine.submit(short)
    run_until_ended(engine, log, 1)
    (end,) = log.ends["r"]
    assert isinstance(end, Finished)
    assert (end.reason, end.ctx, end.completion_tokens) == ("length", 9, 4)
    assert end.notes == ("context full: 9 tokens",)


@pytest.mark.parametrize(
    ("bad", "code", "text"),
    [
        (
            request("r", "x" * 300),
            "context_length_exceeded",
            "the prompt is too long: 300 tokens, the context is 256",
        ),
        (
            request("r", "x" * 66_000),
            "context_length_exceeded",
            "the prompt is too long: 66,000 characters",
        ),
        (
            Request(id="r", messages=(Message("user", "a"),) * 300),
            "context_length_exceeded",
            "the prompt is too long: 300 messages",
        ),
        (Request(id="r", prompt="hi", ctx=1000), "invalid_request", "ctx 1,000 is more than"),
        (request("r", ""), "invalid_request", "the prompt is empty"),
        (request("r", "hi", max_tokens=0), "invalid_request", "max_tokens must be at least 1"),
        (request("r", "hi", logit_bias={VOCAB: 1.0}), "invalid_request", "outside the vocabulary"),
        (request("r", "hi", temperature=-1.0), "invalid_request", "temperature is -1"),
        (request("r", "hi", mirostat=2, top_k=5), "invalid_request", "mirostat replaces top_k"),
        (Request(id="r", messages=()), "invalid_request", "messages is empty"),
        (Request(id="r", messages=(Message("user", "a"),), prompt="b"), "invalid_request", "one"),
        (Request(id="r", prompt_tokens=(1, VOCAB)), "invalid_request", "outside the vocabulary"),
    ],
)
def test_bad_requests_fail_with_a_reason_and_disturb_nobody(
    bad: Request, code: str, text: str
) -> None:
    log, runner = Log(), FakeRunner()
    engine = make(runner, log)
    engine.submit(request("good", "hello", max_tokens=20))
    engine.submit(bad)
    run_until_ended(engine, log, 2)
    (end,) = log.ends["r"]
    assert isinstance(end, Failed)
    assert end.code == code
    assert text in end.message
    assert log.text["good"] == expected_text("hello", 25)


def test_every_request_ends_once_under_random_cancels_from_other_threads() -> None:
    log, runner = Log(), FakeRunner(kv_tokens=128, max_seqs=5, batch=24)
    engine = make(runner, log, max_queue=400)
    names = [f"r{i}" for i in range(300)]

    def client(mine: list[str], seed: int) -> None:
        rng = random.Random(seed)
        for name in mine:
            engine.submit(request(name, "p" * rng.randint(1, 60), max_tokens=rng.randint(1, 40)))
            if rng.random() < 0.4:
                time.sleep(rng.random() / 500)
                engine.cancel(name)
                engine.cancel(name)

    threads = [
        threading.Thread(target=client, args=(names[i::3], i), daemon=True) for i in range(3)
    ]
    for thread in threads:
        thread.start()
    run_until_ended(engine, log, len(names))
    assert all(len(log.ends[name]) == 1 for name in names)
    runner.check()
    assert log.stats.running == log.stats.waiting == 0


def test_queue_full_is_refused_at_once() -> None:
    log, runner = Log(), FakeRunner(max_seqs=1)
    engine = make(runner, log, max_queue=3)
    for i in range(10):
        engine.submit(request(f"{i}", "hello", max_tokens=50))
    engine.submit(request("last", "hello"))
    until_prepared(engine)
    run_until_ended(engine, log, 11)
    codes = [end.code for ends in log.ends.values() for end in ends if isinstance(end, Failed)]
    assert codes
    assert set(codes) == {"queue_full"}


class StingyRunner(FakeRunner):
    """Sometimes raises NoRoom in a planned step, as llama.cpp may."""

    def collect(self, ticket: list[Chunk]) -> list[SampledTokens]:
        if len(self.steps) % 7 == 3 and len(self.cache) > 1:
            self.in_flight = False
            raise NoRoom
        return super().collect(ticket)


def test_no_room_in_a_planned_step_preempts_one_and_loses_nothing() -> None:
    log, runner = Log(), StingyRunner()
    engine = make(runner, log)
    for i in range(6):
        engine.submit(request(f"{i}", f"prompt {i}", max_tokens=30))
    run_until_ended(engine, log, 6)
    for i in range(6):
        assert log.text[f"{i}"] == expected_text(f"prompt {i}", 38)
    assert log.stats.num_preemptions_total > 0
    notes = [note for ends in log.ends.values() for note in getattr(ends[0], "notes", ())]
    assert any("preempted" in note for note in notes)
    runner.check()


class BrokenRunner(FakeRunner):
    def collect(self, ticket: list[Chunk]) -> list[SampledTokens]:
        if len(self.steps) > 5:
            raise StepFailed("the device is gone")
        return super().collect(ticket)


def test_a_failed_step_ends_every_request_with_the_reason() -> None:
    log, runner = Log(), BrokenRunner(max_seqs=2)
    engine = make(runner, log)
    for i in range(4):
        engine.submit(request(f"{i}", "hello", max_tokens=100, ignore_eos=True))
    until_prepared(engine)
    with pytest.raises(StepFailed, match="the device is gone"):
        engine.run()
    assert len(log.ends) == 4
    for ends in log.ends.values():
        (end,) = ends
        assert isinstance(end, Failed)
        assert end.code == "engine_died"
        assert "the device is gone" in end.message


def test_stop_leaves_the_loop() -> None:
    log, runner = Log(), FakeRunner()
    engine = make(runner, log)
    thread = threading.Thread(target=engine.run, daemon=True)
    thread.start()
    engine.stop()
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_recent_samples_are_resorted_at_intervals() -> None:
    window = stats.RecentSamples()
    for value in range(stats.MAX_ALWAYS_SORTED):
        window.add(10.0, float(-value))
    assert window.values(10.0)[0] == 1.0 - stats.MAX_ALWAYS_SORTED
    window.add(10.1, -1000.0)
    assert window.values(10.5)[0] == 1.0 - stats.MAX_ALWAYS_SORTED
    assert window.values(11.0)[0] == -1000.0
    assert window.values(10.1 + stats.WINDOW_S) == [-1000.0]


def test_the_phases_of_a_request_add_up_to_its_life() -> None:
    log, runner = Log(), FakeRunner()
    engine = make(runner, log)
    prompt = "x" * 3 * runner.limits.max_batch_tokens
    engine.submit(request("a", prompt[: runner.limits.max_len // 2], max_tokens=30))
    seen = {}
    while not log.ends:
        engine.step(wait=False)
        engine._flush(idle=True)
        for each in log.stats.sequences:
            seen[each.state] = each
            phases = each.phases
            told = (
                phases.template_ms
                + phases.queue_ms
                + phases.cached_ms
                + phases.prefill_ms
                + phases.first_step_ms
                + phases.decode_ms
            )
            assert told == pytest.approx(each.age_s * 1e3, abs=2.0)
            assert (each.ttft_ms is None) == (each.generated_tokens == 0)
    decoding = seen["decode"]
    assert decoding.phases.first_step_ms > 0
    assert decoding.ttft_ms is not None
    (end,) = log.ends["a"]
    assert isinstance(end, Finished)
    assert end.timings.first_step_ms == decoding.phases.first_step_ms
    assert 0 < end.timings.first_step_ms <= end.timings.prompt_ms
    assert log.stats.ttft_last_ms == pytest.approx(end.timings.ttft_ms, abs=2.0)
    assert log.stats.itl_last_ms > 0


class RestoringRunner(FakeRunner):
    """Restores four tokens of each prompt that begins with `a`, one at a time."""

    def __init__(self, store: PrefixStore) -> None:
        super().__init__()
        self.store = store
        self.loading: dict[Sequence, int] = {}

    def admit(self, seq: Sequence, *, spare: int) -> int:
        if seq.tokens[0] == LetterTokenizer().encode("a")[0]:
            self.loading[seq] = 4
        return super().admit(seq, spare=spare)

    def is_loading(self, seq: Sequence) -> bool:
        return seq in self.loading

    def load_prefix(self, seq: Sequence, until_s: float) -> int:
        self.loading[seq] -= 1
        if not self.loading[seq]:
            del self.loading[seq]
        self.store.record_restored("ram", 1, ms=0.5, compute_ms=875.0)
        self.cache[seq] = seq.tokens[: seq.num_computed + 1]
        return seq.num_computed + 1

    def release(self, seq: Sequence, *, keep: bool) -> None:
        self.loading.pop(seq, None)
        super().release(seq, keep=keep)

    def save_next_block(self) -> bool:
        return False


class SavingRunner(RestoringRunner):
    """Has a prefix of 30 blocks to save."""

    tokens = tuple(range(30 * BLOCK_TOKENS))
    end = 0

    def save_next_block(self) -> bool:
        if self.store.is_full:
            return False
        unsaved = self.store.next_unsaved(list(self.tokens), "", self.end)
        if unsaved is None:
            return False
        self.end = unsaved.start + BLOCK_TOKENS
        return self.store.save(unsaved, lambda: state_of(unsaved.parent, unsaved.tokens))


def test_an_idle_engine_saves_all_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue of the disk holds a tenth of it."""
    monkeypatch.setattr(engine_loop, "IDLE_STATS_INTERVAL_S", 600.0)
    monkeypatch.setattr(writer, "MAX_WAITING_BYTES", 3 * (STATE_BYTES + 4 * BLOCK_TOKENS))
    store = PrefixStore(NAMESPACE, ram_bytes=0, disk=disk_tier(tmp_path))
    log = Log()
    engine = make(SavingRunner(store), log, prefix_store=store)
    loop = threading.Thread(target=engine.run)
    loop.start()
    wait_until(lambda: store.stats()[0].blocks == 30)
    wait_until(lambda: log.stats.kv_tiers and log.stats.kv_tiers[0].blocks == 30)
    assert log.stats.kv_tiers[0].unsaved_tokens == 0
    engine.stop()
    loop.join()


def test_what_came_from_a_tier_is_in_the_statistics_and_the_timings() -> None:
    store = PrefixStore(b"", ram_bytes=1000, disk=None)
    log = Log()
    engine = make(RestoringRunner(store), log, prefix_store=store)
    engine.submit(request("a", "abcdefgh", max_tokens=3, ignore_eos=True))
    engine.submit(request("b", "bcdefgh", max_tokens=3, ignore_eos=True))
    seen: dict[str, str] = {}
    while len(log.ends) < 2:
        engine.step(wait=False)
        engine._flush(idle=True)
        seen |= {each.request_id: each.restored for each in log.stats.sequences}
    assert seen == {"a": "4 tokens from RAM in 2 ms (3 s saved)", "b": ""}
    (a,), (b,) = log.ends["a"], log.ends["b"]
    assert isinstance(a, Finished)
    assert isinstance(b, Finished)
    assert [(each.tier, each.tokens) for each in a.timings.restored] == [("ram", 4)]
    assert b.timings.restored == ()
    (tier,) = log.stats.kv_tiers
    assert (tier.tier, tier.hit_tokens_total, tier.saved_s_total) == ("ram", 4, 3.498)


def test_contexts_are_counted_with_each_step() -> None:
    log, runner = Log(), FakeRunner()
    engine = make(runner, log)
    engine.submit(request("a", "abcdefgh", max_tokens=3, ignore_eos=True))
    run_until_ended(engine, log, 1)
    # the prompt's step sees 8 tokens, those of the second and third token 9 and 10
    assert log.stats.context_tokens_total == 8 + 9 + 10


def test_too_many_messages_are_refused_before_any_work() -> None:
    log, runner = Log(), FakeRunner()
    engine = make(runner, log)
    most = runner.limits.max_len
    for name, count in (("fits", most), ("not", most + 1)):
        messages = tuple(Message("user", "") for _ in range(count))
        engine.submit(Request(id=name, messages=messages, arrived_s=time.monotonic()))
    run_until_ended(engine, log, 2)
    (fits,), (refused,) = log.ends["fits"], log.ends["not"]
    assert isinstance(refused, Failed)
    assert refused.code == "context_length_exceeded"
    assert f"{most + 1:,} messages" in refused.message
    assert isinstance(fits, Failed)
    assert fits.message == "the prompt is empty"
