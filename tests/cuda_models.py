"""Tiny random models of every supported architecture, made by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from cuda_checkpoints import begun
from cuda_configs import CONVERTIBLE, SIZES, write_config
from torch import Tensor

from localgen.backends.cuda.kv.page_pool import PAGE_TOKENS
from localgen.backends.cuda.model.batch import build_step_inputs, inputs_to_device
from localgen.backends.cuda.model.decoder import Decoder, KVCache
from localgen.backends.cuda.model.weights import load_weights
from localgen.backends.formats.hf.config import read_hf_config
from localgen.backends.runner.interface import Chunk
from localgen.backends.runner.sequence import Sequence
from localgen.backends.sampling_params import BASE_SAMPLING

# within the length of LongRoPE's short factors in cuda_configs
VOCAB, MAX_LEN = int(SIZES["vocab_size"]), 128
# every architecture and every branch of the decoder
ARCHITECTURES = (
    "llama",
    "llama biases",
    "llama uneven",
    "llama tied",
    "llama 3.1",
    "mistral window",
    "qwen2 window",
    "qwen3 yarn",
    "gemma2",
    "gemma3",
    "phi3",
    "phi4 mini",
    "phi4 unscaled",
    "mixtral",
    "qwen3 moe",
    "smollm3",
    "smollm3 biases",
    "smollm3 window",
    "olmo2",
    "granite",
    "glm4",
    "glm4 unbiased",
    "gemma3 images",
    "mistral3 images",
    "ministral3",
    "ministral3 images",
    "seed oss",
    "seed oss biases",
    "ernie4.5",
    "ernie4.5 biases",
    "exaone4",
    "exaone4 global",
    "olmo3",
)
QUANTIZABLE = [name for name in ARCHITECTURES if name in CONVERTIBLE]


def make(name: str, folder: Path) -> Any:
    """A random transformers model in float32, saved to `folder` in the published layout."""
    model = begun(name, folder)
    for tensor_name, tensor in model.named_parameters():
        # the default initialization leaves norms at 1 and biases at 0, where mistakes do not show
        scale = 0.3 if "norm" in tensor_name or "bias" in tensor_name else 0.0
        tensor.data += scale * torch.randn_like(tensor)
    model.eval()
    model.save_pretrained(folder)
    write_config(folder, name)
    return model


def random_text(*, seed: int, length: int) -> list[int]:
    """Random tokens without special ones."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
    return tokens


class Model:
    """A decoder with a cache whose pages are assigned at random."""

    def __init__(self, folder: Path, *, sequences: int = 4) -> None:
        spec = read_hf_config(folder)
        weights = load_weights(folder, spec, device="cpu", dtype=torch.float32)
        each = MAX_LEN // PAGE_TOKENS
        self.decoder = Decoder(spec, weights, MAX_LEN)
        self.cache = KVCache.zeros(spec, each * sequences, device="cpu", dtype=torch.float32)
        for tensor in (part for layer in self.cache.layers for part in layer.tensors):
            tensor.fill_(torch.nan)  # nothing may be read before it is written
        self._pages = np.random.default_rng(0).permutation(each * sequences).astype(np.int32)
        self._each = each

    def step(self, parts: list[tuple[int, int, list[int]]]) -> list[Tensor]:
        """Logits after every token of each part (sequence, start, tokens)."""
        names = {number: _sequence(number) for number, _, _ in parts}
        chunks = [
            Chunk(
                seq=names[n],
                start=start,
                tokens=tokens,
                num_drafts=len(tokens) - 1,
                is_sampled=True,
            )
            for n, start, tokens in parts
        ]

        def table(seq: Sequence) -> Any:
            return self._pages[int(seq.id) * self._each : (int(seq.id) + 1) * self._each]

        batch = inputs_to_device(build_step_inputs(chunks, table), torch.device("cpu"))
        logits = self.decoder.forward(batch, self.cache)
        return list(torch.split(logits, [len(tokens) for _, _, tokens in parts]))


def _sequence(number: int) -> Sequence:
    return Sequence(
        id=str(number), tokens=[], num_prompt=0, params=BASE_SAMPLING, ctx=MAX_LEN, max_len=MAX_LEN
    )
