"""Tool calls and reasoning are parsed from text, however it is split."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable

import pytest

from localgen.backends.text import tool_families
from localgen.backends.text.reasoning import ReasoningParser, detect_thinking_tags
from localgen.backends.text.response_parser import ParsedDelta, ResponseParser
from localgen.backends.text.tool_format import ToolCallFormat
from localgen.backends.text.tool_parser import ToolCallParser, new_call_id
from localgen.backends.types import Tool

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "units": {"type": "string", "enum": ["c", "f"]},
        "where": {"type": "object"},
        "code": {"type": "string", "maxLength": 4},
    },
}
TOOLS = (Tool("weather", "", json.dumps(SCHEMA)), Tool("time"))
PARIS = {"city": 'Pa"r\\is } ] é', "days": 3}
ARGUMENTS = json.dumps(PARIS, ensure_ascii=False)
CALL = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
NOW = '{"name": "time", "arguments": {}}'
HERMES, XML, LLAMA = tool_families.HERMES, tool_families.QWEN_XML, tool_families.LLAMA
MISTRAL, NAMED, PHI = tool_families.MISTRAL, tool_families.MISTRAL_NAMED, tool_families.PHI

Said = tuple[str, str, list[tuple[str, str]]]


def read(reader: ResponseParser, parts: Iterable[str]) -> Said:
    """Reasoning, content and calls; asserts what holds for every stream."""
    fed = [*(reader.feed(part) for part in parts), reader.finish()]
    calls: list[list[str]] = []
    for piece in (piece for said in fed for piece in said.tool_calls):
        if piece.index == len(calls):
            assert piece.id is not None
            assert len(piece.id) == 9
            assert piece.name is not None
            calls.append([piece.name, ""])
        else:
            assert piece.index == len(calls) - 1, "one call after the other"
            assert piece.id is None
            assert piece.name is None
        calls[-1][1] += piece.arguments
    content = "".join(said.content for said in fed)
    reasoning = "".join(said.reasoning for said in fed)
    return reasoning, content, [(name, arguments) for name, arguments in calls]


def reader_of(
    format: ToolCallFormat | None, tags: str = "", *, is_open: bool = False
) -> ResponseParser:
    known = detect_thinking_tags(tags)
    thoughts = ReasoningParser(known, is_open=is_open) if known else None
    return ResponseParser({}, thoughts, ToolCallParser(format, TOOLS) if format else None)


def cuts(text: str) -> Iterable[list[str]]:
    """The text whole, in single characters, in every two parts, and split at random."""
    yield [text]
    yield list(text)
    yield from ([text[:at], text[at:]] for at in range(1, len(text)))
    dice = random.Random(7)
    for _ in range(40):
        marks = sorted(dice.sample(range(len(text) + 1), dice.randint(0, min(9, len(text)))))
        yield [text[a:b] for a, b in zip([0, *marks], [*marks, len(text)], strict=True)]


W, T = ("weather", ARGUMENTS), ("time", "{}")
EXAMPLES = [
    (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", "", [W]),
    (HERMES, f"I look.\n\n<tool_call>{CALL}</tool_call>", "I look.", [W]),
    (HERMES, f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{NOW}\n</tool_call>", "", [W, T]),
    (HERMES, f"<tool_call>\n{NOW}\n</tool_call>\n\nDone. \n", "Done. \n", [T]),
    (HERMES, f"a <tool_call>\n{NOW}\n</tool_call> b <tool_call>{CALL}</tool_call>", "ab", [T, W]),
    (HERMES, "Nothing to call. \n", "Nothing to call. \n", []),
    (HERMES, "1 < 2, <tool_c, <tool_call, <tool", "1 < 2, <tool_c, <tool_call, <tool", []),
    (HERMES, "<tool_call>\nnonsense\n</tool_call>", "<tool_call>\nnonsense\n</tool_call>", []),
    (HERMES, '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>', None, []),
    (HERMES, '<tool_call>{"name": "time", "arguments": 3}</tool_call>', None, []),
    (HERMES, f"<<tool_call>{NOW}</tool_call>", "<", [T]),
    (HERMES, f"<tool_call><tool_call>{NOW}</tool_call>", "<tool_call>", [T]),
    (HERMES, f"<tool_call>{NOW} and more", "} and more", [T]),
    (HERMES, f"<tool_call>{CALL}\n</tool", "", [W]),
    (HERMES, f"<tool_call>{CALL[:-9]}", "", [("weather", ARGUMENTS[:-8])]),
    (HERMES, '<tool_call>\n{"name": "wea', '<tool_call>\n{"name": "wea', []),
    (LLAMA, CALL.replace("arguments", "parameters"), "", [W]),
    (LLAMA, "\n\n" + NOW.replace("arguments", "parameters"), "", [T]),
    (LLAMA, "<|python_tag|>" + NOW.replace("arguments", "parameters"), "", [T]),
    (LLAMA, "; ".join([NOW.replace("arguments", "parameters")] * 2), "", [T, T]),
    (LLAMA, '{"name": "a", "b": 1}', '{"name": "a", "b": 1}', []),
    (LLAMA, "It is " + NOW, "It is " + NOW, []),
    (LLAMA, NOW.replace("arguments", "parameters") + "; so", "; so", [T]),
    (LLAMA, NOW.replace("arguments", "parameters") + '; {"na', '; {"na', [T]),
    (MISTRAL, f"[TOOL_CALLS][{CALL}, {NOW}]", "", [W, T]),
    (MISTRAL, f"[TOOL_CALLS] [{NOW}]", "", [T]),
    (MISTRAL, f"See [1] and [TOOL: [TOOL_CALLS][{CALL}]", "See [1] and [TOOL:", [W]),
    (MISTRAL, f"[TOOL_CALLS][{NOW}, x]", ", x]", [T]),
    (NAMED, f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}", "", [W]),
    (NAMED, f"[TOOL_CALLS]time[CALL_ID]abc123def[ARGS]{{}}[TOOL_CALLS]weather[ARGS]{ARGUMENTS}",
     "", [T, W]),
    (PHI, f"<|tool_call|>[{CALL}, {NOW}]<|/tool_call|>", "", [W, T]),
    (PHI, f"<|tool_call|>{CALL}<|/tool_call|>", "", [W]),
    (PHI, f"<|tool_call|>[{NOW}]", "", [T]),
]  # fmt: skip


@pytest.mark.parametrize(("format", "text", "content", "calls"), EXAMPLES)
def test_calls_are_read_however_the_text_is_cut(
    format: ToolCallFormat, text: str, content: str | None, calls: list[tuple[str, str]]
) -> None:
    wanted = ("", text if content is None else content, calls)
    for parts in cuts(text):
        assert read(reader_of(format), parts) == wanted, parts


def xml(*parameters: tuple[str, str], name: str = "weather") -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


XML_EXAMPLES = [
    (xml(("city", 'Pa"r\nis <b>'), ("days", "3")), {"city": 'Pa"r\nis <b>', "days": 3}),
    (xml(("city", "")), {"city": ""}),
    (xml(("city", "\n\n")), {"city": "\n\n"}),
    (xml(("units", "c"), ("where", '{"x": [1]}')), {"units": "c", "where": {"x": [1]}}),
    (xml(("code", '"a"'), ("city", "</param")), {"code": "a", "city": "</param"}),
    (xml(("days", "soon"), ("days2", "7")), {"days": "soon", "days2": "7"}),
    (xml(("days", "NaN")), {"days": "NaN"}),
    (xml(), {}),
    ("<tool_call><function=weather><parameter=city>a</parameter></function></tool_call>",
     {"city": "a"}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "arguments"), XML_EXAMPLES)
def test_tagged_parameters_become_json(text: str, arguments: dict[str, object]) -> None:
    for parts in cuts(text):
        reasoning, content, calls = read(reader_of(XML), parts)
        assert (reasoning, content) == ("", ""), parts
        ((name, read_arguments),) = calls
        assert name == "weather"
        assert json.loads(read_arguments) == arguments, parts


def test_truncated_tagged_parameters() -> None:
    text = xml(("city", "Rome"))
    whole = f"a {text} {xml(name='time')} {xml(name='nobody')}"
    for parts in cuts(whole):
        _, content, calls = read(reader_of(XML), parts)
        assert content == f"a{xml(name='nobody')}"
        assert calls == [("weather", '{"city": "Rome"}'), ("time", "{}")]
    for end in range(len(text)):
        _, content, calls = read(reader_of(XML), [text[:end]])
        assert bool(content) != bool(calls) or end == 0, text[:end]
        if calls:
            assert '{"city": "Rome"}'.startswith(calls[0][1]), "a beginning of what was meant"


def test_strings_stream_before_they_end() -> None:
    reader = reader_of(XML)
    before = xml(("city", "A long story")).partition("story")[0]
    _, _, calls = read_without_end(reader, [before])
    assert calls == '{"city": "A long '.removesuffix(" ") + " "


def read_without_end(reader: ResponseParser, parts: list[str]) -> tuple[str, str, str]:
    fed: list[ParsedDelta] = [reader.feed(part) for part in parts]
    arguments = "".join(piece.arguments for said in fed for piece in said.tool_calls)
    return "".join(s.reasoning for s in fed), "".join(s.content for s in fed), arguments


def test_arguments_stream_as_they_come() -> None:
    reader = reader_of(HERMES)
    assert reader.feed('<tool_call>\n{"name": "weather", "argu') == ParsedDelta()
    assert not reader.has_tool_calls
    assert [piece.name for piece in reader.feed('ments": {"ci').tool_calls] == ["weather", None]
    assert reader.has_tool_calls
    assert reader.feed('ty": "Pa').tool_calls[0].arguments == 'ty": "Pa'


# -- reasoning ----------------------------------------------------------------------------------

THINK = "</think>"
THOUGHTS = [
    ("<think>\nHm. So\n\nit is.\n</think>\n\nYes. ", False, "Hm. So\n\nit is.", "Yes. "),
    ("Hm.</think>Yes", True, "Hm.", "Yes"),
    ("\n a </thi b </think>\n", True, "a </thi b", ""),
    ("<think></think>Yes", False, "", "Yes"),
    ("\n<think>\n", False, "", ""),
    ("Yes <think>no</think>", False, "", "Yes <think>no</think>"),
    ("<thin", False, "", "<thin"),
    (" <b>", False, "", " <b>"),
    ("a </thin", True, "a </thin", ""),
    ("<think>a</think>b</think>c", False, "a", "b</think>c"),
]


@pytest.mark.parametrize(("text", "is_open", "reasoning", "content"), THOUGHTS)
def test_thoughts_are_told_apart(text: str, is_open: bool, reasoning: str, content: str) -> None:
    for parts in cuts(text):
        found = read(reader_of(None, THINK, is_open=is_open), parts)
        assert found == (reasoning, content, []), parts


def test_thoughts_before_calls() -> None:
    thought = f"no <tool_call>{NOW}</tool_call>"
    text = f"<think>\n{thought}\n</think>\n\nI look. <tool_call>{CALL}</tool_call>"
    wanted = (thought, "I look.", [W])
    for parts in cuts(text):
        assert read(reader_of(HERMES, THINK), parts) == wanted


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("[THINK] [/THINK]", "[THINK]a[/THINK]b"),
        ("<|channel>thought <channel|>", "<|channel>thought\na<channel|>b"),
    ],
)
def test_other_thinking_tags_are_read(source: str, text: str) -> None:
    assert read(reader_of(None, source), [text]) == ("a", "b", [])
    assert detect_thinking_tags("{{ messages }}") is None


def test_ids_are_new_each_time() -> None:
    assert len({new_call_id() for _ in range(200)}) == 200
    assert new_call_id().isalnum()
