"""Prometheus pages of other servers: names, missing metrics, pages that are not metrics."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from localgen.backends.errors import ServerUnavailable
from localgen.client.prometheus import MetricsParser
from localgen.client.snapshot import LatencyStats, ModelCounters, ModelSnapshot, ServerSnapshot
from localgen.tui.gauges.sample_builder import SampleBuilder

LLAMA = """\
# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 1532
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total 8123
# TYPE llamacpp:n_decode_total counter
llamacpp:n_decode_total 4000
# TYPE llamacpp:n_busy_slots_per_decode gauge
llamacpp:n_busy_slots_per_decode 2.5
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 3
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 1
"""
SGLANG = """\
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="qwen",tp_rank="0"} 5.0
sglang:num_running_reqs{model_name="qwen",tp_rank="1"} 5.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{model_name="qwen",tp_rank="0"} 2.0
# TYPE sglang:token_usage gauge
sglang:token_usage{model_name="qwen",tp_rank="0"} 0.28
# TYPE sglang:num_used_tokens gauge
sglang:num_used_tokens{model_name="qwen",tp_rank="0"} 28000
# TYPE sglang:max_total_num_tokens gauge
sglang:max_total_num_tokens{model_name="qwen",tp_rank="0"} 100000
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{model_name="qwen",is_streaming="true"} 800
sglang:prompt_tokens_total{model_name="qwen",is_streaming="false"} 200
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{model_name="qwen"} 7557
# TYPE sglang:cached_tokens_total counter
sglang:cached_tokens_total{model_name="qwen"} 400
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{model_name="qwen",tp_rank="0"} 2.4
"""


def only(found: ServerSnapshot) -> ModelSnapshot:
    assert len(found.models) == 1
    return found.models[0]


def vllm(ttft_s: tuple[float, ...] = (), engines: tuple[str, ...] = ("0",)) -> str:
    """A page written with vLLM's own library."""
    registry = CollectorRegistry()
    labels = ("model_name", "engine")
    running = Gauge("vllm:num_requests_running", "R", labels, registry=registry)
    waiting = Gauge("vllm:num_requests_waiting", "W", labels, registry=registry)
    share = Gauge("vllm:kv_cache_usage_perc", "K", labels, registry=registry)
    generated = Counter("vllm:generation_tokens", "G", labels, registry=registry)
    steps = Histogram("vllm:iteration_tokens_total", "I", labels, registry=registry)
    ttft = Histogram(
        "vllm:time_to_first_token_seconds",
        "T",
        labels,
        buckets=(0.1, 0.2, 0.4),
        registry=registry,
    )
    Gauge(
        "vllm:cache_config_info", "C", ("num_gpu_blocks", "block_size"), registry=registry
    ).labels("1000", "16").set(1)
    Gauge("process_open_fds", "F", registry=registry).set(9)
    for engine in engines:
        of = ("llama", engine)
        running.labels(*of).set(4)
        waiting.labels(*of).set(1)
        share.labels(*of).set(0.25)
        generated.labels(*of).inc(500)
        steps.labels(*of).observe(4)
        for each in ttft_s:
            ttft.labels(*of).observe(each)
    return generate_latest(registry).decode()


def test_llama_server_metrics_are_parsed() -> None:
    found = MetricsParser().parse(LLAMA, 0)
    model = only(found)
    assert (found.server_type, model.name) == ("llama-server", "llama-server")
    assert (model.running, model.waiting) == (3, 1)
    assert model.counters == ModelCounters(
        prompt_tokens=1532,
        generated_tokens=10_000,  # of the steps: its own counter grows when a request ends
        steps=4000,
        step_sequences=10_000,
    )
    assert (model.ttft, model.itl) == (LatencyStats(), LatencyStats())
    assert model.kv_usage is None
    assert model.kv_tokens is None
    assert (model.sequences, found.finished_requests, found.machine) == (None, None, None)


def test_sglang_ranks_are_combined() -> None:
    found = MetricsParser().parse(SGLANG, 0)
    model = only(found)
    assert (found.server_type, model.name) == ("SGLang", "qwen")
    assert (model.running, model.waiting) == (5, 2)
    assert (model.kv_usage, model.kv_used, model.kv_tokens) == (0.28, 28_000, 100_000)
    assert model.counters == ModelCounters(
        prompt_tokens=1000, generated_tokens=7557, prefix_queries=1000, prefix_hits=400
    )
    assert model.speculation is not None
    assert model.speculation.tokens_per_step == 2.4


def test_two_vllm_engines_are_combined() -> None:
    model = only(MetricsParser().parse(vllm(engines=("0", "1")), 0))
    assert (model.name, model.running, model.waiting) == ("llama", 8, 2)
    assert model.kv_usage == 0.25, "a share is not added up"
    assert (model.kv_tokens, model.kv_used) == (16_000, 4_000)
    assert (model.counters.generated_tokens, model.counters.steps) == (1000, 2)


def test_percentiles_are_of_the_last_minute() -> None:
    reader = MetricsParser()
    old = (0.3,) * 50
    assert only(reader.parse(vllm(old), 0)).ttft == LatencyStats(), "nothing has come since"
    now = only(reader.parse(vllm((*old, 0.15, 0.15)), 10)).ttft
    assert now.last_ms == pytest.approx(150)
    assert now.p50_ms == pytest.approx(150)
    assert now.p99_ms == pytest.approx(199)
    # the same page: nothing new, but still within the minute
    assert only(reader.parse(vllm((*old, 0.15, 0.15)), 40)).ttft == now
    later = only(reader.parse(vllm((*old, 0.15, 0.15, 9.0)), 100)).ttft
    assert later.p50_ms == pytest.approx(400), "above the last bound, that bound"
    assert later.last_ms == pytest.approx(9000)


def test_restarted_server_begins_a_new_minute() -> None:
    reader = MetricsParser()
    reader.parse(vllm((0.3,) * 50), 0)
    assert only(reader.parse(vllm((0.15,)), 1)).ttft.p50_ms is None
    assert only(reader.parse(vllm((0.15, 0.15)), 2)).ttft.p50_ms == pytest.approx(150)


def test_older_vllm_names_are_parsed() -> None:
    text = '# TYPE vllm:gpu_cache_usage_perc gauge\nvllm:gpu_cache_usage_perc{model_name="m"} 0.5\n'
    assert only(MetricsParser().parse(text, 0)).kv_usage == 0.5


def test_our_own_metrics_are_understood_too() -> None:
    text = (
        "# TYPE localgen:num_requests_running gauge\n"
        'localgen:num_requests_running{model_name="tiny"} 2\n'
    )
    found = MetricsParser().parse(text, 0)
    assert (found.server_type, only(found).running) == ("localgen", 2)


@pytest.mark.parametrize(
    "text",
    ["", "<html>no</html>", "vllm:x{a= 1\n", "process_open_fds 4\n", "\0\0\0", "a b c d e"],
)
def test_pages_without_metrics_are_rejected(text: str) -> None:
    with pytest.raises(ServerUnavailable, match=r"^/metrics (has no|is not)"):
        MetricsParser().parse(text, 0)


def test_values_that_are_not_numbers_are_unknown() -> None:
    text = '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{model_name="m"} NaN\n'
    assert MetricsParser().parse(text, 0).models == ()


def vllm_page(at_s: float, rate: float, ttft_s: float) -> str:
    """A server that answers requests of 20 tokens one after another, at `rate` tokens/s."""
    tokens = int(at_s * rate)
    requests = 1 + tokens // 20
    labels = '{engine="0",model_name="m"}'
    return f"""\
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{labels} {tokens}
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{{engine="0",model_name="m",le="+Inf"}} {tokens}
vllm:iteration_tokens_total_sum{labels} {tokens}
vllm:iteration_tokens_total_count{labels} {tokens}
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{engine="0",model_name="m",le="0.1"}} {requests}
vllm:time_to_first_token_seconds_bucket{{engine="0",model_name="m",le="+Inf"}} {requests}
vllm:time_to_first_token_seconds_sum{labels} {requests * ttft_s}
vllm:time_to_first_token_seconds_count{labels} {requests}
"""


def llama_page(at_s: float, rate: float) -> str:
    """llama-server counts the tokens of an answer at its end, but its steps at once."""
    return f"""\
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total 0
# TYPE llamacpp:n_decode_total counter
llamacpp:n_decode_total {int(at_s * rate)}
# TYPE llamacpp:n_busy_slots_per_decode gauge
llamacpp:n_busy_slots_per_decode 1
"""


@pytest.mark.parametrize("rate", [7.7, 40.0, 235.0, 1234.0])
@pytest.mark.parametrize("server", ["vLLM", "llama-server"])
def test_the_gauges_show_the_speed_of_a_server_within_three_percent(
    server: str, rate: float
) -> None:
    parser, builder, shown = MetricsParser(), SampleBuilder(), []
    for at_s in (n * 0.5 for n in range(60)):
        page = vllm_page(at_s, rate, 0.056) if server == "vLLM" else llama_page(at_s, rate)
        shown.append(builder.add_snapshot(at_s, parser.parse(page, at_s)))
    speeds = [sample.throughput.decode_per_s for sample in shown[5:]]
    # a sample may miss the token that is being generated
    assert all(speed == pytest.approx(rate, rel=0.03, abs=0.5) for speed in speeds)
    assert sum(filter(None, speeds)) / len(speeds) == pytest.approx(rate, rel=0.03)
    if server == "vLLM":
        assert shown[-1].latency.ttft.last_ms == pytest.approx(56, abs=5)
