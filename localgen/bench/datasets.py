"""Prompts of files: JSON lines of prompts, ShareGPT's conversations, and traces."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localgen.backends.block_hashes import BLOCK_TOKENS
from localgen.backends.errors import InvalidRequest
from localgen.bench.load import Query
from localgen.bench.prompts import WordPrompts

# of a prompt or an answer
MAX_TOKENS = 10_000_000


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """A request of a trace: Mooncake's fields. hash_ids: of its blocks of 512 tokens; equal ones
    at the begin are a prefix that was shared."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def read_prompts(path: Path, output_tokens: int) -> list[Query]:
    """Read `{"prompt": …}` lines, or the first questions of ShareGPT's conversations.

    output_tokens: of each answer, unless a line has `output_tokens`. Raises InvalidRequest.
    """
    found = []
    for number, record in _records(path, "--prompts"):
        prompt = _prompt(record)
        tokens = record.get("output_tokens", output_tokens) if isinstance(record, dict) else 0
        if not isinstance(prompt, str) or not prompt or not isinstance(tokens, int) or tokens < 1:
            raise InvalidRequest(
                f'--prompts {path}, line {number}: give {{"prompt": "…"}}, perhaps with '
                "output_tokens, or a ShareGPT conversation",
                param="prompts",
            )
        found.append(Query(prompt, tokens))
    if not found:
        raise InvalidRequest(f"--prompts {path}: it has no prompts", param="prompts")
    return found


def read_trace(path: Path) -> list[TraceEntry]:
    """Read a trace in Mooncake's format. Raises InvalidRequest."""
    entries = []
    for number, record in _records(path, "--trace"):
        try:
            entry = TraceEntry(
                float(record["timestamp"]),
                int(record["input_length"]),
                int(record["output_length"]),
                tuple(int(each) for each in record.get("hash_ids", ())),
            )
            if (
                not 0 < entry.input_length <= MAX_TOKENS
                or not 0 < entry.output_length <= MAX_TOKENS
            ):
                raise ValueError("a length that no model has")
        except (LookupError, TypeError, ArithmeticError, ValueError, AttributeError) as error:
            raise InvalidRequest(
                f"--trace {path}, line {number}: give timestamp (ms), input_length, output_length "
                "and perhaps hash_ids",
                param="trace",
            ) from error
        entries.append(entry)
    if not entries:
        raise InvalidRequest(f"--trace {path}: it has no requests", param="trace")
    return sorted(entries, key=lambda entry: entry.timestamp)


def trace_queries(entries: list[TraceEntry], prompts: WordPrompts, seed: int) -> Iterator[Query]:
    """The requests of a trace at its times, with words in place of its text.

    Blocks of the same hash have the same words.
    """
    begin = entries[0].timestamp
    for entry in entries:
        parts = [
            prompts.like(BLOCK_TOKENS, random.Random(f"{seed} {each}"))
            for each in entry.hash_ids[: entry.input_length // BLOCK_TOKENS]
        ]
        rest = entry.input_length - BLOCK_TOKENS * len(parts)
        parts += [prompts.make(rest)] if rest else []
        yield Query(" ".join(parts), entry.output_length, (entry.timestamp - begin) / 1e3)


def _records(path: Path, option: str) -> Iterator[tuple[int, Any]]:
    """The records of a file of JSON lines, or of one JSON array, with their numbers from 1."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InvalidRequest(f"{option} {path}: {reason}") from error
    if text.lstrip().startswith("["):
        yield from enumerate(_decoded(text, path, option, 1), 1)
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, _decoded(line, path, option, number)


def _decoded(text: str, path: Path, option: str, number: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{option} {path}, line {number}: it is not JSON") from error


def _prompt(record: Any) -> object:
    if not isinstance(record, dict):
        return None
    if "prompt" in record:
        return record["prompt"]
    turns = record.get("conversations")
    if not isinstance(turns, list):
        return None
    asked = (turn for turn in turns if isinstance(turn, dict) and turn.get("from") == "human")
    return next(asked, {}).get("value")
