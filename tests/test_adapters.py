"""LoRA adapters on llama.cpp: their arithmetic, several at once, and whose prefixes are reused."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from draft_models import DRAFT_GGUF
from drafting import always_draft
from hf_folders import write_safetensors
from models import TINY_GGUF, Bench, LoadedBench, Reply, questions

from benchmarks.random_adapter import TINY, RandomAdapter, random_adapter
from localgen.backends.adapters import MAX_LOADED_ADAPTERS, Adapter, AdapterRef, prefix_salt
from localgen.backends.engine.draft_loading import create_drafters
from localgen.backends.engine.speculation.ngram import NgramDrafter
from localgen.backends.formats.hf.safetensors import NumpyCheckpoint
from localgen.backends.llamacpp.loader import load_llamacpp_model
from localgen.backends.model_info import DraftModelRequest, LoadOptions, ModelLoadRequest
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Failed, Message
from localgen.quant.gguf.convert import convert_to_gguf

PARAMS = SamplingParams(temperature=0, max_tokens=24, logprobs=20, ignore_eos=True)
OPTIONS = LoadOptions(threads=1, ctx=1024)
# in 32 bits the arithmetic of B · (A · x) and of (W + B · A) · x differs by rounding only
EXACT = replace(OPTIONS, cache_type_k="f32", cache_type_v="f32", flash_attn="off")
TOLERANCE = 1e-3
SEEDS = (1, 2)
Chat = Sequence[Message]


@pytest.fixture(scope="module")
def adapters() -> list[RandomAdapter]:
    return [random_adapter(seed) for seed in SEEDS]


@pytest.fixture(scope="module")
def refs(
    tmp_path_factory: pytest.TempPathFactory, adapters: list[RandomAdapter]
) -> list[AdapterRef]:
    """The adapters as GGUF files; folders of PEFT have the same names without .gguf."""
    folder = tmp_path_factory.mktemp("adapters")
    found = []
    for seed, adapter in zip(SEEDS, adapters, strict=True):
        adapter.write_gguf(folder / f"{seed}.gguf")
        adapter.write_peft(folder / f"{seed}")
        found.append(AdapterRef(f"a{seed}", str(folder / f"{seed}.gguf")))
    return found


def in_32_bits(folder: Path, *changes: tuple[RandomAdapter, float]) -> Path:
    """The built-in model with adapters merged into its weights, each with its scale."""
    changed = folder / "changed"
    changed.mkdir(parents=True)
    weights, tensors = NumpyCheckpoint(TINY), {}
    for name in weights.names():
        new = weights.read(name).copy()
        for adapter, scale in changes:
            if name.removesuffix(".weight") in adapter.matrices:
                new += np.float32(scale) * adapter.change(name.removesuffix(".weight"))
        tensors[name] = "F32", list(new.shape), new.tobytes()
    write_safetensors(changed / "changed.safetensors", tensors)
    convert_to_gguf(TINY, folder / "model.gguf", "F32", override_folder=changed)
    return folder / "model.gguf"


def ask(bench: Bench, chats: Sequence[Chat], *refs: AdapterRef, **more: object) -> list[Reply]:
    return bench.run([bench.submit(chat, PARAMS, adapters=refs, **more) for chat in chats])


def assert_equal(replies: Sequence[Reply], expected: Sequence[Reply]) -> None:
    """Same texts, and probabilities of the 20 best tokens equal within TOLERANCE."""
    for one, other in zip(replies, expected, strict=True):
        assert one.text == other.text
        for ours, theirs in zip(one.logprobs, other.logprobs, strict=True):
            values = {token.token_id: token.logprob for token in theirs.top}
            for token in ours.top[:10]:
                assert token.logprob == pytest.approx(values[token.token_id], abs=TOLERANCE)


@pytest.mark.parametrize("form", ["gguf", "peft"])
def test_logits_equal_those_of_merged_weights(
    tmp_path: Path, adapters: list[RandomAdapter], refs: list[AdapterRef], form: str
) -> None:
    one, two = refs
    if form == "peft":
        one, two = (replace(ref, path=ref.path.removesuffix(".gguf")) for ref in refs)
    bench, chats = Bench(EXACT, in_32_bits(tmp_path / "base")), questions(4)
    plain = ask(bench, chats)
    for number, scales in enumerate(((1.0, 0.0), (-0.5, 0.0), (0.7, 0.4))):
        changes = zip(adapters, scales, strict=True)
        merged = Bench(EXACT, in_32_bits(tmp_path / f"{number}", *changes))
        ours = ask(bench, chats, replace(one, scale=scales[0]), replace(two, scale=scales[1]))
        assert_equal(ours, ask(merged, chats))
        assert [reply.text for reply in ours] != [reply.text for reply in plain]
        merged.close()
    bench.close()


def test_peft_with_rslora_and_alphas_of_its_own(
    tmp_path: Path, adapters: list[RandomAdapter]
) -> None:
    adapter = adapters[0]
    config = adapter.config | {"use_rslora": True, "alpha_pattern": {"mlp.down_proj": 4.0}}
    RandomAdapter(adapter.matrices, config).write_peft(tmp_path / "peft")
    # PEFT: alpha / sqrt(rank) is twice alpha / rank for rank 4
    factors = {name: 1.0 if "down_proj" in name else 2.0 for name in adapter.matrices}
    matrices = {
        name: (a, b * np.float32(factors[name])) for name, (a, b) in adapter.matrices.items()
    }
    changed = RandomAdapter(matrices, adapter.config)
    bench = Bench(EXACT, in_32_bits(tmp_path / "base"))
    merged = Bench(EXACT, in_32_bits(tmp_path / "merged", (changed, 0.5)))
    chats = questions(2)
    ref = AdapterRef("a", str(tmp_path / "peft"), 0.5)
    assert_equal(ask(bench, chats, ref), ask(merged, chats))
    bench.close()
    merged.close()


def test_two_adapters_and_the_base_at_once(refs: list[AdapterRef], tmp_path: Path) -> None:
    path, chats = in_32_bits(tmp_path), questions(6)
    bench = Bench(EXACT, path)
    sets: list[tuple[AdapterRef, ...]] = [(), (refs[0],), (refs[1],)]
    alone = [ask(bench, chats, *each) for each in sets]
    assert len({reply.text for replies in alone for reply in replies}) > 2 * len(chats)
    bench.close()

    bench, used = Bench(EXACT, path), set()
    launch = bench.runner.launch

    def watched(chunks: Sequence) -> object:  # type: ignore[type-arg]
        (adapters,) = {chunk.seq.adapters for chunk in chunks}
        used.add(adapters)
        return launch(chunks)

    bench.runner.launch = watched  # type: ignore[assignment,method-assign]
    names = {
        (at, number): bench.submit(chat, PARAMS, adapters=each)
        for number, chat in enumerate(chats)
        for at, each in enumerate(sets)
    }
    bench.run(names.values())
    for (at, number), name in names.items():
        assert_equal([bench.replies[name]], [alone[at][number]])
    assert len(used) == 3
    assert sorted((each.name, each.running) for each in bench.stats.adapters) == [
        ("a1", 0),
        ("a2", 0),
    ]
    bench.close()


def test_drafts_change_no_text(refs: list[AdapterRef], monkeypatch: pytest.MonkeyPatch) -> None:
    chats = [*questions(3), [Message("user", "Repeat: one two three one two three one two")]]
    plain = Bench(EXACT)
    expected = [ask(plain, chats, *each) for each in ((), refs[:1], refs[1:])]
    plain.close()
    always_draft(monkeypatch)
    bench = Bench(EXACT, drafters=[NgramDrafter()])
    names = [
        bench.submit(chat, PARAMS, adapters=tuple(each))
        for each in ((), refs[:1], refs[1:])
        for chat in chats
    ]
    replies = bench.run(names)
    assert [r.text for r in replies] == [r.text for each in expected for r in each]
    assert sum(reply.finished.timings.draft_n for reply in replies) > 0
    bench.close()


def test_a_draft_model_knows_no_adapter_and_changes_no_text(
    refs: list[AdapterRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    chats, sets = questions(3), ((), refs[:1], refs[1:])
    plain = Bench(EXACT)
    expected = [reply.text for each in sets for reply in ask(plain, chats, *each)]
    plain.close()
    always_draft(monkeypatch)
    options = replace(EXACT, draft=str(DRAFT_GGUF))
    draft = DraftModelRequest("small", str(DRAFT_GGUF))
    request = ModelLoadRequest("tiny", str(TINY_GGUF), options, draft=draft)
    model = load_llamacpp_model(request, lambda _: None)
    bench = LoadedBench(model, create_drafters(model))
    names = [bench.submit(chat, PARAMS, adapters=tuple(each)) for each in sets for chat in chats]
    replies = bench.run(names)
    assert [reply.text for reply in replies] == expected
    for reply in replies:
        assert reply.finished.timings.draft_by == ("small",)
    bench.close()


# -- prefixes ---------------------------------------------------------------------------------


def head(seed: int, words: int = 60) -> list[Message]:
    chooser = random.Random(seed)
    words_said = [chooser.choice(["red", "blue", "seven", "house"]) for _ in range(words)]
    return [Message("user", " ".join(words_said))]


def cached(bench: Bench, chat: Chat, *refs: AdapterRef, **more: object) -> int:
    (reply,) = ask(bench, [chat], *refs, **more)
    return reply.finished.timings.cache_n


@pytest.mark.parametrize("is_unified", [True, False])
def test_a_prefix_is_reused_by_the_same_adapters_only(
    refs: list[AdapterRef], tmp_path: Path, is_unified: bool
) -> None:
    one, two = refs
    bench = Bench(replace(OPTIONS, kv_unified=is_unified, parallel=8))
    sets = [(), (one,), (two,), (replace(one, scale=0.5),), (one, two)]
    for each in sets:
        assert cached(bench, head(1), *each) == 0
    for each in sets:
        assert cached(bench, head(1), *each) > 60
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(Path(one.path).read_bytes())
    assert cached(bench, head(1), AdapterRef("other", str(copy))) > 60, "same content"
    assert cached(bench, head(1), two, one) > 60, "the order does not matter"
    assert cached(bench, head(1), replace(two, scale=0.0)) > 60, "a scale of 0 is the base"
    bench.close()


def test_no_salt_of_a_client_leads_to_the_prefixes_of_an_adapter(refs: list[AdapterRef]) -> None:
    bench = Bench(OPTIONS)
    assert bench.model.read_adapter is not None
    salt = prefix_salt("", (bench.model.read_adapter(refs[0]),))
    assert cached(bench, head(1), refs[0]) == 0
    assert cached(bench, head(1), cache_salt=salt) == 0
    assert cached(bench, head(1), cache_salt=salt) > 60
    assert cached(bench, head(1), refs[0], cache_salt="mine") == 0
    assert cached(bench, head(1), refs[0], cache_salt="mine") > 60
    bench.close()


def test_salts_differ_for_every_set() -> None:
    one, other = (Adapter(key, 1.0, "", 0, None) for key in ("k", "l"))
    sets = [(), (one,), (other,), (one, other), (replace(one, scale=2.0),)]
    salts = ["", "a", 'a", [', prefix_salt("", (one,)), prefix_salt("a", (one,))]
    found = {prefix_salt(salt, each) for salt in salts for each in sets}
    assert len(found) == len(sets) * len(salts)
    assert prefix_salt("a", ()) == "a", "nothing changes without adapters"


@pytest.mark.parametrize("tier", ["ram", "disk", "peer"])
def test_tiers_keep_prefixes_of_adapters_apart(
    refs: list[AdapterRef], tmp_path: Path, tier: str
) -> None:
    chat, address = head(1, 700), str(tmp_path / "kv.sock")
    options = {
        "ram": replace(OPTIONS, ctx=2048, kv_disk=0, kv_tokens=2048),
        "disk": replace(OPTIONS, ctx=2048, kv_ram=0),
        "peer": replace(OPTIONS, ctx=2048, kv_disk=0, kv_listen=address),
    }[tier]
    first = again = Bench(options, kv_dir=tmp_path)
    (computed,) = ask(first, [chat], refs[0])
    if tier == "ram":
        ask(first, [head(2, 1200)], cache_salt="2")
        ask(first, [head(3, 1200)], cache_salt="3")
    elif tier == "disk":
        first.engine.save_prefixes(time.monotonic() + 30)
        first.close()
        again = Bench(options, kv_dir=tmp_path)
    else:
        again = Bench(replace(options, kv_listen=None, kv_peer=address), kv_dir=tmp_path)
    for others in ((), refs[1:], refs, [replace(refs[0], scale=0.5)]):
        (reply,) = ask(again, [chat], *others)
        assert (reply.finished.timings.cache_n, reply.finished.timings.restored) == (0, ())
    (reply,) = ask(again, [chat], refs[0])
    assert [each.tier for each in reply.finished.timings.restored] == [tier]
    assert reply.finished.timings.cache_n > 500
    assert reply.text == computed.text
    again.close()
    if tier == "peer":
        first.close()


# -- memory -----------------------------------------------------------------------------------


def test_the_least_recently_used_are_evicted(tmp_path: Path) -> None:
    bench, refs = Bench(OPTIONS), []
    for seed in range(MAX_LOADED_ADAPTERS + 3):
        random_adapter(seed, rank=1).write_gguf(tmp_path / f"{seed}.gguf")
        refs.append(AdapterRef(f"{seed}", str(tmp_path / f"{seed}.gguf")))
    chat = questions(1)[0]
    alone = [ask(bench, [chat], ref)[0] for ref in refs]
    bench.engine.step(wait=False)
    assert [each.name for each in bench.stats.adapters] == [ref.name for ref in refs[3:]]
    assert all(each.num_bytes == Path(refs[0].path).stat().st_size for each in bench.stats.adapters)
    # more than there are places at once: those without one wait
    replies = bench.run([bench.submit(chat, PARAMS, adapters=(ref,)) for ref in refs])
    assert [reply.text for reply in replies] == [reply.text for reply in alone]
    assert len(bench.stats.adapters) == MAX_LOADED_ADAPTERS
    bench.close()


def test_a_request_with_too_many_is_refused(refs: list[AdapterRef]) -> None:
    bench = Bench(OPTIONS)
    for many, why in (
        ([*refs] * MAX_LOADED_ADAPTERS, f"at most {MAX_LOADED_ADAPTERS}"),
        ([refs[0], replace(refs[0], name="b")], "a1 and b are the same adapter"),
        ([replace(refs[0], scale=float("nan"))], "the scale of a1 must be a number"),
    ):
        (reply,) = ask(bench, questions(1), *many)
        assert isinstance(reply.end, Failed)
        assert (reply.end.code, reply.end.param) == ("invalid_request", "lora")
        assert why in reply.end.message
    bench.close()
