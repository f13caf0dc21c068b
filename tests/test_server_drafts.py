"""`--draft` from request to engine: which model it names, its memory, what is reported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import ServerHarness, server_harness

from localgen.backends.errors import InvalidRequest, LocalgenError, ModelNotFound
from localgen.backends.formats.model_files import ModelFile
from localgen.backends.model_info import LoadOptions
from localgen.hub import catalog
from localgen.placement.backend_choice import Placement
from localgen.server.models.draft_choice import DraftChoice, resolve_draft_model

PAIRED = next(entry for entry in catalog.catalog_entries() if entry.draft == "qwen3-0.6b")
BIG = ModelFile(f"{PAIRED.gguf.repo}:Q4_K_M", Path("/m/big.gguf"), 5, (), "cache")
SMALL = ModelFile("small", Path("/m/small.gguf"), 1, (), "cache")
FOLDER = ModelFile("small", Path("/m/small"), 1, (), "cache")
TINY = ModelFile("tiny", Path("/m/tiny.gguf"), 1, (), "built-in")


def finding(**known: ModelFile) -> Any:
    def find(name: str) -> ModelFile:
        if name.replace("-", "_").replace(".", "_") not in known:
            raise ModelNotFound(f"Model {name!r} not found")
        return known[name.replace("-", "_").replace(".", "_")]

    return find


def test_ngram_and_none_name_no_model() -> None:
    for word in (None, "ngram", "none"):
        assert resolve_draft_model(word, None, BIG, finding()) == DraftChoice(word)
    assert resolve_draft_model(None, "none", BIG, finding()).effective_option == "none", (
        "the server's usual"
    )
    assert resolve_draft_model("ngram", "none", BIG, finding()).effective_option == "ngram"


def test_a_name_is_a_model_or_an_error() -> None:
    found = resolve_draft_model("small", None, BIG, finding(small=SMALL))
    assert found.draft_model is not None
    assert (found.draft_model.path, found.draft_model.optional) == ("/m/small.gguf", False)
    assert found.effective_option == "/m/small.gguf"
    with pytest.raises(ModelNotFound, match="--draft other: Model 'other' not found") as raised:
        resolve_draft_model("other", None, BIG, finding(small=SMALL))
    assert raised.value.param == "draft"


def test_auto_is_of_the_targets_format_if_both_are_here() -> None:
    known = {"qwen3-0.6b": SMALL, "qwen3-0.6b:safetensors": FOLDER}
    big = ModelFile(PAIRED.safetensors[0].repo, Path("/m/big"), 5, (), "cache")
    assert not big.is_gguf
    assert resolve_draft_model("auto", None, BIG, known.__getitem__).file == SMALL
    assert resolve_draft_model("auto", None, big, known.__getitem__).file == FOLDER
    assert resolve_draft_model("auto", None, big, finding(qwen3_0_6b=SMALL)).file == SMALL


def test_auto_is_what_the_catalog_pairs() -> None:
    here = finding(qwen3_0_6b=SMALL)
    found = resolve_draft_model("auto", None, BIG, here)
    assert (found.file, found.optional, found.note) == (SMALL, True, "")
    missing = resolve_draft_model("auto", None, BIG, finding())
    assert missing.effective_option == "ngram"
    assert "localgen pull qwen3-0.6b downloads it" in missing.note
    alone = resolve_draft_model("auto", None, TINY, here)
    assert alone.note == ("using the n-gram drafter: the catalog has no draft model for tiny")


def test_server_default_is_used_where_it_suits() -> None:
    usual = resolve_draft_model(None, "small", BIG, finding(small=SMALL))
    assert (usual.file, usual.optional) == (SMALL, True)
    assert resolve_draft_model(None, "small", SMALL, finding(small=SMALL)).file is None, (
        "not for itself"
    )
    assert "Model 'gone' not found" in resolve_draft_model(None, "gone", BIG, finding()).note


def test_folder_as_draft_model_is_rejected_for_llama_cpp() -> None:
    llamacpp, cuda = Placement("llamacpp", ""), Placement("cuda", "")
    assert DraftChoice.from_model(FOLDER, optional=False).for_placement(cuda).file == FOLDER
    with pytest.raises(InvalidRequest, match=r"llama.cpp runs \.gguf files, /m/small is not one"):
        DraftChoice.from_model(FOLDER, optional=False).for_placement(llamacpp)
    fallen = DraftChoice.from_model(FOLDER, optional=True).for_placement(llamacpp)
    assert (fallen.file, fallen.effective_option, fallen.option) == (None, "ngram", "/m/small")
    assert "/m/small is not one" in fallen.note


@pytest.fixture
def served() -> Iterator[ServerHarness]:
    with server_harness(memory_limit=300_000_000) as built:
        yield built


def load(served: ServerHarness, model: str, **options: Any) -> Any:
    with served.client() as client:
        client.connect()
        return client.load(model, LoadOptions(**options))


def test_the_engine_gets_a_path_and_everybody_sees_it(served: ServerHarness) -> None:
    model, small = served.model("big"), served.model("small")
    info = load(served, model, draft=small)
    assert info.draft is not None
    assert (info.draft.name, info.draft.path, info.options.draft) == ("small", small, small)
    assert served.stats(model)["draft"] == "small"
    with served.client() as client:
        (running,) = client.running_models()
        assert running.draft == "small"
        # as in `list`, plus that of its draft model
        (card,) = (card for card in client.models() if card.path == model)
        assert running.size_bytes == card.size_bytes + info.draft.size_bytes


def test_another_draft_option_is_another_load(served: ServerHarness) -> None:
    model, small, other = (served.model(name) for name in ("big", "small", "other"))
    load(served, model, draft=small)
    for same in (small, "auto", None):
        assert load(served, model, draft=same).options.draft == small
    for different in (other, "ngram", "none"):
        with pytest.raises(LocalgenError, match=r"big is loaded with --draft .*small.gguf, not"):
            load(served, model, draft=different)
    assert served.loads(model) == 1


def test_a_missing_draft_model_is_one_line_and_nothing_is_loaded(served: ServerHarness) -> None:
    model = served.model("big")
    with pytest.raises(ModelNotFound, match=r"--draft /nowhere.gguf: there is no file") as raised:
        load(served, model, draft="/nowhere.gguf")
    assert raised.value.param == "draft"
    assert served.loads(model) == 0
    assert load(served, model).draft is None


def large(served: ServerHarness) -> str:
    """A draft model that does not fit in memory."""
    path = served.model("small")
    with Path(path).open("a") as file:
        file.write(" " * 10)
        file.truncate(400_000_000)  # nothing is written
    return path


def test_memory_of_the_draft_model_counts(served: ServerHarness) -> None:
    model, small = served.model("big"), large(served)
    with pytest.raises(LocalgenError, match="big with small as draft model needs about") as raised:
        load(served, model, draft=small)
    assert "leave --draft out" in raised.value.message
    assert load(served, model).draft is None


def test_default_draft_model_without_room_is_left_out(
    served: ServerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, small = served.model("big"), large(served)
    monkeypatch.setenv("TEST_DRAFT", small)
    info = load(served, model)
    assert (info.draft, info.options.draft) == (None, "ngram")
    (note,) = (note for note in info.notes if "n-gram drafter" in note)
    assert "big with small as draft model needs about" in note
    assert load(served, model, draft=small) == info, "it was asked for, and is not to be had"


def test_default_draft_model_is_loaded(
    served: ServerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, small = served.model("big"), served.model("small")
    monkeypatch.setenv("TEST_DRAFT", small)
    assert load(served, model).draft is not None
    assert load(served, small).draft is None, "not for itself"
