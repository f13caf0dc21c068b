"""Decoder and engine on a GPU: graphs, running ahead, drafts, cancelled requests, loading."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from drafting import always_draft

from benchmarks.answers import Answer
from benchmarks.gpu_parts.decoder_checks import NEARLY_BEST, CheckedModel, decoders
from benchmarks.gpu_parts.device import Device
from benchmarks.gpu_parts.loaded import WatchedRunner, engine_session, watched_runner
from benchmarks.gpu_parts.modes import DEPENDENT_MODE, MODES, Mode
from benchmarks.gpu_parts.processes import ROOT
from benchmarks.gpu_parts.shapes import CHECKED, PLAIN_TINY, Shape
from benchmarks.session import GREEDY
from localgen.backends.cuda.kv.page_pool import PAGE_TOKENS
from localgen.backends.cuda.model.decoder import KVCache
from localgen.backends.cuda.steps.graph_capture import GraphCapture
from localgen.backends.engine.prefix_tiers import PrefixTiers
from localgen.backends.engine.speculation.draft_model import ModelDrafter
from localgen.backends.engine.speculation.drafter import Drafter
from localgen.backends.engine.speculation.ngram import NgramDrafter
from localgen.backends.kv_store.store import PrefixStore
from localgen.backends.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu
SEED = 1
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=SEED)
ANSWER = 24
ALL_MODES = (*MODES, DEPENDENT_MODE)
every_mode = pytest.mark.parametrize("mode", ALL_MODES, ids=[mode.name for mode in ALL_MODES])


def runner_of(
    model: CheckedModel,
    device: Device,
    mode: Mode,
    kv_tokens: int = 4096,
    store: PrefixStore | None = None,
) -> WatchedRunner:
    return watched_runner(
        *(model.spec, model.weights, device),
        kv_tokens=kv_tokens,
        graphs=mode.graphs,
        ahead=mode.ahead,
        dependent=mode.dependent,
        store=store,
    )


def assert_nearly_best(
    model: CheckedModel, texts: Sequence[list[int]], answers: Sequence[Answer]
) -> None:
    """Every greedy token is one that the float64 reference could have chosen."""
    for text, answer in zip(texts, answers, strict=True):
        assert model.below_best(text, answer.tokens) <= NEARLY_BEST


def assert_whole(runner: WatchedRunner) -> None:
    runner.kv_cache.check()
    assert runner.usage().used == 0


def test_a_capture_that_fails_leaves_the_others_and_the_allocator_whole(device: Device) -> None:
    if not device.is_gpu:
        pytest.skip("captures need a GPU")
    total = torch.zeros(1000, device="cuda")
    capture = GraphCapture(1 << 20)
    before = capture(lambda: total.add_(torch.ones_like(total)))
    for _ in range(2):
        with pytest.raises(RuntimeError):
            capture(torch.cuda.synchronize)  # which is not allowed, and ends the capture
        torch.cuda.empty_cache()
    after = capture(lambda: total.add_(torch.ones_like(total)))
    for replay in (before, after, before):
        replay()
    assert total.tolist() == [3] * 1000


@pytest.mark.parametrize("shape", CHECKED, ids=[shape.name for shape in CHECKED])
def test_decoders_equal_their_references(device: Device, shape: Shape) -> None:
    """Prompts in parts, graphs against eager steps, greedy text in every mode."""
    checks = list(decoders(device, SEED, shape))
    assert len(checks) > len(MODES)
    assert [check.line() for check in checks if not check.passed] == []


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_steps_launched_ahead_change_no_text(
    model: CheckedModel, device: Device, params: SamplingParams
) -> None:
    """Bit for bit: with one request at a time, the same kernels compute both."""
    found = {}
    for mode in ALL_MODES:
        with engine_session(runner_of(model, device, mode), model.spec.vocab_size) as session:
            answers = [session.ask([text], ANSWER, params)[0] for text in model.texts]
        found[mode] = [answer.tokens for answer in answers]
    for graphs in (True, False):
        assert found[Mode(graphs, ahead=True)] == found[Mode(graphs, ahead=False)]
    assert found[DEPENDENT_MODE] == found[MODES[0]]


@every_mode
def test_a_prefix_comes_back_from_ram_as_it_was_computed(
    model: CheckedModel, device: Device, mode: Mode
) -> None:
    """While another request decodes, so that the copies are between steps in flight."""
    store = PrefixStore(b"", ram_bytes=1 << 30, disk=None)
    runner = runner_of(model, device, mode, kv_tokens=512, store=store)
    text, other = ([number, *model.texts[0]] * 40 for number in (1, 2))
    text, other = text[:300], other[:480]
    with engine_session(runner, model.spec.vocab_size, store=store) as session:
        for _ in range(2):  # a prefix of this length is kept if it is used again
            (computed,) = session.ask([text], ANSWER)
        session.ask([other], ANSWER)
        running = session.submit(model.texts[1], 4 * ANSWER)
        (restored,) = session.ask([text], ANSWER)
        (tier,) = restored.finished.timings.restored
        assert tier.tokens > 250
        session.run([running])
        answers = [restored, computed, running]
        assert_nearly_best(model, [text, text, model.texts[1]], answers)
        assert_whole(runner)


def test_a_prefix_that_is_pushed_out_comes_back(
    model: CheckedModel, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages are written to by the next steps while they are copied."""
    monkeypatch.setattr(PrefixTiers, "save_while_busy", lambda _: None)
    monkeypatch.setattr(PrefixTiers, "prepare", lambda _: False)
    store = PrefixStore(b"", ram_bytes=1 << 30, disk=None)
    runner = runner_of(model, device, MODES[0], kv_tokens=512, store=store)
    text, other = ([number, *model.texts[0]] * 4 for number in (1, 2))
    text, other = text[:300], other[:320]
    with engine_session(runner, model.spec.vocab_size, store=store) as session:
        for _ in range(2):  # a prefix of this length is kept if it is used again
            (computed,) = session.ask([text], ANSWER)
        (between,) = session.ask([other], ANSWER)
        (restored,) = session.ask([text], ANSWER)
        timings = restored.finished.timings
        (tier,) = timings.restored
        assert timings.cache_n == 288, "18 whole pages"
        assert tier.tokens >= 7 * PAGE_TOKENS, "the other prompt took 8 of them"
        assert_nearly_best(model, [text, text, other], [restored, computed, between])
        assert_whole(runner)


def test_pages_may_be_written_while_they_are_copied(model: CheckedModel, device: Device) -> None:
    """The copy has what they held then, and the host waits for no work on the device."""
    cache = KVCache.zeros(model.spec, 8, device=device.torch, dtype=torch.int8)
    keys, work = cache.layers[0].keys, torch.ones(4096 if device.is_gpu else 8, device=device.torch)
    num_in_flight = 0
    for value in range(1, 9):
        for _ in range(300):  # some milliseconds on a GPU
            work = work * torch.outer(work, work).mean(0).clamp(0, 1)
        keys.fill_(value)
        copy = cache.read_pages([5, 2])
        num_in_flight += not copy.is_done
        keys.zero_()
        rows = copy.wait()
        assert (rows[:, : keys[0].nbytes] == value).all()
        assert copy.is_done
    # the first copies allocate pinned memory, which may wait
    assert (num_in_flight > 4) is device.is_gpu


@pytest.mark.parametrize("kind", ["n-gram", "draft model"])
@every_mode
def test_drafts_change_no_text(
    model: CheckedModel, device: Device, mode: Mode, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_draft(monkeypatch)
    drafter: Drafter = NgramDrafter()
    draft_runner = None
    if kind == "draft model":
        draft_runner = runner_of(model, device, Mode(mode.graphs, ahead=False))
        drafter = ModelDrafter(draft_runner, "the same model")
    runner = runner_of(model, device, mode)
    texts = [text[:12] * 4 for text in model.texts]  # the n-gram drafter proposes a repetition
    with engine_session(runner, model.spec.vocab_size, [drafter]) as session:
        assert_nearly_best(model, texts, session.ask(texts, ANSWER))
        speculation = session.stats.speculation
        assert_whole(runner)
    assert speculation.draft_tokens_total > 0
    if draft_runner is not None:
        assert speculation.accepted_tokens_total > 0
        assert_whole(draft_runner)


@every_mode
def test_the_pool_is_whole_after_cancels(model: CheckedModel, device: Device, mode: Mode) -> None:
    """And later answers are right."""
    runner = runner_of(model, device, mode)
    with engine_session(runner, model.spec.vocab_size) as session:
        for steps in (0, 1, 2, 5, 9):
            answers = [session.submit(text, 100) for text in model.texts]
            for _ in range(steps):
                session.step()
            session.cancel(answers[::2])
            session.run(answers[1::2])
            assert_whole(runner)
        assert_nearly_best(model, model.texts, session.ask(model.texts, ANSWER))


@every_mode
def test_sequences_that_wait_for_memory_go_on(
    model: CheckedModel, device: Device, mode: Mode
) -> None:
    runner = runner_of(model, device, mode, kv_tokens=256)
    with engine_session(runner, model.spec.vocab_size) as session:
        answers = session.ask(model.texts, 60)
        assert session.stats.num_preemptions_total > 0, "the pool was too small for all"
        assert_nearly_best(model, model.texts, answers)
        assert_whole(runner)


def test_a_checkpoint_is_loaded_and_answers(device: Device, tmp_path: Path) -> None:
    """In a process of its own, with all of the loader's defaults."""
    for package in ("jinja2", "safetensors", "tokenizers"):
        pytest.importorskip(package)
    from benchmarks.gpu_parts.checkpoint import write_checkpoint

    write_checkpoint(tmp_path / "model", PLAIN_TINY.spec, device)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.gpu_parts.first_token"),
            *(str(tmp_path / "model"), str(time.monotonic())),
            *([] if device.is_gpu else ["--cpu"]),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["first_token_s"] > 0
