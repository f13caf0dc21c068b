"""How a checkpoint's weights are quantized, from quantization_config of its config.json."""

from __future__ import annotations

from localgen.backends.formats.architecture.fields import Fields
from localgen.backends.formats.architecture.model_spec import Quant


def read_quant(config: Fields) -> Quant | None:
    """The quantization of a config.json; None: weights are plain.

    LoadFailed: a method, or a variant of one, that is not supported.
    """
    own = config.section("quantization_config")
    if own is None:
        return None
    method = own.text("quant_method")
    match method:
        case "awq":
            return _read_awq(own)
        case "gptq":
            return _read_gptq(own)
        case "fp8" | "fbgemm_fp8":
            return _read_fp8(own)
        case "compressed-tensors":
            return _read_compressed_tensors(own)
    raise own.refusal(
        f"quantization {method} is not supported, only awq, gptq, fp8, fbgemm_fp8 and "
        "compressed-tensors in FP8 or int8"
    )


def _read_awq(own: Fields) -> Quant:
    # files differ by the age of what wrote them
    layout = own.text("version", own.text("format", "gemm"))
    if layout.lower() != "gemm":
        raise own.refusal(f"AWQ layout {layout} is not supported, only GEMM")
    return Quant(
        method="awq",
        bits=_bits(own, "w_bit" if "w_bit" in own else "bits", (4,)),
        group_size=_group_size(own, "q_group_size" if "q_group_size" in own else "group_size"),
        zero_point=own.flag("zero_point", True),
    )


def _read_gptq(own: Fields) -> Quant:
    layout = own.text("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise own.refusal(f"GPTQ layout {layout} is not supported, only gptq and gptq_v2")
    return Quant(
        method="gptq",
        bits=_bits(own, "bits", (3, 4, 8)),
        group_size=_group_size(own, "group_size"),
        zero_point=not own.flag("sym", True),
        desc_act=own.flag("desc_act", False),
        zero_offset=1 if layout == "gptq" else 0,
    )


def _bits(own: Fields, key: str, known: tuple[int, ...]) -> int:
    bits = own.count(key)
    if bits not in known:
        *others, last = map(str, known)
        wanted = f"{', '.join(others)} and {last} are" if others else f"{last} is"
        raise own.refusal(f"{own.prefix}{key} is {bits}, only {wanted} supported")
    return bits


def _group_size(own: Fields, key: str) -> int | None:
    if own.values.get(key) == -1:
        return None
    size = own.count(key)
    if size % 8:
        raise own.wrong(key, "a multiple of 8")
    return size


def _read_fp8(own: Fields) -> Quant:
    if "weight_block_size" in own:
        raise own.refusal(
            "FP8 weights with a scale per block are not supported, only a scale per row"
        )
    return Quant(method="fp8", bits=8)


def _read_compressed_tensors(own: Fields) -> Quant:
    groups = own.section("config_groups")
    if groups is None or not groups.values:
        raise own.refusal(f"{own.prefix}config_groups is missing or empty")
    kinds = set()
    for name in groups.values:
        group = groups.section(name)
        weights = None if group is None else group.section("weights")
        if weights is None:
            raise groups.wrong(name, "a group with weights")
        kind = f"{weights.text('type')}{weights.count('num_bits')}"
        strategy = weights.text("strategy", "tensor")
        rows = strategy in ("channel", "tensor") and weights.flag("symmetric", True)
        if kind not in ("float8", "int8") or not rows:
            raise own.refusal(
                f"compressed-tensors weights of kind {kind} per {strategy} are not supported, "
                "only symmetric float8 or int8 per channel or tensor"
            )
        kinds.add(kind)
    if len(kinds) > 1:
        raise own.refusal("compressed-tensors weights of several kinds are not supported")
    return Quant(method="fp8" if kinds == {"float8"} else "int8", bits=8)
