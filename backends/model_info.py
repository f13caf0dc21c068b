"""Load requests and load options, and the description of a loaded model."""

from __future__ import annotations

from dataclasses import dataclass, field

from localgen.backends.sampling_params import SamplingParams

# values of LoadOptions.draft that are not model names
DRAFT_NGRAM, DRAFT_NONE, DRAFT_AUTO = "ngram", "none", "auto"
DRAFT_KEYWORDS = (DRAFT_NGRAM, DRAFT_NONE, DRAFT_AUTO)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Load options. None: chosen for this machine and reported in ModelInfo.

    backend: auto, llamacpp or cuda.
    device: cuda, cuda:N or cpu.
    tp: tensor-parallel size, the number of GPUs that each layer is split over.
    dummy: random weights of the model's shapes, for benchmarks.
    ctx: context length in tokens.
    kv_tokens: size of the KV cache in tokens, at least ctx.
    kv_unified: True shares the KV cache among all sequences, False splits it into one equal part
    per sequence. None: split if parallel and ctx are given, kv_tokens is not, and the parts fit;
    else shared.
    parallel: maximum number of running sequences.
    gpu_layers: layers on the GPU, -1 for all.
    flash_attn: auto, on or off.
    cache_type_k, cache_type_v: f16, q8_0, …
    repack: rearrange weights for this CPU, as llama.cpp does.
    max_batch_tokens: maximum number of tokens in a step.
    itl_target_ms: target inter-token latency; prefill chunks shrink to keep steps below it.
    max_queue: maximum number of waiting requests; further ones are rejected.
    draft: source of draft tokens for speculative decoding: ngram (copied from the text), a draft
    model, none, or auto for the catalog's draft model.
    draft_max: maximum number of draft tokens per sequence and step.
    kv_ram, kv_disk: bytes of RAM, and of disk for all models together, for prefixes that are no
    longer in the KV cache; 0 for none.
    kv_listen, kv_peer: address where other engines of this model fetch such prefixes, and address
    of the engine that this one fetches from: HOST:PORT, or the path of a Unix socket.
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
    kv_ram: int | None = None
    kv_disk: int | None = None
    kv_listen: str | None = None
    kv_peer: str | None = None


def option_flag(option: str) -> str:
    """The command-line flag of a load option, for messages."""
    return "--batch-size" if option == "max_batch_tokens" else "--" + option.replace("_", "-")


@dataclass(frozen=True, slots=True)
class DraftModelRequest:
    """A draft model to load. optional: if it cannot be loaded, load the target model without it and
    add a note with the reason.
    """

    name: str
    path: str
    optional: bool = False


@dataclass(frozen=True, slots=True)
class KVShare:
    """Where the engines of one cluster let each other fetch prefixes.

    listen: HOST:0, or a folder with a slash at its end, in which each model has a socket. key: that
    all of them have.
    """

    listen: str
    key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ModelLoadRequest:
    """A model to load, its name and its options.

    memory_bytes: limit for weights and KV cache, or None for the machine's available memory.
    draft: the draft model that options.draft resolves to, or None for no draft model.
    sampling: defaults of the model, if its file has none.
    kv_dir: folder of the prefixes on disk, private to the user, or None to keep none outside of the
    KV cache. kv_share: for models whose prefixes can be shared, or None.
    """

    name: str
    path: str
    options: LoadOptions
    memory_bytes: int | None = None
    draft: DraftModelRequest | None = None
    sampling: SamplingParams | None = None
    kv_dir: str | None = None
    kv_share: KVShare | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUsage:
    """Bytes allocated by a runner, or None if unknown. work: compute buffers."""

    weights: int | None = None
    kv: int | None = None
    work: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftInfo:
    """A loaded draft model; fields as in ModelInfo."""

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
    """A loaded model and its resolved options.

    ctx: context length.
    kv_tokens: size of the KV cache in tokens.
    processor: as shown by `ps`, e.g. `100% CPU`.
    options: the resolved load options, or None if the backend does not have that option.
    notes: explanations and warnings for the user.
    backend_reason: why this backend was chosen.
    generates: False for an embedding-only model.
    embedding_width: dimensions of an embedding, or 0 if embeddings are not supported.
    url: address of a remote server, empty for the local one; values that a remote server does not
    report are 0 or empty.
    kv_bytes, work_bytes: estimates made before loading; memory: bytes allocated.
    draft: the draft model, whose memory is not included.
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
