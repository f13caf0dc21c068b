"""Names of the Prometheus metrics of vLLM, SGLang, llama-server and localgen."""

from __future__ import annotations

from dataclasses import dataclass, field

# average sequences of a step, where there is no total
BUSY_SLOTS_PER_STEP = "llamacpp:n_busy_slots_per_decode"
# its labels hold the size of vLLM's KV cache
VLLM_CACHE_INFO = "vllm:cache_config_info"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricNames:
    """The metric names of one kind of server, all of which start with `prefix`.

    The first name present counts: names have changed between versions. model_label: the label with
    the model's name. rank_label: the label of ranks that report the same values; only rank 0 is
    read. counters: names by the fields of ModelCounters. counts_at_end: its counters of tokens grow
    when a request ends.
    """

    server_type: str
    prefix: str
    model_label: str = "model_name"
    rank_label: str | None = None
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    kv_usage: tuple[str, ...] = ()
    kv_used: tuple[str, ...] = ()
    kv_tokens: tuple[str, ...] = ()
    ttft: tuple[str, ...] = ()
    itl: tuple[str, ...] = ()
    tokens_per_step: tuple[str, ...] = ()
    counters: dict[str, tuple[str, ...]] = field(default_factory=dict)
    counts_at_end: bool = False


def _vllm_metric_names(prefix: str, kind: str) -> MetricNames:
    """vLLM's names; localgen uses the same with its own prefix."""
    return MetricNames(
        server_type=kind,
        prefix=prefix,
        running=(f"{prefix}num_requests_running",),
        waiting=(f"{prefix}num_requests_waiting",),
        kv_usage=(f"{prefix}kv_cache_usage_perc", f"{prefix}gpu_cache_usage_perc"),
        ttft=(f"{prefix}time_to_first_token_seconds",),
        itl=(
            f"{prefix}inter_token_latency_seconds",
            f"{prefix}time_per_output_token_seconds",
        ),
        counters={
            "prompt_tokens": (f"{prefix}prompt_tokens_total",),
            "generated_tokens": (f"{prefix}generation_tokens_total",),
            "steps": (f"{prefix}iteration_tokens_total_count",),
            "preemptions": (f"{prefix}num_preemptions_total",),
            "prefix_queries": (
                f"{prefix}prefix_cache_queries_total",
                f"{prefix}gpu_prefix_cache_queries_total",
            ),
            "prefix_hits": (
                f"{prefix}prefix_cache_hits_total",
                f"{prefix}gpu_prefix_cache_hits_total",
            ),
            "draft_tokens": (f"{prefix}spec_decode_num_draft_tokens_total",),
            "accepted_tokens": (f"{prefix}spec_decode_num_accepted_tokens_total",),
        },
    )


VLLM = _vllm_metric_names("vllm:", "vLLM")
LOCALGEN = _vllm_metric_names("localgen:", "localgen")
SGLANG = MetricNames(
    server_type="SGLang",
    prefix="sglang:",
    rank_label="tp_rank",
    running=("sglang:num_running_reqs",),
    waiting=("sglang:num_queue_reqs",),
    kv_usage=("sglang:token_usage",),
    kv_used=("sglang:num_used_tokens",),
    kv_tokens=("sglang:max_total_num_tokens",),
    ttft=("sglang:time_to_first_token_seconds",),
    itl=("sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds"),
    tokens_per_step=("sglang:spec_accept_length",),
    counters={
        "prompt_tokens": ("sglang:prompt_tokens_total",),
        "generated_tokens": ("sglang:generation_tokens_total",),
        "preemptions": ("sglang:num_retracted_requests_total",),
        "prefix_queries": ("sglang:prompt_tokens_total",),
        "prefix_hits": ("sglang:cached_tokens_total",),
    },
)
LLAMA_SERVER = MetricNames(
    server_type="llama-server",
    prefix="llamacpp:",
    running=("llamacpp:requests_processing",),
    waiting=("llamacpp:requests_deferred",),
    kv_usage=("llamacpp:kv_cache_usage_ratio",),
    kv_used=("llamacpp:kv_cache_tokens",),
    counters={
        "prompt_tokens": ("llamacpp:prompt_tokens_total",),
        "generated_tokens": ("llamacpp:tokens_predicted_total",),
        "steps": ("llamacpp:n_decode_total",),
        "draft_tokens": ("llamacpp:spec_decode_num_draft_tokens_total",),
        "accepted_tokens": ("llamacpp:spec_decode_num_accepted_tokens_total",),
    },
    counts_at_end=True,
)
# localgen first: it has the names of others as well
KNOWN_SERVERS = (LOCALGEN, VLLM, SGLANG, LLAMA_SERVER)
