"""quantization_config of a config.json, read as a QuantizationConfig."""

from __future__ import annotations

from localgen.backends.formats.architecture.fields import ConfigFields
from localgen.backends.formats.architecture.model_spec import QuantizationConfig


def read_quantization_config(config: ConfigFields) -> QuantizationConfig | None:
    """Return the quantization of a checkpoint, or None if its weights are not quantized.

    Raises LoadFailed if the method, or its variant, is not supported.
    """
    own = config.section("quantization_config")
    if own is None:
        return None
    method = own.string("quant_method")
    match method:
        case "awq":
            return _read_awq(own)
        case "gptq":
            return _read_gptq(own)
        case "fp8" | "fbgemm_fp8":
            return _read_fp8(own)
        case "compressed-tensors":
            return _read_compressed_tensors(own)
    raise own.load_error(
        f"quantization {method} is not supported, only awq, gptq, fp8, fbgemm_fp8 and "
        "compressed-tensors"
    )


# position (in nibbles) of outputs 0 to 7 in an int32 of AutoAWQ's GEMM layout
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def _read_awq(section: ConfigFields) -> QuantizationConfig:
    # older files name the layout and the fields differently
    layout = section.string("version", section.string("format", "gemm"))
    if layout.lower() != "gemm":
        raise section.load_error(f"AWQ layout {layout} is not supported, only GEMM")
    return QuantizationConfig(
        method="awq",
        bits=_bits(section, "w_bit" if "w_bit" in section else "bits", (4,)),
        group_size=_group_size(
            section, "q_group_size" if "q_group_size" in section else "group_size"
        ),
        zero_point=section.flag("zero_point", True),
    )


def _read_gptq(section: ConfigFields) -> QuantizationConfig:
    layout = section.string("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise section.load_error(f"GPTQ layout {layout} is not supported, only gptq and gptq_v2")
    return QuantizationConfig(
        method="gptq",
        bits=_bits(section, "bits", (2, 3, 4, 8)),
        group_size=_group_size(section, "group_size"),
        zero_point=not section.flag("sym", True),
        desc_act=section.flag("desc_act", False),
        zero_offset=1 if layout == "gptq" else 0,
    )


def _bits(section: ConfigFields, key: str, supported: tuple[int, ...]) -> int:
    bits = section.positive_int(key)
    if bits not in supported:
        *others, last = map(str, supported)
        wanted = f"{', '.join(others)} and {last} are" if others else f"{last} is"
        raise section.load_error(f"{section.prefix}{key} is {bits}, only {wanted} supported")
    return bits


def _group_size(section: ConfigFields, key: str) -> int | None:
    if section.values.get(key) == -1:
        return None
    size = section.positive_int(key)
    if size % 8:
        raise section.invalid_value(key, "a multiple of 8")
    return size


def _read_fp8(section: ConfigFields) -> QuantizationConfig:
    if "weight_block_size" in section:
        raise section.load_error(
            "FP8 weights with a scale per block are not supported, only a scale per row"
        )
    return QuantizationConfig(method="fp8", bits=8)


def _read_compressed_tensors(section: ConfigFields) -> QuantizationConfig:
    groups = section.section("config_groups")
    if groups is None or not groups.values:
        raise section.load_error(f"{section.prefix}config_groups is missing or empty")
    kinds = set()
    for name in groups.values:
        group = groups.section(name)
        weights = None if group is None else group.section("weights")
        if group is None or weights is None:
            raise groups.invalid_value(name, "a group with weights")
        file_format = group.string("format", section.string("format", ""))
        is_packed = file_format == "pack-quantized" and weights.string("type") == "int"
        kinds.add(_read_packed_weights(weights) if is_packed else _read_row_weights(weights))
    if len(kinds) > 1:
        raise section.load_error("compressed-tensors weights of several kinds are not supported")
    return kinds.pop()


def _read_row_weights(weights: ConfigFields) -> QuantizationConfig:
    kind = f"{weights.string('type')}{weights.positive_int('num_bits')}"
    strategy = weights.string("strategy", "tensor")
    rows = strategy in ("channel", "tensor") and weights.flag("symmetric", True)
    if kind not in ("float8", "int8") or not rows:
        raise weights.load_error(
            f"compressed-tensors weights of kind {kind} per {strategy} are not supported, only "
            "symmetric float8 or int8 per channel or tensor, and pack-quantized integers"
        )
    return QuantizationConfig(method="fp8" if kind == "float8" else "int8", bits=8)


def _read_packed_weights(weights: ConfigFields) -> QuantizationConfig:
    strategy = weights.string("strategy", "group")
    if strategy not in ("group", "channel"):
        raise weights.load_error(
            f"pack-quantized weights per {strategy} are not supported, only per group or channel"
        )
    if weights.values.get("actorder") in ("group", "dynamic"):
        raise weights.load_error(
            "pack-quantized weights whose groups follow the order of activation (actorder group) "
            "are not supported"
        )
    return QuantizationConfig(
        method="pack-quantized",
        bits=_bits(weights, "num_bits", tuple(range(2, 9))),
        group_size=_group_size(weights, "group_size") if strategy == "group" else None,
        zero_point=not weights.flag("symmetric", True),
    )
