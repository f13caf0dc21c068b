"""A benchmark for each combination of load options, which can be resumed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localgen.backends.errors import InvalidRequest
from localgen.backends.model_info import LoadOptions
from localgen.bench import saved_results
from localgen.bench.report import BenchResult
from localgen.bench.tables import markdown_table

Options = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Combination:
    """Load options, and what of them varies in the matrix, as it was typed."""

    varied: Options
    load: LoadOptions

    @property
    def name(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.varied.items())


def run_matrix(
    model: str,
    combinations: Sequence[Combination],
    measure: Callable[[LoadOptions], BenchResult],
    save: Path | None,
    *,
    resume: bool,
    notify: Callable[[str], None],
) -> dict[str, Any]:
    """Measure each combination, and save after each. Returns all results as JSON.

    resume: leave out what the file already has. Raises InvalidRequest if it is another model's, and
    what `measure` raises.
    """
    done: list[dict[str, Any]] = []
    if resume and save is not None and save.exists() and save.stat().st_size:
        done = _read(save, model)
    for number, combination in enumerate(combinations, 1):
        if any(record["options"] == dict(combination.varied) for record in done):
            continue
        notify(f"{number} of {len(combinations)}: {combination.name}")
        record = measure(combination.load).record() | {"options": dict(combination.varied)}
        done.append(record)
        if save is not None:
            saved_results.save({"requested": model, "matrix": done}, save)
    return {"requested": model, "matrix": done}


def matrix_table(matrix: Mapping[str, Any]) -> str:
    """The means of each test, a row for each combination."""
    records = matrix["matrix"]
    figures = [saved_results.mean_figures(record) for record in records]
    tests = dict.fromkeys(name for each in figures for name in each)
    shown = [name for name in tests if not name.endswith("ttft")]
    columns = [("options", -10), *((name, len(name)) for name in shown)]
    lines = [
        (
            " ".join(f"{key}={value}" for key, value in record["options"].items()),
            *(f"{found[name]:.2f}" if name in found else "-" for name in shown),
        )
        for record, found in zip(records, figures, strict=True)
    ]
    return markdown_table(columns, lines)


def _read(path: Path, model: str) -> list[dict[str, Any]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found, records = content["requested"], content["matrix"]
        for record in records:
            saved_results.mean_figures(record)
            dict(record["options"])
    except OSError as error:
        raise InvalidRequest(f"--resume {path}: {error.strerror}", param="resume") from error
    except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
        raise InvalidRequest(
            f"--resume: {path} is no result of a --matrix: choose another file to --save",
            param="resume",
        ) from error
    if found != model:
        raise InvalidRequest(
            f"--resume: {path} is about {found}: choose another file to --save", param="resume"
        )
    return list(records)
