"""RoPE and sliding window of each layer, from a config.json."""

from __future__ import annotations

from localgen.backends.formats.architecture.families import Family
from localgen.backends.formats.architecture.fields import ConfigFields
from localgen.backends.formats.architecture.rope import (
    QueryScaling,
    Rope,
    parse_rope,
    read_rope,
)

_NO_ROPE_INTERVAL = 4


def read_ropes(config: ConfigFields, family: Family, head_dim: int) -> tuple[Rope, Rope | None]:
    """RoPE of layers with full attention, and of those with a window if it differs."""
    if family.local_rope_theta is None and not family.unscaled_local_rope:
        # the first Llama files have no rope_theta
        theta = 10000.0 if family.architecture == "LlamaForCausalLM" else None
        partial = family.partial_rotary
        return read_rope(config, head_dim=head_dim, theta=theta, partial=partial), None
    both = config.section("rope_parameters")
    if both is not None and "full_attention" in both:
        full, sliding = both.section("full_attention"), both.section("sliding_attention")
        if sliding is None:
            raise config.load_error("rope_parameters has full_attention but no sliding_attention")
        local = parse_rope(config, sliding, head_dim=head_dim)
        return parse_rope(config, full, head_dim=head_dim), local
    rope = read_rope(config, head_dim=head_dim)
    if family.unscaled_local_rope:
        return rope, Rope(rope.theta, head_dim)
    theta = config.positive_float("rope_local_base_freq", family.local_rope_theta)
    return rope, Rope(theta, head_dim)


def read_sliding_windows(
    config: ConfigFields, family: Family, layers: int
) -> tuple[int | None, ...]:
    """Sliding window of each layer, as in ModelSpec."""
    window, sliding = _sliding_window(config, family), _sliding_layers(config, family, layers)
    if family.windows == "listed" and window is None and any(sliding):
        raise config.load_error("layer_types has sliding_attention, but there is no window")
    return tuple(window if slides else None for slides in sliding)


def _sliding_window(config: ConfigFields, family: Family) -> int | None:
    key = "sliding_window"
    if family.window_needs_flag and not config.flag("use_sliding_window", False):
        return None
    if family.gemma:
        return config.positive_int(key)
    if family.default_window and key not in config.values:
        return family.default_window
    return config.positive_int(key) if family.windows != "none" and key in config else None


def _sliding_layers(config: ConfigFields, family: Family, layers: int) -> list[bool]:
    """For each layer, whether the window applies to it, if there is one."""
    if family.windows in ("upper", "alternating", "listed") and "layer_types" in config:
        return _configured_sliding_layers(config, layers)
    match family.windows:
        case "upper":
            first = config.values.get("max_window_layers", 28)
            if isinstance(first, bool) or not isinstance(first, int) or first < 0:
                raise config.invalid_value("max_window_layers", "a number of layers")
            return [index >= first for index in range(layers)]
        case "alternating":
            every, key = family.full_attention_every, "sliding_window_pattern"
            if family.pattern_in_config:
                every = config.positive_int(key if key in config else f"_{key}", every)
            return [bool((index + 1) % every) for index in range(layers)]
        case "listed" if config.flag("use_sliding_window", False):
            raise config.load_error("it has no layer_types, which name the layers with a window")
    return [family.windows == "all"] * layers


def _configured_sliding_layers(config: ConfigFields, layers: int) -> list[bool]:
    kinds = config.strings("layer_types")
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown:
        raise config.load_error(f"layer_types has {min(unknown)}, which is not supported")
    if len(kinds) != layers:
        raise config.load_error(
            f"layer_types has {len(kinds)} values, num_hidden_layers is {layers}"
        )
    return [kind == "sliding_attention" for kind in kinds]


def read_layers_without_rope(
    config: ConfigFields, family: Family, windows: tuple[int | None, ...]
) -> frozenset[int]:
    """Indices of the layers without RoPE."""
    if family.without_rope == "listed":
        rotated = _rotated_layers(config, len(windows))
    elif family.without_rope == "full" and _sliding_window(config, family) is not None:
        rotated = [window is not None for window in windows]
    else:
        return frozenset()
    return frozenset(index for index, rotates in enumerate(rotated) if not rotates)


def _rotated_layers(config: ConfigFields, layers: int) -> list[bool]:
    """By no_rope_layers, which has 1 for layers with RoPE."""
    if "no_rope_layers" not in config:
        every = config.positive_int("no_rope_layer_interval", _NO_ROPE_INTERVAL)
        return [bool((index + 1) % every) for index in range(layers)]
    marks = config.sizes("no_rope_layers")
    if len(marks) < layers or max(marks) > 1:
        raise config.invalid_value(
            "no_rope_layers", f"a list of 0 or 1 for each of {layers} layers"
        )
    return [bool(mark) for mark in marks[:layers]]


def read_query_scaling(config: ConfigFields, family: Family) -> QueryScaling | None:
    """Scaling of queries by position, if the architecture has it."""
    if not family.query_scaling:
        return None
    section = config.section("rope_parameters") or config.section("rope_scaling")
    if section is None:
        raise config.load_error("it has no rope_parameters")
    return QueryScaling(
        section.positive_float("llama_4_scaling_beta"),
        section.positive_int("original_max_position_embeddings"),
    )
