"""A model as it is asked for, and as it was loaded."""

from __future__ import annotations

from dataclasses import dataclass

from localgen.backends.sampling_params import SamplingParams

# what LoadOptions.draft may be besides a model
DRAFT_NGRAM, DRAFT_NONE, DRAFT_AUTO = "ngram", "none", "auto"
DRAFT_KEYWORDS = (DRAFT_NGRAM, DRAFT_NONE, DRAFT_AUTO)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How a model is loaded. None: chosen for this machine and reported in ModelInfo.

    backend: auto, llamacpp or cuda. device: cuda, cuda:N or cpu. tp: among how many GPUs each layer
    is divided. dummy: random weights of the model's shapes, for benchmarks. ctx: longest sequence
    in tokens. kv_tokens: size of the KV cache, at least ctx.
    kv_unified: whether all sequences share it, or each has a part of its own. None: parts where
    parallel and ctx say how many and how large, shared otherwise.
    gpu_layers: -1 is all. flash_attn: auto, on or off. cache_type_k/_v: f16, q8_0, …
    repack: weights laid out anew for this CPU, as in llama.cpp. max_batch_tokens: most tokens in
    one step. itl_target_ms: prefill yields to keep decoding
    under this. max_queue: waiting requests beyond which new ones are refused.
    draft: who proposes tokens that are verified together: ngram (the text itself), none, or a
    model beside the text; auto: the one that the catalog knows. draft_max: most of them for one
    sequence in a step.
    """

    backend: str | None = None
    device: str | None = None
    tp: int | None = None
    dummy: bool | None = None
    ctx: int | None = None
    kv_tokens: int | None = None
    kv_unified: bool | None = None
    parallel: int | None = None
    gpu_layers: int | None = None
    threads: int | None = None
    threads_batch: int | None = None
    flash_attn: str | None = None
    cache_type_k: str | None = None
    cache_type_v: str | None = None
    mmap: bool | None = None
    mlock: bool | None = None
    repack: bool | None = None
    prefix_cache: bool | None = None
    max_batch_tokens: int | None = None
    itl_target_ms: float | None = None
    max_queue: int | None = None
    chat_template: str | None = None
    draft: str | None = None
    draft_max: int | None = None


@dataclass(frozen=True, slots=True)
class DraftModelRequest:
    """A model that is to draft for another. optional: where it cannot, that one is loaded without
    it, and a note says why."""

    name: str
    path: str
    optional: bool = False


@dataclass(frozen=True, slots=True)
class ModelLoadRequest:
    """What to load, under which name, how.

    memory_bytes: most that weights and KV pool may take; None: what the machine has. draft: the
    model that options.draft means; None: it means none.
    """

    name: str
    path: str
    options: LoadOptions
    memory_bytes: int | None = None
    draft: DraftModelRequest | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUsage:
    """Bytes that a runner has allocated, by its own account; None: it cannot tell.

    work: buffers of the computation.
    """

    weights: int | None = None
    kv: int | None = None
    work: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftInfo:
    """A draft model as it was loaded; all of it as in ModelInfo."""

    name: str
    path: str
    description: str
    size_bytes: int
    ctx: int
    kv_bytes: int
    work_bytes: int
    memory: MemoryUsage = MemoryUsage()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a loaded model is, and what was decided for it.

    ctx: longest sequence; kv_tokens: the pool; processor: as `ps` shows it, e.g. `100% CPU`.
    options: the load options in force; None: the backend has no such option. notes: why things
    are as they are. backend_reason: why this backend. generates: whether it can write an answer;
    a pure embedding model cannot. embedding_width: elements of a vector; 0: it makes none.
    url: where it is, if on a server that is not ours; what that one does not tell is then 0 or
    empty. kv_bytes, work_bytes: as estimated before loading; memory: as allocated. draft: the model
    that drafts for this one, whose bytes come on top.
    """

    name: str
    path: str
    architecture: str
    description: str
    params: int
    size_bytes: int
    vocab: int
    ctx_train: int
    ctx: int
    kv_tokens: int
    max_seqs: int
    kv_bytes: int
    layers: int
    backend: str
    processor: str
    load_ms: float
    can_rewind: bool
    chat_template: str | None
    sampling: SamplingParams
    options: LoadOptions
    notes: tuple[str, ...] = ()
    backend_reason: str = ""
    generates: bool = True
    embedding_width: int = 0
    url: str = ""
    work_bytes: int = 0
    memory: MemoryUsage = MemoryUsage()
    draft: DraftInfo | None = None
