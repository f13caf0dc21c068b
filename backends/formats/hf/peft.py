"""LoRA adapters as PEFT writes them: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from localgen.backends.errors import LoadFailed, ModelNotFound
from localgen.backends.formats.architecture.fields import ConfigFields
from localgen.backends.formats.hf.safetensors import FloatTensors

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_LORA = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])\.weight")
_BY_LLAMA_CPP = "llama.cpp's convert_lora_to_gguf.py may convert it"
# settings that change more than B · A adds, with the values that do not
_PLAIN_VALUES = {
    "use_dora": (False,),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "bias": ("none",),
    "alora_invocation_tokens": ([],),
    "layer_replication": ([],),
    "target_parameters": ([],),
}


@dataclass(frozen=True, slots=True)
class LoraPair:
    """What an adapter adds to the weight of a linear: b @ a.

    module: Hugging Face's name of the linear. a: float32 [rank, inputs]. b: float32
    [outputs, rank], multiplied by the adapter's scale.
    """

    module: str
    a: NDArray[np.float32]
    b: NDArray[np.float32]


def read_peft_adapter(folder: Path) -> list[LoraPair]:
    """Read the adapter of a folder.

    Raises ModelNotFound if a file is missing, LoadFailed if one is damaged, or if the adapter does
    more than LoRA does.
    """
    config = ConfigFields.from_file(folder / PEFT_CONFIG)
    if (kind := config.string("peft_type", "LORA")) != "LORA":
        raise config.load_error(f"peft_type is {kind}, only LORA can be used")
    for name, plain in _PLAIN_VALUES.items():
        if name in config and config.values[name] not in plain:
            value = config.values[name]
            raise config.load_error(f"{name} is {value!r}, which cannot be used: {_BY_LLAMA_CPP}")
    if not (folder / PEFT_WEIGHTS).is_file():
        raise ModelNotFound(f"{folder} has no {PEFT_WEIGHTS}, the only format that is read")
    tensors = FloatTensors([folder / PEFT_WEIGHTS])
    modules = sorted({_module_of(folder, name) for name in tensors.names()})
    if not modules:
        raise LoadFailed(f"{folder / PEFT_WEIGHTS} has no tensors")
    return [_read_pair(config, tensors, module) for module in modules]


def _module_of(folder: Path, name: str) -> str:
    match = _LORA.fullmatch(name)
    if match is None:
        raise LoadFailed(
            f"{folder / PEFT_WEIGHTS}: {name} is not a LoRA matrix of a linear: {_BY_LLAMA_CPP}"
        )
    return match["module"]


def _read_pair(config: ConfigFields, tensors: FloatTensors, module: str) -> LoraPair:
    names = [f"base_model.model.{module}.lora_{part}.weight" for part in "AB"]
    for name in names:
        if name not in tensors:
            raise config.load_error(f"{PEFT_WEIGHTS} has no {name}")
        if len(tensors.shape(name)) != 2:
            raise config.load_error(f"{name} is of shape {list(tensors.shape(name))}, not a matrix")
    a, b = map(tensors.read, names)
    if b.shape[1] != a.shape[0]:
        raise config.load_error(f"{module}: A has {a.shape[0]} rows, B has {b.shape[1]} columns")
    rank = math.sqrt(len(a)) if config.flag("use_rslora", False) else len(a)
    return LoraPair(module, a, b * a.dtype.type(_alpha(config, module) / rank))


def _alpha(config: ConfigFields, module: str) -> float:
    """lora_alpha of a module: its own, if the config has one for the end of its name."""
    own = config.section("alpha_pattern")
    for ending in own.values if own is not None else ():
        if not re.fullmatch(r"[\w.]+", ending):
            raise config.load_error(f"alpha_pattern has the expression {ending}: {_BY_LLAMA_CPP}")
        if module == ending or module.endswith(f".{ending}"):
            assert own is not None
            return own.positive_float(ending)
    return config.positive_float("lora_alpha")
