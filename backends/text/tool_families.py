"""The families, and which of them a chat template belongs to."""

from __future__ import annotations

from localgen.backends.text.pattern import NAME, SPACE, Spec
from localgen.backends.text.tool_format import Format, Shape


def _object(arguments: str) -> Spec:
    """A call as a JSON object, up to its arguments."""
    name = (SPACE, "{", SPACE, '"name"', SPACE, ":", SPACE, '"', NAME, '"', SPACE, ",", SPACE)
    return (*name, f'"{arguments}"', SPACE, ":", SPACE)


_BRACE: Spec = (SPACE, "}")
_CALL = _object("arguments")
_NEXT_CALL: Spec = (SPACE, ",", *_CALL)
_LLAMA_CALL = _object("parameters")

# Hermes, Qwen 2.5, Qwen 3, SmolLM3
HERMES = Format(
    "hermes",
    (Shape(("<tool_call>", *_CALL), (*_BRACE, SPACE, "</tool_call>")),),
    marks=("<tool_call>", "</tool_call>"),
    around=("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
)
# Qwen3-Coder, Qwen 3.5 and later
XML = Format(
    "xml",
    (
        Shape(
            ("<tool_call>", SPACE, "<function=", NAME, ">"),
            (SPACE, "</function>", SPACE, "</tool_call>"),
            is_xml=True,
        ),
    ),
    marks=("<tool_call>", "</tool_call>"),
)
# Llama 3.1 to 3.3
LLAMA = Format(
    "llama",
    (
        Shape(_LLAMA_CALL, _BRACE, join=(SPACE, ";", *_LLAMA_CALL)),
        Shape(("<|python_tag|>", *_LLAMA_CALL), _BRACE, join=(SPACE, ";", *_LLAMA_CALL)),
    ),
    marks=("<|python_tag|>",),
    leads=True,
)
# Mistral up to Nemo and Small 3.1 writes a list; later ones write name and arguments
_MISTRAL_LIST = Shape(
    ("[TOOL_CALLS]", SPACE, "[", *_CALL), _BRACE, join=_NEXT_CALL, end=(SPACE, "]")
)
_MISTRAL_NAMED = Shape(("[TOOL_CALLS]", NAME, "[ARGS]", SPACE))
_MISTRAL_MARKS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
_MISTRAL_WITH_ID = Shape(("[TOOL_CALLS]", NAME, "[CALL_ID]", NAME, "[ARGS]", SPACE), written=False)
MISTRAL = Format("mistral", (_MISTRAL_LIST,), marks=_MISTRAL_MARKS)
MISTRAL_NAMED = Format("mistral-named", (_MISTRAL_NAMED, _MISTRAL_WITH_ID), marks=_MISTRAL_MARKS)
# Phi-4-mini; its own template takes the tools in the system message
_PHI_SHAPES = (
    Shape(
        ("<|tool_call|>", SPACE, "[", *_CALL),
        _BRACE,
        join=_NEXT_CALL,
        end=(SPACE, "]", SPACE, "<|/tool_call|>"),
    ),
    Shape(("<|tool_call|>", *_CALL), (*_BRACE, SPACE, "<|/tool_call|>")),
)
_PHI_MARKS = ("<|tool_call|>", "<|/tool_call|>")
PHI = Format("phi", _PHI_SHAPES, marks=_PHI_MARKS)
PHI_IN_SYSTEM = Format(
    "phi-in-system",
    _PHI_SHAPES,
    marks=_PHI_MARKS,
    in_system=True,
    around=("<|tool_call|>[", ", ", "]<|/tool_call|>"),
)
# any other model is told to write calls as Hermes does
GENERIC = HERMES


def family_of(source: str, *, knows_tools: bool) -> Format | None:
    """The format that a template writes calls in; None: it has none, or one not known here.

    source: its text; knows_tools: whether it reads them.
    """
    if "<|tool|>" in source and "message['tools']" in source:
        return PHI_IN_SYSTEM
    if not knows_tools:
        return None
    if "[TOOL_CALLS]" in source:
        return MISTRAL_NAMED if "[ARGS]" in source else MISTRAL
    if "<|tool_call|>" in source:
        return PHI
    if "<tool_call>" in source and "<arg_key>" not in source:
        return XML if "<function=" in source else HERMES
    is_llama = "<|start_header_id|>" in source and '"parameters": ' in source
    return LLAMA if is_llama else None
