"""GGUF names of architectures and tensors."""

from __future__ import annotations

import re
from typing import NamedTuple

import gguf
from gguf import MODEL_ARCH

from localgen.backends.formats.architecture.families import FAMILIES
from localgen.backends.formats.architecture.model_spec import ModelSpec

_ARCHITECTURES = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
_EXPERT = re.compile(r"model\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)")
_EXPERT_PARTS = {
    "w1": "ffn_gate_exps",
    "gate_proj": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "up_proj": "ffn_up_exps",
    "w2": "ffn_down_exps",
    "down_proj": "ffn_down_exps",
}


class GgufTensorName(NamedTuple):
    """GGUF name of a tensor. expert: its index in a stack of experts; None for other tensors."""

    name: str
    expert: int | None


def gguf_model_arch(spec: ModelSpec) -> MODEL_ARCH:
    return _ARCHITECTURES[FAMILIES[spec.architecture].gguf_name]


class GgufNameMap:
    """Maps one model's Hugging Face names to GGUF names."""

    def __init__(self, spec: ModelSpec) -> None:
        self._names = gguf.get_tensor_name_map(gguf_model_arch(spec), spec.num_layers)

    def gguf_name(self, module: str) -> GgufTensorName:
        """GGUF name of a linear or norm; both names are without `.weight`."""
        if expert := _EXPERT.fullmatch(module):
            layer, index, part = expert.groups()
            return GgufTensorName(f"blk.{layer}.{_EXPERT_PARTS[part]}", int(index))
        name = self._names.get_name(module)
        assert name is not None, module
        return GgufTensorName(name, None)
