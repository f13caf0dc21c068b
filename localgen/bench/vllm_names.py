"""Figures of requests under vLLM's names, as `vllm bench serve --save-result` writes them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from localgen.bench.estimates import percentile
from localgen.bench.measured_request import MeasuredRequest

_PERCENTILES = (50, 95, 99)


def vllm_figures(requests: Sequence[MeasuredRequest], took_s: float) -> dict[str, Any]:
    """Counts, throughput, and mean, median, deviation and percentiles of the latencies in ms.

    took_s: how long the load took. Latencies are those of answered requests.
    """
    answered = [request for request in requests if not request.error]
    inputs = sum(request.prompt_tokens for request in answered)
    outputs = sum(request.completion_tokens for request in answered)
    record: dict[str, Any] = {
        "num_prompts": len(requests),
        "completed": len(answered),
        "failed": len(requests) - len(answered),
        "duration": took_s,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(answered) / took_s,
        "output_throughput": outputs / took_s,
        "total_token_throughput": (inputs + outputs) / took_s,
    }
    latencies = {
        "ttft": [request.ttft_s for request in answered],
        "tpot": [request.tpot_s for request in answered if request.completion_tokens > 1],
        "itl": [gap_s for request in answered for gap_s in request.gaps_s],
        "e2el": [request.e2e_s for request in answered],
    }
    for name, seconds in latencies.items():
        if seconds:
            record |= {
                f"mean_{name}_ms": statistics.fmean(seconds) * 1e3,
                f"median_{name}_ms": statistics.median(seconds) * 1e3,
                f"std_{name}_ms": statistics.pstdev(seconds) * 1e3,
            } | {
                f"p{share}_{name}_ms": percentile(seconds, share / 100) * 1e3
                for share in _PERCENTILES
            }
    return record
