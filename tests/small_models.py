"""Random models with a small vocabulary in both runners, and their answers with drafts.

Their tokens are meaningless but fast, so that distributions can be tested.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Protocol

import gguf
import numpy as np
import torch
from cuda_configs import write_config
from numpy.typing import NDArray

from localgen.backends.cuda.embeddings import Pooler
from localgen.backends.cuda.kv.page_pool import pages_for
from localgen.backends.cuda.kv.paged_cache import PagedCache
from localgen.backends.cuda.model.batch import build_step_inputs
from localgen.backends.cuda.model.decoder import Decoder, KVCache
from localgen.backends.cuda.model.linear import DenseLinear
from localgen.backends.cuda.model.weights import random_weights
from localgen.backends.cuda.runner import CudaRunner, cuda_limits
from localgen.backends.cuda.steps.cuda_graphs import DeviceExecutor
from localgen.backends.engine.scheduler import Scheduler
from localgen.backends.engine.speculation.drafter import Drafter
from localgen.backends.engine.speculation.policy import Speculation
from localgen.backends.engine.token_budget import TokenBudget
from localgen.backends.formats.hf.config import read_hf_config
from localgen.backends.llamacpp.loader import load_llamacpp_model
from localgen.backends.llamacpp.runner import LlamaRunner
from localgen.backends.model_info import LoadOptions, ModelLoadRequest
from localgen.backends.runner.interface import Chunk, ModelRunner
from localgen.backends.runner.sequence import Sequence
from localgen.backends.sampling_params import SamplingParams

VOCAB, CTX, DRAFTS = 64, 256, 2
_WIDTH, _SEQS = 32, 64
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]

Rows = NDArray[np.float64]


class Small(Protocol):
    """A model in a runner."""

    @property
    def runner(self) -> ModelRunner: ...

    def logits(self, tokens: list[int]) -> Rows:
        """Logits after each of these tokens, [tokens, VOCAB]."""
        ...


class SmallCuda:
    """In the CUDA runner on the CPU. noise: how far the head deviates from that with noise 0."""

    runner: CudaRunner

    def __init__(self, folder: Path, noise: float = 0.0, *, kv_tokens: int, ctx: int = CTX) -> None:
        config = write_config(folder, "llama", vocab_size=VOCAB, num_hidden_layers=1)
        spec = read_hf_config(config)
        weights = random_weights(spec, device="cpu", dtype=torch.float32, seed=1)
        weights.embed.mul_(50)
        assert isinstance(weights.head, DenseLinear)
        weights.head.weight.mul_(13)
        generator = torch.Generator().manual_seed(2)
        moved = torch.randn(weights.head.weight.shape, generator=generator)
        weights.head.weight.add_(noise * 0.26 * moved)
        cache = KVCache.zeros(spec, pages_for(kv_tokens), device="cpu", dtype=torch.float32)
        self._steps = DeviceExecutor(Decoder(spec, weights, ctx), cache, use_cuda_graphs=False)
        self.runner = CudaRunner(
            self._steps,
            PagedCache(pages_for(kv_tokens), prefix_cache=True),
            cuda_limits(
                max_seqs=2 * _SEQS,
                max_batch_tokens=4096,
                max_len=ctx,
                kv_tokens=kv_tokens,
                prefix_cache=True,
            ),
            str,
            run_ahead=False,
            pooler=Pooler(),
        )

    def logits(self, tokens: list[int]) -> Rows:
        """As Small.logits."""
        seq = _whole(tokens)
        self.runner.admit(seq, spare=0)
        chunk = Chunk(seq=seq, start=0, tokens=tokens, num_drafts=len(tokens) - 1, is_sampled=True)
        found = self._steps.run(build_step_inputs([chunk], self.runner.kv_cache.page_table))
        self.runner.release(seq, keep=False)
        return found.double().numpy()


class SmallLlama:
    """In llama.cpp. noise: as in SmallCuda."""

    runner: LlamaRunner

    def __init__(self, folder: Path, noise: float = 0.0, *, kv_tokens: int, ctx: int = CTX) -> None:
        path = _random_gguf(folder / f"small-{noise}.gguf", noise)
        # in a shared cache, attention covers the tokens of all sequences
        has_room_for_all = kv_tokens >= _SEQS * ctx
        options = LoadOptions(
            kv_tokens=kv_tokens, ctx=ctx, parallel=_SEQS, threads=1, cache_type_k="f32",
            cache_type_v="f32", kv_unified=not has_room_for_all, flash_attn="off",
        )  # fmt: skip
        runner = load_llamacpp_model(
            ModelLoadRequest("small", str(path), options), lambda _share: None
        ).runner
        assert isinstance(runner, LlamaRunner)
        self.runner = runner

    def logits(self, tokens: list[int]) -> Rows:
        """As Small.logits."""
        runner, seq = self.runner, _whole(tokens)
        at = runner.admit(seq, spare=0)
        runner.rewind(seq, 0)
        rows, at = [], 0
        most = runner.limits.max_outputs
        while at < len(tokens):
            part = tokens[at : at + most]
            seq.num_computed = at
            assert runner.grow(seq, len(part))
            ticket = runner.launch(
                [Chunk(seq=seq, start=at, tokens=part, num_drafts=len(part) - 1, is_sampled=True)]
            )
            assert ticket.decode_future.result() == 0
            rows.append(runner._logits(len(part)).astype(np.float64))
            at += len(part)
        seq.num_computed = at
        runner.release(seq, keep=False)
        return np.concatenate(rows)


def _whole(tokens: list[int]) -> Sequence:
    return Sequence(
        id="whole",
        tokens=list(tokens),
        num_prompt=len(tokens),
        params=SamplingParams(temperature=0.0),
        ctx=CTX,
        max_len=CTX,
    )


def _random_gguf(target: Path, noise: float) -> Path:
    """A Llama of one layer whose tokens are single letters."""
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_block_count(1)
    writer.add_context_length(CTX)
    writer.add_embedding_length(_WIDTH)
    writer.add_feed_forward_length(_WIDTH)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(_WIDTH // 2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*(chr(ord("0") + i) for i in range(VOCAB - 1)), "01"])
    writer.add_token_types([gguf.TokenType.NORMAL] * VOCAB)
    writer.add_token_merges(["0 1"])
    writer.add_add_bos_token(False)
    random = np.random.default_rng(1)

    def normal(name: str, *shape: int, std: float) -> None:
        values = random.normal(0, std, shape)
        if name == "output":
            values += noise * np.random.default_rng(2).normal(0, std, shape)
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))

    normal("token_embd", VOCAB, _WIDTH, std=1.0)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        normal(f"blk.0.{name}", _WIDTH, _WIDTH, std=_WIDTH**-0.5)
    normal("output", VOCAB, _WIDTH, std=2 * _WIDTH**-0.5)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(_WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def generate(
    runner: ModelRunner,
    drafters: Seq[Drafter],
    asked: Callable[[int], SamplingParams],
    *,
    seqs: int,
    tokens: int,
    stochastic: bool,
) -> list[Sequence]:
    """Run `seqs` sequences of `tokens` tokens as Engine does, with DRAFTS in each step.

    asked: settings of each sequence.
    """
    budget = TokenBudget(4096, 1e9)
    scheduler = Scheduler(runner, budget=budget, max_queue=seqs)
    speculation = Speculation(drafters, budget.decode_costs, max_drafts=DRAFTS)
    limit = len(PROMPT) + tokens
    made = [
        Sequence(
            id=str(i),
            tokens=[*PROMPT],
            num_prompt=len(PROMPT),
            params=asked(i),
            ctx=limit,
            max_len=limit,
            can_sample_drafts=stochastic,
        )
        for i in range(seqs)
    ]
    for seq in made:
        scheduler.submit(seq)
    outputs = min(runner.limits.max_outputs, runner.limits.max_batch_tokens)
    while scheduler.has_work:
        for seq, proposal in speculation.propose(
            scheduler.decoding, max_outputs=outputs, max_prefill_tokens=256
        ).items():
            scheduler.set_drafts(seq, proposal)
        chunks = scheduler.plan()
        result = runner.collect(runner.launch(chunks))
        scheduler.apply(chunks, result, 1.0)
        speculation.observe(chunks, 1.0)
    speculation.propose([], max_outputs=0, max_prefill_tokens=0)  # forgets all
    return made
