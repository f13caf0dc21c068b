"""Short names: the catalog's, the user's aliases, and which quantization fits this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_hub import put

from localgen.backends.errors import InvalidRequest, ModelNotFound, OutOfMemory
from localgen.backends.formats.architecture.model_shape import kv_cache_bytes_per_token
from localgen.config import BadSetting
from localgen.hub import aliases, catalog, quant_choice
from localgen.hub.catalog import CatalogEntry
from localgen.hub.quant_choice import AvailableMemory, QuantOption
from localgen.hub.quants import quant_of
from localgen.hub.reference import resolve_reference
from localgen.hub.resolve import installed_models, resolve_model
from localgen.machine.gpus import Gpu
from localgen.placement.backend_choice import Hardware

GB = 1_000_000_000
ENTRIES = catalog.catalog_entries()
NAMES = [(entry, name) for entry in ENTRIES for name in (entry.alias, *entry.names)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    monkeypatch.setenv("LOCALGEN_STATE_DIR", str(tmp_path / "state"))
    return folder


def test_no_name_belongs_to_two_models() -> None:
    plain: dict[str, str] = {}
    for entry, name in NAMES:
        spelled = name.lower().replace(":", "-").replace("_", "-")
        assert plain.setdefault(spelled, entry.alias) == entry.alias
    assert len(ENTRIES) > 60


@pytest.mark.parametrize(("entry", "name"), NAMES, ids=[name for _, name in NAMES])
def test_every_name_resolves(cache: Path, entry: CatalogEntry, name: str) -> None:
    missing = resolve_reference(name)
    assert missing is not None
    assert missing.entry == entry
    with pytest.raises(ModelNotFound, match="is not installed: localgen pull") as absent:
        resolve_model(name)
    assert entry.gguf.repo in absent.value.message
    put(cache, entry.gguf.repo, entry.gguf.file)
    for spelling in (name, name.upper(), f"{name}:{entry.gguf.quant}", f"{name}:latest"):
        found = resolve_model(spelling)
        assert found.path.name == entry.gguf.file
        assert found.name == f"{entry.gguf.repo}:{quant_of(found.path.stem)}"


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.alias)
def test_every_folder_of_the_catalog_resolves(cache: Path, entry: CatalogEntry) -> None:
    assert entry.safetensors[0].method == "safetensors"
    for repo in {source.repo for source in entry.safetensors}:
        put(cache, repo, "config.json", "model.safetensors")
    for source in entry.safetensors:
        chosen = entry.safetensors_source(source.method)
        assert chosen is not None
        tag = "safetensors" if source.method == entry.gguf.quant.lower() else source.method
        for name in (f"{entry.alias}:{tag}", chosen.repo):
            found = resolve_model(name)
            assert (found.name, found.is_gguf) == (chosen.repo, False)


def test_drafts_are_in_the_catalog() -> None:
    aliases = {entry.alias for entry in ENTRIES}
    assert {entry.draft for entry in ENTRIES if entry.draft} <= aliases


@pytest.mark.parametrize(
    ("name", "alias", "tag"),
    [
        ("llama-8b", "llama3.1-8b", None),
        ("Llama3.2:1B", "llama3.2-1b", None),
        ("llama-3.1-8b", "llama3.1-8b", None),
        ("gemma-3-1b", "gemma3-1b", None),
        ("gemma-31b", "gemma4-31b", None),
        ("llama-8b:q8_0", "llama3.1-8b", "q8_0"),
        ("llama3.1:8b:Q6_K_L", "llama3.1-8b", "Q6_K_L"),
        ("qwen3:latest", "qwen3-8b", None),
        ("qwen3-8b:auto", "qwen3-8b", "auto"),
        ("llama3.2-1b:awq", "llama3.2-1b", "awq"),
    ],
)
def test_names_are_found_in_any_spelling(name: str, alias: str, tag: str | None) -> None:
    found = catalog.find_entry(name)
    assert found is not None
    assert (found[0].alias, found[1]) == (alias, tag)


@pytest.mark.parametrize("name", ["", "llama-9b", "gpt", "llama-8b:huge", "gemma3_31b", ":q8_0"])
def test_unknown_names_are_not_found(name: str) -> None:
    assert catalog.find_entry(name) is None


def test_a_missing_model_says_what_it_would_fetch() -> None:
    with pytest.raises(
        ModelNotFound,
        match=r"llama-8b is not installed: localgen pull llama-8b downloads bartowski/.*:Q4_K_M "
        r"\(4\.9 GB\)$",
    ):
        resolve_model("llama-8b")
    with pytest.raises(ModelNotFound, match=r"Did you mean llama-8b"):
        resolve_model("lama-8b")


def test_context_and_cache_of_the_catalog() -> None:
    llama = catalog.find_entry("llama-8b")
    assert llama is not None
    # 32 layers, 8 heads of 128, keys and values, two bytes each
    assert llama[0].shape is not None
    assert (
        kv_cache_bytes_per_token(llama[0].shape.layer_caches, "f16", "f16") == 32 * 8 * 128 * 2 * 2
    )
    assert llama[0].context == llama[0].shape.ctx_train == 131_072
    hybrid = catalog.find_entry("qwen3.5-0.8b")
    assert hybrid is not None
    assert hybrid[0].shape is not None
    assert (hybrid[0].shape.num_layers, len(hybrid[0].shape.layer_caches)) == (24, 6)


def test_names_of_the_user_win(cache: Path, tmp_path: Path) -> None:
    put(cache, "acme/Chat", "chat-Q8_0.gguf")
    aliases.add_alias("llama-8b", "acme/Chat:Q8_0")
    assert resolve_model("llama-8b").name == "acme/Chat:Q8_0"
    aliases.add_alias("work", "tiny")
    assert resolve_model("work").name == "tiny"
    (tmp_path / "m.gguf").write_bytes(b"x")
    aliases.add_alias("mine", str(tmp_path / "m.gguf"))
    assert resolve_model("mine").name == "m"
    aliases.remove_alias("llama-8b")
    with pytest.raises(ModelNotFound, match="bartowski"):
        resolve_model("llama-8b")
    with pytest.raises(ModelNotFound, match="is not an alias"):
        aliases.remove_alias("llama-8b")
    assert aliases.load_aliases() == {"work": "tiny", "mine": str(tmp_path / "m.gguf")}


def test_the_file_of_names_keeps_what_the_user_wrote() -> None:
    path = aliases.aliases_path()
    path.parent.mkdir()
    path.write_text('# mine\nwork = "tiny"  # for tests\nother = """tiny"""')
    aliases.add_alias("a.b:c", 'x "quoted" \\ path')
    assert path.read_text().startswith('# mine\nwork = "tiny"  # for tests\n')
    assert aliases.load_aliases()["a.b:c"] == 'x "quoted" \\ path'
    aliases.remove_alias("work")
    assert path.read_text().startswith("# mine\nother")
    assert set(aliases.load_aliases()) == {"other", "a.b:c"}


@pytest.mark.parametrize(
    "name", ["", "a/b", "x.gguf", "-x", "a b", "a\n", "é", '"', "a" * 101, "../x"]
)
def test_invalid_aliases_are_rejected(name: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot be an alias"):
        aliases.add_alias(name, "tiny")
    assert aliases.load_aliases() == {}


def test_alias_in_use_is_rejected() -> None:
    aliases.add_alias("work", "tiny")
    with pytest.raises(InvalidRequest, match="work is already an alias of tiny: localgen rm work"):
        aliases.add_alias("work", "other")


@pytest.mark.parametrize("text", ["work = ", "work = 3", "= =", 'a = "1"\na = "2"'])
def test_damaged_alias_file_is_reported(text: str) -> None:
    path = aliases.aliases_path()
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(BadSetting, match=r"models\.toml"):
        resolve_model("work")
    assert path.read_text() == text


WAYS = [
    QuantOption("Q2_K", 3 * GB),
    QuantOption("Q4_K_M", 5 * GB),
    QuantOption("Q8_0", 8 * GB),
    QuantOption("F16", 16 * GB),
]


@pytest.mark.parametrize(
    ("room", "quant"),
    [
        (AvailableMemory(ram_bytes=100 * GB), "Q8_0"),
        (AvailableMemory(ram_bytes=7 * GB), "Q4_K_M"),
        (AvailableMemory(ram_bytes=4 * GB), "Q2_K"),
        # unchanged, on the GPU: fewer bits there are better than more on the CPU
        (AvailableMemory(ram_bytes=100 * GB, gpu_bytes=7 * GB, has_llamacpp_gpu=True), "Q4_K_M"),
        # dequantized to 16 bits, a quarter fits
        (AvailableMemory(ram_bytes=100 * GB, gpu_bytes=24 * GB, has_cuda_backend=True), "Q4_K_M"),
        (AvailableMemory(ram_bytes=100 * GB, gpu_bytes=7 * GB, has_cuda_backend=True), "Q8_0"),
    ],
)
def test_best_fitting_quantization_is_chosen(room: AvailableMemory, quant: str) -> None:
    chosen, why = quant_choice.choose_quant(WAYS, "it", None, room)
    assert chosen.option.quant == quant
    assert why.startswith(f"{quant} needs ")


def test_only_wide_weights_are_better_than_none() -> None:
    chosen, _ = quant_choice.choose_quant(WAYS[3:], "it", None, AvailableMemory(ram_bytes=100 * GB))
    assert chosen.option.quant == "F16"


def test_no_fitting_quantization_raises_out_of_memory() -> None:
    with pytest.raises(OutOfMemory, match=r"the smallest, Q2_K, needs 3\.. GB with a context of"):
        quant_choice.choose_quant(WAYS, "it", None, AvailableMemory(ram_bytes=GB))


def test_reason_against_the_next_larger_quantization() -> None:
    _, why = quant_choice.choose_quant(WAYS, "it", None, AvailableMemory(ram_bytes=7 * GB))
    assert why.endswith("; Q8_0 would need 9.4 GB")
    _, why = quant_choice.choose_quant(WAYS, "it", None, AvailableMemory(ram_bytes=100 * GB))
    assert "F16 fits, but" in why
    _, why = quant_choice.choose_quant(
        WAYS,
        "it",
        None,
        AvailableMemory(ram_bytes=100 * GB, gpu_bytes=7 * GB, has_llamacpp_gpu=True),
    )
    assert why.endswith("; Q8_0 would run on the CPU")


def test_needed_memory_includes_the_kv_cache() -> None:
    found = catalog.find_entry("llama-8b")
    assert found is not None
    (one,) = quant_choice.fit_quants(
        [QuantOption("Q8_0", 8 * GB)], AvailableMemory(ram_bytes=100 * GB), found[0]
    )
    cache = 131_072 * 8192
    # and buffers for steps of 512 tokens
    assert 8 * GB + cache < one.need_bytes < 8 * GB + 1.3 * cache


def test_hugging_face_format_where_something_runs_it() -> None:
    found = catalog.find_entry("llama-8b")
    assert found is not None
    entry = found[0]
    assert quant_choice.safetensors_options(entry, AvailableMemory(ram_bytes=100 * GB)) == []
    for gpu, quant in ((40 * GB, "safetensors"), (14 * GB, "fp8")):
        room = AvailableMemory(ram_bytes=100 * GB, gpu_bytes=gpu, has_cuda_backend=True)
        ways = [*WAYS, *quant_choice.safetensors_options(entry, room)]
        chosen, _ = quant_choice.choose_quant(ways, "it", entry, room)
        assert chosen.option.quant == quant


def test_available_memory_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALGEN_MEMORY_LIMIT", "8G")
    gpu = Gpu(0, "a GPU", 24 * GB, 20 * GB, (9, 0))
    cpu_only = Hardware((), (), False, lambda: False)
    assert quant_choice.available_memory(cpu_only) == AvailableMemory(ram_bytes=8 << 30)
    with_cuda = Hardware((gpu,), (), True, lambda: False)
    assert quant_choice.available_memory(with_cuda) == AvailableMemory(
        8 << 30, 20 * GB, False, True
    )
    old = Hardware((Gpu(0, "old", GB, GB, (6, 1)),), (), True, lambda: False)
    assert quant_choice.available_memory(old) == AvailableMemory(ram_bytes=8 << 30)
    llama_cpp = Hardware((gpu,), ("torch",), True, lambda: True)
    assert quant_choice.available_memory(llama_cpp) == AvailableMemory(
        8 << 30, 20 * GB, True, False
    )


def test_auto_among_what_is_here(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(cache, "a/b", "m-Q4_K_M.gguf", "m-Q8_0.gguf")
    monkeypatch.setattr(quant_choice, "available_memory", lambda: AvailableMemory(ram_bytes=GB))
    assert resolve_model("a/b:auto").name in {file.name for file in installed_models()}
