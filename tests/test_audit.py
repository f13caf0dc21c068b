"""`localgen audit`: flips and KL are those of the plain computation, and nothing is kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from models import TESTS, TINY_GGUF

from localgen.audit.audit import Audit, Side
from localgen.audit.comparison import Tally, log_softmax
from localgen.audit.originals import find_original, require_memory
from localgen.audit.scored_text import ScoredText, Selection, select_answers, select_text
from localgen.audit.teacher_forcing import STEP_TOKENS, ForcedContext, ForcedModel
from localgen.audit.templates import load_template
from localgen.backends.errors import InvalidRequest, OutOfMemory
from localgen.backends.formats.model_files import model_file
from localgen.backends.llamacpp.native import LlamaModel
from localgen.chat.conversation import Conversation, Turn
from localgen.chat.session_store import SessionRecord
from localgen.chat.stored_sessions import open_store
from localgen.cli.main import run_command_line
from localgen.quant.gguf.requantize import requantize

# of the same vocabulary as the built-in model
SMALLER = TESTS / "data/tiny-draft.gguf"
CHATS = tuple(
    Conversation(
        "Be brief.",
        (Turn(f"What is {n} + {n}?", f"{n} + {n} = {2 * n}."), Turn("Why?", "\x1b[31mBecause.")),
    )
    for n in range(11, 16)
)


@pytest.fixture(scope="module")
def tiny() -> Iterator[ForcedModel]:
    with closing(ForcedModel(TINY_GGUF, 1, lambda _: None)) as model:
        yield model


@pytest.fixture(scope="module")
def smaller() -> Iterator[ForcedModel]:
    with closing(ForcedModel(SMALLER, 1, lambda _: None)) as model:
        yield model


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder with stored chats."""
    folder = tmp_path / "state"
    monkeypatch.setenv("LOCALGEN_STATE_DIR", str(folder))
    monkeypatch.setenv("LOCALGEN_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("LOCALGEN_HF_HUB_CACHE", str(tmp_path / "cache"))
    with open_store(folder) as store:
        for chat in CHATS:
            store.create(SessionRecord(0, "sums", "tiny", conversation=chat))
    return folder


def answers(model: ForcedModel, *, ctx: int = 4096, max_scored: int = 10_000) -> Selection:
    records = [SessionRecord(n, conversation=chat) for n, chat in enumerate(CHATS, 1)]
    return select_answers(
        records, load_template(model), model.tokenizer, ctx=ctx, max_scored=max_scored
    )


def text_of(model: ForcedModel, tokens: tuple[int, ...]) -> str:
    return b"".join(model.tokenizer.piece(token) for token in tokens).decode()


def test_only_answers_are_scored(tiny: ForcedModel) -> None:
    found = answers(tiny).texts
    assert len(found) == 10
    assert [text_of(tiny, one.tokens[one.start :]) for one in found[:2]] == [
        "11 + 11 = 22.",
        "\x1b[31mBecause.",
    ]
    assert found[1].name == "session 1, answer 2"
    assert found[1].tokens[: found[0].start] == found[0].tokens[: found[0].start]


def test_limits_of_tokens_and_context(tiny: ForcedModel) -> None:
    assert answers(tiny, max_scored=12).num_scored == 12
    cut = answers(tiny, ctx=len(answers(tiny).texts[0].tokens) - 1)
    assert cut.longest < len(answers(tiny).texts[0].tokens)
    assert cut.num_too_long == 5  # the second answers


def test_turns_of_forked_sessions_count_once(tiny: ForcedModel) -> None:
    first, other = CHATS[0], CHATS[1]
    again = replace(first, turns=(first.turns[0], replace(first.turns[1], answer="It is a sum.")))
    elsewhere = replace(first, system="Be kind.")
    longer = replace(first, turns=(*first.turns, *other.turns))
    chats = (longer, first, again, other, elsewhere)
    records = [SessionRecord(n, conversation=chat) for n, chat in enumerate(chats, 1)]

    def selected(ctx: int = 4096) -> Selection:
        template = load_template(tiny)
        return select_answers(records, template, tiny.tokenizer, ctx=ctx, max_scored=10_000)

    # of the third session its second answer, of the last one, with another prompt, all
    assert [one.name for one in selected().texts] == [
        *(f"session 1, answer {n}" for n in (1, 2, 3, 4)),
        "session 3, answer 2",
        *(f"session {session}, answer {n}" for session in (4, 5) for n in (1, 2)),
    ]
    # an answer whose prompt is too long is left out once as well
    assert selected(ctx=1).num_too_long == len(selected().texts)


def test_a_text_is_cut_into_sequences(tiny: ForcedModel) -> None:
    found = select_text("The tide turned at six. " * 200, tiny.tokenizer, ctx=4096, max_scored=700)
    assert [len(text.tokens) for text in found.texts] == [512, 189]
    assert found.num_scored == 699


def test_kept_prefixes_change_nothing(tiny: ForcedModel) -> None:
    texts = answers(tiny).texts[:4]

    def rows(context: ForcedContext, text: ScoredText) -> np.ndarray:
        begun = context.begin(text.tokens, text.start)
        count = len(text.tokens) - text.start
        return log_softmax(context.advance(text.tokens[begun:-1], count))

    with closing(ForcedContext(tiny, ctx=512, kv_type="f16")) as one:
        kept = [rows(one, text) for text in texts]
    for text, found in zip(texts, kept, strict=True):
        with closing(ForcedContext(tiny, ctx=512, kv_type="f16")) as fresh:
            np.testing.assert_allclose(found, rows(fresh, text), atol=2e-3)


def test_a_model_agrees_with_itself(tiny: ForcedModel) -> None:
    longest = "The lamp stood on the shelf for years. " * 80
    text = select_text(longest, tiny.tokenizer, ctx=2 * STEP_TOKENS, max_scored=5_000)
    assert len(text.texts[0].tokens) > STEP_TOKENS
    selection = Selection((*text.texts, *answers(tiny).texts))
    seen: list[int] = []
    with closing(Audit(Side("a", tiny), [Side("b", tiny)], selection.longest, 3)) as audit:
        audit.run(selection, seen.append)
    found = audit.tallies[0].agreement()
    assert found.tokens == selection.num_scored == seen[-1]
    assert (found.flips, audit.tallies[0].worst) == (0, [])
    assert abs(found.kl) < 1e-9


def test_figures_are_those_of_the_plain_computation() -> None:
    generator = np.random.default_rng(0)
    tally = Tally("audited", 2)
    flips = kl = 0.0
    largest: list[float] = []
    for number in range(8):
        reference, audited = (
            log_softmax(generator.normal(size=(5, 9)).astype(np.float32)) for _ in range(2)
        )
        tally.begin_text()
        tally.add(f"text {number}", list(range(10)), 4, reference, audited)
        for p, q in zip(reference, audited, strict=True):
            apart = float((np.exp(p) * (p - q)).sum())
            kl += apart
            if p.argmax() != q.argmax():
                flips += 1
                largest.append(apart)
    found = tally.agreement()
    assert (found.tokens, found.texts) == (40, 8)
    assert found.flips == pytest.approx(flips / 40)
    assert found.kl == pytest.approx(kl / 40)
    assert found.kl_interval is not None
    assert found.kl_interval.low < found.kl < found.kl_interval.high
    assert [one.kl for one in tally.worst] == pytest.approx(sorted(largest)[::-1][:2])
    worst = tally.worst[0]
    assert worst.tokens == tuple(range(worst.actual))
    assert worst.ours_by_audited >= worst.theirs_by_audited
    assert worst.theirs_by_reference >= worst.ours_by_reference


def test_quantized_caches_differ_by_their_bits(tiny: ForcedModel) -> None:
    sides = [Side(kind, tiny, kind) for kind in ("q8_0", "q4_0")]
    selection = answers(tiny)
    with closing(Audit(Side("f16", tiny), sides, selection.longest, 0)) as audit:
        audit.run(selection, lambda _: None)
    eight, four = (tally.agreement().kl for tally in audit.tallies)
    assert 0 < eight < four


def test_the_command_reads_stored_chats_and_stores_nothing(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(path.name for path in state.rglob("*"))
    asked = ["audit", str(SMALLER), "--reference", "tiny", "-t", "1"]
    assert run_command_line([*asked, "--worst", "40"]) == 0
    out, err = capsys.readouterr()
    assert "\x1b" not in out
    assert "Where tiny-draft differs most from tiny:" in out
    assert "nothing is stored" in err
    assert run_command_line([*asked, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    (side,) = record["sides"]
    assert (record["reference"], side["side"], side["texts"]) == ("tiny", "tiny-draft", 10)
    assert 0 < side["flips"] < 1
    assert side["flips_interval"]["low"] < side["flips"] < side["flips_interval"]["high"]
    assert side["worst"][0]["kl"] >= side["worst"][1]["kl"]
    assert sorted(path.name for path in state.rglob("*")) == before


def test_one_session_and_few_texts(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["audit", "tiny", "--kv", "--session", "2", "-t", "1"]) == 0
    out, err = capsys.readouterr()
    assert "tiny, KV q8_0" in out
    assert "2 texts: too few for 95 % intervals" in err


def test_a_reference_that_was_rounded_is_told(
    state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    low = tmp_path / "low.gguf"
    requantize(TINY_GGUF, low, "Q4_0", None, lambda _: None)
    assert run_command_line(["audit", str(SMALLER), "--reference", str(low), "-t", "1"]) == 0
    assert "low is Q4_0, no original in 16 or 8 bits" in capsys.readouterr().err
    assert run_command_line(["audit", str(low), "--reference", "tiny", "-t", "1"]) == 0
    assert "no original" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny"], "tiny is itself an original of 16 bits"),
        (["tiny", "--reference", "tiny"], "are the same file"),
        (["tiny", "--kv", "--reference", "tiny"], "--kv compares the model with itself"),
        ([str(SMALLER)], "is a path, which does not tell its original"),
        (["tiny", "--kv", "--session", "none"], "session 'none' not found"),
        (["tiny", "--kv", "--session", "1", "--text", __file__], "exclude each other"),
        (["tiny", "--kv", "--text", "missing.txt"], "missing.txt: No such file"),
        (["tiny", "--kv", "-c", "16"], "no answer fits a context of 16 tokens: raise --ctx"),
    ],
)
def test_wrong_input_gets_one_line(
    arguments: list[str], message: str, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(["audit", *arguments]) == 3
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1


def test_sessions_without_answers_are_told_apart(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_store(state) as store:
        store.create(SessionRecord(0, "new", "tiny"))
        unanswered = Conversation("", (Turn("Is anybody there?", ""),))
        store.create(SessionRecord(0, "open", "tiny", conversation=unanswered))
    for name, message in (
        ("new", "session 'new' has no turns to audit: localgen history"),
        ("open", "the stored conversations have no answers to audit: give a file with --text"),
    ):
        assert run_command_line(["audit", "tiny", "--kv", "--session", name]) == 3
        assert message in capsys.readouterr().err


def test_the_context_is_no_longer_than_either_model_was_trained_with(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ctx_train(model: LlamaModel) -> int:
        return 24 if model.size_bytes > SMALLER.stat().st_size else 4096

    monkeypatch.setattr(LlamaModel, "ctx_train", property(ctx_train))
    asked = ["audit", str(SMALLER), "--reference", "tiny", "-t", "1"]
    assert run_command_line(asked) == 3
    err = capsys.readouterr().err
    assert "no answer fits a context of 24 tokens: tiny was trained with no more" in err


def test_without_chats_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCALGEN_STATE_DIR", str(tmp_path / "empty"))
    assert run_command_line(["audit", "tiny", "--kv"]) == 3
    assert "no stored conversations to audit; chat first" in capsys.readouterr().err
    assert run_command_line(["audit", "tiny", "--kv", "--session", "trip"]) == 3
    assert "session 'trip' not found: no conversation is stored yet" in capsys.readouterr().err
    assert not (tmp_path / "empty").exists()


def test_originals_and_memory(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = model_file(SMALLER, name="llama3.2-1b", source="cache")
    with pytest.raises(InvalidRequest, match=r"localgen pull llama3.2-1b:Q8_0 downloads one"):
        find_original("llama3.2-1b:Q4_K_M", file)
    require_memory([file])
    monkeypatch.setattr("localgen.audit.originals.available_memory_bytes", lambda: 1)
    with pytest.raises(OutOfMemory, match=r"llama3.2-1b and llama3.2-1b take 5.8 MB together"):
        require_memory([file, file])
