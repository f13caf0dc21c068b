"""Measured costs of an engine's steps, and what its memory holds, from a JSON file."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from localgen.backends.engine.token_budget import MIN_ALLOWED_SLOWDOWN, MIN_PROMPT_TOKENS

FOLDER = Path(__file__).parent / "costs"
# the cache of llama.cpp's shared context, or pages of blocks
SLOTS, BLOCKS = "slots", "blocks"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCosts:
    """Seconds of a step: step_s + prompt_token_s for each prompt token + first_token_s for each
    prompt that ends in it + sequence_s for each decoding sequence + context_token_s for each token
    in their contexts + batch_context_token_s for each of these tokens that is not of one of the
    sequences, as a core's cache may hold the keys and values of one + attention_s for each pair of
    a prompt token and a token before it + cell_s for each pair of a computed token and a cell of
    the KV cache: llama.cpp reads the mask of all up to the last one in use, by whomever.

    source: what measured it. request_s: from the client to the engine and back, outside of steps.
    max_seqs, batch_tokens, itl_target_s, kv_tokens: limits of the engine. kv_bytes: of a token.
    cache: SLOTS or BLOCKS. threads: cores that a step uses.
    """

    source: str
    step_s: float
    prompt_token_s: float
    attention_s: float
    sequence_s: float
    context_token_s: float
    request_s: float
    max_seqs: int
    batch_tokens: int
    itl_target_s: float
    kv_tokens: int
    kv_bytes: int
    cache: str
    threads: int = 1
    cell_s: float = 0.0
    first_token_s: float = 0.0
    batch_context_token_s: float = 0.0

    def prompt_s(self, start: int, tokens: int, cells: int = 0) -> float:
        """What prompt tokens add to a step. start: tokens before them. cells: see cell_s."""
        each_s = self.prompt_token_s + self.attention_s * (start + tokens / 2) + self.cell_s * cells
        return each_s * tokens

    def decode_s(self, steps: int, sequences: int, context: int, cells: int = 0) -> float:
        """Time of decode steps in a row. context: tokens of all contexts before the first one.
        cells: see cell_s."""
        grown = sequences * steps * (steps - 1) / 2
        fixed_s = self._decode_step_s(sequences, cells)
        return steps * fixed_s + self._mean_context_token_s(sequences) * (steps * context + grown)

    def _mean_context_token_s(self, sequences: int) -> float:
        """Seconds per context token in a step that decodes so many sequences of equal length."""
        others = (sequences - 1) / sequences if sequences else 0.0
        return self.context_token_s + self.batch_context_token_s * others

    def _decode_step_s(self, sequences: int, cells: int) -> float:
        """A step without its attention to the contexts."""
        return self.step_s + (self.sequence_s + self.cell_s * cells) * sequences

    def steps_within(self, seconds: float, sequences: int, context: int, cells: int = 0) -> int:
        """Number of whole decode steps in this time."""
        mean_s = self._mean_context_token_s(sequences)
        square = mean_s * sequences / 2
        each_s = self._decode_step_s(sequences, cells) + mean_s * context - square
        # square * n² + each_s * n = seconds, in the form that is exact for a small square
        found = int(2 * seconds / (each_s + math.sqrt(each_s**2 + 4 * square * seconds)))
        while self.decode_s(found + 1, sequences, context, cells) <= seconds:
            found += 1
        while found and self.decode_s(found, sequences, context, cells) > seconds:
            found -= 1
        return found

    def prompt_budget(self, sequences: int, context: int) -> int:
        """Prompt tokens of a step that decodes so many sequences as well: see TokenBudget."""
        if not sequences:
            return self.batch_tokens
        base_s = self.decode_s(1, sequences, context)
        spare_s = max(self.itl_target_s, MIN_ALLOWED_SLOWDOWN * base_s) - base_s
        wanted = max(MIN_PROMPT_TOKENS, int(spare_s / self.prompt_token_s))
        return max(1, min(self.batch_tokens - sequences, wanted))

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def load_costs(name: str) -> EngineCosts:
    """The costs of a file, or of a name in FOLDER. Raises ValueError if there are none."""
    path = Path(name) if name.endswith(".json") else FOLDER / f"{name}.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        costs = EngineCosts(**found)
    except (OSError, ValueError, TypeError) as error:
        known = ", ".join(sorted(each.stem for each in FOLDER.glob("*.json")))
        raise ValueError(f"{path}: {error}; there are {known}") from error
    for field in fields(costs):
        value = getattr(costs, field.name)
        if not isinstance(value, str) and not value >= 0:
            raise ValueError(f"{path}: {field.name} is {value}")
    if costs.step_s <= 0 or costs.prompt_token_s <= 0:
        raise ValueError(f"{path}: a step and a prompt token take time")
    if costs.cache not in (SLOTS, BLOCKS):
        raise ValueError(f"{path}: cache is {costs.cache!r}, not {SLOTS} or {BLOCKS}")
    return costs
