"""Which models have the same vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from localgen.backends.engine.draft_loading import require_same_vocabulary
from localgen.backends.errors import InvalidRequest


@dataclass(frozen=True)
class Words:
    """A vocabulary. first: the begin-of-sequence token."""

    words: tuple[str, ...]
    eos: str = "end"
    first: tuple[int, ...] = ()

    @property
    def vocab_size(self) -> int:
        return len(self.words)

    def encode(self, text: str) -> list[int]:
        return list(self.first)

    def id_to_token(self, token: int) -> bytes:
        return self.words[token].encode()


OURS = Words(("a", "b", "end"))


def refusal(target: Words, draft: Words) -> str:
    with pytest.raises(InvalidRequest) as raised:
        require_same_vocabulary(target, draft, target_name="big", draft_name="small")
    assert raised.value.param == "draft"
    assert raised.value.message.startswith("small cannot draft for big: ")
    assert "\n" not in raised.value.message
    return raised.value.message


@pytest.mark.parametrize(
    "draft", [OURS, Words(("a", "b", "end", "", "")), Words(("a", "b", "end", "[PAD3]", "[PAD4]"))]
)
def test_padding_at_the_end_makes_no_difference(draft: Words) -> None:
    require_same_vocabulary(OURS, draft, target_name="big", draft_name="small")
    require_same_vocabulary(draft, OURS, target_name="big", draft_name="small")


def test_what_differs_is_named() -> None:
    assert "token 1 is 'x' there and 'b' in big" in refusal(OURS, Words(("a", "x", "end")))
    assert "it has 4 tokens, big has 3" in refusal(OURS, Words(("a", "b", "end", "c")))
    assert "it has 3 tokens, big has 4" in refusal(Words(("a", "b", "end", "c")), OURS)
    assert "its EOS token is b, that of big end" in refusal(OURS, Words(OURS.words, eos="b"))
    assert "its BOS token is a, that of big none" in refusal(OURS, Words(OURS.words, first=(0,)))


def test_padding_in_the_middle_is_a_difference() -> None:
    refusal(OURS, Words(("a", "", "end")))
