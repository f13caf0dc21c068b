"""Inputs that benchmarks.fuzz once found a defect with: each is accepted, or refused clearly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")  # for tensors of model files

from benchmarks.fuzz_parts.worker import Worker

CORPUS = sorted((Path(__file__).parent / "data/fuzz").iterdir())


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as made:
        yield made


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_former_findings_are_accepted_or_refused(worker: Worker, path: Path) -> None:
    target = path.name.partition("-")[0]
    outcome = worker.run(target, path.read_bytes())
    assert not outcome.is_finding, outcome
