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
    ("prompt_tokens", "_total", "prompt_tokens_total", "counter"),
    ("request_prefill_time_seconds", "_sum", "prompt_seconds_total", "counter"),
    ("generation_tokens", "_total", "tokens_predicted_total", "counter"),
    ("request_decode_time_seconds", "_sum", "tokens_predicted_seconds_total", "counter"),
    ("iteration_tokens_total", "_count", "n_decode_total", "counter"),
    ("num_requests_running", "", "requests_processing", "gauge"),
    ("num_requests_waiting", "", "requests_deferred", "gauge"),
    ("kv_cache_usage_perc", "", "kv_cache_usage_ratio", "gauge"),
)
# names of vLLM's earlier versions
_VLLM_OLD = {
    "inter_token_latency_seconds": "time_per_output_token_seconds",
    "kv_cache_usage_perc": "gpu_cache_usage_perc",
    "prefix_cache_queries": "gpu_prefix_cache_queries",
    "prefix_cache_hits": "gpu_prefix_cache_hits",
}
# ours alone
_NOT_VLLM = (
    *("num_threads", "num_requests_waiting_for_memory", "model_loads"),
    *("model_load_time_seconds", "request_failure"),
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
            if name in _VLLM_OLD:
                yield _renamed(family, _VLLM + _VLLM_OLD[name])
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
