"""Rooflines: closed forms, limits of memory, tensor parallelism, experts, speculation."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from test_plan import FACTS, GB, SHAPE, machine

from localgen.backends.errors import InvalidRequest
from localgen.backends.formats.architecture.model_shape import LayerCacheShape
from localgen.backends.formats.model_facts import ModelFacts
from localgen.backends.model_info import LoadOptions
from localgen.machine.accelerators import ACCELERATORS, accelerator_of_device, find_accelerator
from localgen.machine.gpus import Gpu
from localgen.machine.step_times import StepTimes
from localgen.placement.backend_choice import Hardware
from localgen.planning.curves import Devices, model_curves, parse_gpu
from localgen.planning.plan import plan_memory
from localgen.planning.planner import PlannedModel
from localgen.planning.resources import MachineResources
from localgen.planning.roofline import Roofline, expected_tokens, speculative_speedup

H100 = parse_gpu("h100")
# 8 billion parameters in 16 bits
WIDE = replace(
    FACTS,
    is_gguf=False,
    weights_bytes=16 * GB,
    read_bytes=16 * GB,
    read_params=8 * GB,
    quant="safetensors",
)


def curves(
    facts: ModelFacts,
    devices: Devices,
    options: LoadOptions = LoadOptions(ctx=4096),
    resources: MachineResources | None = None,
    draft: ModelFacts | None = None,
) -> list[Roofline]:
    found = PlannedModel((facts,), (), draft, options, resources or machine(), None)
    return model_curves(found, devices, lambda _: None)


def h100(facts: ModelFacts = WIDE, ctx: int = 4096, tp: int = 1) -> Roofline:
    return curves(facts, Devices((H100,), tp), LoadOptions(ctx=ctx))[-1]


def test_one_request_on_a_gpu_is_bandwidth_over_bytes() -> None:
    line = h100(ctx=1)
    # 32 layers of 8 heads of 128 keys and values of two bytes
    assert line.costs.cache_read(1) == 131_072
    assert line.tokens_per_s(1) == pytest.approx(3.35e12 / (16e9 + 131_072))
    assert line.side(1) == "memory"


def test_the_ridge_of_a_dense_model_in_16_bits_is_the_intensity_of_the_gpu() -> None:
    line = h100(ctx=1)
    ridge = line.ridge
    assert ridge is not None
    # 2 operations for each weight of 2 bytes: as many requests as operations per byte
    assert ridge == pytest.approx(989e12 / 3.35e12, rel=0.01)
    assert line.side(ridge - 1) == "memory"
    assert line.side(ridge) == "compute"
    assert line.memory_s(ridge) == pytest.approx(line.compute_s(ridge), rel=0.01)
    assert line.tokens_per_s(10 * ridge) == pytest.approx(989e12 / 16e9, rel=0.01)


def test_long_contexts_keep_memory_the_limit() -> None:
    line = h100(ctx=32_768)
    assert line.ridge is None
    cache = 32_768 * 131_072
    assert line.tokens_per_s(1000) == pytest.approx(1000 * 3.35e12 / (16e9 + 1000 * cache))
    assert line.cache_share(1) == pytest.approx(cache / (16e9 + cache))
    assert line.at_context(1).cache_share(1) < 1e-4


def test_requests_that_fit() -> None:
    line = h100()
    free = 79.6 * 2**30 - 16e9 - line.costs.buffer_bytes
    assert line.max_requests == int(free / (4096 * 131_072))
    assert h100(replace(WIDE, weights_bytes=90 * GB, read_bytes=90 * GB)).max_requests == 0


def test_the_first_point_is_the_speed_of_the_plan() -> None:
    options = LoadOptions(ctx=4096)
    speed = plan_memory(FACTS, options, machine()).speed
    assert speed is not None
    (here,) = curves(FACTS, Devices())
    assert here.tokens_per_s(1) == pytest.approx(speed.most_tokens_per_s_full)
    assert here.device.flops is None
    assert here.ridge is None
    assert "compute unknown" in here.device.source


def test_the_peak_of_a_cpu_is_what_a_prompt_reached() -> None:
    times = StepTimes({"Q4_K_M": (5e-11, 1e-10, 2e-10, 6.4e-10)})
    facts = replace(FACTS, read_params=7 * GB)
    (here,) = curves(facts, Devices(), resources=machine(step_times=times))
    # 64 tokens took 6.4e-10 s for each byte: one takes 1e-11 s
    assert here.compute_s(1) == pytest.approx(4 * GB * 1e-11)
    assert here.compute_s(8) == pytest.approx(8 * here.compute_s(1))
    assert "compute measured for Q4_K_M" in here.device.source


def test_the_peak_of_a_known_gpu_in_this_machine() -> None:
    gpu = Gpu(0, "NVIDIA H100 80GB HBM3", 80 * GB, 79 * GB, (9, 0))
    resources = machine(64, Hardware((gpu,), (), True, lambda: True), gpu_rate=3e12)
    (here,) = curves(WIDE, Devices(), resources=resources)
    assert (here.device.bytes_per_s, here.device.flops) == (3e12, 989e12)
    other = replace(gpu, name="GPU of tomorrow")
    resources = machine(64, Hardware((other,), (), True, lambda: True))
    assert curves(WIDE, Devices(), resources=resources)[0].device.flops is None


def test_fp8_weights_are_multiplied_in_8_bits() -> None:
    fp8 = replace(WIDE, quant="fp8", weights_bytes=8 * GB, read_bytes=8 * GB)
    assert h100(fp8).device.flops == 1979e12
    assert h100(replace(fp8, quant="awq")).device.flops == 989e12
    a100 = curves(fp8, Devices((parse_gpu("a100"),)))[-1]
    assert a100.device.flops == 312e12


def test_tensor_parallelism_divides_all_but_the_sums() -> None:
    one, two = h100(), h100(tp=2)
    assert two.device.name == "2 x h100"
    assert two.memory_s(16) == pytest.approx(one.memory_s(16) / 2)
    assert two.compute_s(16) == pytest.approx(one.compute_s(16) / 2)
    # a ring sends half of the sums twice: two sums of 4096 values of 2 bytes in each of 32 layers
    assert two.link_s(16) == pytest.approx(16 * 2 * 32 * 4096 * 2 / 450e9)
    assert two.step_s(16) == pytest.approx(two.memory_s(16) + two.link_s(16))
    assert two.max_requests > 2 * one.max_requests


def test_more_gpus_than_heads_keep_copies_of_the_cache() -> None:
    narrow = replace(SHAPE, layer_caches=(LayerCacheShape(2, 128, 128),) * 32)
    line = h100(replace(WIDE, shape=narrow), tp=8)
    whole = line.costs.cache_read(4096)
    assert line.memory_s(4) == pytest.approx((16e9 / 8 + 4 * whole / 2) / 3.35e12)


def test_experts_are_read_as_often_as_tokens_draw_them() -> None:
    shape = replace(SHAPE, num_experts=16, num_active_experts=2)
    facts = replace(WIDE, shape=shape, weights_bytes=17 * GB, read_bytes=3 * GB)
    costs = h100(facts).costs
    # 1 GB is always read, 16 experts take 1 GB each
    assert costs.weights_read(1) == pytest.approx(3 * GB)
    chance = random.Random(1)
    for tokens in (2, 8, 32):
        drawn = [
            len({expert for _ in range(tokens) for expert in chance.sample(range(16), 2)})
            for _ in range(4000)
        ]
        mean = sum(drawn) / len(drawn)
        assert costs.weights_read(tokens) == pytest.approx(GB + mean * GB, rel=0.02)
    assert costs.weights_read(10_000) == pytest.approx(17 * GB)
    line = h100(facts, ctx=1)
    assert line.ridge is not None
    assert line.side(line.ridge - 1) == "memory"


def test_windows_bound_what_is_read() -> None:
    shape = replace(SHAPE, layer_caches=(LayerCacheShape(8, 128, 128, 512),) * 32)
    costs = h100(replace(WIDE, shape=shape)).costs
    assert costs.cache_read(100_000) == costs.cache_read(512)
    assert costs.attention_flops(100_000) == 32 * 2 * 32 * 256 * 512


@pytest.mark.parametrize("acceptance", [0.3, 0.8, 0.99])
@pytest.mark.parametrize("drafts", [1, 3, 8])
def test_tokens_of_a_pass_by_the_closed_form(acceptance: float, drafts: int) -> None:
    closed = (1 - acceptance ** (drafts + 1)) / (1 - acceptance)
    assert expected_tokens(acceptance, drafts) == pytest.approx(closed)
    assert expected_tokens(1.0, drafts) == drafts + 1


def test_tokens_of_a_pass_by_simulation() -> None:
    chance, total, passes = random.Random(2), 0, 20_000
    for _ in range(passes):
        accepted = next((k for k in range(4) if chance.random() > 0.7), 4)
        total += accepted + 1
    assert total / passes == pytest.approx(expected_tokens(0.7, 4), rel=0.02)


def test_drafts_are_free_where_memory_limits() -> None:
    line = h100(ctx=1)
    assert speculative_speedup(line, 0.8, 4) == pytest.approx(expected_tokens(0.8, 4), rel=1e-3)
    # drafts that take a fifth of a step each: Leviathan et al. 2023, theorem 3.8
    fifth = replace(line.costs, read_bytes=line.costs.read_bytes / 5)
    small = replace(SHAPE, layer_caches=())
    draft = replace(line, costs=replace(fifth, shape=small))
    slower = speculative_speedup(replace(line, draft=draft), 0.8, 4)
    assert slower == pytest.approx(expected_tokens(0.8, 4) / (1 + 4 / 5), rel=1e-3)


def test_cost_of_a_million_tokens() -> None:
    line = curves(WIDE, Devices((parse_gpu("h100=2.50"),), tp=2))[-1]
    per_hour = 3600 * line.tokens_per_s(16)
    assert line.cost_per_million(16) == pytest.approx(2 * 2.5 / per_hour * 1e6)
    assert h100().cost_per_million(16) is None
    (here,) = curves(FACTS, Devices(price=0.1))
    assert here.cost_per_million(1) == pytest.approx(0.1 / 3600 / here.tokens_per_s(1) * 1e6)


@pytest.mark.parametrize("name", ["h100", "H100", "RTX 4090", "rtx-4090", "m4-max", "Apple M4 Max"])
def test_names_of_gpus(name: str) -> None:
    assert find_accelerator(name) is not None


def test_every_gpu_is_found_by_its_names() -> None:
    for gpu in ACCELERATORS:
        assert find_accelerator(gpu.key) is gpu
        assert find_accelerator(gpu.device_name) is gpu


@pytest.mark.parametrize(
    ("reported", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA RTX 6000 Ada Generation", "6000-ada"),
        ("NVIDIA A100 80GB PCIe", None),
        ("NVIDIA L40", None),
        ("NVIDIA A10G", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
    ],
)
def test_gpus_as_drivers_name_them(reported: str, key: str | None) -> None:
    found = accelerator_of_device(reported)
    assert (found and found.key) == key


def test_a_draft_models_memory_counts() -> None:
    draft = replace(WIDE, name="draft", weights_bytes=2 * GB, read_bytes=2 * GB)
    alone, both = h100(), curves(WIDE, Devices((H100,)), draft=draft)[-1]
    assert both.draft is not None
    used = 2e9 + both.draft.costs.buffer_bytes
    assert both.free_bytes == pytest.approx(alone.free_bytes - used)
    assert both.max_requests == int(both.free_bytes / (2 * 4096 * 131_072))
    large = replace(draft, weights_bytes=70 * GB, read_bytes=70 * GB)
    assert not curves(WIDE, Devices((H100,)), draft=large)[-1].fits


def test_recurrent_states_count_once_for_each_request() -> None:
    shape = replace(SHAPE, state_bytes=150_000_000)
    with_state, without = (h100(replace(FACTS, shape=one)) for one in (shape, SHAPE))
    assert with_state.costs.buffer_bytes == without.costs.buffer_bytes
    assert with_state.request_bytes == without.request_bytes + 150_000_000
    only_state = h100(replace(FACTS, shape=replace(shape, layer_caches=())))
    assert only_state.max_requests == int(only_state.free_bytes / 150_000_000)


def test_a_model_without_a_cache_fits() -> None:
    assert h100(replace(FACTS, shape=replace(SHAPE, layer_caches=()))).fits


def test_layers_on_this_machines_gpu_have_its_memory() -> None:
    gpu = Gpu(0, "NVIDIA GeForce RTX 4090", 24 * GB, 23 * GB, (8, 9))
    resources = machine(64, Hardware((gpu,), (), True, lambda: True))
    (here,) = curves(FACTS, Devices(), resources=resources)
    assert here.device.free_bytes == 23 * GB
    assert here.device.flops == 165e12


def test_links_may_limit() -> None:
    eight = curves(WIDE, Devices((parse_gpu("4090"),), tp=8), LoadOptions(ctx=512))[-1]
    assert eight.link_s(256) > eight.memory_s(256) > eight.compute_s(256)
    assert eight.side(256) == "links"
    assert eight.side(1) == "memory"


def test_a_head_is_on_one_gpu() -> None:
    three = h100(tp=3)
    # 8 heads of keys and values: 3 on two of the GPUs
    assert three.memory_s(4) == pytest.approx(
        (16e9 / 3 + 4 * three.costs.cache_read(4096) * 3 / 8) / 3.35e12
    )


def test_quantizations_are_compared_at_one_context() -> None:
    small = replace(FACTS, name="large", weights_bytes=9 * GB, read_bytes=9 * GB)
    found = PlannedModel((FACTS, small), (), None, LoadOptions(), machine(10), None)
    lines = model_curves(found, Devices(), lambda _: None)
    assert lines[0].ctx == lines[1].ctx < 8192


def test_an_unknown_bandwidth_is_said() -> None:
    gpu = Gpu(0, "GPU of tomorrow", 80 * GB, 79 * GB, (9, 0))
    resources = machine(64, Hardware((gpu,), (), True, lambda: True), gpu_rate=0)
    with pytest.raises(InvalidRequest, match="the memory bandwidth of this machine is unknown"):
        curves(WIDE, Devices(), resources=resources)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is not known; known are h200"),
        ("gtx 1080", "gtx 1080 is not known"),
        ("h100=", "give a price per hour, such as h100=2.50"),
        ("h100=free", "give a price"),
        ("h100=-1", "give a price"),
        ("h100=nan", "give a price"),
        ("h100=inf", "give a price"),
    ],
)
def test_wrong_gpus(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse_gpu(text)


def test_what_cannot_be_drawn() -> None:
    apple = Devices((parse_gpu("m4-max"),), tp=2)
    with pytest.raises(InvalidRequest, match="several m4-max cannot share a model"):
        curves(FACTS, apple)
    with pytest.raises(InvalidRequest, match="llama needs the cuda backend"):
        curves(WIDE, replace(apple, tp=1))
    with pytest.raises(InvalidRequest, match="it must be one of"):
        curves(WIDE, Devices((H100,)), LoadOptions(cache_type_k="q8_0"))
    experts = replace(FACTS, shape=replace(SHAPE, num_experts=8, num_active_experts=2))
    with pytest.raises(InvalidRequest, match="the size of its active experts of llama is unknown"):
        curves(replace(experts, read_bytes=5 * GB), Devices())
    unknown = replace(FACTS, shape=None, missing=("the shape of its layers",))
    with pytest.raises(InvalidRequest, match="the shape of its layers of llama is unknown"):
        curves(unknown, Devices())


def test_a_model_that_this_machine_cannot_run() -> None:
    with pytest.raises(InvalidRequest, match="which only the cuda backend runs"):
        curves(WIDE, Devices())
    notices: list[str] = []
    found = PlannedModel((WIDE,), (), None, LoadOptions(), machine(), None)
    (line,) = model_curves(found, Devices((H100,)), notices.append)
    assert line.device.name == "h100"
    assert line.ctx == 8192
    assert notices[0].startswith("this machine: llama is a Hugging Face model")
    with pytest.raises(InvalidRequest, match="was trained for 131,072 tokens"):
        curves(WIDE, Devices((H100,)), LoadOptions(ctx=200_000))


def test_a_gguf_file_is_widened_by_the_cuda_backend() -> None:
    assert h100(FACTS).costs.weights_bytes == 5 * GB
    gpu = Gpu(0, "H200", 140 * GB, 130 * GB, (9, 0))
    resources = machine(64, Hardware((gpu,), (), True, lambda: True))
    options = LoadOptions(ctx=4096, backend="cuda")
    assert curves(FACTS, Devices((H100,)), options, resources)[-1].costs.weights_bytes == 16 * GB
    # only it shares a model
    assert h100(FACTS, tp=2).costs.weights_bytes == 16 * GB
