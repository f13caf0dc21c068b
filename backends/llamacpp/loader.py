"""Load a GGUF file: settle every option for this machine, and say what was decided."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from localgen.backends import sampling_params
from localgen.backends.engine.drafters import check
from localgen.backends.engine.loaded_model import LoadedModel
from localgen.backends.engine.optional_draft import Attempt
from localgen.backends.errors import InvalidRequest, LoadFailed, LocalgenError, OutOfMemory
from localgen.backends.formats.architecture.model_shape import ModelShape
from localgen.backends.llamacpp import sizing
from localgen.backends.llamacpp.build_runner import assemble, max_donors, probe
from localgen.backends.llamacpp.devices import gpu_free_bytes
from localgen.backends.llamacpp.draft_model import Draft
from localgen.backends.llamacpp.encoder import load_encoder
from localgen.backends.llamacpp.library import library
from localgen.backends.llamacpp.native import Context, Model, NoCache
from localgen.backends.llamacpp.options import Settings, settle
from localgen.backends.llamacpp.vocab import Vocab
from localgen.backends.memory.kv_sizing import Size
from localgen.backends.memory.system import SPARED_BYTES, available_bytes
from localgen.backends.model_info import NGRAM, Load, LoadOptions, ModelInfo
from localgen.backends.text.template import ChatTemplate
from localgen.backends.types import BASE_SAMPLING, SamplingParams

_SAMPLING_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "xtc_probability": "general.sampling.xtc_probability",
    "xtc_threshold": "general.sampling.xtc_threshold",
    "repeat_last_n": "general.sampling.penalty_last_n",
    "repeat_penalty": "general.sampling.penalty_repeat",
    "mirostat": "general.sampling.mirostat",
    "mirostat_tau": "general.sampling.mirostat_tau",
    "mirostat_eta": "general.sampling.mirostat_eta",
}


def load(request: Load, on_progress: Callable[[float], None]) -> LoadedModel:
    """A Loader for engine.process. LocalgenError names the file or option at fault."""
    started_s = time.monotonic()
    path = Path(request.path)
    check(request)
    options = settle(request.options)
    model = Model(_existing(path), options, on_progress)
    _check_parts(model, options)
    unlocked = options.mlock and library().warned_of("mlock")
    vocab = Vocab(model)
    template, source = _template(model, vocab, options)
    shape = sizing.shape_of(model)
    attempt = Attempt(request.draft)
    companion = attempt.to(lambda: Draft(attempt.asked, options, model, vocab))
    options, size = _sized(model, shape, request, options, companion)
    try:
        context = _context(model, options, size)
    except NoCache:
        options = _without_draft(request, options, companion)
        return load_encoder(request, model, vocab, options, started_s=started_s)
    can_rewind = probe(model, vocab, context)
    draft = None
    if companion is not None:
        draft = attempt.to(partial(companion.start, options, size, context.thread))
    share = can_rewind and options.prefix_cache
    runner = assemble(model, context, vocab, options, ctx=size.ctx, share=share)
    sampling_defaults, sampling_notes = _sampling(model)
    info = ModelInfo(
        name=request.name,
        path=str(path),
        architecture=model.architecture,
        description=model.description,
        params=model.num_params,
        size_bytes=model.size_bytes,
        vocab=vocab.vocab_size,
        ctx_train=model.ctx_train,
        ctx=size.ctx,
        kv_tokens=context.kv_tokens,
        max_seqs=options.parallel,
        kv_bytes=int(context.kv_tokens * sizing.kv_bytes_per_token(shape, options)),
        layers=model.layers,
        backend="llamacpp",
        processor=_processor(model, options),
        work_bytes=sizing.fixed_bytes(shape, options, context.n_seq_max)
        + context.kv_tokens * sizing.work_token_bytes(shape, options),
        memory=model.buffers.use(),
        load_ms=(time.monotonic() - started_s) * 1e3,
        can_rewind=can_rewind,
        chat_template=source,
        sampling=sampling_defaults,
        options=attempt.in_force(options.with_sizes(size.ctx, context.kv_tokens), draft),
        embedding_width=model.embedding_width,
        notes=(
            *size.notes,
            *sampling_notes,
            *_oddities(options, request.options, size.ctx, unlocked, can_rewind, source),
            *attempt.notes(draft, ctx=size.ctx, size_bytes=model.size_bytes),
        ),
        draft=draft.info if draft else None,
    )
    return LoadedModel(info=info, runner=runner, tokenizer=vocab, template=template, draft=draft)


def _context(model: Model, options: Settings, size: Size) -> Context:
    """With ids for all sequences and kept prefixes, and room for the drafts of one. NoCache."""
    lanes = options.parallel + max_donors(model, options)
    return Context(
        model,
        options,
        kv_tokens=size.kv_tokens,
        n_seq_max=lanes,
        n_outputs=max(lanes, options.parallel + options.draft_max),
    )


def _without_draft(request: Load, options: Settings, companion: Draft | None) -> Settings:
    """The options of a model that writes no text. InvalidRequest: a model is to draft for it."""
    if request.draft is not None and not request.draft.optional:
        raise InvalidRequest(
            f"{request.name} makes embeddings and no text, so nothing drafts for it: "
            "leave --draft out",
            param="draft",
        )
    if companion is not None:
        companion.close()
    return replace(options, draft=NGRAM if request.draft else options.draft)


def _oddities(
    options: Settings,
    asked: LoadOptions,
    ctx: int,
    unlocked: bool,
    can_rewind: bool,
    template: str | None,
) -> list[str]:
    """What is not as a user may expect it."""
    in_parts = not options.kv_unified and asked.kv_unified is None
    oddities = {
        "the weights could not be locked in memory (ulimit -l): they may be swapped": unlocked,
        "weights are not repacked for this CPU: prompts are read more slowly": not options.repack,
        "this architecture cannot rewind its cache: prompts are not reused": not can_rewind,
        "no chat template came with the model: chat needs --chat-template FILE": template is None,
        f"the KV cache is in {options.parallel} parts of {ctx:,} tokens; "
        "--kv-unified shares one pool": in_parts,
    }
    return [note for note, so in oddities.items() if so]


def _existing(path: Path) -> Path:
    if not path.is_file():
        what = "it is a folder, not a .gguf file" if path.is_dir() else "no such file"
        raise LoadFailed(f"cannot load {path}: {what}")
    return path


def _check_parts(model: Model, options: Settings) -> None:
    """InvalidRequest if the model's cache cannot be copied from one part to another."""
    if not options.kv_unified and (model.is_recurrent or model.has_window):
        why = "keeps a state" if model.is_recurrent else "has layers with a sliding window"
        raise InvalidRequest(
            f"--no-kv-unified is not for {model.path.name}, which {why}: leave it out",
            param="kv_unified",
        )


def _sized(
    model: Model, shape: ModelShape, request: Load, options: Settings, draft: Draft | None
) -> tuple[Settings, Size]:
    """The layout of the cache, and how large it gets with a draft model's beside it.

    There is a part for each sequence where -np and --ctx together say what they need, as
    llama-server has it, and it can be had: attention then looks at nobody else's tokens.
    """
    free = _free_bytes(model, shape, options, request, draft)
    beside = draft.token_bytes if draft else 0.0
    asked = request.options
    sized = None not in (asked.parallel, asked.ctx) and asked.kv_tokens is None
    rigid = model.is_recurrent or model.has_window
    if sized and not rigid and asked.kv_unified is None:
        in_parts = replace(options, kv_unified=False)
        with suppress(OutOfMemory):
            return in_parts, sizing.choose(
                model, shape, in_parts, free_bytes=free, draft_token_bytes=beside
            )
    size = sizing.choose(model, shape, options, free_bytes=free, draft_token_bytes=beside)
    return options, size


def _free_bytes(
    model: Model, shape: ModelShape, options: Settings, request: Load, draft: Draft | None
) -> int:
    """Memory for a KV pool, which lies where the layers are.

    On a GPU the weights are in by now; on the CPU mmap reads them in later.
    """
    fixed = sizing.fixed_bytes(shape, options, options.parallel + max_donors(model, options))
    weights = model.size_bytes
    if draft is not None:
        fixed, weights = fixed + draft.fixed_bytes, weights + draft.weight_bytes
    gpu_free = gpu_free_bytes() if options.gpu_layers else None
    share = 0.0 if gpu_free is None else _gpu_share(model, options)
    most = available_bytes() - SPARED_BYTES - fixed
    if request.memory_bytes is not None:
        most = min(most, request.memory_bytes - fixed)
    room = [(most - weights * (1 - share)) / (1 - share)] if share < 1 else []
    if gpu_free is not None:
        room.append((gpu_free - SPARED_BYTES - fixed) / share)
    return max(0, int(min(room)))


def _template(
    model: Model, vocab: Vocab, options: Settings
) -> tuple[ChatTemplate | None, str | None]:
    source = options.chat_template or model.template
    if source is None:
        return None, None
    try:
        return ChatTemplate(source, bos=vocab.bos, eos=vocab.eos), source
    except InvalidRequest as error:
        if options.chat_template:
            raise
        raise LoadFailed(f"cannot load {model.path}: {error}") from error


def _sampling(model: Model) -> tuple[SamplingParams, tuple[str, ...]]:
    """The model's own sampling defaults, from its metadata, and notes on them."""
    found = {}
    try:
        for field, key in _SAMPLING_KEYS.items():
            value = model.number(key)
            if value is not None:
                found[field] = type(getattr(BASE_SAMPLING, field))(value)
        defaults = SamplingParams(**found)
        sampling_params.check(defaults.with_defaults(BASE_SAMPLING))
    except (LocalgenError, ValueError, OverflowError) as error:
        # or every request that names no settings of its own would fail
        return SamplingParams(), (f"the model's own sampling defaults are left out: {error}",)
    return defaults, ()


def _gpu_share(model: Model, options: Settings) -> float:
    """Share of the layers that run on a GPU."""
    all_layers = model.layers + 1  # llama.cpp counts the output layer too
    on_gpu = all_layers if options.gpu_layers < 0 else min(options.gpu_layers, all_layers)
    return on_gpu / all_layers


def _processor(model: Model, options: Settings) -> str:
    """As `ps` shows it: which share of the layers runs where."""
    share = round(100 * _gpu_share(model, options))
    if share in (0, 100):
        return "100% GPU" if share else "100% CPU"
    return f"{100 - share}%/{share}% CPU/GPU"
