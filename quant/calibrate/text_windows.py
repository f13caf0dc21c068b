"""Calibration text and held-out text as windows of tokens.

Both texts in texts/ were made for localgen and have no restrictions beyond its licence: prose,
letters and minutes written for it in a dozen languages, excerpts of its code and documentation,
and generated chats, sums, tables and logs. Both use the same generator, so they share some phrases,
but no prose, code or question.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from localgen.backends.errors import InvalidRequest, ModelNotFound
from localgen.backends.formats.hf.tokenizer import HfTokenizer
from localgen.quant.request.recipe import CalibrationConfig

_TEXTS = Path(__file__).parents[1] / "texts"
CALIBRATION_TEXT = _TEXTS / "calibration.txt"
HELD_OUT_TEXT = _TEXTS / "heldout.txt"
# only the first bytes of a longer file are used
_MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, eq=False)
class TokenWindows:
    """ids: int64 [windows, seq_len]. source: description of the text. digest: of the ids, so
    independent of the file's name."""

    ids: Tensor
    source: str
    digest: str


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
    """The first windows of a text. path: None for localgen's held-out text.

    Raises as calibration_windows.
    """
    ids = _tokenize_windows(path or HELD_OUT_TEXT, tokenizer, seq_len)[:max_windows]
    return _windows(ids, "built-in held-out text" if path is None else path.name)


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
