"""The held-out text: three domains with equal shares, nothing in common with earlier texts."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from hf_folders import TINY

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from localgen.backends.formats.hf.tokenizer import HfTokenizer
from localgen.quant.calibrate.text_windows import (
    CALIBRATION_TEXT,
    HELD_OUT_TEXTS,
    held_out_windows,
)

ROOT = Path(__file__).parents[1]
# texts that constants of the methods were chosen with, or may be
EARLIER = (
    CALIBRATION_TEXT,
    ROOT / "benchmarks/data/choosing.txt",
    ROOT / "benchmarks/data/heldout.txt",
    ROOT / "tests/data/heldout.txt",
)


@pytest.fixture(scope="module")
def tokenizer() -> HfTokenizer:
    return HfTokenizer.from_folder(TINY, 4096)


def phrases(path: Path) -> set[tuple[str, ...]]:
    """All runs of eight words."""
    words = re.findall(r"\w+", path.read_text(encoding="utf-8").lower())
    return {tuple(words[at : at + 8]) for at in range(len(words) - 7)}


@pytest.mark.parametrize("domain", HELD_OUT_TEXTS)
def test_no_phrase_of_an_earlier_text(domain: str) -> None:
    found = phrases(HELD_OUT_TEXTS[domain])
    assert len(found) > 5_000
    for path in EARLIER:
        assert not found & phrases(path), path.name


@pytest.mark.parametrize(("asked", "shares"), [(36, (12, 12, 12)), (8, (3, 3, 2)), (1, (1, 0, 0))])
def test_domains_have_equal_shares(
    asked: int, shares: tuple[int, ...], tokenizer: HfTokenizer
) -> None:
    windows = held_out_windows(None, tokenizer, 256, asked)
    assert windows.ids.shape == (asked, 256)
    counted = Counter(windows.domains)
    assert tuple(counted[domain] for domain in HELD_OUT_TEXTS) == shares


def test_all_windows_are_as_many_of_each_domain(tokenizer: HfTokenizer) -> None:
    windows = held_out_windows(None, tokenizer, 512, 10_000)
    counted = Counter(windows.domains)
    assert len(set(counted.values())) == 1
    assert counted["chat"] * 512 > 20_000
    assert len({tuple(row) for row in windows.ids.tolist()}) == len(windows.ids)


def test_windows_of_a_file_are_spread_over_it(tokenizer: HfTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "numbers.txt"
    path.write_text(" ".join(str(number) for number in range(2_000)))
    every = held_out_windows(path, tokenizer, 32, 10_000).ids
    some = held_out_windows(path, tokenizer, 32, 4)
    assert some.domains == ()
    assert some.ids.tolist() == [every[index * len(every) // 4].tolist() for index in range(4)]
