"""Rendering of tools, calls and reasoning in a model's template."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hf_folders import TINY
from tool_templates import FAMILIES, HERMES, MISTRAL, PHI, PLAIN, STRICT, TEXT_ARGUMENTS, THINKING

from localgen.backends.errors import InvalidRequest
from localgen.backends.formats.hf.tokenizer import HfTokenizer
from localgen.backends.text import tool_families
from localgen.backends.text.prompt_renderer import (
    THINKING_ON_OFF_NOTE,
    TOOLS_IN_FIRST_MESSAGE_NOTE,
    TOOLS_IN_SYSTEM_NOTE,
    PromptRenderer,
    RenderedPrompt,
)
from localgen.backends.text.template import ChatTemplate
from localgen.backends.types import Message, Request, Tool, ToolCall

ASKED = (Message("user", "Weather?"),)
TOOL = Tool("weather", "Of a city", '{"type": "object", "properties": {"city": {}}}')
CALL = ToolCall("call_0123456789", "weather", '{"city": "Zürich"}')
TURNS = (
    *ASKED,
    Message("assistant", "I look.", tool_calls=(CALL, replace(CALL, id="second"))),
    Message("tool", "12 degrees", tool_call_id="call_0123456789"),
    Message("tool", "13 degrees", tool_call_id="second"),
)


@pytest.fixture(scope="module")
def tokenizer() -> HfTokenizer:
    return HfTokenizer.from_folder(TINY, 4096)


def opened(tokenizer: HfTokenizer, source: str, **fields: Any) -> RenderedPrompt:
    request = Request(id="r", **({"messages": ASKED} | fields))
    return PromptRenderer(ChatTemplate(source), tokenizer).render(request)


@pytest.mark.parametrize(
    ("family", "format"),
    [
        ("described", None),
        ("hermes", tool_families.HERMES),
        ("thinking", tool_families.HERMES),
        ("xml", tool_families.QWEN_XML),
        ("llama", tool_families.LLAMA),
        ("mistral", tool_families.MISTRAL),
        ("mistral-named", tool_families.MISTRAL_NAMED),
        ("phi", tool_families.PHI_IN_SYSTEM),
    ],
)
def test_the_family_of_a_template(family: str, format: object) -> None:
    source = FAMILIES[family]
    knows_tools = ChatTemplate(source).uses_variable("tools")
    assert tool_families.detect_call_format(source, has_tools=knows_tools) is format


def test_what_a_template_reads() -> None:
    template = ChatTemplate(
        "{% if not a is defined %}{% set a = 1 %}{% endif %}{{ b if b is defined else c }}"
        "{% for tool in tools %}{{ tool }}{% endfor %}{{ {'d': 1}['d'] }}"
    )
    assert all(template.uses_variable(name) for name in ("a", "b", "c", "tools"))
    assert not template.uses_variable("d")
    assert not template.uses_variable("tool")


def test_a_plain_request_is_rendered_as_ever(tokenizer: HfTokenizer) -> None:
    for source in (PLAIN, HERMES, PHI):
        opening = opened(tokenizer, source)
        assert opening == RenderedPrompt(ChatTemplate(source).render(ASKED))


def test_tools_in_the_shape_of_openai(tokenizer: HfTokenizer) -> None:
    prompt = opened(tokenizer, HERMES, tools=(TOOL,)).text
    assert json.loads(prompt.splitlines()[0]) == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Of a city",
            "parameters": {"type": "object", "properties": {"city": {}}},
        },
    }
    assert opened(tokenizer, HERMES, tools=(TOOL,), tool_choice="none").text == (
        opened(tokenizer, HERMES).text
    )


def test_calls_and_results_go_back(tokenizer: HfTokenizer) -> None:
    prompt = opened(tokenizer, HERMES, messages=TURNS, tools=(TOOL,)).text
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
    assert prompt.count(call) == 2
    assert "<|im_start|>tool\n12 degrees<|im_end|>" in prompt
    named = ChatTemplate("{% for m in messages %}{{ m.name }}/{{ m.tool_call_id }} {% endfor %}")
    assert "weather/call_0123456789 weather/second" in named.render(TURNS)


def test_only_what_a_message_has_is_there() -> None:
    keys = ChatTemplate("{% for m in messages %}{{ m | list }}{% endfor %}")
    assert keys.render(ASKED) == "['role', 'content']"
    thought = Message("assistant", "x", "hm")
    assert keys.render([thought]) == "['role', 'content', 'reasoning_content']"


def test_arguments_as_a_mapping_or_as_text(tokenizer: HfTokenizer) -> None:
    prompt = opened(tokenizer, TEXT_ARGUMENTS, messages=TURNS, tools=(TOOL,)).text
    assert '<tool_call>{"city": "Zürich"}</tool_call>' in prompt
    written = ChatTemplate(
        "{% for m in messages %}{{ m.tool_calls[0].function.arguments }}{% endfor %}"
    )
    assert written.render(TURNS[1:2]) == '{"city": "Zürich"}'
    with pytest.raises(InvalidRequest, match="no calls"):
        ChatTemplate("{{ raise_exception('no calls') }}").render(TURNS)


def test_ids_of_other_servers_suit_mistral(tokenizer: HfTokenizer) -> None:
    prompt = opened(tokenizer, MISTRAL, messages=TURNS, tools=(TOOL,)).text
    assert prompt.count("[TOOL_CALLS]") == 2
    ours = replace(CALL, id="abcDEF123")
    kept = opened(tokenizer, MISTRAL, messages=(Message("assistant", "", tool_calls=(ours,)),))
    assert "abcDEF123" in kept.text


def test_tools_are_described_where_a_template_has_none(tokenizer: HfTokenizer) -> None:
    system = Message("system", "Be brief.")
    opening = opened(tokenizer, PLAIN, messages=(system, *TURNS), tools=(TOOL,))
    assert opening.notes == (TOOLS_IN_SYSTEM_NOTE,)
    assert opening.text.startswith("<|im_start|>system\nBe brief.\n\nYou can call functions.")
    assert '{"name": "weather", "description": "Of a city"' in opening.text
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
    assert f"assistant\nI look.\n{call}\n{call}<|im_end|>" in opening.text
    results = (
        "<|im_start|>user\n<tool_response>\n12 degrees\n</tool_response>\n"
        "<tool_response>\n13 degrees\n</tool_response><|im_end|>"
    )
    assert results in opening.text
    without = opened(tokenizer, PLAIN, messages=TURNS)
    assert results in without.text
    assert "You can call" not in without.text


def test_templates_that_insist_on_turns(tokenizer: HfTokenizer) -> None:
    opening = opened(tokenizer, STRICT, messages=(*TURNS, *ASKED), tools=(TOOL,))
    assert opening.notes == (TOOLS_IN_FIRST_MESSAGE_NOTE,)
    assert opening.text.startswith("<user>You can call functions.")
    assert opening.text.endswith("</tool_response>\nWeather?<model>")
    system = (Message("system", "Be brief."), *ASKED)
    assert opened(tokenizer, STRICT, messages=system, tools=(TOOL,)).text.startswith(
        "<user>Be brief.\n\nYou can call functions."
    )


def test_tools_within_the_system_message(tokenizer: HfTokenizer) -> None:
    opening = opened(tokenizer, PHI, messages=TURNS, tools=(TOOL,))
    assert opening.notes == ()
    listed = opening.text.partition("<|tool|>")[2].partition("<|/tool|>")[0]
    assert [tool["name"] for tool in json.loads(listed)] == ["weather"]
    call = '{"name": "weather", "arguments": {"city": "Zürich"}}'
    assert f"<|tool_call|>[{call}, {call}]<|/tool_call|><|end|>" in opening.text


def test_thinking_is_set_where_the_template_reads_it(tokenizer: HfTokenizer) -> None:
    as_it_is = opened(tokenizer, THINKING)
    assert as_it_is.response_parser is not None
    for fields in ({"thinking": False}, {"reasoning_effort": "none"}):
        off = opened(tokenizer, THINKING, **fields)
        assert off.text == as_it_is.text + "<think>\n\n</think>\n\n"
        assert off.response_parser is None
        assert off.notes == ()
    high = opened(tokenizer, THINKING, reasoning_effort="high")
    assert high.text == as_it_is.text
    assert high.notes == (THINKING_ON_OFF_NOTE,)
    graded = opened(tokenizer, "{{ reasoning_effort }}", reasoning_effort="low")
    assert graded.text == "low"
    assert graded.notes == ()


def test_the_end_of_a_prompt_says_whether_thoughts_follow(tokenizer: HfTokenizer) -> None:
    def reasoning(source: str) -> str | None:
        reader = opened(tokenizer, source).response_parser
        return reader.feed("a</think>b").reasoning if reader else None

    assert reasoning(PLAIN) is None
    assert reasoning(PLAIN + "<think>\n") == "a"
    assert reasoning(THINKING) == ""
    assert reasoning(PLAIN + "<think>\n\n</think>\n\n") is None


def test_control_tokens_count_as_text(tokenizer: HfTokenizer) -> None:
    source = "{{ tools }}[TOOL_CALLS]"
    special = {"[TOOL_CALLS]": 7}

    class Marked:
        """The tokenizer with a control token of Mistral's."""

        vocab_size, eos_token_ids = tokenizer.vocab_size, tokenizer.eos_token_ids
        bos, eos = tokenizer.bos, tokenizer.eos
        infill_tokens = None

        def encode(self, text: str) -> list[int]:
            return [special[text]] if text in special else tokenizer.encode(text)

        def encode_for_embedding(self, text: str) -> list[int]:
            return self.encode(text)

        def piece(self, token: int) -> bytes:
            return b"" if token in special.values() else tokenizer.piece(token)

    request = Request(id="r", messages=ASKED, tools=(TOOL,))
    opening = PromptRenderer(ChatTemplate(source), Marked()).render(request)
    assert opening.response_parser is not None
    assert opening.response_parser.control_pieces == {7: b"[TOOL_CALLS]"}
    assert opening.response_grammar is not None
    assert "<[7]>" in (opening.response_grammar.to_lark(constrain_content=False) or "")
