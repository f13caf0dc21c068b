"""Calibration text and held-out text as windows of tokens; texts/README.md names their sources."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from localgen.backends.errors import InvalidRequest, ModelNotFound
from localgen.backends.formats.hf.tokenizer import HfTokenizer
from localgen.quant.request.recipe import CalibrationConfig

_TEXTS = Path(__file__).parents[1] / "texts"
CALIBRATION_TEXT = _TEXTS / "calibration.txt"
# by domain, each with an equal share of the windows
HELD_OUT_TEXTS = {domain: _TEXTS / f"heldout-{domain}.txt" for domain in ("prose", "code", "chat")}
# only the first bytes of a longer file are used
_MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, eq=False)
class TokenWindows:
    """ids: int64 [windows, seq_len]. source: description of the text. digest: of the ids, so
    independent of the file's name. domains: of each window; empty for a text without domains."""

    ids: Tensor
    source: str
    digest: str
    domains: tuple[str, ...] = ()


def calibration_windows(calibration: CalibrationConfig, tokenizer: HfTokenizer) -> TokenWindows:
    """Windows drawn by the seed, in the order of the text; equal seeds give equal windows.

    Raises ModelNotFound if the file is missing, InvalidRequest if it is not text or shorter than
    one window.
    """
    path = calibration.path or CALIBRATION_TEXT
    ids = _tokenize_windows(path, tokenizer, calibration.seq_len)
    if len(ids) > calibration.samples:
        drawn = random.Random(calibration.seed).sample(range(len(ids)), calibration.samples)
        ids = ids[sorted(drawn)]
    return _windows(ids, "built-in text" if calibration.path is None else path.name)


def held_out_windows(
    path: Path | None, tokenizer: HfTokenizer, seq_len: int, max_windows: int
) -> TokenWindows:
    """Windows spread evenly over a text. path: None for localgen's, in equal shares by domain.

    The shares of max_windows differ by at most one, and are equal if one domain is too short.
    Raises as calibration_windows.
    """
    if path is not None:
        ids = _tokenize_windows(path, tokenizer, seq_len)
        return _windows(_spread(ids, max_windows), path.name)
    texts = {
        domain: _tokenize_windows(text, tokenizer, seq_len)
        for domain, text in HELD_OUT_TEXTS.items()
    }
    shortest = min(map(len, texts.values()))
    share, more = divmod(max_windows, len(texts))
    counts = [min(share + (index < more), shortest) for index in range(len(texts))]
    parts = [_spread(ids, count) for ids, count in zip(texts.values(), counts, strict=True)]
    windows = _windows(torch.cat(parts), "built-in held-out text")
    repeated = zip(texts, counts, strict=True)
    return replace(windows, domains=tuple(d for domain, n in repeated for d in [domain] * n))


def _spread(ids: Tensor, count: int) -> Tensor:
    """At most `count` rows at equal distances."""
    count = min(count, len(ids))
    return ids[[index * len(ids) // count for index in range(count)]]


def _windows(ids: Tensor, source: str) -> TokenWindows:
    return TokenWindows(ids, source, hashlib.sha256(ids.numpy().tobytes()).hexdigest())


def _tokenize_windows(path: Path, tokenizer: HfTokenizer, seq_len: int) -> Tensor:
    """[windows, seq_len]. Every window starts with the tokenizer's BOS token, if it adds one."""
    tokens = tokenizer.encode_for_embedding(_read_text(path))
    first = tokenizer.encode_for_embedding("")[:1]
    body = tokens[len(first) :]
    length = seq_len - len(first)
    count = len(body) // length
    if not count:
        raise InvalidRequest(
            f"{path.name} has {len(tokens):,} tokens, one sequence has {seq_len:,}: "
            "give a longer text, or a smaller --seq-len"
        )
    windows = torch.tensor(body[: count * length]).view(count, length)
    return torch.cat([torch.tensor(first).expand(count, -1), windows], 1).long()


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            read = file.read(_MAX_BYTES)
    except OSError as error:
        raise ModelNotFound(f"cannot read the text {path}: {error.strerror}") from None
    try:
        # the last character of a longer file may be cut
        return read.decode("utf-8", "ignore" if len(read) == _MAX_BYTES else "strict")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} is not UTF-8 text at byte {error.start:,}") from None
