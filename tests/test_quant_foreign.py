"""What we write, read by compressed-tensors inside transformers: the same logits as ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hf_folders import TINY

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

import torch
import transformers

from localgen.backends.formats.hf.tokenizer import HfTokenizer
from localgen.quant import evaluate
from localgen.quant.calibrate.text_windows import held_out_windows
from localgen.quant.files.layerwise_checkpoint import Source
from localgen.quant.job import Job
from localgen.quant.preflight import prepare
from localgen.quant.request.recipe import Calibration, Method, Recipe


@pytest.mark.parametrize("method", ["fp8", "smoothquant"])
def test_logits_are_those_of_transformers(method: Method, tmp_path: Path) -> None:
    """Inputs are rounded for each token by both."""
    out = tmp_path / "out"
    ready = prepare(TINY, Recipe(method=method, bits=8), Calibration(samples=8, seq_len=64), "cpu")
    Job("tiny", ready, out).run(resume=False, on_progress=lambda _: None)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(out, dtype=torch.float32)
    source = Source(out)
    for name, tensor in source.layer(3).items():
        module = model.get_submodule(f"model.layers.3.{name.removesuffix('.weight')}")
        scales = getattr(module, "weight_scale", torch.ones(()))
        torch.testing.assert_close(module.weight.float() * scales, tensor, atol=0.0, rtol=1e-6)
    ids = held_out_windows(None, HfTokenizer.of_folder(out, source.spec.vocab), 64, 2).ids
    read = evaluate.read(source, ids)
    with torch.no_grad():
        theirs = model(ids).logits
    for index in range(len(ids)):
        ours = evaluate.window_logits(read, index)
        if method == "fp8":
            torch.testing.assert_close(ours, theirs[index], atol=1e-3, rtol=1e-3)
        # its steps for int8 inputs are 255 / 2 to the greatest, those of runtimes and ours 127
        p, q = theirs[index].log_softmax(-1), ours.log_softmax(-1)
        assert float((p.exp() * (p - q)).sum(-1).mean()) < 5e-3
