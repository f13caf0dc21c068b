"""A model's own sampling defaults in generation_config.json."""

from __future__ import annotations

from typing import Any

from localgen.backends.sampling_params import SAMPLERS, SamplingParams, model_sampling_defaults


def parse_generation_config(config: dict[str, Any]) -> tuple[SamplingParams, tuple[str, ...]]:
    """The sampling defaults of a generation_config.json, and a note if they are invalid."""
    # without do_sample, transformers decodes greedily and ignores the rest
    if config.get("do_sample") is False:
        return SamplingParams(temperature=0.0), ()
    return model_sampling_defaults(
        {sampler.name: config.get(sampler.hf_key) for sampler in SAMPLERS if sampler.hf_key}
    )
