"""Load options, resolved for this machine and this build of llama.cpp."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import llama_cpp.llama_cpp as C

from localgen.backends.errors import InvalidRequest
from localgen.backends.llamacpp.library import FLASH_ATTN, MAX_SEQUENCES, supports_gpu
from localgen.backends.memory.load_defaults import DEFAULT_SPLIT_PARTS, LLAMACPP_DEFAULTS
from localgen.backends.memory.load_limits import validate_cache_types, validate_load_options
from localgen.backends.memory.system import num_physical_cores
from localgen.backends.model_info import DRAFT_NGRAM, LoadOptions
from localgen.backends.types import MAX_DRAFT_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaOptions:
    """LoadOptions with all defaults resolved, except ctx and kv_tokens, which need the model."""

    backend: str = "llamacpp"
    device: str | None = None
    parallel: int = LLAMACPP_DEFAULTS.parallel
    gpu_layers: int = 0
    threads: int = 1
    threads_batch: int = 1
    # threads is the maximum; fewer are used while other processes need the cores
    adapts_threads: bool = False
    flash_attn: str = "auto"
    cache_type_k: str = LLAMACPP_DEFAULTS.cache_type
    cache_type_v: str = LLAMACPP_DEFAULTS.cache_type
    mmap: bool = True
    mlock: bool = False
    repack: bool = True
    prefix_cache: bool = True
    kv_unified: bool = True
    max_batch_tokens: int = LLAMACPP_DEFAULTS.max_batch_tokens
    itl_target_ms: float = 2000.0
    max_queue: int = 512
    ctx: int | None = None
    kv_tokens: int | None = None
    chat_template: str | None = None
    draft: str = DRAFT_NGRAM
    draft_max: int = MAX_DRAFT_TOKENS
    # 0 until a PrefixStore is opened
    kv_ram: int = 0
    kv_disk: int = 0
    kv_listen: str | None = None
    kv_peer: str | None = None

    def to_load_options(self, ctx: int, kv_tokens: int) -> LoadOptions:
        """The resolved options, as reported to clients."""
        options = asdict(self) | {"ctx": ctx, "kv_tokens": kv_tokens}
        del options["adapts_threads"]
        return LoadOptions(**options)


def resolve_llama_options(requested: LoadOptions) -> LlamaOptions:
    """Resolve the requested options and fill in defaults. Raises InvalidRequest."""
    validate_load_options(requested)
    validate_cache_types(requested, "llamacpp")
    gpu = supports_gpu()
    given = {name: value for name, value in asdict(requested).items() if value is not None}
    given |= {"backend": "llamacpp"}
    if given.pop("dummy", False):
        raise InvalidRequest(
            "dummy weights are an option of the cuda backend: leave --dummy out", param="dummy"
        )
    if given.pop("tp", 1) != 1:
        raise InvalidRequest(
            "--tp is an option of the cuda backend: leave it out, or use --backend cuda", param="tp"
        )
    threads = requested.threads or num_physical_cores()
    chosen = {
        "gpu_layers": -1 if gpu and requested.device != "cpu" else 0,
        "threads": threads,
        "threads_batch": threads,
        "adapts_threads": requested.threads is None and requested.threads_batch is None,
        "mmap": bool(C.llama_supports_mmap()),
        "parallel": DEFAULT_SPLIT_PARTS
        if requested.kv_unified is False
        else LLAMACPP_DEFAULTS.parallel,
    }
    settings = LlamaOptions(**(chosen | given))
    _validate(settings, gpu)
    return settings


def _validate(options: LlamaOptions, has_gpu: bool) -> None:
    """Raise InvalidRequest for options out of range or not supported by this build of llama.cpp."""
    if options.parallel > MAX_SEQUENCES:
        raise InvalidRequest(
            f"--parallel is {options.parallel}, llama.cpp allows {MAX_SEQUENCES}", param="parallel"
        )
    if options.max_batch_tokens < options.parallel:
        raise InvalidRequest(
            f"--batch-size {options.max_batch_tokens} is less than --parallel "
            f"{options.parallel}: each running request needs a token in every step",
            param="max_batch_tokens",
        )
    if options.flash_attn not in FLASH_ATTN:
        raise InvalidRequest(
            f"--flash-attn is {options.flash_attn!r}, it must be one of {', '.join(FLASH_ATTN)}",
            param="flash_attn",
        )
    if options.device not in (None, "cpu"):
        raise InvalidRequest(
            f"--device is {options.device!r}: llama.cpp accepts only cpu; use -ngl for GPU layers",
            param="device",
        )
    if options.device == "cpu" and options.gpu_layers:
        raise InvalidRequest(
            f"--gpu-layers is {options.gpu_layers} but the device is cpu: "
            "leave --device or -ngl out",
            param="gpu_layers",
        )
    if options.gpu_layers and not has_gpu:
        raise InvalidRequest(
            f"--gpu-layers is {options.gpu_layers}, but this build of llama.cpp has no "
            "GPU support: leave it out, or install llama-cpp-python built for your GPU "
            "(see the README)",
            param="gpu_layers",
        )
    if options.flash_attn == "off" and options.cache_type_v not in ("f32", "f16", "bf16"):
        raise InvalidRequest(
            f"--cache-type-v {options.cache_type_v} needs flash attention: "
            "use --flash-attn auto, or --cache-type-v f16",
            param="cache_type_v",
        )
