"""A runner from its parts: weights, a context whose model is known to run, lanes."""

from __future__ import annotations

import llama_cpp.llama_cpp as C
import numpy as np

from localgen.backends.errors import LoadFailed
from localgen.backends.llamacpp.batch import Batch
from localgen.backends.llamacpp.embeddings import TextVectors
from localgen.backends.llamacpp.library import MAX_SEQUENCES, library
from localgen.backends.llamacpp.native import Context, Model
from localgen.backends.llamacpp.options import Settings
from localgen.backends.llamacpp.runner import LlamaRunner
from localgen.backends.llamacpp.shared_cache import SharedCells
from localgen.backends.llamacpp.slots import Lanes, Reuse
from localgen.backends.llamacpp.split_cache import Streams
from localgen.backends.llamacpp.vocab import Vocab
from localgen.backends.memory.load_defaults import LLAMACPP
from localgen.backends.runner.interface import Chunk
from localgen.backends.runner.sequence import Sequence
from localgen.backends.types import SamplingParams


def max_donors(model: Model, options: Settings) -> int:
    """Sequence ids for kept prefixes beside the running ones; parts are kept where they are."""
    if not options.kv_unified or not options.prefix_cache or model.is_recurrent:
        return 0
    return min(LLAMACPP.donors, MAX_SEQUENCES - options.parallel)


def assemble(
    model: Model, context: Context, vocab: Vocab, options: Settings, *, ctx: int, share: bool
) -> LlamaRunner:
    """ctx: longest sequence. share: whether prefixes are kept and shared."""
    return LlamaRunner(
        model,
        context,
        vocab,
        lanes=_lanes(model, context, options, share=share),
        max_seqs=options.parallel,
        max_len=ctx,
        can_rewind=share,
        threads=options.threads,
        vectors=TextVectors(model, options, context.thread),
    )


def _lanes(model: Model, context: Context, options: Settings, *, share: bool) -> Lanes:
    reuse = Reuse.of(model, options)
    if not options.kv_unified:
        return Streams(context, share=share, reuse=reuse)
    return SharedCells(
        context,
        max_seqs=options.parallel,
        max_donors=max_donors(model, options),
        share=share,
        reuse=reuse,
    )


def probe(model: Model, vocab: Vocab, context: Context) -> bool:
    """Compute a few tokens, cut the last ones off; whether that works.

    It also reads the weights in, and shows here rather than in mid-answer if this build of
    llama.cpp cannot run the model on this machine.
    """
    seq = Sequence(
        id="probe", tokens=[0, 0, 0, 0], num_prompt=4, params=SamplingParams(), ctx=4, limit=4
    )
    batch = Batch(4)
    batch.fill([Chunk(seq=seq, start=0, tokens=seq.tokens, samples=True)], [0])
    if context.decode(batch.native).result():
        raise LoadFailed(f"cannot run {model.path}: {library().reason()}")
    logits = C.llama_get_logits(context.handle)
    if np.isnan(np.ctypeslib.as_array(logits, (vocab.vocab_size,))).any():
        raise LoadFailed(f"cannot run {model.path}: its weights give results that are not numbers")
    rewinds = not model.is_recurrent and context.cut(0, 2) and context.last_position(0) == 1
    C.llama_memory_clear(context.memory, False)
    return rewinds
