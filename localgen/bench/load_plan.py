"""What load is put on a server, from the options of the command."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from localgen.backends.errors import InvalidRequest
from localgen.bench.datasets import MAX_TOKENS, TraceEntry, read_prompts, read_trace
from localgen.bench.load import Query

_INPUT_TOKENS, _OUTPUT_TOKENS = 128, 64
_MAX_CONCURRENCY = 256
_PREFIX = re.compile(r"(\d{1,7})[x×](\d{1,4})")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """The load of a server; without any of rate, concurrency and trace: a search for the goodput.

    rate: requests per second, evenly apart or (is_poisson) at random. concurrency: numbers of
    requests that run at any time, one load each. queries: those of a file, used in turn; else
    random words of these lengths, behind one of num_prefixes shared prefixes.
    """

    rate: float | None = None
    is_poisson: bool = False
    concurrency: tuple[int, ...] = ()
    trace: tuple[TraceEntry, ...] = ()
    queries: tuple[Query, ...] = ()
    input_tokens: int = _INPUT_TOKENS
    output_tokens: int = _OUTPUT_TOKENS
    prefix_tokens: int = 0
    num_prefixes: int = 0

    @property
    def is_search(self) -> bool:
        return self.rate is None and not self.concurrency and not self.trace


def load_plan(
    *,
    rate: float | None = None,
    is_poisson: bool = False,
    concurrency: str | None = None,
    trace: Path | None = None,
    prompts: Path | None = None,
    input_tokens: int | None = None,
    output_tokens: int | None = None,
    shared_prefix: str | None = None,
    is_search: bool = False,
) -> LoadPlan | None:
    """The load that options ask for, or None for the tests of one stream.

    Raises InvalidRequest if an option is invalid, or would have no effect.
    """
    loads = {"--rate": rate, "--concurrency": concurrency, "--trace": trace}
    given = [option for option, value in loads.items() if value is not None]
    if len(given) > 1:
        raise InvalidRequest(f"give only one of {' and '.join(given)}")
    lengths = {"--input-len": input_tokens, "--shared-prefix": shared_prefix}
    words = [option for option, value in lengths.items() if value is not None]
    source = "--trace" if trace else "--prompts" if prompts else ""
    if source and words:
        raise InvalidRequest(f"{words[0]} is for random prompts: leave it or {source} out")
    if trace and (prompts or output_tokens):
        other = "--prompts" if prompts else "--output-len"
        raise InvalidRequest(f"--trace has its own lengths: leave {other} out")
    if is_poisson and rate is None:
        raise InvalidRequest("--poisson is about the times of --rate: give that as well")
    others = {"--prompts": prompts, "--output-len": output_tokens} | lengths
    if not given and not is_search:
        needless = [option for option, value in others.items() if value is not None]
        if needless:
            raise InvalidRequest(
                f"{needless[0]} is about a load: give --slo, --rate, --concurrency or "
                "--trace as well"
            )
        return None
    if rate is not None and not 0 < rate <= 1e4:
        raise InvalidRequest(f"--rate {rate:g}: give requests per second, above 0")
    answer_tokens = output_tokens or _OUTPUT_TOKENS
    prefix_tokens, num_prefixes = _parse_prefix(shared_prefix) if shared_prefix else (0, 0)
    return LoadPlan(
        rate=rate,
        is_poisson=is_poisson,
        concurrency=_parse_concurrency(concurrency) if concurrency is not None else (),
        trace=tuple(read_trace(trace)) if trace else (),
        queries=tuple(read_prompts(prompts, answer_tokens)) if prompts else (),
        input_tokens=input_tokens or _INPUT_TOKENS,
        output_tokens=answer_tokens,
        prefix_tokens=prefix_tokens,
        num_prefixes=num_prefixes,
    )


def _parse_concurrency(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 0 < int(part[:9]) <= _MAX_CONCURRENCY for part in parts):
        raise InvalidRequest(
            f"--concurrency {text}: give numbers from 1 to {_MAX_CONCURRENCY}, such as 1,2,4"
        )
    return tuple(dict.fromkeys(map(int, parts)))


def _parse_prefix(text: str) -> tuple[int, int]:
    found = _PREFIX.fullmatch(text.strip())
    if found is None or not int(found[1]) or not int(found[2]):
        raise InvalidRequest(f"--shared-prefix {text}: give TOKENSxNUMBER, such as 4096x8")
    tokens, number = int(found[1]), int(found[2])
    if tokens * number > MAX_TOKENS:
        raise InvalidRequest(f"--shared-prefix {text}: at most {MAX_TOKENS:,} tokens in all")
    return tokens, number
