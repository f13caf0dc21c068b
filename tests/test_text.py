"""Detokenizing, stop strings and chat templates, with tokens split in any way."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Sequence
from typing import AnyStr

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localgen.backends.errors import InvalidRequest
from localgen.backends.text.detokenize import Detokenizer
from localgen.backends.text.stop import StopStringMatcher
from localgen.backends.text.template import ChatTemplate
from localgen.backends.types import Message

FAMILY = "\N{MAN}\u200d\N{WOMAN}\u200d\N{GIRL}"  # one emoji on screen, 18 bytes
TEXTS = st.text(st.sampled_from(["a", "é", "ß", "漢", "\u200d", "\ufe0f", "\N{GIRL}", *FAMILY]))
HELLO = [Message("user", "hello")]


def pieces(whole: AnyStr, cuts: Sequence[int]) -> list[AnyStr]:
    """`whole` split at these positions."""
    ends = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    return [whole[a:b] for a, b in itertools.pairwise(ends)]


CUTS = st.lists(st.integers(0, 60))


# -- detokenizer ------------------------------------------------------------------------------


@given(TEXTS | st.text(), CUTS)
def test_any_split_of_the_bytes_gives_the_same_text(text: str, cuts: list[int]) -> None:
    detokenizer = Detokenizer()
    utf8 = text.encode("utf-8", "replace")
    shown = "".join(detokenizer.feed(piece) for piece in pieces(utf8, cuts))
    assert shown == utf8.decode()


@given(TEXTS, st.integers(0, 200))
def test_what_is_shown_is_a_prefix_without_half_characters(text: str, length: int) -> None:
    shown = Detokenizer().feed(text.encode()[:length])
    assert text.startswith(shown)
    # at most the three bytes of one unfinished character are missing
    assert min(length, len(text.encode())) - len(shown.encode()) < 4


def test_an_emoji_sequence_appears_character_by_character() -> None:
    detokenizer = Detokenizer()
    steps = [detokenizer.feed(bytes([byte])) for byte in FAMILY.encode()]
    assert [step for step in steps if step] == list(FAMILY)
    assert steps[3] == "\N{MAN}"  # shown with its last byte, not before, not after


@given(st.binary(), CUTS)
def test_bytes_that_are_not_utf8_become_replacement_characters(raw: bytes, cuts: list[int]) -> None:
    detokenizer = Detokenizer()
    shown = "".join(detokenizer.feed(piece) for piece in pieces(raw, cuts))
    whole = raw.decode("utf-8", "replace")
    # an unfinished character at the end, of up to three bytes, is dropped, where decoding at once
    # replaces it, at times by a character for each byte
    assert shown in [whole, *(whole.removesuffix("\ufffd" * count) for count in (1, 2, 3))]


def test_a_lead_byte_without_its_rest_is_replaced_and_nothing_else_is_lost() -> None:
    detokenizer = Detokenizer()
    assert detokenizer.feed(b"a\xf0\x9f") == "a"
    assert detokenizer.feed(b"b\xff\xc3") == "\ufffdb\ufffd"
    assert detokenizer.feed(b"\xa9") == "é"


# -- stop strings -----------------------------------------------------------------------------


def run(stops: Sequence[str], parts: Sequence[str]) -> tuple[str, str | None]:
    """All text shown, and the stop string reached."""
    matcher = StopStringMatcher(stops)
    shown = [matcher.feed(part) for part in parts]
    return "".join(shown) + ("" if matcher.matched else matcher.flush()), matcher.matched


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The rule: the stop string completed first ends the text; among several, the longest."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


STOPS = st.lists(st.text(st.sampled_from("ab"), max_size=4), min_size=1, max_size=3)
# few letters and short stops, so that stops occur, overlap and begin in vain
LETTERS = st.lists(st.sampled_from("abc"), min_size=3, max_size=12).map("".join)


@settings(max_examples=500)
@given(STOPS, LETTERS, st.lists(st.integers(0, 12), max_size=3))
def test_text_ends_at_the_first_stop_whatever_the_split(
    stops: list[str], text: str, cuts: list[int]
) -> None:
    assert run(stops, pieces(text, cuts)) == cut_at_stop(text, stops)


@given(STOPS, LETTERS)
def test_no_more_is_held_back_than_may_become_a_stop(stops: list[str], text: str) -> None:
    matcher = StopStringMatcher(stops)
    shown = ""
    for end, character in enumerate(text, start=1):
        shown += matcher.feed(character)
        if matcher.matched:
            return
        held = text[len(shown) : end]
        assert not held or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(
    ("stops", "parts", "shown", "matched"),
    [
        (["\n\nUser:"], ["one\n", "\nUs", "er", ": two"], "one", "\n\nUser:"),
        (["\n\nUser:"], ["one\n", "\nUs", "ual"], "one\n\nUsual", None),
        (["END"], ["the ENEND"], "the EN", "END"),  # the match begins inside a false start
        (["END"], ["the EN"], "the EN", None),  # held back, then flushed
        (["b", "abc"], ["abc"], "a", "b"),  # b is complete first, also within one piece
        (["bc", "abc"], ["ab", "c"], "", "abc"),  # both end here: the longest
        (["🙂"], ["a🙂b"], "a", "🙂"),
        ([""], ["abc"], "abc", None),  # an empty stop string means nothing
    ],
)
def test_stop_strings_end_the_text(
    stops: list[str], parts: list[str], shown: str, matched: str | None
) -> None:
    assert run(stops, parts) == (shown, matched)


def test_nothing_comes_after_a_stop() -> None:
    matcher = StopStringMatcher(["x"])
    assert matcher.feed("axb") == "a"
    assert matcher.feed("more") == ""
    assert matcher.flush() == ""


# -- chat templates ---------------------------------------------------------------------------

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def render(source: str, messages: Sequence[Message] = HELLO, *, bos: str = "") -> str:
    return ChatTemplate(source, bos=bos, eos="</s>").render(messages)


def refusal(source: str, messages: Sequence[Message] = HELLO) -> InvalidRequest:
    template = ChatTemplate(source)
    with pytest.raises(InvalidRequest) as caught:
        template.render(messages)
    assert "\n" not in caught.value.message
    return caught.value


def test_chatml_template_is_rendered() -> None:
    turns = [Message("system", "Be brief."), Message("user", "Hi {{ 1 + 1 }}")]
    assert render(CHATML, turns) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi {{ 1 + 1 }}<|im_end|>\n"  # text of a user is never a template
        "<|im_start|>assistant\n"
    )


def test_bos_and_eos_are_given() -> None:
    assert render("{{ bos_token }}|{{ eos_token }}", bos="<s>") == "<s>|</s>"


def test_blocks_leave_no_blank_lines() -> None:
    assert render("{% if true %}\na\n  {% endif %}\nb") == "a\nb"


def test_absent_tools_and_documents_are_none() -> None:
    assert render("{{ tools is none }} {{ documents is none }}") == "True True"


def test_break_and_continue_are_supported() -> None:
    source = (
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}"
        "{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    )
    assert render(source) == "023"


def test_the_generation_tag_is_its_body() -> None:
    source = "{% set x = 1 %}a{% generation %}b{{ x }}{% endgeneration %}c"
    assert render(source) == "ab1c"


def test_tojson_is_plain_json() -> None:
    assert render("{{ {'b': 'é<&', 'a': 1} | tojson }}") == '{"b": "é<&", "a": 1}'
    assert render("{{ {'a': [1]} | tojson(indent=1) }}") == '{\n "a": [\n  1\n ]\n}'
    assert render("{{ 'é' | tojson(ensure_ascii=true) }}") == '"\\u00e9"'
    assert render("{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=true) }}") == (
        '{"a":2,"b":1}'
    )


def test_strftime_now() -> None:
    before = datetime.datetime.now().strftime("%Y-%m-%d")
    shown = render("{{ strftime_now('%Y-%m-%d') }}")
    assert shown in (before, datetime.datetime.now().strftime("%Y-%m-%d"))


def test_raise_exception_reaches_the_user_in_its_own_words() -> None:
    error = refusal("{{ raise_exception('roles must alternate') }}")
    assert error.message == "the chat template rejects these messages: roles must alternate"
    assert error.param == "messages"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ messages[3].content }}", "messages"),
        ("{{ nowhere.at_all }}", "nowhere"),
        ("{{ 1 // 0 }}", "division"),
        ("{{ undefined_function() }}", "undefined_function"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ],
)
def test_a_failing_template_says_why(source: str, why: str) -> None:
    error = refusal(source)
    assert "the chat template fails on these messages" in error.message
    assert why in error.message
    assert error.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append({'role': 'user', 'content': 'x'}) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ raise_exception.__globals__['__builtins__']['open']('/etc/passwd') }}",
        "{{ strftime_now.__func__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ (''|attr('__class__')).mro() }}",
    ],
)
def test_sandbox_blocks_unsafe_access(source: str) -> None:
    assert "the chat template fails on these messages" in refusal(source).message


def test_the_caller_s_messages_stay_as_they_are() -> None:
    messages = [Message("user", "hello")]
    refusal("{{ messages.clear() }}", messages)
    refusal("{{ messages[0].pop('role') }}", messages)
    assert messages == [Message("user", "hello")]


@pytest.mark.parametrize("name", ["include 'x'", "import 'x' as y", "extends 'x'"])
def test_templates_cannot_include_files(name: str) -> None:
    assert "fails on these messages" in refusal("{% " + name + " %}").message


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ 1 +", "{% for m in messages %}", "{% nonsense %}", "{{ x | nope }}"]
)
def test_invalid_template_is_rejected(source: str) -> None:
    with pytest.raises(InvalidRequest, match=r"does not compile: .*--chat-template FILE"):
        ChatTemplate(source)
