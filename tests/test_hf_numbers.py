"""Absurd numbers in a config.json are an error or a model of sane size, never a large engine."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from localgen.backends.memory.kv_sizing import DEFAULT_CTX
from localgen.machine.python_process import python_environment

TINY = Path(__file__).parents[1] / "localgen/models/tiny"
VALUES: list[Any] = [2**31 - 1, 2**63 - 1, 10**6, 0, -1, math.nan, 1e300, "7", True, [2**31 - 1]]
KEYS = [
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
    *("rms_norm_eps", "rope_theta"),
]
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024}


def test_engines_of_configs_with_absurd_numbers(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    cases = [{key: value} for key in KEYS for value in VALUES]
    for key in ("factor", "original_max_position_embeddings"):
        cases += [{"rope_scaling": YARN | {key: value}} for value in VALUES]
    program = Path(__file__).with_name("hf_number_loads.py")
    done = subprocess.run(
        [sys.executable, str(program), str(TINY), str(tmp_path)],
        input="\n".join(map(json.dumps, cases)),
        capture_output=True,
        text=True,
        timeout=600,
        env=python_environment(),
    )
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(outcomes) == len(cases), (cases[len(outcomes)], done.stderr[-1000:])
    for case, (outcome, peak_bytes) in zip(cases, outcomes, strict=True):
        assert peak_bytes < 2 << 30, case
        if isinstance(outcome, int):
            assert 0 < outcome <= DEFAULT_CTX, case
        else:
            assert str(tmp_path) in outcome, case
            assert "\n" not in outcome
