"""benchmarks.gpu_host measures steps and launches on a machine without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_a_quick_run_beside_another_checkout(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET")  # kernels are compiled
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.gpu_host", "--quick"),
            *("--against", str(ROOT), "--output", str(output)),
        ],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    text = output.read_text()
    assert str(ROOT) not in text
    result = json.loads(text)
    tests = {series["test"] for series in result["series"]}
    assert {"step of 3 sequences", "eager forward pass of 2 layers"} <= tests
    assert any(test.endswith("launches of _decode_attention_kernel") for test in tests)
    assert {series["side"] for series in result["series"]} == {"localgen", "other checkout"}
    figures = {(series["test"], series["side"]): series["median"] for series in result["series"]}
    assert all(value > 0 for value in figures.values())
    for side in ("localgen", "other checkout"):
        whole = figures["step of 1 sequences", side]
        assert figures["step of 1 sequences, exposed", side] < whole
        assert (
            figures["step of 1 sequences, exposed", side]
            < (figures["step of 1 sequences, results to next pass", side])
        )
