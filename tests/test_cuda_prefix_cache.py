"""The decoder's logits equal transformers' with shared pages: prefix hit, preemption."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cuda_models import ARCHITECTURES, make, random_text
from torch import Tensor

from localgen.backends.cuda.kv.page_pool import PAGE_TOKENS
from localgen.backends.cuda.kv.paged_cache import PagedCache
from localgen.backends.cuda.model.batch import build_step_inputs
from localgen.backends.cuda.model.decoder import Decoder, KVCache
from localgen.backends.cuda.model.weights import load_weights
from localgen.backends.cuda.runner import StepExecutor
from localgen.backends.cuda.steps.cuda_graphs import DeviceExecutor
from localgen.backends.formats.hf.config import read_hf_config
from localgen.backends.runner.interface import Chunk
from localgen.backends.runner.sequence import Sequence
from localgen.backends.sampling_params import BASE_SAMPLING

TOLERANCE = 2e-4
PAGES, MAX_LEN = 20, 512
# LongRoPE has two tables: transformers switches by length, we choose one at load
MODELS = [name for name in ARCHITECTURES if name != "phi4 mini"]


class DecoderBench:
    """A random model, ours and transformers', and a pool that is hardly large enough."""

    def __init__(self, name: str, folder: Path) -> None:
        self.theirs = make(name, folder)
        self.steps = self.make_steps(folder)
        self.room = PagedCache(PAGES, prefix_cache=True)

    def make_steps(self, folder: Path) -> StepExecutor:
        spec = read_hf_config(folder)
        weights = load_weights(folder, spec, device="cpu", dtype=torch.float32)
        cache = KVCache.zeros(spec, PAGES, device="cpu", dtype=torch.float32)
        return DeviceExecutor(Decoder(spec, weights, MAX_LEN), cache, use_cuda_graphs=False)

    def admit(self, tokens: list[int]) -> Sequence:
        seq = Sequence(
            id="s",
            tokens=list(tokens),
            num_prompt=len(tokens),
            params=BASE_SAMPLING,
            ctx=MAX_LEN,
            max_len=MAX_LEN,
        )
        seq.num_computed = self.room.admit(seq, spare=0)
        return seq

    def compute(self, *seqs: Sequence) -> None:
        """Compute all uncomputed tokens of these sequences in one step; compare with
        transformers.
        """
        chunks = []
        for seq in seqs:
            assert self.room.grow(seq, seq.num_uncomputed)
            owed = seq.tokens[seq.num_computed :]
            chunks.append(
                Chunk(
                    seq=seq,
                    start=seq.num_computed,
                    tokens=owed,
                    num_drafts=len(owed) - 1,
                    is_sampled=True,
                )
            )
        self.room.copy_pending(self.steps.copy_pages)
        logits = self.steps.run(build_step_inputs(chunks, self.room.page_table))
        parts = torch.split(logits, [len(chunk) for chunk in chunks])
        for chunk, ours in zip(chunks, parts, strict=True):
            error = (ours - self.expected(chunk)).abs().max().item()
            assert error < TOLERANCE, error
            chunk.seq.num_computed = len(chunk.seq.tokens)
            self.room.check()

    @torch.inference_mode()
    def expected(self, chunk: Chunk) -> Tensor:
        logits: Tensor = self.theirs(torch.tensor([chunk.seq.tokens])).logits[0]
        return logits[chunk.start : chunk.start + len(chunk)].float()


@pytest.fixture(scope="module", params=MODELS)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DecoderBench:
    return DecoderBench(request.param, tmp_path_factory.mktemp(request.param))


def test_prefix_of_an_ended_sequence_is_reused(bench: DecoderBench) -> None:
    text = random_text(seed=1, length=70)
    first = bench.admit(text)
    bench.compute(first)
    bench.room.release(first, keep=True)
    second = bench.admit([*text[:50], *random_text(seed=2, length=30)])
    assert second.num_computed == 50 // PAGE_TOKENS * PAGE_TOKENS
    bench.compute(second)
    bench.room.release(second, keep=False)


def test_preempted_sequence_is_recomputed(bench: DecoderBench) -> None:
    seq = bench.admit(random_text(seed=5, length=60))
    other = bench.admit(random_text(seed=6, length=40))
    bench.compute(seq, other)
    bench.room.release(seq, keep=True)
    # takes nearly all pages, those of the cached prefix included
    large = bench.admit(random_text(seed=7, length=PAGE_TOKENS * (PAGES - 5)))
    bench.compute(large)
    bench.room.release(large, keep=False)
    again = bench.admit([*seq.tokens, *random_text(seed=8, length=3)])
    assert again.num_computed < 48, "some of it was taken"
    bench.compute(again)
    other.tokens += random_text(seed=9, length=4)
    bench.compute(other)
    for running in (again, other):
        bench.room.release(running, keep=False)
    bench.room.check()
