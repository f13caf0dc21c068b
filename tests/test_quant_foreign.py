"""Our quantized checkpoints, read by compressed-tensors inside transformers, give our logits."""

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
from localgen.quant.files.layerwise_checkpoint import LayerwiseCheckpoint
from localgen.quant.job import QuantizeJob
from localgen.quant.preflight import prepare_quantization
from localgen.quant.request.recipe import CalibrationConfig, QuantizeMethod, Recipe


@pytest.mark.parametrize(
    ("method", "bits"), [("fp8", 8), ("smoothquant", 8), ("rtn", 3), ("gptq", 3), ("rtn", 8)]
)
def test_logits_are_those_of_transformers(
    method: QuantizeMethod, bits: int, tmp_path: Path
) -> None:
    """Inputs of fp8 and smoothquant are rounded for each token by both."""
    out = tmp_path / "out"
    ready = prepare_quantization(
        TINY, Recipe(method=method, bits=bits), CalibrationConfig(samples=8, seq_len=64), "cpu"
    )
    QuantizeJob("tiny", ready, out).run(lambda _: None, resume=False)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(out, dtype=torch.float32)
    source = LayerwiseCheckpoint(out)
    ids = held_out_windows(None, HfTokenizer.from_folder(out, source.spec.vocab_size), 64, 2).ids
    read = evaluate.compute_final_states(source, ids)
    with torch.no_grad():
        # weights are dequantized by the first pass
        theirs = model(ids).logits
    for name, tensor in source.read_layer(3).items():
        module = model.get_submodule(f"model.layers.3.{name.removesuffix('.weight')}")
        torch.testing.assert_close(module.weight.float(), tensor, atol=0.0, rtol=1e-6)
    for index in range(len(ids)):
        ours = evaluate.window_logits(read, index)
        if method != "smoothquant":
            torch.testing.assert_close(ours, theirs[index], atol=1e-3, rtol=1e-3)
        # its steps for int8 inputs are 255 / 2 to the greatest, those of runtimes and ours 127
        p, q = theirs[index].log_softmax(-1), ours.log_softmax(-1)
        assert float((p.exp() * (p - q)).sum(-1).mean()) < 5e-3
