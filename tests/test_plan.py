"""Plans: what fits, where, and how fast; for every model of the catalog, offline."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cuda_configs import write_config
from hypothesis import given
from hypothesis import strategies as st

from localgen.backends.errors import InvalidRequest, OutOfMemory
from localgen.backends.formats.architecture.model_shape import LayerCacheShape, ModelShape
from localgen.backends.formats.model_facts import ModelFacts, local_model_facts
from localgen.backends.formats.model_files import model_folder
from localgen.backends.memory import kv_sizing
from localgen.backends.memory.kv_sizing import DEFAULT_CTX, KVSizeRequest
from localgen.backends.model_info import LoadOptions
from localgen.hub import catalog
from localgen.hub.catalog import CatalogEntry
from localgen.machine import bandwidth, gpu_bandwidth, measurements
from localgen.machine.bandwidth import Bandwidth
from localgen.machine.decode_rates import DecodeRates, fastest_by_use
from localgen.machine.gpus import Gpu
from localgen.machine.step_times import StepTimes
from localgen.placement.backend_choice import Hardware
from localgen.placement.footprint import estimate_footprint, loaded_weight_bytes
from localgen.planning.find import remote_model_facts
from localgen.planning.plan import plan_memory
from localgen.planning.resources import MachineResources

GB = 10**9
NOTHING = LoadOptions()
SHAPE = ModelShape(
    num_layers=32,
    hidden_size=4096,
    active_intermediate_size=14336,
    num_heads=32,
    vocab_size=128_256,
    ctx_train=131_072,
    layer_caches=(LayerCacheShape(8, 128, 128),) * 32,
)
FACTS = ModelFacts(
    name="llama",
    quant="Q4_K_M",
    is_gguf=True,
    weights_bytes=5 * GB,
    read_bytes=4 * GB,
    params=8 * GB,
    shape=SHAPE,
    source="files",
)
CPU = Hardware((), (), False, lambda: False)
H200 = Gpu(0, "H200", 140 * GB, 130 * GB, (9, 0))


def machine(
    ram_gb: float = 64,
    hardware: Hardware = CPU,
    ram_rate: float = 20e9,
    gpu_rate: float = 4e12,
    step_times: StepTimes | None = None,
) -> MachineResources:
    return MachineResources(
        hardware,
        int(ram_gb * GB),
        lambda: Bandwidth(ram_rate),
        lambda gpu: Bandwidth(gpu_rate) if gpu_rate else None,
        lambda: step_times,
    )


def test_plan_of_a_model_on_a_cpu() -> None:
    found = plan_memory(FACTS, LoadOptions(ctx=8192), machine())
    assert found.fits
    assert (found.backend, found.place) == ("llamacpp", "CPU")
    assert (found.ctx, found.kv_tokens) == (8192, 16_384)
    assert found.kv_bytes == 16_384 * 131_072
    assert found.kv_bytes_per_1k == 131_072_000
    assert found.kv_bytes + found.weights_bytes + found.work_bytes == found.total_bytes
    assert found.largest_ctx == 131_072
    assert found.speed is not None
    # 4 GB at 20 GB/s; with a full context 1 GB more
    assert found.speed.most_tokens_per_s == pytest.approx(5.0)
    assert found.speed.most_tokens_per_s_full == pytest.approx(20 / (4 + 8192 * 131_072 / GB))


def test_cache_types_change_the_cache_size() -> None:
    half = plan_memory(
        FACTS, LoadOptions(ctx=8192, cache_type_k="q8_0", cache_type_v="q8_0"), machine()
    )
    assert half.kv_bytes == 16_384 * 131_072 * 34 / 64
    for option in ("cache_type_k", "cache_type_v"):
        with pytest.raises(InvalidRequest, match=r"is 'int8', it must be one of f32, f16, .*q8_0"):
            plan_memory(FACTS, LoadOptions(**{option: "int8"}), machine())  # type: ignore[arg-type]
    on_gpu = machine(hardware=Hardware((H200,), (), True, lambda: False))
    with pytest.raises(InvalidRequest, match=r"is 'q8_0', it must be one of .* int8, fp8"):
        plan_memory(FACTS, LoadOptions(cache_type_k="q8_0"), on_gpu)


@pytest.mark.parametrize("ram_gb", [6, 10])
def test_the_default_context_takes_half_of_what_is_free_up_to_a_limit(ram_gb: float) -> None:
    found = plan_memory(FACTS, NOTHING, machine(ram_gb=ram_gb))
    assert found.fits
    assert found.ctx is not None
    assert found.largest_ctx is not None
    if ram_gb < 8:
        assert found.ctx == found.kv_tokens == found.largest_ctx // 2
    else:
        assert found.ctx == DEFAULT_CTX
    assert found.ctx < found.largest_ctx < 131_072
    assert found.largest_ctx % 256 == 0
    assert plan_memory(FACTS, LoadOptions(ctx=found.largest_ctx), machine(ram_gb=ram_gb)).fits
    over = plan_memory(FACTS, LoadOptions(ctx=found.largest_ctx + 256), machine(ram_gb=ram_gb))
    assert not over.fits


def test_plan_that_does_not_fit_gives_both_numbers_and_a_remedy() -> None:
    smaller = replace(FACTS, quant="Q2_K", weights_bytes=2 * GB, read_bytes=2 * GB)
    tiny = replace(FACTS, quant="Q1", weights_bytes=GB, read_bytes=GB)
    found = plan_memory(FACTS, LoadOptions(ctx=32_768), machine(ram_gb=8), [tiny, FACTS, smaller])
    assert found.refusal is not None
    assert found.refusal.startswith("llama needs 9.5 GB, 8.0 GB are free; what would fit: --ctx ")
    assert "or -ctk q8_0 -ctv q8_0 with --ctx 32,768, or Q2_K (2.0 GB)" in found.refusal
    assert f"--ctx {found.largest_ctx:,}" in found.refusal
    hopeless = plan_memory(FACTS, NOTHING, machine(ram_gb=4))
    assert hopeless.refusal is not None
    assert hopeless.refusal.endswith("4.0 GB are free; use a smaller model, or free memory")
    assert hopeless.largest_ctx == 0


DRAFT = replace(
    FACTS,
    name="little",
    weights_bytes=GB,
    read_bytes=GB,
    shape=replace(
        SHAPE, num_layers=16, hidden_size=2048, layer_caches=(LayerCacheShape(8, 64, 64),) * 16
    ),
)


def test_a_draft_model_is_counted_with_a_pool_of_as_many_tokens() -> None:
    asked = LoadOptions(ctx=8192, draft="little")
    alone, both = (plan_memory(FACTS, asked, machine(), draft=draft) for draft in (None, DRAFT))
    own = plan_memory(DRAFT, asked, machine())
    assert both.draft is not None
    assert alone.draft is None
    assert (both.draft.name, both.draft.weights_bytes) == ("little", GB)
    assert both.kv_tokens == alone.kv_tokens
    assert (both.draft.kv_bytes, both.draft.work_bytes) == (own.kv_bytes, own.work_bytes)
    assert own.total_bytes == both.draft.total_bytes
    assert own.total_bytes is not None
    assert alone.total_bytes is not None
    assert both.total_bytes == pytest.approx(alone.total_bytes + own.total_bytes, abs=2)


def test_a_context_that_fits_leaves_room_for_the_draft_model() -> None:
    there = machine(ram_gb=12)
    alone, both = (plan_memory(FACTS, NOTHING, there, draft=draft) for draft in (None, DRAFT))
    assert alone.largest_ctx is not None
    assert both.largest_ctx is not None
    assert 0 < both.largest_ctx < alone.largest_ctx
    assert plan_memory(FACTS, LoadOptions(ctx=both.largest_ctx), there, draft=DRAFT).fits
    assert not plan_memory(FACTS, LoadOptions(ctx=both.largest_ctx + 256), there, draft=DRAFT).fits


def test_what_would_fit_without_the_draft_model() -> None:
    found = plan_memory(FACTS, LoadOptions(ctx=8192), machine(ram_gb=7), draft=DRAFT)
    assert found.fits is False
    assert found.refusal is not None
    assert found.refusal.startswith("llama with little needs ")
    assert "7.0 GB are free; what would fit: no --draft, or " in found.refusal
    for room in (6, 64):
        refusal = plan_memory(
            FACTS, LoadOptions(ctx=8192), machine(ram_gb=room), draft=DRAFT
        ).refusal
        assert "no --draft" not in (refusal or "")


def test_a_draft_model_of_which_little_is_known() -> None:
    vague = replace(DRAFT, shape=None, missing=("the shape of its layers",))
    found = plan_memory(FACTS, LoadOptions(ctx=8192), machine(), draft=vague)
    assert found.draft is not None
    assert found.draft.kv_bytes is None
    assert found.draft.total_bytes == estimate_footprint(GB, None).need_bytes()
    assert found.missing == ("the shape of its layers (little)",)


def test_nothing_is_promised_where_a_draft_models_size_is_not_known() -> None:
    vague = replace(DRAFT, weights_bytes=0, missing=("the size of its weights",))
    found = plan_memory(FACTS, LoadOptions(ctx=8192), machine(), draft=vague)
    assert found.draft is not None
    assert found.draft.total_bytes is None
    assert (found.total_bytes, found.largest_ctx, found.fits) == (None, None, None)
    assert found.missing == ("the size of its weights (little)",)


def test_what_would_fit_elsewhere_with_other_options_is_no_way_out() -> None:
    # both are too large for the GPU; alone it would run there, which lacks this cache type
    tight = replace(H200, free_bytes=20 * GB)
    there = machine(ram_gb=2, hardware=Hardware((tight,), (), True, lambda: False))
    asked = LoadOptions(ctx=8192, cache_type_k="q8_0", cache_type_v="q8_0")
    found = plan_memory(FACTS, asked, there, draft=DRAFT)
    assert found.refusal is not None
    assert "no --draft" not in found.refusal


def test_a_draft_model_that_the_backend_cannot_run() -> None:
    folder = replace(DRAFT, is_gguf=False)
    with pytest.raises(
        InvalidRequest, match=r"--draft: llama\.cpp runs \.gguf files, little is not one"
    ):
        plan_memory(FACTS, NOTHING, machine(), draft=folder)


def test_a_gpu_has_to_hold_both() -> None:
    tight = replace(H200, free_bytes=20 * GB)
    there = machine(hardware=Hardware((tight,), (), True, lambda: False))
    assert plan_memory(FACTS, LoadOptions(ctx=8192), there).place == "GPU"
    assert plan_memory(FACTS, LoadOptions(ctx=8192), there, draft=replace(DRAFT, params=GB)).fits
    assert plan_memory(FACTS, LoadOptions(ctx=8192), there, draft=DRAFT).place == "CPU"


def test_more_than_it_was_trained_for_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="was trained for 131,072 tokens"):
        plan_memory(FACTS, LoadOptions(ctx=131_073), machine())


def test_on_a_gpu_weights_are_widened_and_read_so() -> None:
    there = machine(hardware=Hardware((H200,), (), True, lambda: False))
    found = plan_memory(FACTS, NOTHING, there)
    assert (found.backend, found.place) == ("cuda", "GPU")
    assert found.weights_bytes == 16 * GB
    assert found.free_bytes == H200.free_bytes
    assert [(one.layers, one.of) for one in found.gpu_layers] == [(32, 32)]
    assert found.speed is not None
    assert found.speed.most_tokens_per_s == pytest.approx(4e12 / (16 * GB * 4 / 5))
    assert plan_memory(FACTS, NOTHING, replace(there, gpu_bandwidth=lambda gpu: None)).speed is None


def test_layers_that_fit_on_each_gpu() -> None:
    small = Gpu(0, "small", 4 * GB, 3 * GB, (7, 5))
    both = Hardware((small, replace(small, index=1, free_bytes=2 * GB)), (), True, lambda: True)
    found = plan_memory(FACTS, LoadOptions(ctx=8192, backend="llamacpp"), machine(hardware=both))
    assert [one.of for one in found.gpu_layers] == [33, 33]
    first, second = (one.layers for one in found.gpu_layers)
    assert 0 < second < first < 20
    assert found.speed is not None
    cpu = plan_memory(FACTS, LoadOptions(ctx=8192), machine()).speed
    assert cpu is not None
    assert cpu.most_tokens_per_s < found.speed.most_tokens_per_s < 1000
    roomy = replace(both, gpus=(replace(small, free_bytes=40 * GB), small))
    whole = plan_memory(FACTS, LoadOptions(backend="llamacpp"), machine(hardware=roomy))
    assert [one.layers for one in whole.gpu_layers] == [33, 0]


@pytest.mark.parametrize("entry", catalog.catalog_entries(), ids=lambda entry: entry.alias)
def test_every_entry_of_the_catalog_computes_or_says_what_it_lacks(entry: CatalogEntry) -> None:
    quant = entry.gguf.quant
    facts = remote_model_facts(entry.alias, quant, entry.gguf.size(quant) or 0, entry)
    found = plan_memory(facts, NOTHING, machine(ram_gb=400))
    assert found.fits == (bool(facts.weights_bytes) or None)
    if not facts.weights_bytes:
        assert "the size of its weights" in found.missing
        assert (found.total_bytes, found.largest_ctx, found.speed) == (None, None, None)
        return
    assert found.speed is not None
    assert found.speed.bytes_per_token <= facts.weights_bytes * 1.001
    if found.kv_bytes_per_1k is None:
        assert set(found.missing) & {"layers", "hidden", "heads", "kv_heads", "head_dim", "vocab"}
        return
    # from Qwen's 0.5B to OLMo 2, which caches all of its heads
    assert 5e6 < found.kv_bytes_per_1k < 6e8
    assert (found.ctx_train is None) == ("context" in found.missing)
    assert found.largest_ctx == found.ctx_train


def test_a_token_reads_only_active_experts() -> None:
    found = catalog.find_entry("qwen3-30b-a3b")
    assert found is not None
    facts = remote_model_facts("moe", "Q4_K_M", 18 * GB, found[0])
    assert facts.read_bytes == pytest.approx(18 * GB * 3.04 / 30.53, rel=1e-3)


def test_a_folder_needs_the_cuda_backend(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "m", "llama")
    header = json.dumps(
        {"w": {"dtype": "BF16", "shape": [4, 4], "data_offsets": [0, 32]}, "__metadata__": {}}
    ).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(32)
    (folder / "model.safetensors").write_bytes(content)
    facts = local_model_facts(model_folder(folder), "safetensors")
    assert facts.weights_bytes == 32
    with pytest.raises(InvalidRequest, match="only the cuda backend runs"):
        plan_memory(facts, NOTHING, machine())
    slow = plan_memory(facts, LoadOptions(backend="cuda", device="cpu"), machine())
    assert slow.weights_bytes == 64  # sixteen bits become thirty-two


def write_tensors(path: Path, tensors: dict[str, tuple[str, list[int], int]]) -> None:
    """A safetensors file of zeros. tensors: by name, type, shape and bytes."""
    header, at = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(at))


@pytest.mark.parametrize(
    ("bits", "name", "wanted"),
    [
        (4, "model.layers.0.mlp.down_proj", 4096 + 256 + 256 + 128),
        (3, "model.layers.0.mlp.down_proj", 2 * 128 * 64 + 128),
        (4, "model.layers.0.mlp.experts.7.down_proj", 2 * 128 * 64 + 128),
    ],
)
def test_weights_that_are_widened_count_as_they_are_kept(
    bits: int, name: str, wanted: int, tmp_path: Path
) -> None:
    folder = write_config(
        tmp_path / "m",
        "llama",
        quantization_config={"quant_method": "gptq", "bits": bits, "group_size": 64},
    )
    words = 128 * bits // 32
    linear = {
        f"{name}.qweight": ("I32", [words, 64], 4 * words * 64),
        f"{name}.scales": ("F16", [2, 64], 256),
        f"{name}.qzeros": ("I32", [2, 64 * bits // 32], 8 * 64 * bits // 32),
        "model.norm.weight": ("BF16", [64], 128),
    }
    write_tensors(folder / "model.safetensors", linear)
    facts = local_model_facts(model_folder(folder), "safetensors")
    assert facts.weights_bytes == facts.read_bytes == wanted


def test_footprints_of_what_is_not_known() -> None:
    assert estimate_footprint(0, None).need_bytes() == 64 << 20
    assert estimate_footprint(8 * GB, None).need_bytes() == int(8 * GB * 1.05) + GB
    known = estimate_footprint(5 * GB, SHAPE)
    assert known.need_bytes() == known.need_bytes(8192)
    # invalid values are rejected by the engine
    assert known.need_bytes(-5) == known.need_bytes(0)
    assert known.need_bytes(10**15) == known.need_bytes(131_072)
    odd = estimate_footprint(5 * GB, SHAPE, options=LoadOptions(cache_type_k="nonsense"))
    assert odd == known


def test_weights_as_they_are_kept() -> None:
    assert loaded_weight_bytes(5, 8, "llamacpp", is_gguf=True) == 5
    assert loaded_weight_bytes(5, 8, "cuda", is_gguf=True) == 16
    assert loaded_weight_bytes(5, None, "cuda", is_gguf=True) == 20
    assert loaded_weight_bytes(5, 8, "cuda on cpu", is_gguf=True) == 32
    assert loaded_weight_bytes(5, 8, "cuda", is_gguf=False) == 5
    assert loaded_weight_bytes(5, 8, "cuda on cpu", is_gguf=False) == 10


RULES = st.sampled_from(
    [
        kv_sizing.LLAMACPP_POOL,
        replace(kv_sizing.LLAMACPP_POOL, num_parts=4),
        kv_sizing.CUDA_ON_CPU_POOL,
    ]
)


@given(
    rules=RULES,
    free=st.integers(-(10**9), 10**11),
    token_bytes=st.floats(1, 10**6),
    trained=st.integers(1, 10**6),
    ctx=st.none() | st.integers(1, 10**6),
)
def test_a_pool_fits_and_holds_its_context(
    rules: kv_sizing.KVPoolRules, free: int, token_bytes: float, trained: int, ctx: int | None
) -> None:
    wanted = KVSizeRequest(ctx=ctx, kv_tokens=None, ctx_train=trained)
    try:
        size = kv_sizing.resolve_kv_size(wanted, rules, token_bytes=token_bytes, free_bytes=free)
    except InvalidRequest:
        assert ctx is not None
        assert ctx > trained
        return
    except OutOfMemory:
        least = rules.num_parts * (
            min(ctx or rules.granularity_tokens, trained) + rules.granularity_tokens
        )
        assert least * token_bytes > free
        return
    assert size.kv_tokens * token_bytes <= free
    assert size.kv_tokens % (rules.granularity_tokens * rules.num_parts) == 0
    assert size.ctx * rules.num_parts <= size.kv_tokens
    assert 0 < size.ctx <= trained
    assert ctx is None or size.ctx == ctx


def test_decode_rates_by_type() -> None:
    times = StepTimes({"Q4_K_M": (5e-11, 1e-10, 2e-10, 4e-10)})
    plan = plan_memory(FACTS, LoadOptions(), machine(step_times=times))
    # 4 GB are read in 0.2 s; 4 and 16 tokens take 2 and 4 times as long
    assert plan.rates is not None
    assert tuple(plan.rates) == pytest.approx((5.0, 10.0, 20.0))
    other = replace(FACTS, quant="F16")
    assert plan_memory(other, LoadOptions(), machine(step_times=times)).rates is None
    assert FACTS.shape is not None
    experts = replace(FACTS, shape=replace(FACTS.shape, num_experts=8, num_active_experts=2))
    assert plan_memory(experts, LoadOptions(), machine(step_times=times)).rates is None
    on_gpu = Hardware((H200,), (), True, lambda: True)
    assert plan_memory(FACTS, LoadOptions(), machine(64, on_gpu, step_times=times)).rates is None


def test_the_fastest_type_for_each_use() -> None:
    rates = {"a": DecodeRates(3, 4, 5), "b": DecodeRates(2, 6, 4), "c": None}
    assert fastest_by_use(rates) == {"one stream": "a", "3 drafts": "b", "16 streams": "a"}
    assert fastest_by_use({"a": DecodeRates(3, 4, 5), "c": None}) == {}


@pytest.fixture
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """No other program runs; measurements give these values, one after another."""
    figures = [1e9, 2e9, 3e9]
    cache = tmp_path / "cache" / "measurements.json"
    monkeypatch.setattr(measurements, "measurements_path", lambda: cache)
    monkeypatch.setattr("psutil.getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(bandwidth, "measure_ram_bandwidth", lambda: figures.pop(0))
    return figures


def test_bandwidth_is_measured_once(quiet: list[float], tmp_path: Path) -> None:
    assert bandwidth.memory_bandwidth() == Bandwidth(1e9, "measured now")
    assert bandwidth.memory_bandwidth() == Bandwidth(1e9, "measured before")
    assert bandwidth.memory_bandwidth(remeasure=True) == Bandwidth(2e9, "measured now")
    assert bandwidth.memory_bandwidth().bytes_per_s == 2e9
    kept = tmp_path / "cache" / "measurements.json"
    kept.write_text("{damaged")
    assert bandwidth.memory_bandwidth() == Bandwidth(3e9, "measured now")
    (machine,) = json.loads(kept.read_text())
    kept.write_text(json.dumps({machine: "fast", "another machine": 5e9}))
    quiet.append(4e9)
    assert bandwidth.memory_bandwidth().bytes_per_s == 4e9
    assert json.loads(kept.read_text()) == {machine: 4e9, "another machine": 5e9}


def test_a_busy_machine_is_measured_again(
    quiet: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.getloadavg", lambda: (99.0, 0.0, 0.0))
    found = bandwidth.memory_bandwidth()
    assert (found.bytes_per_s, "busy" in found.source) == (1e9, True)
    assert bandwidth.memory_bandwidth().bytes_per_s == 2e9
    assert not measurements.measurements_path().exists()


def test_a_folder_that_cannot_be_written_costs_only_time(quiet: list[float]) -> None:
    measurements.measurements_path().parent.write_text("a file in its place")
    assert bandwidth.memory_bandwidth().bytes_per_s == 1e9
    assert bandwidth.memory_bandwidth().bytes_per_s == 2e9


def test_a_gpu_that_cannot_be_measured(quiet: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "measure_gpu_bandwidth", lambda index: 0.0)
    assert bandwidth.gpu_bandwidth(H200) is None
    named = bandwidth.gpu_bandwidth(replace(H200, bandwidth_bytes_per_s=4.8e12))
    assert named == Bandwidth(4.8e12, "reported by the driver")


def test_ram_bandwidth_is_measured() -> None:
    assert 1e7 < bandwidth.measure_ram_bandwidth(block_bytes=1 << 20, rounds=1) < 1e13


def test_without_a_gpu_nothing_is_measured_of_one() -> None:
    assert gpu_bandwidth.measure_gpu_bandwidth(0) == 0.0
