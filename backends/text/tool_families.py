"""Tool call formats of the model families, and detection from the chat template."""

from __future__ import annotations

from localgen.backends.text.pattern import NAME, SPACE, SyntaxSpec
from localgen.backends.text.tool_format import CallSyntax, ToolCallFormat


def _json_call(arguments_key: str) -> SyntaxSpec:
    """Spec of a call as a JSON object, up to its arguments."""
    name = (SPACE, "{", SPACE, '"name"', SPACE, ":", SPACE, '"', NAME, '"', SPACE, ",", SPACE)
    return (*name, f'"{arguments_key}"', SPACE, ":", SPACE)


_BRACE: SyntaxSpec = (SPACE, "}")
_CALL = _json_call("arguments")
_NEXT_CALL: SyntaxSpec = (SPACE, ",", *_CALL)
_LLAMA_CALL = _json_call("parameters")

# Hermes, Qwen 2.5, Qwen 3, SmolLM3
HERMES = ToolCallFormat(
    "hermes",
    (CallSyntax(("<tool_call>", *_CALL), (*_BRACE, SPACE, "</tool_call>")),),
    control_tokens=("<tool_call>", "</tool_call>"),
    delimiters=("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
)
# Qwen3-Coder, Qwen 3.5 and later
QWEN_XML = ToolCallFormat(
    "xml",
    (
        CallSyntax(
            ("<tool_call>", SPACE, "<function=", NAME, ">"),
            (SPACE, "</function>", SPACE, "</tool_call>"),
            is_xml=True,
        ),
    ),
    control_tokens=("<tool_call>", "</tool_call>"),
)
# Llama 3.1 to 3.3
LLAMA = ToolCallFormat(
    "llama",
    (
        CallSyntax(_LLAMA_CALL, _BRACE, join=(SPACE, ";", *_LLAMA_CALL)),
        CallSyntax(("<|python_tag|>", *_LLAMA_CALL), _BRACE, join=(SPACE, ";", *_LLAMA_CALL)),
    ),
    control_tokens=("<|python_tag|>",),
    calls_first=True,
)
# Mistral up to Nemo and Small 3.1 writes a list; later models write name and arguments
_MISTRAL_LIST = CallSyntax(
    ("[TOOL_CALLS]", SPACE, "[", *_CALL), _BRACE, join=_NEXT_CALL, end=(SPACE, "]")
)
_MISTRAL_NAMED = CallSyntax(("[TOOL_CALLS]", NAME, "[ARGS]", SPACE))
_MISTRAL_MARKS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
_MISTRAL_WITH_ID = CallSyntax(
    ("[TOOL_CALLS]", NAME, "[CALL_ID]", NAME, "[ARGS]", SPACE), can_constrain=False
)
MISTRAL = ToolCallFormat("mistral", (_MISTRAL_LIST,), control_tokens=_MISTRAL_MARKS)
MISTRAL_NAMED = ToolCallFormat(
    "mistral-named", (_MISTRAL_NAMED, _MISTRAL_WITH_ID), control_tokens=_MISTRAL_MARKS
)
# Phi-4-mini; its own template has the tools in the system message
_PHI_SHAPES = (
    CallSyntax(
        ("<|tool_call|>", SPACE, "[", *_CALL),
        _BRACE,
        join=_NEXT_CALL,
        end=(SPACE, "]", SPACE, "<|/tool_call|>"),
    ),
    CallSyntax(("<|tool_call|>", *_CALL), (*_BRACE, SPACE, "<|/tool_call|>")),
)
_PHI_MARKS = ("<|tool_call|>", "<|/tool_call|>")
PHI = ToolCallFormat("phi", _PHI_SHAPES, control_tokens=_PHI_MARKS)
PHI_IN_SYSTEM = ToolCallFormat(
    "phi-in-system",
    _PHI_SHAPES,
    control_tokens=_PHI_MARKS,
    tools_in_system=True,
    delimiters=("<|tool_call|>[", ", ", "]<|/tool_call|>"),
)
# other models are instructed to use the Hermes format
DEFAULT_FORMAT = HERMES


def detect_call_format(source: str, *, has_tools: bool) -> ToolCallFormat | None:
    """Return the tool call format of a chat template, or None if there is none or it is unknown.

    source: the template. has_tools: the template uses a tools variable.
    """
    if "<|tool|>" in source and "message['tools']" in source:
        return PHI_IN_SYSTEM
    if not has_tools:
        return None
    if "[TOOL_CALLS]" in source:
        return MISTRAL_NAMED if "[ARGS]" in source else MISTRAL
    if "<|tool_call|>" in source:
        return PHI
    if "<tool_call>" in source and "<arg_key>" not in source:
        return QWEN_XML if "<function=" in source else HERMES
    is_llama = "<|start_header_id|>" in source and '"parameters": ' in source
    return LLAMA if is_llama else None
