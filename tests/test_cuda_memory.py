"""The memory reserved for steps is what they need, counted on the meta device."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from live_bytes import LiveBytes
from torch import Tensor

from localgen.backends.cuda.device import sizing
from localgen.backends.cuda.device.options import CudaOptions
from localgen.backends.cuda.embeddings import Pooler
from localgen.backends.cuda.kernels.attention.decode import MAX_DECODE_ROWS
from localgen.backends.cuda.kernels.launch import record_launches
from localgen.backends.cuda.kv.page_pool import PAGE_TOKENS
from localgen.backends.cuda.kv.paged_cache import PagedCache
from localgen.backends.cuda.model.batch import build_step_inputs, inputs_to_device
from localgen.backends.cuda.model.decoder import Decoder, KVCache
from localgen.backends.cuda.model.host_copy import packed_bytes
from localgen.backends.cuda.model.weights import random_weights
from localgen.backends.cuda.runner import CudaRunner, cuda_limits
from localgen.backends.cuda.steps.cuda_graphs import (
    CAPTURE_SIZES,
    DeviceExecutor,
    GraphShape,
    empty_inputs,
)
from localgen.backends.formats.architecture.model_spec import ModelSpec, QuantizationConfig
from localgen.backends.formats.hf.config import read_hf_config
from localgen.backends.memory import compute_buffers
from localgen.backends.memory.compute_buffers import CUBLAS_BYTES, cuda_graph_rows
from localgen.backends.runner.interface import Chunk
from localgen.backends.runner.sequence import Sequence
from localgen.backends.sampling_params import BASE_SAMPLING, SamplingParams

META, DTYPE = torch.device("meta"), torch.bfloat16
MAX_LEN, PAGES = 8192, 16_384
CONTEXT = 40  # tokens of a sequence before a step
INT4 = QuantizationConfig(method="awq", bits=4, group_size=128, zero_point=True)
FP8 = QuantizationConfig(method="fp8", bits=8)
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 2,  # all are alike
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "hidden_act": "silu",
}
LLAMA_1B = LLAMA_8B | {"hidden_size": 2048, "intermediate_size": 8192, "tie_word_embeddings": True}
QWEN_30B_A3B = LLAMA_8B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151_936,
}
GEMMA_12B = LLAMA_8B | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_attention_heads": 16,
    "head_dim": 256,
    "vocab_size": 262_208,
    "sliding_window": 1024,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
}
ON_A_GPU = CudaOptions()
FOR_FEW = CudaOptions(parallel=4, max_batch_tokens=2048)
FOR_ONE = CudaOptions(parallel=1, max_batch_tokens=512)
EVERYTHING = replace(
    BASE_SAMPLING, temperature=1.0, repeat_penalty=1.2, repeat_last_n=8, logprobs=5
)


class AnyText:
    """A grammar that allows every token."""

    def __init__(self, vocab_size: int) -> None:
        self._allowed = np.ones(vocab_size, np.bool_)

    def draft_masks(self, drafts: list[int], banned: object) -> list[Any]:
        return [self._allowed] * (1 + len(drafts))


class CountedModel:
    """A model without data, and the memory that its steps take."""

    def __init__(self, spec: ModelSpec, options: CudaOptions) -> None:
        self._spec, self._options = spec, options
        weights = random_weights(spec, device=META, dtype=DTYPE, seed=0)
        self._decoder = Decoder(spec, weights, MAX_LEN)
        self._cache = KVCache.zeros(spec, PAGES, device=META, dtype=DTYPE)
        self._executor = DeviceExecutor(self._decoder, self._cache, use_cuda_graphs=False)
        self._runner = CudaRunner(
            self._executor,
            PagedCache(PAGES, prefix_cache=True),
            cuda_limits(
                max_seqs=options.parallel,
                max_batch_tokens=options.max_batch_tokens,
                max_len=MAX_LEN,
                kv_tokens=PAGES * PAGE_TOKENS,
                prefix_cache=True,
            ),
            str,
            run_ahead=False,
            pooler=Pooler(),
        )

    def prompt_bytes(self) -> int:
        """Of the first step of a long prompt."""
        tokens = self._options.max_batch_tokens
        seq = self._sequence(tokens, BASE_SAMPLING)
        return self._launched_bytes([Chunk.of_uncomputed(seq, tokens)])

    def drafts_bytes(self) -> int:
        """Of a step of as many outputs as there may be, with all that makes sampling larger."""
        count, chunks = self._options.parallel, []
        per_seq, more = divmod(self._runner.limits.max_outputs - count, count)
        with LiveBytes() as given:
            for number in range(count):
                drafts = per_seq + (number < more)
                seq = self._sequence(CONTEXT + 1 + drafts, EVERYTHING)
                seq.matcher = AnyText(self._spec.vocab_size)  # type: ignore[assignment]
                chunk = Chunk(
                    seq=seq,
                    start=CONTEXT,
                    tokens=[1] * (1 + drafts),
                    num_drafts=drafts,
                    is_sampled=True,
                    draft_probs=[
                        torch.empty(self._spec.vocab_size, device=META) for _ in range(drafts)
                    ],
                )
                chunks.append(chunk)
            return given.now + self._launched_bytes(chunks)

    def _sequence(self, length: int, params: SamplingParams) -> Sequence:
        seq = Sequence(
            id="", tokens=[1] * length, num_prompt=1, params=params, ctx=MAX_LEN, max_len=MAX_LEN
        )
        self._runner.admit(seq, spare=0)
        return seq

    def _launched_bytes(self, chunks: list[Chunk]) -> int:
        with LiveBytes() as live:
            self._runner.launch(chunks)
        return live.peak

    def embedding_bytes(self) -> int:
        """Of a slice of a text."""
        tokens = self._options.max_batch_tokens
        seq = self._sequence(tokens, BASE_SAMPLING)
        chunk = Chunk(seq=seq, start=0, tokens=seq.tokens, num_drafts=tokens - 1, is_sampled=True)
        inputs = build_step_inputs([chunk], self._runner.kv_cache.page_table)
        with LiveBytes() as live:
            Pooler().pool_slice(chunk, self._executor.hidden_states(inputs))
        return live.peak

    def layers_bytes(self, rows: int) -> int:
        """Of the layers, for one row of each sequence."""
        batch = inputs_to_device(empty_inputs(GraphShape(rows, MAX_LEN)), META)
        with LiveBytes() as live:
            self._decoder.hidden_states(batch, self._cache)
        return live.peak

    def graph_bytes(self, logits: Tensor) -> int:
        """Of the largest graphs, without the logits. logits: of the largest graph."""
        sizes = [size for size in CAPTURE_SIZES if size < 2 * self._options.parallel]
        longest = self._spec.max_len
        shapes = [GraphShape(sizes[-1], longest)]
        shapes += [GraphShape(size, longest, 8) for size in sizes if size <= 16]
        peaks = []
        for shape in shapes:
            batch = inputs_to_device(empty_inputs(shape), META)
            with LiveBytes() as live:
                self._decoder.forward(batch, self._cache, logits[: shape.num_rows])
            peaks.append(live.peak)
        return max(peaks)


def spec_of(config: dict[str, Any], quant: QuantizationConfig | None, folder: Path) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config))
    return replace(read_hf_config(folder), quant=quant)


@pytest.mark.parametrize(
    ("config", "quant", "options"),
    [
        pytest.param(LLAMA_8B, None, ON_A_GPU, id="8B"),
        pytest.param(LLAMA_8B, INT4, ON_A_GPU, id="8B-int4"),
        pytest.param(LLAMA_8B, FP8, ON_A_GPU, id="8B-fp8"),
        pytest.param(LLAMA_1B, None, ON_A_GPU, id="1B"),
        pytest.param(QWEN_30B_A3B, None, ON_A_GPU, id="30B-A3B"),
        pytest.param(GEMMA_12B, None, ON_A_GPU, id="12B"),
        pytest.param(LLAMA_8B, None, FOR_FEW, id="8B-few"),
        pytest.param(LLAMA_8B, INT4, FOR_FEW, id="8B-int4-few"),
        pytest.param(LLAMA_8B, INT4, FOR_ONE, id="8B-int4-one"),
        pytest.param(QWEN_30B_A3B, None, FOR_FEW, id="30B-A3B-few"),
    ],
)
def test_reserved_memory_is_what_the_largest_steps_need(
    config: dict[str, Any],
    quant: QuantizationConfig | None,
    options: CudaOptions,
    tmp_path: Path,
) -> None:
    spec = spec_of(config, quant, tmp_path)
    with record_launches(90, 132):
        model = CountedModel(spec, options)
        rows = cuda_graph_rows(options.parallel)
        logits = torch.empty(rows, spec.vocab_size, device=META)
        inputs = packed_bytes(empty_inputs(GraphShape(rows, spec.max_len)).arrays)
        graphs = model.graph_bytes(logits)
        step = max(model.prompt_bytes(), model.drafts_bytes(), model.embedding_bytes())
    counted = step + graphs + inputs + logits.nbytes + CUBLAS_BYTES
    reserved = sizing.step_work_bytes(spec, options, DTYPE)
    assert counted <= reserved <= 1.25 * counted
    assert graphs <= sizing.graph_pool_bytes(spec, options, DTYPE)


def test_the_reserve_knows_the_limits_of_the_kernels(tmp_path: Path) -> None:
    assert compute_buffers.MAX_GRAPH_SEQ_ROWS == MAX_DECODE_ROWS
    spec, rows = spec_of(LLAMA_8B, INT4, tmp_path), compute_buffers._MAX_INT4_ROWS
    dequantized = 2 * spec.intermediate_size * spec.hidden_size * DTYPE.itemsize
    with record_launches(90, 132):
        model = CountedModel(spec, ON_A_GPU)
        assert model.layers_bytes(rows) < dequantized < model.layers_bytes(rows + 1)


def test_live_bytes_are_counted() -> None:
    with LiveBytes() as live:
        first = torch.empty(1000, device=META)
        view = first[:10]
        del first
        assert live.now == live.peak == 4096
        second = view + 1
        assert (live.now, live.peak) == (4096 + 512, 4096 + 512)
        del view
        second += 1
        gc.collect()
        assert (live.now, live.peak) == (512, 4096 + 512)
        torch.logsumexp(second, 0)
        assert live.peak == 4096 + 512
