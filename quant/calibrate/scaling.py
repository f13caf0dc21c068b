"""The scaling map: which norm or linear makes each input of a layer, and who reads it.

Where an input is multiplied by scales and its readers' weights divided, or the other way round,
nothing changes but what is easy to round. The scales disappear into whatever makes the input.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.formats.hf.tensor_names import LayerNames, Tensors, names_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Junction:
    """An input of a layer.

    source: the norm or linear whose outputs it is; from_row: from this output on. norm: which of
    the two. readers: the quantized linears that read it, together those that see the same
    tokens (an expert sees only its own). router: a reader that is not quantized. seen_at: the
    reader whose input is all of it. repeats, run: attention reads runs of so many channels
    several times in a row, where heads share a value head.
    """

    source: str
    norm: bool
    readers: tuple[tuple[str, ...], ...]
    seen_at: str
    from_row: int = 0
    router: str | None = None
    repeats: int = 1
    run: int = 1

    @property
    def linears(self) -> list[str]:
        """All quantized readers."""
        return [name for together in self.readers for name in together]

    def shared(self, channels: Tensor) -> Tensor:
        """[in], the same mean wherever channels are one channel repeated."""
        if self.repeats == 1:
            return channels
        once = self._parts(channels).mean(1, keepdim=True)
        return once.expand(-1, self.repeats, -1).flatten()

    def at_source(self, channels: Tensor) -> Tensor:
        """What `shared` gave, for each of the source's outputs once."""
        return channels if self.repeats == 1 else self._parts(channels)[:, 0].flatten()

    def _parts(self, channels: Tensor) -> Tensor:
        return channels.view(-1, self.repeats, self.run)


def junctions(spec: ModelSpec) -> list[Junction]:
    """All inputs of a layer, in the order in which they are computed."""
    names = names_of(spec)
    keys = (spec.heads + spec.kv_heads) * spec.head_dim
    experts = range(1 if spec.moe is None else spec.moe.experts)
    gate_ups = tuple(tuple(name.format(expert) for name in names.gate_up) for expert in experts)
    return [
        Junction(
            source=names.attention_norm, norm=True, readers=(names.qkv,), seen_at=names.qkv[0]
        ),
        Junction(
            source=names.qkv[-1],
            norm=False,
            from_row=keys if len(names.qkv) == 1 else 0,
            readers=((names.out,),),
            seen_at=names.out,
            repeats=spec.heads // spec.kv_heads,
            run=spec.head_dim,
        ),
        Junction(
            source=names.mlp_norm,
            norm=True,
            readers=gate_ups,
            seen_at=names.router or gate_ups[0][0],
            router=names.router,
        ),
        *(_down(spec, names, expert, gate_up) for expert, gate_up in enumerate(gate_ups)),
    ]


def _down(spec: ModelSpec, names: LayerNames, expert: int, gate_up: tuple[str, ...]) -> Junction:
    name = names.down.format(expert)
    return Junction(
        source=gate_up[-1],
        norm=False,
        # the gate goes through the activation, which scales would not survive
        from_row=spec.intermediate if len(gate_up) == 1 else 0,
        readers=((name,),),
        seen_at=name,
    )


def fold(spec: ModelSpec, tensors: Tensors, junction: Junction, scales: Tensor) -> None:
    """Multiply the readers' columns by scales, [in], and divide what makes their input, in place.

    scales: as `Junction.shared` gives them. The layer computes the same as before.
    """
    readers = [*junction.linears, *([junction.router] if junction.router else [])]
    for name in readers:
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"] * scales
    divisors, weight = junction.at_source(scales), f"{junction.source}.weight"
    if junction.norm:
        offset = 1.0 if spec.norm_offset else 0.0
        tensors[weight] = (tensors[weight] + offset) / divisors - offset
        return
    start = junction.from_row
    # the copy keeps the caller's own tensors as they are
    for name, columns in ((weight, divisors[:, None]), (f"{junction.source}.bias", divisors)):
        if name in tensors:
            whole = tensors[name].clone()
            whole[start : start + len(divisors)] /= columns
            tensors[name] = whole
