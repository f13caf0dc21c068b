"""Absurd numbers in a model file are an error or a model of sane size, never a large engine."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFValueType as Type
from models import TINY_GGUF

from localgen.backends.errors import LoadFailed
from localgen.backends.formats.architecture.model_shape import kv_cache_bytes_per_token
from localgen.backends.formats.architecture.model_spec import MAX_LAYERS
from localgen.backends.formats.gguf.limits import check_gguf_numbers
from localgen.backends.formats.gguf.reader import read_gguf_header
from localgen.backends.formats.gguf.shape import shape_from_gguf
from localgen.backends.memory.kv_sizing import (
    DEFAULT_CTX,
    LLAMACPP_POOL,
    KVSizeRequest,
    resolve_kv_size,
)
from localgen.machine.python_process import python_environment

VALUES: list[tuple[Any, Type]] = [
    (2**31 - 1, Type.UINT32),
    (2**32 - 1, Type.UINT32),
    (2**63 - 1, Type.UINT64),
    (0, Type.UINT32),
    (-1, Type.INT32),
    (-1.0, Type.FLOAT32),
    (math.nan, Type.FLOAT32),
    ("7", Type.STRING),
    (True, Type.BOOL),
    ([2**31 - 1] * 6, Type.ARRAY),
]
# on which native code may depend, besides all that the built-in model has
OTHERS = [
    "expert_count",
    "expert_used_count",
    "nextn_predict_layers",
    "attention.shared_kv_layers",
    "attention.sliding_window",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
]
LOADED = [
    *("context_length", "block_count", "embedding_length", "attention.head_count"),
    *("rope.dimension_count", "attention.layer_norm_rms_epsilon", "attention.sliding_window"),
    *("expert_count", "expert_used_count", "nextn_predict_layers", "attention.shared_kv_layers"),
]
OWN = [key for key in read_gguf_header(Path(TINY_GGUF)) if key.startswith("llama.")]
KEYS = [*OWN, *(f"llama.{name}" for name in OTHERS)]


@pytest.mark.parametrize("key", KEYS)
def test_shapes_of_absurd_numbers(key: str) -> None:
    header = read_gguf_header(Path(TINY_GGUF))
    for value, _ in VALUES:
        shape = shape_from_gguf(header | {key: value})
        if shape is None:
            continue
        assert len(shape.layer_caches) <= shape.num_layers <= MAX_LAYERS
        size = resolve_kv_size(
            KVSizeRequest(ctx=None, kv_tokens=None, ctx_train=max(1, shape.ctx_train)),
            LLAMACPP_POOL,
            token_bytes=max(1.0, kv_cache_bytes_per_token(shape.layer_caches, "f16", "f16")),
            free_bytes=1 << 62,
        )
        assert 0 < size.ctx <= DEFAULT_CTX


def test_engines_of_files_with_absurd_numbers(tmp_path: Path) -> None:
    # llama.cpp checks types itself, and the rest without an effect on memory takes long to load
    kinds = (Type.UINT32, Type.FLOAT32, Type.ARRAY)
    cases = [
        (f"llama.{name}", value, kind) for name in LOADED for value, kind in VALUES if kind in kinds
    ]
    done = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).with_name("gguf_number_loads.py")),
            tmp_path / "m.gguf",
        ],
        input="\n".join(json.dumps(case) for case in cases),
        capture_output=True,
        text=True,
        timeout=600,
        env=python_environment(),
    )
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(outcomes) == len(cases), (cases[len(outcomes)], done.stderr[-1000:])
    for case, (outcome, peak_bytes) in zip(cases, outcomes, strict=True):
        assert peak_bytes < 1 << 30, case
        if isinstance(outcome, int):
            assert 0 < outcome <= DEFAULT_CTX, case
        else:
            assert outcome.startswith("cannot "), case
            assert "\n" not in outcome


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("block_count", 513, "llama.block_count is '513', it must be 1 to 512"),
        ("context_length", 0, "llama.context_length is '0', it must be 1 to 2147483647"),
        ("expert_used_count", 2, "it must be 0 to 0"),
        ("attention.layer_norm_rms_epsilon", math.nan, "it must be a finite number"),
        ("nextn_predict_layers", 6, "it must be 0 to 5"),
    ],
)
def test_the_error_names_the_key(key: str, value: float, message: str) -> None:
    header = read_gguf_header(Path(TINY_GGUF)) | {f"llama.{key}": value}
    with pytest.raises(LoadFailed, match=message):
        check_gguf_numbers(header, Path("m.gguf"))
