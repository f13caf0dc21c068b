"""Build a CudaRunner from an executor, a KV cache and a tokenizer."""

from __future__ import annotations

import torch

from localgen.backends.cuda.device.options import CudaOptions
from localgen.backends.cuda.embeddings import Pooler
from localgen.backends.cuda.kv.page_pool import pages_for
from localgen.backends.cuda.kv.paged_cache import PagedCache
from localgen.backends.cuda.model.dummy import DummyTokenizer
from localgen.backends.cuda.model.source import ModelSource
from localgen.backends.cuda.runner import CudaRunner, StepExecutor, cuda_limits
from localgen.backends.cuda.steps.cuda_graphs import DeviceExecutor
from localgen.backends.errors import LoadFailed
from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.formats.hf.tokenizer import HfTokenizer
from localgen.backends.kv_store.store import PrefixStore
from localgen.backends.memory.kv_sizing import KVSize
from localgen.backends.sandbox import Sandbox
from localgen.backends.units import format_params

AnyTokenizer = HfTokenizer | DummyTokenizer


def load_tokenizer(
    source: ModelSource, options: CudaOptions, sandbox: Sandbox | None = None
) -> AnyTokenizer:
    """Load the tokenizer of a model. sandbox: as in ModelSource.load_tokenizer.

    Raises LoadFailed if there is none, unless the weights are random (--dummy).
    """
    try:
        return source.load_tokenizer(sandbox)
    except LoadFailed:
        if options.dummy:  # needs only a config.json
            return DummyTokenizer(source.spec.vocab_size)
        raise


def build_cuda_runner(
    source: ModelSource,
    options: CudaOptions,
    tokenizer: AnyTokenizer,
    executor: StepExecutor,
    size: KVSize,
    *,
    run_ahead: bool,
    store: PrefixStore | None = None,
) -> CudaRunner:
    """Build the runner.

    run_ahead: launch decode steps before they are requested. store: gets the prefixes that the KV
    cache evicts.
    """
    return CudaRunner(
        executor,
        PagedCache(
            pages_for(size.kv_tokens),
            prefix_cache=options.prefix_cache,
            store=store,
            memory=executor.cache if isinstance(executor, DeviceExecutor) else None,
        ),
        cuda_limits(
            max_seqs=options.parallel,
            max_batch_tokens=options.max_batch_tokens,
            max_len=size.ctx,
            kv_tokens=size.kv_tokens,
            prefix_cache=options.prefix_cache,
        ),
        lambda token: tokenizer.piece(token).decode("utf-8", "replace"),
        run_ahead=run_ahead,
        pooler=Pooler.from_folder(source.path),
    )


def describe_model(spec: ModelSpec, dtype: torch.dtype) -> str:
    """Return architecture, parameter count and weight format, e.g. `Llama 8.0B bfloat16`."""
    kind = spec.architecture.removesuffix("ForCausalLM")
    quant = spec.quant
    how = str(dtype).removeprefix("torch.") if quant is None else quant.method
    return f"{kind} {format_params(spec.num_params)} {how}"
