"""Build a LlamaRunner from a model and a context, and test-run the model."""

from __future__ import annotations

import llama_cpp.llama_cpp as C
import numpy as np

from localgen.backends.errors import LoadFailed
from localgen.backends.kv_store.store import PrefixStore
from localgen.backends.llamacpp.batch import LlamaBatch
from localgen.backends.llamacpp.embeddings import LlamaEmbedder
from localgen.backends.llamacpp.library import MAX_SEQUENCES, llama_library
from localgen.backends.llamacpp.native import LlamaContext, LlamaModel
from localgen.backends.llamacpp.options import LlamaOptions
from localgen.backends.llamacpp.runner import LlamaRunner
from localgen.backends.llamacpp.shared_cache import SharedCache
from localgen.backends.llamacpp.slots import PrefixReusePolicy, SlotCache
from localgen.backends.llamacpp.split_cache import SplitCache
from localgen.backends.llamacpp.vocab import LlamaCppTokenizer
from localgen.backends.memory.load_defaults import LLAMACPP_DEFAULTS
from localgen.backends.runner.interface import Chunk
from localgen.backends.runner.sequence import Sequence
from localgen.backends.sampling_params import SamplingParams


def max_cached_prefixes(model: LlamaModel, options: LlamaOptions) -> int:
    """Number of extra sequence ids for cached prefixes.

    Returns 0 for a split cache, which caches prefixes in its slots, and where prefixes cannot be
    shared.
    """
    if not options.kv_unified or not options.prefix_cache or model.is_recurrent:
        return 0
    left = MAX_SEQUENCES - options.parallel - num_scratch_ids(options)
    return min(LLAMACPP_DEFAULTS.num_cached_prefixes, max(0, left))


def num_slots(model: LlamaModel, options: LlamaOptions) -> int:
    """Number of sequence ids for running sequences and cached prefixes."""
    return options.parallel + max_cached_prefixes(model, options)


def num_scratch_ids(options: LlamaOptions) -> int:
    """Number of sequence ids that a PrefixStore needs."""
    return int(bool(options.kv_ram or options.kv_disk))


def build_llama_runner(
    model: LlamaModel,
    context: LlamaContext,
    tokenizer: LlamaCppTokenizer,
    options: LlamaOptions,
    *,
    ctx: int,
    share_prefixes: bool,
    store: PrefixStore | None = None,
) -> LlamaRunner:
    """Build the runner. ctx: context length. share_prefixes: cache and reuse prompt prefixes.

    store: gets the prefixes that a unified cache evicts.
    """
    return LlamaRunner(
        model,
        context,
        tokenizer,
        kv_cache=_build_kv_cache(model, context, options, share_prefixes, store),
        max_seqs=options.parallel,
        max_len=ctx,
        can_rewind=share_prefixes,
        threads=options.threads,
        embedder=LlamaEmbedder(model, options, context.executor),
    )


def _build_kv_cache(
    model: LlamaModel,
    context: LlamaContext,
    options: LlamaOptions,
    share_prefixes: bool,
    store: PrefixStore | None,
) -> SlotCache:
    reuse = PrefixReusePolicy.for_model(model, options)
    if not options.kv_unified:
        return SplitCache(context, share_prefixes=share_prefixes, reuse=reuse)
    return SharedCache(
        context,
        max_seqs=options.parallel,
        max_cached_prefixes=max_cached_prefixes(model, options),
        share_prefixes=share_prefixes,
        reuse=reuse,
        store=store,
    )


def probe_rewind(model: LlamaModel, tokenizer: LlamaCppTokenizer, context: LlamaContext) -> bool:
    """Decode a few tokens and truncate them. Returns True if the model can rewind its KV cache.

    This also pages the weights in. Raises LoadFailed if this build of llama.cpp cannot run the
    model on this machine or its logits contain NaN.
    """
    seq = Sequence(
        id="probe", tokens=[0, 0, 0, 0], num_prompt=4, params=SamplingParams(), ctx=4, max_len=4
    )
    batch = LlamaBatch(4)
    batch.fill([Chunk(seq=seq, start=0, tokens=seq.tokens, is_sampled=True)], [0])
    if context.decode(batch.native).result():
        raise LoadFailed(f"cannot run {model.path}: {llama_library().reason()}")
    logits = C.llama_get_logits(context.handle)
    if np.isnan(np.ctypeslib.as_array(logits, (tokenizer.vocab_size,))).any():
        raise LoadFailed(f"cannot run {model.path}: its weights produce NaN")
    rewinds = not model.is_recurrent and context.truncate(0, 2) and context.last_position(0) == 1
    C.llama_memory_clear(context.memory, False)
    return rewinds
