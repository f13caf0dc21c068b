"""Results in files: comparing two of them, and requirements for CI."""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localgen.backends.errors import InvalidRequest
from localgen.bench.estimates import ratio_interval
from localgen.bench.suite import TG

_REQUIREMENT = re.compile(r"(.+?)(>=|<=|>|<)\s*(\d+(?:\.\d+)?)")
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_TG_CONTEXT = 64  # of tg128, which answers an empty prompt
_LATENCIES = {
    "ttft": "mean_ttft_ms",
    "ttft p95": "p95_ttft_ms",
    "tpot": "mean_tpot_ms",
    "tpot p95": "p95_tpot_ms",
}
# what has to be the same for figures to be compared
_SAME = ("model", "url", "machine.cpu", "options")


@dataclass(frozen=True, slots=True)
class Requirement:
    """A bound of a figure, such as `tg128>=30`."""

    text: str
    figure: str
    symbol: str
    bound: float

    def check(self, record: Mapping[str, Any]) -> tuple[bool, str]:
        """Return whether a result keeps the bound (False without the figure), and a line."""
        names = mean_figures(record)
        figures = {_key(name): value for name, value in names.items()}
        if self.figure not in figures:
            return False, f"{self.text}: NOT measured; there are {', '.join(names) or 'none'}"
        value = figures[self.figure]
        is_kept = _OPERATORS[self.symbol](value, self.bound)
        return is_kept, f"{self.text}: {'kept' if is_kept else 'NOT kept'}, it is {value:.2f}"


@dataclass(frozen=True, slots=True)
class MeasuredRates:
    """Tokens/s of all requests together, without the time of their prompts, by their number.

    ctx: tokens in the KV cache of a request, on average.
    """

    model: str
    rates: tuple[tuple[int, float], ...]
    ctx: int


def parse_requirement(text: str) -> Requirement:
    """Raises InvalidRequest if it is invalid."""
    found = _REQUIREMENT.fullmatch(text.strip())
    if found is None:
        raise InvalidRequest(f"--require {text}: give a figure and its bound, such as tg128>=30")
    return Requirement(text, _key(found[1]), found[2], float(found[3]))


def mean_figures(record: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a result by name.

    Mean tokens/s of a test; its latencies in ms (`pp512 ttft`, `4 sessions tpot p95`); the share of
    a load's requests that kept the goals in percent (`2/s kept`); `people`; the `goodput` in
    requests/s.
    """
    found = {}
    for test in record["tests"]:
        if test["samples_ts"]:
            found[test["test"]] = test["avg_ts"]
        found[f"{test['test']} ttft"] = sum(test["ttft_ms"]) / len(test["ttft_ms"])
    for load in (*record["sessions"], *record.get("loads", ())):
        found[load["test"]] = load["output_throughput"]
        for figure, key in _LATENCIES.items():
            if key in load:
                found[f"{load['test']} {figure}"] = load[key]
        if "share_kept" in load:
            found[f"{load['test']} kept"] = 100 * load["share_kept"]
    if record.get("people"):
        found["people"] = record["people"]["count"]
    if record.get("goodput"):
        found["goodput"] = record["goodput"]["rate"]
    return found


def read_decode_rates(path: Path) -> MeasuredRates:
    """Read the decode rates of a result. Raises InvalidRequest if it is none, or has none."""
    record = read(path, "bench")
    try:
        loads = [one for one in (*record["sessions"], *record.get("loads", ())) if _is_decode(one)]
        rates = {
            int(one["max_concurrency"]): one["max_concurrency"] * 1e3 / one["median_tpot_ms"]
            for one in loads
        }
        alone = mean_figures(record).get(TG)
        if alone:
            rates[1] = alone
        tokens = sum(one["total_input_tokens"] + one["total_output_tokens"] / 2 for one in loads)
        ctx = round(tokens / sum(one["completed"] for one in loads)) if loads else _TG_CONTEXT
        if not all(0 < rate < math.inf and n > 0 for n, rate in rates.items()) or ctx < 1:
            raise ValueError("a rate that no server has")
    except (LookupError, TypeError, ArithmeticError, ValueError) as error:
        message = f"--bench {path}: no result of `localgen bench --save`"
        raise InvalidRequest(message, param="bench") from error
    if not rates:
        raise InvalidRequest(f"--bench {path}: it has no tg128, sessions or --concurrency")
    return MeasuredRates(str(record.get("model", "")), tuple(sorted(rates.items())), ctx)


def _is_decode(load: Mapping[str, Any]) -> bool:
    return bool(load.get("max_concurrency") and load.get("median_tpot_ms"))


def save(record: Mapping[str, Any], path: Path) -> None:
    """Write a result as JSON. Raises InvalidRequest if it cannot be written."""
    try:
        path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"--save {path}: {error.strerror}", param="save") from error


def read(path: Path, option: str = "compare") -> dict[str, Any]:
    """Read a result. option: that named the file. Raises InvalidRequest if it is none."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        mean_figures(record)
        if not all(math.isfinite(rate) for rates in _samples(record).values() for rate in rates):
            raise ValueError("a rate that is not finite")
        return dict(record)
    except OSError as error:
        raise InvalidRequest(f"--{option} {path}: {error.strerror}", param=option) from error
    except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
        raise InvalidRequest(
            f"--{option} {path}: no result of `localgen bench --save`", param=option
        ) from error


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """A line for each test of both results, and for what makes them hard to compare."""
    for name in _SAME:
        first, second = _look_up(before, name), _look_up(after, name)
        if first != second:
            yield f"{name.partition('.')[2] or name} differs: {first} and {second}"
    samples = [_samples(record) for record in (before, after)]
    names = [name for name in samples[0] if name in samples[1]]
    if not names:
        yield "no test of one stream is in both; loads are not compared"
    for name in names:
        yield f"{name}: {difference(samples[0][name], samples[1][name])}"


def difference(before: Sequence[float], after: Sequence[float]) -> str:
    """The change of the mean with its 95 % interval, such as `+4.1 % (+2.9 to +5.3)`, in words."""
    found = ratio_interval(before, after)
    if found is None:
        return "measured once: give it more --time to tell a difference"
    centre, low, high = (100 * (ratio - 1) for ratio in found)
    interval = f"({low:+.1f} to {high:+.1f})"
    if low <= 0 <= high:
        return f"no difference that can be told {interval}"
    return f"{centre:+.1f} % {interval}"


def _samples(record: Mapping[str, Any]) -> dict[str, list[float]]:
    both = [*record["tests"], *record["sessions"]]
    return {test["test"]: list(test["samples_ts"]) for test in both if test["samples_ts"]}


def _look_up(record: Mapping[str, Any], path: str) -> object:
    value: Any = record
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _key(name: str) -> str:
    return re.sub(r"\s+", "", name).lower()
