"""Tokens and logits of a GGUF file, in llama.cpp and in localgen's decoder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np
import torch
from torch import Tensor

from localgen.backends.cuda.kv.page_pool import PAGE_TOKENS
from localgen.backends.cuda.model.batch import build_step_inputs, inputs_to_device
from localgen.backends.cuda.model.decoder import Decoder, KVCache
from localgen.backends.cuda.model.weights import DecoderWeights
from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.llamacpp.library import llama_library
from localgen.backends.llamacpp.vocab import LlamaCppTokenizer
from localgen.backends.runner.interface import Chunk
from localgen.backends.runner.sequence import Sequence
from localgen.backends.sampling_params import BASE_SAMPLING


def our_logits(spec: ModelSpec, weights: DecoderWeights, tokens: list[int], ctx: int) -> Tensor:
    """Logits of localgen's decoder, float32 [tokens, vocab]. ctx: a multiple of the page size."""
    cache = KVCache.zeros(spec, ctx // PAGE_TOKENS, device="cpu", dtype=torch.float32)
    seq = Sequence(id="0", tokens=[], num_prompt=0, params=BASE_SAMPLING, ctx=ctx, max_len=ctx)
    chunk = Chunk(seq=seq, start=0, tokens=tokens, num_drafts=len(tokens) - 1, is_sampled=True)
    pages = np.arange(ctx // PAGE_TOKENS, dtype=np.int32)
    batch = inputs_to_device(build_step_inputs([chunk], lambda _: pages), torch.device("cpu"))
    return Decoder(spec, weights, ctx).forward(batch, cache)


def llama_cpp_logits(path: Path, tokens: list[int], ctx: int) -> Tensor:
    """Logits of llama.cpp, float32 [tokens, vocab], with a KV cache in float32."""
    llama_library()
    model_params = C.llama_model_default_params()
    model_params.use_extra_bufts = False  # the file's weights, not repacked
    model = C.llama_model_load_from_file(str(path).encode(), model_params)
    assert model, llama_library().reason()
    params = C.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = ctx
    params.type_k = params.type_v = C.GGML_TYPE_F32
    params.flash_attn_type = 0
    params.n_threads = params.n_threads_batch = 1
    context = C.llama_init_from_model(model, params)
    batch = C.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
        batch.seq_id[i][0] = 0
    assert C.llama_decode(context, batch) == 0
    vocab = C.llama_vocab_n_tokens(C.llama_model_get_vocab(model))
    rows = [
        np.ctypeslib.as_array(C.llama_get_logits_ith(context, i), (vocab,)).copy()
        for i in range(len(tokens))
    ]
    C.llama_batch_free(batch)
    C.llama_free(context)
    C.llama_model_free(model)
    return torch.from_numpy(np.stack(rows))


@contextmanager
def llama_cpp_tokenizer(path: Path) -> Iterator[LlamaCppTokenizer]:
    """The tokenizer of localgen's llama.cpp backend, without the weights."""
    llama_library()
    params = C.llama_model_default_params()
    params.vocab_only = True
    model = C.llama_model_load_from_file(str(path).encode(), params)
    assert model, llama_library().reason()
    handles: Any = SimpleNamespace(handle=model, vocab=C.llama_model_get_vocab(model))
    yield LlamaCppTokenizer(handles)
    C.llama_model_free(model)


def widen(path: Path, target: Path) -> None:
    """Write a copy with float32 weights, for which llama.cpp does not round activations."""
    llama_library()
    params = C.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = C.LLAMA_FTYPE_ALL_F32, True
    assert C.llama_model_quantize(str(path).encode(), str(target).encode(), params) == 0
