"""How fast a model writes on this machine, as whoever runs it gets it: through the server."""

from __future__ import annotations

from pathlib import Path

from localgen.backends.errors import LocalgenError
from localgen.backends.model_info import LoadOptions
from localgen.backends.types import SamplingParams
from localgen.client import Answer, Client
from localgen.placement import this_machine

_PROMPT = "Once upon a time"
_TOKENS = 64
_CTX = 512


def tokens_per_s(path: Path) -> float | None:
    """Of one answer of 64 tokens by whatever backend runs it; None: nothing here does, or fast
    enough to be worth asking (a folder without a GPU)."""
    if path.is_dir() and this_machine().why_no_cuda is not None:
        return None
    name = str(path.absolute())
    params = SamplingParams(temperature=0.0, max_tokens=_TOKENS, min_tokens=_TOKENS, seed=0)
    try:
        with Client() as client:
            client.load(name, LoadOptions(ctx=_CTX), keep_alive="1m")
            rates = [_rate(client, name, params) for _ in range(2)]
            client.unload(name)
    except LocalgenError:
        return None
    # the first answer may have had something to compile
    return rates[-1]


def _rate(client: Client, name: str, params: SamplingParams) -> float | None:
    answers = [
        piece for piece in client.complete(name, _PROMPT, params) if isinstance(piece, Answer)
    ]
    return answers[-1].timings.predicted_per_second or None if answers else None
