"""Scale mappings: which norm or linear produces each input of a layer, and which linears read it.

Dividing an input by scales and multiplying its readers' columns by them leaves the layer's output
unchanged but makes weights or activations easier to round. The scales are folded into the source.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.formats.hf.tensor_names import LayerNames, LayerTensors, layer_names


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleMapping:
    """One input of a layer, its source and its consumers.

    source: the norm or linear that produces it; source_start_row: its first output in the source.
    consumers: quantized linears that read it, grouped by the tokens they get (an expert gets only
    its own). router: a reader that is not quantized. stats_linear: a reader that gets all tokens.
    is_routed: the consumers are experts, so which tokens they get depends on the router.
    num_repeats, repeat_channels: with grouped-query attention each run of repeat_channels channels
    occurs num_repeats times.
    """

    source: str
    source_is_norm: bool
    consumers: tuple[tuple[str, ...], ...]
    stats_linear: str
    source_start_row: int = 0
    router: str | None = None
    is_routed: bool = False
    num_repeats: int = 1
    repeat_channels: int = 1

    @property
    def linears(self) -> list[str]:
        """All quantized readers."""
        return [name for group in self.consumers for name in group]

    def average_repeats(self, channels: Tensor) -> Tensor:
        """[in] with repeats of the same channel replaced by their mean."""
        if self.num_repeats == 1:
            return channels
        once = self._split_repeats(channels).mean(1, keepdim=True)
        return once.expand(-1, self.num_repeats, -1).flatten()

    def to_source_channels(self, channels: Tensor) -> Tensor:
        """Result of `average_repeats` without repeats: one value per output of the source."""
        return channels if self.num_repeats == 1 else self._split_repeats(channels)[:, 0].flatten()

    def _split_repeats(self, channels: Tensor) -> Tensor:
        return channels.view(-1, self.num_repeats, self.repeat_channels)


def scale_mappings(spec: ModelSpec) -> list[ScaleMapping]:
    """Mappings of all inputs of a layer, in order of computation."""
    names = layer_names(spec)
    keys = (spec.num_heads + spec.num_kv_heads) * spec.head_dim
    experts = range(1 if spec.moe is None else spec.moe.num_experts)
    gate_ups = tuple(tuple(name.format(expert) for name in names.gate_up) for expert in experts)
    return [
        ScaleMapping(
            source=names.attention_norm,
            source_is_norm=True,
            consumers=(names.qkv,),
            stats_linear=names.qkv[0],
        ),
        ScaleMapping(
            source=names.qkv[-1],
            source_is_norm=False,
            source_start_row=keys if len(names.qkv) == 1 else 0,
            consumers=((names.out,),),
            stats_linear=names.out,
            num_repeats=spec.num_heads // spec.num_kv_heads,
            repeat_channels=spec.head_dim,
        ),
        ScaleMapping(
            source=names.mlp_norm,
            source_is_norm=True,
            consumers=gate_ups,
            stats_linear=names.router or gate_ups[0][0],
            router=names.router,
            is_routed=names.router is not None,
        ),
        *(_down_mapping(spec, names, expert, gate_up) for expert, gate_up in enumerate(gate_ups)),
    ]


def _down_mapping(
    spec: ModelSpec, names: LayerNames, expert: int, gate_up: tuple[str, ...]
) -> ScaleMapping:
    name = names.down.format(expert)
    return ScaleMapping(
        source=gate_up[-1],
        source_is_norm=False,
        # scale up, not gate: the activation function of the gate is not linear
        source_start_row=spec.intermediate_size if len(gate_up) == 1 else 0,
        consumers=((name,),),
        stats_linear=name,
        is_routed=names.router is not None,
    )


def fold_scales(
    spec: ModelSpec, tensors: LayerTensors, mapping: ScaleMapping, scales: Tensor
) -> None:
    """Multiply the readers' columns by scales and divide the source by them, in place.

    scales: [in], as from `ScaleMapping.average_repeats`. The layer's output stays the same.
    """
    readers = [*mapping.linears, *([mapping.router] if mapping.router else [])]
    for name in readers:
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"] * scales
    divisors, weight = mapping.to_source_channels(scales), f"{mapping.source}.weight"
    if mapping.source_is_norm:
        offset = 1.0 if spec.norm_offset else 0.0
        tensors[weight] = (tensors[weight] + offset) / divisors - offset
        return
    start = mapping.source_start_row
    # copied: the caller's tensors stay unchanged
    for name, columns in ((weight, divisors[:, None]), (f"{mapping.source}.bias", divisors)):
        if name in tensors:
            whole = tensors[name].clone()
            whole[start : start + len(divisors)] /= columns
            tensors[name] = whole
