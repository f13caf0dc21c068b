"""The metrics again by the names of vLLM and llama-server, which dashboards know."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

_PREFIX = "localgen:"
_VLLM = "vllm:"
# (our family, its sample, llama-server's name, kind). Sums of histograms are its counters.
_LLAMA_SERVER = (
    # llama-server counts what it computes
    ("request_prefill_kv_computed_tokens", "_sum", "prompt_tokens_total", "counter"),
    ("prefix_cache_hits", "_total", "prompt_tokens_cached_total", "counter"),
    ("request_prefill_time_seconds", "_sum", "prompt_seconds_total", "counter"),
    ("generation_tokens", "_total", "tokens_predicted_total", "counter"),
    ("request_decode_time_seconds", "_sum", "tokens_predicted_seconds_total", "counter"),
    ("iteration_tokens_total", "_count", "n_decode_total", "counter"),
    ("spec_decode_num_drafts", "_total", "spec_decode_num_drafts_total", "counter"),
    ("spec_decode_num_draft_tokens", "_total", "spec_decode_num_draft_tokens_total", "counter"),
    (
        "spec_decode_num_accepted_tokens",
        "_total",
        "spec_decode_num_accepted_tokens_total",
        "counter",
    ),
    ("num_requests_running", "", "requests_processing", "gauge"),
    ("num_requests_waiting", "", "requests_deferred", "gauge"),
    ("kv_cache_usage_perc", "", "kv_cache_usage_ratio", "gauge"),
    ("kv_cache_tokens", "", "kv_cache_tokens", "gauge"),
    ("prefill_tokens_per_second", "", "prompt_tokens_seconds", "gauge"),
    ("decode_tokens_per_second", "", "predicted_tokens_seconds", "gauge"),
    ("sequences_per_step", "", "n_busy_slots_per_decode", "gauge"),
)
# (our family, another name at vLLM), mostly of its earlier versions
_VLLM_OTHER = (
    ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    ("prefix_cache_queries", "gpu_prefix_cache_queries"),
    ("prefix_cache_hits", "gpu_prefix_cache_hits"),
    ("prefix_cache_hits", "prompt_tokens_cached"),
)
# ours alone
_NOT_VLLM = (
    *("num_threads", "num_requests_waiting_for_memory", "model_loads"),
    *("model_load_time_seconds", "request_failure", "kv_cache_tokens", "sequences_per_step"),
    *("prefill_tokens_per_second", "decode_tokens_per_second"),
    *("kv_tier_bytes", "kv_tier_limit_bytes", "kv_tier_blocks"),
    *("kv_tier_hit_tokens", "kv_tier_saved_seconds", "kv_tier_refused"),
)


class AliasCollector(Collector):
    """Families of a registry by other names, each with the same labels and values."""

    def __init__(self, source: Collector) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        families = {family.name.removeprefix(_PREFIX): family for family in self._source.collect()}
        for name, family in families.items():
            if name not in _NOT_VLLM:
                yield _renamed(family, _VLLM + name)
        for name, alias in _VLLM_OTHER:
            if name in families:
                yield _renamed(families[name], _VLLM + alias)
        for name, suffix, alias, kind in _LLAMA_SERVER:
            if name in families:
                yield _single(families[name], suffix, f"llamacpp:{alias}", kind)


def _renamed(family: Metric, name: str) -> Metric:
    renamed = Metric(name, family.documentation, family.type)
    renamed.samples = [
        sample._replace(name=name + sample.name.removeprefix(family.name))
        for sample in family.samples
    ]
    return renamed


def _single(family: Metric, suffix: str, name: str, kind: str) -> Metric:
    """One sample of each series as a family of its own."""
    single = Metric(name.removesuffix("_total"), family.documentation, kind)
    chosen: Iterable[Sample] = (
        sample for sample in family.samples if sample.name == family.name + suffix
    )
    single.samples = [Sample(name, sample.labels, sample.value) for sample in chosen]
    return single
