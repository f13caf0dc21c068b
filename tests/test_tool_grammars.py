"""Grammars of answers with tools or reasoning: which texts they accept."""

from __future__ import annotations

import json

import pytest
from hf_folders import TINY

from localgen.backends.formats.hf.tokenizer import HfTokenizer
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.text import tool_families
from localgen.backends.text.grammar import GrammarCompiler
from localgen.backends.text.lark_grammar import ResponseGrammar
from localgen.backends.text.reasoning import detect_thinking_tags
from localgen.backends.text.tool_format import ToolCallFormat
from localgen.backends.types import Tool

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"type": "string", "enum": ["c", "f"]},
    },
    "required": ["city"],
}
TOOLS = (Tool("weather", "", json.dumps(SCHEMA)), Tool("time"))
THINK = detect_thinking_tags("<think>")
# a control token of the built-in model in place of those of the families
CONTROL = 1
CUT, WHOLE, LAST = "cut", "whole", "last"  # may go on; may end; has to end


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return GrammarCompiler(HfTokenizer.from_folder(TINY, 4096))


def reaches(
    grammars: GrammarCompiler,
    frame: ResponseGrammar,
    parts: list[str | int],
    params: SamplingParams,
) -> str | None:
    """State of an answer after these texts and tokens; None: the grammar rejects them."""
    tokenizer = grammars._tokenizer
    matcher = grammars.compile(params, frame)
    assert matcher is not None
    for part in parts:
        for token in [part] if isinstance(part, int) else tokenizer.encode(part):
            if not matcher.allowed_mask()[token]:
                return None
            matcher.accept(token)
    if matcher.is_done:
        return LAST
    return WHOLE if any(matcher.allowed_mask()[end] for end in tokenizer.eos_token_ids) else CUT


CALL = '{"name": "weather", "arguments": {"city": "Rome", "days": 3}}'
TIME = '{"name": "time", "arguments": {}}'
ONE = f"<tool_call>\n{CALL}\n</tool_call>"
TWO = f"{ONE}\n<tool_call>{TIME}</tool_call>"
XML = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nRo<b>me\n</parameter>\n"
    "<parameter=unit>\nc\n</parameter>\n</function>\n</tool_call>"
)
LLAMA = CALL.replace("arguments", "parameters")
HERMES_CASES = [
    # required, several, answer, reaches
    (False, True, "", WHOLE),
    (False, True, "Hello <b> {", WHOLE),
    (False, True, ONE, WHOLE),
    (False, True, f"I look. {TWO} Done.", WHOLE),
    (False, True, "<tool_call>no", None),
    (False, True, '<tool_call>{"name": "nobody"', None),
    (False, True, '<tool_call>{"name": "time", "arguments": {"x"', None),
    (False, True, '<tool_call>{"name": "weather", "arguments": {}', None),
    (False, True, "<tool_call>", CUT),
    (False, False, "Hello", WHOLE),
    (False, False, f"I look. {ONE}", LAST),
    (True, True, "Hello", None),
    (True, True, ONE, WHOLE),
    (True, True, TWO, WHOLE),
    (True, True, f"{ONE} so", None),
    (True, False, ONE, LAST),
]


@pytest.mark.parametrize(("required", "several", "text", "end"), HERMES_CASES)
def test_calls_within_text(
    grammars: GrammarCompiler, required: bool, several: bool, text: str, end: str | None
) -> None:
    frame = ResponseGrammar(
        control_token_ids={},
        call_format=tool_families.HERMES,
        tools=TOOLS,
        calls_required=required,
        parallel_calls=several,
    )
    assert reaches(grammars, frame, [text], SamplingParams()) == end


FAMILY_CASES: list[tuple[ToolCallFormat, list[str | int], str | None]] = [
    (tool_families.QWEN_XML, [XML], WHOLE),
    (tool_families.QWEN_XML, [XML.replace("\nc\n", "\nk")], None),
    (tool_families.QWEN_XML, ["<tool_call>\n<function=time>\n</function>\n</tool_call>"], WHOLE),
    (tool_families.QWEN_XML, ["<tool_call>\n<function=weather>\n</function>"], None),
    (tool_families.QWEN_XML, ["<tool_call>\n<function=weather>\n<parameter=days>"], None),
    (tool_families.LLAMA, ["It is {"], WHOLE),
    (tool_families.LLAMA, ['{"a": 1}'], WHOLE),
    (tool_families.LLAMA, [LLAMA], WHOLE),
    (tool_families.LLAMA, [f"{LLAMA}; {LLAMA}"], WHOLE),
    (tool_families.LLAMA, [CONTROL, LLAMA], WHOLE),
    (tool_families.LLAMA, ['{"name": "nobody"'], None),
    (tool_families.MISTRAL, ["See", CONTROL, f"[{CALL}]"], LAST),
    (tool_families.MISTRAL, [CONTROL, f" [{CALL}, {TIME}]"], LAST),
    (tool_families.MISTRAL, [CONTROL, "no"], None),
    (tool_families.MISTRAL, ["[TOOL_CALLS] is how it is written"], WHOLE),
    (tool_families.MISTRAL_NAMED, [CONTROL, "time", CONTROL, "{}"], WHOLE),
    (tool_families.MISTRAL_NAMED, [CONTROL, "time", CONTROL, "{}", CONTROL, "time", CONTROL, "{}"],
     WHOLE),
    (tool_families.MISTRAL_NAMED, [CONTROL, "nobody"], None),
    (tool_families.PHI, [CONTROL, f"[{CALL}, {TIME}]", CONTROL], LAST),
    (tool_families.PHI, [CONTROL, CALL, CONTROL], LAST),
]  # fmt: skip


@pytest.mark.parametrize(("format", "parts", "end"), FAMILY_CASES)
def test_calls_of_the_families(
    grammars: GrammarCompiler, format: ToolCallFormat, parts: list[str | int], end: str | None
) -> None:
    has_control = format not in (tool_families.QWEN_XML, tool_families.HERMES)
    marks = dict.fromkeys(format.control_tokens, CONTROL) if has_control else {}
    frame = ResponseGrammar(control_token_ids=marks, call_format=format, tools=TOOLS)
    assert reaches(grammars, frame, parts, SamplingParams()) == end


def test_one_call_of_a_list(grammars: GrammarCompiler) -> None:
    for required in (True, False):
        frame = ResponseGrammar(
            control_token_ids={},
            call_format=tool_families.MISTRAL,
            tools=TOOLS,
            calls_required=required,
            parallel_calls=False,
        )
        start = f"[TOOL_CALLS][{CALL}"
        assert reaches(grammars, frame, [start + "]"], SamplingParams()) == LAST
        assert reaches(grammars, frame, [start + ","], SamplingParams()) is None


THOUGHTS = [
    # is_open, answer with tools, end if calls are required, end if they are not
    (False, f"<think>a {TWO[:14]} b</think>\n\n{ONE}", WHOLE, WHOLE),
    (False, "<think>a</think>Hello", None, WHOLE),
    (False, "<think>a", CUT, CUT),
    (False, ONE, WHOLE, WHOLE),
    (False, "Hello <think>a</think>", None, WHOLE),
    (False, "Hello <tool_call>no", None, None),
    (True, f"a <tool_call> b</think>\n\n{ONE}", WHOLE, WHOLE),
    (True, "a</think>Hello", None, WHOLE),
    (True, "a", CUT, CUT),
    (True, "a</think><tool_call>no", None, None),
]


@pytest.mark.parametrize(("is_open", "text", "required", "auto"), THOUGHTS)
def test_thoughts_before_calls(
    grammars: GrammarCompiler, is_open: bool, text: str, required: str | None, auto: str | None
) -> None:
    for is_required, end in ((True, required), (False, auto)):
        frame = ResponseGrammar(
            control_token_ids={},
            thinking_tags=THINK,
            is_thinking_open=is_open,
            call_format=tool_families.HERMES,
            tools=TOOLS,
            calls_required=is_required,
        )
        assert reaches(grammars, frame, [text], SamplingParams()) == end


def test_tags_that_are_control_tokens(grammars: GrammarCompiler) -> None:
    tags = detect_thinking_tags("[THINK]")
    assert tags is not None
    marks = dict.fromkeys((*tags.control_tokens, "[TOOL_CALLS]"), CONTROL)
    frame = ResponseGrammar(
        control_token_ids=marks, thinking_tags=tags, call_format=tool_families.MISTRAL, tools=TOOLS
    )
    cases: list[tuple[list[str | int], str | None]] = [
        ([CONTROL, "hm", CONTROL, "Yes"], WHOLE),
        ([CONTROL, "hm", CONTROL, "I look.", CONTROL, f"[{TIME}]"], LAST),
        (["Yes"], WHOLE),
        (["I look.", CONTROL, f"[{TIME}]"], LAST),
        (["I look.", CONTROL, "no"], None),
    ]
    for parts, end in cases:
        assert reaches(grammars, frame, parts, SamplingParams()) == end, parts


HELD = [
    SamplingParams(json_schema='{"enum": ["yes"]}'),
    SamplingParams(regex='"(yes|/)"'),
    SamplingParams(grammar='root ::= "\\"yes\\"" | other\nother ::= "maybe"'),
    SamplingParams(grammar='start: "\\"yes\\""'),
]


@pytest.mark.parametrize("params", HELD)
def test_thoughts_before_what_is_held(grammars: GrammarCompiler, params: SamplingParams) -> None:
    may = ResponseGrammar(control_token_ids={}, thinking_tags=THINK)
    must = ResponseGrammar(control_token_ids={}, thinking_tags=THINK, is_thinking_open=True)
    for frame, text, says in (
        (may, '"yes"', True),
        (may, '<think>anything</think>\n\n"yes"', True),
        (may, '<think>anything</think>"no', False),
        (may, '"no', False),
        (must, 'anything</think>\n\n"yes"', True),
        (must, 'anything</think>"no', False),
    ):
        found = reaches(grammars, frame, [text], params)
        assert found in ((WHOLE, LAST) if says else (None,)), text


def test_calls_or_what_is_held(grammars: GrammarCompiler) -> None:
    params = SamplingParams(json_schema='{"type": "integer"}')
    frame = ResponseGrammar(
        control_token_ids={}, thinking_tags=THINK, call_format=tool_families.HERMES, tools=TOOLS
    )
    for text, end in (("3", WHOLE), (ONE, WHOLE), (f"<think>a</think>{ONE}", WHOLE), ("x", None)):
        assert reaches(grammars, frame, [text], params) == end
