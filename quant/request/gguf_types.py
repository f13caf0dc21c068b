"""GGUF file types that llama.cpp can write, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from localgen.backends.errors import InvalidRequest

# gguf is imported on use: listing the types does not need it
if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, LlamaFileType


@dataclass(frozen=True, slots=True)
class GgufType:
    """file_type_name, weight_type_name: gguf's names of the file type and of most matrices' type.

    needs_imatrix: unusable without an importance matrix; llama.cpp refuses to write it.
    """

    file_type_name: str
    weight_type_name: str
    needs_imatrix: bool = False

    @property
    def file_type(self) -> LlamaFileType:
        from gguf import LlamaFileType

        return LlamaFileType[self.file_type_name]

    @property
    def weight_type(self) -> GGMLQuantizationType:
        """Type of most matrices."""
        from gguf import GGMLQuantizationType

        return GGMLQuantizationType[self.weight_type_name]

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight of most matrices."""
        from gguf import GGML_QUANT_SIZES

        values, size = GGML_QUANT_SIZES[self.weight_type]
        return 8 * size / values


GGUF_TYPES = {
    "F32": GgufType("ALL_F32", "F32"),
    "F16": GgufType("MOSTLY_F16", "F16"),
    "BF16": GgufType("MOSTLY_BF16", "BF16"),
    "Q8_0": GgufType("MOSTLY_Q8_0", "Q8_0"),
    "Q6_K": GgufType("MOSTLY_Q6_K", "Q6_K"),
    "Q5_K_M": GgufType("MOSTLY_Q5_K_M", "Q5_K"),
    "Q5_K_S": GgufType("MOSTLY_Q5_K_S", "Q5_K"),
    "Q5_1": GgufType("MOSTLY_Q5_1", "Q5_1"),
    "Q5_0": GgufType("MOSTLY_Q5_0", "Q5_0"),
    "Q4_K_M": GgufType("MOSTLY_Q4_K_M", "Q4_K"),
    "Q4_K_S": GgufType("MOSTLY_Q4_K_S", "Q4_K"),
    "Q4_1": GgufType("MOSTLY_Q4_1", "Q4_1"),
    "Q4_0": GgufType("MOSTLY_Q4_0", "Q4_0"),
    "MXFP4_MOE": GgufType("MOSTLY_MXFP4_MOE", "MXFP4"),
    "IQ4_NL": GgufType("MOSTLY_IQ4_NL", "IQ4_NL"),
    "IQ4_XS": GgufType("MOSTLY_IQ4_XS", "IQ4_XS"),
    "Q3_K_L": GgufType("MOSTLY_Q3_K_L", "Q3_K"),
    "Q3_K_M": GgufType("MOSTLY_Q3_K_M", "Q3_K"),
    "Q3_K_S": GgufType("MOSTLY_Q3_K_S", "Q3_K"),
    "IQ3_M": GgufType("MOSTLY_IQ3_M", "IQ3_S"),
    "IQ3_S": GgufType("MOSTLY_IQ3_S", "IQ3_S"),
    "IQ3_XS": GgufType("MOSTLY_IQ3_XS", "IQ3_S", needs_imatrix=True),
    "IQ3_XXS": GgufType("MOSTLY_IQ3_XXS", "IQ3_XXS", needs_imatrix=True),
    "Q2_K": GgufType("MOSTLY_Q2_K", "Q2_K"),
    "Q2_K_S": GgufType("MOSTLY_Q2_K_S", "Q2_K", needs_imatrix=True),
    "IQ2_M": GgufType("MOSTLY_IQ2_M", "IQ2_S", needs_imatrix=True),
    "IQ2_S": GgufType("MOSTLY_IQ2_S", "IQ2_XS", needs_imatrix=True),
    "IQ2_XS": GgufType("MOSTLY_IQ2_XS", "IQ2_XS", needs_imatrix=True),
    "IQ2_XXS": GgufType("MOSTLY_IQ2_XXS", "IQ2_XXS", needs_imatrix=True),
    "TQ2_0": GgufType("MOSTLY_TQ2_0", "TQ2_0"),
    "TQ1_0": GgufType("MOSTLY_TQ1_0", "TQ1_0"),
    "Q1_0": GgufType("MOSTLY_Q1_0", "Q1_0"),
    "IQ1_M": GgufType("MOSTLY_IQ1_M", "IQ1_M", needs_imatrix=True),
    "IQ1_S": GgufType("MOSTLY_IQ1_S", "IQ1_S", needs_imatrix=True),
}
# types of matrices whose codes can be replaced, see quant.gguf.code_bits
CODE_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
# file types that --gptq goes with: most of their matrices have such a type, and llama.cpp writes
# them without an importance matrix
GPTQ_TYPES = tuple(
    name
    for name, kind in GGUF_TYPES.items()
    if kind.weight_type_name in CODE_TYPES and not kind.needs_imatrix
)
# value of --gguf for types that are chosen by measured loss
AUTO = "auto"
# types that the converter writes itself; llama.cpp makes the others from 16 bits
DIRECT_TYPES = ("F32", "F16", "BF16", "Q8_0")
_ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}


def resolve_gguf_type(text: str) -> str:
    """Return the name of a type in any spelling: q4_k_m, Q4_K. Raises InvalidRequest if unknown."""
    name = text.upper()
    name = _ALIASES.get(name, name)
    if name not in GGUF_TYPES:
        raise InvalidRequest(
            f"unknown file type {text}: use {AUTO} or one of {', '.join(GGUF_TYPES)}", param="type"
        )
    return name
