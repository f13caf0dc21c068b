"""GGUF files of LoRA adapters: checked against their model, or converted from PEFT's format."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localgen.backends.errors import LoadFailed
from localgen.backends.formats.architecture.families import BY_GGUF_NAME
from localgen.backends.formats.gguf.reader import GgufReader
from localgen.backends.formats.gguf.rope import interleave_rotary
from localgen.backends.formats.hf.peft import LoraPair

_A, _B = ".lora_a", ".lora_b"
_ALPHA, _ALORA = "adapter.lora.alpha", "adapter.alora.invocation_tokens"
_TYPES = ("F32", "F16", "BF16", "Q8_0")
# llama.cpp looks up the rows of A here, so A and B change places
_EMBEDDING = "token_embd.weight"
_OTHER = "use the model that it was trained with"
_NEEDED = "give a GGUF file of a LoRA adapter, or the folder that PEFT has written"


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The model of adapters. shapes: of its tensors, rows first. q_heads, kv_heads: of attention,
    or 0 if layers differ."""

    name: str
    architecture: str
    shapes: Mapping[str, tuple[int, ...]]
    num_layers: int
    q_heads: int
    kv_heads: int

    @classmethod
    def of_files(cls, paths: Seq[Path]) -> BaseModel:
        """Read it from a GGUF file, or from all its shards. Raises LoadFailed."""
        first, *others = map(GgufReader, paths)
        arch = str(first.get("general.architecture"))
        q_heads, kv_heads = (
            value if isinstance(value := first.get(f"{arch}.attention.{name}"), int) else 0
            for name in ("head_count", "head_count_kv")
        )
        return cls(
            name=paths[0].stem,
            architecture=arch,
            shapes={t.name: t.shape for reader in (first, *others) for t in reader.tensors},
            num_layers=int(first.get(f"{arch}.block_count") or 0),
            q_heads=q_heads,
            kv_heads=kv_heads or q_heads,
        )


def check_lora_file(path: Path, shown: str, base: BaseModel | None) -> None:
    """Raise LoadFailed unless a GGUF file is a LoRA adapter of a model.

    shown: its name in messages. base: None if the model is not here, so that the file alone is
    checked. llama.cpp checks less, and aborts on some of it.
    """
    reader = _lora_reader(path, shown)
    architecture = reader.get("general.architecture")
    if base is not None and architecture != base.architecture:
        raise LoadFailed(
            f"{shown} is for models of the architecture {architecture}, {base.name} is "
            f"{base.architecture}: {_OTHER}"
        )
    if _ALPHA in reader and not reader.is_float32(_ALPHA):
        raise LoadFailed(f"{shown}: {_ALPHA} is not a 32-bit float")
    if _ALORA in reader:
        raise LoadFailed(f"{shown} is an activated LoRA (aLoRA), which cannot be used")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    targets = {name.removesuffix(_A).removesuffix(_B) for name in tensors}
    if not tensors:
        raise LoadFailed(f"{shown} has no tensors")
    for target in sorted(targets):
        for name in (f"{target}{_A}", f"{target}{_B}"):
            if name not in tensors:
                raise LoadFailed(f"{shown} has no tensor {name}")
            if tensors[name].type_name not in _TYPES:
                raise LoadFailed(f"{shown}: {name} is of type {tensors[name].type_name}")
        if base is not None:
            a, b = tensors[f"{target}{_A}"].shape, tensors[f"{target}{_B}"].shape
            _check_shapes(shown, base, target, a, b)


def _lora_reader(path: Path, shown: str) -> GgufReader:
    """The file of a LoRA adapter. Raises LoadFailed for any other."""
    try:
        reader = GgufReader(path)
    except LoadFailed as error:
        raise LoadFailed(f"{error.message}: {_NEEDED}") from error
    kind, adapter_type = reader.get("general.type"), reader.get("adapter.type")
    if kind != "adapter" or adapter_type != "lora":
        what = f"adapter.type is {adapter_type!r}" if kind == "adapter" else _kind_text(kind)
        raise LoadFailed(f"{shown} is no LoRA adapter: {what}: {_NEEDED}")
    return reader


def _kind_text(kind: object) -> str:
    return "it is a model" if kind in (None, "model") else f"general.type is {kind!r}"


def _check_shapes(
    shown: str, base: BaseModel, target: str, a: tuple[int, ...], b: tuple[int, ...]
) -> None:
    weight = base.shapes.get(target)
    if weight is None:
        raise LoadFailed(f"{shown} changes {target}, which {base.name} does not have: {_OTHER}")
    *experts, outputs, inputs = weight
    if target == _EMBEDDING:
        a, (outputs, inputs) = a[::-1], (inputs, outputs)
    rank = a[-2] if len(a) > 1 else 0
    if a != (*experts, rank, inputs) or b != (*experts, outputs, rank):
        raise LoadFailed(
            f"{shown} does not fit {target} of {base.name}, {list(weight)}: its matrices are "
            f"{list(b)} and {list(a)}; {_OTHER}"
        )


def write_lora_file(path: Path, shown: str, pairs: list[LoraPair], base: BaseModel) -> None:
    """Write an adapter in PEFT's format as GGUF. Raises LoadFailed if that is not possible."""
    import gguf

    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    if base.architecture not in BY_GGUF_NAME:
        raise LoadFailed(
            f"{shown} cannot be converted for models of the architecture {base.architecture}: "
            "convert it with llama.cpp's convert_lora_to_gguf.py"
        )
    names = gguf.get_tensor_name_map(kinds[base.architecture], base.num_layers)
    writer = gguf.GGUFWriter(path, base.architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string("adapter.type", "lora")
    for pair in pairs:
        name = names.get_name(pair.module)
        if name is None:
            raise LoadFailed(
                f"{shown} changes {pair.module}, which {base.name} does not have: {_OTHER}"
            )
        writer.add_tensor(f"{name}.weight{_A}", pair.a)
        writer.add_tensor(f"{name}.weight{_B}", _in_row_order(shown, pair, name, base))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _in_row_order(shown: str, pair: LoraPair, name: str, base: BaseModel) -> NDArray[np.float32]:
    """B with its rows in the order of the model's weight."""
    heads = {"attn_q": base.q_heads, "attn_k": base.kv_heads}.get(name.rpartition(".")[2])
    # as in conversions of models: only llama has rotated pairs side by side
    if heads is None or base.architecture != "llama":
        return pair.b
    if not heads or len(pair.b) % (2 * heads):
        raise LoadFailed(
            f"{shown}: {pair.module} has {len(pair.b)} outputs for {heads} heads of "
            f"{base.name}: {_OTHER}"
        )
    return interleave_rotary(pair.b, heads)
