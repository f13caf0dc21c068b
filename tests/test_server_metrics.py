"""/metrics, request ids and the log line of each request."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import asdict, astuple
from functools import partial
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import ServerHarness, chat_body, server_harness, wait_until

from localgen.backends.engine_stats import EngineStats, KVTierStats
from localgen.backends.types import EmbedRequest, Request, RestoredTokens
from localgen.client.prometheus import MetricsParser
from localgen.client.snapshot import parse_localgen_stats
from localgen.server.models.manager import ModelManager
from localgen.server.openai.serializer import CompletionSerializer
from localgen.server.requests.embeddings import EmbeddingJob, compute_embeddings
from localgen.server.requests.generation import GenerationJob, GenerationResponse
from localgen.server.stats.metrics import Metrics
from localgen.server.stats.recent_requests import RecentRequests
from localgen.server.stats.request_log import RequestLog, create_log_formatter

OURS_ALONE = {
    *("num_threads", "kv_cache_tokens", "prefill_tokens_per_second", "decode_tokens_per_second"),
    "sequences_per_step",
}
OF_TIERS = {
    *("kv_tier_bytes", "kv_tier_limit_bytes", "kv_tier_blocks", "kv_tier_hit_tokens_total"),
    *("kv_tier_saved_seconds_total", "kv_tier_refused_total"),
}
GAUGES = OURS_ALONE | {
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
}
COUNTERS = {
    *("prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total"),
    *("prefix_cache_hits_total", "num_preemptions_total", "request_success_total"),
    *("spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total"),
    "spec_decode_num_accepted_tokens_total",
}
HISTOGRAMS = {
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
    *("request_time_per_output_token_seconds", "request_queue_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens"),
    *("request_inference_time_seconds", "request_max_num_generation_tokens", "request_params_n"),
    *("request_prefill_kv_computed_tokens", "request_params_max_tokens"),
    *("request_generation_tokens", "iteration_tokens_total"),
}


@pytest.fixture(scope="module")
def served() -> Iterator[ServerHarness]:
    with server_harness() as built:
        built.start()
        yield built


def figures(served: ServerHarness) -> dict[str, float]:
    """Metric values by name and the labels beside the model's name."""
    found = {}
    reply = served.http.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=")
    for family in text_string_to_metric_families(reply.text):
        for sample in family.samples:
            labels = [f"{key}={value}" for key, value in sorted(sample.labels.items())]
            found[" ".join([sample.name.removeprefix("localgen:"), *labels])] = sample.value
    return found


def log(served: ServerHarness) -> list[str]:
    """Log lines of ended requests."""
    lines = served.settings.log_path.read_text().splitlines()
    return [line for line in lines if " request id=" in line]


def test_requests_are_counted(served: ServerHarness) -> None:
    model = served.model()
    for _ in range(3):
        served.chat(model, "hello my world", max_tokens=50)
    wait_until(lambda: sum("model=echo " in line for line in log(served)) == 3)
    found = figures(served)
    names = {name.split()[0] for name in found}
    assert names >= GAUGES | COUNTERS
    for name in HISTOGRAMS:
        assert names >= {f"{name}_bucket", f"{name}_count", f"{name}_sum"}
    assert found["request_success_total finished_reason=stop model_name=echo"] == 3
    assert found["prompt_tokens_total model_name=echo"] == 15
    assert found["generation_tokens_total model_name=echo"] == 9
    assert found["prefix_cache_hits_total model_name=echo"] == 6
    assert found["time_to_first_token_seconds_count model_name=echo"] == 3
    assert found["e2e_request_latency_seconds_count model_name=echo"] == 3
    assert found["num_requests_running model_name=echo"] == 0


def test_dashboards_of_other_servers_find_their_names(served: ServerHarness) -> None:
    """The values are those of our names; llama-server's totals are sums and counts of ours."""
    served.chat(served.model("known"), "hello my world")
    label = "model_name=known"
    wait_until(lambda: f"prompt_tokens_total {label}" in figures(served))
    found = figures(served)
    for name in HISTOGRAMS - {"iteration_tokens_total"}:
        for suffix in ("count", "sum"):
            own = found.get(f"{name}_{suffix} {label}")
            assert found.get(f"vllm:{name}_{suffix} {label}") == own
    for name in (GAUGES | COUNTERS) - OURS_ALONE - {"request_success_total"}:
        assert found[f"vllm:{name} {label}"] == found[f"{name} {label}"]
    assert found[f"vllm:request_success_total finished_reason=stop {label}"] == 1
    for theirs, ours in {
        "vllm:time_per_output_token_seconds_count": "inter_token_latency_seconds_count",
        "vllm:gpu_cache_usage_perc": "kv_cache_usage_perc",
        "vllm:prompt_tokens_cached_total": "prefix_cache_hits_total",
        "llamacpp:prompt_tokens_total": "request_prefill_kv_computed_tokens_sum",
        "llamacpp:prompt_tokens_cached_total": "prefix_cache_hits_total",
        "llamacpp:spec_decode_num_accepted_tokens_total": "spec_decode_num_accepted_tokens_total",
        "llamacpp:prompt_seconds_total": "request_prefill_time_seconds_sum",
        "llamacpp:tokens_predicted_total": "generation_tokens_total",
        "llamacpp:tokens_predicted_seconds_total": "request_decode_time_seconds_sum",
        "llamacpp:n_decode_total": "iteration_tokens_total_count",
        "llamacpp:requests_processing": "num_requests_running",
        "llamacpp:requests_deferred": "num_requests_waiting",
        "llamacpp:kv_cache_tokens": "kv_cache_tokens",
        "llamacpp:prompt_tokens_seconds": "prefill_tokens_per_second",
        "llamacpp:predicted_tokens_seconds": "decode_tokens_per_second",
        "llamacpp:n_busy_slots_per_decode": "sequences_per_step",
    }.items():
        assert found[f"{theirs} {label}"] == found[f"{ours} {label}"], theirs
    assert not [
        name
        for name in found
        if name.removeprefix("vllm:").split()[0] in OURS_ALONE and name.startswith("vllm:")
    ]
    # a page has each name once, and is still that of localgen
    page = served.http.get("/metrics").text
    kinds = [line for line in page.splitlines() if line.startswith("# TYPE")]
    assert len({kind.split()[2] for kind in kinds}) == len(kinds)
    assert MetricsParser().parse(page, 0.0).server_type == "localgen"


def test_parameters_of_requests_are_counted(served: ServerHarness) -> None:
    model = served.model("params")
    served.chat(model, "hello my world", n=3, max_tokens=2)
    served.chat(model, "hello my world")
    label = "model_name=params"
    wait_until(lambda: figures(served).get(f"request_params_n_count {label}") == 2)
    found = figures(served)
    assert found[f"request_params_n_sum {label}"] == 4
    assert found[f"request_params_max_tokens_count {label}"] == 1
    assert found[f"request_params_max_tokens_sum {label}"] == 2
    assert found[f"request_max_num_generation_tokens_sum {label}"] == 2 + 3
    # the fake engine computes the words of each answer's prompt
    assert found[f"request_prefill_kv_computed_tokens_sum {label}"] == 3 * 3 + 3


def test_figures_of_an_engine() -> None:
    stats = EngineStats(
        kv_tokens=4096,
        kv_used=512,
        kv_page_tokens=16,
        prefill_tokens_per_s=900.0,
        decode_tokens_per_s=30.0,
        steps_total=4,
        step_sequences=(0, 3, 0, 1),
    )
    page = Metrics(lambda: [("paged", stats)], dict).render().decode()
    found = {
        sample.name: sample
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    assert found["llamacpp:kv_cache_tokens"].value == 512
    assert found["llamacpp:prompt_tokens_seconds"].value == 900
    assert found["llamacpp:predicted_tokens_seconds"].value == 30
    assert found["llamacpp:n_busy_slots_per_decode"].value == 1.5
    cache = found["vllm:cache_config_info"]
    assert (cache.value, cache.labels["model_name"]) == (1, "paged")
    assert (cache.labels["block_size"], cache.labels["num_gpu_blocks"]) == ("16", "256")
    # which `top --url` reads
    (model,) = MetricsParser().parse(page, 0.0).models
    assert (model.kv_tokens, model.kv_used) == (4096, 512)


RAM = KVTierStats(
    tier="ram", blocks=4, num_bytes=512, limit_bytes=1000, hit_tokens_total=30, saved_s_total=0.25
)
DISK = KVTierStats(
    tier="disk",
    blocks=9,
    num_bytes=2048,
    limit_bytes=4000,
    hit_tokens_total=12_288,
    saved_s_total=125.5,
    refused_total=2,
    error="No space left on device",
)


def test_each_tier_of_each_model_has_its_figures() -> None:
    both, one = EngineStats(kv_tiers=(RAM, DISK)), EngineStats(kv_tiers=(RAM,))
    page = Metrics(lambda: [("a", both), ("b", one), ("c", EngineStats())], dict).render().decode()
    assert "vllm:kv_tier" not in page
    found: dict[tuple[str, str], dict[str, float]] = {}
    kinds = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if "tier" in sample.labels:
                where = (sample.labels["model_name"], sample.labels["tier"])
                name = sample.name.removeprefix("localgen:")
                found.setdefault(where, {})[name] = sample.value
                kinds[name] = family.type
    assert found.keys() == {("a", "ram"), ("a", "disk"), ("b", "ram")}
    assert all(values.keys() == OF_TIERS for values in found.values())
    assert found["a", "disk"] == {
        "kv_tier_bytes": 2048,
        "kv_tier_limit_bytes": 4000,
        "kv_tier_blocks": 9,
        "kv_tier_hit_tokens_total": 12_288,
        "kv_tier_saved_seconds_total": 125.5,
        "kv_tier_refused_total": 2,
    }
    for name, kind in kinds.items():
        assert kind == ("counter" if name.endswith("_total") else "gauge"), name


def test_tiers_of_a_running_engine_are_in_the_metrics_and_the_statistics(
    served: ServerHarness,
) -> None:
    model = served.model("tiers", kv_tiers=[asdict(RAM), asdict(DISK)])
    served.chat(model, "hello my world")
    label = "model_name=tiers tier=disk"
    wait_until(lambda: figures(served).get(f"kv_tier_bytes {label}") == 2048)
    assert figures(served)[f"kv_tier_hit_tokens_total {label}"] == 12_288
    payload = served.http.get("/v1/stats").json()
    (found,) = [each for each in parse_localgen_stats(payload).models if each.name == "tiers"]
    assert found.kv_tiers == (RAM, DISK)


def test_the_log_says_what_came_from_other_tiers(served: ServerHarness) -> None:
    parts = (RestoredTokens("ram", 256, 1.5, 0.0), RestoredTokens("disk", 4096, 210.04, 54_000.0))
    for name, restored in (("one", parts[1:]), ("both", parts), ("none", ())):
        script = {"restored": [astuple(each) for each in restored]}
        served.chat(served.model(f"restored {name}", **script), "hello")
    wait_until(lambda: any('model="restored none"' in line for line in log(served)))
    one, both, none = (line for line in log(served) if 'model="restored' in line)
    assert " restored_tokens=4096 restored_from=disk restored_ms=210.0" in one
    assert " restored_tokens=4352 restored_from=ram,disk restored_ms=211.5" in both
    assert "restored_" not in none


def test_loads_are_counted(served: ServerHarness) -> None:
    served.chat(served.model("good"), "a")
    served.chat(served.model("bad", fail="it is damaged"), "a")
    found = figures(served)
    assert found["model_loads_total model_name=good outcome=loaded"] == 1
    assert found["model_loads_total model_name=bad outcome=load_failed"] == 1
    assert found["model_load_time_seconds_count model_name=good"] == 1
    assert "model_load_time_seconds_count model_name=bad" not in found


def test_inter_token_latency_is_measured(served: ServerHarness) -> None:
    list(served.events(served.model("slow", token_s=0.02), "one two three four"))
    count = "inter_token_latency_seconds_count model_name=slow"
    wait_until(lambda: figures(served).get(count) == 3)
    assert figures(served)["inter_token_latency_seconds_sum model_name=slow"] > 0.04


def test_counters_grow_while_an_answer_is_generated(served: ServerHarness) -> None:
    events = served.events(served.model("live", token_s=0.2), "word " * 30)
    tokens = "generation_tokens_total model_name=live"
    next(events)
    wait_until(lambda: figures(served).get(tokens, 0) >= 2)
    found = figures(served)
    assert found["time_to_first_token_seconds_count model_name=live"] == 1
    assert found["inter_token_latency_seconds_count model_name=live"] == found[tokens] - 1
    assert "e2e_request_latency_seconds_count model_name=live" not in found, "it has not ended"
    events.close()


def test_disconnects_are_counted(served: ServerHarness) -> None:
    model = served.model("left", token_s=0.05)
    events = served.events(model, "word " * 100)
    next(events)
    events.close()
    label = "request_failure_total model_name=left outcome=gone"
    wait_until(lambda: figures(served).get(label) == 1)
    assert "outcome=gone" in log(served)[-1]


def test_unknown_model_names_are_in_the_log_with_their_id_and_no_labels(
    served: ServerHarness,
) -> None:
    reply = served.chat("no-such-model")
    assert reply.status_code == 404
    name = reply.headers["x-request-id"]
    wait_until(lambda: f"id={name}" in log(served)[-1])
    found = figures(served)
    assert found["request_failure_total model_name=unknown outcome=model_not_found"] == 1
    assert not [name for name in found if "no-such-model" in name]
    assert "model=no-such-model" in log(served)[-1]


def test_the_log_says_how_long_a_prompt_was_that_did_not_fit(served: ServerHarness) -> None:
    body = chat_body(served.model("asked"), "hello " * 9000)
    reply = served.http.post("/v1/chat/completions", json=body)
    message = reply.json()["error"]["message"]
    assert re.search(r"\d{4,}|\d,\d{3}", message)
    name = reply.headers["x-request-id"]
    wait_until(lambda: any(name in line for line in log(served)))
    (line,) = [line for line in log(served) if name in line]
    assert "outcome=context_length_exceeded" in line
    assert message in line


@pytest.mark.parametrize("stream", [False, True])
def test_the_id_of_an_answer_is_in_its_headers_and_the_log(
    served: ServerHarness, stream: bool
) -> None:
    body = chat_body(served.model("asked"), "hello", stream=stream)
    reply = served.http.post("/v1/chat/completions", json=body)
    name = reply.headers["x-request-id"]
    assert name in reply.text
    wait_until(lambda: any(name in line for line in log(served)))
    (line,) = [line for line in log(served) if name in line]
    fields = dict(re.findall(r"(\w+)=(\S+)", line))
    assert fields["outcome"] == "stop"
    assert {"queue_ms", "template_ms", "prefill_ms", "decode_ms"} <= fields.keys()
    assert {"cached_tokens", "new_tokens", "answer_tokens"} <= fields.keys()


class BrokenManager:
    def acquire(self, *arguments: object, **options: object) -> None:
        raise RuntimeError("a defect")


def test_an_internal_error_is_no_client_that_left() -> None:
    recent = RecentRequests()
    journal, manager = RequestLog([recent]), cast(ModelManager, BrokenManager())
    request = EmbedRequest(id="a", inputs=("x",))
    embedding = EmbeddingJob(model="m", account="", timeout_s=None, request=request)
    with pytest.raises(RuntimeError):
        asyncio.run(compute_embeddings(manager, journal, embedding))
    generation = GenerationJob(
        id="b",
        model="m",
        account="",
        timeout_s=None,
        requests=(Request(id="b", prompt="x"),),
        stream=False,
        make_serializer=partial(CompletionSerializer.from_metadata, include_usage=False),
    )

    async def unused(*message: object) -> Any:
        raise AssertionError

    with pytest.raises(RuntimeError):
        asyncio.run(GenerationResponse(manager, journal, generation)({}, unused, unused))
    assert [end.outcome for end in recent.requests()] == ["internal_error"] * 2


def record(**fields: object) -> logging.LogRecord:
    made = logging.LogRecord("a.b", logging.INFO, "f", 1, "request", None, None)
    made.fields = fields
    return made


def test_a_line_for_programs_is_json() -> None:
    line = json.loads(create_log_formatter("json").format(record(id="x", ms=1.5)))
    assert (line["message"], line["id"], line["ms"], line["level"]) == ("request", "x", 1.5, "INFO")


def test_client_text_cannot_forge_log_lines() -> None:
    said = 'x outcome=stop\n2026 INFO request id="fake"'
    line = create_log_formatter().format(record(client=said, empty=""))
    assert "\n" not in line
    assert line.endswith(f'client={json.dumps(said)} empty=""')
    assert len(create_log_formatter("json").format(record(client=said)).splitlines()) == 1
