"""The types of GGUF files: what llama.cpp can make of a model, by the names people use."""

from __future__ import annotations

from dataclasses import dataclass

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

from localgen.backends.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class GgufType:
    """weight_type: of most matrices. needs_importance: it is garbage without an importance
    matrix, and llama.cpp refuses to make it."""

    file_type: LlamaFileType
    weight_type: GGMLQuantizationType
    needs_importance: bool = False

    @property
    def bits(self) -> float:
        """Bits a weight of most matrices."""
        values, size = GGML_QUANT_SIZES[self.weight_type]
        return 8 * size / values


_F, _W = LlamaFileType, GGMLQuantizationType
TYPES = {
    "F32": GgufType(_F.ALL_F32, _W.F32),
    "F16": GgufType(_F.MOSTLY_F16, _W.F16),
    "BF16": GgufType(_F.MOSTLY_BF16, _W.BF16),
    "Q8_0": GgufType(_F.MOSTLY_Q8_0, _W.Q8_0),
    "Q6_K": GgufType(_F.MOSTLY_Q6_K, _W.Q6_K),
    "Q5_K_M": GgufType(_F.MOSTLY_Q5_K_M, _W.Q5_K),
    "Q5_K_S": GgufType(_F.MOSTLY_Q5_K_S, _W.Q5_K),
    "Q5_1": GgufType(_F.MOSTLY_Q5_1, _W.Q5_1),
    "Q5_0": GgufType(_F.MOSTLY_Q5_0, _W.Q5_0),
    "Q4_K_M": GgufType(_F.MOSTLY_Q4_K_M, _W.Q4_K),
    "Q4_K_S": GgufType(_F.MOSTLY_Q4_K_S, _W.Q4_K),
    "Q4_1": GgufType(_F.MOSTLY_Q4_1, _W.Q4_1),
    "Q4_0": GgufType(_F.MOSTLY_Q4_0, _W.Q4_0),
    "MXFP4_MOE": GgufType(_F.MOSTLY_MXFP4_MOE, _W.MXFP4),
    "IQ4_NL": GgufType(_F.MOSTLY_IQ4_NL, _W.IQ4_NL),
    "IQ4_XS": GgufType(_F.MOSTLY_IQ4_XS, _W.IQ4_XS),
    "Q3_K_L": GgufType(_F.MOSTLY_Q3_K_L, _W.Q3_K),
    "Q3_K_M": GgufType(_F.MOSTLY_Q3_K_M, _W.Q3_K),
    "Q3_K_S": GgufType(_F.MOSTLY_Q3_K_S, _W.Q3_K),
    "IQ3_M": GgufType(_F.MOSTLY_IQ3_M, _W.IQ3_S),
    "IQ3_S": GgufType(_F.MOSTLY_IQ3_S, _W.IQ3_S),
    "IQ3_XS": GgufType(_F.MOSTLY_IQ3_XS, _W.IQ3_S, needs_importance=True),
    "IQ3_XXS": GgufType(_F.MOSTLY_IQ3_XXS, _W.IQ3_XXS, needs_importance=True),
    "Q2_K": GgufType(_F.MOSTLY_Q2_K, _W.Q2_K),
    "Q2_K_S": GgufType(_F.MOSTLY_Q2_K_S, _W.Q2_K, needs_importance=True),
    "IQ2_M": GgufType(_F.MOSTLY_IQ2_M, _W.IQ2_S, needs_importance=True),
    "IQ2_S": GgufType(_F.MOSTLY_IQ2_S, _W.IQ2_XS, needs_importance=True),
    "IQ2_XS": GgufType(_F.MOSTLY_IQ2_XS, _W.IQ2_XS, needs_importance=True),
    "IQ2_XXS": GgufType(_F.MOSTLY_IQ2_XXS, _W.IQ2_XXS, needs_importance=True),
    "TQ2_0": GgufType(_F.MOSTLY_TQ2_0, _W.TQ2_0),
    "TQ1_0": GgufType(_F.MOSTLY_TQ1_0, _W.TQ1_0),
    "Q1_0": GgufType(_F.MOSTLY_Q1_0, _W.Q1_0),
    "IQ1_M": GgufType(_F.MOSTLY_IQ1_M, _W.IQ1_M, needs_importance=True),
    "IQ1_S": GgufType(_F.MOSTLY_IQ1_S, _W.IQ1_S, needs_importance=True),
}
# those that the converter writes itself; llama.cpp makes the others from 16 bits
WRITTEN = ("F32", "F16", "BF16", "Q8_0")
_SHORT = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}


def type_name(text: str) -> str:
    """The name of a type however it is written: q4_k_m, Q4_K. InvalidRequest: there is none."""
    name = text.upper()
    name = _SHORT.get(name, name)
    if name not in TYPES:
        raise InvalidRequest(
            f"unknown file type {text}: use one of {', '.join(TYPES)}", param="type"
        )
    return name
